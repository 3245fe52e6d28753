"""Retries: a request that no user code has seen goes to another replica; others do not."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from starlette.requests import Request
from starlette.responses import StreamingResponse

import ingress as serve
from ingress.config import RequestRouterConfig
from ingress.core.base.settings import MAX_RETRIES, REQUEST_TIMEOUT_S
from ingress.core.base.types import DeploymentID, ReplicaID
from ingress.core.calls import retries
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.loops import EventLoopThread, run_blocking
from ingress.core.calls.retries import RetryBudget
from ingress.engines import local_engine
from ingress.exceptions import (
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
    RequestCycleError,
    RequestTimeoutError,
)
from ingress.handle import Invocation
from ingress.request_router import (
    PendingRequest,
    RoundRobinRouter,
    RunningReplica,
    SyncRequestRouter,
)
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.router import Router
from ingress.serving.replicas.thread_host import ThreadHost
from tests.fakes import FakeReplica, Ledger, assign, make_call
from tests.servers import (
    PATIENCE_S,
    ROUNDS,
    Connection,
    end_a_replica,
    get,
    ongoing,
    served,
    wait_until,
)

D = DeploymentID("D")
CHANCE = st.floats(0, 1, exclude_max=True)
GONE = ReplicaUnavailableError("gone")


# The retry rule.


@pytest.mark.reliability("D04")
@given(
    attempt=st.integers(1, 30),
    max_retries=st.integers(0, 20),
    left_s=st.none() | st.floats(-1, 2),
    chance=CHANCE,
)
def test_the_law_holds_for_every_failure(
    attempt: int, max_retries: int, left_s: float | None, chance: float
) -> None:
    now = 1000.0

    pause_s = retries.pause_s(
        attempt,
        max_retries=max_retries,
        deadline=None if left_s is None else now + left_s,
        now=now,
        chance=chance,
    )

    if pause_s is not None:
        assert 0 <= pause_s <= min(0.5, 0.025 * 2 ** (attempt - 1))
        assert left_s is None or pause_s < left_s
        assert attempt <= max_retries


def pause_s(attempt: int, chance: float) -> float | None:
    return retries.pause_s(attempt, max_retries=10, deadline=None, now=0.0, chance=chance)


# The guide: "By default, the Serve HTTP proxy retries up to 10 times", "Ray Serve does exponential
# backoff for retries."
def test_a_pause_doubles_up_to_half_a_second_and_comes_as_often_as_is_configured() -> None:
    expected = [0.0125, 0.025, 0.05, 0.1, 0.2, *[0.25] * 5, None]
    assert [pause_s(attempt, 0.5) for attempt in range(1, 12)] == pytest.approx(expected)


def test_a_request_is_not_sent_on_when_its_time_is_over() -> None:
    assert retries.pause_s(1, max_retries=10, deadline=5.0, now=5.0, chance=0.0) is None
    assert retries.pause_s(1, max_retries=10, deadline=5.1, now=5.0, chance=0.0) == 0.0


@pytest.mark.reliability("A07", "D04")
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(0, 60), st.integers(0, 200)), min_size=1, max_size=60
    )
)
def test_the_budget_is_a_fifth_of_the_traffic_and_ten_a_second_and_never_negative(
    steps: list[tuple[float, int, int]],
) -> None:
    now = 1000.0
    budget = RetryBudget(lambda: now)
    requests: list[float] = []
    granted: list[float] = []
    for passed_s, deposits, wishes in steps:
        now += passed_s
        for _ in range(deposits):
            budget.deposit()
            requests.append(now)
        for _ in range(wishes):
            is_granted = budget.withdraw()
            assert budget.balance >= 0
            if is_granted:
                granted.append(now)
                # The window is exact to a second: deposits of the last 11 s may have paid.
                paid_for = sum(each > now - retries.BUDGET_TTL_S - 1 for each in requests)
                in_window = sum(each > now - retries.BUDGET_TTL_S for each in granted)
                assert in_window <= 0.2 * paid_for + 10 * retries.BUDGET_TTL_S


def test_an_empty_budget_fills_up_again_in_time() -> None:
    now = 1000.0
    budget = RetryBudget(lambda: now)
    assert sum(budget.withdraw() for _ in range(500)) == 100
    for _ in range(50):
        budget.deposit()
    assert sum(budget.withdraw() for _ in range(500)) == 10
    now += 11

    assert budget.balance == 100


@pytest.mark.reliability("A07", "D04")
def test_pauses_are_spread_over_their_whole_range() -> None:
    """Full jitter: uniform, by a Kolmogorov-Smirnov distance that chance exceeds once in 10^6."""
    count = 5_000
    chance = random.Random(7)
    pauses = sorted(pause_s(5, chance.random()) or 0.0 for _ in range(count))
    top = retries.longest_pause_s(5)
    distance = max(abs(pause / top - number / count) for number, pause in enumerate(pauses))

    assert distance < 2.7 / count**0.5


# The router.


class SlowReplica(FakeReplica):
    """A replica that calls reach late; once it ends, it rejects arriving calls."""

    def __init__(self, router: Router, max_ongoing: int = 1) -> None:
        super().__init__(router, max_ongoing)
        self.arriving: list[Call] = []

    def submit(self, call: Call) -> None:
        self.arriving.append(call)

    def deliver(self, call: Call) -> None:
        self.arriving.remove(call)
        if not self.is_ending or call.settled:
            super().submit(call)
            return
        self.release(call)
        self.router.reassign(call, GONE)


def wait_for(waiter: Call, call: Call) -> None:
    """Wait for a call in the user code of another."""
    CURRENT_CALL.set(waiter)
    call.wait_blocking(PATIENCE_S)


class Later:
    """Delayed callbacks, until the test runs them."""

    def __init__(self) -> None:
        self.callbacks: list[tuple[float, Callable[[], Any]]] = []

    def __call__(self, delay_s: float, callback: Callable[[], Any]) -> None:
        self.callbacks.append((delay_s, callback))

    def run(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for _, callback in callbacks:
            callback()


def retire(router: Router, replica: SlowReplica) -> None:
    router.remove(replica)
    replica.is_ending = True


def over_gone_replicas(**options: Any) -> tuple[Router, list[SlowReplica]]:
    """Return a router over two replicas that are gone, of which it was not told."""
    router = Router(D, **options)
    replicas = [SlowReplica(router), SlowReplica(router)]
    for replica in replicas:
        replica.is_ending = True
        router.add(replica)
    return router, replicas


def turned_away(router: Router, going: SlowReplica, staying: SlowReplica) -> Call:
    """Return a call that reached the first replica when that had ended, beside the other."""
    router.add(going)
    call = make_call()
    router.assign(call)
    router.add(staying)
    retire(router, going)
    going.deliver(call)
    return call


def test_a_call_that_was_turned_away_starts_on_another_replica_at_once() -> None:
    router = Router(D, later=Later())
    going, staying = SlowReplica(router), SlowReplica(router, 2)
    call = turned_away(router, going, staying)

    assert staying.arriving == [call]
    assert (going.ongoing, staying.ongoing, router.num_requests) == (0, 1, 1)


class NamedReplica(SlowReplica):
    """A slow replica that a policy can tell from others."""

    def __init__(self, router: Router, name: str) -> None:
        super().__init__(router)
        self._replica_id = ReplicaID(name, D)

    @property
    def replica_id(self) -> ReplicaID:
        return self._replica_id


def test_a_policy_is_asked_again_for_a_call_that_was_turned_away() -> None:
    shown: list[list[str]] = []

    class Policy(RoundRobinRouter):
        def update_replicas(self, replicas: list[RunningReplica]) -> None:
            shown.append([each.replica_id.unique_id for each in replicas])

    router = Router(D, routing=RequestRouterConfig(request_router_class=Policy))
    staying = NamedReplica(router, "staying")
    call = turned_away(router, NamedReplica(router, "going"), staying)

    assert staying.arriving == [call]
    assert shown == [["going"], ["going", "staying"], ["staying"]]


def test_a_policy_gives_a_late_replica_one_call_at_a_time() -> None:
    router = Router(D, routing=RequestRouterConfig(request_router_class=RoundRobinRouter))
    replica = NamedReplica(router, "late")
    replica.slots.max_ongoing, replica.slots.is_late = 5, True
    router.add(replica)
    calls = [make_call(left_s=60) for _ in range(2)]
    assign(router, *calls)

    assert replica.arriving == calls[:1]
    replica.deliver(calls[0])
    router.resume(replica)
    assert replica.arriving == calls[1:]


class Whenever(SyncRequestRouter):
    """Finds no replica for a call that names a model."""

    def rank(self, candidates: list[RunningReplica], request: PendingRequest) -> Any:
        return [] if request.metadata.multiplexed_model_id else [candidates]


@pytest.mark.parametrize("places", [0, 1])
def test_with_a_policy_as_many_calls_wait_as_there_are_free_slots_and_places_in_the_queue(
    places: int,
) -> None:
    router = Router(
        D,
        max_queued_requests=places,
        routing=RequestRouterConfig(request_router_class=Whenever),
    )
    for name in "ab":
        replica = NamedReplica(router, name)
        replica.slots.max_ongoing = 2
        router.add(replica)
    router.assign(make_call())
    calls = [make_call(model_id="m") for _ in range(4 + places)]
    assign(router, *calls)

    assert [call.settled for call in calls] == [False] * (3 + places) + [True]
    assert router.num_rejected == 1
    router.refuse("the test is over")


def test_a_call_that_was_turned_away_is_told_that_the_holder_of_the_last_slot_waits_for_it() -> (
    None
):
    router = Router(D)
    going, staying = SlowReplica(router), SlowReplica(router)
    router.add(going)
    call, holder = make_call(), make_call()
    router.assign(call)
    router.add(staying)
    router.assign(holder)
    staying.deliver(holder)
    waits = threading.Thread(target=copy_context().run, args=(wait_for, holder, call))
    waits.start()
    wait_until(lambda: call in holder.waits_for)
    retire(router, going)
    going.deliver(call)

    waits.join(PATIENCE_S)
    assert isinstance(call.error, RequestCycleError)


def test_a_call_that_was_turned_away_keeps_its_turn_and_its_place_in_a_full_queue() -> None:
    router = Router(D, max_queued_requests=1)
    going, staying = SlowReplica(router), SlowReplica(router)
    router.add(going)
    first, second, third = calls = [make_call() for _ in range(3)]
    router.assign(first)
    router.add(staying)
    assign(router, second, third)
    retire(router, going)
    going.deliver(first)

    assert router.num_queued == 2
    assert not any(call.settled for call in calls)
    staying.deliver(second)
    staying.finish(second)
    assert staying.arriving == [first], "before the third, who came later"


@pytest.mark.parametrize(("options", "count"), [({"max_retries": 4}, 4), ({}, 10)])
def test_a_call_that_no_replica_accepts_fails_after_the_configured_number_of_retries(
    options: dict[str, int], count: int
) -> None:
    later = Later()
    router, replicas = over_gone_replicas(later=later, **options)
    call = make_call()
    router.assign(call)
    pauses = []
    for _ in range(count):
        (replica,) = [each for each in replicas if each.arriving]
        replica.deliver(call)
        pauses += [delay_s for delay_s, _ in later.callbacks]
        later.run()
        assert not call.settled
    (last,) = [each for each in replicas if each.arriving]
    last.deliver(call)

    assert call.error is GONE
    assert router.num_retries == count
    assert len(pauses) == count - 1, "none before the first"
    assert router.num_ongoing == router.num_queued == 0


def test_a_call_that_rests_is_refused_at_once_when_the_deployment_stops() -> None:
    later = Later()
    router, replicas = over_gone_replicas(later=later)
    calls = [make_call() for _ in range(2)]
    assign(router, *calls)
    while len(later.callbacks) < 2:
        for replica in replicas:
            for call in list(replica.arriving):
                replica.deliver(call)
    assert router.num_queued == 2
    calls[0].cancel()
    assert router.num_queued == 1
    assert not any(replica.cancelled for replica in replicas), "it is on none of them"
    router.refuse("it stops")

    assert isinstance(calls[0].error, RequestCancelledError)
    assert isinstance(calls[1].error, DeploymentUnavailableError)
    later.run()
    assert not any(replica.arriving for replica in replicas)


def test_each_other_attempt_is_counted_once() -> None:
    router = Router(D)
    for count in (1, 2):
        router.note_retry()
        assert router.num_retries == count


def test_a_call_that_is_settled_on_its_way_back_into_the_queue_leaves_it() -> None:
    """A cancellation settles the call and then looks for it: it may look a moment too early."""
    later = Later()
    router, replicas = over_gone_replicas(later=later)
    call = make_call()
    router.assign(call)
    while not later.callbacks:
        for replica in [each for each in replicas if each.arriving]:
            replica.deliver(call)
    for replica in replicas:
        router.remove(replica)
    call.settle()
    later.run()

    assert router.num_queued == 0


def test_a_call_whose_deadline_is_before_the_next_try_is_told_at_once() -> None:
    later = Later()
    router, replicas = over_gone_replicas(later=later)
    call = make_call(left_s=-1)
    router.assign(call)
    (replica,) = [each for each in replicas if each.arriving]
    replica.deliver(call)

    assert call.error is GONE
    assert not later.callbacks


class TurnedAwayMachine(RuleBasedStateMachine):
    """The real router over replicas that end while calls are on their way to them."""

    @initialize()
    def begin(self) -> None:
        self.later = Later()
        self.router = Router(D, later=self.later)
        self.replicas: list[SlowReplica] = []
        self.retired: list[SlowReplica] = []
        self.calls: list[Call] = []
        self.settled: Counter[Call] = Counter()

    def everybody(self) -> list[SlowReplica]:
        return self.replicas + self.retired

    def arriving(self) -> list[tuple[SlowReplica, Call]]:
        return [(each, call) for each in self.everybody() for call in each.arriving]

    def running(self) -> list[tuple[SlowReplica, Call]]:
        pairs = [(each, call) for each in self.everybody() for call in each.running]
        return sorted(pairs, key=lambda pair: self.calls.index(pair[1]))

    @rule()
    def submit(self) -> None:
        call = make_call()
        call.when_settled(lambda each: self.settled.update([each]))
        self.calls.append(call)
        self.router.assign(call)

    @precondition(lambda self: self.arriving())
    @rule(which=st.randoms(use_true_random=False))
    def deliver(self, which: random.Random) -> None:
        replica, call = which.choice(self.arriving())
        replica.deliver(call)

    @precondition(lambda self: self.running())
    @rule(which=st.randoms(use_true_random=False))
    def finish(self, which: random.Random) -> None:
        replica, call = which.choice(self.running())
        replica.finish(call)

    @precondition(lambda self: self.calls)
    @rule(which=st.randoms(use_true_random=False), is_late=st.booleans())
    def end_early(self, which: random.Random, is_late: bool) -> None:
        call = which.choice(self.calls)
        call.cancel(RequestTimeoutError("r", 1.0) if is_late else None)

    @precondition(lambda self: len(self.replicas) < 4)
    @rule(slots=st.integers(1, 3))
    def add(self, slots: int) -> None:
        replica = SlowReplica(self.router, slots)
        self.replicas.append(replica)
        self.router.add(replica)

    @precondition(lambda self: self.replicas)
    @rule(which=st.randoms(use_true_random=False), is_cancellation=st.booleans())
    def retire(self, which: random.Random, is_cancellation: bool) -> None:
        """End a replica; the router may be told at once, or never."""
        replica = which.choice(self.replicas)
        replica.is_ending = True
        if is_cancellation:
            self.replicas.remove(replica)
            self.retired.append(replica)
            self.router.remove(replica)

    @rule()
    def pass_time(self) -> None:
        self.later.run()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "router"):
            return
        for each in self.everybody():
            assert len(each.running) + len(each.arriving) == each.ongoing <= each.slots.max_ongoing
        free = any(each.ongoing < each.slots.max_ongoing for each in self.replicas)
        assert not (free and self.router._waiting)
        assert all(count == 1 for count in self.settled.values())
        started = Counter(call for each in self.everybody() for call in each.started)
        assert all(count == 1 for count in started.values()), "user code runs once"

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        self.router.refuse("over")
        while self.arriving() or self.running():
            for replica, call in self.arriving():
                replica.deliver(call)
            for replica, call in self.running():
                replica.finish(call)
        assert (self.router.num_queued, self.router.num_ongoing) == (0, 0)
        assert all(self.settled[call] == 1 for call in self.calls)


TestTurnedAwayMachine = pytest.mark.reliability("D01")(TurnedAwayMachine.TestCase)
TestTurnedAwayMachine.settings = settings(
    max_examples=400 if ROUNDS else 60, stateful_step_count=50, deadline=None
)


# Real replicas.


class Counts:
    """User code of the races."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def count(self, name: int) -> int:
        self.ledger.enter(name)
        return name


