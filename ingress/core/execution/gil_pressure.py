"""GIL pressure: many threads want the GIL at once, and loops must not wait for all of them.

CPython hands the GIL on in turns of `sys.getswitchinterval()`, 5 ms by default. With 32 threads
that compute, a loop waits 160 ms for each turn of its own. While the pressure is high,

    turns get shorter     0.5 ms, also while one thread computes: uvloop takes the GIL anew for each
                          event of a socket
    calls start later     a request that gets a slot begins by way of its server's loop, see
                          `HTTPWork.start`: that loop has turns between two calls that compute

The pressure is high as soon as the watchdog has waited for the GIL for one turn: five threads that
compute leave an HTTP loop 200 events a second, and what piles up meanwhile takes seconds to answer.
Both end a second after the last sign of pressure. Turns are 2.5 ms as soon as more than 3 worker
threads of a pool have a call: if these compute, the watchdog itself gets its turn only after all
of them. The switch interval is the whole process's; with
`INGRESS_ADAPT_SWITCH_INTERVAL=0` ingress does not change it. On free-threaded Python there is no
pressure while the GIL is off: the watchdog counts no waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from sys import maxsize
from threading import Lock
from time import monotonic

from ingress.core.base import gil

THREADS = 3  # with a call; more of them are expected to compute
SHORTEST_S = 0.0005  # each waiting thread wakes once a turn, which costs CPU time
EXPECTED_S = 0.0025  # for threads that may compute: 0.5 ms would cost 32 short calls a tenth
CALM_S = 1.0
TURNS = 8  # of an HTTP loop before the next call: in one turn it accepts one connection
TURNS_S = 0.01  # after which it waits for no more: turns beside a hundred streams are long
LOOKS = 8  # about as many of the watchdog's looks decide whether a thread computes
MOST = 0.5


@dataclass(eq=False, slots=True)
class GILPressure:
    """The pressure on the GIL, as the watchdog measures it. Written by the watchdog's thread.

    Any thread may `expect` it. Race of that with a look of the watchdog and with its end: both set
    the interval and remember what they have set, so they do it under a lock.

    adapts      false: the switch interval stays
    shortest_s  turns while the pressure is high
    expected    turns get shorter for more threads with a call than these; none without a watchdog
    shares      the share of a processor that each thread had between the last two looks, by its
                ident; empty where the system has no clocks of threads
    waited_s    seconds by which the watchdog woke late, in all, while it waited for the GIL
    """

    is_high: bool = False
    expected: int = maxsize
    waited_s: float = 0.0
    shares: Mapping[int, float] = field(default_factory=dict)
    adapts: bool = True
    shortest_s: float = SHORTEST_S
    _calm_at: float = 0.0
    _given_s: float = 0.0  # the process's own switch interval, while a shorter one is set
    _set_s: float = 0.0
    _share: float = 0.0  # of the last looks, that waited for the GIL for a turn
    _lock: Lock = field(default_factory=Lock)

    def begin(self) -> None:
        """Allow `expect`: the watchdog runs, and will see when the pressure has ended."""
        self.expected = THREADS if gil.is_on() else maxsize  # an import may turn it on later

    def end(self) -> None:
        """Restore the switch interval, because the watchdog ends."""
        self.is_high = False
        with self._lock:
            self._restore()
            self.expected = maxsize

    def expect(self, threads: int) -> None:
        """Shorten the switch interval for threads that may compute. Thread-safe.

        They may also sleep, for whom it makes no difference. Called if `threads` > `expected`.
        """
        with self._lock:
            if threads > self.expected:
                self.expected = threads
                self._calm_at = monotonic() + CALM_S
                if not self.is_high:
                    self._set(EXPECTED_S)

    def note(self, waits: int, late_s: float, now: float) -> None:
        """Take in how often the watchdog has just waited for the GIL, and how late it is.

        A turn is a switch interval. Threads that do little give the GIL back at once, so many short
        waits for them are not pressure.
        """
        if waits and 0 < late_s < inf:
            self.waited_s += late_s
        # A wait for the GIL, beside the watchdog's own sleep, that lasted for a turn.
        has_waited = waits > 1 and late_s >= max(sys.getswitchinterval(), SHORTEST_S)
        self._share += (has_waited - self._share) / LOOKS
        if has_waited and not self.is_high:
            self.is_high = True
            self._share = 1.0
        # Also while one thread computes, perhaps only because the others' calls are held back.
        if self.is_high and self._share >= MOST:
            with self._lock:
                self._calm_at = now + CALM_S
                self._set(self.shortest_s)
        elif (self.is_high or self._set_s) and now >= self._calm_at:
            self.relax()

    def relax(self) -> None:
        """Restore the process's own switch interval, unless user code has set another."""
        self.is_high = False
        with self._lock:
            self._restore()

    def _restore(self) -> None:
        self.begin()
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
