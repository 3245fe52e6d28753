"""The connection as the driver of its requests: no task, no future, and one write for the answer.

    drive       the body is here, the replicas are on other loops -> submit the call
    set_result  a complete response came -> write it -> the end of the call
                anything else -> hand over to `asgi_driver`, in a task, once

Only connections of `GuardedHttptools` do so, without middleware of the server but for uvicorn's
own for proxies. What the client gets, and what is counted, logged and waited for, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from copy import copy
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.serving.http.access import AccessLine
from ingress.serving.http.compat import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    ProxyHeadersMiddleware,
)
from ingress.serving.http.in_flight import InFlight, leave
from ingress.serving.http.proxy import HTTPProxy, proxy_behind
from ingress.serving.http.reply import Reply
from ingress.serving.http.reply_state import BEGIN, CALLED, END, FINISH, READ, ReplyEvent


def proxy_of(app: Any) -> HTTPProxy | None:
    """Return the proxy that a server calls: itself, or by an application of a worker process.

    uvicorn's middleware for proxies may be around either.
    """
    if type(app) is ProxyHeadersMiddleware:
        app = app.app
    return proxy_behind(app)


def forwarding_of(app: Any) -> ASGIApp:
    """Return what the server's middleware for proxies does to a scope, as an application."""
    if type(app) is not ProxyHeadersMiddleware:
        return _no_app
    forwarding: Any = copy(app)
    forwarding.app = _no_app
    return forwarding  # type: ignore[no-any-return]


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Do nothing."""


class Direct:
    """A mixin for httptools' connections: it drives the request that has just come.

    It is what the reply wakes, in the place of a future. Owned by the HTTP loop. The connection may
    drive its next request once the response to this one is complete, or a task sends it.
    """

    if TYPE_CHECKING:
        _cycle: Any
        _reply: Reply | None
        _serves: HTTPProxy | None
        _task_context: Context
    else:
        __slots__ = ()  # those of the connection

    done = bool
    """Return False: the reply forgets this waiter once it has woken it. `bool()` does that in C."""

    _start_task: Callable[[Any, ASGIApp], None]
    """Have an application serve a request, in a task of uvicorn's."""

    def _drive(self, proxy: HTTPProxy, cycle: Any, forwarding: ASGIApp | None) -> None:
        """Serve the request: without a task, if that can be.

        The cycle is uvicorn's, of a request whose body is here. `forwarding` is given if a proxy
        has added headers to it, see `forwarding_of`.
        """
        send = AccessLine(cycle.scope, cycle.send) if proxy.logs_requests else cycle.send
        try:
            if forwarding is not None:
                _step(forwarding(cycle.scope, cycle.receive, send))
            reply = proxy.accept(cycle.scope, cycle.receive, send)
        except Exception as error:  # the server answers and logs it, as in a task
            reply = _failed(error)
        if not isinstance(reply, Reply):
            self._start_task(cycle, _served_by(reply, cycle, send))
            return
        body, router = reply.body, reply.router
        replica = next(iter(router.replicas), None)  # the control loop may change the list
        is_shared = replica is None or replica.loop is reply.loop
        if (
            is_shared
            or reply.attempts is not None
            or reply.call.metadata.deadline is not None
            or (body is not None and not body.may_be_taken(len(cycle.body)))
        ):
            if is_shared:
                # Most requests of a connection are for the same application: the next ones get a
                # task without this look.
                self._serves = None
            serving = proxy.in_flight.serve(reply, cycle.scope, cycle.receive, send)
            self._start_task(cycle, _served_by(serving, cycle, send))
            return
        if body is not None:
            reply.first = {"type": "http.request", "body": bytes(cycle.body), "more_body": False}
            cycle.body = bytearray()
            body.is_open = False
            if type(send) is AccessLine:
                send.queued_at = monotonic()
        self._cycle, self._reply = cycle, reply
        # A mailbox wakes it, in an empty context.
        self._task_context = copy_context()
        reply.event = self
        proxy.in_flight.begin(reply)
        reply.on(READ)
        router.assign(reply.call)

    def set_result(self, _: None) -> None:
        """Send what has come, or hand over to a task."""
        reply, cycle, proxy = self._reply, self._cycle, self._serves
        assert reply is not None
        assert proxy is not None
        self._reply = None
        came, call = reply.came, reply.call
        content = None
        if reply.state is CALLED and isinstance(came, tuple):
            try:
                content = _whole(cycle, *came, call.metadata.request_id)
            except Exception:
                pass  # of a message that is none: `send` raises it again, in a task
        if content is None:
            self._rest(reply, cycle).hand_over()
            return
        assert isinstance(came, tuple)
        reply.came = reply.event = None
        reply.status = came[0]["status"]
        reply.pass_through(BEGIN, FINISH)
        try:
            if type(reply.send) is AccessLine:
                reply.send.note(came[0])
                reply.send.log()
            _write(cycle, content)
            self._task_context.run(cycle.on_response)  # uvicorn may begin the next request in it
        except BaseException as error:  # as if `send` had raised it in a task
            reply.came = error
            self._rest(reply, cycle).hand_over()
            return
        if call.settled and call.error is None:
            _end(reply, cycle, proxy.in_flight, END)
        else:  # its work ends just now, or it has a background task
            reply.event = self._rest(reply, cycle)
            call.when_settled(reply.note_end)

    def _rest(self, reply: Reply, cycle: Any) -> _Rest:
        assert self._serves is not None
        in_flight = self._serves.in_flight
        return _Rest(reply, cycle, in_flight, self._start_task, self._task_context)


