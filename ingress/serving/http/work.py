"""User code's side of a request: it runs user code, which calls its `receive` and `send`.

    the user loop                              the HTTP loop
    send()     one complete response           -> Reply.complete, start and body together
               a stream, item by item          -> a Channel, which Reply.open gets
    receive()  body, messages, disconnect      <- the channel that the Client fills

If both are the same loop, nothing crosses threads: `send_here` sends by the server's own `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Protocol

from starlette.types import Message, Scope

from ingress.app.asgi.messages import NORMAL, SERVICE_RESTART, channel_for, size_of, with_bytes
from ingress.app.asgi.template import route_below
from ingress.core.calls.call import CURRENT_CALL, NO_CONTEXT, Call, Runner, Work
from ingress.core.calls.channel import RESPONSE_BYTES, YIELD_EVERY, Channel
from ingress.core.calls.loops import Mailbox
from ingress.core.execution.gil_pressure import GIL_PRESSURE, TURNS, TURNS_S
from ingress.exceptions import RayServeException, RequestCancelledError, StreamClosedError
from ingress.serving.http.client import Client
from ingress.serving.http.reply_state import (
    HEARD,
    LATE,
    SLOT,
    TOLD,
    Action,
    ReplyEvent,
    ReplyState,
)
from ingress.serving.replicas.router import Router
from ingress.serving.replicas.user_code import UserCode


class ServerSide(Protocol):
    """The server's side of a request, as user code's side sees it: a `Reply`.

    Thread-safe: `client`, `post` and `stop`. The other methods belong to the HTTP loop, which gets
    them by `post` or its mailbox.
    """

    loop: asyncio.AbstractEventLoop
    mailbox: Mailbox
    router: Router
    task: asyncio.Task[Any] | None
    first: Message | None
    state: ReplyState
    is_http: bool

    @property
    def is_stream(self) -> bool: ...

    def client(self) -> Client: ...

    def disconnect(self, code: int) -> None: ...

    def post(self, callback: Callable[..., Any], *args: Any) -> None: ...

    def stop(self, error: RayServeException) -> None: ...

    def on(self, event: ReplyEvent, subject: Any = None) -> tuple[Action, ...]: ...

    def pump(self) -> None: ...

    def complete(self, start: Message, body: Message) -> None: ...

    def open(self, outbound: Channel[Message]) -> None: ...

    async def pass_on(self, message: Message) -> None: ...

    async def send_response(self, start: Message, body: Message) -> None: ...

    def close(self) -> None: ...


class HTTPWork(Work):
    """The work of a request or a WebSocket. Owned by the user loop.

    reply       the HTTP loop's side; what it gets from another loop is posted
    route_label the route that the request is counted under, once its code has ended
    answered_at written by the HTTP loop
    """

    __slots__ = (
        "_first", "_has_body", "_is_pumping", "_kind", "_method", "_outbound", "_sent", "_start",
        "_template", "answered_at", "ends_with_client", "has_answer", "is_heard", "is_listening",
        "reply", "route_label", "scope", "streamed_at",
    )  # fmt: skip

    def __init__(self, reply: ServerSide, scope: Scope, route: str) -> None:
        self.reply = reply
        self.scope: Scope = scope
        self.route_label = route
        self.has_answer = self.is_heard = self.is_listening = self.ends_with_client = False
        self.streamed_at = self.answered_at = 0.0
        self._outbound: Channel[Message] | None = None
        self._template = self._kind = self._method = ""

    @property
    def is_unread(self) -> bool:  # type: ignore[override]
        return self.reply.first is None

    def __call__(self, user_code: UserCode) -> Awaitable[None]:
        """Serve the request with user code, in a task on the user loop."""
        reply = self.reply
        # Anew on each replica: the one before may have ended before it began.
        self._first = reply.first
        self._is_pumping = False
        self._start: Message | None = None
        self._sent = 0
        # Not `reply.call`. Race with the HTTP loop, which cuts a call that is about to begin: the
        # reply may have left already.
        runner = CURRENT_CALL.get().runner
        assert runner is not None
        send = self.send_here if runner.loop is reply.loop else self.send
        return user_code.http(self.scope, self.receive, send)

    # Messages.

    async def receive(self) -> Message:
        if self.has_answer:
            return {"type": "http.disconnect"}  # as uvicorn
        if self._first is not None:
            message, self._first = self._first, None
            return message
        if not self._is_pumping:
            self._is_pumping = True
            first = self.reply.first
            self._has_body = first is not None and not first.get("more_body")
            self.reply.post(self.reply.pump)
        self.is_listening = self._has_body  # what may come is the disconnect
        message = await self.reply.client().take()
        if message["type"].endswith(".disconnect"):
            self.is_heard = True
        elif message["type"] == "http.request":
            self._has_body = not message.get("more_body")
        return message

    async def send(self, message: Message) -> None:
        """Send a message from another loop than the server's."""
        if self._outbound is None and message["type"] == "http.response.start":
            self._start = message
            if not message.get("trailers"):  # as `_has_length`, whose call would cost every request
                for name, _ in message.get("headers", ()):
                    if name == b"content-length":
                        return
            await self._stream()  # the body may take a while, the client wants the start
            return
        # Copied: user code may change it before the HTTP loop sends it. Here, for most, in 0.1 us.
        message = {**message} if type(message.get("body")) is bytes else with_bytes(message)
        if self._outbound is None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                if self._start is None:
                    raise RuntimeError("'http.response.body' was sent before 'http.response.start'")
                self.reply.mailbox.post(self.reply.complete, self._start, message)
                self._start = None
                self.has_answer = True
                if self._is_pumping:  # as `note_answer`, whose call would cost every request
                    self.reply.post(self.reply.disconnect, NORMAL)
                return
            await self._stream()
        elif message["type"] == "websocket.http.response.start":
            # As uvicorn, whose error would come on the HTTP loop, where no handler is.
            raise RuntimeError(
                "Expected ASGI message 'websocket.send' or 'websocket.close', but got "
                "'websocket.http.response.start'."
            )
        assert self._outbound is not None
        try:
            if self.ends_with_client and self.reply.state is TOLD:
                raise StreamClosedError("the client of this request has disconnected")
            await self._outbound.put(message, size_of(message))
        except StreamClosedError:
            await self._hear()
            raise
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.note_answer()

    async def _hear(self) -> None:
        """Note that user code is told that the client is gone, by the error that `send` raises."""
        self.is_heard = True
        # A cancellation that has waited for a thread of AnyIO's comes here. It must not come in the
        # middle of the clean-up: the file of a `FileResponse` would stay open.
        await asyncio.sleep(0)

    def note_answer(self) -> None:
        self.has_answer = True
        if self._is_pumping:  # a `receive` that waits reports the disconnect
            self.reply.post(self.reply.disconnect, NORMAL)

    def note_stream(self, *, ends_with_client: bool) -> None:
        self.ends_with_client = ends_with_client

    async def _stream(self) -> None:
        """Send the response message by message from now on."""
        self._note_begin()
        self._outbound = channel_for(is_http=self.reply.is_http, max_bytes=RESPONSE_BYTES)
        if self._start is not None:
            await self._outbound.put(self._start)
        self.reply.mailbox.post(self.reply.open, self._outbound)

    def _note_begin(self) -> None:
        self.streamed_at = monotonic()
        # Race with a client that leaves at its first item: an application listens from then on.
        self.is_listening = self.is_listening or not self.ends_with_client

    async def send_here(self, message: Message) -> None:
        """Send a message on the server's own loop."""
        reply = self.reply
        # An application that is told may send on, as under uvicorn, which drops that.
        if reply.state >= TOLD and (reply.state is not TOLD or self.ends_with_client):
            await self._hear()
            raise StreamClosedError("the client of this request has disconnected")
        if type(message.get("body")) is not bytes and message["type"] != "http.response.start":
            message = with_bytes(message)  # for a server that sends later, or that is a test client
        if message.get("more_body") or message["type"] == "websocket.send":
            reply.pump()
            self._sent += 1
            # A server need not suspend it. uvicorn drops what is written to a connection that
            # failed, and the loop must turn before uvicorn hears of the failure.
            if self._sent % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        elif message["type"] == "http.response.body":
            self.note_answer()
        if message["type"] == "http.response.start" and _has_length(message):
            self._start = message  # kept: an error before the body can still be answered as one
        else:
            start, self._start = self._start, None
            try:
                if start is None:
                    if not self.streamed_at:
                        self._note_begin()
                    await reply.pass_on(message)
                else:
                    await reply.send_response(start, message)
            except OSError:
                reply.on(HEARD)
                raise

    # The call.

    def start(self, call: Call, runner: Runner) -> None:
        call.runner = runner
        reply = self.reply
        if reply.task is None and runner.loop is reply.loop:
            reply.post(reply.on, SLOT, (call, runner))
        elif GIL_PRESSURE.is_high:
            # By way of the HTTP loop, which then has turns between two calls that compute.
            # Otherwise N computing threads start each other's calls, and it has one turn in N.
            reply.post(self._submit_after, TURNS if runner.is_computing else 0, call, runner)
        else:
            runner.submit(call)

    def _submit_after(self, turns: int, call: Call, runner: Runner) -> None:
        """Give the call to its replica after so many turns of the HTTP loop, or `TURNS_S`."""
        if turns and monotonic() - call.assigned_at < TURNS_S:
            self.reply.loop.call_soon(self._submit_after, turns - 1, call, runner)
        else:
            runner.submit(call)

    def deadline(self, call: Call) -> float | None:
        """Return `None` for a background task, and for a WebSocket: as on Ray, it has none."""
        return None if self.has_answer or not self.reply.is_http else call.metadata.deadline

    def expire(self, call: Call) -> None:
        """Answer that the deadline has passed, or cut a response that has begun. Thread-safe."""
        self.reply.post(self.reply.on, LATE, call.timeout_error())

    def interrupt(self) -> None:
        self.reply.post(self.reply.close)

    def hear(self, *, is_heard: bool) -> None:
        self.is_heard = is_heard

    def give_up(self, call: Call, error: RayServeException) -> None:
        reply = self.reply
        if not self.reply.is_http and reply.is_stream:  # else it is refused, with the error
            reply.post(reply.disconnect, SERVICE_RESTART)
        if not self.reply.is_http or not self.has_answer:  # else only a background task is left
            reply.stop(error)
            if self._outbound is not None:  # its loop is stuck, and cannot end it
                self._outbound.finish()

    def end(self, call: Call, failure: BaseException | None) -> str:
        """Drop the scope and end the stream, because user code has ended.

        Every copy of the request's context holds the call, also that of the server's keep-alive
        timer, and must not hold what frameworks keep in a scope.
        """
        # For the counts of the replica and of the server.
        self.route_label = self.reply.router.templates.label(self.scope, call.metadata.route)
        self._method = self.scope.get("method", "WS")
        if failure is not None or call.is_interrupted:
            self.route(call)  # kept for the log record
            if self.reply.state is TOLD:  # it has ended by itself
                call.settle(error=RequestCancelledError(call.metadata.request_id))
        if call.metadata.deadline is not None:
            self.kind(call)  # kept for the estimate of later calls of this kind
        self.scope, call.context = {}, NO_CONTEXT
        if self._outbound is not None:
            self._outbound.finish()
        return self.route_label

    # Names.

    def label(self, call: Call) -> str:
        """Return the route that the request is counted under, also before an endpoint sees it.

        Thread-safe. Race with the user loop, which drops the scope when its code has ended.
        """
        scope, route = self.scope, call.metadata.route
        return self.reply.router.templates.label(scope, route) if scope else self.route_label

    def route(self, call: Call) -> str:
        """Return the prefix, with the endpoint's path template once found. Thread-safe."""
        if not self._template and (found := route_below(call.metadata.route, self.scope)):
            self._template = found
        return self._template or call.metadata.route

    def kind(self, call: Call) -> str:
        """Return the HTTP method and the path template, also before the route is found."""
        if not self._kind and "method" in self.scope:
            self._kind = f"{self.scope['method']} {self.reply.router.templates.find(self.scope)}"
        return self._kind

    def title(self, call: Call) -> str:
        """Return the HTTP method and the template, also before the route is found. Thread-safe."""
        if self._method:  # user code has ended, and the scope is gone
            return f"{self._method} {self.route_label}"
        return f"{self.scope.get('method', 'WS')} {self.label(call)}"


def _has_length(start: Message) -> bool:
    """Return whether the body follows the start at once, so that both can be sent together."""
    if start.get("trailers"):
        return False  # they follow the body
    for name, _ in start.get("headers", ()):  # noqa: SIM110 - a generator costs 0.3 us
        if name == b"content-length":
            return True
    return False
