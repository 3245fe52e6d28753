"""Autoscaling: the number of replicas follows the load. The rules are compared with Ray's in
`tests/engines/test_autoscaling_decisions.py`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ingress as serve
from ingress.autoscaling_policy import STEADY, Trend, delayed, smoothed
from ingress.config import AutoscalingConfig, AutoscalingContext
from ingress.engines import local_engine
from ingress.handle import DeploymentHandle
from ingress.serving.control.scaling import aggregated
from ingress.testing import Latch
from tests.fakes import Gate
from tests.servers import PATIENCE_S, bind, get, overview, result, served, wait_until

SOON: dict[str, Any] = {"upscale_delay_s": 0, "downscale_delay_s": 0, "look_back_period_s": 0.2}
SOON["metrics_interval_s"] = 0.1


pytestmark = pytest.mark.usefixtures("shutdown")


def running(name: str) -> int:
    return overview(name).replica_states.get("RUNNING", 0)


@pytest.mark.parametrize(
    ("points", "function", "expected"),
    [
        ([], "mean", 0.0),
        ([(0, 4)], "mean", 4.0),
        ([(10, 4)], "mean", 4.0),
        ([(0, 4), (5, 8)], "mean", 6.0),
        ([(-20, 4), (8, 14)], "mean", 6.0),
        ([(0, 4), (5, 8)], "max", 8),
        ([(0, 4), (5, 8)], "min", 4),
        ([(-20, 100), (-5, 1), (5, 3)], "max", 3),
        ([(4, 6), (7, 9)], "mean", 7.5),
    ],
)
def test_the_load_is_aggregated_over_the_look_back_period(
    points: list[tuple[float, float]], function: str, expected: float
) -> None:
    assert aggregated(points, since=0, now=10, function=function) == expected


def test_a_small_factor_still_reaches_the_number_that_is_asked_for() -> None:
    config = AutoscalingConfig(max_replicas=100, downscaling_factor=0.1, upscaling_factor=0.1)
    count, seen = 20, [20]
    while count > 1:
        count = smoothed(1, count, config)
        seen.append(count)
    assert len(seen) > 10
    assert smoothed(100, 20, config) == 28


@pytest.mark.reliability("B19")
def test_a_wish_has_to_last_for_its_delay() -> None:
    config = AutoscalingConfig(max_replicas=9, upscale_delay_s=5, downscale_delay_s=7)
    count, trend = delayed(4, 2, config, STEADY, now=100)
    assert (count, trend) == (2, Trend(1, 100))
    count, trend = delayed(6, 2, config, trend, now=104.9)
    assert count == 2
    assert delayed(6, 2, config, trend, now=105) == (6, STEADY)
    assert delayed(2, 2, config, trend, now=105) == (2, STEADY)
    assert delayed(1, 2, config, trend, now=105) == (2, Trend(-1, 105))


def gated(gate: Gate, **options: Any) -> Any:
    @serve.deployment(**options)
    class Gated:
        async def __call__(self) -> str:
            gate.inside += 1
            await gate.go
            gate.inside -= 1
            return serve.get_replica_context().replica_tag

        async def brief(self) -> str:
            return "brief"

    return bind(Gated)


def test_replicas_follow_the_load_up_and_down_and_no_request_is_lost(gate: Gate) -> None:
    scaling = {"max_replicas": 3, "target_ongoing_requests": 2, **SOON}
    handle = serve.run(
        gated(gate, autoscaling_config=scaling, max_ongoing_requests=2), route_prefix=None
    )
    assert running("Gated") == 1
    answers = [handle.remote() for _ in range(6)]
    wait_until(lambda: gate.inside == 6)
    assert running("Gated") == 3
    gate.go.count_down()
    assert {result(each) for each in answers} == {"0", "1", "2"}
    wait_until(lambda: [each.replica_id for each in overview("Gated").replicas] == ["0"])


def test_a_deployment_of_no_replicas_starts_one_for_its_first_request(gate: Gate) -> None:
    gate.go.count_down()
    port = served(gated(gate, autoscaling_config={"min_replicas": 0, "max_replicas": 2, **SOON}))
    assert running("Gated") == 0
    assert (get(port, "/-/readyz").status, get(port, "/-/healthz").status) == (200, 200)
    assert get(port, "/").status == 200
    wait_until(lambda: not overview("Gated").replicas)
    handle: DeploymentHandle = serve.get_app_handle("default")
    assert hasattr(handle, "brief")
    assert result(handle.brief.remote()) == "brief"
    wait_until(lambda: not overview("Gated").replicas)


@pytest.mark.reliability("B19")
def test_requests_under_a_load_that_comes_and_goes_are_all_answered(switch_interval: None) -> None:
    @serve.deployment(
        max_ongoing_requests=1,
        autoscaling_config={
            "min_replicas": 0, "max_replicas": 3, "target_ongoing_requests": 1,
            "upscale_delay_s": 0, "downscale_delay_s": 0, "downscale_to_zero_delay_s": 0,
            "look_back_period_s": 0.05, "metrics_interval_s": 0.05,
        },
    )  # fmt: skip
    class Brief:
        async def __call__(self) -> str:
            return "brief"

    port = served(bind(Brief))
    sizes: set[int] = set()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            answers = [pool.submit(get, port, "/") for _ in range(20)]
            assert [each.result(PATIENCE_S).status for each in answers] == [200] * 20
            sizes.add(running("Brief"))
            wait_until(lambda: not overview("Brief").replicas)
    assert max(sizes) > 0


def test_auto_is_one_to_a_hundred_replicas(gate: Gate) -> None:
    serve.run(gated(gate, num_replicas="auto"), route_prefix=None)
    scaler = local_engine().applications["default"].ingress.using.scaler
    assert scaler is not None
    assert (scaler.config.min_replicas, scaler.config.max_replicas) == (1, 100)
    assert running("Gated") == 1


def test_the_bounds_can_be_changed_while_it_runs(gate: Gate) -> None:
    engine = local_engine()
    serve.run(gated(gate, autoscaling_config={"max_replicas": 2, **SOON}), route_prefix=None)
    engine.change(
        "default", {"Gated": {"autoscaling_config": {"min_replicas": 2, "max_replicas": 4, **SOON}}}
    )
    wait_until(lambda: running("Gated") == 2)
    engine.change("default", {"Gated": {"num_replicas": 3}})  # no autoscaling any more
    wait_until(lambda: running("Gated") == 3)
    assert engine.applications["default"].ingress.using.scaler is None


# The user's own policies.

asked = Latch()
may_answer = threading.Event()


def three(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ask for three replicas, and fail first."""
    if not ctx.policy_state.get("asked") and ctx.current_num_replicas == 2:
        raise ValueError("a policy that fails")
    return 3, {"asked": True}


