"""The deadlines of calls, with one timer for each loop.

    deadlines_of(loop).add(call, deadline)    -> `call.expire()` on that loop, on time

The timer is set for the earliest deadline of its loop. It is moved when an earlier deadline comes,
and looks at the remaining ones when it rings. So a request that is answered in time, as most are,
costs two operations on a dict: no timer, no task. A request without a deadline costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import dataclass, field
from math import inf, isfinite
from time import monotonic

from ingress.core.calls.call import EARLY_S, Call
from ingress.core.calls.loops import Mailbox, mailbox_of

TIMEOUT_HEADER = b"x-request-timeout-seconds"

# Between two checks of all deadlines, at least: those that end close together take one check.
GRAIN_S = 0.005
LONGEST_TIMER_S = 3600.0  # a client may ask for more than a timer can hold
_LONGEST_NUMBER = 32  # characters; a header may have a million


def earlier(timeout_s: float | None, header: bytes) -> float | None:
    """Return the shorter of a timeout in s and the one that a client asks for in its header.

    The client can only shorten the timeout. A header that is no positive number is ignored.
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


@dataclass(eq=False, slots=True)
class Deadlines:
    """The deadlines that one loop watches. `add` and `discard` are thread-safe."""

    _mailbox: Mailbox
    _calls: dict[Call, float] = field(default_factory=dict)
    _rings_at: float = inf

    def add(self, call: Call, deadline: float) -> None:
        """Have `call.expire()` called at `deadline`, unless the call is discarded by then."""
        self._calls[call] = deadline
        # Race with `_ring`, which sets `_rings_at` to infinity *before* it reads the calls: either
        # it sees this call, or this sees that no timer is set.
        if deadline < self._rings_at:
            self._mailbox.post(self._set, deadline)

    def discard(self, call: Call) -> None:
        """Forget a call. Thread-safe."""
        self._calls.pop(call, None)

    def _set(self, when: float) -> None:
        if when < self._rings_at:
            self._rings_at = when
            delay_s = min(max(0.0, when - monotonic()), LONGEST_TIMER_S)
            # The timer's handle is not kept: it would keep the loop and its entry in `_deadlines`.
            asyncio.get_running_loop().call_later(delay_s, self._ring, when)

    def _ring(self, when: float) -> None:
        if when != self._rings_at:
            return  # an earlier deadline came after this timer was set
        self._rings_at = inf
        now = monotonic()
        earliest = inf
        # Not `list(items())`: on CPython 3.11 making the pairs may run the garbage collector and
        # let in another thread, which adds a call: the iteration would end with an error.
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
    with _deadlines_lock:
        deadlines = _deadlines.get(loop)
        if deadlines is None:
            deadlines = _deadlines[loop] = Deadlines(mailbox_of(loop))
        return deadlines
