"""`VirtualClock`: the time of the replicas' event loops stands still until the test moves it.

    moved       `asyncio.sleep`, `asyncio.timeout`, `loop.call_later` and `loop.time()` of user code
                on its replica's loop, and with them how long `@serve.batch` waits for a batch
    as it is    `time.sleep`, `time.monotonic`, what runs in threads, sockets, and what is the
                engine's own: deadlines of requests, health checks, pauses of retries, shutdown

    advance     for each timer that comes due, in order, on whichever loop it is:
                wait until all loops are idle -> set the time -> wake its loop

A loop is idle once it waits for a timer or for something from outside, which it says itself; what
another thread posts to it makes it busy in the same moment. So nothing is guessed by waiting a
while, and nothing moves by itself: a thread may be at work, and only the test knows of it.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import threading
from collections.abc import Callable
from contextvars import Context
from functools import partial
from time import monotonic
from typing import Any, TypeVarTuple, Unpack

from ingress.base.settings import USER_CODE_IN_SEPARATE_THREAD, Settings
from ingress.calls.loops import EventLoopThread, running_loop
from ingress.engines import local_engine
from ingress.replicas import replica

Ts = TypeVarTuple("Ts")

TIMEOUT_S = 10.0

_REPLICA = vars(replica)
"""Where a replica that is made looks up what its loop lives in."""


class VirtualClock:
    """A clock for the applications that are started while it is entered. Thread-safe.

        with VirtualClock() as clock, TestClient(app) as client, ThreadPoolExecutor() as pool:
            answer = pool.submit(client.get, "/in-a-minute")
            clock.wait_for_timers()
            clock.advance(60)
            assert answer.result().status_code == 200

    It moves the event loops that replicas have for themselves, and gives them loops of asyncio's
    instead of uvloop's. With RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0 they have none: entering
    it raises `RuntimeError` then, and also if an application runs already. When it is left, the
    loops that are still there go on in real time. `timeout_s`, of real time, is how long the test
    waits for a loop.
    """

    __slots__ = ("_before", "_changed", "_loops", "_moved_s", "_now", "_timeout_s")

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._now = 0.0
        self._moved_s = 0.0
        # Guards all below, and what each loop says of itself.
        self._changed = threading.Condition(threading.RLock())
        self._loops: list[_Loop] = []
        self._before: Any = None

    @property
    def elapsed_s(self) -> float:
        """How far the time was moved."""
        return self._moved_s

    def __enter__(self) -> VirtualClock:
        if not Settings.from_environment().run_user_code_in_separate_thread:
            raise RuntimeError(
                "VirtualClock moves the event loops that replicas have for themselves, and with "
                f"{USER_CODE_IN_SEPARATE_THREAD}=0 they have none; set it to 1 for this test"
            )
        if running := sorted(local_engine().applications):
            raise RuntimeError(
                f"VirtualClock moves what is started after it, and {running} runs already; enter "
                "it first: with VirtualClock() as clock, TestClient(app) as client:"
            )
        if _REPLICA["EventLoopThread"] is not EventLoopThread:
            raise RuntimeError("one VirtualClock at a time; leave the other one first")
        self._now = monotonic()
        _REPLICA["EventLoopThread"] = partial(EventLoopThread, new_loop=self._new_loop)
        return self

    def __exit__(self, *_: object) -> None:
        _REPLICA["EventLoopThread"] = EventLoopThread
        for loop in list(self._loops):
            loop.let_go()

    def advance(self, seconds: float) -> None:
        """Move the time on, and let all that comes due run, timer by timer.

        Returns when every loop is idle again; a `def` in a thread may be at work still. Raises
        `TimeoutError` if a loop does not become idle within `timeout_s`: something blocks it.
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
                # At least a bit: a timer may be due at a time that no addition arrives at.
                self._set(max(due, math.nextafter(self._now, math.inf)))
            self._set(end)
            self._wait_until(self._are_idle, "become idle")
        self._moved_s += seconds

    def wait_for_timers(self, count: int = 1) -> None:
        """Return, to the test, once `count` timers are set and every loop is idle.

        A call that sleeps has one, one that sleeps under an `asyncio.timeout` two, a batch that
        forms one. Raises `TimeoutError` after `timeout_s`.
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
                loop.call_soon_threadsafe(_nothing)

    def _are_idle(self) -> bool:
        return all(loop.is_idle for loop in self._loops)

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(condition, self._timeout_s):
            loops = ", ".join(map(str, self._loops)) or "none"
            raise TimeoutError(
                f"the event loops did not {what} within {self._timeout_s} s: {loops}"
            )


class _Selector(selectors.DefaultSelector):
    """Waits for what comes from outside; for a timer nobody waits, because the test moves time."""

    loop: _Loop

    def select(self, timeout: float | None = None) -> Any:
        loop = self.loop
        changed = loop.clock._changed
        if loop.is_real or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        with changed:
            # Race with another thread's `call_soon_threadsafe`: it writes to the loop's socket
            # under the lock, so this sees it, or the loop is idle before it is busy again.
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


class _Loop(asyncio.SelectorEventLoop):
    """An event loop on the clock's time, until it is let go."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.is_idle = False
        self.is_real = False
        self.due = math.inf  # when its next timer is due; of one that is idle
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
        """How many timers are set."""
        now = self.time()
        self._timers = [each for each in self._timers if not each.cancelled() and each.when() > now]
        return len(self._timers)

    def let_go(self) -> None:
        """Go on in real time."""
        with self.clock._changed:
            if not self.is_real:
                self._let_go_at = self.time(), monotonic()
                self.is_real = True
                self.clock._loops.remove(self)
                self.clock._changed.notify_all()
                if not self.is_closed():
                    self.call_soon_threadsafe(_nothing)

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
        # Its replica ends, and waits with timeouts for what does not.
        self.let_go()
        super().stop()

    def close(self) -> None:
        self.let_go()
        super().close()


def _nothing() -> None:
    """Have a loop look at the time."""