def counting(router: Router, max_ongoing: int, **options: Any) -> list[Replica]:
    """Return two real replicas behind a router, which count the runs of calls."""
    make_host = partial(
        ThreadHost,
        func_or_class=Counts,
        bound_app=None,
        num_cpus=1,
        sync_in_threadpool=False,
        **options,
    )
    return [
        Replica(
            ReplicaID(str(number), D),
            make_host,
            max_ongoing=max_ongoing,
            release=router.release,
            reassign=router.reassign,
        )
        for number in range(2)
    ]


@pytest.mark.reliability("D07")
@pytest.mark.parametrize("seed", range(5) if ROUNDS else (1, 4))
@pytest.mark.parametrize("lives", ["own-threads", "one-borrowed-loop"])
def test_a_thousand_calls_racing_the_end_of_a_replica_all_run_once_on_another(
    lives: str, seed: int, switch_interval: None
) -> None:
    ledger = Ledger()
    control, lender = EventLoopThread("control"), EventLoopThread("lender")
    later: Any = lambda delay_s, then: control.mailbox.post(  # noqa: E731
        control.loop.call_later, delay_s, then
    )
    router = Router(D, later=later)
    borrowed = None if lives == "own-threads" else lender.loop
    replicas = counting(router, max_ongoing=50, borrowed=borrowed)
    for replica in replicas:
        run_blocking(control.loop, replica.start((ledger,), {}), PATIENCE_S)
        router.add(replica)
    calls: dict[int, Call] = {}

    def submit(first: int) -> None:
        for name in range(first, 1_000, 4):
            call = calls[name] = make_call()
            call.work = Invocation("count", [name], {}, None)
            router.assign(call)

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(calls) >= 160 * seed)
    ending = replicas[seed % 2]
    router.remove(ending)
    run_blocking(control.loop, ending.stop(PATIENCE_S), 2 * PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)

    try:
        assert len(calls) == 1_000
        for name, call in calls.items():
            assert call.wait_blocking(PATIENCE_S)
            # Only a call that was cut short while it ran may fail, after one run.
            if call.error is not None:
                assert isinstance(call.error, ReplicaUnavailableError)
                assert ledger.runs[name] == 1
            else:
                assert call.value == name
        assert set(ledger.runs.values()) == {1}
        wait_until(lambda: not any(replica.ongoing for replica in replicas))
    finally:
        router.refuse("over")
        run_blocking(control.loop, replicas[1 - seed % 2].stop(PATIENCE_S), 2 * PATIENCE_S)
        assert lender.stop(PATIENCE_S)
        assert control.stop(PATIENCE_S)


