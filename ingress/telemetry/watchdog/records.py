"""Stalls of event loops: the record of each, the log of the recent ones, and the worst by line.

A line of code is logged once a minute. The record is logged in the context of the request that
blocked the loop, so that its fields are that request's, see `logs`.
"""

from __future__ import annotations

import linecache
import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from math import inf
from time import monotonic

from ingress.telemetry.watchdog.stacks import CodeLine

logger = logging.getLogger("ingress")

RECENT = 100
"""Number of stalls that `serve.stalls()` keeps."""

QUIET_S = 60.0
"""Pause between two log records of one line."""

_LINES = 1000  # for which the last record is remembered
_NAMED = 3  # threads or requests that a message names


class StallReason(StrEnum):
    """Why an event loop stalled."""

    BLOCKED = "blocked"
    """Code on the loop blocked it."""
    IMPORT = "import"
    """Code on the loop imported a module, which happens once in a process."""
    GIL = "gil"
    """Code in other threads held the GIL: Python runs one thread at a time."""
    STARVED = "starved"
    """The loop's thread was ready to run, and had no processor: no code of the process did this."""
    UNKNOWN = "unknown"
    """Code on the loop ran, and ended before the watchdog could take a sample."""

    @property
    def cure(self) -> str:
        """A sentence that says what to do about it; empty if the reason does not tell."""
        return _CURES.get(self, "")


_CURES = {
    StallReason.BLOCKED: (
        "Await what waits, or run it in a thread: `await asyncio.to_thread(...)`; compute in "
        "another process."
    ),
    StallReason.IMPORT: (
        "A module is imported once in a process: import it at the top of your module, or in the "
        "constructor, before requests come."
    ),
    StallReason.GIL: (
        "Python runs one thread at a time: compute in another process, or in a library that "
        "releases the GIL."
    ),
}


@dataclass(frozen=True, slots=True)
class Holder:
    """A thread that ran while a loop stalled; without a `place` if its work has ended."""

    thread: str
    place: CodeLine

    def __str__(self) -> str:
        return f"{self.thread} at {self.place}" if self.place.file else self.thread


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall of an event loop, and the code that caused it.

    `place` is the innermost line of user code, whatever library call it waited in, and `method` is
    the deployment's method around it. If the loop only waited for the GIL, both are those of the
    first of `holders`, the other threads that ran. If it had no processor there is no `place`, and
    `scarcity` has the reason in words. `imports` is the module whose import blocked the
    loop, and `place` then the line that imports it. `calls` counts the calls of `method` that ran
    in a row before the loop turned. `waited` counts the other requests in flight on the loop.
    `began_at_s` is Unix time. The duration starts at the first heartbeat that the loop missed, so
    it is short by up to a quarter of the threshold, or half if no request was in flight before.
    `is_over` is false while the stall lasts.
    """

    began_at_s: float
    duration_ms: float
    reason: StallReason
    loop: str
    application: str
    deployment: str
    replica: str
    method: str
    request_ids: tuple[str, ...]
    place: CodeLine
    waited: int
    calls: int = 1
    holders: tuple[Holder, ...] = ()
    imports: str = ""
    stack: tuple[CodeLine, ...] = ()
    is_over: bool = True
    scarcity: str = ""

    def __str__(self) -> str:
        what = "stalled" if self.is_over else "has been stalled"
        begin = f"The event loop of {self.loop} {what} for {self.duration_ms:.0f} ms"
        several = "s" if self.waited > 1 else ""
        end = f"Meanwhile {self.waited or 'no'} other request{several} waited."
        holders = _some([str(each) for each in self.holders], "; ")
        if self.reason is StallReason.GIL:
            return (
                f"{begin}, waiting for the GIL while other threads were at work: {holders}. {end} "
                f"{self.reason.cure}"
            )
        if self.reason is StallReason.STARVED:
            return f"{begin}: it was ready to run and had no processor, as {self.scarcity}. {end}"
        if self.reason is StallReason.UNKNOWN:
            return (
                f"{begin}. {end} Code on the loop ran where the watchdog could not take a sample: "
                "in the garbage collector, or in one C call that held the GIL."
            )
        whose = f" in {self.method}" if self.method else ""
        if self.request_ids:
            several = "s" if len(self.request_ids) > 1 else ""
            whose += f" (request{several} {_some(self.request_ids)})"
        if self.calls > 1:
            whose += f", {self.calls} calls one after another"
        if holders:
            end += f" Other threads were at work, {holders}; the loop may have waited for the GIL."
        place = self.place
        at = str(place) if place.function != self.method else f"{place.file}:{place.line}"
        if self.reason is StallReason.IMPORT:
            at = f"importing {self.imports} at {at}"
        else:
            at = f"at {at}"
        return f"{begin}{whose}, {at}{_source(place)}. {end} {self.reason.cure}"


SPAN_S = 900.0
"""Seconds for which the worst stalls are kept."""

_STEP_S = 10.0
_LINES_KEPT = 500


@dataclass(frozen=True, slots=True)
class Stalls:
    """The stalls at one line of a replica in some time: their number, the longest, and the most
    requests that waited for one.
    """

    times: int
    longest: Stall
    waited: int

    def plus(self, other: Stalls) -> Stalls:
        longest = max(self.longest, other.longest, key=lambda each: each.duration_ms)
        return Stalls(self.times + other.times, longest, max(self.waited, other.waited))


@dataclass(eq=False, slots=True)
class WorstStalls:
    """The stalls of the last 15 minutes, by replica, reason and line. Thread-safe.

    A long stall is not forgotten for the short ones after it.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock)
    # By line and by steps of 10 s; the line that stalled last is the last.
    _by_line: dict[tuple[object, ...], dict[int, Stalls]] = field(default_factory=dict)

    def add(self, stall: Stall) -> None:
        whose = stall.application, stall.deployment, stall.replica
        key = (*whose, stall.reason, stall.place.file, stall.place.line)
        step = int(stall.began_at_s / _STEP_S)
        one = Stalls(1, stall, stall.waited)
        with self._lock:
            steps = self._by_line.pop(key, {})
            steps[step] = steps[step].plus(one) if step in steps else one
            for old in [each for each in steps if each < step - SPAN_S / _STEP_S]:
                del steps[old]
            self._by_line[key] = steps
            while len(self._by_line) > _LINES_KEPT:
                del self._by_line[next(iter(self._by_line))]

    def since(self, at_s: float) -> list[Stalls]:
        """Return those since a moment in Unix time, by line, the longest first."""
        step = int(at_s / _STEP_S)
        with self._lock:
            lines = [
                [each for began, each in steps.items() if began >= step]
                for steps in self._by_line.values()
            ]
        found = [reduce(Stalls.plus, each) for each in lines if each]
        return sorted(found, key=lambda each: -each.longest.duration_ms)


