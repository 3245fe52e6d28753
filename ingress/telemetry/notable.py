"""The slowest and the failed calls of the last minutes, with their times.

A call that ends costs one comparison here. Only one that failed, or took longer than the calls that
are kept, is recorded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, NamedTuple

from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import Call
from ingress.core.calls.tracing import trace_id_of
from ingress.core.execution.errors import readable
from ingress.exceptions import is_cancellation
from ingress.telemetry.mistakes import described
from ingress.telemetry.watchdog.stacks import raised_at

KEPT_S = 300.0
SLOWEST = 50
FAILED = 200

Listener = Callable[[Call, "Ended"], Any]


class Ended(NamedTuple):
    """One call that has ended. Its times are those of `time.monotonic`, 0.0 for none.

    `name` is its HTTP method and route, or its method. `place` is the line of user code that
    raised: file, line and function. `first_at` is the time when its response began to stream.
    `trace_id` is "" without tracing. `unix_time` is that of its end: derived from the other clock
    at each look, it would differ.
    """

    name: str
    request_id: str
    app_name: str
    deployment: str
    replica: str
    arrived_at: float
    assigned_at: float
    began_at: float
    first_at: float
    ended_at: float
    error: str = ""
    place: tuple[str, int, str] | None = None
    trace_id: str = ""
    unix_time: float = 0.0

    @property
    def answered_s(self) -> float:
        """The seconds until its answer, or until the first part of a stream."""
        return (self.first_at or self.ended_at) - self.arrived_at

    def as_json(self) -> dict[str, Any]:
        """Return it with the durations of its steps, in ms, and Unix time."""
        begins = self.began_at or self.ended_at
        runs_until = self.first_at or self.ended_at
        slot = self.assigned_at or begins
        return {
            "at": self.unix_time - (self.ended_at - self.arrived_at),
            "name": self.name,
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "application": self.app_name,
            "deployment": self.deployment,
            "replica": self.replica,
            "ms": _ms(self.arrived_at, self.ended_at),
            "queue_ms": _ms(self.arrived_at, slot),
            "hop_ms": _ms(slot, begins),
            "run_ms": _ms(begins, runs_until),
            "stream_ms": _ms(self.first_at, self.ended_at) if self.first_at else 0.0,
            "error": self.error,
            "place": None if self.place is None else list(self.place),
        }


@dataclass(eq=False, slots=True)
class NotableCalls:
    """The calls that are kept. Thread-safe.

    least_s  the duration from which a call is slow enough; any thread reads it without the lock
    """

    least_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _slowest: list[Ended] = field(default_factory=list)
    _failed: deque[Ended] = field(default_factory=lambda: deque(maxlen=FAILED))
    _listeners: tuple[Listener, ...] = ()

    def add(self, call: Call, ended: Ended) -> None:
        """Keep a call that failed, or was slow."""
        for listener in self._listeners:
            listener(call, ended)
        # Race with user loops that add at the same moment: the list is cut by one of them.
        with self._lock:
            if ended.error:
                self._failed.append(ended)
            self._slowest.append(ended)
            if len(self._slowest) >= 2 * SLOWEST:
                self._cut(monotonic())

    def _cut(self, now: float) -> None:
        """Keep the slowest of the last minutes. The caller holds the lock."""
        recent = [each for each in self._slowest if now - each.ended_at < KEPT_S]
        recent.sort(key=lambda each: -each.answered_s)
        self._slowest = recent[:SLOWEST]
        is_full = len(self._slowest) == SLOWEST and not self._listeners
        self.least_s = self._slowest[-1].answered_s if is_full else 0.0

    def recent(self) -> tuple[list[Ended], list[Ended]]:
        """Return the slowest calls, the slowest first, and the failed calls, the latest first."""
        now = monotonic()
        with self._lock:
            self._cut(now)
            slowest, failed = list(self._slowest), list(self._failed)
        failed = [each for each in failed if now - each.ended_at < KEPT_S]
        return slowest, failed[::-1]

    def clear(self) -> None:
        """Forget them: the deployments that they name have ended."""
        with self._lock:
            self._slowest.clear()
            self._failed.clear()
            self.least_s = 0.0

    def listen(self, listener: Listener) -> None:
        """Call `listener` for each call that ends from now on, in the thread of its loop."""
        with self._lock:
            self._listeners += (listener,)
            self.least_s = 0.0

    def unlisten(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each != listener)


def _ms(begin: float, end: float) -> float:
    return round(max(0.0, end - begin) * 1e3, 3)


NOTABLE = NotableCalls()
"""The notable calls of this process."""


_MOST_TEXT = 500  # of an error


def note_end(
    call: Call, replica_id: ReplicaID, ended: float, failure: BaseException | None
) -> None:
    """Keep a call. A call that was cancelled has not failed."""
    error, place = "", None
    if failure is not None and not call.settled and not is_cancellation(failure):
        failure = readable(failure)
        error = described(failure)
        found = raised_at(failure)
        place = (found.file, found.line, found.function) if found.file else None
    keep(call, replica_id.unique_id, ended, error, place)


def keep(
    call: Call,
    replica: str,
    ended: float,
    error: str,
    place: tuple[str, int, str] | None = None,
) -> None:
    """Keep a call with the text of its error, "" for none."""
    deployment = call.metadata.deployment
    NOTABLE.add(
        call,
        Ended(
            call.title(),
            call.metadata.request_id,
            deployment.app_name,
            deployment.name,
            replica,
            call.started_at,
            call.assigned_at,
            call.began_at,
            call.work.streamed_at,
            ended,
            error[:_MOST_TEXT],
            place,
            trace_id_of(call),
            time(),
        ),
    )