@pytest.mark.parametrize("way", ["in-its-mailbox", "before-its-first-step"])
def test_what_a_stuck_replica_has_not_begun_runs_once_on_another(way: str) -> None:
    ledger = Ledger()
    control = EventLoopThread("control")
    router = Router(D)
    stuck, other = counting(router, max_ongoing=10)
    calls = [make_call() for _ in range(5)]
    for name, call in enumerate(calls):
        call.work = Invocation("count", [name], {}, None)

    submit = partial(assign, router, *calls)

    async def block(then: Callable[[], None]) -> None:
        then()
        ledger.entered.set()
        ledger.leave.wait()

    for replica in (stuck, other):
        run_blocking(control.loop, replica.start((ledger,), {}), PATIENCE_S)
    router.add(stuck)
    is_arriving = way == "in-its-mailbox"
    blocked = asyncio.run_coroutine_threadsafe(
        block((lambda: None) if is_arriving else submit), stuck.loop
    )
    assert ledger.entered.wait(PATIENCE_S)
    if is_arriving:
        submit()
    assert stuck.ongoing == 5
    router.add(other)
    router.remove(stuck)
    run_blocking(control.loop, stuck.stop(0.2), PATIENCE_S)

    assert all(call.wait_blocking(PATIENCE_S) for call in calls)
    assert [call.outcome() for call in calls] == list(range(5))
    ledger.leave.count_down()
    blocked.result(PATIENCE_S)
    assert not stuck.host.join(time.monotonic() + PATIENCE_S)
    assert set(ledger.runs.values()) == {1}
    wait_until(lambda: (stuck.ongoing, other.ongoing) == (0, 0))
    router.remove(other)
    run_blocking(control.loop, other.stop(PATIENCE_S), PATIENCE_S)
    assert control.stop(PATIENCE_S)


