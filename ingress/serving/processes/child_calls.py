"""The calls that a child makes by handle, in the server's process.

A call is made with the handle of the deployment, as a child of the call that the replica works for:
it has that call's request id and deadline, and is cancelled with it. The child has found out its
session id and priority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any

from ingress.core.base.types import PRIORITIES, DeploymentID
from ingress.core.calls.call import CURRENT_CALL, NO_WORK, Call, begin_wait, end_wait
from ingress.core.calls.loops import mailbox_of
from ingress.core.calls.tracing import adopt
from ingress.exceptions import RequestCycleError
from ingress.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from ingress.serving.processes.crossing import as_sent, pickled_error
from ingress.serving.processes.errors import unsendable
from ingress.serving.processes.frames import (
    Buffers,
    FrameError,
    Frames,
    encode,
    loads,
    size_of_content,
)
from ingress.serving.processes.messages import Kind, check, metadata_of, unknown
from ingress.serving.processes.window import Window

MakeHandle = Callable[[DeploymentID], DeploymentHandle]
FindCall = Callable[[int], Call | None]
_PRIORITY_NAMES = {level: name for name, level in PRIORITIES.items()}


class ChildCalls:
    """The calls of one child that are in flight. Owned by the loop of the frames.

    `find_call` returns the call with a number, if the child still works for it. What the child
    sends and the protocol does not have raises an error, which ends the link; arguments that cannot
    be read fail their call.
    """

    __slots__ = ("_find_call", "_frames", "_last", "_loop", "_make_handle", "_responses",
                 "_tasks", "_windows")  # fmt: skip

    def __init__(self, frames: Frames, make_handle: MakeHandle, find_call: FindCall) -> None:
        self._frames = frames
        self._make_handle = make_handle
        self._find_call = find_call
        self._loop = asyncio.get_running_loop()
        self._last = 0  # the number of the last call
        self._responses: dict[int, DeploymentResponse | DeploymentResponseGenerator] = {}
        self._windows: dict[int, Window] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_frame(self, kind: int, number: int, content: memoryview, buffers: Buffers) -> None:
        if kind in (Kind.CALL, Kind.STREAM):
            if number <= self._last:
                raise FrameError(f"call {number} after call {self._last}")
            self._last = number
            try:
                self._begin(kind, number, loads(content, buffers))
            except Exception as error:  # of the arguments, or of a deployment that is gone
                self._frames.post(Kind.FAILED, number, pickled_error(error))
        elif kind not in (Kind.CREDIT, Kind.WAIT, Kind.CANCEL, Kind.CLOSE):
            raise unknown(kind)
        elif number > self._last:
            raise FrameError(f"a frame of call {number}, which it did not make")
        elif number in self._responses:  # else its answer is on its way
            if kind == Kind.CREDIT:
                if number in self._windows:
                    self._windows[number].give(content)
            elif kind == Kind.WAIT:
                waiter, begins = loads(content)
                (self._begin_wait if begins else self._end_wait)(number, waiter)
            else:  # CANCEL, or CLOSE
                self._responses[number].cancel()
                if number in self._windows:
                    self._windows[number].close()  # `_pump` may wait for room

    def _begin(self, kind: int, number: int, content: Any) -> None:
        envelope, args, kwargs, deployment_id, parent, waiters = content
        check(envelope)
        metadata = metadata_of(
            envelope, deployment_id, is_http=False, is_streaming=kind == Kind.STREAM
        )
        handle = self._make_handle(deployment_id).options(
            method_name=metadata.method_name,
            stream=metadata.is_streaming,
            multiplexed_model_id=metadata.multiplexed_model_id,
            session_id=metadata.session_id,
            priority=_PRIORITY_NAMES[metadata.priority],
        )
        context = Context()
        adopt(envelope[-1], context)
        # A call of a batch, or of a task that outlives its request, has no parent here.
        origin = self._find_call(parent) or Call(metadata, NO_WORK, context)
        response = self._made_in(context, origin, handle, args, kwargs)
        self._responses[number] = response
        if isinstance(response, DeploymentResponseGenerator):
            self._windows[number] = Window()
            task = self._loop.create_task(self._pump(number, response))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            mailbox = mailbox_of(self._loop)
            response._call.when_settled(lambda call: mailbox.post(self._end, number, call))
        for waiter in waiters:
            self._begin_wait(number, waiter)

    def _begin_wait(self, number: int, waiter: int) -> None:
        """Note that a call of the child waits for the answer: that may be a deadlock."""
        call, waiting = self._responses[number]._call, self._find_call(waiter)
        if waiting is None or call.settled:
            return
        try:
            begin_wait(call, waiting)
        except RequestCycleError as error:
            call.cancel(error)
        else:
            # Until the child says otherwise, also if this wait has ended already.
            call.when_settled(lambda call: end_wait(call, waiting))

    def _end_wait(self, number: int, waiter: int) -> None:
        waiting = self._find_call(waiter)
        if waiting is not None and isinstance(waiting.waits_for, set):
            end_wait(self._responses[number]._call, waiting)

    def _made_in(
        self,
        context: Context,
        parent: Call,
        handle: DeploymentHandle,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> DeploymentResponse | DeploymentResponseGenerator:
        def make() -> DeploymentResponse | DeploymentResponseGenerator:
            CURRENT_CALL.set(parent)
            made: DeploymentResponse | DeploymentResponseGenerator = handle.remote(*args, **kwargs)
            return made

        return context.run(make)

    def _end(self, number: int, call: Call) -> None:
        """Send the outcome of a call."""
        self._responses.pop(number, None)
        self._windows.pop(number, None)
        error = call.error
        if error is None:
            try:
                value = as_sent(call.value)
                self._frames.post(Kind.DONE, number, b"" if value is None else encode(value))
                return
            except Exception as problem:
                error = unsendable(call.deployment_name, problem, result=call.value)
        self._frames.post(Kind.FAILED, number, pickled_error(error))

    async def _pump(self, number: int, items: DeploymentResponseGenerator) -> None:
        """Send the items of a stream, as fast as the child takes them."""
        window = self._windows[number]
        try:
            async for item in items:
                try:
                    content = encode(as_sent(item))
                except Exception as problem:
                    name = items._call.deployment_name
                    raise unsendable(name, problem, item=item) from problem
                await window.take(size_of_content(content))
                self._frames.post(Kind.ITEM, number, content)
        except Exception as error:
            items.cancel()
            self._frames.post(Kind.FAILED, number, pickled_error(error))
        else:
            self._frames.post(Kind.DONE, number)
        finally:
            self._responses.pop(number, None)
            self._windows.pop(number, None)

    def stop(self) -> None:
        """Cancel the calls: the child has ended."""
        for response in list(self._responses.values()):
            response.cancel()
        for task in self._tasks:
            task.cancel()
