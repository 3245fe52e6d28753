"""Changes by the control loop that meet requests, constructors and cancellations."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

import ingress as serve
from ingress.core.base.settings import WEDGED_AFTER_S
from ingress.engines import local_engine
from ingress.exceptions import RayServeException, RequestCancelledError
from ingress.handle import DeploymentHandle
from ingress.request_router import ConsistentHashRouter, RunningReplica
from ingress.schema import DeploymentStatus, ReplicaDetails
from ingress.serving.control import health
from ingress.testing import Latch
from tests.process_calls_app import in_isolation
from tests.servers import (
    PATIENCE_S,
    bind,
    change,
    close_loop,
    get,
    overview,
    result,
    served,
    settle,
    turns,
    wait_until,
)

ROUNDS = 30

pytestmark = pytest.mark.usefixtures("switch_interval", "shutdown")


def run(application: Any) -> DeploymentHandle:
    return serve.run(application, route_prefix=None)


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

    def __call__(self) -> None:
        self.is_held.count_down()
        self.end.wait()  # on the event loop


def held(hold: list[Hold], **options: Any) -> Any:
    @serve.deployment(max_ongoing_requests=2, **options)
    class Held:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag
            self.config: Any = None

        async def reconfigure(self, config: Any) -> None:
            self.config = config

        async def hold(self) -> None:
            hold[-1]()

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


def test_a_call_on_its_way_to_a_replica_that_is_dropped_is_answered_by_it() -> None:
    holds: list[Hold] = []
    handle = run(held(holds, num_replicas=2))
    hold, holding = hold_all(handle, holds, 2)
    on_their_way = [handle.where.remote() for _ in range(2)]
    wait_until(lambda: [each.ongoing for each in replicas()] == [2, 2])

    change("Held", num_replicas=1)
    hold.end.count_down()

    assert sorted(result(each) for each in on_their_way) == ["0", "1"]
    for each in holding:
        result(each)
    settle()
    assert [each.replica_id for each in replicas()] == ["0"]


def test_a_call_on_its_way_to_a_replica_that_is_reconfigured_sees_the_config_before() -> None:
    holds: list[Hold] = []
    handle = run(held(holds, user_config="before"))
    hold, holding = hold_all(handle, holds, 1)
    on_its_way = handle.configured.remote()
    wait_until(lambda: [each.ongoing for each in replicas()] == [2])

    change("Held", user_config="after")
    waiting = handle.configured.remote()  # the replica is taken away: this waits for it
    hold.end.count_down()

    assert result(on_its_way) == "before"
    assert result(waiting) == "after"
    result(holding[0])


def test_a_cancellation_that_meets_a_drop_costs_no_slot() -> None:
    holds: list[Hold] = []
    handle = run(held(holds, num_replicas=2))
    for _ in range(ROUNDS):
        hold, holding = hold_all(handle, holds, 2)
        on_their_way = [handle.where.remote() for _ in range(2)]
        wait_until(lambda: [each.ongoing for each in replicas()] == [2, 2])
        drop = partial(change, "Held", num_replicas=1)
        at_once(hold.end.count_down, drop, *(each.cancel for each in on_their_way))

        for each in on_their_way:
            try:
                assert result(each).isdigit()
            except RequestCancelledError:
                pass
        for each in holding:
            result(each)
        settle()
        wait_until(lambda: [each.ongoing for each in replicas()] == [0])
        change("Held", num_replicas=2)
        settle()
        assert len(running()) == 2


def test_a_replica_that_is_dropped_while_its_constructor_ends_serves_nothing_and_ends() -> None:
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

    handle: DeploymentHandle = run(bind(Slow))
    for _ in range(ROUNDS):
        begun, may_end = patient(), patient()
        gates.append((begun, may_end))
        change("Slow", num_replicas=2)
        begun.wait()
        at_once(may_end.count_down, partial(change, "Slow", num_replicas=1))

        settle()
        assert [each.replica_id for each in replicas()] == ["0"]
        assert {result(handle.remote()) for _ in range(4)} == {"0"}
    wait_until(lambda: sorted(ended) == sorted(each for each in made if each != "0"))
    names = [each.name for each in threading.enumerate()]
    assert {each.partition("-")[0] for each in names if each.startswith("Slow#")} == {"Slow#0"}


# `reconfigure` meets other changes, updates, checks, and the end of a loop.


class Configured:
    """The script of `reconfigure`, by `user_config`."""

    def __init__(self) -> None:
        self.begun: dict[str, Latch] = {}
        self.may_end: dict[str, Latch] = {}
        self.fails: set[str] = set()
        self.seen: list[tuple[str, str]] = []
        self.checked = 0

    def begin(self, config: str, *, fails: bool = False) -> None:
        """Change the `user_config`; return once a replica reconfigures, which the script holds."""
        self.begun[config], self.may_end[config] = patient(), patient()
        if fails:
            self.fails.add(config)
        change("Configured", user_config=config)
        self.begun[config].wait()


def configured(script: Configured, user_config: str, **options: Any) -> Any:
    @serve.deployment(name="Configured", user_config=user_config, **options)
    class Model:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag
            self.config = ""

        async def reconfigure(self, config: str) -> None:
            script.seen.append((self.tag, config))
            if config in script.begun:
                script.begun[config].count_down()
                await script.may_end[config]
            if config in script.fails:
                raise ValueError(f"{config} is refused")
            self.config = config

        async def check_health(self) -> None:
            script.checked += 1

        async def __call__(self) -> str:
            return self.config

        async def tagged(self) -> str:
            return str(self.tag)

    return bind(Model)


def test_a_user_config_that_fails_after_the_next_one_came_does_not_undo_that() -> None:
    script = Configured()
    handle = run(configured(script, "first"))
    script.begin("bad", fails=True)
    change("Configured", user_config="last")
    script.may_end["bad"].count_down()

    settle()
    assert result(handle.remote()) == "last"
    assert overview("Configured").message == ""


def test_a_deployment_never_returns_to_a_user_config_that_no_replica_has_taken() -> None:
    script = Configured()
    handle = run(configured(script, "first"))
    script.begin("bad", fails=True)
    script.fails.add("worse")
    change("Configured", user_config="worse")
    script.may_end["bad"].count_down()

    wait_until(lambda: "worse is refused" in overview("Configured").message)
    settle()
    assert result(handle.remote()) == "first"


def test_a_user_config_that_fails_in_an_old_replica_leaves_that_of_the_update() -> None:
    script = Configured()
    handle = run(configured(script, "old", num_replicas=2))
    script.begin("bad", fails=True)
    updating = threading.Thread(target=run, args=(configured(script, "new", num_replicas=2),))
    updating.start()
    wait_until(lambda: ("2", "new") in script.seen)
    script.may_end["bad"].count_down()
    updating.join(PATIENCE_S)

    settle()
    assert {result(handle.remote()) for _ in range(8)} == {"new"}


def test_a_replica_whose_reconfigure_failed_is_replaced_even_if_its_checks_succeed() -> None:
    constructs, may_construct, checked = patient(), patient(), [0]

    @serve.deployment(user_config="good", health_check_period_s=0.02)
    class Model:
        async def __init__(self) -> None:  # type: ignore[misc]
            self.tag = serve.get_replica_context().replica_tag
            if self.tag != "0":
                constructs.count_down()
                await may_construct

        async def reconfigure(self, config: str) -> None:
            if config == "bad":
                raise ValueError("half configured")

        async def check_health(self) -> None:
            checked[0] += self.tag == "0"

        async def __call__(self) -> str:
            return str(self.tag)

    handle = run(bind(Model))
    change("Model", user_config="bad")
    constructs.wait()
    before = checked[0]
    wait_until(lambda: checked[0] >= before + 3)
    assert result(handle.remote()) == "0"
    may_construct.count_down()
    wait_until(lambda: result(handle.remote()) == "1")


def test_a_reconfigure_and_a_constructor_that_hang_are_named_with_their_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def has_twice(record: re.Pattern[str]) -> bool:
        return len(record.findall(caplog.text)) >= 2

    monkeypatch.setattr(health, "TELL_S", 0.3)
    script = Configured()
    run(configured(script, "first"))
    script.begin("hangs")
    change("Configured", num_replicas=2)

    place = rf"{Path(__file__).name}:\d+ in Model.reconfigure"
    for each in ("Configured#0 is still reconfiguring", "Configured#1 is still starting"):
        record = re.compile(rf"{each} after \d+ s at .*{place}")
        wait_until(partial(has_twice, record))
    script.may_end["hangs"].count_down()
    settle()


def test_an_update_and_fewer_replicas_do_not_wait_for_a_reconfigure_that_hangs() -> None:
    script = Configured()
    options: dict[str, Any] = {"graceful_shutdown_timeout_s": 0.1}
    handle = run(configured(script, "first", **options))
    script.begin("hangs")
    waiting = handle.remote()  # no replica takes it now

    run(configured(script, "second", num_replicas=2, **options))
    assert result(waiting) == "second"
    change("Configured", user_config="hangs")
    wait_until(lambda: len([each for each in script.seen if each[1] == "hangs"]) == 2)
    change("Configured", num_replicas=1)
    wait_until(lambda: len(replicas()) == 1)


def test_a_replica_that_is_lost_while_it_is_away_is_replaced_and_rejects_nothing() -> None:
    inside, loops = patient(), []

    @serve.deployment(user_config="before", max_ongoing_requests=1)
    class Model:
        def __init__(self) -> None:
            self.config = ""

        async def reconfigure(self, config: str) -> None:
            self.config = config

        async def hold(self) -> None:
            loops.append(asyncio.get_running_loop())
            inside.count_down()
            await asyncio.Event().wait()

        async def __call__(self) -> str:
            return self.config

    handle = run(bind(Model))
    holding = handle.hold.remote()
    inside.wait()
    change("Model", user_config="after")
    waiting = handle.remote()
    close_loop(loops[0])

    assert result(waiting) == "after"
    with pytest.raises(RayServeException):
        result(holding)
    settle()
    assert overview("Model").message == ""
    assert running() == ["1"]


def test_a_reconfigure_that_ends_its_loop_is_refused() -> None:
    closing: list[threading.Thread] = []

    @serve.deployment(user_config="before", num_replicas=2)
    class Model:
        def __init__(self) -> None:
            self.config = ""

        async def reconfigure(self, config: str) -> None:
            if config == "after":
                loop = asyncio.get_running_loop()
                closing.append(threading.Thread(target=close_loop, args=(loop,)))
                closing[-1].start()
                await asyncio.Event().wait()
            self.config = config

        async def __call__(self) -> str:
            return self.config

    handle = run(bind(Model))
    change("Model", user_config="after")
    wait_until(lambda: "the user_config before is in use" in overview("Model").message)
    settle()
    assert {result(handle.remote()) for _ in range(8)} == {"before"}
    assert len(closing) == 1
    closing[0].join(PATIENCE_S)


def test_a_replica_that_is_wedged_while_it_is_away_is_replaced_and_comes_back_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WEDGED_AFTER_S, "0.3")
    holds: list[Hold] = []
    handle = run(held(holds, user_config="before", graceful_shutdown_timeout_s=0))
    hold, holding = hold_all(handle, holds, 1)
    change("Held", user_config="after")

    assert result(handle.where.remote()) == "1"
    hold.end.count_down()
    result(holding[0])
    wait_until(lambda: running() == ["0"])
    assert result(handle.configured.remote()) == "after"


# Its task is never resumed: the garbage collector ends it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_constructor_that_ends_its_loop_fails_the_start() -> None:
    constructed: list[threading.Thread] = []

    @serve.deployment
    class Closing:
        async def __init__(self) -> None:  # type: ignore[misc]
            loop = asyncio.get_running_loop()
            constructed.append(threading.Thread(target=close_loop, args=(loop,)))
            constructed[-1].start()
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="closed the event loop"):
        run(bind(Closing))
    assert len(constructed) == 1
    constructed[0].join(PATIENCE_S)
    constructed.clear()
    gc.collect()


# Threads that are left behind.


def test_replicas_left_behind_end_an_update_but_none_that_serves() -> None:
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

    handle = run(version("0"))
    try:
        for number in (1, 2):
            inside.append(patient())
            handle.dive.remote()
            inside[-1].wait()
            run(version(str(number)))
        with pytest.raises(RuntimeError, match="2 replicas are stuck, and no more are started"):
            run(version("3"))
        assert result(handle.remote()) == "2"
        assert overview("Model").status is DeploymentStatus.DEPLOY_FAILED
        assert "no more are started" in overview("Model").message
    finally:
        may_end.set()
    application = local_engine().applications["default"]
    wait_until(lambda: not application.ingress.left)
    run(version("4"))
    assert result(handle.remote()) == "4"


# A stop or an update meets waits, starts and ends.


def test_a_delete_cuts_the_end_of_a_replica_that_leaves_short() -> None:
    leaves, may_end = patient(), patient()
    cut: list[bool] = []

    @serve.deployment(num_replicas=2, graceful_shutdown_timeout_s=10 * PATIENCE_S)
    class Slow:
        async def __del__(self) -> None:
            if not leaves.is_open:
                leaves.count_down()
                try:
                    await may_end
                except asyncio.CancelledError:
                    cut.append(True)
                    raise

        async def __call__(self) -> None: ...

    run(bind(Slow))
    change("Slow", num_replicas=1)
    leaves.wait()
    local_engine().shutdown(timeout_s=0)
    assert cut, "it was not waited for"
    assert serve.status().applications == {}


def test_a_delete_does_not_wait_for_a_constructor_that_hangs() -> None:
    begun, may_end = patient(), threading.Event()
    constructed: list[bool] = []

    @serve.deployment(graceful_shutdown_timeout_s=10 * PATIENCE_S)
    class Slow:
        def __init__(self) -> None:
            if serve.get_replica_context().replica_tag != "0":
                begun.count_down()
                constructed.append(may_end.wait(PATIENCE_S))

        async def __call__(self) -> None: ...

    run(bind(Slow))
    change("Slow", num_replicas=2)
    begun.wait()
    serve.delete("default")
    assert not constructed, "it was not waited for"
    assert serve.status().applications == {}
    may_end.set()


def test_a_delete_in_the_middle_of_an_update_starts_no_old_replica() -> None:
    made: list[str] = []
    begun, may_end = patient(), patient()

    def version(text: str) -> Any:
        @serve.deployment(name="Model", num_replicas=2)
        class Model:
            async def __init__(self) -> None:  # type: ignore[misc]
                made.append(text)
                if made.count("new") == 2:
                    begun.count_down()
                    await may_end

            async def __call__(self) -> str:
                return text

        return bind(Model)

    run(version("old"))
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(run, version("new"))
        begun.wait()
        serve.delete("default")
        with pytest.raises(RuntimeError, match="deleted while it started"):
            updating.result(PATIENCE_S)
    assert made == ["old", "old", "new", "new"]


def test_an_update_that_meets_the_next_one_is_taken_back_or_is_done() -> None:
    def version(text: str, may_end: Latch | None = None) -> Any:
        @serve.deployment(name="Model")
        class Model:
            async def __init__(self) -> None:  # type: ignore[misc]
                if text == "broken":
                    raise LookupError("no weights")
                if may_end is not None:
                    await may_end

            async def __call__(self) -> str:
                return text

        return bind(Model)

    def attempt(application: Any) -> None:
        try:
            run(application)
        except RuntimeError as error:
            ends.append(str(error))

    handle = run(version("0"))
    before, done = "0", 0
    for number in range(1, ROUNDS + 1):
        ends: list[str] = []
        may_end = patient()
        first = threading.Thread(target=attempt, args=(version(str(number), may_end),))
        first.start()
        wait_until(lambda: len(replicas()) == 2)
        at_once(may_end.count_down, partial(attempt, version("broken")))
        first.join(PATIENCE_S)
        settle()
        was_ended = any("another application of its name" in each for each in ends)
        expected = before if was_ended else str(number)
        assert result(handle.remote()) == expected, (number, ends)
        done += not was_ended
        before = expected


SCALED = {"min_replicas": 3, "max_replicas": 5}


def test_a_change_that_only_the_new_version_can_have_is_made_while_it_starts() -> None:
    """If the update fails, the version before returns as it was: it runs in threads."""
    run(in_isolation("Echo", "thread"))
    (echo,) = local_engine().applications["default"].deployments.values()
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(run, in_isolation("Echo", "process"))
        wait_until(lambda: echo.config.isolation == "process")
        (changed,) = change("Echo", max_requests_per_replica=5)
        assert echo.previous is not None, "the update has ended already"
        updating.result(PATIENCE_S)

    assert changed.after == 5
    assert echo.config.max_requests_per_replica == 5


def test_a_change_before_its_deployment_is_updated_survives_an_update_that_fails() -> None:
    begun, may_end = patient(), patient()

    def version(text: str) -> Any:
        @serve.deployment(name="Child")
        class Child:
            async def __init__(self) -> None:  # type: ignore[misc]
                if text == "new":
                    begun.count_down()
                    await may_end

        @serve.deployment(name="Gate")
        class Gate:
            def __init__(self, child: Any) -> None:
                if text == "new":
                    raise LookupError("no door")

            async def __call__(self) -> str:
                return text

        return bind(Gate, bind(Child))

    handle = run(version("old"))
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(run, version("new"))
        begun.wait()
        change("Gate", num_replicas=3)
        may_end.count_down()
        with pytest.raises(RuntimeError, match="no door"):
            updating.result(PATIENCE_S)
    settle()
    assert overview("Gate").replica_states == {"RUNNING": 3}
    assert result(handle.remote()) == "old"


@pytest.mark.parametrize("after", [{"num_replicas": 3}, {"autoscaling_config": SCALED}])
def test_a_change_during_an_update_survives_if_the_update_fails(after: dict[str, Any]) -> None:
    begun, may_end = patient(), patient()

    def version(text: str, **options: Any) -> Any:
        @serve.deployment(name="Model", **options)
        class Model:
            async def __init__(self) -> None:  # type: ignore[misc]
                if text == "new":
                    begun.count_down()
                    await may_end
                    raise LookupError("no weights")

            def reconfigure(self, config: Any) -> None:
                configs.add((text, config))

            async def __call__(self) -> str:
                return text

        return bind(Model)

    configs: set[tuple[str, Any]] = set()
    handle = run(version("old", user_config="first"))
    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(run, version("new", num_replicas=2))
        begun.wait()
        change("Model", **after)
        change("Model", user_config="for the new code")
        may_end.count_down()
        with pytest.raises(RuntimeError, match="no weights"):
            updating.result(PATIENCE_S)
    settle()
    assert overview("Model").replica_states == {"RUNNING": 3}
    assert result(handle.remote()) == "old"
    assert configs == {("old", "first")}


# Requests on their way.


def test_a_request_on_its_way_at_the_end_of_a_drain_goes_to_another_replica() -> None:
    holds: list[Hold] = []

    @serve.deployment(num_replicas=2, max_ongoing_requests=2, graceful_shutdown_timeout_s=0)
    class Held:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag

        async def __call__(self, request: Request) -> str:
            if request.url.path == "/hold":
                holds[-1]()
            return str(self.tag)

    port = served(bind(Held))
    holds.append(Hold(2))
    with ThreadPoolExecutor(4) as pool:
        holding = [pool.submit(get, port, "/hold") for _ in range(2)]
        holds[-1].is_held.wait()
        on_their_way = [pool.submit(get, port, "/") for _ in range(2)]
        wait_until(lambda: [each.ongoing for each in replicas()] == [2, 2])
        change("Held", num_replicas=1)
        wait_until(lambda: len(replicas()) == 1)
        holds[-1].end.count_down()
        answers = [each.result(PATIENCE_S) for each in on_their_way]
        assert [(each.status, each.body) for each in answers] == [(200, b"0")] * 2
        assert sorted(each.result(PATIENCE_S).status for each in holding) == [200, 503]


def test_the_routing_policy_hears_of_replicas_from_one_thread() -> None:
    told: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    class Noting(ConsistentHashRouter):
        def update_replicas(self, replicas: list[RunningReplica]) -> None:
            told.append(threading.current_thread().name)
            super().update_replicas(replicas)

    @serve.deployment(request_router_config={"request_router_class": Noting})
    class Model:
        def __init__(self) -> None:
            loops.append(asyncio.get_running_loop())

        async def __call__(self) -> str:
            return str(serve.get_replica_context().replica_tag)

    handle = run(bind(Model))
    for number in range(2):
        close_loop(loops[number])
        # Before the control loop looks: this thread takes the replica out of the router.
        assert result(handle.remote()) == str(number + 1)
    assert set(told) == {"ingress-control"}