# Over HTTP.


def endless(ledger: Ledger, **options: Any) -> Any:
    """Return an application whose requests never end."""

    @serve.deployment(**options)
    async def wait(request: Request) -> None:
        ledger.enter(request.url.path)
        await asyncio.Future()

    return wait.bind()


def slow_at_first(attempts: dict[str, list[str]]) -> Any:
    """Return an application that answers the second attempt at a path; list their replicas."""

    @serve.deployment(num_replicas=2)
    async def answer(request: Request) -> str:
        tags = attempts.setdefault(request.url.path, [])
        tags.append(serve.get_replica_context().replica_tag)
        if len(tags) < 2:
            await asyncio.Future()
        return "second"

    return answer.bind()


def send(port: int, method: str, path: str = "/", headers: str = "", body: bytes = b"") -> Any:
    with Connection(port) as connection:
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        connection.request(path, method=method, headers=headers + length + "Connection: close\r\n")
        if body:
            connection.send(body)
        return connection.answer()


@pytest.mark.reliability("B21")
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_requests_that_race_the_end_of_a_replica_lose_nothing_and_run_once(
    method: str, threadpool: str, switch_interval: None
) -> None:
    ledger = Ledger()

    @serve.deployment(num_replicas=2, max_ongoing_requests=2)
    async def count(request: Request) -> str:
        ledger.enter(request.url.path)
        return "counted"

    port = served(count.bind())
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(send, port, method, f"/{number}") for number in range(150)]
        end_a_replica()
        assert {answer.result().status for answer in answers} <= {200, 503}
        statuses = {number: answer.result().status for number, answer in enumerate(answers)}

    assert max(ledger.runs.values()) == 1
    # Each failed request was cut short while it ran.
    assert all(ledger.runs[f"/{number}"] == 1 for number in statuses)
    assert Counter(statuses.values())[200] >= 145


