"""What a child sends and its server cannot read, or the other way round: only its call fails."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ingress as serve
from ingress.exceptions import RayServeException
from ingress.handle import DeploymentHandle
from ingress.serving.processes.output import ChildOutput
from tests import process_attacks_app as attacks
from tests.process_attacks import asked
from tests.servers import PATIENCE_S, forking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="module")
def target() -> DeploymentHandle:
    bound = attacks.Target.bind()
    return serve.run(bound, name="target", route_prefix=None)


def test_news_that_cannot_be_read_are_told_once_and_change_nothing(
    target: DeploymentHandle, caplog: pytest.LogCaptureFixture
) -> None:
    pid = asked(target, "pid")

    for name in attacks.NEWS:
        asked(target, "attack", os.getpid(), name)

    status = serve.status().applications["target"]
    assert status.deployments["Target"].status == "HEALTHY"
    assert [each.stall_ms for each in status.deployments["Target"].replicas] == [{}]
    assert asked(target, "pid") == pid
    errors = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert all("a report of its process cannot be read" in each.getMessage() for each in errors)
    assert len(errors) == 2  # one for each kind: models, reports


def test_memory_that_is_shared_cannot_be_shortened_by_a_child(target: DeploymentHandle) -> None:
    large = bytes(1_000_000)
    assert asked(target, "same", large) == large

    refused = asked(target, "shorten", large)

    assert set(refused) == {"Operation not permitted"}
    assert len(refused) >= 2  # the page, and a segment
    assert asked(target, "same", large) == large  # in the same segment


UNREADABLE = {
    "no exception": "dict {}",
    "raises": "ValueError: it cannot be read",
    "raises what has no text": "BadReprError",
    "exits": "SystemExit",
    "interrupts": "KeyboardInterrupt",
    "is cancelled": "CancelledError",
}
UNFIT = {
    "is an interrupt": "KeyboardInterrupt",
    "is a cancellation": "CancelledError",
    "stops an iteration": "StopIteration",
    "exits without cause": "original",
}


@pytest.fixture
def beside(target: DeploymentHandle) -> Iterator[None]:
    """A call that runs in the same child, and is answered by it at the end."""
    pid = asked(target, "pid")
    response = target.wait.remote()
    yield
    asked(target, "end_wait")
    assert response.result(timeout_s=PATIENCE_S) == pid


@pytest.mark.reliability("P09")
@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("how", [*UNREADABLE, *UNFIT])
def test_an_error_that_cannot_be_read_fails_its_call_only(
    how: str, target: DeploymentHandle
) -> None:
    with pytest.raises(RayServeException) as raised:
        asked(target, "raise_odd", how)

    assert (UNREADABLE | UNFIT)[how] in str(raised.value)


@pytest.mark.usefixtures("beside")
def test_an_error_whose_pickle_is_none_arrives_without_it(target: DeploymentHandle) -> None:
    with pytest.raises(attacks.NoExceptionError, match="its text"):
        asked(target, "raise_no_exception")
    with pytest.raises(attacks.NoExceptionError, match="its text"):
        list(target.options(stream=True).stream_raise.remote("none"))


def test_an_error_that_is_false_ends_a_stream_as_any_other(target: DeploymentHandle) -> None:
    items = iter(target.options(stream=True).stream_raise.remote("empty"))
    assert next(items) == 1

    with pytest.raises(attacks.EmptyError, match="its text"):
        next(items)
    with pytest.raises(attacks.EmptyError, match="its text"):
        asked(target, "raise_empty")


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("how", [each for each in UNREADABLE if each != "no exception"])
def test_a_result_that_cannot_be_read_fails_its_call_only(
    how: str, target: DeploymentHandle
) -> None:
    with pytest.raises(RayServeException) as raised:
        asked(target, "return_odd", how)
    items = iter(target.options(stream=True).stream_odd.remote(how))
    assert next(items) == 1
    with pytest.raises(RayServeException) as item_raised:
        next(items)

    for error in (raised.value, item_raised.value):
        assert "cannot be read" in str(error)
        assert UNREADABLE[how] in str(error)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("how", [each for each in UNREADABLE if each != "no exception"])
def test_an_argument_that_a_child_cannot_read_fails_its_call_only(
    how: str, target: DeploymentHandle
) -> None:
    with pytest.raises(Exception) as raised:
        asked(target, "same", attacks.ElsewhereOdd(how))

    told = f"{type(raised.value).__name__} {attacks_text(raised.value)}"
    assert UNREADABLE[how].partition(":")[0] in told


def attacks_text(error: BaseException) -> str:
    try:
        return str(error)
    except RuntimeError:
        return ""


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("method", "arguments"),
    [("unsendable", []), ("bad_key", []), ("same", [attacks.Unsendable()])],
    ids=["result", "key of a result", "argument"],
)
def test_a_value_whose_pickling_exits_fails_its_call_only(
    method: str, arguments: list[Any], target: DeploymentHandle
) -> None:
    with pytest.raises(RayServeException, match="cannot be sent to another process"):
        asked(target, method, *arguments)


@pytest.fixture(scope="module")
def caller() -> DeploymentHandle:
    thread = attacks.Target.options(isolation="thread").bind()
    bound = attacks.Caller.bind(thread)
    return serve.run(bound, name="caller", route_prefix=None)


def test_an_answer_for_a_child_that_cannot_be_sent_or_read_fails_its_call_only(
    caller: DeploymentHandle,
) -> None:
    pid = asked(caller, "pid")

    assert "cannot be sent" in asked(caller, "ask", "unsendable")
    for how in UNREADABLE:
        if how != "no exception":
            assert "the result cannot be read" in asked(caller, "ask", "return_odd", how)
    assert asked(caller, "pid") == pid


def test_a_log_record_without_an_end_is_passed_on_as_text(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (out, stdout), (err, stderr) = os.pipe(), os.pipe()
    output = ChildOutput("mark", {"deployment": "Model", "replica": "0"})
    thread = threading.Thread(
        target=output.pass_on, args=(1, os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0))
    )
    thread.start()

    os.write(stderr, b"\x1emark+" + b"x" * 20_000)

    found = ""
    while len(found) < 20_000:  # while the child may still write more
        found += capfd.readouterr().err
    for each in (stdout, stderr):
        os.close(each)
    thread.join(PATIENCE_S)
    assert found.count("x") == 20_000
