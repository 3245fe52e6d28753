"""`replicas.overload`: the calls that are served, overtaken and shed under overload.

Tests of the queue pass it the time; tests of a server synchronise with latches.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from starlette.requests import Request

import ingress as serve
from ingress.config import BackpressureConfig
from ingress.core.base.settings import ADAPT_SWITCH_INTERVAL, STALL_THRESHOLD_MS
from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import Call
from ingress.core.execution.gil_pressure import GIL_PRESSURE, TURNS, GILPressure
from ingress.exceptions import BackPressureError, RequestTimeoutError
from ingress.serving.http.asgi_driver import respond
from ingress.serving.http.reply import Reply
from ingress.serving.replicas.admission import (
    COMPUTING,
    HELD,
    LATE_S,
    REMOVED,
    STILL_COMPUTING,
    Admission,
)
from ingress.serving.replicas.overload import (
    HALF_LIFE_S,
    MAX_KINDS,
    MIN_SAMPLES,
    MIN_TURNS,
    PATIENCE,
    PROBE_S,
    Shed,
    UsualTimes,
    WaitingCalls,
)
from ingress.serving.replicas.router import Router
from ingress.testing import Latch
from tests.fakes import FakeReplica, assign, bind, make_call, together
from tests.servers import PATIENCE_S, ROUNDS, overview, served, wait_until, with_gil

pytestmark = pytest.mark.usefixtures("shutdown")

TIMEOUT = "x-request-timeout-seconds"


def waiting(*calls: Call, since: float, usual: UsualTimes | None = None) -> WaitingCalls:
    queue = WaitingCalls(usual or UsualTimes())
    for call in calls:
        queue.add(call, since)
    return queue


def taken(queue: WaitingCalls, now: float) -> tuple[list[Call], list[Shed]]:
    """Empty the queue; return the calls it gave and the calls it shed."""
    shed: list[Shed] = []
    calls: list[Call] = []
    while (call := queue.next(now, shed)) is not None:
        calls.append(call)
    return calls, shed


def usually(took_s: float, now: float, *, method: str = "m", samples: int = 8) -> UsualTimes:
    """Return estimates after `samples` calls of a method that took `took_s` each."""
    usual = UsualTimes()
    learn(usual, took_s, now, method=method, samples=samples)
    return usual


def learn(
    usual: UsualTimes, took_s: float, now: float, *, method: str = "m", samples: int = 8
) -> None:
    for _ in range(samples):
        call = make_call(method=method, left_s=60)
        call.assigned_at = now - took_s
        usual.add(call, now)


def test_order_of_arrival_holds_while_the_queue_is_short() -> None:
    now = time.monotonic()
    calls = [make_call(left_s=1) for _ in range(100)]

    served, shed = taken(waiting(*calls, since=now), now + 0.9 * PATIENCE)

    assert served == calls
    assert shed == []


def test_the_newest_goes_first_once_the_first_has_waited_for_half_of_its_time() -> None:
    now = time.monotonic()
    old = [make_call(left_s=1) for _ in range(3)]
    new = [make_call(left_s=2) for _ in range(3)]
    queue = waiting(*old, since=now)
    for call in new:
        queue.add(call, now + 0.5)

    served, shed = taken(queue, now + 0.6)

    assert served == [*reversed(new), *reversed(old)]
    assert shed == [], "each of them can still be answered"


def test_the_order_of_arrival_is_back_as_soon_as_the_queue_is_short_again() -> None:
    now = time.monotonic()
    queue = waiting(*[make_call(left_s=1) for _ in range(3)], since=now)
    taken(queue, now + 0.6)
    calls = [make_call(left_s=3) for _ in range(3)]
    for call in calls:
        queue.add(call, now + 0.7)

    assert taken(queue, now + 0.8) == (calls, [])


def test_the_newest_goes_first_again_once_no_call_without_a_deadline_waits() -> None:
    now = time.monotonic()
    patient = make_call()
    calls = [make_call(left_s=1) for _ in range(3)]
    queue = waiting(*calls, patient, since=now)
    assert queue.next(now + 0.6, []) is calls[0]
    queue.discard(patient)

    assert taken(queue, now + 0.6) == ([calls[2], calls[1]], [])


def test_calls_without_a_deadline_are_never_overtaken_and_never_shed() -> None:
    now = time.monotonic()
    usual = usually(5.0, now)
    calls = [make_call(left_s=random.choice([None, 1.0])) for _ in range(10_000)]
    queue = waiting(*calls, since=now, usual=usual)
    patient = [call for call in calls if call.metadata.deadline is None]

    served, shed = taken(queue, now + 0.9)

    assert [call for call in served if call.metadata.deadline is None] == patient
    assert all(each.call.metadata.deadline is not None for each in shed)
    assert {*served} | {each.call for each in shed} == {*calls}
    order = {call: place for place, call in enumerate(calls)}
    assert [order[call] for call in served] == sorted(order[call] for call in served)


def test_a_call_that_cannot_be_answered_in_time_is_shed_and_says_by_how_much() -> None:
    now = time.monotonic()
    late, fit = make_call(left_s=0.3), make_call(left_s=5)
    queue = waiting(make_call(left_s=0.3), late, fit, since=now, usual=usually(0.5, now))

    served, (shed,) = taken(queue, now)

    assert len(served) == 2, "the first was let through, as a probe"
    assert served[1] is fit
    assert shed.call is late
    assert shed.reason.startswith("0.3")
    assert "usually take 0.500 s" in shed.reason


def test_an_estimate_is_not_used_before_it_has_enough_samples() -> None:
    now = time.monotonic()
    usual = usually(0.5, now, samples=MIN_SAMPLES - 1)
    calls = [make_call(left_s=0.1) for _ in range(3)]

    assert taken(waiting(*calls, since=now, usual=usual), now) == (calls, [])
    learn(usual, 0.5, now, samples=1)
    assert len(taken(waiting(*calls, since=now, usual=usual), now)[1]) == 2


def test_one_call_a_second_begins_all_the_same_so_that_an_estimate_can_be_corrected() -> None:
    now = time.monotonic()
    usual = usually(0.9, now)

    for second in range(3):
        at = now + second * PROBE_S
        calls = [make_call(left_s=second * PROBE_S + 0.1) for _ in range(10)]
        served, shed = taken(waiting(*calls, since=at, usual=usual), at)
        assert (len(served), len(shed)) == (1, 9)
    learn(usual, 0.01, now + 3, samples=40)  # the probes were fast
    assert len(taken(waiting(*calls, since=now, usual=usual), now + 2)[0]) == 10


def test_an_estimate_decays_when_nothing_is_learned() -> None:
    now = time.monotonic()
    usual = usually(0.4, now)
    calls = [make_call(left_s=2 * HALF_LIFE_S + 0.15) for _ in range(3)]

    assert len(taken(waiting(*calls, since=now, usual=usual), now + 2 * HALF_LIFE_S)[0]) == 3


def test_each_kind_of_call_has_an_estimate_of_its_own() -> None:
    now = time.monotonic()
    usual = usually(0.5, now, method="slow")
    learn(usual, 0.01, now, method="fast")
    slow = [make_call(method="slow", left_s=0.1) for _ in range(3)]
    fast = [make_call(method="fast", left_s=0.1) for _ in range(3)]

    served, shed = taken(waiting(*slow, *fast, since=now, usual=usual), now)

    assert served == [slow[0], *fast]
    assert [each.call for each in shed] == slow[1:]


def test_calls_that_were_cut_short_make_an_estimate_longer_but_never_shorter() -> None:
    now = time.monotonic()
    usual = usually(0.5, now)
    for took_s in (0.01, 0.9):
        cut = make_call(left_s=60)
        cut.assigned_at, cut.is_interrupted = now - took_s, True
        usual.add(cut, now)

    late = [make_call(left_s=0.1) for _ in range(2)]
    _, shed = taken(waiting(*late, since=now, usual=usual), now)

    assert shed[0].usual_s == pytest.approx(0.55)


def test_kinds_without_end_leave_no_more_than_a_thousand_estimates() -> None:
    now = time.monotonic()
    usual = UsualTimes()

    for number in range(MAX_KINDS + 100):
        learn(usual, 0.1, now, method=str(number), samples=1)

    assert len(usual) == MAX_KINDS


# Calls that arrive while more wait than can be served.


def standing(rate: float, now: float, number: int = 100, left_s: float = 60) -> WaitingCalls:
    """Return a queue of `number` + 1 waiting calls that so far gave `rate` slots a second."""
    queue = waiting(make_call(left_s=left_s), since=now - MIN_TURNS / rate)
    for _ in range(number + MIN_TURNS):
        queue.add(make_call(left_s=left_s), now)
    for _ in range(MIN_TURNS):
        assert queue.next(now, [])
    assert len(queue) == number + 1
    return queue


def test_a_call_is_turned_away_if_more_wait_than_get_a_slot_in_its_time() -> None:
    now = time.monotonic()
    queue = standing(rate=20, now=now)

    assert queue.turns_away(now + 1, now) == (
        "1.000 s are left to answer the request, about 20 requests start in that time, "
        "and 101 requests wait"
    )
    assert queue.turns_away(now + 5, now)
    assert not queue.turns_away(now + 6, now)
    for _ in range(101 - MIN_TURNS):
        assert queue.turns_away(now + 0.1, now), "its time is not enough for any"
        queue.next(now, [])
    assert not queue.turns_away(now + 0.1, now), "so short a queue may be over at once"


def test_no_call_is_turned_away_before_it_is_known_how_many_get_a_slot() -> None:
    now = time.monotonic()
    queue = waiting(*[make_call(left_s=60) for _ in range(1_000)], since=now)
    for number in range(1, MIN_TURNS):
        queue.next(now + number, [])

    assert not queue.turns_away(now + MIN_TURNS + 0.1, now + MIN_TURNS)
    queue.next(now + MIN_TURNS, [])
    assert queue.turns_away(now + MIN_TURNS + 0.1, now + MIN_TURNS)


def test_the_rate_is_known_no_more_once_no_call_has_waited() -> None:
    now = time.monotonic()
    queue = standing(rate=20, now=now)
    queue.clear()
    for _ in range(1_000):
        queue.add(make_call(left_s=60), now)

    assert not queue.turns_away(now + 0.1, now)


def test_a_refusal_is_that_of_the_latest_configuration() -> None:
    router = Router(DeploymentID("D"), backpressure=BackpressureConfig(status_code=429))
    found = []
    for limit in ((0, None), (1, BackpressureConfig(status_code=429, retry_after_s=7.0))):
        router.limit(*limit)
        assign(router, make_call())
        refused = make_call()
        router.assign(refused)
        assert isinstance(refused.error, BackPressureError)
        found.append((refused.error.status_code, refused.error.retry_after_s))

    assert found == [(503, None), (429, 7.0)]
    router.refuse("the test is over")


def where_calls_take_ten_seconds(backpressure: BackpressureConfig) -> tuple[Router, FakeReplica]:
    """Return a router that has learned so, and its replica, which has one slot."""
    router = Router(DeploymentID("D"), backpressure=backpressure)
    replica = FakeReplica(router, 1)
    router.add(replica)
    for _ in range(MIN_SAMPLES):
        call = make_call(left_s=60)
        router.assign(call)
        call.assigned_at -= 10.0
        replica.finish(call)
    return router, replica


def test_a_waiting_call_whose_timer_is_late_gets_its_timeout_when_a_slot_is_free() -> None:
    router, replica = where_calls_take_ten_seconds(BackpressureConfig())
    first, probe, late = make_call(left_s=60), make_call(left_s=5), make_call(left_s=-1)
    assign(router, first, probe, late)

    replica.finish(first)
    replica.finish(probe)

    assert isinstance(late.error, RequestTimeoutError)
    assert (router.num_expired, router.num_queued) == (1, 0)


def test_calls_without_a_deadline_count_for_the_rate_too() -> None:
    now = time.monotonic()
    queue = waiting(*[make_call() for _ in range(200)], since=now - MIN_TURNS / 20)
    assert not queue.turns_away(now + 1, now)
    for _ in range(MIN_TURNS):
        queue.next(now, [])

    assert "about 20 requests start in that time" in queue.turns_away(now + 1, now)


def test_a_deployment_that_stands_still_turns_more_and_more_away() -> None:
    now = time.monotonic()
    queue = standing(rate=20, now=now)

    patience = [
        next(left for left in range(1, 1_000) if not queue.turns_away(at + left, at))
        for at in (now, now + 1, now + 10, now + 60)
    ]

    assert patience == [6, 12, 69, 384], "101 calls, of which 16 were served in 0.8 s and more"


def test_a_request_turned_away_gets_the_same_error_as_a_call_refused_by_the_queue() -> None:
    router = Router(DeploymentID("D"), max_queued_requests=0)
    replica = FakeReplica(router, 1)
    router.add(replica)
    assert router.turns_away(None) is None, "a slot is free"
    router.assign(make_call())

    early = router.turns_away(None)
    late = make_call()
    router.assign(late)

    assert early is not None
    assert isinstance(late.error, BackPressureError)
    assert early.args == late.error.args
    assert router.num_requests == 1
    assert router.num_rejected == 2


def test_a_request_that_cannot_be_answered_in_time_is_counted_as_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ingress.serving.replicas.overload.MIN_WINDOW_S", 0.0)
    router = Router(DeploymentID("D"))
    replica = FakeReplica(router, 1)
    router.add(replica)
    assign(router, *[make_call(left_s=60) for _ in range(100)])
    for _ in range(MIN_TURNS):  # from now on it is known how many get a slot
        replica.finish(next(iter(replica.running)))

    assert router.turns_away(time.monotonic() + 60) is None
    assert router.num_rejected == 0
    assert isinstance(router.turns_away(time.monotonic()), BackPressureError)
    assert router.num_rejected == 1
    router.refuse("the test is over")


@pytest.mark.parametrize("after_s", [None, 2.5], ids=["by default", "as the deployment says"])
def test_a_shed_call_gets_a_back_pressure_error(after_s: float | None) -> None:
    router, replica = where_calls_take_ten_seconds(BackpressureConfig(retry_after_s=after_s))
    first, probe, late = (make_call(left_s=5) for _ in range(3))
    assign(router, first, probe, late)

    replica.finish(first)
    replica.finish(probe)

    assert router.num_shed == 1
    with pytest.raises(BackPressureError, match=r"dropped due to backpressure on 'D': .* usually"):
        late.outcome()
    assert isinstance(late.error, BackPressureError)
    assert late.error.status_code == 503
    assert late.error.retry_after_s == (1.0 if after_s is None else after_s)
    assert (router.num_queued, router.num_ongoing) == (0, 0)


# A replica that starts calls late.


class LateReplica(FakeReplica):
    """A replica that starts calls when the test tells it to."""

    def __init__(self, router: Router, max_ongoing: int) -> None:
        super().__init__(router, max_ongoing)
        self.handed: list[Call] = []

    def submit(self, call: Call) -> None:
        self.handed.append(call)

    def begin(self) -> Call:
        call = self.handed.pop(0)
        super().submit(call)
        if self.slots.position < 0:
            self.router.resume(self)
        return call


def late(max_ongoing: int = 10, max_queued: int = -1) -> tuple[Router, LateReplica]:
    router = Router(DeploymentID("D"), max_queued)
    replica = LateReplica(router, max_ongoing)
    router.add(replica)
    replica.slots.is_late = True
    return router, replica


def test_a_replica_that_is_late_is_given_one_call_at_a_time() -> None:
    router, replica = late()
    calls = [make_call(left_s=60) for _ in range(5)]
    assign(router, *calls)

    for number, call in enumerate(calls):
        assert replica.handed == [call]
        assert router.num_queued == len(calls) - number - 1
        replica.begin()

    assert replica.running == {*calls}


@pytest.mark.parametrize("is_computing", [False, True])
def test_calls_without_a_deadline_wait_only_for_a_replica_that_computes(is_computing: bool) -> None:
    """A busy event loop gains nothing from calls that begin one after another."""
    router, replica = late()
    replica.slots.is_computing = is_computing
    calls = [make_call() for _ in range(5)]
    assign(router, *calls)

    assert replica.handed == (calls[:1] if is_computing else calls)
    while replica.handed:
        replica.begin()
    assert replica.running == {*calls}


def test_calls_go_on_when_a_replica_has_stopped_computing() -> None:
    router, replica = late()
    replica.slots.is_computing = True
    calls = [make_call() for _ in range(3)]
    assign(router, *calls[:2])
    replica.slots.is_computing = False
    router.assign(calls[2])

    assert replica.handed == calls


def test_a_slot_that_a_late_replica_gives_back_is_for_no_call_until_it_has_begun_the_last() -> None:
    router, replica = late(max_ongoing=2)
    first, second, third = (make_call(left_s=60) for _ in range(3))
    router.assign(first)
    replica.begin()
    router.assign(second)
    replica.finish(first)
    router.assign(third)

    assert replica.handed == [second]
    replica.begin()
    assert replica.handed == [third]


def test_calls_that_wait_for_a_late_replica_do_not_count_against_the_queue() -> None:
    """10 slots and a queue of 5 admit 15 calls, as if the replica was not late."""
    router, replica = late(max_queued=5)
    calls = [make_call(left_s=60) for _ in range(20)]
    assign(router, *calls)

    refused = [isinstance(call.error, BackPressureError) for call in calls]
    assert refused == [False] * 15 + [True] * 5
    assert len(replica.handed) == 1
    router.refuse("the test is over")


def test_a_late_replica_that_leaves_makes_no_room_in_the_queue() -> None:
    router, replica = late(max_queued=1)
    router.assign(make_call(left_s=60))
    router.remove(replica)
    calls = [make_call(left_s=60) for _ in range(2)]
    assign(router, *calls)

    assert [isinstance(call.error, BackPressureError) for call in calls] == [False, True]
    router.refuse("the test is over")


def test_a_call_goes_to_another_replica_while_one_is_late() -> None:
    router, slow = late()
    router.assign(make_call(left_s=60))
    quick = FakeReplica(router, 10)
    router.add(quick)

    for _ in range(10):
        router.assign(make_call(left_s=60))

    assert len(quick.running) == 10
    assert len(slow.handed) == 1


def test_a_call_that_is_cancelled_before_it_begins_does_not_hold_a_late_replica_up() -> None:
    router, replica = late()
    first, second = make_call(left_s=60), make_call(left_s=60)
    assign(router, first, second)
    assert replica.handed == [first]

    first.cancel()
    replica.begin()

    assert replica.handed == [second]
    assert replica.slots.given - replica.slots.begun == 1


def test_a_late_replica_is_given_calls_without_a_deadline_as_any_other() -> None:
    router, replica = late()
    first, waiting, patient, last = (make_call(left_s=each) for each in (60, 60, None, 60))
    assign(router, first, waiting, patient, last)

    assert replica.handed == [first, waiting, patient], "in order of arrival"
    assert router.num_queued == 1


@pytest.mark.parametrize(("in_time", "is_late"), [(15, True), (16, False)])
def test_a_replica_is_late_until_sixteen_calls_in_a_row_have_begun_in_time(
    in_time: int, is_late: bool
) -> None:
    _, replica = late()
    slots = replica.slots
    for _ in range(10):
        slots.note_begin(is_late=False)
    slots.note_begin(is_late=True)  # begins the count anew

    for _ in range(in_time):
        slots.note_begin(is_late=False)

    assert slots.is_late is is_late


def test_a_replica_computes_as_its_threads_did_in_the_last_look_of_the_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    share = 0.6

    def have_computed(least: float) -> bool:
        asked.append(least)
        return share >= least

    slots = Admission(FakeReplica(Router(DeploymentID("D")), 4), 4, have_computed)
    monkeypatch.setattr(GIL_PRESSURE, "is_high", True)

    def begins_late(look: dict[int, float]) -> bool:
        monkeypatch.setattr(GIL_PRESSURE, "shares", look)
        slots.note_begin(is_late=True)
        return slots.is_computing

    look = {1: share}
    assert begins_late(look)
    assert begins_late(look)
    assert asked == [COMPUTING], "once for a look"
    share = 0.2
    assert begins_late({1: share})
    assert asked == [COMPUTING, STILL_COMPUTING], "less is enough to go on"
    share = 0.05
    assert not begins_late({1: share})

    share = 0.6
    assert begins_late({1: share})
    monkeypatch.setattr(GIL_PRESSURE, "is_high", False)
    assert not slots.is_computing
    slots.note_begin(is_late=True)
    monkeypatch.setattr(GIL_PRESSURE, "is_high", True)
    assert not slots.is_computing, "it is to be seen again"


@pytest.mark.parametrize(
    ("ran_s", "took_s", "is_high", "is_late"),
    [
        (0.5, 1.0, True, True),
        (0.49, 1.0, True, False),
        (1.2, 2.0, True, True),
        (0.0, 1.0, False, True),
    ],
)
def test_under_pressure_only_a_loop_that_runs_for_half_of_the_time_delays_its_calls(
    ran_s: float, took_s: float, is_high: bool, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = [(1000.0, 100.0), (1000.0 + took_s, 100.0 + ran_s)]
    monkeypatch.setattr("ingress.serving.replicas.admission.monotonic", lambda: clocks[0][0])
    monkeypatch.setattr("ingress.serving.replicas.admission.thread_time", lambda: clocks[0][1])
    monkeypatch.setattr(GIL_PRESSURE, "is_high", is_high)
    slots = Admission(FakeReplica(Router(DeploymentID("D")), 4), 4)

    slots.note_begin(is_late=True)
    del clocks[0]
    slots.note_begin(is_late=True)

    assert slots.is_late is is_late


class LateMachine(RuleBasedStateMachine):
    """The real router over replicas that begin calls when they are told to, late or in time."""

    @initialize(max_queued=st.sampled_from([-1, 0, 2]))
    def begins(self, max_queued: int) -> None:
        self.max_queued = max_queued
        self.router = Router(DeploymentID("D"), max_queued)
        self.replicas: list[LateReplica] = []
        self.removed: list[LateReplica] = []
        self.calls: list[Call] = []
        self.rejected = 0

    @rule(is_patient=st.booleans())
    def submit(self, is_patient: bool) -> None:
        call = make_call(left_s=None if is_patient else 600)
        held = [each for each in self.replicas if each.slots.position == HELD]
        withheld = sum(each.slots.max_ongoing - each.ongoing for each in held)
        is_full = 0 <= self.max_queued <= self.router.num_queued - withheld
        is_refused = is_full and not self.router.available
        turned_away = self.router.turns_away(call.metadata.deadline)
        self.router.assign(call)
        self.calls.append(call)
        assert (turned_away is not None) is is_refused
        assert isinstance(call.error, BackPressureError) is is_refused
        self.rejected += 2 * is_refused

    @precondition(lambda self: any(each.handed for each in (*self.replicas, *self.removed)))
    @rule(chance=st.randoms(use_true_random=False), is_late=st.booleans(), computes=st.booleans())
    def begin(self, chance: random.Random, is_late: bool, computes: bool) -> None:
        replica = chance.choice([each for each in (*self.replicas, *self.removed) if each.handed])
        FakeReplica.submit(replica, replica.handed.pop(0))
        replica.slots.is_late, replica.slots.is_computing = is_late, is_late and computes
        if replica.slots.position == HELD:  # as `Replica.admit`
            self.router.resume(replica)

    @precondition(lambda self: any(each.running for each in (*self.replicas, *self.removed)))
    @rule(chance=st.randoms(use_true_random=False))
    def finish(self, chance: random.Random) -> None:
        replica = chance.choice([each for each in (*self.replicas, *self.removed) if each.running])
        replica.finish(chance.choice(sorted(replica.running, key=self.calls.index)))

    @precondition(lambda self: self.calls)
    @rule(chance=st.randoms(use_true_random=False))
    def cancel(self, chance: random.Random) -> None:
        chance.choice(self.calls).cancel()

    @precondition(lambda self: len(self.replicas) < 4)
    @rule(slots=st.integers(1, 3))
    def add(self, slots: int) -> None:
        self.replicas.append(LateReplica(self.router, slots))
        self.router.add(self.replicas[-1])

    @precondition(lambda self: self.replicas)
    @rule(chance=st.randoms(use_true_random=False))
    def remove(self, chance: random.Random) -> None:
        self.removed.append(self.replicas.pop(chance.randrange(len(self.replicas))))
        self.router.remove(self.removed[-1])

    @precondition(lambda self: self.replicas)
    @rule(chance=st.randoms(use_true_random=False), slots=st.integers(1, 4))
    def resize(self, chance: random.Random, slots: int) -> None:
        self.router.resize(chance.choice(self.replicas), slots)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "router"):
            return
        router = self.router
        assert router.replicas == self.replicas
        assert [each.position for each in router.available] == [*range(len(router.available))]
        assert all(each.slots.position == REMOVED for each in self.removed)
        waiting = [each for each in self.calls if not each.settled and each.runner is None]
        assert router.num_queued == len(waiting)
        is_patient = any(each.metadata.deadline is None for each in waiting)
        for each in self.replicas:
            slots = each.slots
            assert slots.ongoing == len(each.handed) + len(each.running)
            has_room = slots.ongoing < slots.max_ongoing
            assert has_room if slots.position >= 0 or slots.position == HELD else not has_room
            assert slots.position >= 0 or slots.is_behind() or not has_room
            if waiting and has_room:
                assert slots.is_behind()
                assert not is_patient or slots.is_computing
        accepted = len(self.calls) - self.rejected // 2
        assert (router.num_requests, router.num_rejected) == (accepted, self.rejected)

    def teardown(self) -> None:
        if hasattr(self, "router"):
            self.router.refuse("the test is over")


TestLateMachine = LateMachine.TestCase
TestLateMachine.settings = settings(
    max_examples=800 if ROUNDS else 100, stateful_step_count=50, deadline=None
)


def test_no_call_is_left_behind_by_a_late_replica(switch_interval: None) -> None:
    """Callers race with the loop that starts and ends calls; each call starts."""
    for _ in range(20):
        router, replica = late(max_ongoing=3)
        calls = [make_call(left_s=random.choice([None, 60, 60])) for _ in range(60)]
        done = threading.Event()

        def work(replica: LateReplica = replica, done: threading.Event = done) -> None:
            ended = 0
            while ended < 60 and not done.is_set():
                while replica.handed:
                    replica.slots.is_late = random.random() < 0.8
                    replica.begin()
                for call in list(replica.running):
                    replica.finish(call)
                    ended += 1

        worker = threading.Thread(target=work)
        worker.start()
        together(*(partial(assign, router, *calls[first::3]) for first in range(3)))
        worker.join(10)
        done.set()
        worker.join()

        assert all(call.settled for call in calls)
        assert replica.most_running <= 3
        assert (router.num_queued, router.num_ongoing, replica.slots.given) == (
            0,
            0,
            replica.slots.begun,
        )


# Over HTTP.

app = FastAPI()
go = Latch()
inside = Latch()


@serve.deployment(max_ongoing_requests=8)
@serve.ingress(app)
class Shop:
    @app.get("/slow/{item}")
    async def slow(self, item: str) -> str:
        if item == "wait":
            inside.count_down()
            await go
        else:
            await asyncio.sleep(1)
        return item

    @app.get("/fast")
    async def fast(self) -> str:
        return "fast"


@contextmanager
def asking(application: Any, inside_at_once: int = 1) -> Iterator[httpx.Client]:
    """Serve an application, whose requests wait for `go`, once so many have been counted inside."""
    global go, inside
    go, inside = Latch(), Latch(inside_at_once)
    url = f"http://127.0.0.1:{served(application)}"
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
    finally:
        go.count_down()


@serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
class Full:
    async def __call__(self, request: Request) -> str:
        inside.count_down()
        await go
        return "done"


def test_a_refusal_is_the_same_with_and_without_a_body() -> None:
    """A request without a body is refused before its call exists; its answer is the same."""
    with asking(bind(Full)) as client, ThreadPoolExecutor(2) as threads:
        held = [threads.submit(httpx.get, client.base_url) for _ in range(2)]
        inside.wait()
        wait_until(lambda: overview("Full").queued)
        named = {"x-request-id": "mine"}
        with_body = client.post("/", content=b"body", headers=named)
        without = [client.get("/", headers=named) for _ in range(3)]
        go.count_down()
        assert [each.result().text for each in held] == ["done", "done"]
        assert client.get("/").text == "done", "the connection is kept"
    for each in without:
        assert (each.status_code, each.text) == (503, with_body.text)
        assert "max_queued_requests=1" in each.text
        assert each.headers["x-request-id"] == "mine"
        headers = [{**answer.headers, "date": ""} for answer in (each, with_body)]
        assert headers[0] == headers[1]


def test_a_client_whose_request_comes_too_late_is_told_when_to_try_again() -> None:
    with asking(bind(Shop), 8) as client, ThreadPoolExecutor(16) as threads:

        def get(path: str, timeout_s: float) -> Future[httpx.Response]:
            return threads.submit(client.get, path, headers={TIMEOUT: str(timeout_s)})

        samples = [get(f"/slow/{number}", 60) for number in range(MIN_SAMPLES)]
        assert [each.result().status_code for each in samples] == [200] * MIN_SAMPLES
        holders = [get("/slow/wait", 60) for _ in range(8)]
        inside.wait()
        time.sleep(0.5)  # so that they hold their slots as long as others of their kind do
        # Their remaining time falls below the estimate; one of them passes as a probe.
        impatient = [get(f"/slow/{item}", 1.5) for item in "abcd"]
        fast = get("/fast", 1.5)
        wait_until(lambda: overview("Shop").queued >= 5)
        time.sleep(0.7)  # 0.8 s of 1.5 s are left
        go.count_down()
        answers = [each.result() for each in impatient]

        assert sorted(each.status_code for each in answers) == [408, 503, 503, 503]
        for answer in answers:
            if answer.status_code == 503:
                assert answer.headers["retry-after"] == "1"
                assert re.search(r"usually take [01]\.\d+ s", answer.text)
        assert fast.result().status_code == 200, "its route is a quick one"
        assert [each.result().status_code for each in holders] == [200] * 8


# The GIL.


@serve.deployment(max_ongoing_requests=8)
class Computing:
    @serve.method(execution="threadpool")
    def __call__(self) -> float:
        while not go.is_open:
            pass
        return sys.getswitchinterval()


@pytest.mark.thorough
@pytest.mark.parametrize("adapts", ["1", "0"])
def test_turns_of_the_gil_are_shorter_while_loops_wait_for_it_and_then_as_they_were(
    adapts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    global go
    go = Latch()
    monkeypatch.setenv(ADAPT_SWITCH_INTERVAL, adapts)
    given = sys.getswitchinterval()
    handle = serve.run(bind(Computing), route_prefix=None)
    try:
        calls = [handle.remote() for _ in range(8)]
        if adapts == "1":
            wait_until(lambda: sys.getswitchinterval() < given)
        else:
            wait_until(lambda: GIL_PRESSURE.is_high)
        go.count_down()
        shortened = max(call.result() for call in calls)
        wait_until(lambda: sys.getswitchinterval() == given and not GIL_PRESSURE.is_high)
    finally:
        go.count_down()
        serve.shutdown()

    assert (shortened < given) is (adapts == "1")
    assert sys.getswitchinterval() == given


def test_many_short_waits_for_the_gil_are_no_queue() -> None:
    """Loops that run briefly release the GIL at once: a longer interval would gain nothing."""
    pressure = GILPressure()
    pressure.adapts = False
    turn = sys.getswitchinterval()

    pressure.note(50, 0.9 * turn, 0.0)
    pressure.note(0, 0.5, 0.0)  # nothing of this was for the GIL
    assert pressure.waited_s == 0.9 * turn
    assert not pressure.is_high
    pressure.note(1, 50 * turn, 0.0)
    assert not pressure.is_high, "it was late, but not for the GIL"
    pressure.note(2, turn, 0.0)
    assert pressure.is_high


def test_pressure_stays_high_while_one_thread_computes_and_no_longer() -> None:
    """Calls that are held back leave one thread to compute; the others only wait for a slot."""
    pressure = GILPressure()
    pressure.adapts = False
    turn = sys.getswitchinterval()
    pressure.note(8, 8 * turn, 0.0)

    for look in range(1, 120):
        pressure.note(2, turn, look * 0.025)
        assert pressure.is_high
    for look in range(120, 200):
        pressure.note(50, 0.1 * turn, look * 0.025)
    assert not pressure.is_high


def test_turns_stay_short_while_one_thread_computes(switch_interval: None) -> None:
    """An HTTP loop takes the GIL anew for each event: at 5 ms each it would serve 200 a second."""
    sys.setswitchinterval(0.005)
    pressure = GILPressure()
    pressure.note(8, 0.04, 0.0)

    for look in range(1, 120):
        pressure.note(3, 0.001, look * 0.025)
    assert sys.getswitchinterval() == pytest.approx(0.0005, rel=0.1)
    for look in range(120, 200):
        pressure.note(1, 0.0001, look * 0.025)
    assert sys.getswitchinterval() == pytest.approx(0.005)


@with_gil
def test_turns_are_short_before_many_threads_compute(switch_interval: None) -> None:
    sys.setswitchinterval(0.005)
    pressure = GILPressure()
    pressure.expect(32)
    assert sys.getswitchinterval() == pytest.approx(0.005), "no watchdog would restore it"

    pressure.begin()
    pressure.expect(32)
    assert sys.getswitchinterval() == pytest.approx(0.0025, rel=0.1)
    assert not pressure.is_high, "they may sleep"
    pressure.expect(4)
    assert sys.getswitchinterval() == pytest.approx(0.0025, rel=0.1)
    pressure.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_pressure_ends_although_threads_wake_a_little_late(switch_interval: None) -> None:
    """Half of an interval that 32 threads have made short is no sign of a thread that computes."""
    sys.setswitchinterval(0.005)
    pressure = GILPressure()
    pressure.note(32, 0.16, 0.0)
    assert sys.getswitchinterval() == pytest.approx(0.0005, rel=0.1)

    for look in range(1, 40):  # the next burst of calls meets short turns
        pressure.note(1, 0.0004, look * 0.025)
        assert sys.getswitchinterval() == pytest.approx(0.0005, rel=0.1)
    for look in range(40, 100):
        pressure.note(1, 0.0004, look * 0.025)

    assert not pressure.is_high
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("interval_s", [1e-6, 0.005])
def test_threads_that_are_expected_while_the_watchdog_looks_leave_nothing(
    switch_interval: None, interval_s: float
) -> None:
    sys.setswitchinterval(interval_s)
    given = sys.getswitchinterval()
    pressure = GILPressure()
    for _ in range(20):
        pressure.begin()
        together(
            *[partial(expect_often, pressure, threads) for threads in (4, 8, 32)],
            partial(look_often, pressure),
        )
        pressure.end()

        pressure.expect(64)
        assert not pressure.is_high
        assert sys.getswitchinterval() == given


def expect_often(pressure: GILPressure, threads: int) -> None:
    for _ in range(50):
        pressure.expect(threads)


def look_often(pressure: GILPressure) -> None:
    for look in range(50):
        pressure.note(32 * (look % 2), 0.2 * (look % 2), time.monotonic() + look)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_under_pressure_the_http_loop_has_turns_before_a_call_begins(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts one connection a turn: with one turn a call, a burst of connections waits."""
    monkeypatch.setattr(GIL_PRESSURE, "is_high", True)

    async def nothing(*_: Any) -> Any:
        raise AssertionError("no code reads or answers the request")

    async def scenario() -> None:
        router = Router(DeploymentID("D"))
        replica = FakeReplica(router, 1)
        router.add(replica)
        replica.slots.is_late = replica.slots.is_computing = True
        metadata = make_call(left_s=60).metadata
        reply = Reply(metadata, router, {"type": "http"}, nothing, nothing)
        answer = asyncio.create_task(respond(reply))
        turns = 0
        while not replica.started and not replica.skipped:
            await asyncio.sleep(0)
            turns += 1
            if is_cancelled and turns == TURNS // 2:
                reply.call.cancel()

        assert turns >= TURNS
        assert replica.skipped == [reply.call] * is_cancelled
        if not is_cancelled:
            replica.finish(reply.call)
        await asyncio.wait([answer])
        assert router.num_ongoing == 0

    asyncio.run(scenario())


