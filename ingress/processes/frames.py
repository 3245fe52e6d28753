"""Frames over a socket pair between two processes of ingress, in both directions.

    length    8 bytes   of the content, without this head
    call      4 bytes   the number of the call that the frame belongs to; 0 for none
    kind      1 byte    `messages.Kind`
    content

Frames that are posted in one turn of the loop are written together, at its end: a system call costs
more than a frame. Nothing listens, and the sockets have no name: only the child inherits its end.
So its frames may be unpickled, and `loads` is for nothing else.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from struct import Struct
from typing import Any

HEAD = Struct("<QIB")
PICKLE = 5  # the protocol

OnFrame = Callable[[int, int, memoryview], None]
OnLost = Callable[[], None]


def dumps(value: Any) -> bytes:
    """Return the pickle of a value, for the content of a frame."""
    return pickle.dumps(value, PICKLE)


def loads(content: bytes | memoryview) -> Any:
    """Return the value of a pickle that arrived in a frame. A pickle can run any code."""
    return pickle.loads(content)


class Frames(asyncio.Protocol):
    """One end of a socket pair. Owned by its loop.

    `on_frame(kind, call, content)` gets each frame that arrives; `content` is valid during the
    call. `on_lost()` is called when the other end is closed.
    """

    __slots__ = (
        "_have", "_is_due", "_loop", "_need", "_on_frame", "_on_lost", "_out", "_parts",
        "_transport",
    )  # fmt: skip

    def __init__(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._out: list[bytes] = []
        self._is_due = False
        self._parts: list[bytes] = []  # of a frame that has not arrived completely
        self._have = 0
        self._need = HEAD.size

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def post(self, kind: int, call: int, content: bytes = b"") -> None:
        """Send a frame at the end of the loop's turn. Without effect once the end is closed."""
        self._out.append(HEAD.pack(len(content), call, kind))
        self._out.append(content)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        out, self._out = self._out, []
        if self.is_open:
            self._transport.writelines(out)

    def close(self) -> None:
        """Close this end at once; what was posted and not written is dropped."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._have:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._parts)
        offset = 0
        view = memoryview(data)
        while True:
            start = offset + HEAD.size
            if start > len(data):
                self._need = HEAD.size
                break
            length, call, kind = HEAD.unpack_from(data, offset)
            if start + length > len(data):
                self._need = HEAD.size + length
                break
            offset = start + length
            self._on_frame(kind, call, view[start:offset])
        self._parts = [data[offset:]]
        self._have = len(data) - offset

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()


async def connect(end: socket.socket, on_frame: OnFrame, on_lost: OnLost) -> Frames:
    """Begin to use an end of a socket pair, on the running loop. The loop owns the socket."""
    end.setblocking(False)
    loop = asyncio.get_running_loop()
    opening = loop.create_task(
        loop.create_unix_connection(lambda: Frames(on_frame, on_lost), sock=end)
    )
    try:
        _, frames = await asyncio.shield(opening)
    except asyncio.CancelledError:
        # It takes a turn of the loop. A cancellation in it would leave the socket open.
        _, frames = await opening
        frames.close()
        raise
    return frames


def send_blocking(end: socket.socket, kind: int, content: bytes) -> None:
    """Send one frame before the loop owns the socket."""
    end.sendall(HEAD.pack(len(content), 0, kind) + content)


def receive_blocking(end: socket.socket) -> tuple[int, bytes]:
    """Receive one frame before the loop owns the socket: its kind and content.

    Raises `EOFError` if the other end is closed first.
    """
    length, _, kind = HEAD.unpack(_exactly(end, HEAD.size))
    return kind, _exactly(end, length)


def _exactly(end: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = end.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other process closed its end")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
