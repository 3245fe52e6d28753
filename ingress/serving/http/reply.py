"""One request on the HTTP loop: its call is submitted, and the response is sent.

    the HTTP loop                                  the user loop: `HTTPWork`
    a driver   <-- complete response: one post --  send()     start and body together
               <-- Channel ----------------------  send()     a stream, item by item
    Client     --- Channel --------------------->  receive()  body, messages, disconnect

`reply_state` has its states. `asgi_driver`, a coroutine, and `direct`, the connection itself, feed
them, and send. If both are the same loop, nothing crosses threads: the call runs in the server's
task. A call with a deadline has a task of its own even then: the server's task must be free to
answer on time while a worker thread runs on.

A request needs several turns of the HTTP loop. If a hundred streams send 64 KiB each in every turn,
these turns are milliseconds long, and a request beside the streams takes a tenth of a second. So
`StreamTurns` lets few large parts of streams be sent in one turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import copy_context
from time import monotonic
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from starlette.types import Message, Receive, Scope, Send

from ingress.app.asgi.messages import NORMAL, gathered, parts_of, with_request_id
from ingress.core.base.settings import HTTPLimits
from ingress.core.base.types import RequestMetadata
from ingress.core.calls.call import Call, Runner
from ingress.core.calls.channel import Channel, EndOfStream, WakeBy
from ingress.core.calls.loops import mailbox_of, running_loop
from ingress.exceptions import (
    DeploymentUnavailableError,
    RayServeException,
    RequestTimeoutError,
    StreamClosedError,
)
from ingress.serving.http.body import NO_BODY, NO_LIMITS, Body
from ingress.serving.http.client import Client
from ingress.serving.http.reply_state import (
    BEGIN,
    CANCEL,
    COMPLETE,
    DONE,
    END,
    FINISH,
    GO,
    HTTP,
    INTERRUPT,
    LATE,
    LEAVE,
    OWN,
    PART,
    READING,
    REFUSE,
    RELEASE,
    REPORT,
    RUN,
    RUNNING,
    STOP,
    TELL,
    WAKE,
    Action,
    ImpossibleEventError,
    ReplyEvent,
    Table,
)
from ingress.serving.http.request_head import content_length
from ingress.serving.http.uvicorn_connection import has_left, send_chunks
from ingress.serving.http.work import HTTPWork
from ingress.serving.replicas.router import Router

Perform = Callable[[Any, Any], Any]
# For user code that is told that its client is gone, to notice and to clean up.
HEARING_S = 0.25
CLEANUP_S = 5.0


class Waiter(Protocol):
    """A thing that a driver waits for: a future, or a connection, see `direct`."""

    def done(self) -> bool: ...

    def set_result(self, result: None) -> None: ...


class Retries(Protocol):
    """The attempts at one request, as one of them sees them."""

    async def again(self, failed: Reply, error: Exception) -> Reply | None:
        """Return the next attempt, after a pause, or `None` if this failure is final."""


class Reply:
    """The HTTP loop's side of one request. Owned by that loop.

    Other threads call in by `post` only, in order: a response arrives before the end of its call.
    `WebSocketReply` is that of a WebSocket.

        table, state  what may happen to it, and what follows: see `reply_state`
        call, work    the call, and the user loop's side
        status        of the response; 0 until it begins. 101 for a WebSocket that was accepted
        body          the body of the request, `None` if there is none
        first         the first message of the client, `None` if that is yet to come
        ended_by      the error with which it ended the call: its deadline, its body, a stop
        came          what has come from the replica and is not sent yet: a complete response or a
                      stream; or a replica on this loop, to run the call in its slot; or an error
                      that `direct` met
        event         what the driver waits for; see `wake`
        task          the server's, if the call must not run in it; else `None`

    `has_body` is true if the server may have a body: the first message says so. If `None`, only
    user code reads that message. Without `reads_ahead`, too: the client sends its body once it is
    asked for, and an endpoint may refuse it.
    """

    is_http = True
    table: ClassVar[Table] = HTTP
    performs: ClassVar[Mapping[Action, Perform]]
    __slots__ = (
        "_client", "_outbound", "attempts", "body", "call", "came", "ended_by", "event", "first",
        "loop", "mailbox", "receive", "router", "send", "state", "status", "task", "work",
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
        self.first: Message | None = None
        if has_body is False and self.is_http:
            self.first = NO_BODY
        elif self.is_http:
            self.body = Body(
                receive,
                limits,
                content_length(scope),
                is_open=bool(has_body),
                is_read_ahead=reads_ahead and bool(has_body),
            )
            receive = self.body.receive
        self.receive = receive
        self.send = send
        self.loop = loop = asyncio.get_running_loop()
        self.mailbox = mailbox_of(loop)
        self.state = READING
        self.status = 0
        self.attempts: Retries | None = None
        self.ended_by: RayServeException | None = None
        self.came: tuple[Message, Message] | Channel[Message] | Runner | BaseException | None = None
        self._outbound: Channel[Message] | None = None  # the stream, to close it
        self.event: Waiter | None = None
        self._client: Client | None = None
        self.task: asyncio.Task[Any] | None = None

    def on(self, event: ReplyEvent, subject: Any = None) -> tuple[Action, ...]:
        """Change the state because of an event, and do what follows. On the HTTP loop.

        `subject` is the call and the replica of a slot, or the error of `LATE`. Returns the
        actions; those that it does not do itself are the driver's. Raises `StreamClosedError` for a
        message that is not to be sent.
        """
        cell = self.table[self.state][event]
        if cell is None:
            raise ImpossibleEventError(f"{event.name} came in the state {self.state.name}")
        self.state, actions = cell
        for action in actions:
            perform = self.performs.get(action)
            if perform is not None:
                perform(self, subject)
        return actions

    def pass_through(self, *events: ReplyEvent) -> tuple[Action, ...]:
        """Change the state as `on` does, for a driver that does itself what follows."""
        actions: tuple[Action, ...] = ()
        for event in events:
            cell = self.table[self.state][event]
            if cell is None:
                raise ImpossibleEventError(f"{event.name} came in the state {self.state.name}")
            self.state, actions = cell
        return actions

    def client(self) -> Client:
        """Return the reader of the client's messages, on either loop. Few requests need it."""
        if self._client is None:
            wake_by: WakeBy | None = None
            if not self.is_http and (
                (runner := self.call.runner) is None or runner.loop is not self.loop
            ):
                # Woken at once, the user loop's thread would wait for the GIL, which this thread
                # has until the end of its turn: two switches instead of one.
                wake_by = self.mailbox.post
            with self.call.lock:
                if self._client is None:
                    self._client = Client(
                        self.receive,
                        is_http=self.is_http,
                        passes_on=not self.has_whole_body,
                        on_gone=self._on_disconnect,
                        wake_by=wake_by,
                    )
        return self._client

    @property
    def has_whole_body(self) -> bool:
        """Return whether the whole request is here, so that it can be sent to user code again."""
        return self.first is not None and (self.body is None or not self.body.is_open)

    @property
    def is_stream(self) -> bool:
        """Return whether the response has begun and is not complete: a stream or a WebSocket."""
        return self.status != 0 and self.state is not COMPLETE and self.state is not DONE

    async def ends_by_itself(self) -> bool:
        """Return whether the call has ended although the server's task was cancelled."""
        return False

    async def conclude(self, action: Action) -> None:
        """Raise the error that the client has yet to be told."""
        error: BaseException | None = self.call.error
        if error is None and action is OWN:
            error = self.ended_by  # the work had ended, its response was still being sent
        if error is not None and not (action is REPORT and error is self.ended_by):
            raise error

    def was_ended_by(self, error: Exception) -> bool:
        """Return whether `error` comes from its deadline, its body or the stop of the application.

        None of these is a fault of user code.
        """
        return self.ended_by is not None and isinstance(error, type(self.ended_by))

    # The end of the call.

    def _on_settled(self, call: Call) -> None:
        """Note the end of the call, in any thread.

        Most calls end right after their answer was posted: then the driver, which sends it, finds
        them settled, and needs no other post. Race with that look: if it comes first, the driver
        asks by `when_settled`, under the call's lock, to be told of the end.
        """
        runner = call.runner
        if not (
            call.error is None
            and call.work.has_answer  # not `self.work`: `respond` may have left already
            and self.is_http
            and runner is not None
            and runner.loop is not self.loop
        ):
            self.post(self.on, END)

    def note_end(self, _: Call) -> None:
        self.post(self.on, END)

    def post(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call `callback` on the HTTP loop, at once if that is where this runs. Thread-safe."""
        if running_loop() is self.loop:
            callback(*args)
        else:
            self.mailbox.post(callback, *args)

    def wake(self, _: Any = None) -> None:
        """Have the driver go on, if it waits."""
        if self.event is not None and not self.event.done():
            self.event.set_result(None)

    def leave(self, *events: ReplyEvent) -> tuple[Action, ...]:
        """End the work of the driver, after these events, and return what it must still do."""
        actions = self.pass_through(*events, LEAVE)
        if CANCEL in actions:
            self.call.cancel()
        if self.came is not None and self.came is self.call.runner:
            self.call.runner.release(self.call)  # cancelled after it got a slot, before it began
        if self._client is not None:
            self._client.stop()
        return actions

    # Its end by others.

    def disconnect(self, code: int) -> None:
        """Tell user code that its client is gone: its answer is complete, or a stop.

        `code` is the close code of a WebSocket.
        """
        if self.state is READING or self.state in RUNNING:
            self.client().end(code)

    def stop(self, error: RayServeException | None = None) -> None:
        """Cancel the call with an error, by default because the application stops. Thread-safe."""
        if self.ended_by is None:
            self.ended_by = error or self.stop_error()
        self.call.cancel(self.ended_by)

    def stop_error(self) -> DeploymentUnavailableError:
        return DeploymentUnavailableError(
            f"{self.call.metadata.deployment} was stopped before it answered; send the request "
            "again if that is safe."
        )

    # From the replica, on the HTTP loop.

    def complete(self, start: Message, body: Message) -> None:
        """Take a complete response."""
        self.came = start, body
        if (event := self.event) is not None and not event.done():  # as `wake`
            event.set_result(None)

    def open(self, outbound: Channel[Message]) -> None:
        """Take a stream, or the messages of a WebSocket."""
        if self._outbound is _CLOSED:
            outbound.close()
        self._outbound = self.came = outbound
        # The client of a stream may leave at any time: read on from the server to notice it.
        self.pump()
        self.wake()

    def close(self) -> None:
        """Make every later `send` of user code fail."""
        if self._outbound is None:
            self._outbound = _CLOSED
        else:
            self._outbound.close()

    # To the client.

    async def forward(self, outbound: Channel[Message]) -> None:
        """Send the messages of a stream, at the client's pace."""
        while True:
            try:
                messages = await outbound.get_many()
            except EndOfStream:
                return
            if (size := outbound.taken_bytes) >= LARGE:
                await stream_turns(self.loop).wait(size)
            for each in gathered(messages):
                if isinstance(each, list):
                    await send_chunks(self.send, each)
                else:
                    await self.pass_on(each)

    async def pass_on(self, message: Message) -> None:
        """Send one message of a response to the client."""
        if message["type"] == "http.response.start":
            self.on(BEGIN)
            self.status = self.status or message["status"]
            await self.send(with_request_id(message, self.call.metadata.request_id))
        elif message.get("more_body"):
            await send_chunks(self.send, parts_of(message.get("body", b"")))
        else:
            if message["type"] in _LAST:
                self._finish()
            await self.send(message)

    async def send_response(self, start: Message, body: Message) -> None:
        """Send the start of a response, and its body or the first part of its body."""
        self.on(BEGIN)
        self.status = start["status"]
        await self.send(with_request_id(start, self.call.metadata.request_id))
        if not body.get("more_body"):
            self.on(FINISH)  # as `_finish`
            if self.call.metadata.deadline is not None:
                self.work.answered_at = monotonic()
        await self.send(body)

    def _finish(self) -> None:
        self.on(FINISH)
        if self.call.metadata.deadline is not None:
            self.work.answered_at = monotonic()

    # The client: its messages and its disconnect.

    def watch(self, now: float) -> None:
        """Check whether the client has left or its body has stalled. Called at every sweep."""
        request_id, body = self.call.metadata.request_id, self.body
        if body and (late := body.timeout(now, request_id, is_answered=self.status != 0)):
            self.on(LATE, late)
        elif self.state in RUNNING:
            if self._client is None and body and body.waits_to_be_asked(self.work.scope):
                if has_left(self.receive):
                    self._on_disconnect()
            else:
                self.client().watch()

    def pump(self) -> None:
        """Begin to read from the server: for user code, and to notice the client's disconnect."""
        if self.state in RUNNING:
            self.client().start()
        else:
            self.client().stop()

    def _on_disconnect(self) -> None:
        """Stop a request whose client has left. A background task after the response runs on."""
        if self.body and self.body.error:
            self.on(LATE, self.body.error)
        else:
            # Race with user code on its own loop, which may just begin to listen: then it is
            # cancelled, as code that does not listen.
            self.on(PART if self.is_http and self.work.is_listening else GO)

    def tell(self) -> None:
        """Tell user code that listens that its client is gone."""
        self.cancel_if_deaf()
        self.client().end(NORMAL)

    def cancel_if_deaf(self) -> None:
        """Cancel user code that was told of the disconnect, unless it hears of that and ends."""
        self.call.is_interrupted = True
        self.client().timer = self.loop.call_later(HEARING_S, self._cancel_unless_heard)

    def _cancel_unless_heard(self) -> None:
        """Cancel user code that has not noticed that its client is gone.

        Race with user code that notices on its own loop just now: it is cancelled while it cleans
        up, as code that does not listen always is.
        """
        if self.work.is_heard and not self.work.ends_with_client:
            self.client().timer = self.loop.call_later(CLEANUP_S, self.call.cancel)
        else:
            self.call.cancel()


def _cancel(reply: Reply, error: RayServeException | None) -> None:
    if error is not None and reply.ended_by is None:
        reply.ended_by = error
    if reply.call.cancel(error) and type(error) is RequestTimeoutError:  # not of the body
        reply.router.note_expired()


def _run(reply: Reply, slot: tuple[Call, Runner]) -> None:
    reply.came = slot[1]
    reply.wake()


def _refuse(reply: Reply, _: Any) -> None:
    raise StreamClosedError("this request has ended")


def _interrupt(reply: Reply, _: Any) -> None:
    # The task may wait for the body, for the client to take a chunk, or for the call's end.
    assert reply.task is not None
    reply.task.cancel()


Reply.performs = {
    RUN: _run,
    RELEASE: lambda reply, slot: slot[1].release(slot[0]),
    CANCEL: _cancel,
    TELL: lambda reply, _: reply.tell(),
    STOP: lambda reply, _: reply.call.cancel(reply.stop_error()),
    WAKE: Reply.wake,
    REFUSE: _refuse,
    INTERRUPT: _interrupt,
}
_LAST = ("http.response.body", "http.response.pathsend", "http.response.zerocopysend")
"""The messages that end a response; those of other extensions do not."""
_CLOSED: Channel[Message] = Channel()
"""In the place of a stream that may not begin any more."""


LARGE = 32 * 1024  # bytes; smaller parts cost little more than their turn
TURN = 256 * 1024  # bytes that are sent in one turn, and what the last part has more


class StreamTurns:
    """The turns of one event loop, dealt out to the large parts of its streams in order of arrival.

    Belongs to the loop's thread. It has no reference to the loop, which is a weak key to it.
    """

    __slots__ = ("_sent", "_waiting")

    def __init__(self) -> None:
        self._sent = 0  # bytes in this turn
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def wait(self, size: int) -> None:
        """Return at once if this turn has room for a large part, else in the next that has."""
        loop = asyncio.get_running_loop()
        if self._sent < TURN and not self._waiting:
            if not self._sent:
                loop.call_soon(self._begin)
            self._sent += size
            return
        turn = loop.create_future()
        self._waiting.append((turn, size))
        await turn

    def _begin(self) -> None:
        self._sent = 0
        while self._waiting and self._sent < TURN:
            turn, size = self._waiting.popleft()
            if not turn.done():  # else its stream was cancelled
                turn.set_result(None)
                self._sent += size
        if self._sent:
            asyncio.get_running_loop().call_soon(self._begin)


_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, StreamTurns] = WeakKeyDictionary()
_turns_lock = threading.Lock()


def stream_turns(loop: asyncio.AbstractEventLoop) -> StreamTurns:
    """Return the turns of a loop. Thread-safe."""
    with _turns_lock:
        found = _turns.get(loop)
        if found is None:
            found = _turns[loop] = StreamTurns()
        return found
