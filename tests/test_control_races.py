"""Changes by the control loop that meet requests, constructors and cancellations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import ingress as serve
from ingress.engines import local_engine
from ingress.engines.local import LocalEngine
from ingress.exceptions import (
    RequestCancelledError,
)
from ingress.handle import DeploymentHandle
from ingress.schema import DeploymentStatus, ReplicaDetails
from ingress.testing import Latch
from tests.servers import PATIENCE_S, bind, overview, result, turns, wait_until

ROUNDS = 30

pytestmark = pytest.mark.usefixtures("switch_interval")


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    yield local_engine()
    serve.shutdown()


def patient(count: int = 1) -> Latch:
    return Latch(count, timeout_s=PATIENCE_S)


def replicas() -> list[ReplicaDetails]:
    (deployment,) = serve.status().applications["default"].deployments.values()
    return deployment.replicas


def running() -> list[str]:
    return [each.replica_id for each in replicas() if each.state == "RUNNING"]


def at_once(*functions: Callable[[], Any]) -> None:
    """Call all functions in threads that start together."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> None:
        start.wait(PATIENCE_S)
        function()

    with ThreadPoolExecutor(len(functions)) as pool:
        for each in [pool.submit(run, function) for function in functions]:
            each.result(PATIENCE_S)


class Hold:
    """A hold on the event loops of replicas: what is posted to them has to wait."""

    def __init__(self, loops: int) -> None:
        self.is_held = patient(loops)
        self.end = patient()


def held(hold: list[Hold], **options: Any) -> Any:
    @serve.deployment(max_ongoing_requests=2, **options)
    class Held:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag
            self.config: Any = None

        async def reconfigure(self, config: Any) -> None:
            self.config = config

        async def hold(self) -> None:
            hold[-1].is_held.count_down()
            hold[-1].end.wait()  # on the event loop

        async def where(self) -> str:
            return str(self.tag)

        async def configured(self) -> Any:
            await turns()
            return self.config

    return bind(Held)


def hold_all(handle: DeploymentHandle, holds: list[Hold], loops: int) -> tuple[Hold, list[Any]]:
    """Hold the loop of each replica. Returns the hold, and the calls that hold."""
    holds.append(Hold(loops))
    holding = [handle.hold.remote() for _ in range(loops)]
    holds[-1].is_held.wait()
    return holds[-1], holding


def test_a_call_on_its_way_to_a_replica_that_is_dropped_is_answered_by_it(
    engine: LocalEngine,
) -> None:
    holds: list[Hold] = []
    handle = serve.run(held(holds, num_replicas=2), route_prefix=None)
    hold, holding = hold_all(handle, holds, 2)
    on_their_way = [handle.where.remote() for _ in range(2)]
    wait_until(lambda: [each.ongoing for each in replicas()] == [2, 2])

    engine.change("default", {"Held": {"num_replicas": 1}})
    hold.end.count_down()

    assert sorted(result(each) for each in on_their_way) == ["0", "1"]
    for each in holding:
        result(each)
    engine.wait_until_settled("default", PATIENCE_S)
    assert [each.replica_id for each in replicas()] == ["0"]


def test_a_call_on_its_way_to_a_replica_that_is_reconfigured_sees_the_config_before(
    engine: LocalEngine,
) -> None:
    holds: list[Hold] = []
    handle = serve.run(held(holds, user_config="before"), route_prefix=None)
    hold, holding = hold_all(handle, holds, 1)
    on_its_way = handle.configured.remote()
    wait_until(lambda: [each.ongoing for each in replicas()] == [2])

    engine.change("default", {"Held": {"user_config": "after"}})
    waiting = handle.configured.remote()  # the replica is taken away: this waits for it
    hold.end.count_down()

    assert result(on_its_way) == "before"
    assert result(waiting) == "after"
    result(holding[0])


def test_a_cancellation_that_meets_a_drop_costs_no_slot(engine: LocalEngine) -> None:
    holds: list[Hold] = []
    handle = serve.run(held(holds, num_replicas=2), route_prefix=None)
    for _ in range(ROUNDS):
        hold, holding = hold_all(handle, holds, 2)
        on_their_way = [handle.where.remote() for _ in range(2)]
        wait_until(lambda: [each.ongoing for each in replicas()] == [2, 2])
        drop = partial(engine.change, "default", {"Held": {"num_replicas": 1}})
        at_once(hold.end.count_down, drop, *(each.cancel for each in on_their_way))

        for each in on_their_way:
            try:
                assert result(each).isdigit()
            except RequestCancelledError:
                pass
        for each in holding:
            result(each)
        engine.wait_until_settled("default", PATIENCE_S)
        wait_until(lambda: [each.ongoing for each in replicas()] == [0])
        engine.change("default", {"Held": {"num_replicas": 2}})
        engine.wait_until_settled("default", PATIENCE_S)
        assert len(running()) == 2


def test_a_replica_that_is_dropped_while_its_constructor_ends_serves_nothing_and_ends(
    engine: LocalEngine,
) -> None:
    gates: list[tuple[Latch, Latch]] = []
    made: list[str] = []
    ended: list[str] = []

    @serve.deployment
    class Slow:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag
            if gates:
                begun, may_end = gates[-1]
                begun.count_down()
                may_end.wait()
            made.append(self.tag)

        def __del__(self) -> None:
            ended.append(self.tag)

        async def __call__(self) -> str:
            return str(self.tag)

    handle: DeploymentHandle = serve.run(bind(Slow), route_prefix=None)
    for _ in range(ROUNDS):
        begun, may_end = patient(), patient()
        gates.append((begun, may_end))
        engine.change("default", {"Slow": {"num_replicas": 2}})
        begun.wait()
        drop = partial(engine.change, "default", {"Slow": {"num_replicas": 1}})
        at_once(may_end.count_down, drop)

        engine.wait_until_settled("default", PATIENCE_S)
        assert [each.replica_id for each in replicas()] == ["0"]
        assert {result(handle.remote()) for _ in range(4)} == {"0"}
    wait_until(lambda: sorted(ended) == sorted(each for each in made if each != "0"))
    names = [each.name for each in threading.enumerate()]
    assert {each.partition("-")[0] for each in names if each.startswith("Slow#")} == {"Slow#0"}


# Threads that are left behind.


def test_replicas_left_behind_end_an_update_but_none_that_serves(engine: LocalEngine) -> None:
    may_end = threading.Event()
    inside: list[Latch] = []

    def version(text: str) -> Any:
        @serve.deployment(name="Model", graceful_shutdown_timeout_s=0)
        class Model:
            @serve.method(execution="threadpool")
            def dive(self) -> None:
                inside[-1].count_down()
                may_end.wait(PATIENCE_S)

            async def __call__(self) -> str:
                return text

        return bind(Model)

    handle = serve.run(version("0"), route_prefix=None)
    try:
        for number in (1, 2):
            inside.append(patient())
            handle.dive.remote()
            inside[-1].wait()
            serve.run(version(str(number)), route_prefix=None)
        with pytest.raises(RuntimeError, match="2 replicas are stuck, and no more are started"):
            serve.run(version("3"), route_prefix=None)
        assert result(handle.remote()) == "2"
        assert overview("Model").status is DeploymentStatus.DEPLOY_FAILED
        assert "no more are started" in overview("Model").message
    finally:
        may_end.set()
    application = local_engine().applications["default"]
    wait_until(lambda: not application.ingress.left)
    serve.run(version("4"), route_prefix=None)
    assert result(handle.remote()) == "4"
