"""A call in a child: one call by handle, one stream, or one HTTP request or WebSocket.

frames that arrive            the call's work, on the user loop
INPUT, CANCEL, CLOSE   -->    receive(), a cancellation, `StreamClosedError` from `send`
RESPONSE, OUTPUT, ...  <--    send(), items
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from contextvars import Context
from typing import Any, cast

from starlette.types import Message, Scope

from ingress.app.asgi.messages import parts_of, with_bytes
from ingress.app.asgi.template import route_below
from ingress.core.base.types import RequestMetadata
from ingress.core.calls.call import Call, Work
from ingress.core.calls.channel import RESPONSE_BYTES
from ingress.exceptions import StreamClosedError
from ingress.handle import Invocation
from ingress.serving.processes.crossing import as_sent, item_as_sent
from ingress.serving.processes.frames import LARGE, Content, Frames, encode, size_of_content
from ingress.serving.processes.messages import (
    RESPONSE_BODY,
    RESPONSE_START,
    Frame,
    SendWindow,
    Taken,
    Waiters,
    message_as_sent,
    plain,
    response_as_sent,
)
from ingress.serving.replicas.user_code import UserCode


class HostedCall(Call):
    """One call in a child. Owned by the user loop. Its slot is the parent's.

    `request` is its work if that is an HTTP request or a WebSocket, else `None`. If its work is the
    `Invocation` of a generator, it is the channel of the items.
    """

    __slots__ = ("frames", "number", "request", "task", "window")
    task: asyncio.Task[None]
    """The task that runs it. Held here, because a loop does not hold its tasks."""

    def __init__(self, number: int, frames: Frames, metadata: RequestMetadata, work: Work) -> None:
        super().__init__(metadata, work, Context())
        self.assigned_at = self.started_at
        self.number = number
        self.frames = frames
        self.request = work if isinstance(work, HostedRequest) else None
        self.window = SendWindow() if self.request is None else SendWindow(size=RESPONSE_BYTES)
        if self.request is not None:
            self.request.call = self
        elif metadata.is_streaming:
            items: Any = self
            cast(Invocation, work).channel = items

    def interrupt(self) -> None:
        super().interrupt()
        self.close()  # user code that swallows its cancellation may wait for room

    def close(self) -> None:
        """Make the user's generator end, or every later `send` fail: the consumer has gone."""
        self.window.close()
        if self.request is not None:
            self.request.close()

    async def put(self, item: object, size: int = 0) -> None:
        """Send an item of a generator, once there is room for it."""
        content = item_as_sent(self.deployment_name, item)
        await self.window.take(size_of_content(content))
        self.frames.post(Frame.ITEM, self.number, content)

    def last_frame(self, value: object) -> tuple[Frame, int, Content]:
        """Return the frame that ends the call. Raises the error of pickling the value."""
        if self.request is not None:
            answer = self.request.take_answer()
            number = self.number
            return (Frame.DONE, number, b"") if answer is None else (Frame.ANSWER, number, answer)
        return Frame.DONE, self.number, b"" if value is None else encode(as_sent(value))


