"""Access to uvicorn's connection, for what ASGI cannot express.

    has_left            the client has left, although the server has yet to notice: it stops reading
                        while a body waits for user code, and the end comes after the unread data
    has_no_body         the request has arrived, without a body
    has_unread          the kernel has data of the client, or its end, that the server has not read
    cut                 end a response half way; in ASGI only an error of the application does that
    called_app          the application that the server itself calls: if it is `ingress`'s own, only
                        the server gets the errors that it raises
    target_of           what the client asks for: a path, or a URL, of which ASGI has only the path
    close_header        `connection: close`, unless the server adds it to each response already
    is_answer_complete  the whole response has been given to the server
    send_chunks         several chunks of a body by one write; in ASGI a message is a chunk
    shorten             have a WebSocket's messages passed on as they arrive, without a task
    may_send            whether the connection of a WebSocket takes messages at once
    send_messages       send messages of a WebSocket by one write, without a task

None of it is part of ASGI: uvicorn's `receive` is a method of the object that holds the transport.
For any other `receive`, or a wrapped one, the answer is no.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import Message, Receive, Send

_GONE = getattr(select, "POLLRDHUP", 0)  # Linux; POLLHUP and POLLERR need not be asked for
_HTTPTOOLS = "uvicorn.protocols.http.httptools_impl"
_NAMES = ("chunked_encoding", "disconnected", "flow", "scope", "transport")
_SANSIO = "uvicorn.protocols.websockets.websockets_sansio_impl"
_WEBSOCKET_NAMES = ("queue", "read_paused", "transport")
_SENDING_NAMES = (
    "close_sent", "conn", "disconnected", "handshake_complete", "initial_response", "transport",
    "writable",
)  # fmt: skip
FLUSH_S = 0.1  # for data that is being sent when a connection is cut


def has_left(receive: Receive) -> bool:
    """Return whether the kernel knows that the client has closed or reset the connection.

    If not, the server notices the end itself, once it has read the data before it.
    """
    return _polled(transport_of(receive), _GONE)


def has_no_body(receive: Receive) -> bool:
    """Return whether the server has the whole request, and its body is empty.

    The first `http.request` would say so too: this saves most requests reading it. False with any
    other server, and before the first part of a body is here: then that message must be read.
    """
    cycle = getattr(receive, "__self__", None)
    return getattr(cycle, "more_body", True) is False and getattr(cycle, "body", None) == b""


def is_incomplete(receive: Receive) -> bool:
    """Return whether a part of the body is yet to come. False with any other server."""
    return getattr(getattr(receive, "__self__", None), "more_body", False) is True


def has_unread(transport: Any) -> bool:
    """Return whether data has arrived that the connection's protocol has not been given yet."""
    return _polled(transport, getattr(select, "POLLIN", 0))


async def cut(receive: Receive) -> bool:
    """Close the connection, and wait until the server has noticed. Returns False if it cannot."""
    transport = transport_of(receive)
    if transport is None:
        return False
    transport.close()
    try:
        async with asyncio.timeout(FLUSH_S):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        pass  # data that the client does not read is in the way; the server logs a line about it
    return True


def _polled(transport: Any, events: int) -> bool:
    socket = None if transport is None else transport.get_extra_info("socket")
    if socket is None or not hasattr(select, "poll"):  # Windows
        return False
    descriptor = socket.fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(0))


def called_app(receive: Receive) -> Any:
    """Return the application that uvicorn calls with this `receive` over HTTP/1.1, else `None`.

    Of uvicorn's own wrappers only the default one is looked through; the others give another
    `receive`.
    """
    cycle = getattr(receive, "__self__", None)
    if not hasattr(cycle, "keep_alive"):  # HTTP/2, whose streams share a connection
        return None
    protocol = getattr(getattr(cycle, "on_response", None), "__self__", None)
    app: Any = getattr(protocol, "app", None)
    module = sys.modules.get("uvicorn.middleware.proxy_headers")
    if module is not None and type(app) is getattr(module, "ProxyHeadersMiddleware", None):
        return app.app
    return app


def target_of(receive: Receive) -> bytes | None:
    """Return the target of a request as its client wrote it, b"" if the server does not tell.

    `None` if the server is already reading the head of a later request of the connection.
    """
    cycle = getattr(receive, "__self__", None)
    protocol = getattr(getattr(cycle, "on_response", None), "__self__", None)
    target = getattr(protocol, "url", b"")
    if target and getattr(protocol, "scope", None) is not getattr(cycle, "scope", None):
        return None
    return target if isinstance(target, bytes) else b""


def close_header(receive: Receive) -> dict[str, str]:
    """Return the header that has the server close the connection after its response.

    Empty if a server that is about to end says so in each response by itself.
    """
    cycle = getattr(receive, "__self__", None)
    if (b"connection", b"close") in getattr(cycle, "default_headers", ()):
        return {}
    return {"connection": "close"}


