"""One request on the HTTP loop: its call is submitted, and the response is sent.

    the HTTP loop                                  the user loop: `HTTPWork`
    respond()  <-- complete response: one post --  send()     start and body together
               <-- Channel ----------------------  send()     a stream, item by item
    Client     --- Channel --------------------->  receive()  body, messages, disconnect

If both are the same loop, nothing crosses threads: `respond` runs the call in the server's task. A
call with a deadline has a task of its own even then: the server's task must be free to answer on
time while a worker thread runs on.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from contextvars import copy_context
from threading import get_ident
from time import monotonic
from typing import Any, Protocol

import anyio
from starlette.types import Message, Receive, Scope, Send

from ingress.app.asgi.chunks import parts_of
from ingress.core.base.counters import CLIENT_LEFT, LATENCY_BUCKETS_MS
from ingress.core.base.settings import HTTPLimits
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.core.calls.call import NO_CONTEXT, NO_WORK, Call, Runner
from ingress.core.calls.channel import Channel, EndOfStream
from ingress.core.calls.loops import mailbox_of
from ingress.core.calls.tracing import TRACING, note_exemplar
from ingress.exceptions import (
    DeploymentUnavailableError,
    RayServeException,
    RequestTimeoutError,
)
from ingress.serving.http.access import AccessLine, note_call
from ingress.serving.http.asgi_messages import gathered, with_request_id
from ingress.serving.http.body import NO_BODY, NO_LIMITS, Body
from ingress.serving.http.client import Client
from ingress.serving.http.reply_state import (
    CALLED,
    COMPLETE,
    CUT,
    GONE,
    LEFT,
    READING,
    STARTED,
    ReplyState,
)
from ingress.serving.http.request_head import content_length
from ingress.serving.http.stream_turns import LARGE, stream_turns
from ingress.serving.http.uvicorn_connection import has_left, send_chunks, transport_of
from ingress.serving.http.work import HTTPWork
from ingress.serving.replicas.ended_calls import keep
from ingress.serving.replicas.router import Router


class Retries(Protocol):
    """The attempts at one request, as one of them sees them."""

    async def again(self, failed: Reply, error: Exception) -> Reply | None: ...


class Reply:
    """The HTTP loop's side of one request or WebSocket. Owned by that loop.

    Other threads call in by `post` only, in order: a response arrives before the end of its call.
    `HTTPReply` and `WebSocketReply` say how messages are sent, and what the client's disconnect
    means.

        call, work   the call, and the user loop's side
        state        see `ReplyState`
        status       of the response; 0 until it begins. 101 for a WebSocket that was accepted
        body         the body of the request, `None` if there is none
        first        the first message of the client, `None` if that is yet to come
        cut_by       the error of its own that ended it: its deadline, its body
        stopped_by   the error with which the application has stopped it
        streamed_at  when the response began to be streamed; 0 if it did not
        answered_at  when the answer to a request with a deadline was sent; 0 if at its work's end
        task         the server's, if the call must not run in it; else `None`

    `has_body` is true if the server may have a body: the first message says so. If `None`, only
    user code reads that message. Without `reads_ahead`, too: the client sends its body once it is
    asked for, and an endpoint may refuse it.
    """

    is_http = True
    __slots__ = (
        "_answer", "_client", "_event", "_expects_more", "_is_over", "_outbound", "_reads_ahead",
        "_receive", "_runner", "_send", "_stream", "answered_at", "attempts", "body", "call",
        "cut_by", "first", "loop", "mailbox", "router", "state", "status", "stopped_by",
        "streamed_at", "task", "thread", "work",
    )  # fmt: skip

    def __init__(
        self,
        metadata: RequestMetadata,
        router: Router,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        has_body: bool | None = False,
        reads_ahead: bool = True,
        limits: HTTPLimits = NO_LIMITS,
    ) -> None:
        self.router = router
        self.work = HTTPWork(self, scope, metadata.route)
        self.call = Call(metadata, self.work, copy_context(), None, self._on_settled)
        self.body: Body | None = None
        if has_body is not False and self.is_http:
            self.body = Body(receive, limits, content_length(scope), is_open=bool(has_body))
            receive = self.body.receive
        self._reads_ahead = reads_ahead and bool(has_body)
        self._receive = receive
        self._send = send
        self.loop = loop = asyncio.get_running_loop()
        self.thread = get_ident()
        self.mailbox = mailbox_of(loop)
        self._expects_more = has_body is not False or not self.is_http
        self.first: Message | None = None if self._expects_more else NO_BODY
        self.state = READING
        self.status = 0
        self.attempts: Retries | None = None
        self.cut_by: RayServeException | None = None
        self.stopped_by: RayServeException | None = None
        self.streamed_at = self.answered_at = 0.0
        # What has come from the replica: a complete response, a stream, or, on the HTTP loop
        # itself, the slot to run in; then the end of the call.
        self._answer: tuple[Message, Message] | None = None
        self._stream: Channel[Message] | None = None
        self._runner: Runner | None = None
        self._is_over = False
        self._outbound: Channel[Message] | None = None  # the stream, to end or close it
        self._event: asyncio.Future[None] | None = None
        self._client: Client | None = None
        self.task: asyncio.Task[Any] | None = None

    def client(self) -> Client:
        """Return the reader of the client's messages, on either loop. Few requests need it."""
        if self._client is None:
            with self.call.lock:
                if self._client is None:
                    self._client = Client(
                        self._receive,
                        is_http=self.is_http,
                        passes_on=self._expects_more,
                        on_gone=self._on_disconnect,
                    )
        return self._client

    @property
    def is_stream(self) -> bool:
        """Return whether the response has begun and is not complete: a stream or a WebSocket."""
        return self.status != 0 and self.state is not COMPLETE

    # The call.

    async def respond(self) -> None:
        """Read the body, submit the call and send the response. Raises the error of the call."""
        call, body = self.call, self.body
        if body is not None or call.metadata.deadline is not None:
            self.task = asyncio.current_task()
        try:
            if body is not None:
                await self._read_ahead(body)
            self.state = CALLED
            self.router.assign(call)
            while True:
                if (answer := self._answer) is not None:
                    self._answer = None
                    await self.send_response(*answer)
                    if call.settled:
                        break
                    call.when_settled(self._post_end)
                elif (stream := self._stream) is not None:
                    self._stream = None
                    await self.forward(stream)
                    call.when_settled(self._post_end)
                elif (runner := self._runner) is not None:
                    self._runner = None
                    await self._serve_on(runner)
                elif self._is_over:
                    break
                else:
                    self._event = self.loop.create_future()
                    await self._event
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            if not (is_cancelled and await self.ends_by_itself()) and self._cancel(error):
                if is_cancelled:
                    await self._work_ended()
                raise
        finally:
            state, self.state = self.state, LEFT
            if self._runner is not None:
                self._runner.release(call)  # cancelled after it got a slot, before it began
            if self._client is not None:
                self._client.stop()
        if call.error is not None or self.cut_by is not None or not self.is_http:
            await self.conclude(state)

    def _cancel(self, error: BaseException) -> bool:
        """Cancel the call, because `respond` failed, or was cancelled.

        Returns whether the error must be raised.
        """
        if isinstance(error, OSError):  # the server refused a message
            self.state = GONE
        # After the complete answer a server that cancels means the background task.
        self.call.cancel(self._stop_error() if self.state is COMPLETE else None)
        if self.state is CUT and isinstance(error, asyncio.CancelledError):
            assert self.task is not None
            return self.task.uncancel() > 0  # the server has cancelled it too
        # Otherwise `Call.cancel` has cancelled the task; or reading the body failed, not the work.
        return not (
            self.state is GONE
            or (self.stopped_by is not None and isinstance(error, asyncio.CancelledError))
        )

    async def _work_ended(self) -> None:
        """Wait until user code has cleaned up, `graceful_shutdown_timeout_s` at most.

        The server's task was cancelled. Shielded, because a cancelled AnyIO scope cancels again on
        every turn of the loop. A second cancellation by the server ends the wait.
        """
        call = self.call
        if call.runner is None:
            return
        ended = self.loop.create_future()

        def note() -> None:
            if not ended.done():  # the wait may have ended first
                ended.set_result(None)

        call.runner.when_ended(call, lambda: self.mailbox.post(note))
        with anyio.move_on_after(self.router.graceful_shutdown_timeout_s, shield=True):
            await ended

    async def _read_ahead(self, body: Body) -> None:
        if self._reads_ahead:
            # Before the call takes a slot: a slow upload must not hold one.
            self.first = await body.read_ahead()
            self._expects_more = body.is_open
        elif body.error is not None:
            raise body.error
        if type(self._send) is AccessLine:
            self._send.queued_at = monotonic()
        if not (body.is_open or body.may_be_too_large) and self.call.metadata.deadline is None:
            self.task = None  # the call may run in the server's task

    async def ends_by_itself(self) -> bool:
        """Return whether the call has ended although the server's task was cancelled."""
        return False

    async def conclude(self, state: ReplyState) -> None:
        """Raise the error that the client has yet to be told. `state` is the one before LEFT."""
        raise NotImplementedError

    def failure(self, error: BaseException | None, state: ReplyState) -> BaseException | None:
        """Return the error to raise in the end, `None` if there is none, or the client has it."""
        if error is None:
            error = self.cut_by  # the work had ended, its response was still being sent
        # A stop of a complete response has cancelled a background task.
        return None if state is COMPLETE and error is self.stopped_by else error

    def was_ended_by(self, error: Exception) -> bool:
        """Return whether `error` comes from `_cut` or from the stop of the application.

        Neither is a fault of user code.
        """
        cause = self.cut_by or self.stopped_by
        return cause is not None and isinstance(error, type(cause))

    def _on_settled(self, call: Call) -> None:
        """Note the end of the call, in any thread.

        Most calls end right after their answer was posted: then `respond` finds them settled, and
        needs no other post. Race with that look: if it comes first, `respond` asks by
        `when_settled`, under the call's lock, to be told of the end.
        """
        runner = call.runner
        if not (
            call.error is None
            and call.work.has_answer  # not `self.work`: `respond` may have left already
            and self.is_http
            and runner is not None
            and runner.loop is not self.loop
        ):
            self.post(self._end)

    def _post_end(self, _: Call) -> None:
        self.post(self._end)

    def _end(self) -> None:
        self._is_over = True
        if (event := self._event) is not None and not event.done():  # as `wake`
            event.set_result(None)

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` on the HTTP loop, at once if that is where this runs. Thread-safe."""
        if get_ident() == self.thread and self.loop.is_running():  # as `runs_here`
            callback(*args)
        else:
            self.mailbox.post(callback, *args)

    def wake(self) -> None:
        if self._event is not None and not self._event.done():
            self._event.set_result(None)

    # Its end by others.

    def disconnect(self, code: int) -> None:
        """Tell user code that its client is gone, because the application stops. Thread-safe.

        `code` is the close code of a WebSocket.
        """
        self.post(self._disconnect, code)

    def _disconnect(self, code: int) -> None:
        if not (self._is_over or self.state is LEFT):
            self.client().end(code)

    def stop(self, error: RayServeException | None = None) -> None:
        """Cancel the call with an error, by default because the application stops. Thread-safe."""
        if self.stopped_by is None:
            self.stopped_by = error or self._stop_error()
        self.call.cancel(self.stopped_by)

    def _stop_error(self) -> DeploymentUnavailableError:
        return DeploymentUnavailableError(
            f"{self.call.metadata.deployment} was stopped before it answered; send the request "
            "again if that is safe."
        )

    def end_stream(self) -> None:
        """End a stream or a WebSocket whose user loop is stuck, and cannot do so itself."""
        if self._outbound is not None:
            self._outbound.finish()

    def abort(self) -> None:
        """Drop the connection if its client does not take what was sent to it. Thread-safe."""
        self.post(self._abort)

    def _abort(self) -> None:
        transport = transport_of(self._receive)
        if transport is not None and transport.get_write_buffer_size():
            transport.abort()

    def cut_late(self) -> None:
        """Cut the request, because its deadline has passed."""
        if self.state < COMPLETE:
            self._cut(self.call.timeout_error())

    def _cut(self, error: RayServeException) -> None:
        """End the request with this error, unless it is complete or over."""
        if self.state >= COMPLETE:
            return
        assert self.task is not None
        self.state = CUT
        self.cut_by = error
        # The task may wait for the body, for the client to take a chunk, or for the call's end.
        self.task.cancel()
        if self.call.cancel(error) and type(error) is RequestTimeoutError:  # not of the body
            self.router.note_expired()

    # From the replica, on the HTTP loop.

    def complete(self, start: Message, body: Message) -> None:
        """Take a complete response."""
        self._answer = start, body
        if (event := self._event) is not None and not event.done():  # as `wake`
            event.set_result(None)

    def open(self, outbound: Channel[Message]) -> None:
        """Take a stream, or the messages of a WebSocket."""
        self.streamed_at = monotonic()
        if self._outbound is _CLOSED:
            outbound.close()
        self._outbound = self._stream = outbound
        # The client of a stream may leave at any time: read on from the server to notice it.
        self.pump()
        self.wake()

    def close(self) -> None:
        """Make every later `send` of user code fail."""
        if self._outbound is None:
            self._outbound = _CLOSED
        else:
            self._outbound.close()

    def serve_on(self, call: Call, runner: Runner) -> None:
        """Take a slot of a replica on this loop, to run the call in the server's task."""
        if self.state is LEFT:
            runner.release(call)
            return
        self._runner = runner
        self.wake()

    async def _serve_on(self, runner: Runner) -> None:
        call = self.call
        if not runner.admit(call):
            return
        try:
            await runner.serve(call)
        except asyncio.CancelledError:
            # Cancelled by `cancel`, by the server, or by the replica: when it ends, it cancels the
            # tasks that its calls run in, here the server's.
            if not runner.is_ending or not call.settle(error=runner.gone_error()):
                raise
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel():
                raise  # not by the replica alone
        except Exception as error:  # of user code: the client gets a 500
            runner.fail(call, error)
        else:
            call.settle()

    # To the client.

    async def forward(self, outbound: Channel[Message]) -> None:
        """Send the messages of a stream, at the client's pace."""
        raise NotImplementedError

    async def pass_on(self, message: Message) -> None:
        """Send one message of a response to the client."""
        raise NotImplementedError

    async def send_response(self, start: Message, body: Message) -> None:
        """Send the start of a response, and its body or the first part of its body."""
        self.status = start["status"]
        if self.state is CALLED:
            self.state = STARTED
        await self._send(with_request_id(start, self.call.metadata.request_id))
        if not body.get("more_body"):
            if self.state is STARTED:  # as `note_complete`
                self.state = COMPLETE
            if self.call.metadata.deadline is not None:
                self.answered_at = monotonic()
        await self._send(body)

    def note_start(self, status: int) -> None:
        """Note that the client gets the first message of a response."""
        self.status = self.status or status
        if self.state is CALLED:
            self.state = STARTED

    def note_complete(self) -> None:
        """Note that the client gets the last message of a response."""
        if self.state is STARTED:
            self.state = COMPLETE
        if self.call.metadata.deadline is not None:
            self.answered_at = monotonic()

    # The client: its messages and its disconnect.

    def watch(self, now: float) -> None:
        """Check whether the client has left or its body has stalled. Called at every sweep."""
        request_id, is_answered = self.call.metadata.request_id, self.status != 0
        if self.body and (late := self.body.timeout(now, request_id, is_answered=is_answered)):
            self._cut(late)
        elif READING < self.state < LEFT and not self._is_over:  # earlier, `respond` reads the body
            if self._client is None and self._awaits_request():
                if has_left(self._receive):
                    self._on_disconnect()
            else:
                self.client().watch()

    def _awaits_request(self) -> bool:
        """Return whether the client waits until its body is asked for: reading asks for it."""
        if self._reads_ahead or self.body is None or not self.body.is_open:
            return False
        return any(name == b"expect" for name, _ in self.work.scope["headers"])

    def pump(self) -> None:
        """Begin to read from the server: for user code, and to notice the client's disconnect."""
        if not self._is_over and self.state is not LEFT:
            self.client().start()
        else:
            self.client().stop()

    def _on_disconnect(self) -> None:
        """Stop a request whose client has left. A background task after the response runs on."""
        if self._is_over or self.state >= COMPLETE:
            return
        if self.body and self.body.error:
            self._cut(self.body.error)
            return
        self.state = GONE
        self.call.is_interrupted = True
        self.on_gone()

    def on_gone(self) -> None:
        """Stop the work, because the client has left."""
        raise NotImplementedError

    def lose(self) -> None:
        """Note that the server could not send, because the client has left."""
        if self.is_http and self.state < CUT:
            self.state = GONE

    # Another attempt.

    async def again(self, error: Exception) -> Reply | None:
        """Return the next attempt, after a pause, or `None` if this failure is final."""
        return None if self.attempts is None else await self.attempts.again(self, error)

    @property
    def has_whole_body(self) -> bool:
        """Return whether the whole request is here, so that it can be sent to user code again."""
        return not self._expects_more

    async def is_abandoned_within(self, seconds: float) -> bool:
        """Wait, after the whole body was read, and return whether the client leaves meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return False
        return True

    def repeated(self, scope: Scope, deadline: float | None) -> Reply:
        """Return another reply to the same request, with its body, from another replica."""
        metadata = self.call.metadata._replace(deadline=deadline)
        other = type(self)(metadata, self.router, scope, self._receive, self._send)
        other.first = self.first
        note_call(self._send, other.call, self.router.templates)
        other.attempts = self.attempts
        other.call.runner = self.call.runner  # the router prefers another replica
        return other

    # The end.

    def leave(self, scope: Scope | None) -> None:
        """Count the request, unless another attempt follows, and drop the call.

        `scope` is the server's; `None` for an attempt. The call's user code may still run. If this
        kept the call, both would wait for the garbage collector. Race with `drain` on another loop,
        which may have found this reply just before: it finds a call that is settled.
        """
        call, self.call = self.call, _SETTLED
        work = self.work
        route = work.label(call) if work.scope else work.route_label
        del self.work
        if scope is None:
            return
        http, status = self.router.http, self.status or CLIENT_LEFT
        method = scope.get("method", "WS")
        latency = http.by_label.get((self.thread, route, method, status))
        if latency is None:
            latency = http.of(self.thread, route, method, status)
        # As `Latency.add`, whose call would cost every request.
        latency_ms = (monotonic() - call.started_at) * 1e3
        latency.total_ms += latency_ms
        bucket = 0 if latency_ms <= 1.0 else bisect_left(LATENCY_BUCKETS_MS, latency_ms)
        latency.buckets[bucket] += 1
        if TRACING.tracer is not None:
            note_exemplar(call, latency, bucket, latency_ms)
        if not self.status or (call.error is not None and call.was_cancelled()):
            latency.cancelled += 1
        if self.status >= 500 and (call.error is None or call.runner is None):
            self._note_failure(call)  # of which the replica does not know

    def _note_failure(self, call: Call) -> None:
        """Keep a request that was answered 5xx without an error of user code."""
        error, replica = f"answered {self.status}", ""
        if call.error is not None:
            error += f": {type(call.error).__name__}: {call.error}"
        if call.runner is not None:
            replica = call.runner.replica_id.unique_id
        keep(call, replica, monotonic(), error)


_SETTLED = Call(RequestMetadata("", DeploymentID("")), NO_WORK, NO_CONTEXT)
_SETTLED.settle()
_CLOSED: Channel[Message] = Channel()
"""In the place of a stream that may not begin any more."""


class HTTPReply(Reply):
    """The HTTP loop's side of one HTTP request. Owned by that loop."""

    __slots__ = ()

    async def conclude(self, state: ReplyState) -> None:
        error = None if state is GONE else self.failure(self.call.error, state)
        if error is not None:
            raise error

    async def forward(self, outbound: Channel[Message]) -> None:
        while True:
            try:
                messages = await outbound.get_many()
            except EndOfStream:
                return
            if (size := outbound.taken_bytes) >= LARGE:
                await stream_turns(self.loop).wait(size)
            for each in gathered(messages):
                if isinstance(each, list):
                    await send_chunks(self._send, each)
                else:
                    await self.pass_on(each)

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.note_start(message["status"])
            self.streamed_at = self.streamed_at or monotonic()
            await self._send(with_request_id(message, self.call.metadata.request_id))
        elif message.get("more_body"):
            await send_chunks(self._send, parts_of(message.get("body", b"")))
        else:
            self.note_complete()
            await self._send(message)

    def on_gone(self) -> None:
        self.call.cancel()
