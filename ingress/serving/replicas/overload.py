"""The overload policy: which waiting call is served next, and which calls are shed.

    calls of several priorities wait             high before normal before low; ten seconds of
                                                 waiting make up for one step
    the queue is short                           order of arrival, in each class of priority
    the first call has waited for more than      the newest first; old calls stay while they can
    half of the time that it had                 still be answered
    a call has less time left than calls of its  shed: `BackPressureError`, 503 with `Retry-After`
    kind usually take
    a call arrives, and more calls wait than     turned away: the same answer, at once
    get a slot in the time that it has

At twice the capacity, order of arrival alone lets each call wait until almost no time is left: its
work begins, is cut at its deadline, and is lost. Then almost no call is answered in time.

Only calls with a deadline are overtaken or shed. As soon as a call without a deadline waits, all
are served in order of arrival; calls with a deadline can still be shed then.

Sources: Nichols and Jacobson, "Controlling Queue Delay" (2012); Maurer, "Fail at Scale" (2015).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ingress.core.calls.call import Call

PATIENCE = 0.5  # the share of its time that the first call may wait before the newest goes first
MIN_SAMPLES = 8  # before an estimate is used
WEIGHT = 1 / 8  # of the latest sample in an estimate
HALF_LIFE_S = 5.0  # of an estimate without new samples
PROBE_S = 1.0  # between two calls that begin although an estimate would shed them
MAX_KINDS = 1000  # with an estimate, in case the number of kinds has no bound
MIN_TURNS = 16  # calls taken from the queue before their rate is used,
MIN_WINDOW_S = 0.5  # and the least time they took
HEAD_START_S = 10.0  # of a class of priority before the next lower one, so that no call starves


class Shed(NamedTuple):
    """A call that was taken out of the queue, because it cannot be answered in time."""

    call: Call
    left_s: float
    usual_s: float

    @property
    def reason(self) -> str:
        return (
            f"{self.left_s:.3f} s are left to answer the request, and such requests usually take "
            f"{self.usual_s:.3f} s"
        )


@dataclass(eq=False, slots=True)
class Estimate:
    """The time that calls of one kind hold a slot: a moving average. Owned by `UsualTimes`."""

    samples: int = 0
    usual_s: float = 0.0
    updated_at: float = 0.0
    probed_at: float = 0.0


@dataclass(eq=False, slots=True)
class UsualTimes:
    """The estimates of a deployment, by kind of call. Guarded by its router's lock."""

    _estimates: OrderedDict[str, Estimate] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._estimates)

    def add(self, call: Call, now: float) -> None:
        """Learn from a call whose slot is free again at `now`."""
        kind = call.kind()
        if not kind:
            return
        estimate = self._estimates.get(kind)
        if estimate is None:
            estimate = self._estimates[kind] = Estimate()
            if len(self._estimates) > MAX_KINDS:
                self._estimates.popitem(last=False)
        took_s = (call.work.answered_at or now) - call.assigned_at
        # A call that was cut short says only that calls of its kind take longer than this one.
        if call.is_interrupted and took_s < estimate.usual_s:
            return
        estimate.samples += 1
        weight = max(1 / estimate.samples, WEIGHT)
        estimate.usual_s += (took_s - estimate.usual_s) * weight
        estimate.updated_at = now

    def shortfall(self, call: Call, now: float) -> Shed | None:
        """Return why a call with a deadline cannot be answered in time, `None` if it may be."""
        deadline = call.metadata.deadline
        assert deadline is not None
        estimate = self._estimates.get(call.kind())
        if estimate is None or estimate.samples < MIN_SAMPLES:
            return None
        left_s = deadline - now
        usual_s = estimate.usual_s
        if left_s < usual_s:
            usual_s *= 0.5 ** ((now - estimate.updated_at) / HALF_LIFE_S)
        return Shed(call, left_s, usual_s) if left_s < usual_s else None

    def probes(self, shed: Shed, now: float) -> bool:
        """Return whether a call begins all the same, as one a second may.

        An estimate that lets no call begin never learns.
        """
        estimate = self._estimates[shed.call.kind()]
        if shed.left_s <= 0 or now < estimate.probed_at + PROBE_S:
            return False
        estimate.probed_at = now
        return True


