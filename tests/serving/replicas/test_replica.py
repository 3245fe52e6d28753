"""`ingress.serving.replicas.replica`: the slot follows the work, and every call gets an answer."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.types import DeploymentID, ReplicaID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.loops import EventLoopThread, run_blocking
from ingress.exceptions import ReplicaUnavailableError, RequestCancelledError, UserCodeExit
from ingress.handle import Invocation
from ingress.serving.replicas.replica import Replica, ReplicaState
from ingress.serving.replicas.router import Router
from ingress.serving.replicas.thread_host import ThreadHost
from tests.fakes import Ledger, bind, make_call, together
from tests.servers import PATIENCE_S, result, wait_until

D = DeploymentID("D")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.usefixtures("shutdown"),
]


class Model:
    """User code with every kind of callable, held by latches."""

    def __init__(self, latches: Ledger) -> None:
        self.latches = latches

    async def wait(self) -> str:
        try:
            self.latches.entered.set()
            await asyncio.Future()
        finally:
            self.latches.closed.set()
        return "never"

    async def stubborn(self) -> str:
        self.latches.entered.set()
        while not self.latches.leave.is_open:
            try:
                await self.latches.leave
            except asyncio.CancelledError:
                self.latches.closed.set()
        return "late"

    def block(self) -> str:
        self.latches.entered.set()
        self.latches.leave.wait()
        self.latches.closed.set()
        return "late"

    def quick(self) -> str:
        return "quick"

    async def cancels_itself(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)


class Rig:
    """A router with one real replica."""

    def __init__(
        self,
        cls: type = Model,
        *,
        slots: int = 1,
        in_threads: bool = True,
        borrowed: EventLoopThread | None = None,
    ) -> None:
        self.latches = Ledger()
        self.released: Counter[Call] = Counter()
        self.router = Router(D)
        self.replica = Replica(
            ReplicaID("0", D),
            partial(
                ThreadHost,
                func_or_class=cls,
                bound_app=None,
                num_cpus=1,
                sync_in_threadpool=in_threads,
                borrowed=None if borrowed is None else borrowed.loop,
            ),
            max_ongoing=slots,
            release=self.release,
            reassign=self.router.reassign,
        )
        self.control = EventLoopThread("control")
        run_blocking(self.control.loop, self.replica.start((self.latches,), {}), PATIENCE_S)
        self.router.add(self.replica)

    def release(self, replica: Replica, call: Call) -> None:
        self.released[call] += 1
        self.router.release(replica, call)

    def call(self, method: str) -> Call:
        call = make_call()
        call.work = Invocation(method, [], {}, None)
        return call

    def submit(self, method: str) -> Call:
        call = self.call(method)
        self.router.assign(call)
        return call

    def stop(self, timeout_s: float = PATIENCE_S) -> None:
        run_blocking(self.control.loop, self.replica.stop(timeout_s), PATIENCE_S + timeout_s)

    def wait_until_free(self) -> None:
        wait_until(lambda: self.replica.ongoing == 0)


@contextmanager
def rig(cls: type = Model, **options: Any) -> Iterator[Rig]:
    rig = Rig(cls, **options)
    try:
        yield rig
    finally:
        rig.latches.leave.count_down()
        rig.stop()
        assert rig.control.stop(PATIENCE_S)


@pytest.fixture(params=["own-thread", "borrowed-loop"])
def own(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig on its own loop, and one on a borrowed loop."""
    lender = EventLoopThread("lender") if request.param == "borrowed-loop" else None
    with rig(borrowed=lender) as it:
        yield it
    assert lender is None or lender.stop(PATIENCE_S)


def test_a_slot_comes_back_once_after_an_answer(own: Rig) -> None:
    call = own.submit("quick")

    assert call.wait_blocking(PATIENCE_S)
    assert call.outcome() == "quick"
    own.wait_until_free()
    assert own.released == {call: 1}


def test_a_call_cancelled_in_the_queue_never_starts(own: Rig) -> None:
    first, second = own.submit("wait"), own.submit("wait")
    assert own.latches.entered.wait(PATIENCE_S)
    second.cancel()
    first.cancel()

    own.wait_until_free()
    assert own.released == {first: 1}


