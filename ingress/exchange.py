"""One HTTP request or WebSocket between the server's loop and the replica's.

    the server's loop                                the user loop
    respond()  <-- complete response: one post ----- Bridge.send()     start and body together
               <-- Channel ------------------------- Bridge.send()     a stream, item by item
    _pump()    --- Channel ------------------------> Bridge.receive()  body, messages, disconnect

If both are the same loop nothing crosses: `respond` runs the call in the server's own task, and
`send` and `receive` go straight to the server. With a deadline the call has a task of its own even
then: the server's must be free to answer on time, while a thread runs on.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect

from ingress.asgi import route_template
from ingress.bridge import Bridge
from ingress.call import Call, Runner
from ingress.channel import YIELD_EVERY, Channel, EndOfStream
from ingress.exceptions import (
    DeploymentUnavailableError,
    RequestCancelledError,
    StreamClosedError,
)
from ingress.loops import mailbox_of, running_loop
from ingress.messages import INTERNAL_ERROR, NORMAL, channel_for, joined, size_of
from ingress.peer import has_left
from ingress.router import Router
from ingress.types import RequestMetadata
from ingress.user_code import UserCode

# How long the handler of a WebSocket whose client is gone may take, to notice and to clean up.
HEARING_S = 0.25
CLEANUP_S = 5.0
_TOLD = (WebSocketDisconnect, StreamClosedError, RequestCancelledError)
_NO_BODY: Message = {"type": "http.request", "body": b"", "more_body": False}


class Exchange(Call):
    """A request's call, as the server's loop sees it; what runs elsewhere is in `Bridge`.

    Every field below belongs to the server's loop. Other threads reach it by `_post` only, in
    order: a response is there before the end of its call.
    """

    # No slots: what most requests never need stays in the class.
    started = False
    has_answer = False  # all of it has left user code on a loop of its own
    _event: asyncio.Future[None] | None = None
    _assigned_here = False
    _ended = False
    _response: tuple[Message, Message] | None = None
    _inbound: Channel | None = None
    _outbound: Channel | None = None
    _is_forwarding = False
    _pump_task: asyncio.Task[None] | None = None
    _pump_waits = False
    _disconnected = False
    _is_complete = False
    _is_closed = False
    _is_stopped = False
    _is_cut = False
    _task: asyncio.Task[Any] | None = None
    _is_accepted = False
    is_heard = False
    _told: int | None = None
    _goodbye: Message | None = None
    _has_left = False
    _template = ""
    _chunks = 0

    def __init__(
        self,
        metadata: RequestMetadata,
        router: Router,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        has_body: bool,
    ) -> None:
        super().__init__(metadata, self._work, copy_context())
        self.router = router
        self.scope = scope
        self.is_http = scope["type"] == "http"
        self._receive = receive
        self._send = send
        self._has_body = has_body
        self.loop = asyncio.get_running_loop()
        self._first: Message | None = _NO_BODY if self.is_http else None
        self._expects_more = has_body or not self.is_http

    @property
    def inbound(self) -> Channel:
        """What the client sends, for user code. Made at first use, which may be on either loop."""
        if self._inbound is None:
            with self._lock:
                if self._inbound is None:
                    self._inbound = channel_for(is_http=self.is_http)
        return self._inbound

    @property
    def is_stream(self) -> bool:
        """Whether the answer has begun and has no known end: a stream or a WebSocket."""
        return self.started and not self._is_complete

    @property
    def deadline(self) -> float | None:
        """What its children have to keep to; not those of a WebSocket, nor of a background task."""
        has_none = self.has_answer or self._is_complete or not self.is_http
        return None if has_none else self.metadata.deadline

    async def respond(self) -> None:
        """Have the request served and send the answer. Raises what the call failed with."""
        if self.metadata.deadline is not None:
            self._task = asyncio.current_task()
        try:
            if self._has_body:
                # Before it takes a slot: a slow upload must not hold one.
                self._first = await self._receive()
                if self._first["type"] == "http.disconnect":
                    self._disconnected = True
                    self.cancel()
                    return
                self._expects_more = bool(self._first.get("more_body"))
            self.router.assign(self)
            await self._answer()
        except asyncio.CancelledError:
            self.cancel()
            if self._is_cut:
                assert self._task is not None
                if self._task.uncancel():  # not only us
                    raise
            elif not self._disconnected and not self._is_stopped:  # else it was us who cancelled
                raise
        except BaseException as error:
            # The server refused a message. It is not the work that failed, so that must be ended.
            self._disconnected = isinstance(error, OSError)
            self.cancel()
            if not self._disconnected:
                raise
        finally:
            self._has_left = True
            if self._assigned_here and self.runner is not None:
                self.runner.release(self)  # it was given a slot, and cancelled before it resumed
            if self._pump_task is not None:
                self._pump_task.cancel()
        failure = self.error
        if self.is_http:
            if self._disconnected:
                return
        else:
            if isinstance(failure, _TOLD) and (self._disconnected or self._told is not None):
                failure = None  # what it made of being told, or that it did not listen
            if self._is_accepted and not self._is_complete and not self._disconnected:
                await self._close_websocket(failure)
        if self._is_stopped and not self._is_cut and isinstance(failure, RequestCancelledError):
            if self._is_complete:
                return  # it was a background task
            raise DeploymentUnavailableError(
                f"{self.metadata.deployment} was stopped before it answered; send the request "
                "again if that is safe."
            )
        if failure is not None:
            raise failure
        if self._is_cut:  # the work has ended, its answer was on the way
            raise self._timeout()

    async def again(self, error: Exception) -> Exchange | None:
        """Return the next attempt, after a pause, or `None` if this failure is final."""
        return None

    async def _close_websocket(self, error: BaseException | None) -> None:
        """Close what user code left open."""
        code = self._told or (NORMAL if error is None else INTERNAL_ERROR)
        try:
            await self._send({"type": "websocket.close", "code": code})
        except OSError:
            pass  # the client was quicker

    async def _answer(self) -> None:
        """Send what comes from the replica until the call has ended."""
        while True:
            if self._assigned_here:
                self._assigned_here = False
                await self._serve_here()
            elif self._response is not None:
                (start, body), self._response = self._response, None
                await self._send(self._begun(start))
                self._is_complete = True
                await self._send(body)
            elif self._outbound is not None and not self._is_forwarding:
                self._is_forwarding = True
                await self._forward(self._outbound)
            elif self._ended:
                return
            else:
                self._event = self.loop.create_future()
                await self._event

    def start(self, runner: Runner) -> None:
        """Begin on the replica whose slot it was given. Thread-safe; once for each slot."""
        self.runner = runner
        if self._task is None and runner.loop is self.loop:
            self._post(self._assign_here)
        else:
            runner.submit(self)

    def current_route(self) -> str:
        """Return prefix and path template of the endpoint, once that is found. Thread-safe."""
        if not self._template:
            path = route_template(self.scope)
            if path is None:
                return self.metadata.route
            self._template = self.metadata.route.rstrip("/") + path
        return self._template

    def tell(self, code: int) -> None:
        """Let user code see its client as gone, because the application stops. Thread-safe.

        `code` is what a WebSocket is closed with.
        """
        self._post(self._tell, code)

    def stop(self) -> None:
        """Cancel it, because the application stops. Thread-safe."""
        self._is_stopped = True
        self.cancel()

    def expire(self) -> None:
        """Answer that its deadline has passed, or cut what has begun. Thread-safe."""
        self._post(self._expire)

    def _expire(self) -> None:
        # A response that is complete was in time. A WebSocket that was accepted has no deadline,
        # as in Ray.
        if self._is_complete or self._has_left or (self.started and not self.is_http):
            return
        assert self._task is not None
        self._is_cut = True
        # It may wait for the body, for the client to take a chunk, or for the call's end.
        self._task.cancel()
        super().expire()

    def _post(self, callback: Any, *args: Any) -> None:
        if running_loop() is self.loop:
            callback(*args)
        else:
            mailbox_of(self.loop).post(callback, *args)

    def _wake(self) -> None:
        if self._event is not None and not self._event.done():
            self._event.set_result(None)

    def _assign_here(self) -> None:
        if self._has_left and self.runner is not None:
            self.runner.release(self)
            return
        self._assigned_here = True
        self._wake()

    def settle(self, value: Any = None, error: BaseException | None = None) -> bool:
        if not super().settle(value, error):
            return False
        self._post(self._end)
        return True

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def complete(self, start: Message, body: Message) -> None:
        self._response = start, body
        self._wake()

    def open(self, outbound: Channel) -> None:
        self._outbound = outbound
        if self._is_closed:
            outbound.close()
        # A stream's client may leave at any time: read on from the server to notice.
        self.pump()
        self._wake()

    def _begun(self, message: Message) -> Message:
        """Return the start of a response, with the request's id among its headers."""
        self.started = True
        headers = list(message.get("headers", ()))
        for name, _ in headers:
            if name == b"x-request-id":
                break
        else:
            headers.append((b"x-request-id", self.metadata.request_id.encode()))
        return {**message, "headers": headers}

    async def _forward(self, outbound: Channel) -> None:
        """Send a stream, message by message, at the client's pace."""
        while True:
            try:
                messages = await outbound.get_many()
            except EndOfStream:
                return
            try:
                for message in joined(messages):
                    await self._pass_on(message)
            except OSError:
                if self.is_http:
                    raise
                self._on_disconnect()  # its handler hears of it when it sends or receives

    async def _pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._send(self._begun(message))
            return
        self.started = True
        if message["type"] == "websocket.accept":
            self._is_accepted = True
        self._is_complete = (
            not message.get("more_body") if self.is_http else message["type"] == "websocket.close"
        )
        await self._send(message)

    # Watching for what the client sends.

    def watch(self) -> None:
        """See whether the client has left. Called again and again while the request runs."""
        if self._pump_waits and has_left(self._receive):
            self._on_disconnect()
        else:
            self.pump()

    def pump(self) -> None:
        """Begin to read from the server: for user code, and to see the client leave."""
        if self._pump_task is None and not self._ended:
            self._pump_task = self.loop.create_task(self._pump())

    async def _pump(self) -> None:
        """Pass on what the server receives, as fast as user code takes it."""
        while True:
            message = await self._receive()
            if message["type"].endswith(".disconnect"):
                break
            if self._expects_more:
                self._pump_waits = self.is_http
                await self.inbound.put(message, size_of(message))
                self._pump_waits = False
        self._goodbye = message
        self.inbound.finish()
        self._on_disconnect()

    def _on_disconnect(self) -> None:
        """Stop a request whose client is gone; what runs after the response runs on."""
        if self._ended or self._is_complete or self._disconnected:
            return
        self._disconnected = self.is_interrupted = True
        if self.is_http:
            self.cancel()
        else:
            self._close()
            self.loop.call_later(HEARING_S, self._cancel_unless_heard)

    def interrupt(self) -> None:
        super().interrupt()
        # Not before: user code whose `send` failed cleans up, and its cancellation must not come
        # in the middle of that.
        self._post(self._close)

    def _close(self) -> None:
        """Have what user code sends from now on fail."""
        self._is_closed = True
        if self._outbound is not None:
            self._outbound.close()

    def _cancel_unless_heard(self) -> None:
        """Cancel the handler of a WebSocket that goes on as if its client were there.

        Race with one that hears of it on its own loop just now: it is cancelled while it cleans up,
        as the handler of a request always is.
        """
        if not self._ended:
            if self.is_heard:
                self.loop.call_later(CLEANUP_S, self.cancel)
            else:
                self.cancel()

    def _tell(self, code: int) -> None:
        if self._told is None and not self._ended:
            self._told = code
            self.pump()
            assert self._pump_task is not None
            self._pump_task.cancel()
            self.inbound.finish()

    async def take(self) -> Message:
        """Return the next message for user code; at the end that the client is gone, for ever."""
        try:
            return await self.inbound.get()  # type: ignore[no-any-return]
        except EndOfStream:
            self.is_heard = True
            if self.is_http:
                return {"type": "http.disconnect"}
            if self._goodbye is not None:
                return self._goodbye
            return {"type": "websocket.disconnect", "code": self._told, "reason": ""}

    # Serving on this very loop.

    async def _serve_here(self) -> None:
        assert self.runner is not None
        if not self.runner.admit(self):
            return
        try:
            await self.runner.serve(self)
        except asyncio.CancelledError:
            # Us, the server, or the replica, which ends and cancels whatever task its calls run in.
            if not self.runner.is_ending or not self.settle(error=self.runner.gone()):
                raise
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel():
                raise  # not only the replica
        except Exception as error:
            self.settle(error=error)
        else:
            self.settle()

    async def _send_here(self, message: Message) -> None:
        if self._disconnected or self._has_left:
            self.is_heard = True
            raise StreamClosedError("the client of this request is gone")
        if message.get("more_body"):
            self.pump()
            self._chunks += 1
            if self._chunks % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        await self._pass_on(message)

    async def _receive_here(self) -> Message:
        if self._first is not None:
            message, self._first = self._first, None
            return message
        self.pump()
        return await self.take()

    # The user's side.

    async def _work(self, user_code: UserCode) -> None:
        """What the replica runs, in a task on its loop."""
        bridge = None
        try:
            if running_loop() is self.loop:
                await user_code.http(self.scope, self._receive_here, self._send_here)
                return
            bridge = Bridge(self, mailbox_of(self.loop), self._first)
            await user_code.http(self.scope, bridge.receive, bridge.send)
        finally:
            # Let go of: whatever copies the context of the request holds its call, as the server's
            # keep-alive timer does, and must not hold all that frameworks keep in a scope.
            self.scope = {}
            if bridge is not None:
                bridge.finish()
