"""The system's clocks of this process's threads: run time, and waits for the GIL."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ingress.core.base import gil

if sys.platform != "win32":
    import resource

_IS_LINUX = sys.platform == "linux"

# A thread that waits for the GIL wakes once per switch interval of the interpreter, 5 ms by
# default, to ask for it. A thread that sleeps, or whose process is stopped, does not wake at all.
ENOUGH_WAITS = 5  # more than a thread has that waited for its turn once or twice


@dataclass(eq=False, slots=True)
class ThreadClocks:
    """The run times of threads on a processor. Empty where the system has no such clocks."""

    _clocks: dict[int, int | None] = field(default_factory=dict)

    def read(self, idents: Iterable[int]) -> dict[int, float]:
        """Return the seconds that each of these threads has run, where they are known."""
        if not _IS_LINUX:
            return {}
        found = {}
        for ident in idents:
            # An ident is reused after its thread has ended; then the old thread's clock fails.
            for _ in range(2):
                if ident not in self._clocks:
                    self._refresh()
                clock = self._clocks.setdefault(ident, None)
                if clock is None:  # not a Python thread
                    break
                try:
                    found[ident] = time.clock_gettime(clock)
                    break
                except OSError:
                    del self._clocks[ident]
        return found

    def _refresh(self) -> None:
        # `time.pthread_getcpuclockid` may crash on a thread that has just ended. This is the value
        # that it computes: clockid_t of a thread, Linux, include/linux/posix-timers_types.h.
        self._clocks = {
            thread.ident: ~thread.native_id << 3 | 6
            for thread in threading.enumerate()
            if thread.ident is not None and thread.native_id is not None
        }


class GILWait:
    """A counter of the current thread's waits for the GIL, for a thread that woke late."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = self._count()

    def since_last(self) -> int:
        """Return for how many switch intervals the thread has waited since the last call.

        The thread must not have run much meanwhile. Without a GIL, 0: it waited for a processor.
        """
        before, self._before = self._before, self._count()
        if not gil.is_on():
            return 0
        if _IS_LINUX:
            return int(self._before[0] - before[0])
        took_s = self._before[1] - before[1]
        return ENOUGH_WAITS if self._before[0] - before[0] >= took_s / 2 else 0

    def _count(self) -> tuple[float, float]:
        if _IS_LINUX:
            return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, 0.0
        # Elsewhere: an estimate by the process's CPU time. It misses C calls that sleep with the
        # GIL.
        return time.process_time(), time.monotonic()
