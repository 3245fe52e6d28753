"""Calls that the other process works for, from the frame that begins each to the frame of its end.

RemoteWork    a request, a stream, or a call whose answer a task awaits
RemoteCall    a call by handle with a single answer, in the server's process: no task waits for it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from anyio import CancelScope

from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.channel import MAX_ITEMS, RESPONSE_BYTES
from ingress.core.calls.retries import NotBegunError
from ingress.exceptions import RayServeException
from ingress.serving.processes.crossing import read, unpickled_error, unreadable
from ingress.serving.processes.frames import Buffers, FrameError, Frames, dumps, loads
from ingress.serving.processes.messages import (
    RESPONSE_BODY,
    Frame,
    SendWindow,
    Taken,
    Waiters,
    message_of,
    response_messages,
    trace_id_in,
    unknown,
)

_CONTENTS: dict[int, str] = {Frame.DONE: "the result", Frame.ITEM: "an item of the stream"}
_MOST_ARRIVED = 4 * MAX_ITEMS  # the window, and complete responses, which count in none


def _cancel(frames: Frames, number: int, call: Call | None) -> None:
    """Have the child cancel work, with the error of its call."""
    reason = None if call is None else call.error
    frames.post(Frame.CANCEL, number, b"" if reason is None else dumps(reason))


def unasked() -> None:
    """Do nothing: no client waits for this work, or user code was told before."""


class RemoteWork(Waiters):
    """One call in a child, from its frame to its end. Owned by the loop of the frames.

    `listen()` has the child get the disconnect of the client of its request, too.
    """

    __slots__ = (
        "_arrived", "_size", "_taken", "call", "can_move", "error", "frames",
        "has_heard", "is_over", "listen", "number", "value", "window",
    )  # fmt: skip

    def __init__(self, kind: Frame, number: int, frames: Frames) -> None:
        self.number = number
        self.frames = frames
        self.call = CURRENT_CALL.get(None)
        self.window = SendWindow()
        self.is_over = self.has_heard = False
        # To another replica: no message of the client was taken for it.
        self.can_move = kind != Frame.ASK
        self.listen: Callable[[], None] = unasked
        self.value: object = None
        self.error: BaseException | None = None
        self._arrived: list[Any] = []  # messages of a response, or items
        self._size = 0  # of what has arrived, in bytes
        self._taken = Taken(RESPONSE_BYTES) if kind == Frame.HTTP else Taken()
        self.futures = ()

    def on_frame(self, kind: int, content: memoryview, buffers: Buffers) -> None:
        """Take a frame of the process that does the work."""
        try:
            if kind == Frame.ANSWER:
                self._arrived += response_messages(content, buffers)
                self.end()
            elif kind == Frame.DONE:
                self.end(loads(content, buffers) if content else None)
            elif kind == Frame.FAILED:
                error = unpickled_error(content)
                if isinstance(error, NotBegunError) and not self.can_move:
                    error = error.for_caller()
                self.end(error=error)
            elif kind == Frame.CREDIT:
                self.window.give(content)
            elif kind == Frame.HEARD:
                self.has_heard = True
                if self.call is not None:
                    self.call.work.hear(is_heard=True)
            elif kind == Frame.LISTEN:
                self.listen()
            elif kind == Frame.TRACE:
                if self.call is not None:
                    self.call.trace_id = trace_id_in(content)
            else:
                self._add(kind, content, buffers)
        except FrameError:
            raise
        except Exception as problem:  # of user code, which reading may call
            self.fail(unreadable(_CONTENTS.get(kind, "the response"), problem))
            if kind in (Frame.ANSWER, Frame.DONE):
                self.end()

    def _add(self, kind: int, content: memoryview, buffers: Buffers) -> None:
        """Take a message of a response, a complete response, or an item."""
        if kind == Frame.RESPONSE:
            self._arrived += response_messages(content, buffers)
        else:
            self._size += len(content) + sum(map(len, buffers))
            if kind == Frame.CHUNK:
                body = bytes(content)
                self._arrived.append({"type": RESPONSE_BODY, "body": body, "more_body": True})
            elif kind == Frame.OUTPUT:
                self._arrived.append(message_of(content, buffers))
            elif kind == Frame.ITEM:
                self._arrived.append(loads(content, buffers))
            else:
                raise unknown(kind)
        if len(self._arrived) > _MOST_ARRIVED:
            raise FrameError("more messages of a call than there was room for")
        self.wake()

    def fail(self, error: Exception) -> None:
        """Have `take` raise an error, although the work goes on."""
        self.error = error
        self.wake()

    def end(self, value: object = None, error: BaseException | None = None) -> None:
        self.value = value
        if error is not None:  # else it may be that of an item that could not be read
            self.error = error
        self.is_over = True
        self.window.close()
        self.wake()

    def give(self) -> None:
        """Tell the child that what was taken last is used up."""
        if not self.is_over:
            self._taken.tell(self.frames, self.number)

    async def take(self) -> list[Any]:
        """Return what has arrived, and nothing at the end. Raises the work's error."""
        while not self._arrived:
            if self.error is not None:
                raise self.error
            if self.is_over:
                return []
            await self.wait()
        taken, self._arrived = self._arrived, []
        self._taken.add(len(taken), self._size)
        self._size = 0
        return taken

    async def outcome(self) -> Any:
        """Return the value of work without messages, or raise its error."""
        while not self.is_over:
            await self.wait()
        if self.error is not None:
            raise self.error
        return self.value

    async def leave(self, failure: BaseException | None) -> None:
        """Stop work that is not over, because of `failure`, and wait until it has ended."""
        call = self.call
        if isinstance(failure, asyncio.CancelledError) or (call and call.is_interrupted):
            _cancel(self.frames, self.number, call)
        else:  # its consumer takes no more
            self.frames.post(Frame.CLOSE, self.number)
        await self.ended()

    async def ended(self) -> None:
        """Wait until the work has ended, whatever arrives, even while cancellations arrive."""
        # Shielded, because a cancelled AnyIO scope cancels again on every turn of the loop.
        with CancelScope(shield=True):
            while not self.is_over:
                with suppress(asyncio.CancelledError):
                    await self.wait()