class ServiceRate:
    """The number of calls a second that get a slot, while other calls always wait for one.

    `per_s` is `None` until the rate is known. Guarded by the router's lock.
    """

    __slots__ = ("_began_at", "_turns", "per_s")

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Forget the counts: no call has waited until now."""
        self.per_s: float | None = None
        self._turns = 0
        self._began_at = now

    def count(self, now: float) -> None:
        """Count a call that was given a slot."""
        self._turns += 1
        took_s = now - self._began_at
        if self._turns >= MIN_TURNS and took_s >= MIN_WINDOW_S:
            self.per_s = self._turns / took_s
            self._turns = 0
            self._began_at = now

    def turns_in(self, left_s: float, now: float) -> float | None:
        """Return the number of calls that will get a slot in this time, `None` if not known."""
        if self.per_s is None:
            return None
        # The calls since then have their weight: if fewer than expected got a slot, it is lower.
        took_s = now - self._began_at + MIN_TURNS / self.per_s
        return (self._turns + MIN_TURNS) / took_s * max(left_s, 0.0)


@dataclass(eq=False, slots=True)
class WaitingCalls:
    """The calls that wait for a slot of a deployment. Guarded by its router's lock."""

    _usual: UsualTimes
    _rate: ServiceRate = field(default_factory=ServiceRate)
    # Since when each waits, by priority; the normal one is the first.
    _classes: dict[int, OrderedDict[Call, float]] = field(
        default_factory=lambda: {priority: OrderedDict() for priority in (0, 1, -1)}
    )
    _without_deadline: int = 0
    size: int = 0  # for the end of every call, where `len` costs 0.1 us

    def __len__(self) -> int:
        return self.size

    def __contains__(self, call: Call) -> bool:
        return call in self._class_of(call)

    def _class_of(self, call: Call) -> OrderedDict[Call, float]:
        return self._classes[call.metadata.priority]

    def _next_class(self) -> OrderedDict[Call, float]:
        """Return the class whose first call is next; an empty one if no call waits."""
        first, earliest = self._classes[0], inf
        if len(first) == self.size:  # the common case
            return first
        for priority, calls in self._classes.items():
            if calls:
                since = next(iter(calls.values())) - priority * HEAD_START_S
                if since < earliest:
                    first, earliest = calls, since
        return first

    @property
    def has_patient(self) -> bool:
        """Return whether a call without a deadline waits."""
        return self._without_deadline > 0

    def turns_away(self, deadline: float, now: float, key: str = "", ahead: float = inf) -> str:
        """Return why a call that comes now cannot get a slot in time, "" if it may.

        `ahead` is the number of calls that go before this one, if others wait that do not.

        A queue that is served newest first would serve this call, and shed an older one for it, at
        its deadline: the older call has cost more by then, and its client has waited for nothing.
        """
        left_s = deadline - now
        turns = self._rate.turns_in(left_s, now)
        ahead = min(ahead, self.size)
        if turns is None or ahead <= max(turns, MIN_TURNS):
            return ""
        return (
            f"{left_s:.3f} s are left to answer the request, about {turns:.0f} requests start in "
            f"that time, and {ahead:.0f} requests wait"
        )

    def add(self, call: Call, now: float) -> None:
        """Add a call behind all others."""
        if not self.size:
            self._rate.restart(now)
        self._classes[call.metadata.priority][call] = now
        self._without_deadline += call.metadata.deadline is None
        self.size += 1

    def add_first(self, call: Call, now: float) -> None:
        """Add a call that had a slot before any of the others."""
        self.add(call, now)
        self._class_of(call).move_to_end(call, last=False)

    def discard(self, call: Call) -> bool:
        """Remove a call. Returns False if it does not wait here."""
        if self._classes[call.metadata.priority].pop(call, None) is None:
            return False
        self._without_deadline -= call.metadata.deadline is None
        self.size -= 1
        return True

    def clear(self) -> list[Call]:
        """Remove all calls, and return them in order of arrival in each class of priority."""
        calls: list[Call] = []
        for priority in (1, 0, -1):
            calls += self._classes[priority]
            self._classes[priority].clear()
        self._without_deadline = 0
        self.size = 0
        return calls

    def next(self, now: float, shed: list[Shed]) -> Call | None:
        """Remove the call that is served next. Adds calls that are too late to `shed`."""
        while calls := self._next_class():
            call, since = next(iter(calls.items()))
            deadline = call.metadata.deadline
            if deadline is None:
                self.discard(call)
                self._rate.count(now)
                return call
            missing = self._usual.shortfall(call, now)
            is_long = now - since > (deadline - since) * PATIENCE
            if missing is None and is_long and not self._without_deadline:
                call = next(reversed(calls))
                missing = self._usual.shortfall(call, now)
            self.discard(call)
            if missing is None or self._usual.probes(missing, now):
                self._rate.count(now)
                return call
            shed.append(missing)
        return None
