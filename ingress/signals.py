"""A signal that asks for something while the process serves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
