"""The overload policy: which waiting call is served next, and which calls are shed.

    the queue is short                          order of arrival
    the first in it has waited for more than    the newest first; the old ones stay while they can
    half of the time that it had                still be answered
    a call with less time left than calls of    shed: `BackPressureError`, 503 with `Retry-After`
    its kind usually take
    a call comes, and more wait than get a      turned away: the same answer, at once
    slot in the time it has

At twice the capacity, order of arrival alone lets each call wait until almost no time is left: its
work begins, is cut at its deadline, and is lost. Then nearly nothing is answered in time.

Only calls with a deadline are overtaken or shed. As soon as one without a deadline waits, all are
served in order of arrival; those with a deadline can still be shed then.

Sources: Nichols and Jacobson, "Controlling Queue Delay" (2012); Maurer, "Fail at Scale" (2015).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ingress.calls.call import Call

PATIENCE = 0.5  # the share of its time that the first may wait before the newest goes first
MIN_SAMPLES = 8  # before an estimate is used
WEIGHT = 1 / 8  # of the latest sample in an estimate
HALF_LIFE_S = 5.0  # of an estimate without new samples
PROBE_S = 1.0  # how often a call may begin that an estimate would shed
MAX_KINDS = 1000  # of which estimates are kept, in case kinds are without end
MIN_TURNS = 16  # taken from the queue before the rate of that is used,
MIN_WINDOW_S = 0.5  # and the time they took


class Shed(NamedTuple):
    """A call that was taken out of the queue, because it cannot be answered in time."""

    call: Call
    left_s: float
    usual_s: float

    @property
    def reason(self) -> str:
        return (
            f"{self.left_s:.3f} s are left to answer it, and requests like it usually take "
            f"{self.usual_s:.3f} s"
        )


class Estimate:
    """The time that calls of one kind hold a slot: a moving average. Owned by `UsualTimes`."""

    __slots__ = ("probed_at", "samples", "updated_at", "usual_s")

    def __init__(self) -> None:
        self.samples = 0
        self.usual_s = 0.0
        self.updated_at = 0.0
        self.probed_at = 0.0


class UsualTimes:
    """The estimates of a deployment, by kind of call. Guarded by its router's lock."""

    __slots__ = ("_estimates",)

    def __init__(self) -> None:
        self._estimates: OrderedDict[str, Estimate] = OrderedDict()

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
        took_s = (call.answered_at or now) - call.assigned_at
        # A call that was cut short says only that such calls take longer than that.
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
        """Return whether a call begins all the same: an estimate that lets none begin never learns.

        One a second may.
        """
        estimate = self._estimates[shed.call.kind()]
        if shed.left_s <= 0 or now < estimate.probed_at + PROBE_S:
            return False
        estimate.probed_at = now
        return True


class ServiceRate:
    """How many calls a second get a slot while there are always some that wait for one.

    `per_s` is `None` until that is known. Guarded by the router's lock.
    """

    __slots__ = ("_began_at", "_turns", "per_s")

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Forget what was counted: no call has waited until now."""
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
        """Return how many calls will get a slot in this time, `None` if that is not known."""
        if self.per_s is None:
            return None
        # What was counted since has its weight: fewer, if those that are due do not come.
        took_s = now - self._began_at + MIN_TURNS / self.per_s
        return (self._turns + MIN_TURNS) / took_s * max(left_s, 0.0)


class WaitingCalls:
    """The calls that wait for a slot of a deployment. Guarded by its router's lock."""

    __slots__ = ("_calls", "_rate", "_usual", "_without_deadline")

    def __init__(self, usual: UsualTimes) -> None:
        self._usual = usual
        self._rate = ServiceRate()
        self._calls: OrderedDict[Call, float] = OrderedDict()  # since when each waits
        self._without_deadline = 0

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call: Call) -> bool:
        return call in self._calls

    @property
    def has_patient(self) -> bool:
        """Whether a call without a deadline waits."""
        return self._without_deadline > 0

    def turns_away(self, deadline: float, now: float) -> str:
        """Return why a call that comes now cannot get a slot in time, "" if it may.

        What is served newest first would serve it, and shed an older one for it, at its deadline:
        that one has cost more by then, and its client has waited for nothing.
        """
        left_s = deadline - now
        turns = self._rate.turns_in(left_s, now)
        if turns is None or len(self._calls) <= max(turns, MIN_TURNS):
            return ""
        return (
            f"{left_s:.3f} s are left to answer it, about {turns:.0f} requests are begun in that "
            f"time, and {len(self._calls)} wait"
        )

    def add(self, call: Call, now: float) -> None:
        """Add a call behind all others."""
        if not self._calls:
            self._rate.restart(now)
        self._calls[call] = now
        self._without_deadline += call.metadata.deadline is None

    def add_first(self, call: Call, now: float) -> None:
        """Add a call that had a slot before any of the others."""
        self.add(call, now)
        self._calls.move_to_end(call, last=False)

    def discard(self, call: Call) -> bool:
        """Take a call out. Returns False if it does not wait here."""
        if self._calls.pop(call, None) is None:
            return False
        self._without_deadline -= call.metadata.deadline is None
        return True

    def clear(self) -> list[Call]:
        """Take all calls out, and return them in order of arrival."""
        calls = list(self._calls)
        self._calls.clear()
        self._without_deadline = 0
        return calls

    def next(self, now: float, shed: list[Shed]) -> Call | None:
        """Take out the call that is served next. Adds to `shed` those that cannot be any more."""
        while self._calls:
            call, since = next(iter(self._calls.items()))
            deadline = call.metadata.deadline
            if deadline is None:
                self.discard(call)
                self._rate.count(now)
                return call
            missing = self._usual.shortfall(call, now)
            is_long = now - since > (deadline - since) * PATIENCE
            if missing is None and is_long and not self._without_deadline:
                call = next(reversed(self._calls))
                missing = self._usual.shortfall(call, now)
            del self._calls[call]
            if missing is None or self._usual.probes(missing, now):
                self._rate.count(now)
                return call
            shed.append(missing)
        return None
