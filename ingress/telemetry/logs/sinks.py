"""Bounded queues of log lines, and the threads that write them.

A full pipe, a stopped terminal or a full disk blocks the thread of its sink, and no other thread: a
line that finds the queue full is dropped and counted. The first drop is logged at once, and, once
lines can be written again, their number, at most once a minute.

Not `logging.handlers.QueueHandler` and `QueueListener`: their queue is bounded by its number of
records, not by memory, a full one prints a traceback for each record, drops are not counted, each
record is one write, and a fork leaves a listener without its thread and with the parent's lines.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context
from itertools import count
from logging.handlers import RotatingFileHandler
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from ingress.core.base.foreign import attempt

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
OPEN_FILES = 64  # of deployments with a `logs_dir`: each replica has a file of its own
_UNWRITTEN = (OSError, ValueError)  # ValueError: of a file that is closed
ROTATED_BYTES, BACKUPS = 512 * 2**20, 5  # Ray 2.60.0, ray_constants.py


Line = Any
"""The argument of a sink's `write`, or a function that returns it; or an `Event`, a place in the
queue, which is set once all lines before it have been written or dropped."""


class Sink:
    """A queue of lines, and the thread that writes them with `write`, which may block or fail.

    `write` returns an error for each line that could not be written, or raises one if none could.
    A line may be a function that returns it, which the sink's thread then calls. So is `rest`,
    which may not fail, once no line has come for `IDLE_S`. Thread-safe. `put` takes no lock, so
    that signal handlers and finalizers may log.
    """

    __slots__ = (
        "_drops", "_is_told", "_lines", "_lock", "_name", "_put", "_rest", "_taken", "_thread",
        "_told", "_told_at", "_write", "dropped",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        write: Callable[[list[Any]], Sequence[Exception] | None],
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._write = write
        self._rest = rest
        self._lines: SimpleQueue[tuple[Line, int]] = SimpleQueue()
        # Characters that were ever put, and of them those that are written. Race of the threads
        # that add to the first: a lost addition makes the queue a line longer, until the sink's
        # thread, which alone writes the second, has taken all lines and sets it to the first.
        self._put = self._taken = 0
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
        if self._put - self._taken > QUEUE_CHARACTERS:
            self._drop("they are read too slowly")
            return
        size = size or len(line)
        self._put += size
        self._lines.put((line, size))
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
        marker = threading.Event()
        self._lines.put((marker, 0))
        if self._thread is None:
            self._start()
        return marker.wait(timeout_s)

    def forget(self) -> None:
        """Drop the thread, which a fork has not copied, and the lines, which the parent writes."""
        self._lines, self._thread = SimpleQueue(), None
        self._put = self._taken = 0
        self._lock = threading.Lock()

    def _start(self) -> None:
        if not self._lock.acquire(blocking=False):
            return  # another thread is starting it, or this one, which a finalizer interrupts
        try:
            with suppress(RuntimeError):  # the interpreter is ending
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    Context().run(thread.start)
                    self._thread = thread
        finally:
            self._lock.release()

    def _run(self) -> None:
        wrote_at = 0.0
        while True:
            try:
                first = self._lines.get(timeout=IDLE_S)
            except Empty:
                break
            if monotonic() - wrote_at < GATHER_S and not isinstance(first[0], threading.Event):
                sleep(GATHER_S)
            self._take(first)
            wrote_at = monotonic()
        self._rest()
        # Race with a thread that puts a line now. It sees no thread, and starts one; or it put the
        # line before, and this thread sees it. The lock is free of others, who do not wait for it.
        with self._lock:
            self._thread = None
        if not self._lines.empty():
            self._start()

    def _take(self, first: tuple[Line, int]) -> None:
        """Write the lines that are queued, at most `MOST_LINES`."""
        taken = [first]
        try:
            while len(taken) < MOST_LINES:
                taken.append(self._lines.get_nowait())
        except Empty:
            written = self._put
        else:
            written = self._taken + sum(size for _, size in taken)
        lines = [_made(line) for line, _ in taken if not isinstance(line, threading.Event)]
        lost: Sequence[Exception] = ()
        try:
            lost = (self._write(lines) if lines else None) or ()
        except _UNWRITTEN as error:
            lost = [error] * len(lines)
        for each in lost:
            self._drop(f"they cannot be written: {each}")
        self._taken = written
        if len(lost) < len(lines):
            self._tell()
        for marker, _ in taken:
            if isinstance(marker, threading.Event):
                marker.set()

    def _tell(self) -> None:
        """Log the number of dropped lines, after lines that were written."""
        if self.dropped > self._told and monotonic() - self._told_at >= TOLD_EVERY_S:
            lost, self._told, self._told_at = self.dropped - self._told, self.dropped, monotonic()
            logger.warning("%s: %d log lines were dropped", self._name, lost)


def _made(line: Line) -> Any:
    if not callable(line):
        return line
    # Of any formatter: the thread must go on.
    return attempt(line, lambda error: f"a log line cannot be formatted: {type(error).__name__}")


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


def _to_files(lines: list[tuple[str, str]]) -> Sequence[Exception]:
    """Write lines into files of a `logs_dir`, given as pairs of path and line."""
    lost: list[Exception] = []
    for path, line in lines:
        try:
            _file(path).emit(logging.LogRecord("", 0, "", 0, line, None, None))
        except _UNWRITTEN as error:
            lost.append(error)
    return lost


def _file(path: str) -> _Rotating:
    """Return the file, and make it the last one of `_files`; the first ones are closed."""
    if (file := _files.pop(path, None)) is None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = _Rotating(
            path,
            maxBytes=ROTATED_BYTES,
            backupCount=BACKUPS,
            encoding="utf-8",
            errors="backslashreplace",
            delay=True,
        )
    _files[path] = file
    _close_files(OPEN_FILES)
    return file


def _close_files(kept: int = 0) -> None:
    """Close all files but those that were written last."""
    while len(_files) > kept:
        with suppress(*_UNWRITTEN):  # of a full disk
            _files.pop(next(iter(_files))).close()


class _Rotating(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise  # it is called in an `except` block


_sinks: list[Sink] = []
_files: dict[str, _Rotating] = {}  # of the thread of `FILES`; the one written last is the last
STDOUT = Sink("ingress-log-stdout", _to_descriptor(1))
STDERR = Sink("ingress-log-stderr", _to_descriptor(2))
FILES = Sink("ingress-log-files", _to_files, _close_files)


def flush_all() -> None:
    """Wait, a second at most for each sink, until the queued lines are written."""
    for each in _sinks:
        each.flush()


def at_exit(last: Callable[[], None]) -> None:
    """Call a function at the end of the process, the latest first.

    Children that `multiprocessing` has forked call it too: they end with `os._exit`.
    """
    atexit.register(last)
    _lasts.append(last)


def _forget_all() -> None:
    for each in _sinks:
        each.forget()
    if "multiprocessing.util" in sys.modules:  # which clears its finalizers next
        from multiprocessing import util

        util.register_after_fork(_lasts, _finalize)


def _finalize(lasts: _Lasts) -> None:
    from multiprocessing.util import Finalize

    for priority, last in enumerate(lasts):
        Finalize(None, last, exitpriority=priority)


class _Lasts(list[Callable[[], None]]):
    """A list that `multiprocessing` can refer to weakly."""


_lasts = _Lasts()
at_exit(flush_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
