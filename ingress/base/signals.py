"""Signals: what asks a process to stop, and what asks it for something while it serves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any, Self


class Stopped(KeyboardInterrupt):
    """The signal that ended a start, raised in the main thread, in whatever line that was."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class StopSignals:
    """Ctrl-C, SIGTERM and the end of the terminal, from before anything listens to the last word.

    the first, while it starts    raises `Stopped` in the main thread
    the first, later              ends `wait`
    the second                    ends the process at once, with 128 and its number

    Without effect in a thread other than the main one, which gets no signals.
    """

    def __init__(self) -> None:
        # Not an `Event`: its lock may be held by the very line that the signal interrupts.
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._first: int | None = None
        self._is_starting = True
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def end_start(self) -> None:
        """Interrupt nothing from now on. Raises `Stopped` if a signal came before."""
        self._is_starting = False
        # Raised in a `__del__`, say, it has gone no further.
        if self._first is not None:
            raise Stopped(self._first)

    def wait(self) -> None:
        """Return once one of them has come."""
        self._signals.get()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._first is not None:  # whatever is left, the user has said it twice
            os._exit(128 + number)
        self._first = number
        self._signals.put(number)
        if self._is_starting:
            raise Stopped(number)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a server to stop.

    Ctrl-C also where it is ignored: a shell does that to the jobs it starts in the background. The
    end of the terminal only where it is not: that is how `nohup` asks to live on.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:
        numbers.append(hang_up)
    return numbers


@contextmanager
def handling(name: str, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have a signal call `handler`, unless it has one, or this is not the main thread.

    The line that the signal interrupts may hold any lock: `handler` must take none.
    """
    number = getattr(signal, name, None)  # not on Windows
    is_main = threading.current_thread() is threading.main_thread()
    if number is None or not is_main or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_DFL)
