"""The window of a sender: how much may be on its way to a receiver that has not taken it.

The size of a message is that of its frame's content, so that both processes count the same.
"""

from __future__ import annotations

import asyncio

from ingress.core.calls.channel import MAX_BYTES, MAX_ITEMS
from ingress.exceptions import StreamClosedError
from ingress.serving.processes.frames import Frames
from ingress.serving.processes.messages import CREDIT, Kind

_GIVEN_MESSAGES = MAX_ITEMS // 2


class Waiters:
    """The tasks of one loop that wait for a change of what inherits this. Owned by that loop.

    Most have none: `wake` is called only if there is a future.
    """

    __slots__ = ("futures",)
    futures: tuple[asyncio.Future[None], ...]

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.futures += (future,)
        try:
            await future
        except asyncio.CancelledError:
            self.futures = tuple(each for each in self.futures if each is not future)
            raise

    def wake(self) -> None:
        """Wake all tasks that wait."""
        futures, self.futures = self.futures, ()
        for future in futures:
            if not future.done():
                future.set_result(None)


class SendWindow(Waiters):
    """The room that a receiver in the other process has. Owned by the sender's loop.

    The bounds are those of a `Channel`: at most `messages` messages or `size` bytes are on the way.
    """

    __slots__ = ("_bytes", "_messages", "is_closed")

    def __init__(self, messages: int = MAX_ITEMS, size: int = MAX_BYTES) -> None:
        self._messages = messages
        self._bytes = size
        self.futures = ()
        self.is_closed = False

    async def take(self, size: int) -> None:
        """Take room for a message, or wait for it. Raises `StreamClosedError` if it is closed."""
        while not self.is_closed and (self._messages <= 0 or self._bytes <= 0):
            await self.wait()
        if self.is_closed:
            raise StreamClosedError("the consumer has closed this stream")
        self._messages -= 1
        self._bytes -= size

    def give(self, credit: memoryview) -> None:
        """Give room back: the receiver has taken this much."""
        messages, size = CREDIT.unpack(credit)
        self._messages += messages
        self._bytes += size
        if self.futures:
            self.wake()

    def close(self) -> None:
        """Make every later `take` raise: the receiver takes no more."""
        self.is_closed = True
        if self.futures:
            self.wake()


class Taken:
    """The messages that a receiver has taken, and that its sender does not know of yet.

    They are at most half of a window of `size` bytes: the sender never waits for what is held back.
    """

    __slots__ = ("_bytes", "_given_bytes", "_messages")

    def __init__(self, size: int = MAX_BYTES) -> None:
        self._messages = self._bytes = 0
        self._given_bytes = size // 2

    def add(self, messages: int, size: int) -> None:
        self._messages += messages
        self._bytes += size

    def tell(self, frames: Frames, number: int) -> None:
        """Give the sender room, once it is worth a frame."""
        if self._messages >= _GIVEN_MESSAGES or self._bytes >= self._given_bytes:
            frames.post(Kind.CREDIT, number, CREDIT.pack(self._messages, self._bytes))
            self._messages = self._bytes = 0
