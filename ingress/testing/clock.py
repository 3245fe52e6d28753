"""`VirtualClock`: the time of the replicas' event loops stops until the test moves it.

    moved       `asyncio.sleep`, `asyncio.timeout`, `loop.call_later` and `loop.time()` of user code
                on its replica's loop, and so the time that `@serve.batch` waits for a batch
    not moved   `time.sleep`, `time.monotonic`, threads, sockets, and the engine's own times:
                deadlines of requests, health checks, pauses of retries, shutdown

    advance     for each timer that comes due, in order, on any loop:
                wait until all loops are idle -> set the time -> wake its loop

A loop itself reports that it is idle, when it waits for a timer or an external event. A callback
posted by another thread makes it busy at once. So the clock need not guess after a pause. Time
never moves by itself: a thread may be at work, and only the test knows about it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from dataclasses import replace
from time import monotonic
from typing import TypeVarTuple, Unpack

from ingress.core.base.settings import USER_CODE_IN_SEPARATE_THREAD, Settings
from ingress.core.calls.loops import ThreadAware, new_event_loop, running_loop
from ingress.engines import local_engine

Ts = TypeVarTuple("Ts")

TIMEOUT_S = 10.0


class VirtualClock:
    """A clock for the applications that are started while it is entered. Thread-safe.

        with VirtualClock() as clock, TestClient(app) as client, ThreadPoolExecutor() as pool:
            answer = pool.submit(client.get, "/in-a-minute")
            clock.wait_for_timers()
            clock.advance(60)
            assert answer.result().status_code == 200

    The clock moves the replicas' own event loops, which are asyncio's instead of uvloop's. With
    RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0 replicas have no own loops: then entering the clock
    raises `RuntimeError`, and also if an application runs already. After the `with`, the remaining
    loops go on in real time. `timeout_s`, in real time, limits the test's wait for a loop.
    """

    __slots__ = ("_changed", "_in_use", "_loops", "_moved_s", "_now", "_timeout_s")

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._now = 0.0
        self._moved_s = 0.0
        # Guards all below, and the state that each loop reports.
        self._changed = threading.Condition(threading.RLock())
        self._loops: list[_Loop] = []
        self._in_use = ExitStack()

    @property
    def elapsed_s(self) -> float:
        """Seconds that the time was moved."""
        return self._moved_s

    def __enter__(self) -> VirtualClock:
        if not Settings.from_environment().run_user_code_in_separate_thread:
            raise RuntimeError(
                "VirtualClock moves the event loops that replicas have for themselves, and with "
                f"{USER_CODE_IN_SEPARATE_THREAD}=0 they have none; set it to 1 for this test"
            )
        engine = local_engine()
        if running := sorted(engine.applications):
            raise RuntimeError(
                f"VirtualClock moves what is started after it, and {running} runs already; enter "
                "it first: with VirtualClock() as clock, TestClient(app) as client:"
            )
        if engine.factories.new_loop is not new_event_loop:
            raise RuntimeError("one VirtualClock at a time; leave the other one first")
        self._now = monotonic()
        self._in_use.enter_context(
            engine.instrumented(lambda made: replace(made, new_loop=self._new_loop))
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._in_use.close()
        for loop in list(self._loops):
            loop.let_go()

    def advance(self, seconds: float) -> None:
        """Move the time on, and run all timers that come due, one after another.

        Returns when every loop is idle again; a `def` in a thread may still run. Raises
        `TimeoutError` if a loop does not become idle within `timeout_s`, because code blocks it.
        """
        if not (0 <= seconds < math.inf):
            raise ValueError(f"time moves forward, in seconds, got {seconds!r}")
        if running_loop() in self._loops:
            raise RuntimeError("advance() waits until this event loop is idle; call it in the test")
        if not self._loops:
            raise RuntimeError(
                "there is no event loop to move: start an application while the clock is entered, "
                f"with {USER_CODE_IN_SEPARATE_THREAD}=1"
            )
        end = self._now + seconds
        with self._changed:
            while True:
                self._wait_until(self._are_idle, "become idle")
                due = min((loop.due for loop in self._loops), default=math.inf)
                if due > end:
                    break
                # At least one float step: a timer's time may lie between two sums.
                self._set(max(due, math.nextafter(self._now, math.inf)))
            self._set(end)
            self._wait_until(self._are_idle, "become idle")
        self._moved_s += seconds

    def wait_for_timers(self, count: int = 1) -> None:
        """Return once `count` timers are set and every loop is idle.

        A sleeping call has one timer, with an `asyncio.timeout` two, and a forming batch has one.
        Raises `TimeoutError` after `timeout_s`.
        """
        with self._changed:
            self._wait_until(
                lambda: self._are_idle() and sum(map(_Loop.timers, self._loops)) >= count,
                f"have {count} timers",
            )

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        with self._changed:
            loop = _Loop(self)
            self._loops.append(loop)
            return loop

    def _set(self, now: float) -> None:
        self._now = now
        for loop in self._loops:
            if loop.due <= now:
                loop.wake()

    def _are_idle(self) -> bool:
        return all(loop.is_idle for loop in self._loops)

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(condition, self._timeout_s):
            loops = ", ".join(map(str, self._loops)) or "none"
            raise TimeoutError(
                f"the event loops did not {what} within {self._timeout_s} s: {loops}"
            )


class _Selector(selectors.DefaultSelector):
    """A selector that waits for external events, not for timers: the test moves the time."""

    loop: _Loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self.loop
        changed = loop.clock._changed
        if loop.is_real or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        with changed:
            # Race with another thread's `call_soon_threadsafe`: it writes to the loop's socket
            # under the lock. Either this `select` sees the write, or the loop is idle first and
            # then busy again.
            if events := super().select(0):
                return events
            loop.due = math.inf if timeout is None else loop.time() + timeout
            loop.is_idle = True
            changed.notify_all()
        try:
            return super().select(None)
        finally:
            with changed:
                loop.is_idle = False


class _Loop(ThreadAware, asyncio.SelectorEventLoop):
    """An event loop on the clock's time, until `let_go`."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.is_idle = False
        self.is_real = False
        self.due = math.inf  # due time of its next timer, valid while it is idle
        self._let_go_at: tuple[float, float] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def __repr__(self) -> str:
        state = "idle" if self.is_idle else "at work"
        return f"<a replica's loop, {state}, {self.timers()} timers>"

    def time(self) -> float:
        if self._let_go_at is None:
            return self.clock._now
        virtual, real = self._let_go_at
        return virtual + monotonic() - real

    def timers(self) -> int:
        """Return the number of timers that are set."""
        now = self.time()
        self._timers = [each for each in self._timers if not each.cancelled() and each.when() > now]
        return len(self._timers)

    def let_go(self) -> None:
        """Return the loop to real time."""
        with self.clock._changed:
            if not self.is_real:
                self._let_go_at = self.time(), monotonic()
                self.is_real = True
                self.clock._loops.remove(self)
                self.clock._changed.notify_all()
                self.wake()

    def wake(self) -> None:
        """Make the loop check the time. No effect once it is closed."""
        # Not by the loop's mailbox: its post is silent if another thread is about to wake the loop,
        # and until then the loop still counts as idle.
        if not self.is_closed():
            self.call_soon_threadsafe(lambda: None)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        if not self.is_real:
            with self.clock._changed:
                self._timers.append(timer)
        return timer

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        with self.clock._changed:
            self.is_idle = False
            return super().call_soon_threadsafe(callback, *args, context=context)

    def stop(self) -> None:
        # Its replica ends, and waits with timeouts for its remaining tasks.
        self.let_go()
        super().stop()

    def close(self) -> None:
        self.let_go()
        super().close()