@pytest.mark.reliability("B09")
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_by_default_what_has_run_is_never_sent_again(method: str, threadpool: str) -> None:
    """Not after a timeout, and not after the death of its replica."""
    attempts: dict[str, list[str]] = {}
    port = served(slow_at_first(attempts))
    assert send(port, method, "/late", "x-request-timeout-seconds: 0.1\r\n").status == 408
    with Connection(port) as connection:
        connection.request("/cut", method=method, headers="Connection: close\r\n")
        wait_until(lambda: attempts.get("/cut"))
        end_a_replica(attempts["/cut"][0])
        assert connection.answer().status == 503
    assert {path: len(tags) for path, tags in attempts.items()} == {"/late": 1, "/cut": 1}


LISTED: dict[str, Any] = {"retry_started_methods": ["GET", "PUT"]}


# The guide: "set an end-to-end timeout, so slow requests can be terminated and retried at another
# replica."
def test_a_listed_method_is_tried_again_when_an_attempt_is_too_slow(threadpool: str) -> None:
    attempts: dict[str, list[str]] = {}
    port = served(slow_at_first(attempts), request_timeout_s=0.1, **LISTED)
    answer = send(port, "GET", headers="x-request-id: r-1\r\n")

    assert (answer.status, answer.body) == (200, b"second")
    assert answer.headers["x-request-id"] == "r-1"
    assert len(attempts["/"]) == 2
    wait_until(lambda: ongoing() == 0)


