"""The window of a sender: how much may be on its way to a receiver that has not taken it."""

from __future__ import annotations

import asyncio

from ingress.calls.channel import MAX_BYTES, MAX_ITEMS
from ingress.exceptions import StreamClosedError


class Window:
    """The room that a receiver in the other process has. Owned by the sender's loop.

    The bounds are those of a `Channel`: at most `messages` messages or `size` bytes are on the way.
    """

    __slots__ = ("_bytes", "_messages", "_waiter", "is_closed")

    def __init__(self, messages: int = MAX_ITEMS, size: int = MAX_BYTES) -> None:
        self._messages = messages
        self._bytes = size
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    async def take(self, size: int) -> None:
        """Take room for a message, or wait for it. Raises `StreamClosedError` if it is closed."""
        while not self.is_closed and (self._messages <= 0 or self._bytes <= 0):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.is_closed:
            raise StreamClosedError("the consumer has closed this stream")
        self._messages -= 1
        self._bytes -= size

    def give(self, messages: int, size: int) -> None:
        """Give room back: the receiver has taken this much."""
        self._messages += messages
        self._bytes += size
        self._wake()

    def close(self) -> None:
        """Make every later `take` raise: the receiver takes no more."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
