"""What the system knows of this process's threads: who ran, and who waited for the GIL."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable

if sys.platform != "win32":
    import resource

_IS_LINUX = sys.platform == "linux"

# A thread that waits for the GIL wakes once in each of the interpreter's switch intervals, 5 ms by
# default, to ask for it. One that sleeps, or whose process is stopped, does not wake at all.
ENOUGH_WAITS = 5  # to tell it from a thread that waited for its turn once or twice


class ThreadClocks:
    """How long threads have run on a processor. Empty where the system does not tell."""

    __slots__ = ("_clocks",)

    def __init__(self) -> None:
        self._clocks: dict[int, int | None] = {}

    def read(self, idents: Iterable[int]) -> dict[int, float]:
        """Return the seconds that each of these threads has run, as far as they are known."""
        if not _IS_LINUX:
            return {}
        found = {}
        for ident in idents:
            # An ident is used again when its thread has ended; the clock of the old one fails then.
            for _ in range(2):
                if ident not in self._clocks:
                    self._refresh()
                clock = self._clocks.setdefault(ident, None)
                if clock is None:  # not a thread of Python's own
                    break
                try:
                    found[ident] = time.clock_gettime(clock)
                    break
                except OSError:
                    del self._clocks[ident]
        return found

    def _refresh(self) -> None:
        # Not `time.pthread_getcpuclockid`, which may crash on a thread that has just ended. This is
        # what it computes: clockid_t of a thread, Linux, include/linux/posix-timers_types.h.
        self._clocks = {
            thread.ident: ~thread.native_id << 3 | 6
            for thread in threading.enumerate()
            if thread.ident is not None and thread.native_id is not None
        }


class GILWait:
    """How often the current thread, which slept and came late, asked for the GIL meanwhile."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = self._count()

    def since_last(self) -> int:
        """Return for how many switch intervals it waited since this was last asked.

        It must not have run much besides.
        """
        before, self._before = self._before, self._count()
        if _IS_LINUX:
            return int(self._before[0] - before[0])
        took_s = self._before[1] - before[1]
        return ENOUGH_WAITS if self._before[0] - before[0] >= took_s / 2 else 0

    def _count(self) -> tuple[float, float]:
        if _IS_LINUX:
            return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, 0.0
        # Elsewhere: whether the process computed. A C call that sleeps with the GIL is not seen.
        return time.process_time(), time.monotonic()