def test_another_replica_is_preferred_for_another_attempt(threadpool: str) -> None:
    """The first is as idle as the others, once it has cancelled its call."""
    attempts: dict[str, list[str]] = {}
    port = served(slow_at_first(attempts), request_timeout_s=0.05, **LISTED)
    for number in range(10):
        assert send(port, "GET", f"/{number}").status == 200

    assert all(sorted(tags) == ["0", "1"] for tags in attempts.values()), attempts


def test_three_attempts_at_most_and_then_the_408_is_final(threadpool: str) -> None:
    ledger = Ledger()

    @serve.deployment(num_replicas=2, max_ongoing_requests=2)
    def slow(request: Request) -> None:
        ledger.enter(request.method)
        ledger.leave.wait()
        ledger.exit()

    port = served(slow.bind(), request_timeout_s=0.1, **LISTED)
    begin = time.monotonic()
    answer = send(port, "GET")

    assert time.monotonic() - begin >= 0.29
    assert answer.status == 408
    assert answer.body.endswith(b"timed out after 0.1s.")
    assert send(port, "POST").status == 408
    assert ledger.runs == {"GET": 3, "POST": 1}, "the slots of three attempts are taken still"
    assert ongoing() == 4
    ledger.leave.count_down()
    wait_until(lambda: ongoing() == 0)
    assert ledger.most_running == 4


