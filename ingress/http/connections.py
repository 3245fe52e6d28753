"""The connections of one server, and how much of a client it puts up with.

    a connection that                                      gets
    is one more than `limit_connections`                   503, and is closed
    sends a head of more than `max_header_bytes`           431, and is closed
    sends a head of more than `HEADER_FIELDS` fields       431, and is closed
    sends a part of a head in `header_timeout_s`, not all  408, and is closed
    sends nothing in that time                             closed
    leaves a doubt whose request it is, or where it ends   400, and is closed

A head is the request line and the header fields. Doubts are what one server reads in one way and
the proxy before it in another, which lets a client hide a request from one of them: see
`Guarded._doubt`. The parsers refuse more, which is no HTTP at all. Between two requests the
keep-alive timeout counts instead, which is uvicorn's own.

ASGI begins where all of this is over, so it is done in subclasses of uvicorn's two protocols. Of
uvicorn's own options `h11_max_incomplete_event_size` is used. `limit_concurrency` is not: it counts
requests too, and it keeps what it refuses connected until a request comes. For httptools there is
none.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import h11
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ingress.base.settings import HTTPLimits
from ingress.logs import logger

HEADER_FIELDS = 100  # as in Apache and gunicorn
RETRY_AFTER_S = 1
LINGER_S = 1.0  # how long a refused client may take to read that it is
GRAIN_S = 0.25  # how far apart two looks at what is awaited are, at least
QUIET_S = 60.0  # how far apart two records of refused connections are, at least

# RFC 9112, 3.2, by way of RFC 3986, 3.2.2: name or address, and port. No comma, which a name may
# have, but which two fields make that a proxy has joined.
_HOST = re.compile(rb"[\w.~!$&'()*+;=%:\[\]-]*", re.ASCII)
# RFC 9112, 2.2 and 5: a line that ends in one of CR and LF, a control character, a line that goes
# on in the next.
_NO_LINES = re.compile(rb"(?:\A|[^\r])\n|\r[^\n]|[\0-\x08\x0b\x0c\x0e-\x1f\x7f]|\n[ \t]")


if TYPE_CHECKING:
    _Uvicorns = H11Protocol  # both have what is used of them here
else:
    _Uvicorns = object


class Connections:
    """The open connections of one server, made by it. Owned by the server's loop.

    It goes to a worker process as its limits.
    """

    def __init__(self, limits: HTTPLimits) -> None:
        self.limits = limits
        self._awaited: dict[Guarded, float] = {}  # by deadline, because all have the same time
        self._is_looking = False
        self._quiet_until = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return Connections, (self.limits,)

    def __call__(self, **given: Any) -> asyncio.Protocol:
        """Make what reads one connection, as uvicorn asks for it."""
        return PROTOCOL(self, **given)

    def options(self) -> dict[str, Any]:
        """Return what a `uvicorn.Config` needs to be given."""
        return {"http": self, "h11_max_incomplete_event_size": self.limits.max_header_bytes}

    def expect(self, connection: Guarded) -> None:
        """Give a connection up in `header_timeout_s`, unless the head of a request comes first."""
        timeout_s = self.limits.header_timeout_s
        if timeout_s is None:
            return
        loop = connection.loop
        self.forget(connection)
        self._awaited[connection] = loop.time() + timeout_s
        connection.is_awaited = True
        if not self._is_looking:
            self._is_looking = True
            loop.call_later(timeout_s, self._look, loop)

    def forget(self, connection: Guarded) -> None:
        connection.is_awaited = False
        self._awaited.pop(connection, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up those whose time is over. One timer is enough: it is for the first of them."""
        now = loop.time()
        late = []
        self._is_looking = False
        for connection, deadline in self._awaited.items():
            if deadline > now:
                self._is_looking = True
                loop.call_later(max(deadline - now, GRAIN_S), self._look, loop)
                break
            late.append(connection)
        for connection in late:
            self.forget(connection)
            connection.give_up()

    def report_full(self, now: float) -> None:
        """Log that a connection is refused. Not for each: there may be thousands a second."""
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            logger.warning(
                "%d connections are open, which is the limit: further ones are answered 503; raise "
                "limit_connections, or lower the keep-alive timeout",
                self.limits.limit_connections,
            )


