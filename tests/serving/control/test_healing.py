"""The control plane replaces replicas that fail their checks, hang, or have lost their loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.settings import WEDGED_AFTER_S
from ingress.engines import local_engine
from ingress.schema import ApplicationStatus, DeploymentStatus
from ingress.testing import Latch
from tests.servers import PATIENCE_S, bind, close_loop, overview, result, wait_until

pytestmark = [
    pytest.mark.usefixtures("shutdown"),
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
]


def ids(name: str) -> list[str]:
    return [each.replica_id for each in overview(name).replicas]


class Script:
    """The behaviour of the replicas of one test, by number."""

    def __init__(self) -> None:
        self.may_construct = Latch(timeout_s=PATIENCE_S)
        self.is_asked = Latch(timeout_s=PATIENCE_S)
        self.may_answer = Latch(timeout_s=PATIENCE_S)
        self.may_turn = threading.Event()
        self.errors: dict[str, BaseException] = {}
        self.asked: list[str] = []


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    made.may_construct.count_down()
    made.may_answer.count_down()
    made.may_turn.set()


def checked(script: Script, **options: Any) -> Any:
    @serve.deployment(health_check_period_s=0.02, health_check_timeout_s=5, **options)
    class Checked:
        async def __init__(self) -> None:  # type: ignore[misc]
            self.tag = serve.get_replica_context().replica_tag
            if self.tag == "1":
                await script.may_construct

        async def check_health(self) -> None:
            script.asked.append(self.tag)
            if self.tag in script.errors:
                raise script.errors[self.tag]

        async def __call__(self) -> str:
            script.is_asked.count_down()
            await script.may_answer
            return self.tag

    return bind(Checked)


@pytest.mark.reliability("B10", "D08")
@pytest.mark.parametrize("error", [LookupError("fever"), SystemExit(3), asyncio.CancelledError()])
def test_three_failed_checks_replace_a_replica_which_serves_until_the_new_one_does(
    script: Script, error: BaseException
) -> None:
    handle = serve.run(checked(script), route_prefix=None)
    running = handle.remote()
    script.is_asked.wait()
    script.errors["0"] = error
    wait_until(lambda: overview("Checked").status is DeploymentStatus.UNHEALTHY)
    application = serve.status().applications["default"]

    assert application.status is ApplicationStatus.UNHEALTHY
    assert "check_health raised" in application.deployments["Checked"].message
    wait_until(lambda: ids("Checked") == ["0", "1"])
    also = handle.remote()  # while its successor starts, the old replica still serves
    script.may_construct.count_down()
    wait_until(lambda: overview("Checked").status is DeploymentStatus.HEALTHY)
    script.may_answer.count_down()
    assert [result(running), result(also), result(handle.remote())] == ["0", "0", "1"]
    wait_until(lambda: ids("Checked") == ["1"])


@pytest.mark.reliability("D08")
def test_one_failed_check_changes_only_a_counter(script: Script) -> None:
    serve.run(checked(script), route_prefix=None)
    seen: set[str] = set()
    script.errors["0"] = LookupError("flaky")
    wait_until(lambda: overview("Checked").replicas[0].failed_health_checks)
    script.errors.clear()
    count = len(script.asked)

    def is_over() -> bool:
        seen.add(overview("Checked").status)
        return len(script.asked) >= count + 10

    wait_until(is_over)
    assert seen == {DeploymentStatus.HEALTHY}
    assert ids("Checked") == ["0"]
    assert overview("Checked").replicas[0].failed_health_checks in (1, 2)


@pytest.mark.reliability("D08")
def test_a_replica_that_recovers_while_its_successor_starts_stays(script: Script) -> None:
    serve.run(checked(script), route_prefix=None)
    script.errors["0"] = LookupError("fever")
    wait_until(lambda: ids("Checked") == ["0", "1"])
    script.errors.clear()
    wait_until(lambda: ids("Checked") == ["0"])
    assert overview("Checked").status is DeploymentStatus.HEALTHY


@pytest.mark.reliability("D08")
def test_a_replacement_that_does_not_start_is_tried_again(script: Script) -> None:
    @serve.deployment(health_check_period_s=0.02)
    class Fragile:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag
            if self.tag == "1":
                raise OSError("no memory")

        async def check_health(self) -> None:
            if self.tag in script.errors:
                raise script.errors[self.tag]

        async def __call__(self) -> str:
            return self.tag

    handle = serve.run(bind(Fragile), route_prefix=None)
    script.errors["0"] = LookupError("fever")
    wait_until(lambda: "2" in ids("Fragile"))
    wait_until(lambda: ids("Fragile") == ["2"])
    assert result(handle.remote()) == "2"
    assert overview("Fragile").status is DeploymentStatus.HEALTHY
    assert overview("Fragile").message == ""


@pytest.mark.reliability("B02")
@pytest.mark.parametrize(("retries", "starts"), [(None, False), (1, False), (2, True)])
def test_a_first_start_is_tried_again_if_the_number_of_retries_is_given(
    retries: int | None, starts: bool
) -> None:
    attempts: list[str] = []

    class Slow:
        def __init__(self) -> None:
            attempts.append(serve.get_replica_context().replica_tag)
            if len(attempts) <= 2:
                raise OSError("not yet")

        async def __call__(self) -> str:
            return "up"

    options: Any = {} if retries is None else {"max_constructor_retry_count": retries}
    target = bind(serve.deployment(Slow).options(**options))
    if starts:
        assert result(serve.run(target, route_prefix=None).remote()) == "up"
        return
    with pytest.raises(RuntimeError, match="not yet"):
        serve.run(target, route_prefix=None)
    assert len(attempts) == 1 + (retries or 0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a loop count as stuck after 0.3 s."""
    monkeypatch.setenv(WEDGED_AFTER_S, "0.3")


