"""One request between the HTTP loop and the replica's user loop.

    the HTTP loop                                  the user loop: `CrossLoopTransport`
    respond()     <-- complete response: one post  send()     start and body together
                  <-- Channel -------------------  send()     a stream, item by item
    ClientReader  --- Channel ------------------>  receive()  body, messages, disconnect

If both are the same loop, nothing crosses threads: `respond` runs the call in the server's task,
and the transport is a `SameLoopTransport`. A call with a deadline has a task of its own even then:
the server's task must be free to answer on time while a worker thread runs on.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable
from contextvars import copy_context
from threading import get_ident
from time import monotonic, time
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from ingress.asgi import route_template
from ingress.asgi.chunks import parts_of
from ingress.base.counters import CLIENT_LEFT, LATENCY_BUCKETS_MS
from ingress.base.settings import HTTPLimits
from ingress.base.types import RequestMetadata
from ingress.calls.call import Call, Runner
from ingress.calls.channel import Channel, EndOfStream
from ingress.calls.loops import mailbox_of, runs_here
from ingress.calls.notable import NOTABLE, Ended
from ingress.calls.retries import NotBegunError
from ingress.calls.tracing import TRACING, note_exemplar, trace_id_of
from ingress.exceptions import (
    DeploymentUnavailableError,
    RayServeException,
    RequestTimeoutError,
)
from ingress.execution.gil_pressure import GIL_PRESSURE, TURNS, TURNS_S
from ingress.http.access import AccessLine, note_exchange
from ingress.http.body import NO_BODY, NO_LIMITS, Body
from ingress.http.client_reader import ClientReader
from ingress.http.exchange_state import (
    CALLED,
    COMPLETE,
    CUT,
    GONE,
    LEFT,
    READING,
    STARTED,
    ExchangeState,
)
from ingress.http.messages import gathered, with_request_id
from ingress.http.stream_turns import LARGE, stream_turns
from ingress.http.transport import CrossLoopTransport, SameLoopTransport
from ingress.http.uvicorn_connection import send_chunks
from ingress.replicas.router import Router
from ingress.replicas.user_code import UserCode


class Retries(Protocol):
    """The attempts at one request, as one of them sees them."""

    async def again(self, failed: Exchange, error: Exception) -> Exchange | None: ...


class Exchange(Call):
    """The call of one HTTP request or WebSocket, and the sending of its response.

    The fields below belong to the HTTP loop; docs/concurrency.md lists the exceptions. Other
    threads call in by `_post` only, in order: a response arrives before the end of its call. User
    code's part lives on the user loop, in a `Transport`.

    `has_body` is true if the server may have a body: the first message says so. If `None`, only
    user code reads that message.

    A WebSocket differs in `deadline`, `pass_on`, `deliver`, `cut_late`, `on_gone` and `conclude`.
    """

    __slots__ = (
        "_client_reader",
        "_disconnect_code",
        "_event",
        "_expects_more",
        "_first",
        "_is_closed",
        "_is_ended",
        "_kind",
        "_method",
        "_news",
        "_outbound",
        "_receive",
        "_send",
        "_stopped_by",
        "_task",
        "_template",
        "_thread",
        "attempts",
        "body",
        "cut_by",
        "has_answer",
        "is_heard",
        "is_http",
        "loop",
        "router",
        "scope",
        "started",
        "state",
        "status",
        "streamed_at",
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
        length: bytes = b"",
        limits: HTTPLimits = NO_LIMITS,
    ) -> None:
        super().__init__(metadata, self._work, copy_context())
        self.router = router
        self.scope = scope
        self.is_http = scope["type"] == "http"
        self.body: Body | None = None
        if has_body and self.is_http:
            self.body = Body(receive, limits, length)
            receive = self.body.receive
        self._receive = receive
        self._send = send
        self.loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._expects_more = has_body is not False or not self.is_http
        self._first: Message | None = None if self._expects_more else NO_BODY
        # Set now, although most requests never use them: two threads write, docs/concurrency.md.
        self.state = READING
        self.started = False  # the client has a message of the response
        self.status = 0  # of the response, once it begins
        self.has_answer = self.is_heard = False  # set on the user loop, see `Client`
        self.attempts: Retries | None = None
        self.cut_by: RayServeException | None = None
        self._stopped_by: RayServeException | None = None
        self._news: Runner | tuple[Message, Message] | Channel | None = None
        self._is_ended = self._is_closed = False
        self._template = self._kind = self._method = ""
        self.streamed_at = 0.0
        self._event: asyncio.Future[None] | None = None
        self._client_reader: ClientReader | None = None
        self._outbound: Channel | None = None
        self._task: asyncio.Task[Any] | None = None
        self._disconnect_code: int | None = None

    @property
    def client_reader(self) -> ClientReader:
        """The reader of the client's messages. Made at first use, on either loop: few need it."""
        if self._client_reader is None:
            with self._lock:
                if self._client_reader is None:
                    self._client_reader = ClientReader(
                        self._receive,
                        is_http=self.is_http,
                        passes_on=self._expects_more,
                        on_gone=self._on_disconnect,
                    )
        return self._client_reader

    @property
    def is_stream(self) -> bool:
        """Return whether the response has begun and is not complete: a stream or a WebSocket."""
        return self.started and self.state is not COMPLETE

    @property
    def deadline(self) -> float | None:
        """The deadline of calls made in this request; `None` for those of a background task."""
        return None if self.has_answer else self.metadata.deadline

    async def respond(self) -> None:
        """Read the body, submit the call and send the response. Raises the error of the call."""
        body = self.body
        if body is not None or self.metadata.deadline is not None:
            self._task = asyncio.current_task()
        try:
            if body is not None:
                # Before the call takes a slot: a slow upload must not hold one.
                self._first = await body.read_ahead()
                self._expects_more = body.is_open
                if type(self._send) is AccessLine:
                    self._send.queued_at = monotonic()
                if not body.is_open and self.metadata.deadline is None:
                    self._task = None  # the call may run in the server's task
            self.state = CALLED
            self.router.assign(self)
            await self._send_until_ended()
        except asyncio.CancelledError:
            self.cancel()
            if self.state is CUT:
                assert self._task is not None
                if self._task.uncancel():  # the server has cancelled it too
                    raise
            elif self.state is not GONE and self._stopped_by is None:  # else `cancel` did that
                raise
        except BaseException as error:
            # The server refused a message, or reading the body failed: the work did not fail.
            if isinstance(error, OSError):
                self.state = GONE
            self.cancel()
            if self.state is not GONE:
                raise
        finally:
            state, self.state = self.state, LEFT
            if self.runner is not None and self._news is self.runner:
                self.runner.release(self)  # cancelled after it got a slot, before it began
            if self._client_reader is not None:
                self._client_reader.stop()
        await self.conclude(state)

    async def conclude(self, state: ExchangeState) -> None:
        """Raise the error that the client has yet to be told. `state` is the one before LEFT."""
        if state is not GONE:
            self._raise(self.error, state)

    def _raise(self, failure: BaseException | None, state: ExchangeState) -> None:
        if failure is None:
            failure = self.cut_by  # the work had ended, its response was still being sent
        if failure is None or (state is COMPLETE and failure is self._stopped_by):
            return  # the stop has cancelled a background task
        raise failure

    def was_ended_by(self, error: Exception) -> bool:
        """Return whether `error` comes from `_cut` or from the stop of the application.

        Neither is a fault of user code.
        """
        cause = self.cut_by or self._stopped_by
        return cause is not None and isinstance(error, type(cause))

    async def again(self, error: Exception) -> Exchange | None:
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

    def repeated(self, scope: Scope, deadline: float | None) -> Exchange:
        """Return another exchange for the same request, with its body, for another replica."""
        metadata = self.metadata._replace(deadline=deadline)
        other = Exchange(metadata, self.router, scope, self._receive, self._send)
        other._first = self._first
        note_exchange(self._send, other)
        other.attempts = self.attempts
        other.runner = self.runner  # the router prefers another replica
        return other

    async def _send_until_ended(self) -> None:
        """Send the response as it arrives from the replica, until the call has ended."""
        while True:
            news, self._news = self._news, None
            if news is None:
                if self._is_ended:
                    return
                self._event = self.loop.create_future()
                await self._event
            elif isinstance(news, tuple):
                await self.send_response(*news)
            elif isinstance(news, Channel):
                await self._forward(news)
            else:
                await self._serve_here(news)

    def start(self, runner: Runner) -> None:
        """Begin on the replica whose slot the call has. Thread-safe; called once for each slot."""
        self.runner = runner
        if self._task is None and runner.loop is self.loop:
            self._post(self._assign_here)
        elif GIL_PRESSURE.is_high:
            # By way of the HTTP loop, which then has turns between two calls that compute.
            # Otherwise N computing threads start each other's calls, and it has one turn in N.
            self._post(self._submit_after, TURNS if runner.is_computing else 0, runner)
        else:
            runner.submit(self)

    def _submit_after(self, turns: int, runner: Runner) -> None:
        """Give the call to its replica after so many turns of the HTTP loop, or `TURNS_S`."""
        if turns and monotonic() - self.assigned_at < TURNS_S:
            self.loop.call_soon(self._submit_after, turns - 1, runner)
        else:
            runner.submit(self)

    def current_route(self) -> str:
        """Return the prefix, with the endpoint's path template once found. Thread-safe."""
        if not self._template:
            path = route_template(self.scope)
            if path is None:
                return self.metadata.route
            self._template = self.metadata.route.rstrip("/") + path
        return self._template

    def kind(self) -> str:
        """Return the HTTP method and the path template, also before the route is found."""
        if not self._kind and "method" in self.scope:
            self._kind = f"{self.scope['method']} {self.router.templates.find(self.scope)}"
        return self._kind

    def title(self) -> str:
        """Return the HTTP method and the template as far as it is known. Thread-safe."""
        if self._method:  # user code has ended, and the scope is gone
            return f"{self._method} {self.route}"
        return f"{self.scope.get('method', 'WS')} {self.current_route()}"

    def disconnect(self, code: int) -> None:
        """Tell user code that its client is gone, because the application stops. Thread-safe.

        `code` is the close code of a WebSocket.
        """
        self._post(self._disconnect, code)

    def stop(self, error: RayServeException | None = None) -> None:
        """Cancel the call with an error, by default because the application stops. Thread-safe."""
        if self._stopped_by is None:
            self._stopped_by = error or DeploymentUnavailableError(
                f"{self.metadata.deployment} was stopped before it answered; send the request "
                "again if that is safe."
            )
        self.cancel(self._stopped_by)

    def give_up(self, error: RayServeException) -> None:
        if not self.is_http or not self.has_answer:  # else only a background task is left
            self.stop(error)
            self._post(self._end_stream)

    def _end_stream(self) -> None:
        """End a stream or a WebSocket whose user loop is stuck, and cannot do so itself."""
        if self._outbound is not None:
            self._outbound.finish()

    def expire(self) -> None:
        """Answer that the deadline has passed, or cut a response that has begun. Thread-safe."""
        self._post(self.cut_late)

    def cut_late(self) -> None:
        """Cut the request, because its deadline has passed."""
        self._cut(self._timeout())

    def _cut(self, error: RayServeException) -> None:
        """End the request with this error, unless it is complete or over."""
        if self.state >= COMPLETE:
            return
        assert self._task is not None
        self.state = CUT
        self.cut_by = error
        # The task may wait for the body, for the client to take a chunk, or for the call's end.
        self._task.cancel()
        if self.cancel(error) and type(error) is RequestTimeoutError:  # not of the body
            self.router.note_expired()

    def _post(self, callback: Any, *args: Any) -> None:
        if runs_here(self.loop, self._thread):
            callback(*args)
        else:
            mailbox_of(self.loop).post(callback, *args)

    def _wake(self) -> None:
        if self._event is not None and not self._event.done():
            self._event.set_result(None)

    def _assign_here(self) -> None:
        if self.state is LEFT and self.runner is not None:
            self.runner.release(self)
            return
        self._news = self.runner
        self._wake()

    def settle(self, value: Any = None, error: BaseException | None = None) -> bool:
        if not super().settle(value, error):
            return False
        self._post(self._end)
        return True

    def _end(self) -> None:
        self._is_ended = True
        self._wake()

    def complete(self, start: Message, body: Message) -> None:
        self._news = start, body
        self._wake()

    def open(self, outbound: Channel) -> None:
        self.streamed_at = monotonic()
        self._news = self._outbound = outbound
        if self._is_closed:
            outbound.close()
        # The client of a stream may leave at any time: read on from the server to notice it.
        self.pump()
        self._wake()

    async def _forward(self, outbound: Channel) -> None:
        """Send a stream, message by message, at the client's pace."""
        while True:
            try:
                messages = await outbound.get_many()
            except EndOfStream:
                return
            if outbound.taken_bytes >= LARGE:
                await stream_turns(self.loop).wait()
            await self.deliver(messages)

    async def deliver(self, messages: list[Message]) -> None:
        """Send messages of a stream."""
        for each in gathered(messages):
            if isinstance(each, list):
                await send_chunks(self._send, each)
            else:
                await self.pass_on(each)

    async def pass_on(self, message: Message) -> None:
        """Send one message of a response to the client."""
        self._note_start()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.streamed_at = self.streamed_at or monotonic()
            await self._send(with_request_id(message, self.metadata.request_id))
            return
        if not message.get("more_body"):
            self._note_complete()
            await self._send(message)
        else:
            await send_chunks(self._send, parts_of(message.get("body", b"")))

    async def send_response(self, start: Message, body: Message) -> None:
        """Send the start of a response, and its body or the first part of its body."""
        self.started = True  # as the two helpers below do: a call of each costs every request
        self.status = start["status"]
        if self.state is CALLED:
            self.state = STARTED
        await self._send(with_request_id(start, self.metadata.request_id))
        if not body.get("more_body"):
            if self.state is STARTED:
                self.state = COMPLETE
            if self.metadata.deadline is not None:
                self.answered_at = monotonic()
        await self._send(body)

    def _note_start(self) -> None:
        self.started = True
        if self.state is CALLED:
            self.state = STARTED

    def _note_complete(self) -> None:
        if self.state is STARTED:
            self.state = COMPLETE
        if self.metadata.deadline is not None:
            self.answered_at = monotonic()

    # The client: its messages and its disconnect.

    @property
    def is_gone(self) -> bool:
        """Return whether the client has left or is answered otherwise: `send` must fail."""
        return self.state >= CUT

    def watch(self, now: float) -> None:
        """Check whether the client has left or its body has stalled. Called at every sweep."""
        request_id = self.metadata.request_id
        if self.body and (late := self.body.timeout(now, request_id, is_answered=self.started)):
            self._cut(late)
        elif self.queue is not None and not self._is_ended:
            self.client_reader.watch()  # before it has a queue, `respond` reads the body

    def pump(self) -> None:
        """Begin to read from the server: for user code, and to notice the client's disconnect."""
        if not self._is_ended:
            self.client_reader.start()

    def _on_disconnect(self) -> None:
        """Stop a request whose client has left. A background task after the response runs on."""
        if self._is_ended or self.state >= COMPLETE:
            return
        if self.body and self.body.error:
            self._cut(self.body.error)
            return
        self.state = GONE
        self.is_interrupted = True
        self.on_gone()

    def lose(self) -> None:
        """Note that the server could not send, because the client has left."""
        if self.is_http and self.state < CUT:
            self.state = GONE

    def on_gone(self) -> None:
        """Stop the work, because the client has left."""
        self.cancel()

    def interrupt(self) -> None:
        super().interrupt()
        # Only after the cancellation: user code whose `send` failed earlier would be cleaning up,
        # and the cancellation must not come in the middle of that.
        self._post(self._close)

    def _close(self) -> None:
        """Make every later `send` of user code fail."""
        self._is_closed = True
        if self._outbound is not None:
            self._outbound.close()

    def _disconnect(self, code: int) -> None:
        if self._disconnect_code is None and not self._is_ended:
            self._disconnect_code = code
            self.client_reader.end(code)

    def count(self, scope: Scope) -> None:
        """Count the request, which is over. `scope` is the server's."""
        method, status = scope["method"] if self.is_http else "WS", self.status or CLIENT_LEFT
        http = self.router.http
        latency = http.by_label.get((self._thread, self.route, method, status))
        if latency is None:
            latency = http.of(self._thread, self.route, method, status)
        # As `Latency.add`, whose call would cost every request.
        latency_ms = (monotonic() - self.started_at) * 1e3
        latency.total_ms += latency_ms
        bucket = 0 if latency_ms <= 1.0 else bisect_left(LATENCY_BUCKETS_MS, latency_ms)
        latency.buckets[bucket] += 1
        if TRACING.tracer is not None:
            note_exemplar(self, latency, bucket, latency_ms)
        if self.status >= 500 and (self.error is None or self.runner is None):
            self._note_failure()  # of which the replica does not know

    def _note_failure(self) -> None:
        """Keep a request that was answered 5xx without an error of user code."""
        error, deployment = self.error, self.metadata.deployment
        answered = f"answered {self.status}"
        ended = monotonic()
        begins = self.assigned_at or ended
        NOTABLE.add(
            Ended(
                self.title(),
                self.metadata.request_id,
                deployment.app_name,
                deployment.name,
                "" if self.runner is None else self.runner.context.replica_tag,
                self.started_at,
                begins,
                begins,
                self.streamed_at,
                ended,
                answered if error is None else f"{answered}: {type(error).__name__}: {error}"[:500],
                trace_id=trace_id_of(self),
                unix_time=time(),
            )
        )

    # Serving on the HTTP loop itself.

    async def _serve_here(self, runner: Runner) -> None:
        if not runner.admit(self):
            return
        try:
            await runner.serve(self)
        except asyncio.CancelledError:
            # Cancelled by `cancel`, by the server, or by the replica: when it ends, it cancels the
            # tasks that its calls run in, here the server's.
            if not runner.is_ending or not self.settle(error=runner.gone_error()):
                raise
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel():
                raise  # not by the replica alone
        except Exception as error:
            runner.fail(self, error)
        else:
            self.settle()

    # On the user loop.

    def _work(self, user_code: UserCode) -> Awaitable[None]:
        """Serve the request with user code. The replica runs this in a task on its user loop."""
        if runs_here(self.loop, self._thread):
            return SameLoopTransport(self, self._first).serve(user_code)
        return CrossLoopTransport(self, self._first, mailbox_of(self.loop)).serve(user_code)

    def drop_scope(self, failure: BaseException | None) -> None:
        """Drop the scope, once user code has ended.

        Every copy of the request's context holds the call, also that of the server's keep-alive
        timer, and must not hold what frameworks keep in a scope. Another replica needs the scope
        if this one ended before the call began.
        """
        if failure is not None and isinstance(failure, NotBegunError):
            return
        # For the counts of the replica and of the server.
        self.route = self.router.templates.label(self.scope, self.metadata.route)
        self._method = self.scope.get("method", "WS")
        if failure is not None or self.is_interrupted:
            self.current_route()  # kept for the log record
        if self.metadata.deadline is not None:
            self.kind()  # kept for the estimate of later calls of this kind
        self.scope = {}
