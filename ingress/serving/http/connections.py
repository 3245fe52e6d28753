"""The connections of one server, and their limits.

    a connection that                                      gets
    is one more than `limit_connections`                   503, and is closed
    sends a head of more than `max_header_bytes`           431, and is closed
    sends a head of more than `HEADER_FIELDS` fields       431, and is closed
    sends a part of a head in `header_timeout_s`, not all  408, and is closed
    sends nothing in that time                             closed
    sends a head of ambiguous host or length               400, and is closed

A head is the request line and the header fields. An ambiguous head is read in one way by a server
and in another by the proxy before it, which lets a client hide a request from one of them: see
`Guarded._doubt`. The parsers also refuse what is no HTTP at all. Between two requests uvicorn's own
keep-alive timeout counts instead.

ASGI begins after all of this, so it is done in subclasses of uvicorn's two protocols. Of uvicorn's
own options `h11_max_incomplete_event_size` is used; httptools has no such option.
`limit_concurrency` is not used: it counts requests too, and it keeps a refused connection open
until a request comes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import h11
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ingress.core.base.settings import HTTPLimits
from ingress.serving.http.compat import H11Protocol, HttpToolsProtocol, ProxyHeadersMiddleware
from ingress.serving.http.proxy import proxy_behind
from ingress.serving.http.uvicorn_connection import close_header
from ingress.telemetry.logs import logger

HEADER_FIELDS = 100  # as in Apache and gunicorn
RETRY_AFTER_S = 1
LINGER_S = 1.0  # for a refused client to read that it is
GRAIN_S = 0.25  # between two checks of the awaited connections, at least
QUIET_S = 60.0  # between two log records of refused connections, at least

# RFC 9112, 3.2, by way of RFC 3986, 3.2.2: name or address, and port. No comma: a name may have
# one, but so have two fields that a proxy has joined.
_HOST = re.compile(rb"[\w.~!$&'()*+;=%:\[\]-]*", re.ASCII)
# RFC 9112, 2.2 and 5: a line that ends in CR or LF alone, a control character, a line that is
# continued in the next.
_NO_LINES = re.compile(rb"(?:\A|[^\r])\n|\r[^\n]|[\0-\x08\x0b\x0c\x0e-\x1f\x7f]|\n[ \t]")


if TYPE_CHECKING:
    _Uvicorns = H11Protocol  # both protocols have the attributes that are used here
else:
    _Uvicorns = object


class Connections:
    """The open connections of one server, and their factory. Owned by the HTTP loop.

    A worker process gets only the limits, and makes its own.
    """

    def __init__(self, limits: HTTPLimits, parser: str = "auto") -> None:
        self.limits = limits
        self.opened: list[set[Any]] = []  # of the servers on one address; else its own
        self._parser = parser
        self._awaited: dict[Guarded, float] = {}  # by deadline, because all have the same timeout
        self._is_looking = False
        self._quiet_until = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return Connections, (self.limits, self._parser)

    def __copy__(self) -> Connections:
        """Return those of another loop of the same server, with which it shares its limit."""
        other = Connections(self.limits, self._parser)
        other.opened = self.opened
        return other

    def __call__(self, **given: Any) -> asyncio.Protocol:
        """Make the protocol of one connection; called by uvicorn."""
        protocol = GuardedH11 if self._parser == "h11" else PROTOCOL
        return protocol(self, **given)

    def options(self) -> dict[str, Any]:
        """Return the arguments for `uvicorn.Config`."""
        return {"http": self, "h11_max_incomplete_event_size": self.limits.max_header_bytes}

    def expect(self, connection: Guarded) -> None:
        """Give up a connection in `header_timeout_s`, unless the head of a request comes first."""
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
        """Give up connections whose time is over. One timer is enough, for the first of them."""
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
        """Log that connections are refused, but not each one: there may be thousands a second."""
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            logger.warning(
                "%d connections are open, which is the limit: further connections get 503; raise "
                "limit_connections, or lower the keep-alive timeout",
                self.limits.limit_connections,
            )


class Guarded(_Uvicorns):
    """A connection with limits: a mixin for either of uvicorn's two protocols.

    `_unparsed` counts the bytes since the parser last completed a head or a part of a body. While
    there are few, nothing more is counted.
    """

    # In the instance's dict, with uvicorn's, these would be more than 30 attributes. Instances do
    # not share the keys of such a dict, and each access to it takes longer.
    __slots__ = ("_is_forwarded", "_max_bytes", "_others", "_unparsed", "is_awaited")

    cycle: Any  # none before the first request

    def __init__(self, others: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._others = others
        self._max_bytes = others.limits.max_header_bytes
        self._unparsed = 0
        self._is_forwarded = False  # the request, by a proxy
        self.is_awaited = False
        # uvicorn would make each line before its logger drops it.
        self.access_log = self.access_log and self.access_logger.isEnabledFor(logging.INFO)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        limit = self._others.limits.limit_connections
        # Race of two loops with the last place: each counts after it has added its own, so both
        # may refuse, and never both take it.
        if limit is None or sum(map(len, self._others.opened or [self.connections])) <= limit:
            self._others.expect(self)
            return
        self._others.report_full(self.loop.time())
        self._refuse(
            503,
            f"The server has reached its limit of {limit} connections.",
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
        """Check the progress of a client that is not in the middle of a request."""
        if self.transport.is_closing() or self not in self.connections:
            return  # refused by the parser, or now a WebSocket
        is_free = self.cycle is None or self.cycle.response_complete
        if self._unparsed > self._max_bytes:
            if is_free:
                self._refuse(431, self._too_large)
            else:  # after a body or a request without an answer yet: a refusal cannot be sent
                self.transport.abort()
        elif is_free and not (self.is_awaited and self._unparsed):
            # A new head; or more of a body that was answered early, for which the time restarts.
            self._others.expect(self)

    def _head_is_complete(self, version: str) -> None:
        """Check the complete head of a request, before the request begins."""
        if self.is_awaited:
            self._others.forget(self)
        if len(self.headers) > HEADER_FIELDS or (
            self._unparsed > self._max_bytes and self._head_bytes() > self._max_bytes
        ):
            self.app = partial(_answer_refused, self.app, 431, self._too_large)
        elif doubt := self._doubt(version):
            self.app = partial(
                _answer_refused, self.app, 400, f"The request is malformed: {doubt}."
            )
        self._unparsed = 0

    def _doubt(self, version: str) -> str:
        """Return the ambiguity of the head, which others may read in another way; "" for none.

        RFC 9112, 3.2 and 6.1. On the path of each request.
        """
        hosts = 0
        self._is_forwarded = False
        has_length = has_coding = False
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
                if _HOST.fullmatch(value) is None:
                    return "its Host field is invalid"
            elif name == b"content-length":
                has_length = True
            elif name == b"transfer-encoding":
                has_coding = True
            elif name.startswith(b"x-forwarded-"):
                self._is_forwarded = True
        if version != "1.1" and version != "1.0":
            return f"HTTP/{version} is not supported"
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
            "The headers of the request are too large: the limit is "
            f"{self._max_bytes} bytes and {HEADER_FIELDS} fields."
        )

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser refuses; h11 also refuses one that is too long."""
        if self._unparsed > self._max_bytes:
            self._refuse(431, self._too_large)
        elif self.cycle is None or self.cycle.response_complete:
            self._refuse(400, msg)
        else:  # an earlier request of the connection runs: it must see the end of it
            super().send_400_response(msg)

    def give_up(self) -> None:
        """Close a connection whose time for a head is over."""
        if self._unparsed:
            limit_s = self._others.limits.header_timeout_s
            self._refuse(408, f"The headers of the request did not arrive within {limit_s:g} s.")
        else:
            self.transport.close()

    def _refuse(self, status: int, text: str, fields: str = "") -> None:
        """Answer although there is no request, and close the connection.

        Not at once: the system would reset a connection with unread data, and the client would not
        see the answer.
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
        transport.set_protocol(asyncio.Protocol())  # reads on, and discards
        if transport.can_write_eof():
            transport.write_eof()
        self.loop.call_later(LINGER_S, transport.close)


async def _answer_refused(
    app: Any, status: int, text: str, scope: Scope, receive: Receive, send: Send
) -> None:
    """Refuse a request whose head is complete. `app` is the server's, which does not see it."""
    response: Response = PlainTextResponse(text, status)
    app = app.app if type(app) is ProxyHeadersMiddleware else app
    if (proxy := proxy_behind(app)) is not None:
        response = proxy.allowing_origin(scope, response)
    response.headers.update(close_header(receive))
    await response(scope, receive, send)