class Guarded(_Uvicorns):
    """What is the same for both of uvicorn's protocols, one of which is the other base.

    `_unparsed` counts the bytes since the parser last had something whole: a head, or a part of a
    body. While there are few, nothing more is counted.
    """

    # A dict of more than 30 attributes, with uvicorn's, is no longer one that instances share, and
    # each access to it takes longer.
    __slots__ = ("_max_bytes", "_others", "_unparsed", "is_awaited")

    cycle: Any  # none before the first request

    def __init__(self, others: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._others = others
        self._max_bytes = others.limits.max_header_bytes
        self._unparsed = 0
        self.is_awaited = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        limit = self._others.limits.limit_connections
        if limit is None or len(self.connections) <= limit:
            self._others.expect(self)
            return
        self._others.report_full(self.loop.time())
        self._refuse(
            503,
            f"The server has as many connections as it may have: {limit}.",
            f"retry-after: {RETRY_AFTER_S}\r\n",
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_awaited:
            self._others.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed or self.cycle is None or self.cycle.response_complete:
            self._check_progress()

    def _check_progress(self) -> None:
        """See what a client is at that is not in the middle of a request."""
        if self.transport.is_closing() or self not in self.connections:
            return  # the parser has refused it, or it has become a WebSocket
        is_free = self.cycle is None or self.cycle.response_complete
        if self._unparsed > self._max_bytes:
            if is_free:
                self._refuse(431, self._too_large)
            else:  # behind a body, or a request that is not answered yet: no place for an answer
                self.transport.abort()
        elif is_free and not (self.is_awaited and self._unparsed):
            # A new head; or more of a body that was answered early, which may take its time.
            self._others.expect(self)

    def _head_is_complete(self, version: str) -> None:
        """Take note of the head of a request, which has not begun yet."""
        if self.is_awaited:
            self._others.forget(self)
        if len(self.headers) > HEADER_FIELDS or (
            self._unparsed > self._max_bytes and self._head_bytes() > self._max_bytes
        ):
            self.app = self._answer_too_large
        elif doubt := self._doubt(version):
            self.app = partial(_answer_doubtful, doubt)
        self._unparsed = 0

    def _doubt(self, version: str) -> str:
        """Return what of the head others may read in another way, "" for nothing.

        RFC 9112, 3.2 and 6.1. On the path of each request.
        """
        hosts = 0
        has_length = has_coding = False
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
                if _HOST.fullmatch(value) is None:
                    return "its Host is none"
            elif name == b"content-length":
                has_length = True
            elif name == b"transfer-encoding":
                has_coding = True
        if version != "1.1" and version != "1.0":
            return f"HTTP/{version} is not spoken here"
        if hosts != 1 and (hosts or version == "1.1"):
            return f"it has {hosts} Host fields"
        if has_coding and (has_length or version == "1.0"):
            with_what = "Content-Length" if has_length else "HTTP/1.0"
            return f"it has Transfer-Encoding with {with_what}"
        return ""

    def _head_bytes(self) -> int:
        """Return the size of the header fields, each with its colon, space and end of line."""
        return sum(len(name) + len(value) + 4 for name, value in self.headers)

    @property
    def _too_large(self) -> str:
        return (
            "The headers of the request are too large: they may have "
            f"{self._max_bytes} bytes and {HEADER_FIELDS} fields."
        )

    async def _answer_too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = PlainTextResponse(self._too_large, 431, {"connection": "close"})
        await response(scope, receive, send)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does: h11 also what is too long."""
        if self._unparsed > self._max_bytes:
            self._refuse(431, self._too_large)
        else:
            super().send_400_response(msg)

    def give_up(self) -> None:
        """Close a connection that has had its time for a head."""
        if self._unparsed:
            limit_s = self._others.limits.header_timeout_s
            self._refuse(408, f"The headers of the request did not arrive within {limit_s:g} s.")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str, fields: str = "") -> None:
        """Answer although there is no request, and close.

        Not at once: the system would reset a connection with data that was not read, and the client
        would not see the answer.
        """
        self._others.forget(self)
        self.connections.discard(self)
        transport = self.transport
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{fields}"
            f"content-type: text/plain; charset=utf-8\r\ncontent-length: {len(text)}\r\n"
            "connection: close\r\n\r\n"
        )
        transport.write((head + text).encode("ascii"))
        self.flow.resume_reading()
        transport.set_protocol(asyncio.Protocol())  # reads on, and forgets
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(LINGER_S, transport.close)


async def _answer_doubtful(doubt: str, scope: Scope, receive: Receive, send: Send) -> None:
    text = f"The request is malformed: {doubt}."
    await PlainTextResponse(text, 400, {"connection": "close"})(scope, receive, send)


class GuardedH11(Guarded, H11Protocol):
    """One connection, read by h11."""

    def _should_upgrade(self) -> bool:
        self._head_is_complete(
            self.scope["http_version"]
        )  # the only method that is called for each
        return super()._should_upgrade()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0].partition(b"\r\n\r\n")[0]
            if _NO_LINES.search(head):  # h11 mends them, or leaves them as they are
                self.send_400_response("Invalid HTTP request received.")
                return
        super().handle_events()

    def _check_progress(self) -> None:
        is_head = self.conn.their_state is h11.IDLE  # of the rest h11 has limits of its own
        self._unparsed = len(self.conn.trailing_data[0]) if is_head else 0
        super()._check_progress()


PROTOCOL: type[Guarded] = GuardedH11
try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    pass  # as uvicorn, which then takes h11
else:

    class GuardedHttptools(Guarded, HttpToolsProtocol):  # type: ignore[misc]
        """One connection, read by httptools."""

        # The next two are on the path of each request, and `super()` costs as much as the first.

        def data_received(self, data: bytes) -> None:
            self._unparsed += len(data)
            HttpToolsProtocol.data_received(self, data)
            cycle = self.cycle
            if self._unparsed or cycle is None or cycle.response_complete:
                self._check_progress()

        def on_headers_complete(self) -> None:
            self._head_is_complete(self.parser.get_http_version())
            HttpToolsProtocol.on_headers_complete(self)

        def on_body(self, body: bytes) -> None:
            self._unparsed = 0
            HttpToolsProtocol.on_body(self, body)

        def give_up(self) -> None:
            if self.cycle is not None and self.cycle.scope is self.scope:
                self._unparsed = 0  # the end of a body that was answered early
            super().give_up()

    PROTOCOL = GuardedHttptools