class HostedRequest(Work, Waiters):
    """The work of one HTTP request or WebSocket in a child. Owned by the user loop."""

    __slots__ = (
        "_answer",
        "_asks",
        "_first",
        "_inputs",
        "_is_gone",
        "_is_http",
        "_is_streaming",
        "_start",
        "_taken",
        "_template",
        "call",
        "ends_with_client",
        "has_answer",
        "is_heard",
        "scope",
    )
    call: HostedCall

    def __init__(self, scope: Scope, first: Message | None) -> None:
        self.scope: Scope = scope
        self._is_http = scope["type"] == "http"
        self._first = first
        self._inputs: deque[tuple[Message, int]] = deque()
        self._taken = Taken()
        self.futures = ()  # of `receive`; most requests arrive as a whole
        self._start: Message | None = None
        self._answer: Content | None = None  # a complete response that is not sent yet
        self._is_streaming = self.has_answer = self._is_gone = self.is_heard = False
        self._asks = self.ends_with_client = False
        self._template = ""

    def __call__(self, user_code: UserCode) -> Awaitable[None]:
        return user_code.http(self.scope, self._receive, self._send)

    def deadline(self, call: Call) -> float | None:
        """Return `None` for a background task, and for a WebSocket: as on Ray, it has none."""
        is_over = self.has_answer or not self._is_http
        return None if is_over else call.metadata.deadline

    def route(self, call: Call) -> str:
        """Return the prefix, with the endpoint's path template once found."""
        if not self._template and (found := route_below(call.metadata.route, self.scope)):
            self._template = found
        return self._template or call.metadata.route

    def title(self, call: Call) -> str:
        """Return the HTTP method and the template as far as it is known. Thread-safe."""
        return f"{self.scope.get('method', 'WS')} {self.route(call)}"

    def end(self, call: Call, failure: BaseException | None) -> str:
        """Keep all: the response is in the last frame."""
        return call.metadata.route

    # The client's messages.

    def accept(self, message: Message, size: int) -> None:
        """Take a message of the client, which counts `size` bytes in its window."""
        self._inputs.append((message, size))
        self.wake()

    def close(self) -> None:
        """Have `receive` report the disconnect: the client is gone."""
        self._is_gone = self.call.is_interrupted = True
        self.wake()

    async def _receive(self) -> Message:
        if self._first is not None and not self.has_answer:
            message, self._first = self._first, None
            self._asks = not message.get("more_body")
            return message
        while self.has_answer or not self._inputs:  # after the answer as uvicorn
            if self._is_gone or self.has_answer:
                self._hear()
                if self._is_http:
                    return {"type": "http.disconnect"}
                return {"type": "websocket.disconnect", "code": 1006, "reason": ""}
            if self._asks:
                self._listen()
            await self.wait()
        message, size = self._inputs[0]
        if message["type"].endswith(".disconnect"):
            self._hear()
            return message  # the last one, for every later `receive`
        self._inputs.popleft()
        self._asks = message.get("more_body") is False
        self._taken.add(1, size)
        self._taken.tell(self.call.frames, self.call.number)
        return message

    def _listen(self) -> None:
        """Have the server send the disconnect of the client, once the body is here."""
        self._asks = False
        self.call.frames.post(Frame.LISTEN, self.call.number)

    def _hear(self) -> None:
        """Tell the server, once, that user code knows that its client has left."""
        if not (self.is_heard or self.has_answer):
            self.is_heard = True
            if not self.ends_with_client:  # else the server cancels it, as in a thread
                self.call.frames.post(Frame.HEARD, self.call.number)

    # The response.

    async def _send(self, message: Message) -> None:
        kind = message["type"]
        if type(message.get("body")) is not bytes and kind != RESPONSE_START:
            message = with_bytes(message)
        if self._is_streaming or not self._is_http:
            await self._stream(message)
        elif kind == RESPONSE_START:
            self._start = message
            has_length = b"content-length" in [name for name, _ in message.get("headers", ())]
            if not has_length or message.get("trailers"):
                await self._stream(message)  # the body may take a while
        elif kind == RESPONSE_BODY and not message.get("more_body"):
            start = self._start
            if start is None:
                raise RuntimeError("'http.response.body' was sent before 'http.response.start'")
            self._answer = response_as_sent(start, message.get("body", b""))
            self.note_answer()
            # If the work ends in this turn of the loop, its last frame brings the response.
            asyncio.get_running_loop().call_soon(self.flush)
        else:
            if self._start is not None:
                await self._stream(self._start)
            await self._stream(message)

    def note_stream(self, *, ends_with_client: bool) -> None:
        self.ends_with_client = ends_with_client

    def note_answer(self) -> None:
        """Note that the answer is complete: a `receive` that waits reports the disconnect."""
        self.has_answer = True
        self.wake()

    def take_answer(self) -> Content | None:
        """Return the complete response if it is yet to be sent."""
        answer, self._answer = self._answer, None
        return answer

    def flush(self) -> None:
        """Send the response that is held back for the last frame."""
        if (answer := self.take_answer()) is not None:
            self.call.frames.post(Frame.RESPONSE, self.call.number, answer)

    async def _stream(self, message: Message) -> None:
        """Send one message, at the pace of the client."""
        if self._is_http and not self._is_streaming and not self.ends_with_client:
            self._listen()  # as `HTTPWork`
        self._is_streaming = True
        kind = message["type"]
        if kind == RESPONSE_BODY and message.get("more_body"):
            for part in parts_of(message.get("body", b"")):
                if len(part) < LARGE:
                    await self._post(Frame.CHUNK, part)
                else:  # a content that is not pickled cannot say that it did not arrive
                    await self._post(Frame.OUTPUT, message_as_sent({**message, "body": part}))
            return
        if kind.endswith(RESPONSE_START):  # also that of a refused WebSocket
            message = {**message, "headers": plain(message.get("headers", ()))}
        elif kind == RESPONSE_BODY:
            message = {"type": kind, "body": message.get("body", b""), "more_body": False}
        await self._post(Frame.OUTPUT, message_as_sent(message))
        if kind == RESPONSE_BODY:
            self.note_answer()

    async def _post(self, kind: Frame, content: Content) -> None:
        """Send a frame, once there is room for it."""
        try:
            await self.call.window.take(size_of_content(content))
        except StreamClosedError:
            if self._is_http and not (self.call.settled or self.ends_with_client):
                await asyncio.sleep(0)  # user code is told, and may send on: `HTTPWork.send_here`
                return
            self._hear()
            await asyncio.sleep(0)  # a cancellation comes here, not in the clean-up: `HTTPWork`
            raise
        self.call.frames.post(kind, self.call.number, content)
