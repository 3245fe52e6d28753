"""A call by handle with a single answer, in the server's process: no task waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ingress.core.calls.call import Call
from ingress.serving.processes.crossing import unpickled_error
from ingress.serving.processes.errors import unreadable
from ingress.serving.processes.frames import Buffers, Frames, dumps, loads
from ingress.serving.processes.messages import Kind, unknown


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
        if kind == Kind.DONE:
            value, error = None, None
            if content:
                try:
                    value = loads(content, buffers)
                except Exception as problem:
                    error = unreadable("the result", problem)
            self.end(value, error)
        elif kind == Kind.FAILED:
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
        """Have the child cancel the work, with the error of its call."""
        self.is_cancelled = True
        if self.number and not self.is_over:
            reason = self.call.error
            self.frames.post(Kind.CANCEL, self.number, b"" if reason is None else dumps(reason))
        return True
