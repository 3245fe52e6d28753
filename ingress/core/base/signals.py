"""Signals that stop a process, and handlers for signals while it serves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Self

from ingress.core.base.settings import handles_signals


def name_of_signal(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


LOOK_S = 0.5
"""Longest time after which a signal that did not wake the main thread is seen."""


_UNCAUGHT = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
_HANG_UP = frozenset(each for each in signal.Signals if each.name == "SIGHUP")  # not on Windows


@dataclass(eq=False, slots=True)
class StopSignals:
    """A handler of Ctrl-C, SIGTERM and SIGHUP, from before the start to the end of a server.

    the first signal, during the start    raises `KeyboardInterrupt` in the main thread
    the first signal, later               ends `wait`
    the second signal                     ends the process at once, with 128 plus its number

    SIGHUP calls `hang_up` instead, if that is given; at any line, so it must take no lock.

    Before that it makes the calls that `call` was given for it; other signals make only these.
    Meanwhile `signal.signal` and `signal.getsignal` mean those of its loop in a replica's thread.

    No effect outside of the main thread, which alone gets signals, or if
    `INGRESS_HANDLE_SIGNALS=0`: the handlers of the process then stay.
    """

    _hang_up: Callable[[], None] | None = None
    # Not an `Event`: the line that the signal interrupts may hold its lock.
    _signals: SimpleQueue[int] = field(default_factory=SimpleQueue)
    first: int | None = None  # of the signals that stop it
    _is_starting: bool = True
    _stops: frozenset[int] = frozenset()
    _calls: dict[int, dict[object, Callable[[], object]]] = field(default_factory=dict)
    _previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = field(
        default_factory=dict
    )
    handlers: dict[object, dict[int, Any]] = field(default_factory=dict)  # of `_signal`, by loop
    _functions: Any = None  # those that a module had before

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread() and handles_signals():
            hang_up = frozenset() if self._hang_up is None else _HANG_UP
            self._stops = frozenset(stop_signals()) - hang_up
            self._previous = self.register() | {
                number: signal.signal(number, self._on_signal) for number in hang_up
            }
            IN_USE.append(self)
            self._functions = pass_on_handlers()
        return self

    def register(self) -> dict[int, Any]:
        """Handle the stop signals, and return their handlers before. In the main thread."""
        return {number: signal.signal(number, self._on_signal) for number in self._stops}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self in IN_USE:
            IN_USE.remove(self)
            signal.signal, signal.getsignal = self._functions

    def call(self, number: int, owner: object, function: Callable[[], object] | None) -> bool:
        """Have a signal call `function` in the main thread, once the start is over. Thread-safe.

        It is called at any line, so it must take no lock. `None` ends that. Returns whether the
        owner had one. Raises `RuntimeError` and `ValueError` as the method of loops does.
        """
        signal.getsignal(number)  # raises, if there is no such signal
        if number in _UNCAUGHT:
            raise RuntimeError(f"sig {number} cannot be caught")
        calls = self._calls.setdefault(number, {})
        self.handlers.get(owner, {}).pop(number, None)
        had = calls.pop(owner, None) is not None
        if function is not None:
            calls[owner] = function
        self._signals.put(number)  # the main thread takes the signal
        return had

    def forget(self, owner: object) -> None:
        """Drop the calls of an owner that has ended, which hold what they refer to. Thread-safe."""
        self.handlers.pop(owner, None)
        for calls in list(self._calls.values()):
            calls.pop(owner, None)

    def end_start(self) -> None:
        """Raise nothing on later signals. Raises `KeyboardInterrupt` if a signal came before."""
        self._is_starting = False
        # One raised in a `__del__`, for example, was swallowed there.
        if self.first is not None:
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Wait for the first signal that stops the server."""
        # Python calls handlers between two lines of this thread. A signal that the system hands to
        # another thread, or to this one just before it blocks, does not wake it.
        while self.first is None:
            with suppress(Empty):
                number = self._signals.get(timeout=LOOK_S)
                if number not in self._previous and self._calls.get(number):
                    self._previous[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        stops = number in self._stops
        is_first = self.first is None
        if stops and is_first:
            self.first = number
        if threading.current_thread() is not threading.main_thread():
            # A handler of the user's calls the one that was there before. Race with the signal
            # that it was called for, which asked for the stop above, and does not ask twice.
            self._signals.put(number)
            return
        calls = self._calls.get(number, {})
        for owner in list(calls):
            # Race with the owner's thread, which may take it back.
            if (call := calls.get(owner)) is not None:
                call()
        if not stops:
            if self._hang_up is not None and number in _HANG_UP:
                self._hang_up()
            return
        if not is_first:  # the user asked twice
            os._exit(128 + number)
        self._signals.put(number)
        if self._is_starting:
            raise KeyboardInterrupt


IN_USE: list[StopSignals] = []
"""The handlers of the signals of this process, the latest last."""


PYTHONS: Any = signal.signal, signal.getsignal
"""Python's own functions, which register handlers in the main thread only."""


def _loop_of_replica() -> Any:
    """Return the loop that runs here, if it can pass signals on; `None` in the main thread."""
    if threading.current_thread() is threading.main_thread():
        return None
    loop = asyncio._get_running_loop() if IN_USE else None
    return loop if hasattr(loop, "thread_name") else None  # `core.calls.loops.ThreadAware`


def _getsignal(number: int) -> Any:
    loop = _loop_of_replica()
    own = None if loop is None else IN_USE[-1].handlers.get(loop, {}).get(number)
    return PYTHONS[1](number) if own is None else own


def _signal(number: int, handler: Any) -> Any:
    """Register a handler as `signal.signal`, and from a replica's thread on its loop."""
    loop = _loop_of_replica()
    if loop is None:
        return PYTHONS[0](number, handler)
    before = _getsignal(number)
    if callable(handler) and handler != PYTHONS[1](number):
        loop.add_signal_handler(number, handler, number, None)
        IN_USE[-1].handlers.setdefault(loop, {})[number] = handler
    elif not loop.remove_signal_handler(number):
        return PYTHONS[0](number, handler)  # which raises
    return before


OURS: Any = _signal, _getsignal


def pass_on_handlers() -> Any:
    """Have `signal.signal` work in replicas' threads, and return Python's, or ours.

    A command calls it before it imports a module that may say `from signal import signal`.
    """
    before = signal.signal, signal.getsignal
    signal.signal, signal.getsignal = OURS
    return before


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a server to stop.

    Ctrl-C even if it is ignored, because a shell ignores it for its background jobs. SIGHUP only if
    it is not ignored, because `nohup` ignores it to keep a process alive.
    """
    hang_up = [each for each in _HANG_UP if signal.getsignal(each) is not signal.SIG_IGN]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


@contextmanager
def handling(name: str, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Make a signal call `handler`, unless it has a handler, or this is not the main thread.

    The interrupted line may hold any lock, so `handler` must take no lock.
    """
    number = getattr(signal, name, None)  # not on Windows
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and handles_signals()
    if number is None or not is_ours or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) == handler:
            signal.signal(number, signal.SIG_DFL)