@with_gil
def test_a_switch_interval_that_the_user_sets_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    global go
    go = Latch()
    given = sys.getswitchinterval()
    handle = serve.run(bind(Computing), route_prefix=None)
    try:
        calls = [handle.remote() for _ in range(8)]
        wait_until(lambda: sys.getswitchinterval() != given)
        sys.setswitchinterval(0.002)
        go.count_down()
        for call in calls:
            call.result()
        serve.shutdown()

        assert sys.getswitchinterval() == pytest.approx(0.002)
    finally:
        go.count_down()
        serve.shutdown()
        sys.setswitchinterval(given)


@pytest.mark.parametrize(("share", "waiting"), [(0.6, 1), (0.3, 0), (None, 1)])
def test_under_pressure_only_a_replica_whose_threads_compute_begins_one_call_at_a_time(
    share: float | None, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred streams of short steps in threads begin late, too: one at a time takes longer."""
    monkeypatch.setenv(STALL_THRESHOLD_MS, "0")  # no watchdog, which would measure the pressure
    monkeypatch.setattr(GIL_PRESSURE, "is_high", True)
    working, over, blocking, free = (threading.Event() for _ in range(4))
    idents: list[int] = []

    @serve.deployment(max_ongoing_requests=10)
    class Model:
        @serve.method(execution="threadpool")
        def work(self) -> None:
            idents.append(threading.get_ident())
            working.set()
            over.wait(PATIENCE_S)

        async def block(self) -> None:
            blocking.set()
            free.wait(PATIENCE_S)
            free.clear()

        async def answer(self) -> None: ...

    handle = serve.run(bind(Model), route_prefix=None)
    try:
        calls = [handle.work.remote()]
        assert working.wait(PATIENCE_S)
        shares = {} if share is None else {idents[0]: share}
        monkeypatch.setattr(GIL_PRESSURE, "shares", shares)

        calls += [handle.block.remote(), handle.answer.remote()]
        assert blocking.wait(PATIENCE_S)
        time.sleep(2 * LATE_S)
        free.set()
        calls[-1].result()  # it began late
        blocking.clear()
        calls += [handle.block.remote()]
        assert blocking.wait(PATIENCE_S)
        calls += [handle.answer.remote(), handle.answer.remote()]
        wait_until(lambda: overview("Model").queued == waiting)
        assert sum(each.ongoing for each in overview("Model").replicas) == 4 - waiting
        over.set()
        free.set()
        for call in calls:
            call.result()
    finally:
        over.set()
        free.set()


def test_a_replica_whose_loop_is_busy_is_late_and_then_is_not() -> None:
    @serve.deployment
    class Busy:
        async def __call__(self, request: Request) -> str:
            time.sleep(float(request.query_params["s"]))
            return "done"

    url = f"http://127.0.0.1:{served(bind(Busy), request_timeout_s=60)}"
    with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(12) as threads:

        def get(busy_s: float) -> Future[httpx.Response]:
            return threads.submit(client.get, f"/?s={busy_s}")

        calls = [get(5 * LATE_S) for _ in range(12)]

        def is_late() -> bool:
            if sum(not call.done() for call in calls) < 12:
                calls.append(get(5 * LATE_S))
            return bool(overview("Busy").queued)  # it waits although there are free slots

        wait_until(is_late)
        assert {call.result().text for call in calls} == {"done"}
        assert {get(0.0).result().text for _ in range(40)} == {"done"}
        assert overview("Busy").queued == 0
