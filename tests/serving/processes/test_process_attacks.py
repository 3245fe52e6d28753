"""Children whose user code writes to their own link. No application runs when a test begins."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

import ingress as serve
from ingress.exceptions import ReplicaUnavailableError
from tests import process_attacks_app as attacks
from tests.process_app import pids
from tests.process_attacks import asked, attacked_by_chance, is_as_before
from tests.process_kills import held
from tests.servers import PATIENCE_S, forking, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

BYSTANDER = "bystander"
ONE_OF_EACH_KIND = [
    "noise",
    "half-a-frame",
    "2-GB",
    "a-kind-that-there-is-not",
    "a-call-that-there-is-not",
    "a-segment-that-can-be-shortened",
    "descriptors-for-nothing",
]
OTHERS = [each for each in attacks.ATTACKS if each not in ONE_OF_EACH_KIND]


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


@pytest.mark.reliability("P09")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ONE_OF_EACH_KIND, id="of-each-kind"),
        pytest.param(OTHERS, id="all-others", marks=pytest.mark.thorough),
    ],
)
def test_a_child_that_sends_what_is_no_frame_is_replaced_and_takes_no_other_with_it(
    names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    serve.run(attacks.named([*names, BYSTANDER]), name="attacks", route_prefix=None)
    handles = {each: serve.get_deployment_handle(each, "attacks") for each in (*names, BYSTANDER)}
    before = {name: asked(each, "pid") for name, each in handles.items()}
    idle = held()
    beside = {name: each.wait.remote() for name, each in handles.items()}

    ends = {name: handles[name].attack.remote(os.getpid(), name) for name in names}

    for response in (*ends.values(), *[beside[name] for name in names]):
        with pytest.raises(ReplicaUnavailableError, match="was ended, because it sent"):
            response.result(timeout_s=PATIENCE_S)
    wait_until(lambda: all(pids(each, "attacks") not in ([], [before[each]]) for each in names))
    assert asked(handles[BYSTANDER], "end_wait") is None
    assert beside[BYSTANDER].result(timeout_s=PATIENCE_S) == before[BYSTANDER]
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert Counter(each.partition("#")[0] for each in errors) == Counter(names)  # each once
    wait_until(lambda: is_as_before(idle))


@pytest.mark.reliability("P09")
def test_frames_by_chance_end_no_more_than_their_link() -> None:
    attacked_by_chance(range(12))