def wedging(script: Script, **options: Any) -> Any:
    @serve.deployment(**options)
    class Wedging:
        async def __call__(self) -> str:
            return serve.get_replica_context().replica_tag

        async def wedge(self) -> str:
            script.is_asked.count_down()
            script.may_turn.wait(PATIENCE_S)  # blocks the loop
            return "turned"

    return bind(Wedging)


@pytest.mark.reliability("B07")
def test_a_loop_that_does_not_turn_is_replaced_and_comes_back(script: Script, soon: None) -> None:
    handle = serve.run(wedging(script, max_ongoing_requests=2), route_prefix=None)
    wedged = handle.wedge.remote()
    script.is_asked.wait()
    behind, queued = handle.remote(), handle.remote()  # one in the wedged replica, one waits

    assert [result(queued), result(behind), result(handle.remote())] == ["1", "1", "1"]
    replica, _ = overview("Wedging").replicas
    assert "has not turned for more than 0.3 s" in replica.unhealthy_reason
    assert f"{__file__}:" in replica.unhealthy_reason
    assert " in test_a_loop" not in replica.unhealthy_reason
    assert "wedge" in replica.unhealthy_reason
    assert overview("Wedging").status is DeploymentStatus.HEALTHY
    script.may_turn.set()
    assert result(wedged) == "turned"
    wait_until(lambda: ids("Wedging") == ["0"])  # the spare has left
    assert result(handle.remote()) == "0"
    assert overview("Wedging").message == ""


def test_no_more_stuck_replicas_than_wanted_are_replaced(script: Script, soon: None) -> None:
    handle = serve.run(wedging(script, max_ongoing_requests=1), route_prefix=None)
    stuck = [handle.wedge.remote()]
    wait_until(lambda: ids("Wedging") == ["0", "1"])
    stuck.append(handle.wedge.remote())
    says = "2 replicas are stuck, and no more are started"
    wait_until(lambda: says in overview("Wedging").message)
    waiting = handle.remote()

    assert overview("Wedging").status is DeploymentStatus.UNHEALTHY
    threading.Event().wait(0.5)  # five looks
    assert ids("Wedging") == ["0", "1"]
    script.may_turn.set()
    assert [result(each) for each in stuck] == ["turned"] * 2
    assert result(waiting) in ("0", "1")
    wait_until(lambda: overview("Wedging").status is DeploymentStatus.HEALTHY)
    wait_until(lambda: len(ids("Wedging")) == 1)


@pytest.mark.reliability("B08")
def test_slots_that_orphans_hold_are_replaced(script: Script, soon: None) -> None:
    inside = Latch(2, timeout_s=PATIENCE_S)

    @serve.deployment(max_ongoing_requests=2)
    class Deep:
        @serve.method(execution="threadpool")
        def dive(self) -> None:
            inside.count_down()
            script.may_turn.wait(PATIENCE_S)

        async def __call__(self) -> str:
            return serve.get_replica_context().replica_tag

    handle = serve.run(bind(Deep), route_prefix=None)
    divers = [handle.dive.remote() for _ in range(2)]
    inside.wait()
    waiting = handle.remote()
    for each in divers:
        each.cancel()

    assert result(waiting) == "1"
    replica = overview("Deep").replicas[0]
    assert (replica.orphans, replica.ongoing) == (2, 2)
    assert "2 slots have been held" in replica.unhealthy_reason
    assert "dive" in replica.unhealthy_reason
    script.may_turn.set()
    wait_until(lambda: ids("Deep") == ["0"])


def test_a_loop_that_user_code_closed_is_replaced() -> None:
    @serve.deployment
    class Closing:
        async def close(self) -> None:
            loop = asyncio.get_running_loop()
            loop.stop()
            threading.Timer(0.05, close_loop, [loop]).start()

        async def __call__(self) -> str:
            return serve.get_replica_context().replica_tag

    handle = serve.run(bind(Closing), route_prefix=None)
    lost = handle.close.remote()
    wait_until(lambda: ids("Closing") == ["1"])
    assert result(handle.remote()) == "1"
    lost.cancel()


@pytest.mark.reliability("E03")
def test_nothing_is_left_of_replicas_that_were_replaced(script: Script, soon: None) -> None:
    threads = threading.active_count()
    stuck = serve.run(wedging(script, max_ongoing_requests=1), route_prefix=None).wedge.remote()
    wait_until(lambda: ids("Wedging") == ["0", "1"])
    assert len(local_engine().applications["default"].ingress.members) == 2
    script.may_turn.set()
    assert result(stuck) == "turned"
    serve.shutdown()
    wait_until(lambda: threading.active_count() == threads)
