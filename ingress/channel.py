"""One bounded stream from one producer to one consumer, each on a loop or in a thread.

    producer   put / put_blocking ... finish(error)     waits while the channel is full
    consumer   get / get_blocking, `async for`; close   waits while it is empty

A full channel is what slows a producer down to its consumer: at most 16 items or 64 KiB wait.
What was put before an error arrives before the error.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio import CancelScope

from ingress.exceptions import StreamClosedError
from ingress.loops import Wakeup

MAX_ITEMS = 16
MAX_BYTES = 64 * 1024


class EndOfStream(Exception):
    """The producer finished and everything it put was taken."""


class Channel:
    """Thread-safe; one producer and one consumer.

    Every state change is a few lines under one lock; whoever has to wait leaves its wake-up there
    in the same section in which it found that it has to, so no wake-up can fall in between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._finished = False
        self._error: BaseException | None = None
        self._closed = False
        self._wake_producer: Callable[[], Any] | None = None
        self._wake_consumer: Callable[[], Any] | None = None
        self._wake_closer: Callable[[], Any] | None = None

    # The producer's side.

    async def put(self, item: Any, size: int = 0) -> None:
        """Add an item of `size` bytes. Raises `StreamClosedError` if the consumer is gone."""
        wakeup: Wakeup | None = None
        while not self._try_put(item, size, wakeup.wake if wakeup is not None else None):
            if wakeup is not None:
                await wakeup.wait()
            wakeup = Wakeup(asyncio.get_running_loop())

    def put_blocking(self, item: Any, size: int = 0) -> None:
        """Add an item from a thread without a loop, as `put`."""
        if self._try_put(item, size, None):
            return
        event = threading.Event()
        while not self._try_put(item, size, event.set):
            event.wait()
            event.clear()

    def finish(self, error: BaseException | None = None) -> None:
        """End the stream, with `error` if it failed. The first call counts."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            self._error = error
            wake, self._wake_consumer = self._wake_consumer, None
            wake_closer, self._wake_closer = self._wake_closer, None
        if wake is not None:
            wake()
        if wake_closer is not None:
            wake_closer()

    def _try_put(self, item: Any, size: int, wake: Callable[[], Any] | None) -> bool:
        with self._lock:
            if self._closed:
                raise StreamClosedError("the consumer of this stream is gone")
            if len(self._items) >= MAX_ITEMS or self._bytes >= MAX_BYTES:
                self._wake_producer = wake
                return False
            self._items.append((item, size))
            self._bytes += size
            wake_consumer, self._wake_consumer = self._wake_consumer, None
        if wake_consumer is not None:
            wake_consumer()
        return True

    # The consumer's side.

    async def get(self) -> Any:
        """Take the next item. Raises `EndOfStream` after the last, or the producer's error."""
        wakeup: Wakeup | None = None
        while True:
            found, item = self._try_get(wakeup.wake if wakeup is not None else None)
            if found:
                return item
            if wakeup is not None:
                await wakeup.wait()
            wakeup = Wakeup(asyncio.get_running_loop())

    def get_blocking(self, timeout_s: float | None = None) -> Any:
        """Take the next item from a thread without a loop, as `get`, or raise `TimeoutError`."""
        event = threading.Event()
        while True:
            found, item = self._try_get(event.set)
            if found:
                return item
            if not event.wait(timeout_s):
                raise TimeoutError(f"no item arrived within {timeout_s} s")
            event.clear()

    def close(self) -> None:
        """Take nothing more: the producer's next `put` raises. Idempotent."""
        with self._lock:
            self._closed = True
            self._items.clear()
            self._bytes = 0
            wake, self._wake_producer = self._wake_producer, None
        if wake is not None:
            wake()

    async def finished(self) -> None:
        """Wait until the producer has finished, even while cancellations arrive.

        For after `close`: a generator's `finally` blocks have run when this returns.
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

    def _try_get(self, wake: Callable[[], Any] | None) -> tuple[bool, Any]:
        with self._lock:
            if not self._items:
                if self._finished:
                    if self._error is not None:
                        raise self._error
                    raise EndOfStream
                self._wake_consumer = wake
                return False, None
            item, size = self._items.popleft()
            self._bytes -= size
            wake_producer, self._wake_producer = self._wake_producer, None
        if wake_producer is not None:
            wake_producer()
        return True, item

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            try:
                item = await self.get()
            except EndOfStream:
                return
            yield item