def test_a_listed_method_is_tried_again_when_its_replica_dies(threadpool: str) -> None:
    attempts: dict[str, list[str]] = {}
    with Connection(served(slow_at_first(attempts), **LISTED)) as connection:
        connection.request("/")
        wait_until(lambda: attempts.get("/"))
        end_a_replica(attempts["/"][0])
        assert connection.answer().body == b"second"
    assert len(attempts["/"]) == 2


def test_the_clients_own_limit_bounds_all_attempts_together(threadpool: str) -> None:
    ledger = Ledger()
    port = served(endless(ledger), request_timeout_s=30, **LISTED)
    begin = time.monotonic()

    assert send(port, "GET", headers="x-request-timeout-seconds: 0.1\r\n").status == 408
    assert time.monotonic() - begin < 10
    assert ledger.runs == {"/": 1}


@pytest.mark.reliability("B09")
def test_a_response_that_has_begun_is_cut_and_not_tried_again(threadpool: str) -> None:
    ledger = Ledger()

    @serve.deployment
    async def stream(request: Request) -> StreamingResponse:
        ledger.enter(request.method)

        async def items() -> Any:
            yield b"first"
            await asyncio.Future()

        return StreamingResponse(items())

    answer = send(served(stream.bind(), request_timeout_s=0.1, **LISTED), "GET")

    assert (answer.body, answer.is_complete) == (b"first", False)
    assert ledger.runs == {"GET": 1}