def test_a_call_cancelled_between_its_begin_and_its_first_step_gives_its_slot_back(
    own: Rig,
) -> None:
    """On one loop `handle.remote()` and then `cancel()` do this."""
    call = own.call("wait")

    async def both() -> None:
        own.router.assign(call)
        call.cancel()

    run_blocking(own.replica.loop, both(), PATIENCE_S)

    own.wait_until_free()
    assert own.released == {call: 1}
    assert not own.latches.entered.is_set()
    after = own.submit("quick")
    assert (after.wait_blocking(PATIENCE_S), after.outcome()) == (True, "quick")


def test_a_call_cancelled_while_it_runs_ends_at_its_await(own: Rig) -> None:
    call = own.submit("wait")
    assert own.latches.entered.wait(PATIENCE_S)
    call.cancel()

    assert own.latches.closed.wait(PATIENCE_S), "its finally ran"
    own.wait_until_free()
    assert own.released == {call: 1}


def test_a_call_that_swallows_its_cancellation_keeps_its_slot_until_it_returns(own: Rig) -> None:
    call = own.submit("stubborn")
    assert own.latches.entered.wait(PATIENCE_S)
    call.cancel()
    assert own.latches.closed.wait(PATIENCE_S)

    assert own.replica.ongoing == 1
    own.latches.leave.count_down()
    own.wait_until_free()
    assert own.released == {call: 1}


def test_a_def_in_a_thread_keeps_its_slot_until_the_thread_is_done(own: Rig) -> None:
    call = own.submit("block")
    assert own.latches.entered.wait(PATIENCE_S)
    call.cancel()
    waiting = own.submit("quick")
    assert not waiting.wait_blocking(0.03)
    assert own.replica.ongoing == 1

    own.latches.leave.count_down()
    assert waiting.wait_blocking(PATIENCE_S)
    own.wait_until_free()
    assert own.released == {call: 1, waiting: 1}


def test_random_cancels_give_every_slot_back_once(own: Rig, switch_interval: None) -> None:
    calls: list[Call] = []

    def submit() -> None:
        for number in range(300):
            call = own.submit("quick")
            calls.append(call)
            if number % 3 == 0:
                call.cancel()

    together(*[submit] * 4)

    assert all(call.wait_blocking(PATIENCE_S) for call in calls)
    own.wait_until_free()
    assert set(own.released.values()) <= {1}
    for call in calls:
        assert call.error is None or isinstance(call.error, RequestCancelledError)


def test_user_code_that_cancels_its_own_task_has_failed(own: Rig) -> None:
    call = own.submit("cancels_itself")
    assert call.wait_blocking(PATIENCE_S)

    with pytest.raises(UserCodeExit, match="CancelledError"):
        call.outcome()
    own.wait_until_free()


def test_what_runs_when_a_replica_stops_is_told(own: Rig) -> None:
    call = own.submit("wait")
    assert own.latches.entered.wait(PATIENCE_S)
    own.router.remove(own.replica)
    own.stop()

    with pytest.raises(ReplicaUnavailableError, match="D#0"):
        call.outcome()
    assert own.latches.closed.is_set()
    assert own.released == {call: 1}


def test_calls_on_a_dying_loop_are_failed(own: Rig) -> None:
    """The router still uses a replica whose loop is closed, for two thousand calls."""
    own.stop()
    calls = [own.submit("quick") for _ in range(2_000)]

    for call in calls:
        assert call.settled
        with pytest.raises(ReplicaUnavailableError):
            call.outcome()
    assert own.released == Counter(calls)
    assert own.replica.ongoing == 0


def test_a_queue_behind_a_dead_replica_is_failed_to_its_end() -> None:
    with rig() as it:
        first = it.submit("wait")
        waiting = [it.submit("quick") for _ in range(3_000)]
        assert it.latches.entered.wait(PATIENCE_S)
        it.stop()

        for call in (first, *waiting):
            assert call.wait_blocking(PATIENCE_S)
            assert isinstance(call.error, ReplicaUnavailableError)
        assert set(it.released.values()) == {1}