@dataclass(slots=True)
class StallLog:
    """The recent stalls. Owned by the watchdog's thread; any thread may read them.

    For `processor_wait_s` the watchdog itself was ready to run, and had no processor.
    """

    recent: deque[Stall] = field(default_factory=lambda: deque(maxlen=RECENT))
    worst: WorstStalls = field(default_factory=WorstStalls)
    processor_wait_s: float = 0.0
    # By line of code: when it was logged last, and the number of stalls there since.
    _lines: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)

    def keep(self, stall: Stall) -> None:
        self.recent.append(stall)
        self.worst.add(stall)

    def log(self, stall: Stall, context: Context, *, follows: bool = False) -> bool:
        """Log a stall. Returns False if another stall at its line was logged just before.

        `follows` says that this is the end of a stall that was logged while it lasted.
        """
        if (more := self._more(stall)) is None and not follows:
            return False
        again = f" ({more} more stalls at this line since the last record)" if more else ""
        # An import happens once, so that there is no further stall to warn of.
        level = logging.INFO if stall.reason is StallReason.IMPORT else logging.WARNING
        context.run(logger.log, level, "%s%s", stall, again, extra={"stall": stall})
        return True

    def _more(self, stall: Stall) -> int | None:
        """Return how many stalls at a stall's line were skipped since its last record.

        `None` if it is too early for the next record.
        """
        place = stall.place
        key = (place.file or stall.reason, place.line)
        now = monotonic()
        logged_at, more = self._lines.get(key, (-inf, 0))
        if now - logged_at < QUIET_S:
            self._lines[key] = logged_at, more + 1
            return None
        while len(self._lines) >= _LINES:
            del self._lines[next(iter(self._lines))]
        self._lines[key] = now, 0
        return more


def _some(names: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return between.join(names[:_NAMED]) + more


def _source(place: CodeLine) -> str:
    linecache.checkcache(place.file)
    text = linecache.getline(place.file, place.line).strip()
    return f": `{text}`" if text else ""
