"""Options that change while a deployment runs: its replicas, its limits, its `user_config`."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ingress as serve
from ingress.engines import local_engine
from ingress.exceptions import BackPressureError
from ingress.handle import DeploymentHandle
from ingress.testing import Latch
from tests.fakes import Gate
from tests.servers import (
    PATIENCE_S,
    bind,
    change,
    get,
    overview,
    result,
    served,
    settle,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("shutdown")


def ids(name: str) -> list[str]:
    return [each.replica_id for each in overview(name).replicas if each.state == "RUNNING"]


def gated(gate: Gate, **options: Any) -> Any:
    @serve.deployment(**options)
    class Gated:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag
            self.config: Any = None

        async def reconfigure(self, config: Any) -> None:
            if config == "bad":
                raise ValueError("cannot be configured so")
            self.config = config
            gate.seen.append((self.tag, config))

        async def __call__(self) -> Any:
            gate.inside += 1
            await gate.go
            gate.inside -= 1
            return self.config

        async def where(self) -> str:
            return self.tag

    return bind(Gated)


def test_replicas_are_added_and_drained(gate: Gate) -> None:
    handle: DeploymentHandle = serve.run(gated(gate, max_ongoing_requests=1), route_prefix=None)
    inside = [handle.remote() for _ in range(3)]
    wait_until(lambda: gate.inside == 1)
    (changed,) = change("Gated", num_replicas=3)

    assert str(changed) == "Gated: num_replicas 1 -> 3"
    wait_until(lambda: gate.inside == 3)  # calls that waited have the new slots
    assert ids("Gated") == ["0", "1", "2"]
    change("Gated", num_replicas=1)
    with pytest.raises(TimeoutError):
        settle(0.2)  # the replicas that leave still work
    assert gate.inside == 3
    queued = [handle.where.remote() for _ in range(3)]
    gate.go.count_down()
    assert [result(each) for each in inside] == [None] * 3
    assert [result(each) for each in queued] == ["0"] * 3
    settle()
    assert [each.replica_id for each in overview("Gated").replicas] == ["0"]


def test_no_request_is_lost_as_replicas_change(switch_interval: None) -> None:
    @serve.deployment(max_ongoing_requests=4)
    class Brief:
        async def __call__(self) -> str:
            return "brief"

    port = served(bind(Brief))
    is_over = threading.Event()

    def ask() -> list[int]:
        statuses = []
        while not is_over.is_set():
            statuses.append(get(port, "/").status)
        return statuses

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask) for _ in range(4)]
        try:
            for _ in range(5):
                for count in (3, 1):
                    change("Brief", num_replicas=count)
                    settle()
        finally:
            is_over.set()
        statuses = [status for each in clients for status in each.result(PATIENCE_S)]

    assert len(statuses) > 20
    assert set(statuses) == {200}


def test_a_user_config_reaches_one_replica_after_another_without_their_requests(gate: Gate) -> None:
    handle = serve.run(
        gated(gate, num_replicas=2, user_config="old", max_ongoing_requests=1), route_prefix=None
    )
    inside = [handle.remote() for _ in range(2)]
    wait_until(lambda: gate.inside == 2)
    gate.seen.clear()
    change("Gated", user_config="new")
    waiting = [handle.remote() for _ in range(2)]
    with pytest.raises(TimeoutError):
        settle(0.2)

    assert gate.seen == []  # it waits for the call that runs
    gate.go.count_down()
    settle()
    assert sorted(gate.seen) == [("0", "new"), ("1", "new")]
    assert [result(each) for each in inside] == ["old"] * 2, "not in the middle of a request"
    assert {result(each) for each in waiting} <= {"old", "new"}
    assert {result(handle.remote()) for _ in range(8)} == {"new"}
    change("Gated", num_replicas=3)
    settle()
    assert gate.seen[-1] == ("2", "new")


@pytest.mark.reliability("B18")
def test_a_user_config_that_is_refused_leaves_the_one_before(gate: Gate) -> None:
    gate.go.count_down()
    handle = serve.run(gated(gate, num_replicas=2, user_config="old"), route_prefix=None)
    change("Gated", user_config="bad")
    wait_until(lambda: "cannot be configured so" in overview("Gated").message)
    settle()

    assert {result(handle.remote()) for _ in range(8)} == {"old"}
    assert "2" in ids("Gated")
    assert "the user_config before is in use" in overview("Gated").message
    change("Gated", user_config="good")
    settle()
    assert {result(handle.remote()) for _ in range(8)} == {"good"}
    assert overview("Gated").message == ""


def test_limits_change_in_place(gate: Gate) -> None:
    handle = serve.run(gated(gate, max_ongoing_requests=1), route_prefix=None)
    inside = [handle.remote() for _ in range(4)]
    wait_until(lambda: gate.inside == 1)
    change("Gated", max_ongoing_requests=3, max_queued_requests=1)
    wait_until(lambda: gate.inside == 3)
    assert overview("Gated").queued == 1
    with pytest.raises(BackPressureError, match="max_queued_requests=1"):
        result(handle.remote())
    change("Gated", max_ongoing_requests=2, max_queued_requests=-1)
    inside += [handle.remote() for _ in range(8)]
    gate.go.count_down()
    assert [result(each) for each in inside] == [None] * 12
    wait_until(lambda: overview("Gated").replicas[0].ongoing == 0)
    gate.go = Latch(timeout_s=PATIENCE_S)
    inside = [handle.remote() for _ in range(3)]
    wait_until(lambda: gate.inside == 2)
    assert overview("Gated").queued == 1
    gate.go.count_down()
    assert [result(each) for each in inside] == [None] * 3


def test_threads_follow_a_higher_limit() -> None:
    together = Latch(8, timeout_s=PATIENCE_S)

    @serve.deployment(max_ongoing_requests=1)
    class Deep:
        @serve.method(execution="threadpool")
        def __call__(self) -> str:
            together.count_down()
            together.wait()
            return "met"

    handle = serve.run(bind(Deep), route_prefix=None)
    met = [handle.remote() for _ in range(8)]
    change("Deep", max_ongoing_requests=8)
    assert [result(each) for each in met] == ["met"] * 8


@pytest.mark.parametrize(
    ("app", "options", "says"),
    [
        ("other", {"Gated": {"num_replicas": 2}}, "application 'other' does not run; running: 'd"),
        ("default", {"Other": {}}, "has no deployment 'Other'; its deployments: 'Gated'"),
        ("default", {"Gated": {"num_replicas": 0}}, "num_replicas must be"),
        ("default", {"Gated": {"lanes": {"db": 1}}}, "lanes of deployment 'Gated' cannot be"),
        ("default", {"Gated": {"max_queued_requests": 5, "loop": "own"}}, "loop of deployment"),
    ],
    ids=["application", "deployment", "value", "lanes", "one of several"],
)
def test_a_wrong_change_changes_nothing(gate: Gate, app: str, options: Any, says: str) -> None:
    serve.run(gated(gate), route_prefix=None)
    before = local_engine().applications["default"].ingress.config
    with pytest.raises(ValueError, match=says):
        local_engine().change(app, options)
    assert local_engine().applications["default"].ingress.config is before
    assert local_engine().change("default", {"Gated": before}) == []


def test_replicas_that_come_and_go_leave_threads_and_descriptors_as_they_were(gate: Gate) -> None:
    serve.run(gated(gate), route_prefix=None)

    def held() -> tuple[int, int]:
        # Idle threads of the control loop, which join the others, end after ten seconds.
        names = [each.name for each in threading.enumerate()]
        mine = [name for name in names if not name.startswith("ingress-control-worker")]
        return len(mine), len(os.listdir("/dev/fd"))

    def scale(count: int) -> None:
        change("Gated", num_replicas=count)
        settle()

    scale(2)
    scale(1)
    before = held()
    scale(64)
    assert held()[0] >= before[0] + 63
    scale(1)
    wait_until(lambda: all(now <= was for now, was in zip(held(), before, strict=True)))