class _Rest(NamedTuple):
    """A request that is no longer its connection's; what its reply wakes at its end.

    `start` and `context` are those of the task that it is handed over to, if that must be.
    """

    reply: Reply
    cycle: Any
    in_flight: InFlight
    start: Callable[[Any, ASGIApp], None]
    context: Context

    def done(self) -> bool:
        return False

    def set_result(self, _: None) -> None:
        """Leave, if the call has ended well. Else a background task has failed, or was stopped.

        Or user code answers twice, which only the server can refuse.
        """
        if self.reply.came is None and self.reply.call.error is None:
            _end(self.reply, self.cycle, self.in_flight)
        else:
            self.hand_over()

    def hand_over(self) -> None:
        """Have a task serve the rest of the request."""
        reply, cycle = self.reply, self.cycle
        reply.event = None
        serving = self.in_flight.serve(reply, cycle.scope, cycle.receive, reply.send)
        self.context.run(self.start, cycle, _served_by(serving, cycle, reply.send))


def _end(reply: Reply, cycle: Any, in_flight: InFlight, *events: ReplyEvent) -> None:
    """Leave a request whose response is complete, after these events."""
    reply.event = None
    reply.leave(*events)
    in_flight.replies.discard(reply)
    leave(reply, cycle.scope)
    cycle.on_response = _nothing  # as uvicorn, at the end of its task


def _step(coroutine: Any) -> None:
    """Run a coroutine that waits for nothing."""
    with suppress(StopIteration):
        coroutine.send(None)


async def _failed(error: Exception) -> None:
    raise error


def _served_by(serving: Coroutine[Any, Any, None], cycle: Any, send: Send) -> ASGIApp:
    """Return an application that awaits `serving`, and logs the request."""
    if isinstance(send, AccessLine):
        serving = send.follow(_return(serving), cycle.receive)
    return _return(serving)


def _return(serving: Coroutine[Any, Any, None]) -> ASGIApp:
    return lambda *_: serving


def _whole(cycle: Any, start: Message, body: Message, request_id: str) -> list[bytes] | None:
    """Return what httptools' `send` would write for a whole response, for one write.

    `None` for a response that only `send` may send: its client has left or reads nothing, it is
    logged by uvicorn, its length is not that of its body, a header is not valid, or it closes the
    connection.
    """
    if (
        cycle.disconnected
        or cycle.transport.is_closing()  # uvicorn tells only the latest request of a connection
        or cycle.flow.write_paused
        or cycle.access_log
        or start["status"] not in STATUS_LINE
        or body["type"] != "http.response.body"
    ):
        return None
    length: bytes | None = None
    has_id = False
    content = [STATUS_LINE[start["status"]]]
    for name, value in [*cycle.default_headers, *start["headers"]]:
        if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
            return None
        name = name.lower()
        if name == b"content-length" and length is None and value.isdigit():
            length = value
        elif name == b"x-request-id":
            has_id = True
        elif name in _NOT_ORDINARY:
            return None
        content += (name, b": ", value, b"\r\n")
    data: bytes = body.get("body", b"")
    if cycle.scope["method"] == "HEAD":
        data = b""
    elif length != b"%d" % len(data):
        return None
    if not has_id:
        content += (b"x-request-id: ", request_id.encode(), b"\r\n")
    content += (b"\r\n", data) if cycle.keep_alive else (b"connection: close\r\n\r\n", data)
    return content


_NOT_ORDINARY = frozenset((b"connection", b"content-length", b"transfer-encoding"))


def _write(cycle: Any, content: list[bytes]) -> None:
    """Write a whole response as httptools' `send` does, and end the request of the connection."""
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = cycle.chunked_encoding = False
    cycle.transport.write(b"".join(content))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()


def _nothing() -> None:
    """Do nothing: the request is over."""