def is_answer_complete(receive: Receive) -> bool:
    """Return whether the server has been given the whole response."""
    return bool(getattr(getattr(receive, "__self__", None), "response_complete", False))


async def send_chunks(send: Send, parts: Sequence[bytes]) -> None:
    """Send chunks of a body whose start was sent and whose end was not, each as one chunk."""
    cycle: Any = getattr(send, "__self__", None)
    if len(parts) == 1 or not _frames_chunks(cycle):
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    elif cycle.chunked_encoding is not True or cycle.scope["method"] == "HEAD":
        await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
    else:
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            frames = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part]
            cycle.transport.write(b"".join(frames))


_FRAMES_CHUNKS: dict[type, bool] = {}


def _frames_chunks(cycle: Any) -> bool:
    """Return whether a `send` is httptools' own, of a uvicorn with the names that are used here.

    Otherwise each chunk is a message: slower, and as right.
    """
    kind = type(cycle)
    found = _FRAMES_CHUNKS.get(kind)
    if found is None:
        found = kind.__module__ == _HTTPTOOLS and all(hasattr(cycle, name) for name in _NAMES)
        _FRAMES_CHUNKS[kind] = found
    return found


class Shortcut:
    """The queue of one WebSocket of uvicorn's, and a way past it. Owned by the HTTP loop.

    uvicorn stops reading after each message, and its `receive` reads on. A message that `take`
    takes needs neither: uvicorn then believes that it has stopped.
    """

    __slots__ = ("_pretends", "_protocol", "_queue", "_take")

    def __init__(self, protocol: Any, take: Callable[[Message], bool]) -> None:
        self._protocol = protocol
        self._queue: asyncio.Queue[Message] = protocol.queue
        self._take = take
        self._pretends = False  # to have stopped reading
        protocol.queue = self

    def put_nowait(self, message: Message) -> None:
        if (
            message["type"] != "websocket.receive"
            or not self._queue.empty()
            or not self._take(message)
        ):
            self._stop_pretending()
            self._queue.put_nowait(message)
        elif not self._protocol.read_paused:
            self._protocol.read_paused = self._pretends = True

    def _stop_pretending(self) -> None:
        if self._pretends:
            self._protocol.read_paused = self._pretends = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def end(self) -> None:
        """Give uvicorn its queue back."""
        self._stop_pretending()
        self._protocol.queue = self._queue


def shorten(receive: Receive, take: Callable[[Message], bool]) -> Shortcut | None:
    """Have `take(message)` called with the messages of a WebSocket as they arrive, in order.

    If it returns False, the message waits for `receive`, as do those that have arrived already and
    the disconnect; meanwhile `take` is not called. It must return False until the code that called
    `receive` has passed the message on. Returns `None` with another server, and with a uvicorn
    that has renamed the names that are used here: then all messages wait for `receive`.
    """
    protocol: Any = getattr(receive, "__self__", None)
    if type(protocol).__module__ == _SANSIO and all(hasattr(protocol, n) for n in _WEBSOCKET_NAMES):
        return Shortcut(protocol, take)
    return None


def websocket_of(send: Send) -> Any:
    """Return uvicorn's WebSocket that this `send` belongs to, for `send_messages`, or `None`."""
    protocol: Any = getattr(send, "__self__", None)
    is_known = type(protocol).__module__ == _SANSIO and all(
        hasattr(protocol, name) for name in _SENDING_NAMES
    )
    return protocol if is_known else None


def may_send(protocol: Any) -> bool:
    """Return whether `send_messages` may be called now: the connection has no unsent data."""
    return bool(
        protocol.writable.is_set()
        and protocol.handshake_complete
        and not protocol.disconnected
        and not protocol.close_sent
        and protocol.initial_response is None
    )


def send_messages(protocol: Any, messages: list[Message]) -> list[Message]:
    """Send messages as uvicorn's `send` does. Returns those that only `send` can send.

    These are all from the first that is not data, or that `send` raises for.
    """
    connection = protocol.conn
    count = 0
    try:
        for message in messages:
            if message["type"] != "websocket.send":
                break
            data = message.get("bytes")
            if data is not None:
                connection.send_binary(data)
            else:
                connection.send_text(message["text"].encode())
            count += 1
    except Exception:
        pass  # of a message that is none: `send` raises it again, in the server's task
    if count:
        protocol.transport.write(b"".join(connection.data_to_send()))
    return messages[count:]


def transport_of(receive: Receive) -> Any:
    """Return the connection that a server's `receive` reads from, or `None`."""
    return getattr(getattr(receive, "__self__", None), "transport", None)
