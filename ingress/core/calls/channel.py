"""A bounded stream from producers to one consumer, each on a loop or in a thread.

    producer   put / put_blocking ... finish(error)                waits while the channel is full
    consumer   get / get_many / get_blocking, `async for`; close   waits while it is empty

A full channel is the backpressure: at most 16 items or 64 KiB wait, unless its maker sets other
limits. Items that were put before an error arrive before the error.

A single item goes through at once. If items come faster than a thread or a loop wakes up, they go
in batches: `get_many` takes all items, and waiting producers are woken when the channel is half
empty, not for every free place. Two wake-ups a batch instead of two an item make a stream cheap:
each wake-up costs tens of microseconds where two threads share one interpreter.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from anyio import CancelScope

from ingress.core.calls.loops import Wakeup
from ingress.exceptions import StreamClosedError

MAX_ITEMS = 16
MAX_BYTES = 64 * 1024
# Of an HTTP response: four chunks of the size that servers and files use. With 64 KiB, one chunk
# was on its way at a time, and each cost two wake-ups: 100 MB took 150 ms of processor time, and
# 58 ms with this.
RESPONSE_BYTES = 256 * 1024
YIELD_EVERY = 16  # calls: a side that never has to wait must not keep its loop

T = TypeVar("T")
WakeBy = Callable[[Callable[[], object]], object]


class EndOfStream(Exception):
    """The end of a stream: its producer has finished, and all items were taken."""


class Channel(Generic[T]):
    """A bounded stream between loops or threads. Thread-safe; the consumer has one thread.

    It has one producer as a rule. A WebSocket has several if each of an application's handlers
    broadcasts. Several tasks of one request may wait in `get`: each item goes to one of them.

    Every state change is a few lines under one lock. A side that has to wait stores its wake-up in
    the same critical section in which it finds that it has to, so no wake-up is lost.
    """

    __slots__ = (
        "_bytes",
        "_closed",
        "_error",
        "_finished",
        "_gets",
        "_items",
        "_lock",
        "_max_bytes",
        "_max_items",
        "_puts",
        "_taken",
        "_taken_bytes",
        "_wake_closer",
        "_wake_consumers",
        "_wake_producers",
    )

    def __init__(self, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        # The items that `get_many` returned last take room until the consumer asks for more.
        self._taken = 0
        self._taken_bytes = 0
        self._puts = self._gets = 0
        self._finished = False
        self._error: BaseException | None = None
        self._closed = False
        self._wake_producers: tuple[Callable[[], object], ...] = ()
        self._wake_consumers: tuple[Callable[[], object], ...] = ()
        self._wake_closer: Callable[[], object] | None = None

    def limit(self, max_items: int = MAX_ITEMS, max_bytes: int = MAX_BYTES) -> None:
        """Set the limits; they hold from the next item on."""
        with self._lock:
            self._max_items, self._max_bytes = max_items, max_bytes

    # The producer's side.

    async def put(self, item: T, size: int = 0) -> None:
        """Add an item of `size` bytes. Raises `StreamClosedError` if the consumer is gone."""
        self._puts += 1
        if self._puts % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        wakeup: Wakeup | None = None
        while not self._try_put(item, size, None if wakeup is None else wakeup.wake):
            if wakeup is None:
                wakeup = Wakeup(asyncio.get_running_loop())
            else:
                try:
                    await wakeup.wait()
                except asyncio.CancelledError:
                    self._forget(wakeup.wake)
                    raise
                wakeup = None

    def put_nowait(self, item: T, size: int = 0, wake_by: WakeBy | None = None) -> bool:
        """Add an item, if there is room. Returns False if there is none.

        `wake_by(wake)` is given the wake-up of a consumer that waits, to call it a little later.
        """
        return self._try_put(item, size, None, wake_by)

    def put_blocking(self, item: T, size: int = 0) -> bool:
        """Add an item from a thread without a loop, as `put`. Returns whether it had to wait."""
        if self._try_put(item, size, None):
            return False
        event = threading.Event()
        while not self._try_put(item, size, event.set):
            event.wait()
            event.clear()
        return True

    def finish(self, error: BaseException | None = None) -> bool:
        """End the stream, with `error` if it failed. The first call counts.

        Returns False if the consumer has closed the channel and cannot get the error.
        """
        with self._lock:
            is_closed = self._closed
            if self._finished:
                return not is_closed
            self._finished = True
            self._error = error
            wake_consumers, self._wake_consumers = self._wake_consumers, ()
            wake_closer, self._wake_closer = self._wake_closer, None
        for wake in wake_consumers:
            wake()
        if wake_closer is not None:
            wake_closer()
        return not is_closed

    def _try_put(
        self,
        item: T,
        size: int,
        wake: Callable[[], object] | None,
        wake_by: WakeBy | None = None,
    ) -> bool:
        with self._lock:
            if self._closed:
                raise StreamClosedError("the consumer has closed this stream")
            if (
                len(self._items) + self._taken >= self._max_items
                or self._bytes + self._taken_bytes >= self._max_bytes
            ):
                if wake is not None:
                    self._wake_producers += (wake,)
                return False
            self._items.append((item, size))
            self._bytes += size
            wake_consumers, self._wake_consumers = self._wake_consumers, ()
        for wake_consumer in wake_consumers:
            if wake_by is None:
                wake_consumer()
            else:
                wake_by(wake_consumer)
        return True

    def _forget(self, wake: Callable[[], object]) -> None:
        """Drop the wake-up of a side that gives up: the other side may do nothing more."""
        with self._lock:
            self._wake_producers = tuple(each for each in self._wake_producers if each != wake)
            self._wake_consumers = tuple(each for each in self._wake_consumers if each != wake)

    # The consumer's side.

    @property
    def taken_bytes(self) -> int:
        """The bytes of what `get_many` returned last. For the consumer."""
        return self._taken_bytes

    async def get(self) -> T:
        """Take the next item. Raises `EndOfStream` after the last, or the producer's error."""
        return (await self.get_many(1))[0]

    async def get_many(self, at_most: int = 0) -> list[T]:
        """Take all items, or `at_most` so many, at least one, as `get`.

        The items count as waiting until the next call, so that one bound holds for both sides.
        """
        self._gets += 1
        if self._gets % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        while True:
            # Made only if it will be needed: a wake-up costs more than the rest of this.
            wakeup = None if self._items else Wakeup(asyncio.get_running_loop())
            items = self._try_get(at_most, None if wakeup is None else wakeup.wake)
            if items:
                return items
            if wakeup is not None:
                try:
                    await wakeup.wait()
                except asyncio.CancelledError:
                    self._forget(wakeup.wake)
                    raise

    def get_nowait(self, wake: Callable[[], object]) -> list[T]:
        """Take all items, if any; they count as waiting no more. `wake()` is called for the next.

        It is called once, in the producer's thread, or in that of `finish`; here, if items were
        taken after the end. Without items, the end is raised as by `get`.
        """
        with self._lock:
            items = [item for item, _ in self._items]
            self._items.clear()
            self._bytes = self._taken = self._taken_bytes = 0
            is_over = self._finished
            if not is_over and wake not in self._wake_consumers:
                self._wake_consumers += (wake,)
            wake_producers, self._wake_producers = self._wake_producers, ()
        for wake_producer in wake_producers:
            wake_producer()
        if is_over:
            if not items:
                return self._try_get(0, None)
            wake()
        return items

    def get_blocking(self, timeout_s: float | None = None) -> T:
        """Take the next item from a thread without a loop, as `get`, or raise `TimeoutError`."""
        event = threading.Event()
        while True:
            items = self._try_get(1, event.set)
            if items:
                return items[0]
            if not event.wait(timeout_s):
                self._forget(event.set)
                raise TimeoutError(f"no item arrived within {timeout_s} s")
            event.clear()

    def close(self) -> None:
        """Stop taking items: every later `put` raises, and those that wait. Idempotent."""
        with self._lock:
            self._closed = True
            self._items.clear()
            self._bytes = 0
            wake_producers, self._wake_producers = self._wake_producers, ()
        for wake in wake_producers:
            wake()

    async def finished(self) -> None:
        """Wait until the producer has finished, even while cancellations arrive.

        Called after `close`: a generator's `finally` blocks have run when this returns.
        """
        # Shielded, because a cancelled AnyIO scope cancels again on every turn of the loop.
        with CancelScope(shield=True):
            cancelled: asyncio.CancelledError | None = None
            while True:
                wakeup = Wakeup(asyncio.get_running_loop())
                with self._lock:
                    if self._finished:
                        break
                    self._wake_closer = wakeup.wake
                try:
                    await wakeup.wait()
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled

    def _try_get(self, count: int, wake: Callable[[], object] | None) -> list[T]:
        """Take `count` items, or all for 0. If there are none, `wake` is called for the next."""
        wake_producers: tuple[Callable[[], object], ...] = ()
        with self._lock:
            self._taken = self._taken_bytes = 0
            taken: list[T] | None = None
            if not self._items:
                if self._finished:
                    self._closed = True  # for producers other than the one that finished
                else:
                    if wake is not None and wake not in self._wake_consumers:
                        self._wake_consumers += (wake,)
                    taken = []
            elif count:
                item, size = self._items.popleft()
                self._bytes -= size
                taken = [item]
            else:
                taken = [item for item, _ in self._items]
                self._taken, self._taken_bytes = len(taken), self._bytes
                self._items.clear()
                self._bytes = 0
            if self._wake_producers and self._has_room():
                wake_producers, self._wake_producers = self._wake_producers, ()
        if wake_producers:
            for wake_producer in wake_producers:
                wake_producer()
        if taken is None:
            raise EndOfStream if self._error is None else self._error
        return taken

    def _has_room(self) -> bool:
        """Return whether half of the channel is empty, so that it pays to wake producers."""
        return (
            len(self._items) + self._taken <= self._max_items // 2
            and self._bytes + self._taken_bytes <= self._max_bytes // 2
        )

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                items = await self.get_many()
            except EndOfStream:
                return
            for item in items:
                yield item
