"""Bounded queues of log lines, and the threads that write them.

A full pipe, a stopped terminal or a full disk blocks the thread of its sink, and no other thread: a
line that finds the queue full is dropped and counted. The first drop is logged at once, and, once
lines can be written again, their number, at most once a minute.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import stat
import threading
from collections.abc import Callable, Iterable
from itertools import count
from logging.handlers import RotatingFileHandler
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

logger = logging.getLogger("ingress")

QUEUE_CHARACTERS = 8 * 2**20
MOST_LINES = 10_000  # that are written at once
GATHER_S = 0.01
"""Pause before lines that follow shortly on others are written, all at once."""
AT_ONCE = select.PIPE_BUF if hasattr(select, "PIPE_BUF") else 512
"""Bytes that a pipe takes without mixing them with those of other processes."""
IDLE_S = 1.0
"""Time without lines after which the thread of a sink ends; the next line starts another."""
TOLD_EVERY_S = 60.0
LAST_LINES_S = 1.0
ROTATED_BYTES, BACKUPS = 512 * 2**20, 5  # Ray 2.60.0, ray_constants.py


class Marker(threading.Event):
    """A place in the queue. It is set once all lines before it have been written or dropped."""


Line = Any
"""The argument of a sink's `write`, or a function that returns it."""


class Sink:
    """A queue of lines, and the thread that writes them with `write`, which may block or fail.

    A line may be a function that returns it, which the sink's thread then calls. Thread-safe.
    `put` takes no lock, so that signal handlers and finalizers may log.
    """

    __slots__ = (
        "_drops", "_is_told", "_lines", "_lock", "_name", "_queued", "_thread", "_told", "_told_at",
        "_write", "dropped",
    )  # fmt: skip

    def __init__(self, name: str, write: Callable[[list[Any]], None]) -> None:
        self._name = name
        self._write = write
        self._lines: SimpleQueue[Line | Marker] = SimpleQueue()
        # Race of the threads that add to it with the sink's own, which sets it to 0 when it takes
        # all lines: a lost addition makes the queue a line longer, until the next 0.
        self._queued = 0
        # Race of the threads whose lines are dropped: `next` is one step. The thread that stores
        # its number last may have an older one, until the next drop.
        self._drops = count(1)
        self.dropped = 0
        self._is_told = False
        self._told, self._told_at = 0, -TOLD_EVERY_S
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        _sinks.append(self)

    def put(self, line: Line, size: int = 0) -> None:
        """Queue a line, without its line break, or drop it. Never blocks."""
        if self._queued > QUEUE_CHARACTERS:
            self._drop("they are read too slowly")
            return
        self._queued += size or len(line)
        self._lines.put(line)
        if self._thread is None:
            self._start()

    def _drop(self, why: str) -> None:
        self.dropped = next(self._drops)
        if not self._is_told:  # before the record, which may be dropped itself
            self._is_told = True
            logger.warning("%s: log lines are dropped, because %s", self._name, why)

    def flush(self, timeout_s: float = LAST_LINES_S) -> bool:
        """Wait until the lines that are queued now are written. Returns False after the timeout."""
        if self._thread is None and self._lines.empty():
            return True
        marker = Marker()
        self._lines.put(marker)
        if self._thread is None:
            self._start()
        return marker.wait(timeout_s)

    def forget(self) -> None:
        """Drop the thread, which a fork has not copied, and the lines, which the parent writes."""
        self._lines, self._queued, self._thread = SimpleQueue(), 0, None
        self._lock = threading.Lock()

    def _start(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is starting it, or this one, which a finalizer interrupts
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:
            pass  # the interpreter is ending
        finally:
            self._lock.release()

    def _run(self) -> None:
        wrote_at = 0.0
        while True:
            try:
                first = self._lines.get(timeout=IDLE_S)
            except Empty:
                break
            if monotonic() - wrote_at < GATHER_S and not isinstance(first, Marker):
                sleep(GATHER_S)
            self._take(first)
            wrote_at = monotonic()
        # Race with a thread that puts a line now. It sees no thread, and starts one; or it put the
        # line before, and this thread sees it. The lock is free of others, who do not wait for it.
        with self._lock:
            self._thread = None
        if not self._lines.empty():
            self._start()

    def _take(self, first: Line | Marker) -> None:
        """Write all lines that are queued."""
        taken: list[Line | Marker] = [first]
        try:
            while len(taken) < MOST_LINES:
                taken.append(self._lines.get_nowait())
        except Empty:
            pass
        self._queued = 0
        lines = [_made(line) for line in taken if not isinstance(line, Marker)]
        if lines:
            try:
                self._write(lines)
            except (OSError, ValueError) as error:  # ValueError: of a file that is closed
                for _ in lines:
                    self._drop(f"they cannot be written: {error}")
            else:
                self._tell()
        for each in taken:
            if isinstance(each, Marker):
                each.set()

    def _tell(self) -> None:
        """Log the number of dropped lines, after lines that were written."""
        if self.dropped > self._told and monotonic() - self._told_at >= TOLD_EVERY_S:
            lost, self._told, self._told_at = self.dropped - self._told, self.dropped, monotonic()
            logger.warning("%s: %d log lines were dropped", self._name, lost)


def _made(line: Line) -> Any:
    try:
        return line() if callable(line) else line
    except Exception as error:  # of a formatter: the thread must go on
        return f"a log line cannot be formatted: {type(error).__name__}"


def _to_descriptor(number: int) -> Callable[[list[str]], None]:
    def write(lines: list[str]) -> None:
        for part in _parts(number, lines):
            view = memoryview(part)
            while view:
                try:
                    view = view[os.write(number, view) :]
                except BlockingIOError:  # a non-blocking pipe or terminal is full
                    select.select([], [number], [], 1.0)

    return write


def _parts(number: int, lines: Iterable[str]) -> Iterable[bytes]:
    """Return what to write at once: whole lines, so that those of several processes do not mix."""
    encoded = [f"{line}\n".encode("utf-8", "backslashreplace") for line in lines]
    if not stat.S_ISFIFO(os.fstat(number).st_mode):
        return [b"".join(encoded)]
    parts = [bytearray()]
    for each in encoded:
        if len(parts[-1]) + len(each) > AT_ONCE and parts[-1]:
            parts.append(bytearray())
        parts[-1] += each
    return [bytes(part) for part in parts]


def _to_files(lines: list[tuple[str, str]]) -> None:
    """Write lines into files of a `logs_dir`, given as pairs of path and line."""
    for path, line in lines:
        file = _files.get(path)
        if file is None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = _Rotating(path, maxBytes=ROTATED_BYTES, backupCount=BACKUPS, delay=True)
            _files[path] = file
        file.emit(logging.LogRecord("", 0, "", 0, line, None, None))


class _Rotating(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise  # it is called in an `except` block


_sinks: list[Sink] = []
_files: dict[str, _Rotating] = {}  # of the thread of `FILES`
STDOUT = Sink("ingress-log-stdout", _to_descriptor(1))
STDERR = Sink("ingress-log-stderr", _to_descriptor(2))
FILES = Sink("ingress-log-files", _to_files)


def flush_all() -> None:
    """Wait, a second at most for each sink, until the queued lines are written."""
    for each in _sinks:
        each.flush()


def _forget_all() -> None:
    for each in _sinks:
        each.forget()


atexit.register(flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