def test_a_body_is_sent_again_if_it_is_at_hand_whole(threadpool: str) -> None:
    ledger = Ledger()

    @serve.deployment(num_replicas=2)
    async def reader(request: Request) -> bytes:
        body = await request.body()
        if ledger.enter(request.url.path) < 2:
            await asyncio.Future()
        return body

    port = served(reader.bind(), request_timeout_s=0.5, **LISTED)
    assert send(port, "PUT", "/small", body=b"abc").body == b"abc"
    with Connection(port) as connection:
        connection.request("/parts", method="PUT", headers="Content-Length: 6\r\n")
        connection.send(b"abc")
        connection.send_slowly(b"def")
        assert b"abcdef" in connection.receive_until(b"abcdef")
    for path, length, rest in (("/none", 6, 0), ("/large", 70000, 6)):
        with Connection(port) as connection:
            connection.request(path, method="PUT", headers=f"Content-Length: {length}\r\n")
            connection.send(bytes(length - 6))
            connection.send_slowly(bytes(rest))
            connection.receive_until(b"timed out after")
    assert ledger.runs == {"/small": 2, "/parts": 2, "/large": 1}


@pytest.mark.parametrize("error", [TimeoutError, "timeout", "gone"], ids=str)
def test_errors_of_user_code_are_never_tried_again(error: Any, threadpool: str) -> None:
    """Not even if they have a type of `ingress`."""
    ledger = Ledger()

    @serve.deployment
    async def raising(request: Request) -> None:
        ledger.enter(request.method)
        if error == "timeout":
            raise RequestTimeoutError("mine", 1.0)
        raise GONE if error == "gone" else TimeoutError

    answer = send(served(raising.bind(), request_timeout_s=30, **LISTED), "GET")

    assert answer.status == {"timeout": 408, "gone": 503}.get(error, 500)
    assert ledger.runs == {"GET": 1}


def test_a_request_that_ends_in_a_later_attempt_says_how_long_it_had_in_all(
    threadpool: str,
) -> None:
    port = served(endless(Ledger(), num_replicas=2), request_timeout_s=0.4, **LISTED)
    answer = send(port, "GET", "/", "x-request-timeout-seconds: 0.7\r\n")

    assert answer.status == 408
    assert answer.body.endswith(b"timed out after 0.7s.")


@pytest.mark.reliability("A07")
def test_a_storm_of_timeouts_is_retried_within_the_budget(threadpool: str) -> None:
    ledger = Ledger()
    port = served(endless(ledger, max_ongoing_requests=1_000), request_timeout_s=0.05, **LISTED)
    with ThreadPoolExecutor(32) as clients:
        statuses = [each.status for each in clients.map(lambda _: send(port, "GET"), range(200))]

    # A call that waited for a busy event loop is shed, since such calls never end in time.
    assert set(statuses) <= {408, 503}
    begun = statuses.count(408)
    assert begun < ledger.runs["/"] <= begun + 100 + 40, "100 for the last 10 s, 20 % of 200"


def test_with_retries_set_to_0_what_was_turned_away_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, threadpool: str
) -> None:
    monkeypatch.setenv(MAX_RETRIES, "0")

    @serve.deployment(num_replicas=2)
    async def quick(request: Request) -> str:
        return "quick"

    port = served(quick.bind())
    (router,) = local_engine().routers.values()
    call = make_call()
    call.runner = router.replicas[0]
    router.reassign(call, GONE)

    assert call.error is GONE
    assert get(port, "/").status == 200


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (["POST"], "must not run twice"),
        (["PATCH"], "PATCH"),
        (["get"], "GET"),
        ("GET", "a list"),
        ([1], "a list"),
    ],
    ids=str,
)
def test_only_idempotent_methods_can_be_listed(methods: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"retry_started_methods.*{expected}"):
        serve.HTTPOptions(retry_started_methods=methods)


def test_no_method_is_listed_by_default_and_a_list_is_kept() -> None:
    assert serve.HTTPOptions().retry_started_methods == []
    assert serve.HTTPOptions(**LISTED).retry_started_methods == ["GET", "PUT"]
    assert REQUEST_TIMEOUT_S.startswith("RAY_SERVE")