class Slow:
    """A policy that does not answer for a while."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.thread = ""

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        asked.count_down()
        assert threading.current_thread().name != "ingress-control"
        may_answer.wait(PATIENCE_S)
        return self.count, {"seen": ctx.total_num_requests}


@pytest.mark.parametrize(
    "policy",
    [three, f"{__name__}:three", "ray.serve.autoscaling_policy:default_autoscaling_policy"],
    ids=["function", "path", "ray's name of the default"],
)
def test_a_policy_of_the_users_decides(policy: Any, gate: Gate) -> None:
    scaling = {"max_replicas": 4, "target_ongoing_requests": 1, **SOON}
    scaling["policy"] = {"policy_function": policy}
    handle = serve.run(
        gated(gate, autoscaling_config=scaling, max_ongoing_requests=1), route_prefix=None
    )
    if isinstance(policy, str) and policy.startswith("ray"):
        answers = [handle.remote() for _ in range(3)]
    wait_until(lambda: running("Gated") == 3)
    gate.go.count_down()
    if isinstance(policy, str) and policy.startswith("ray"):
        assert all(result(each) for each in answers)


def test_a_slow_policy_stops_nothing_but_itself(gate: Gate) -> None:
    gate.go.count_down()
    scaling = {"max_replicas": 4, **SOON}
    scaling["policy"] = {"policy_function": Slow, "policy_kwargs": {"count": 2}}
    handle = serve.run(gated(gate, autoscaling_config=scaling), route_prefix=None)
    asked.wait()
    engine = local_engine()
    assert result(handle.remote()) == "0"
    engine.change("default", {"Gated": {"max_queued_requests": 9}})  # the control loop turns
    may_answer.set()
    wait_until(lambda: running("Gated") == 2)


async def awaits(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    return 2, {}


@pytest.mark.parametrize("path", [f"{__name__}:awaits", f"{__name__}:PATIENCE_S"])
def test_a_policy_that_is_no_plain_function_fails_the_start(path: str, gate: Gate) -> None:
    scaling = {"max_replicas": 2, "policy": {"policy_function": path}}
    with pytest.raises(RuntimeError, match="is no plain function; give a `def`"):
        serve.run(gated(gate, autoscaling_config=scaling), route_prefix=None)


def exits() -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda: None, "it returned None, expected a number of replicas and a dict"),
        (lambda: 2, "it returned 2, expected"),
        (lambda: ("3", {}), "it returned ('3', {}), expected"),
        (lambda: (math.nan, {}), "it returned (nan, {}), expected"),
        (lambda: (2, object()), "it returned (2, <object object at "),
        (exits, "SystemExit: 3"),
    ],
    ids=["none", "bare", "text", "nan", "state", "exit"],
)
def test_a_policy_that_decides_nothing_is_told_once_and_changes_nothing(
    answer: Callable[[], Any], told: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Latch(count=3)
    good = threading.Event()

    def policy(ctx: AutoscalingContext) -> Any:
        if good.is_set():
            return 2, {}
        asked.count_down()
        return answer()

    gate.go.count_down()
    scaling = {"max_replicas": 2, "policy": {"policy_function": policy}, **SOON}
    handle = serve.run(gated(gate, autoscaling_config=scaling), route_prefix=None)
    asked.wait()
    good.set()
    wait_until(lambda: running("Gated") == 2)
    assert result(handle.remote()) in ("0", "1")
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert [told in each for each in errors] == [True], errors


@pytest.mark.parametrize("path", ["no.such.module:policy", f"{__name__}:absent", "word"])
def test_a_policy_that_cannot_be_imported_fails_the_start(path: str, gate: Gate) -> None:
    scaling = {"max_replicas": 2, "policy": {"policy_function": path}}
    with pytest.raises(RuntimeError, match="cannot be imported"):
        serve.run(gated(gate, autoscaling_config=scaling), route_prefix=None)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_policy_gets_what_the_replicas_record(
    isolation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What a replica could not record is in no metric, and ends nothing."""
    seen: list[AutoscalingContext] = []

    def policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        seen.append(context)
        latest = [each[-1].value for each in context.raw_metrics.get("depth", {}).values()]
        return (2 if latest and max(latest) > 5 else 1), {}

    scaling = {"max_replicas": 2, "policy": {"policy_function": policy}, **SOON}
    queue = Queue.options(autoscaling_config=scaling, isolation=isolation)
    handle = serve.run(bind(queue), route_prefix=None)
    wait_until(lambda: any(each.aggregated_metrics for each in seen))
    first = next(each for each in seen if each.aggregated_metrics)
    assert first.aggregated_metrics == {"depth": {first.running_replicas[0]: 0}}
    assert seen[0].raw_metrics == {}  # nothing was recorded yet
    handle.broadcast("become", 9).results()
    wait_until(lambda: running("Queue") == 2)
    handle.broadcast("become", "raise").results()
    wait_until(lambda: "record_autoscaling_stats raised ValueError: no depth" in caplog.text)
    wait_until(lambda: not seen[-1].raw_metrics)
    handle.broadcast("become", "text").results()
    wait_until(lambda: "returned 'text', expected a dict of names and numbers" in caplog.text)
    wait_until(lambda: running("Queue") == 1)


@serve.deployment
class Queue:
    """A queue with a depth that a test sets."""

    def __init__(self) -> None:
        self.depth: Any = 0

    async def become(self, depth: Any) -> None:
        self.depth = depth

    async def record_autoscaling_stats(self) -> Any:
        if self.depth == "raise":
            raise ValueError("no depth")
        return self.depth if self.depth == "text" else {"depth": self.depth}


def test_a_replica_that_does_not_end_its_recording_is_asked_no_second_time() -> None:
    started, asked, leave = Latch(), [0], Latch()

    @serve.deployment(
        autoscaling_config={"max_replicas": 2, "target_ongoing_requests": 1, **SOON},
        isolation="thread",
    )
    class Blocks:
        async def __call__(self) -> str:
            await leave
            return "left"

        async def record_autoscaling_stats(self) -> dict[str, float]:
            asked[0] += 1
            started.count_down()
            await leave
            return {}

    handle = serve.run(bind(Blocks), route_prefix=None)
    started.wait()
    answers = [handle.remote() for _ in range(3)]
    wait_until(lambda: running("Blocks") == 2)
    wait_until(lambda: asked[0] == 2)
    leave.count_down()
    assert [result(each) for each in answers] == ["left"] * 3
