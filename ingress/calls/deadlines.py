"""When calls have to be answered, and who sees to it.

    deadlines_of(loop).add(call, deadline)    -> `call.expire()` on that loop, on time

One timer a loop, for the earliest of them all. It is moved when an earlier one comes, and looks at
what is left when it rings, so that a request that is answered in time, as most are, costs two
entries in a dict: no timer, no task, and nothing at all without a deadline.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from math import inf, isfinite
from time import monotonic

from ingress.calls.call import Call
from ingress.calls.loops import Mailbox, mailbox_of

TIMEOUT_HEADER = b"x-request-timeout-seconds"

# How far apart looks at all of them are, at least: many that end close together are one look.
GRAIN_S = 0.005
EARLY_S = 0.001  # a timer may be that early: uvloop counts in whole ms
LONGEST_TIMER_S = 3600.0  # a client may ask for more than a timer can hold
_LONGEST_NUMBER = 32  # characters; a header may have a million


def earlier(timeout_s: float | None, header: bytes) -> float | None:
    """Return the shorter of a timeout in s and what a client asks for in its header.

    The client can only shorten: what is no positive number is ignored, as if it were not there.
    """
    if len(header) > _LONGEST_NUMBER:
        return timeout_s
    try:
        wanted_s = float(header)
    except ValueError:
        return timeout_s
    if wanted_s <= 0 or not isfinite(wanted_s):
        return timeout_s
    return wanted_s if timeout_s is None else min(wanted_s, timeout_s)


class Deadlines:
    """The deadlines that one loop sees to. `add` and `discard` are thread-safe."""

    __slots__ = ("_calls", "_mailbox", "_rings_at")

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._calls: dict[Call, float] = {}
        self._rings_at = inf

    def add(self, call: Call, deadline: float) -> None:
        """Have `call.expire()` called at `deadline`, unless it is discarded by then."""
        self._calls[call] = deadline
        # Race with `_ring`, which sets this to never *before* it looks at the calls: either it
        # sees this one, or this sees that no timer is set.
        if deadline < self._rings_at:
            self._mailbox.post(self._set, deadline)

    def discard(self, call: Call) -> None:
        """Forget a call. Thread-safe."""
        self._calls.pop(call, None)

    def _set(self, when: float) -> None:
        if when < self._rings_at:
            self._rings_at = when
            delay_s = min(max(0.0, when - monotonic()), LONGEST_TIMER_S)
            # Its handle is not kept: it would keep the loop, and with it the entry in `_deadlines`.
            asyncio.get_running_loop().call_later(delay_s, self._ring, when)

    def _ring(self, when: float) -> None:
        if when != self._rings_at:
            return  # an earlier deadline came after this was set
        self._rings_at = inf
        now = monotonic()
        earliest = inf
        # Not `list(items())`: on CPython 3.11 making the pairs may collect garbage, and what runs
        # then may let in a thread that adds a call, which ends the iteration with an error.
        for call in list(self._calls):
            deadline = self._calls.get(call, inf)  # it may have been answered meanwhile
            if deadline <= now + EARLY_S:
                self._calls.pop(call, None)
                call.expire()
            elif deadline < earliest:
                earliest = deadline
        if earliest < inf:
            self._set(max(earliest, now + GRAIN_S))


_deadlines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Deadlines] = (
    weakref.WeakKeyDictionary()
)
_deadlines_lock = threading.Lock()


def deadlines_of(loop: asyncio.AbstractEventLoop) -> Deadlines:
    """Return the deadlines that this loop sees to."""
    with _deadlines_lock:
        deadlines = _deadlines.get(loop)
        if deadlines is None:
            deadlines = _deadlines[loop] = Deadlines(mailbox_of(loop))
        return deadlines