@pytest.mark.parametrize("seed", range(0, 6, 2))
def test_a_thousand_calls_racing_a_stop_all_get_an_answer(seed: int, switch_interval: None) -> None:
    with rig(slots=50) as it:
        calls: list[Call] = []

        def submit() -> None:
            calls.extend(it.submit("quick") for _ in range(250))

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(calls) >= 160 * seed)
        it.stop()
        for thread in threads:
            thread.join(PATIENCE_S)

        assert len(calls) == 1_000
        for call in calls:
            assert call.wait_blocking(5.0)
            assert call.value == "quick" or isinstance(call.error, ReplicaUnavailableError)
        assert set(it.released.values()) == {1}


def test_stop_is_bounded_when_a_def_is_stuck_on_the_loop_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rig(in_threads=False) as it:
        call = it.submit("block")
        assert it.latches.entered.wait(PATIENCE_S)
        begin = time.monotonic()
        it.stop(0.2)

        assert time.monotonic() - begin < 3
        assert isinstance(call.error, ReplicaUnavailableError)
        it.latches.leave.count_down()
        assert it.latches.closed.wait(PATIENCE_S)
        it.stop()  # the loop may be closing at this moment
        assert it.replica.loop.is_closed()
        assert len([each for each in caplog.records if "did not stop" in each.message]) == 1


def test_a_stop_goes_on_when_a_lender_ends_the_loop_and_every_task_on_it() -> None:
    lender = EventLoopThread("lender")
    with rig(borrowed=lender) as it:
        call = it.submit("stubborn")
        assert it.latches.entered.wait(PATIENCE_S)
        stopping = threading.Thread(target=it.stop)
        stopping.start()
        assert it.latches.closed.wait(PATIENCE_S)
        it.latches.closed.clear()
        ending = threading.Thread(target=lender.stop, args=(PATIENCE_S,))
        ending.start()
        assert it.latches.closed.wait(PATIENCE_S), "cancelled again, with all the lender has"
        stopping.join(PATIENCE_S)
        assert it.replica.state is ReplicaState.STOPPED
        it.latches.leave.count_down()
        ending.join(PATIENCE_S)
        assert isinstance(call.error, ReplicaUnavailableError)


def test_a_health_check_that_is_stuck_takes_one_thread_and_no_more() -> None:
    class Sick(Model):
        calls = 0

        def check_health(self) -> None:
            Sick.calls += 1
            if Sick.calls > 1:
                self.latches.leave.wait()

    async def ask() -> None:
        async with asyncio.timeout(0.02):
            await it.replica.check_health()

    with rig(Sick) as it:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                run_blocking(it.control.loop, ask(), PATIENCE_S)
        assert Sick.calls == 2, "once at start, and one that is still there"
        assert it.submit("quick").wait_blocking(PATIENCE_S)


def test_calls_that_each_start_the_next_do_not_keep_all_who_came_before() -> None:
    @serve.deployment
    class Chain:
        async def __call__(self, left: int, calls: list[Any]) -> None:
            call = CURRENT_CALL.get()
            assert call.work is not None
            if left:
                serve.get_deployment_handle("Chain").remote(left - 1, calls)
            else:
                done.set()
                await asyncio.to_thread(leave.wait, PATIENCE_S)

    done, leave = threading.Event(), threading.Event()
    handle = serve.run(bind(Chain), route_prefix=None)
    try:
        handle.remote(500, [])
        assert done.wait(PATIENCE_S)
        gc.collect()
        alive = sum(type(each) is Call for each in gc.get_objects())
    finally:
        leave.set()
        serve.shutdown()

    assert alive < 20


# Starts and stops.


@serve.deployment(num_replicas=2)
class Everything:
    async def on_loop(self) -> str:
        return await asyncio.to_thread(lambda: "loop")

    def sync(self) -> str:
        return "sync"

    def items(self) -> Iterator[int]:
        yield from range(3)


def _tasks() -> int:
    return sum(type(each) is asyncio.Task and not each.done() for each in gc.get_objects())


def test_threads_and_tasks_are_at_baseline_after_twenty_starts_and_stops(threadpool: str) -> None:
    """File descriptors too: the leak check looks at them after every test."""
    before = threading.active_count(), _tasks()
    for _ in range(20):
        handle = serve.run(bind(Everything), route_prefix=None)
        assert (result(handle.on_loop.remote()), result(handle.sync.remote())) == ("loop", "sync")
        assert list(handle.options(stream=True).items.remote()) == [0, 1, 2]
        serve.shutdown()

    wait_until(lambda: (threading.active_count(), _tasks()) == before, timeout_s=2)
