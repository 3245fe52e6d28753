"""`Latch`: code under test and its test wait for each other, in threads and on event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator

from ingress.core.calls.loops import Wakeup

TIMEOUT_S = 10.0


class Latch:
    """A latch that opens for good after `count` calls of `count_down`. Thread-safe.

        began, go = Latch(), Latch()

        async def handler(self):          def test():
            began.count_down()                answer = handle.remote()
            await go                          began.wait()      # it is inside now
                                              go.count_down()

    `wait()` is for a `def`, `await latch` for an `async def`. Both raise `TimeoutError` after
    `timeout_s`: a test that would hang fails, and names its latch. In an async test of code on the
    test's own loop use `await`, because `wait()` would block that loop.
    """

    __slots__ = ("__weakref__", "_count", "_left", "_lock", "_opened", "_timeout_s", "_waiting")

    def __init__(self, count: int = 1, *, timeout_s: float = TIMEOUT_S) -> None:
        if count < 1:
            raise ValueError(f"a latch is counted down at least once, got count={count!r}")
        self._count = self._left = count
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._waiting: list[Wakeup] = []

    @property
    def is_open(self) -> bool:
        """True once the latch is open."""
        return self._opened.is_set()

    def count_down(self) -> None:
        """Count down once. The last count opens the latch, and later ones have no effect."""
        with self._lock:
            self._left -= 1
            if self._left > 0 or self._opened.is_set():
                return
            self._opened.set()
            waiting, self._waiting = self._waiting, []
        for wakeup in waiting:
            wakeup.wake()

    def wait(self) -> None:
        """Block the thread until the latch is open."""
        if not self._opened.wait(self._timeout_s):
            raise self._too_late()

    def __await__(self) -> Generator[None, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        wakeup = Wakeup(asyncio.get_running_loop())
        # Race with the last count: both hold the lock. The count opens the latch and then takes
        # the list; this checks the latch and then adds to the list.
        with self._lock:
            if self._opened.is_set():
                return
            self._waiting.append(wakeup)
        try:
            async with asyncio.timeout(self._timeout_s):
                await wakeup.wait()
        except TimeoutError:
            raise self._too_late() from None
        finally:
            with self._lock:
                if wakeup in self._waiting:
                    self._waiting.remove(wakeup)

    def _too_late(self) -> TimeoutError:
        return TimeoutError(
            f"{self!r} did not open within {self._timeout_s} s; the code that counts it down "
            "was not reached, or waits for this latch"
        )

    def __repr__(self) -> str:
        counted = self._count - max(0, self._left)
        return f"<Latch: {counted} of {self._count} counted{', open' if self.is_open else ''}>"