class RemoteCall(asyncio.Future[None]):
    """A call in a child, from its frame to the frame of its end. Owned by the loop of the frames.

    Its replica has it in the place of the call's task: `cancel` is passed on to the child, and it
    is done once the work has ended and `on_end` has been called with it.
    """

    __slots__ = (
        "call", "error", "frames", "is_cancelled", "is_over", "number", "on_end",
        "value",
    )  # fmt: skip
    call: Call
    on_end: Callable[[RemoteCall], None]
    number: int
    frames: Frames
    can_move = True  # to another replica: its only frame brought all of its input

    def begin(self, call: Call, on_end: Callable[[RemoteCall], None]) -> None:
        self.call = call
        self.on_end = on_end
        self.is_over = self.is_cancelled = False
        self.value: object = None
        self.error: BaseException | None = None
        self.number = 0  # until it is sent

    def on_frame(self, kind: int, content: memoryview, buffers: Buffers) -> None:
        """Take a frame of the process that does the work. Raises `FrameError`."""
        if kind == Frame.DONE:
            value, error = None, None
            try:
                value = read("the result", content, buffers) if content else None
            except RayServeException as problem:
                error = problem
            self.end(value, error)
        elif kind == Frame.FAILED:
            self.end(error=unpickled_error(content))
        else:
            raise unknown(kind)

    def end(self, value: object = None, error: BaseException | None = None) -> None:
        self.is_over = True
        self.value = value
        self.error = asyncio.CancelledError() if self.is_cancelled else error
        self.on_end(self)
        self.set_result(None)

    def cancel(self, msg: object = None) -> bool:
        """Have the child cancel the work."""
        self.is_cancelled = True
        if self.number and not self.is_over:
            _cancel(self.frames, self.number, self.call)
        return True
