"""Room for requests beside streams: few large parts of streams are sent in one turn of a loop.

A request needs several turns of the HTTP loop. If a hundred streams send 64 KiB each in every turn,
these turns are milliseconds long, and a request beside the streams takes a tenth of a second.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from weakref import WeakKeyDictionary

LARGE = 32 * 1024  # bytes; smaller parts cost little more than their turn
TURN = 256 * 1024  # bytes that are sent in one turn, and what the last part has more


class StreamTurns:
    """The turns of one event loop, dealt out to the large parts of its streams in order of arrival.

    Belongs to the loop's thread. It has no reference to the loop, which is a weak key to it.
    """

    __slots__ = ("_sent", "_waiting")

    def __init__(self) -> None:
        self._sent = 0  # bytes in this turn
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def wait(self, size: int) -> None:
        """Return at once if this turn has room for a large part, else in the next that has."""
        loop = asyncio.get_running_loop()
        if self._sent < TURN and not self._waiting:
            if not self._sent:
                loop.call_soon(self._begin)
            self._sent += size
            return
        turn = loop.create_future()
        self._waiting.append((turn, size))
        await turn

    def _begin(self) -> None:
        """Begin a turn."""
        self._sent = 0
        while self._waiting and self._sent < TURN:
            turn, size = self._waiting.popleft()
            if not turn.done():  # else its stream was cancelled
                turn.set_result(None)
                self._sent += size
        if self._sent:
            asyncio.get_running_loop().call_soon(self._begin)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, StreamTurns] = WeakKeyDictionary()
_turns_lock = threading.Lock()


def stream_turns(loop: asyncio.AbstractEventLoop) -> StreamTurns:
    """Return the turns of a loop. Thread-safe."""
    with _turns_lock:
        found = _turns.get(loop)
        if found is None:
            found = _turns[loop] = StreamTurns()
        return found
