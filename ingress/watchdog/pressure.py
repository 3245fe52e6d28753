"""GIL pressure: many threads want the GIL at once, and loops must not wait for all of them.

CPython hands the GIL on in turns of `sys.getswitchinterval()`, 5 ms by default. With 32 threads
that compute, a loop waits 160 ms for each turn of its own. While the pressure is high,

    turns get shorter     with N threads before a loop, to 15 ms / N, at least 0.5 ms; for a second
    calls start later     a request that gets a slot begins by way of its server's loop, see
                          `Exchange.start`: that loop has a turn between two calls that compute

Both end a second after the last sign of pressure. The switch interval is the whole process's; with
`INGRESS_ADAPT_SWITCH_INTERVAL=0` ingress does not change it.
"""

from __future__ import annotations

import sys
from math import inf

WAITS = 3  # the pressure is high once the watchdog waited so many turns for the GIL
ROUND_S = 0.015  # target wait of a loop for one turn of its own
SHORTEST_S = 0.0005  # each waiting thread wakes once a turn, which costs CPU time
CALM_S = 1.0


class GILPressure:
    """The pressure on the GIL, as the watchdog measures it. Written by the watchdog's thread.

    `waited_s` are the seconds by which the watchdog woke late, in all, while it waited for the GIL.
    """

    __slots__ = ("_calm_at", "_given_s", "_grows_at", "_set_s", "adapts", "is_high", "waited_s")

    def __init__(self) -> None:
        self.is_high = False
        self.waited_s = 0.0
        self.adapts = True
        self._calm_at = 0.0
        self._given_s = 0.0  # the process's own switch interval, while a shorter one is set
        self._set_s = 0.0
        self._grows_at = 0.0

    def note(self, waits: int, late_s: float, now: float) -> None:
        """Take in how often the watchdog has just waited for the GIL, and how late it is.

        A turn is a switch interval. Threads that do little give the GIL back at once, so many short
        waits for them are not pressure.
        """
        turn_s = sys.getswitchinterval()
        if waits and 0 < late_s < inf:
            self.waited_s += late_s
        turns = min(waits, late_s / turn_s + 1)
        if turns >= WAITS:
            self._calm_at = now + CALM_S
            self.is_high = True
            self._shorten(max(SHORTEST_S, ROUND_S / turns), turn_s, now)
        elif self.is_high and late_s >= turn_s / 2:
            # One thread computes, perhaps only because the others' calls are held back. The
            # interval grows again: after half of a very short one, any thread wakes late.
            self._calm_at = now + CALM_S
            self._shorten(min(2 * turn_s, ROUND_S / WAITS), turn_s, now)
        elif self.is_high and now >= self._calm_at:
            self.relax()

    def _shorten(self, interval_s: float, turn_s: float, now: float) -> None:
        """Set the switch interval; a longer one only a second after the last shorter one.

        The queue for the GIL is short each time that a burst of calls has ended, and the next burst
        would meet long turns.
        """
        if interval_s <= turn_s:
            self._grows_at = now + CALM_S
        if interval_s <= turn_s or now >= self._grows_at:
            self._set(interval_s)

    def relax(self) -> None:
        """Restore the process's own switch interval, unless user code has set another."""
        self.is_high = False
        if self._set_s and sys.getswitchinterval() == self._set_s:
            sys.setswitchinterval(self._given_s)
        self._set_s = 0.0

    def _set(self, interval_s: float) -> None:
        """Set the switch interval, to no more than the process's own."""
        if not self.adapts:
            return
        now_s = sys.getswitchinterval()
        if not self._set_s:
            self._given_s = now_s
        elif now_s != self._set_s:
            return  # user code has set an interval meanwhile
        sys.setswitchinterval(min(interval_s, self._given_s))
        self._set_s = sys.getswitchinterval()  # in whole microseconds


GIL_PRESSURE = GILPressure()
"""The GIL pressure in this process."""
