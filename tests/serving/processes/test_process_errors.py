"""Exceptions of replicas in processes: they arrive, and are logged, as from threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

import ingress as serve
from ingress.exceptions import RayServeException
from ingress.handle import DeploymentHandle
from tests import process_errors_app as errors_app
from tests.process_errors_app import KINDS, Failing, Missing, Wrapped, facts
from tests.servers import PATIENCE_S, forking, records_of, served, wait_until


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of an application whose failing deployments are processes."""
    with forking():
        port = served(errors_app.bound("process"), name="errors")
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def failing(url: str) -> DeploymentHandle:
    return serve.get_deployment_handle("First", "errors")


def error_of(failing: DeploymentHandle, method: str, *arguments: object) -> Exception:
    with pytest.raises(Exception) as raised:
        getattr(failing, method).remote(*arguments).result(timeout_s=PATIENCE_S)
    return raised.value


@pytest.mark.parametrize("name", KINDS)
def test_an_exception_of_any_class_arrives_as_it_was_raised(
    name: str, failing: DeploymentHandle
) -> None:
    assert facts(error_of(failing, "call", name)) == facts(KINDS[name]())


@pytest.mark.parametrize("name", ["keywords", "HTTPException"])
def test_it_arrives_so_from_streams_batches_and_results(
    name: str, failing: DeploymentHandle
) -> None:
    found: list[Any] = []
    items = iter(failing.options(stream=True).stream.remote(name))
    assert next(items) == 1
    with pytest.raises(Exception) as raised:
        next(items)
    found.append(raised.value)
    for method in ("batch", "items"):
        with ThreadPoolExecutor(2) as threads:
            made = [threads.submit(error_of, failing, method, name) for _ in range(2)]
            found += [each.result(PATIENCE_S) for each in made]
    found.append(failing.value.remote(name).result(timeout_s=PATIENCE_S))
    found += failing.options(stream=True).values.remote(name)

    assert [facts(each) for each in found] == [facts(KINDS[name]())] * 7


def test_causes_contexts_and_notes_arrive_once_also_if_they_are_attributes(
    failing: DeploymentHandle,
) -> None:
    error = error_of(failing, "wrap")

    assert isinstance(error, Wrapped)
    assert error.own is error
    assert error.lock.startswith("<unlocked")  # type: ignore[attr-defined]
    cause = error.__cause__
    assert isinstance(cause, Missing)
    assert cause is error.original is error.__context__
    assert cause.__notes__[0] == "a note"
    assert facts(cause.__context__ or error) == facts(KeyError("first"))
    assert not cause.__suppress_context__


def test_a_suppressed_context_stays_suppressed(failing: DeploymentHandle) -> None:
    error = error_of(failing, "suppress")

    assert (error.__cause__, error.__suppress_context__) == (None, True)


def test_a_class_that_the_server_does_not_find_is_described_with_its_cause(
    failing: DeploymentHandle,
) -> None:
    error = error_of(failing, "local")

    assert type(error) is RayServeException
    assert "LocalError: its text" in str(error)
    assert facts(error.__cause__ or error) == facts(KeyError("cause"))


def test_the_handler_of_an_app_and_the_status_are_those_of_threads(url: str) -> None:
    missing, http = (httpx.get(f"{url}/call/{name}") for name in ("keywords", "HTTPException"))

    assert (missing.status_code, missing.json()) == (410, {"missing": "a"})
    assert (http.status_code, http.json()) == (404, {"detail": {"not": "here"}})


@pytest.mark.parametrize("fails", ["__init__", "reconfigure"])
def test_the_error_of_a_start_arrives_as_it_was_raised(fails: str, url: str) -> None:
    deployment = serve.deployment(isolation="process", user_config={})(Failing)

    with pytest.raises(RuntimeError, match="Missing: no at the start") as raised:
        serve.run(deployment.bind("", fails), name="broken", route_prefix=None)

    assert isinstance(raised.value.__cause__, Missing)


def test_the_error_of_a_health_check_is_told_by_its_text(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = serve.deployment(isolation="process", health_check_period_s=0.1)(Failing)

    serve.run(deployment.bind("", "check_health"), name="ill", route_prefix=None)
    wait_until(lambda: any("check_health" in each.getMessage() for each in caplog.records))
    serve.delete("ill")

    told = [each.getMessage() for each in caplog.records]
    assert any("Missing: no of health (1 in a row)" in each for each in told)


@pytest.mark.parametrize("wraps", [False, True], ids=["passed on", "wrapped"])
def test_an_error_grows_by_its_frames_in_each_process_up_to_a_limit(
    wraps: bool, failing: DeploymentHandle
) -> None:
    def size(error: BaseException | None) -> tuple[int, int, int]:
        """Return the number of exceptions, their notes, and the lines of these."""
        if error is None:
            return 0, 0, 0
        notes = getattr(error, "__notes__", [])
        more = size(error.__cause__)
        return more[0] + 1, more[1] + len(notes), more[2] + sum(each.count("\n") for each in notes)

    one, two, eight = (size(error_of(failing, "hop", times, wraps)) for times in (1, 2, 8))

    assert [one[0], two[0], eight[0]] == ([2, 3, 9] if wraps else [1, 1, 1])
    assert (one[1], two[1], eight[1]) == (one[0], two[0], eight[0])
    assert eight[2] - two[2] <= 6 * (two[2] - one[2]) > 0
    if not wraps:
        assert size(error_of(failing, "hop", 40, wraps))[2] <= 40


def test_of_a_long_chain_the_newest_exceptions_and_the_first_arrive(
    failing: DeploymentHandle,
) -> None:
    chain = [error_of(failing, "chain", 1_000)]
    while (cause := chain[-1].__cause__) is not None:
        assert isinstance(cause, Exception)
        chain.append(cause)

    assert [each.args[0] for each in chain[:3]] == [999, 998, 997]
    assert facts(chain[-1]) == facts(KeyError("the first"))
    assert len(chain) < 110


def test_one_failure_has_one_short_text_the_same_as_from_threads(url: str) -> None:
    def text(base: str) -> str:
        with records_of("uvicorn.error") as kept:
            assert httpx.get(f"{base}/deep").status_code == 500
            wait_until(lambda: kept)
        (record,) = kept
        return str(record.exc_text)

    def text_of_socket(base: str) -> str:
        with records_of("uvicorn.error") as kept:
            with connect(f"ws{base.removeprefix('http')}/deep") as socket:
                with pytest.raises(ConnectionClosedError):
                    socket.recv(PATIENCE_S)
            wait_until(lambda: [each for each in kept if each.exc_info])
        (record,) = [each for each in kept if each.exc_info]
        return str(record.exc_text)

    serve.run(errors_app.bound("thread"), name="threads", route_prefix="/threads")
    bases = url, f"{url}/threads"
    (of_request, of_request_in_thread), (of_socket, of_socket_in_thread) = (
        [shown(each) for each in bases] for shown in (text, text_of_socket)
    )
    serve.delete("threads")

    assert (of_request, of_socket) == (of_request_in_thread, of_socket_in_thread)
    for each in (of_request, of_socket):
        assert each.count("\n") < 38
        assert "await self.failing.deep.remote()" in each
        assert each.index('raise Missing(item="at the bottom")') < each.index("LookupError: outer")
        assert "ingress/serving" not in each
