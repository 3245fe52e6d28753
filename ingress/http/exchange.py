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
import sys
from contextvars import copy_context
from threading import get_ident
from time import monotonic
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from ingress.asgi import route_template
from ingress.base.settings import HTTPLimits
from ingress.base.types import RequestMetadata
from ingress.calls.call import Call, Runner
from ingress.calls.channel import Channel, EndOfStream
from ingress.calls.loops import mailbox_of, runs_here
from ingress.exceptions import DeploymentUnavailableError, RayServeException, RequestCancelledError
from ingress.http.body import NO_BODY, NO_LIMITS, Body
from ingress.http.client_reader import ClientReader
from ingress.http.messages import joined, with_request_id
from ingress.http.transport import CrossLoopTransport, SameLoopTransport
from ingress.replicas.router import Router
from ingress.replicas.user_code import UserCode
from ingress.watchdog.pressure import GIL_PRESSURE


class Exchange(Call):
    """The call of one HTTP request or WebSocket, and the sending of its response.

    The fields below belong to the HTTP loop; docs/concurrency.md lists the exceptions. Other
    threads call in by `_post` only, in order: a response arrives before the end of its call.
    """

    __slots__ = (
        "_assigned_here",
        "_client_reader",
        "_cut_by",
        "_disconnect_code",
        "_disconnected",
        "_ended",
        "_event",
        "_expects_more",
        "_first",
        "_has_left",
        "_is_closed",
        "_is_complete",
        "_is_forwarding",
        "_is_stopped",
        "_kind",
        "_outbound",
        "_receive",
        "_response",
        "_send",
        "_task",
        "_template",
        "_thread",
        "body",
        "has_answer",
        "is_heard",
        "is_http",
        "loop",
        "router",
        "scope",
        "started",
    )  # fmt: skip

    def __init__(
        self,
        metadata: RequestMetadata,
        router: Router,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        has_body: bool = False,
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
        self._first: Message | None = NO_BODY if self.is_http else None
        self._expects_more = self.body is not None or not self.is_http
        # Set now, although most requests never use them: two threads write, docs/concurrency.md.
        self.started = self._is_complete = False  # the response
        self.has_answer = False  # user code on a loop of its own has sent the whole response
        self._assigned_here = self._ended = self._is_forwarding = False
        self._is_stopped = self._is_closed = self._has_left = False
        self._cut_by: RayServeException | None = None
        self._disconnected = self.is_heard = False  # the client has left; user code was told
        self._template = self._kind = ""
        self._event: asyncio.Future[None] | None = None
        self._response: tuple[Message, Message] | None = None
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
        return self.started and not self._is_complete

    @property
    def deadline(self) -> float | None:
        """The deadline of calls made in this request; `None` for those of a background task."""
        return None if self.has_answer or self._is_complete else self.metadata.deadline

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
                if not body.is_open and self.metadata.deadline is None:
                    self._task = None  # the call may run in the server's task
            self.router.assign(self)
            await self._send_until_ended()
        except asyncio.CancelledError:
            self.cancel()
            if self._cut_by is not None:
                assert self._task is not None
                if self._task.uncancel():  # the server has cancelled it too
                    raise
            elif not self._disconnected and not self._is_stopped:  # else `cancel` did that
                raise
        except BaseException as error:
            # The server refused a message, or reading the body failed: the work did not fail.
            self._disconnected = isinstance(error, OSError)
            self.cancel()
            if not self._disconnected:
                raise
        finally:
            self._has_left = True
            if self._assigned_here and self.runner is not None:
                self.runner.release(self)  # cancelled after it got a slot, before it began
            if self._client_reader is not None:
                self._client_reader.stop()
        await self._conclude()

    async def _conclude(self) -> None:
        """Raise the error that the client has yet to be told, once everything is sent."""
        if not self._disconnected:
            self._raise(self.error)

    def _raise(self, failure: BaseException | None) -> None:
        is_stopped = self._is_stopped and self._cut_by is None
        if is_stopped and isinstance(failure, RequestCancelledError):
            if self._is_complete:
                return  # only a background task was cancelled
            raise DeploymentUnavailableError(
                f"{self.metadata.deployment} was stopped before it answered; send the request "
                "again if that is safe."
            )
        if failure is not None:
            raise failure
        if self._cut_by is not None:  # the work had ended, its response was still being sent
            raise self._cut_by

    def was_ended_by(self, error: Exception) -> bool:
        """Return whether `error` comes from `_cut` or from the stop of the application.

        Neither is a fault of user code.
        """
        if self._cut_by is not None:
            return isinstance(error, type(self._cut_by))
        return self._is_stopped and isinstance(error, DeploymentUnavailableError)

    async def again(self, error: Exception) -> Exchange | None:
        """Return the next attempt, after a pause, or `None` if this failure is final."""
        return None

    async def _send_until_ended(self) -> None:
        """Send the response as it arrives from the replica, until the call has ended."""
        while True:
            if self._assigned_here:
                self._assigned_here = False
                await self._serve_here()
            elif self._response is not None:
                (start, body), self._response = self._response, None
                await self.send_response(start, body)
            elif self._outbound is not None and not self._is_forwarding:
                self._is_forwarding = True
                await self._forward(self._outbound)
            elif self._ended:
                return
            else:
                self._event = self.loop.create_future()
                await self._event

    def start(self, runner: Runner) -> None:
        """Begin on the replica whose slot the call has. Thread-safe; called once for each slot."""
        self.runner = runner
        if self._task is None and runner.loop is self.loop:
            self._post(self._assign_here)
        elif GIL_PRESSURE.is_high:
            # By way of the HTTP loop, which then has a turn between two calls that compute.
            # Otherwise N computing threads start each other's calls, and it has one turn in N.
            self._post(runner.submit, self)
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

    def disconnect(self, code: int) -> None:
        """Tell user code that its client is gone, because the application stops. Thread-safe.

        `code` is the close code of a WebSocket.
        """
        self._post(self._disconnect, code)

    def stop(self) -> None:
        """Cancel the call, because the application stops. Thread-safe."""
        self._is_stopped = True
        self.cancel()

    def expire(self) -> None:
        """Answer that the deadline has passed, or cut a response that has begun. Thread-safe."""
        self._post(self._expire)

    def _expire(self) -> None:
        self._cut(self._timeout())

    def _cut(self, error: RayServeException) -> None:
        """End the request with this error, wherever it is."""
        if self._is_complete or self._has_left or self._cut_by is not None:
            return  # complete in time, over, or cut already
        assert self._task is not None
        self._cut_by = error
        # The task may wait for the body, for the client to take a chunk, or for the call's end.
        self._task.cancel()
        self.cancel(error)

    def _post(self, callback: Any, *args: Any) -> None:
        if runs_here(self.loop, self._thread):
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
            await self._deliver(messages)

    async def _deliver(self, messages: list[Message]) -> None:
        for message in joined(messages):
            await self.pass_on(message)

    async def pass_on(self, message: Message) -> None:
        """Send one message of a response to the client."""
        self.started = True
        if message["type"] == "http.response.start":
            await self._send(with_request_id(message, self.metadata.request_id))
            return
        if not message.get("more_body"):
            self._complete_now()
        await self._send(message)

    async def send_response(self, start: Message, body: Message) -> None:
        """Send the start of a response, and its body or the first part of its body."""
        self.started = True
        await self._send(with_request_id(start, self.metadata.request_id))
        if not body.get("more_body"):
            self._complete_now()
        await self._send(body)

    def _complete_now(self) -> None:
        self._is_complete = True
        if self.metadata.deadline is not None:
            self.answered_at = monotonic()

    # The client: its messages and its disconnect.

    @property
    def is_gone(self) -> bool:
        """Return whether the client has left or the response is over: `send` must fail."""
        return self._disconnected or self._has_left

    def watch(self, now: float) -> None:
        """Check whether the client has left or its body has stalled. Called at every sweep."""
        if self.body and (late := self.body.timeout(now, self.metadata.request_id)):
            self._cut(late)
        elif self.queue is not None and not self._ended:
            self.client_reader.watch()  # before it has a queue, `respond` reads the body

    def pump(self) -> None:
        """Begin to read from the server: for user code, and to notice the client's disconnect."""
        if not self._ended:
            self.client_reader.start()

    async def take(self) -> Message:
        """Return the next message for user code; after the last, always the disconnect."""
        message = await self.client_reader.take()
        if message["type"].endswith(".disconnect"):
            self.is_heard = True
        return message

    def _on_disconnect(self) -> None:
        """Stop a request whose client has left. A background task after the response runs on."""
        if self._ended or self._is_complete or self._disconnected:
            return
        if self.body and self.body.error:
            self._cut(self.body.error)
            return
        self._disconnected = self.is_interrupted = True
        self._stop_work()

    def _stop_work(self) -> None:
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
        if self._disconnect_code is None and not self._ended:
            self._disconnect_code = code
            self.client_reader.end(code)

    # Serving on the HTTP loop itself.

    async def _serve_here(self) -> None:
        assert self.runner is not None
        if not self.runner.admit(self):
            return
        try:
            await self.runner.serve(self)
        except asyncio.CancelledError:
            # Cancelled by `cancel`, by the server, or by the replica: when it ends, it cancels the
            # tasks that its calls run in, here the server's.
            if not self.runner.is_ending or not self.settle(error=self.runner.gone_error()):
                raise
            task = asyncio.current_task()
            assert task is not None
            if task.uncancel():
                raise  # not by the replica alone
        except Exception as error:
            self.runner.fail(self, error)
        else:
            self.settle()

    # On the user loop.

    async def _work(self, user_code: UserCode) -> None:
        """Serve the request with user code. The replica runs this in a task on its user loop."""
        if runs_here(self.loop, self._thread):
            side: CrossLoopTransport | SameLoopTransport = SameLoopTransport(self, self._first)
        else:
            side = CrossLoopTransport(self, mailbox_of(self.loop), self._first)
        try:
            await user_code.http(self.scope, side.receive, side.send)
        finally:
            # The scope is dropped: every copy of the request's context holds the call, also that
            # of the server's keep-alive timer, and must not hold what frameworks keep in a scope.
            if self.is_interrupted or sys.exception() is not None:
                self.current_route()  # kept for the log record
            if self.metadata.deadline is not None:
                self.kind()  # kept for the estimate of later calls of this kind
            self.scope = {}
            side.finish()
