"""`ingress.serving.replicas.router`: calls get slots in their order, and no call is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.deadlocks import check_deadlock
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
    RequestCycleError,
    RequestTimeoutError,
)
from ingress.serving.replicas.router import Router
from ingress.testing import Latch
from tests.fakes import FakeAdmission, FakeReplica, assign, bind, make_call, together
from tests.servers import PATIENCE_S, ROUNDS

pytestmark = pytest.mark.usefixtures("shutdown")


def routed(*slots: int, max_queued: int = -1, name: str = "D") -> tuple[Router, list[FakeReplica]]:
    """Return a router over fake replicas with the given numbers of slots."""
    router = Router(DeploymentID(name), max_queued)
    replicas = [FakeReplica(router, count) for count in slots]
    for replica in replicas:
        router.add(replica)
    return router, replicas


def test_no_call_overtakes_another_in_eighteen_thousand_submissions(switch_interval: None) -> None:
    """Four threads submit, one ends the work; the calls of each thread start in its order."""
    count, callers = 4_500, 4
    router = Router(DeploymentID("D"))
    started: list[Call] = []
    work: deque[Call] = deque()
    ready = threading.Semaphore(0)

    class Recording(FakeReplica):
        def submit(self, call: Call) -> None:
            super().submit(call)
            started.append(call)
            work.append(call)
            ready.release()

    replica = Recording(router, 2)
    router.add(replica)
    numbers: dict[Call, tuple[int, int]] = {}

    def caller(which: int) -> None:
        for number in range(count):
            call = make_call()
            numbers[call] = which, number
            router.assign(call)

    def finisher() -> None:
        for _ in range(count * callers):
            assert ready.acquire(timeout=PATIENCE_S)
            replica.finish(work.popleft())

    together(finisher, *(lambda which=which: caller(which) for which in range(callers)))

    assert len(started) == count * callers
    for which in range(callers):
        order = [number for owner, number in map(numbers.__getitem__, started) if owner == which]
        assert order == list(range(count))
    assert replica.most_running <= 2
    assert (router.num_queued, router.num_ongoing) == (0, 0)
    assert router.num_requests == count * callers


@pytest.mark.reliability("A04")
def test_admission_is_exact_in_a_burst(switch_interval: None) -> None:
    """S slots, a queue of Q and S + Q + 50 at once: S run, Q wait, 50 are refused."""
    slots, queue = 20, 30
    router, replicas = routed(5, 5, 10, max_queued=queue)
    calls = [make_call() for _ in range(slots + queue + 50)]

    together(*(partial(assign, router, *calls[first::10]) for first in range(10)))

    assert sum(len(each.running) for each in replicas) == slots
    assert router.num_queued == queue
    refused = [call.error for call in calls if call.settled]
    assert len(refused) == 50
    assert all(isinstance(error, BackPressureError) for error in refused)
    assert router.num_requests == slots + queue, "what was refused was not accepted"
    router.refuse("the test is over")


def test_a_refusal_says_what_is_full() -> None:
    router, _ = routed(1, max_queued=1)
    calls = [make_call() for _ in range(3)]
    assign(router, *calls)

    assert [call.settled for call in calls] == [False, False, True]
    with pytest.raises(BackPressureError, match=r"max_queued_requests=1\) on 'D'"):
        calls[2].outcome()


@pytest.mark.parametrize("seed", range(2))
def test_a_slot_handed_to_a_cancelled_call_goes_on_to_the_next(
    seed: int, switch_interval: None
) -> None:
    choice = random.Random(seed)
    for _ in range(200):
        router, (replica,) = routed(1)
        first, second, third = calls = [make_call() for _ in range(3)]
        assign(router, *calls)
        assert replica.started == [first]

        both: list[Callable[[], object]] = [partial(replica.finish, first), second.cancel]
        choice.shuffle(both)
        together(*both)

        assert isinstance(second.error, RequestCancelledError)
        if second in replica.running:  # the call started before the cancellation
            assert replica.cancelled == [second]
            replica.finish(second)
        assert replica.running == {third}
        assert replica.ongoing == 1
        replica.finish(third)
        assert (replica.ongoing, router.num_queued) == (0, 0)


def test_a_cancelled_call_never_starts_and_its_place_in_the_queue_is_free_at_once() -> None:
    router, (replica,) = routed(1, max_queued=1)
    first, second, third = (make_call() for _ in range(3))
    assign(router, first, second)
    second.cancel()
    router.assign(third)
    replica.finish(first)

    assert replica.started == [first, third]
    assert replica.skipped == []


def test_a_call_cancelled_before_it_is_assigned_takes_no_slot_with_it() -> None:
    router, (replica,) = routed(1)
    early, late = make_call(), make_call()
    early.cancel()
    assign(router, early, late)
    assert replica.started == [late]

    waiting = make_call()
    waiting.cancel()
    router.assign(waiting)
    assert router.num_queued == 0


@pytest.mark.reliability("D07")
def test_ten_thousand_calls_with_cancels_from_all_sides_leave_nothing(
    switch_interval: None,
) -> None:
    router, replicas = routed(1, 2, 3, max_queued=40)
    settled: Counter[Call] = Counter()
    ended = threading.Event()
    calls: deque[Call] = deque()

    def submit(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(2_500):
            call = make_call()
            call.when_settled(lambda each: settled.update([each]))
            calls.append(call)
            if choice.random() < 0.05:
                call.cancel()
            router.assign(call)

    def cancel() -> None:
        choice = random.Random(9)
        while not ended.is_set():
            if calls:
                choice.choice(calls).cancel()

    def finish() -> None:
        while not ended.is_set() or any(each.running for each in replicas):
            for replica in replicas:
                for call in list(replica.running):
                    replica.finish(call)

    def submit_all() -> None:
        together(*(lambda seed=seed: submit(seed) for seed in range(4)))
        ended.set()

    together(submit_all, cancel, finish)

    assert all(settled[call] == 1 for call in calls)
    assert len(settled) == len(calls) == 10_000
    assert [each.ongoing for each in replicas] == [0, 0, 0]
    assert router.num_queued == 0
    for replica in replicas:
        assert replica.most_running <= replica.slots.max_ongoing
        assert len(set(replica.started)) == len(replica.started), "none began twice"


def test_refusing_settles_all_who_wait_and_all_who_come() -> None:
    router, (replica,) = routed(1)
    running, waiting, late = (make_call() for _ in range(3))
    assign(router, running, waiting)
    router.refuse("it is being deleted")
    router.assign(late)

    for call in (waiting, late):
        with pytest.raises(DeploymentUnavailableError, match="it is being deleted"):
            call.outcome()
    assert replica.finish(running, "what runs goes on")


def test_many_replicas_cost_a_request_no_more_than_few() -> None:
    """Count, instead of time, how often a request reads the load of a replica."""

    class Counting(FakeAdmission):
        looks = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "ongoing":
                Counting.looks += 1
            return super().__getattribute__(name)

    def looks(count: int) -> int:
        router = Router(DeploymentID("D"))
        replicas = [FakeReplica(router, 2) for _ in range(count)]
        for replica in replicas:
            replica.slots = Counting(replica, 2)
            router.add(replica)
        Counting.looks = 0
        calls = [make_call() for _ in range(2 * count)]
        assign(router, *calls)
        for replica in replicas:
            for call in list(replica.running):
                replica.finish(call)
        return Counting.looks // count

    assert looks(1_000) <= looks(10) + 2


def served(router: Router, replicas: list[FakeReplica], calls: int) -> list[FakeReplica]:
    """Make calls one after the other; return the replica of each."""
    order = []
    for _ in range(calls):
        call = make_call()
        router.assign(call)
        (replica,) = (each for each in replicas if each is call.runner)
        replica.finish(call)
        order.append(replica)
    return order


@pytest.mark.reliability("A16")
def test_of_two_replicas_none_ever_has_two_calls_more_than_the_other() -> None:
    router, (one, other) = routed(40, 40)
    for _ in range(80):
        router.assign(make_call())
        assert abs(one.ongoing - other.ongoing) <= 1


def test_calls_that_come_together_go_to_a_replica_at_work_if_none_has_fewer() -> None:
    router, replicas = routed(*[100] * 8)
    calls = [make_call() for _ in range(400)]
    assign(router, *calls)

    assert all(35 <= replica.ongoing <= 65 for replica in replicas), "as even as by two choices"
    changes = sum(one.runner is not other.runner for one, other in itertools.pairwise(calls))
    assert changes < 300, "seven in eight without a preference: 350"


def test_of_equal_replicas_that_which_got_the_last_call_gets_the_next() -> None:
    """Its loop is awake; wherever it stands in the list."""
    found = set()
    for _ in range(40):
        router, replicas = routed(100, 100)
        calls = [make_call() for _ in range(3)]
        assign(router, *calls)
        assert calls[2].runner is calls[1].runner
        found.add(replicas.index(calls[1].runner))  # type: ignore[arg-type]

    assert found == {0, 1}


def test_a_replica_with_fewer_slots_than_calls_gets_none_until_one_of_them_is_free() -> None:
    router, (replica,) = routed(3)
    calls = [make_call() for _ in range(4)]
    assign(router, *calls[:3])
    router.resize(replica, 1)
    for call in calls[:2]:
        replica.finish(call)
    router.assign(calls[3])
    assert (replica.ongoing, router.num_queued) == (1, 1)

    replica.finish(calls[2])

    assert calls[3].runner is replica


def test_calls_one_at_a_time_go_to_all_replicas() -> None:
    router, replicas = routed(*[100] * 8)

    found = Counter(map(id, served(router, replicas, 800)))

    assert len(found) == 8
    assert min(found.values()) > 50, "a hundred or so each"


def test_of_many_idle_replicas_each_has_its_turn_of_several_calls() -> None:
    router, replicas = routed(*[2] * 128)
    order = served(router, replicas, 128 * 16 * 8)

    assert set(order) == set(replicas)
    changes = sum(one is not other for one, other in itertools.pairwise(order))
    assert changes < len(order) / 8, "one in sixteen, or so"


def test_a_call_goes_to_the_one_idle_replica_among_many_that_have_work() -> None:
    router, replicas = routed(*[2] * 128)
    running = [make_call() for _ in replicas]
    assign(router, *running)
    assert {call.runner for call in running} == set(replicas), "one each, as long as one is idle"

    for idle in replicas:
        (theirs,) = idle.running
        idle.finish(theirs)
        assert served(router, replicas, 1) == [idle]
        again = make_call()
        router.assign(again)
        assert again.runner is idle


def test_a_replica_that_was_removed_has_no_turn() -> None:
    router, replicas = routed(*[2] * 130)
    removed = served(router, replicas, 2)
    for replica in set(removed):
        router.remove(replica)

    assert not set(removed) & set(served(router, replicas, 200))


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_many_replicas_are_not_given_a_second_call_while_one_is_idle(
    seed: int,
) -> None:
    choice = random.Random(seed)
    router, replicas = routed(*[2] * 140)
    running: set[Call] = set()
    for _ in range(2_000):
        step = choice.random()
        if step < 0.52:
            idle = [each for each in replicas if not each.ongoing]
            call = make_call(model_id=choice.choice(["", "", "a", "b"]))
            router.assign(call)
            running.add(call)
            if idle and not call.metadata.multiplexed_model_id:
                assert any(call.runner is each for each in idle)
        elif step < 0.98 and running:
            call = choice.choice(sorted(running, key=id))
            (replica,) = (each for each in replicas if each is call.runner)
            running.discard(call)
            replica.finish(call)
        elif step < 0.985:
            resized = choice.choice(replicas)  # its place among the idle ones does not change
            router.resize(resized, resized.slots.max_ongoing)
        elif step < 0.99 and len(replicas) > 128:
            leaving = choice.choice(replicas)
            if not leaving.running:
                replicas.remove(leaving)
                router.remove(leaving)
        else:
            replicas.append(FakeReplica(router, 2))
            router.add(replicas[-1])
    router.refuse("the test is over")


def test_a_model_is_asked_for_where_it_is_or_is_about_to_be() -> None:
    router, replicas = routed(2, 2, 2)
    one, other, third = replicas
    one.model_ids, other.model_ids = frozenset("ab"), frozenset("c")
    calls = [make_call(model_id=model_id) for model_id in "aaabcd"]
    assign(router, *calls)

    first, second, spilt, fourth, fifth, sixth = (call.runner for call in calls)
    assert first is second is one
    assert spilt is third, "one is full; of the others it has the fewest models"
    assert fifth is other
    assert {fourth, sixth} == {other, third}, "two slots are left: none is kept for a model"
    assert one.slots.requested == {"a": 2}


# The state machine: random sequences of steps, and invariants after each step.


class RouterMachine(RuleBasedStateMachine):
    """The real router over fake replicas."""

    @initialize(max_queued=st.sampled_from([-1, 1, 3]))
    def begin(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.router = Router(DeploymentID("D"), max_queued)
        self.replicas: list[FakeReplica] = []
        self.removed: dict[FakeReplica, int] = {}  # number of calls it had started by then
        self.calls: list[Call] = []
        self.number: dict[Call, int] = {}
        self.settled: Counter[Call] = Counter()
        self.cancelled_waiting: set[Call] = set()
        self.expected: dict[Call, Any] = {}
        self.order: list[int] = []
        self.seen: dict[FakeReplica, int] = {}
        self.refuses = False

    def everybody(self) -> list[FakeReplica]:
        return [*self.replicas, *self.removed]

    def running(self) -> list[tuple[FakeReplica, Call]]:
        pairs = [(each, call) for each in self.everybody() for call in each.running]
        return sorted(pairs, key=lambda pair: self.number[pair[1]])

    def note_starts(self) -> None:
        """Record the order in which calls started in this step."""
        fresh: list[int] = []
        for each in self.everybody():
            begun = each.started[self.seen.get(each, 0) :]
            self.seen[each] = len(each.started)
            fresh += [self.number[call] for call in begun]
        self.order += sorted(fresh)

    @rule(model_id=st.sampled_from(["", "", "a", "b", "c"]))
    def submit(self, model_id: str) -> None:
        call = make_call(model_id=model_id)
        call.when_settled(lambda each: self.settled.update([each]))
        self.number[call] = len(self.calls)
        self.calls.append(call)
        full = 0 <= self.max_queued <= self.router.num_queued
        available = [each for each in self.replicas if each.ongoing < each.slots.max_ongoing]
        free = bool(available)
        known = {each: each.model_ids | each.slots.requested.keys() for each in available}
        self.router.assign(call)
        if model_id and call.runner is not None:
            chosen = next(each for each in available if each is call.runner)
            if any(model_id in ids for ids in known.values()):
                assert model_id in known[chosen]  # (11)
            else:
                assert len(known[chosen]) == min(map(len, known.values()))
        if self.refuses:
            assert isinstance(call.error, DeploymentUnavailableError)
        elif full and not free:
            assert isinstance(call.error, BackPressureError)
        else:
            assert not call.settled

    @precondition(lambda self: self.calls)
    @rule(which=st.randoms(use_true_random=False), is_late=st.booleans())
    def cancel(self, which: random.Random, is_late: bool) -> None:
        call = which.choice(self.calls)
        was_running = any(call in each.running for each in self.everybody())
        if call.cancel(RequestTimeoutError("r", 1.0) if is_late else None):
            self.expected[call] = RequestTimeoutError if is_late else RequestCancelledError
            if was_running:
                assert any(call in each.cancelled for each in self.everybody())
            else:
                self.cancelled_waiting.add(call)

    @precondition(lambda self: self.running())
    @rule(which=st.randoms(use_true_random=False), fails=st.booleans())
    def finish(self, which: random.Random, fails: bool) -> None:
        replica, call = which.choice(self.running())
        ongoing = sum(each.ongoing for each in self.everybody())
        waiting = self.router.num_queued
        answered = replica.finish(call, self.number[call])
        freed = ongoing - sum(each.ongoing for each in self.everybody())
        handed = waiting - self.router.num_queued
        assert freed + handed == 1, "exactly one slot is freed or handed over"
        if answered:
            self.expected[call] = self.number[call]

    @precondition(lambda self: self.replicas)
    @rule(which=st.randoms(use_true_random=False), ids=st.frozensets(st.sampled_from("abcd")))
    def load(self, which: random.Random, ids: frozenset[str]) -> None:
        which.choice(self.replicas).model_ids = ids

    @precondition(lambda self: len(self.replicas) < 4)
    @rule(slots=st.integers(1, 3))
    def add(self, slots: int) -> None:
        replica = FakeReplica(self.router, slots)
        self.replicas.append(replica)
        self.router.add(replica)

    @precondition(lambda self: self.replicas)
    @rule(which=st.randoms(use_true_random=False))
    def remove(self, which: random.Random) -> None:
        replica = which.choice(self.replicas)
        self.replicas.remove(replica)
        self.removed[replica] = len(replica.started)
        self.router.remove(replica)

    @precondition(lambda self: len(self.calls) > 20 and not self.refuses)
    @rule()
    def refuse(self) -> None:
        self.refuses = True
        self.router.refuse("gone")
        assert self.router.num_queued == 0

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "router"):
            return
        self.note_starts()
        router = self.router
        for each in self.everybody():
            assert len(each.running) == each.ongoing <= each.slots.max_ongoing  # (1), (7)
            named = Counter(call.metadata.multiplexed_model_id for call in each.running)
            del named[""]
            assert each.slots.requested == named  # (12)
        assert self.max_queued < 0 or router.num_queued <= self.max_queued  # (2)
        free = any(each.ongoing < each.slots.max_ongoing for each in self.replicas)
        assert not (free and router.num_queued)  # (3)
        assert self.order == sorted(self.order)  # (4)
        assert all(count == 1 for count in self.settled.values())  # (5)
        started = {call for each in self.everybody() for call in each.started}
        assert not started & self.cancelled_waiting  # (6)
        for each, count in self.removed.items():
            assert len(each.started) == count  # (8)

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        while running := self.running():
            replica, call = running[0]
            if replica.finish(call, self.number[call]):
                self.expected[call] = self.number[call]
        self.router.refuse("over")
        assert (self.router.num_queued, self.router.num_ongoing) == (0, 0)  # (10)
        assert all(self.settled[call] == 1 for call in self.calls)
        for call, expected in self.expected.items():
            assert call.value == expected or isinstance(call.error, expected)


TestRouterMachine = pytest.mark.reliability("D01")(RouterMachine.TestCase)
TestRouterMachine = pytest.mark.timeout(240)(TestRouterMachine)  # 800 examples of 50 steps
TestRouterMachine.settings = settings(
    max_examples=800 if ROUNDS else 100, stateful_step_count=50, deadline=None
)


# Cycles.


def blocked_by(waiter: Call, call: Call) -> threading.Thread:
    """Wait for `call` in the user code of `waiter`, in a thread; return once it waits."""

    def wait() -> None:
        CURRENT_CALL.set(waiter)
        call.wait_blocking(PATIENCE_S)

    thread = threading.Thread(target=wait)
    thread.start()
    while call not in waiter.waits_for and thread.is_alive():
        thread.join(0.001)
    return thread


def test_two_chains_that_wait_for_each_other_are_a_cycle_too() -> None:
    """No call waits for a slot of its own ancestors here; A -> B and B -> A meet."""
    router_a, (replica_a,) = routed(1, name="A")
    router_b, (replica_b,) = routed(1, name="B")
    a, b = make_call("A"), make_call("B")
    a_in_b, b_in_a = make_call("B"), make_call("A")
    assign(router_a, a, b_in_a)
    assign(router_b, b, a_in_b)
    threads = [blocked_by(a, a_in_b)]
    assert not a_in_b.settled, "b may still end"
    threads.append(blocked_by(b, b_in_a))

    assert isinstance(b_in_a.error, RequestCycleError)
    assert "A -> B -> A" in str(b_in_a.error)
    assert not a_in_b.settled
    replica_b.finish(b)
    assert a_in_b in replica_b.running
    replica_b.finish(a_in_b)
    for thread in threads:
        thread.join(PATIENCE_S)
    replica_a.finish(a)


def test_no_call_is_failed_before_the_last_holder_waits_too() -> None:
    router, (replica,) = routed(2)
    one, other, child, grandchild = (make_call() for _ in range(4))
    assign(router, one, other, child, grandchild)
    threads = [blocked_by(one, child), blocked_by(one, grandchild)]

    assert not child.settled
    replica.finish(other)
    assert child in replica.running
    assert not grandchild.settled
    threads.append(blocked_by(child, grandchild))

    assert isinstance(grandchild.error, RequestCycleError)
    replica.finish(child)
    for thread in threads:
        thread.join(PATIENCE_S)
    replica.finish(one)


def test_a_wait_for_the_first_of_several_calls_is_not_stuck_while_one_can_end() -> None:
    """A wait for the first of several looks like a wait for all: `FIRST_COMPLETED` of asyncio."""
    router, (replica,) = routed(1)
    other, (other_replica,) = routed(1)
    parent, stuck, first = make_call(), make_call(), make_call()
    assign(router, parent, stuck)
    other.assign(first)
    threads = [blocked_by(parent, first), blocked_by(parent, stuck)]
    assert not stuck.settled

    other_replica.finish(first)  # the parent wanted both: no other call can end now
    for thread in threads:
        thread.join(PATIENCE_S)
    assert isinstance(stuck.error, RequestCycleError)
    replica.finish(parent)


def test_a_call_is_stuck_if_one_of_its_arguments_is() -> None:
    router, (replica,) = routed(1)
    other, (other_replica,) = routed(1)
    parent, stuck, fine, needs_both = (make_call() for _ in range(4))
    assign(router, parent, stuck)
    other.assign(fine)
    needs_both.waits_for = frozenset([stuck, fine])
    needs_both.queue = other
    stuck.is_awaited = True
    thread = blocked_by(parent, needs_both)

    assert isinstance(stuck.error, RequestCycleError)
    other_replica.finish(fine)
    needs_both.cancel()
    thread.join(PATIENCE_S)
    replica.finish(parent)


def test_a_call_that_the_holder_of_the_last_slot_awaits_before_it_comes_is_told_so() -> None:
    """As one whose arguments are not there yet."""
    router, (replica,) = routed(1)
    holder, call = make_call(), make_call()
    router.assign(holder)
    thread = blocked_by(holder, call)
    assert not call.settled

    router.assign(call)

    assert isinstance(call.error, RequestCycleError)
    thread.join(PATIENCE_S)
    replica.finish(holder)


def test_a_cycle_that_a_late_await_closes_is_found() -> None:
    """b awaits its child in A first; only then a awaits b."""
    router_a, (replica_a,) = routed(1, name="A")
    router_b, (replica_b,) = routed(1, name="B")
    a, b, again = make_call("A"), make_call("B"), make_call("A")
    assign(router_a, a, again)
    router_b.assign(b)
    threads = [blocked_by(b, again)]
    assert not again.settled, "a does not wait for b, and will end"
    threads.append(blocked_by(a, b))

    assert isinstance(again.error, RequestCycleError)
    replica_b.finish(b)
    for thread in threads:
        thread.join(PATIENCE_S)
    replica_a.finish(a)


def test_a_cycle_that_is_seen_once_only_was_none() -> None:
    """The queues are read one by one; between two reads a call may have moved on."""
    router, (replica,) = routed(1)
    waiter, child = make_call(), make_call("B")

    class MovesOn:
        looks = 0

        def withdraw(self, call: Call) -> bool:
            return True

        def holders(self, call: Call) -> frozenset[Call] | None:
            self.looks += 1
            return frozenset([waiter]) if self.looks == 1 else None

        def describe_deadlock(self, chain: str) -> str:
            return chain

        def note_expired(self) -> None: ...

    router.assign(waiter)
    child.queue = MovesOn()
    thread = blocked_by(waiter, child)
    check_deadlock(waiter)

    assert not child.settled
    child.settle("in time")
    thread.join(PATIENCE_S)
    replica.finish(waiter)


@serve.deployment(max_ongoing_requests=1)
class Pong:
    async def __call__(self, how: str) -> Any:
        response = serve.get_deployment_handle("Ping").remote("end")
        if how == "forget":
            kept.append(response)
            return "forgotten"
        return await response


@serve.deployment(max_ongoing_requests=1)
class Ping:
    def __init__(self, pong: Any) -> None:
        self.pong = pong

    async def __call__(self, how: str = "await") -> Any:
        if how == "end":
            return "ended"
        if how == "stream":
            handle = serve.get_deployment_handle("Ping").options(stream=True, method_name="items")
            return [item async for item in handle.remote()]
        if how == "argument":
            return await self.pong.remote(serve.get_deployment_handle("Ping").remote("end"))
        if how == "unawaited argument":
            first = serve.get_deployment_handle("Ping").remote("end")
            kept.append(self.pong.remote(first))
            return "not awaited"
        return await self.pong.remote(how)

    async def items(self) -> Any:
        yield 1


kept: list[Any] = []


@pytest.fixture
def ping(flags: Any) -> Iterator[serve.DeploymentHandle]:
    yield serve.run(bind(Ping, bind(Pong)), route_prefix=None)
    kept.clear()
    serve.shutdown()


@pytest.mark.reliability("A19")
@pytest.mark.parametrize("how", ["await", "stream", "argument"])
def test_a_chain_that_waits_for_its_own_slot_fails_at_once_and_names_the_cycle(
    ping: serve.DeploymentHandle, how: str
) -> None:
    with pytest.raises(RequestCycleError, match="Ping") as caught:
        ping.remote(how).result(timeout_s=PATIENCE_S)

    cycle = {"await": "Ping -> Pong -> Ping", "stream": "Ping -> Ping"}.get(how, "Ping")
    assert cycle in str(caught.value)
    assert ping.remote("end").result(timeout_s=PATIENCE_S) == "ended"


def test_a_child_that_is_not_awaited_runs_when_its_parent_has_ended(
    ping: serve.DeploymentHandle,
) -> None:
    assert ping.remote("forget").result(timeout_s=PATIENCE_S) == "forgotten"
    assert kept[0].result(timeout_s=PATIENCE_S) == "ended"
    assert ping.remote("unawaited argument").result(timeout_s=PATIENCE_S) == "not awaited"
    assert kept[1].result(timeout_s=PATIENCE_S) == "ended"


@serve.deployment
class Own:
    """A deployment whose requests wait for the answer that the test puts into `kept`."""

    def __init__(self) -> None:
        self.there = Latch()

    async def __call__(self) -> Any:
        await self.there
        return await kept[0]

    def let(self) -> None:
        self.there.count_down()

    def in_thread(self) -> Any:
        self.there.wait()
        return kept[0].result()


@pytest.mark.parametrize("method", ["__call__", "in_thread"])
def test_a_request_that_waits_for_its_own_answer_is_told_so(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")
    handle = serve.run(bind(Own), route_prefix=None)
    try:
        kept.append(handle.options(method_name=method).remote())
        handle.let.remote().result(timeout_s=PATIENCE_S)
        with pytest.raises(RequestCycleError, match=r"its own answer.* Own -> Own\."):
            kept[0].result(timeout_s=PATIENCE_S)
    finally:
        kept.clear()


@serve.deployment(max_ongoing_requests=8)
class Recursive:
    async def __call__(self, depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + int(await serve.get_deployment_handle("Recursive").remote(depth - 1))


@pytest.mark.reliability("A19")
def test_thirty_two_clients_on_eight_recursive_slots_all_get_an_answer() -> None:
    handle = serve.run(bind(Recursive), route_prefix=None)

    async def main() -> list[Any]:
        calls = (handle.remote(3) for _ in range(32))
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(main())

    assert len(answers) == 32
    assert all(answer == 3 or isinstance(answer, RequestCycleError) for answer in answers)
    assert 3 in answers
