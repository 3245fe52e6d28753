"""The system's clocks of this process's threads: run time, waits for the GIL and a processor."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

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

    # The native ids, by ident; `None` for a thread that is not Python's.
    _natives: dict[int, int | None] = field(default_factory=dict)

    def read(self, idents: Iterable[int]) -> dict[int, float]:
        """Return the seconds that each of these threads has run, where they are known."""
        if not _IS_LINUX:
            return {}
        found = {}
        for ident in idents:
            # An ident is reused after its thread has ended; then the old thread's clock fails.
            for _ in range(2):
                if (native := self.native(ident)) is None:
                    break
                try:
                    # `time.pthread_getcpuclockid` may crash on a thread that has just ended. This
                    # is the value that it computes: clockid_t of a thread, Linux,
                    # include/linux/posix-timers_types.h.
                    found[ident] = time.clock_gettime(~native << 3 | 6)
                    break
                except OSError:
                    del self._natives[ident]
        return found

    def native(self, ident: int) -> int | None:
        """Return the system's id of a thread; `None` if it is not a Python thread."""
        if ident not in self._natives:
            self._natives = {
                thread.ident: thread.native_id
                for thread in threading.enumerate()
                if thread.ident is not None
            }
        return self._natives.setdefault(ident, None)


@dataclass(frozen=True, slots=True)
class ProcessorWait:
    """The time that a thread was ready to run and had no processor, and the reasons, in seconds.

    waited_s     of the thread, on the run queue
    ran_s        run time of all threads of this process
    stolen_s     of all processors, that the hypervisor gave to other machines
    throttled_s  that the limit of the control group kept this process from running
    at           when it was read, monotonic

    Source: scheduler/sched-stats and admin-guide/cgroup-v2 of Linux' documentation, proc(5).
    """

    waited_s: float = 0.0
    ran_s: float = 0.0
    stolen_s: float = 0.0
    throttled_s: float = 0.0
    at: float = 0.0

    @classmethod
    def read(cls, native: int) -> ProcessorWait | None:
        """Return the times until now; `None` where the system does not tell them."""
        if (waited_s := processor_wait_s(native)) is None:
            return None
        return cls(waited_s, time.process_time(), _stolen_s(), _throttled_s(), time.monotonic())

    def since(self, before: ProcessorWait) -> ProcessorWait:
        """Return the times since an earlier reading, with their span as `at`."""
        return ProcessorWait(
            *(
                getattr(self, name) - getattr(before, name)
                for name in ("waited_s", "ran_s", "stolen_s", "throttled_s", "at")
            )
        )

    def __str__(self) -> str:
        """Return the reasons in words. `self` is a difference."""
        span_s = self.at or 1.0
        if self.throttled_s > self.waited_s / 4:
            return f"the CPU limit of its control group held it for {self.throttled_s * 1e3:.0f} ms"
        if self.stolen_s > self.waited_s / 4:
            return (
                f"the hypervisor took {self.stolen_s * 1e3:.0f} ms from this machine's processors"
            )
        processors = os.cpu_count() or 1
        if self.ran_s >= span_s * processors / 2:
            return (
                f"this process itself kept {self.ran_s / span_s:.1f} of {processors} processors "
                "busy: let fewer threads compute, or give it more processors"
            )
        return "other processes had the processors"


def processor_wait_s(native: int) -> float | None:
    """Return for how long a thread of this process was ready to run and had no processor, so far.

    `None` where the system does not tell.
    """
    if _IS_LINUX:
        with suppress(OSError, ValueError, IndexError):
            return int(_read(f"/proc/self/task/{native}/schedstat").split()[1]) / 1e9
    return None


def _stolen_s() -> float:
    with suppress(OSError, ValueError, IndexError):
        return int(_read("/proc/stat").split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _throttled_s() -> float:
    # Of the group that is the root here, as in a container: version 2, or 1 in nanoseconds.
    for path, unit in (("cpu.stat", 1e6), ("cpu/cpu.stat", 1e9)):
        with suppress(OSError, ValueError):
            values = dict(zip(*[iter(_read(f"/sys/fs/cgroup/{path}").split())] * 2, strict=True))
            for key in (b"throttled_usec", b"throttled_time"):
                if key in values:
                    return int(values[key]) / unit
    return 0.0


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


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
