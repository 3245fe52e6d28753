"""The last log lines of each replica, for the page of the admin listener.

They are kept by the handler that prints them, in the server's process: a child process sends it
its records. What a program's own handlers print, without `ingress run`, is not here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TypedDict

from ingress.telemetry.logs.formats import exception_of, message_of, tame

LINES = 50
REPLICAS = 256
LONGEST = 4_000  # characters of one record, from its end: a traceback ends with its error

Key = tuple[str, str, str]
"""An application, a deployment and a replica."""


class LogLine(TypedDict):
    """A record as it is shown; `at` is its Unix time, `request_ids` those that it was made for."""

    at: float
    level: str
    text: str
    request_ids: list[str]


@dataclass(eq=False, slots=True)
class LastLines:
    """The last `LINES` records of the `REPLICAS` that logged last. Thread-safe."""

    _lines: dict[Key, deque[LogLine]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: logging.LogRecord) -> None:
        """Keep the text of a record that belongs to a replica, never the record: it has frames."""
        fields = record.__dict__
        if not fields.get("replica"):
            return
        text = message_of(record)
        if error := exception_of(_FORMATTER, record):
            text = f"{text}\n{error}"
        ids = str(fields.get("request_id") or "").split(",")
        line: LogLine = {
            "at": record.created,
            "level": record.levelname,
            "text": tame(text[-LONGEST:]),
            "request_ids": ids,
        }
        key = fields["application"], fields["deployment"], fields["replica"]
        with self._lock:
            lines = self._lines.pop(key, None)
            self._lines[key] = lines = deque(maxlen=LINES) if lines is None else lines
            lines.append(line)
            if len(self._lines) > REPLICAS:
                del self._lines[next(iter(self._lines))]

    def all(self) -> dict[Key, list[LogLine]]:
        """Return the last lines of each replica, the oldest first."""
        with self._lock:
            return {key: list(lines) for key, lines in self._lines.items()}


_FORMATTER = logging.Formatter()
LAST_LINES = LastLines()
"""Those of this process."""