class GuardedH11(Guarded, H11Protocol):
    """One connection, read by h11."""

    def _should_upgrade(self) -> bool:
        self._head_is_complete(
            self.scope["http_version"]
        )  # the only method that is called for each request
        return super()._should_upgrade()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0].partition(b"\r\n\r\n")[0]
            if _NO_LINES.search(head):  # h11 repairs such lines, or leaves them as they are
                self.send_400_response("Invalid HTTP request received.")
                return
        super().handle_events()

    def _check_progress(self) -> None:
        is_head = self.conn.their_state is h11.IDLE  # h11 has limits of its own for the rest
        self._unparsed = len(self.conn.trailing_data[0]) if is_head else 0
        super()._check_progress()


PROTOCOL: type[Guarded] = GuardedH11
if HttpToolsProtocol is not None:
    from ingress.serving.http.direct import Direct, forwarding_of, proxy_of

    class GuardedHttptools(Direct, Guarded, HttpToolsProtocol):  # type: ignore[misc]
        """One connection, read by httptools. It drives requests by itself, if that can be."""

        __slots__ = (
            "_cycle", "_forwarding", "_is_parsing", "_proxys_app", "_reply", "_serves", "_starting",
            "_task_context",
        )  # fmt: skip

        def __init__(self, others: Connections, **given: Any) -> None:
            super().__init__(others, **given)
            self._serves = None if self.config.reset_contextvars else proxy_of(self.app)
            self._proxys_app = self.app  # a refused request gets another
            self._forwarding = forwarding_of(self.app)
            self._is_parsing = False
            # The cycle of the request that has just come, and whether a proxy forwards it: the head
            # of the next request may have come with it.
            self._starting: tuple[Any, bool] | None = None

        # The next two methods are on the path of each request: `super()` would cost as much as
        # the first one does.

        def data_received(self, data: bytes) -> None:
            self._unparsed += len(data)
            self._is_parsing = True
            try:
                HttpToolsProtocol.data_received(self, data)
            finally:
                self._is_parsing = False
            if (starting := self._starting) is not None:
                self._starting = None
                cycle, is_forwarded = starting
                proxy = self._serves
                if proxy is not None and not (cycle.more_body or cycle.waiting_for_100_continue):
                    forwarding = self._forwarding if is_forwarded else None
                    # As a task would, in the next turn of the loop: then the calls that came on
                    # all connections go to the user loop by one wake-up. At once, a request would
                    # cost 10 us more with 32 connections.
                    self.loop.call_soon(self._drive, proxy, cycle, forwarding)
                else:
                    self._start_task(cycle, self._proxys_app)
            cycle = self.cycle
            if self._unparsed or cycle is None or cycle.response_complete:
                self._check_progress()

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            """Begin a request; after the data that is here, which may have its whole body."""
            if self._is_parsing and self._serves is not None and app is self._proxys_app:
                self._starting = cycle, self._is_forwarded
            else:
                self._start_task(cycle, app)

        _start_task = HttpToolsProtocol._start_asgi_task

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
