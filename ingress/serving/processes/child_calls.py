"""The calls that a child makes by handle, in both processes.

    child     handle.remote() -> ServerRouter.assign -> a task there -> CALL or STREAM
    server    ChildCalls makes the call
              the answer settles the child's call, as for a replica in its process

In the server a call is made with the handle of the deployment, as a child of the call that the
replica works for: it has that call's request id and deadline, and is cancelled with it. The child
has found out its session id and priority. Numbers of these calls begin at `messages.UPWARD`, so
that they differ from those of calls that the child serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from ingress.core.base.types import PRIORITIES, DeploymentID
from ingress.core.calls.call import CURRENT_CALL, NO_WORK, Call, begin_wait, end_wait
from ingress.core.calls.call_tasks import CallTasks, LoopOfHandles
from ingress.core.calls.deadlocks import Node
from ingress.core.calls.loops import Mailbox, mailbox_of, running_loop
from ingress.core.calls.tracing import adopt, span_headers
from ingress.exceptions import RequestCycleError
from ingress.handle import (
    BoundInvocation,
    CallRouter,
    DeploymentBroadcastResponse,
    DeploymentHandle,
    DeploymentResponse,
    DeploymentResponseGenerator,
    Invocation,
    ReplicaSelection,
    Reservation,
    directory_here,
    pass_on,
)
from ingress.serving.processes.crossing import (
    as_sent,
    failing,
    item_as_sent,
    pickled_error,
    unpickled_error,
    unsendable,
)
from ingress.serving.processes.frames import (
    Buffers,
    FrameError,
    Frames,
    dumps,
    encode,
    loads,
    size_of_content,
)
from ingress.serving.processes.messages import (
    UPWARD,
    Frame,
    SendWindow,
    check,
    envelope_of,
    metadata_of,
    unknown,
)
from ingress.serving.processes.remote_calls import RemoteWork

MakeHandle = Callable[[DeploymentID], DeploymentHandle]
FindCall = Callable[[int], Call | None]
BROADCAST, CHOOSE = "broadcast", "choose"
"""Targets of a CALL: all replicas; one, whose slot is kept until a CLOSE. A CALL or STREAM to that
one has the number of that CALL as its target."""
_PRIORITY_NAMES = {level: name for name, level in PRIORITIES.items()}


@dataclass(eq=False, slots=True)
class ChildCalls:
    """The calls of one child that are in flight. Owned by the loop of the frames.

    `find_call` returns the call with a number, if the child still works for it. What the child
    sends and the protocol does not have raises an error, which ends the link; arguments that cannot
    be read fail their call.
    """

    _frames: Frames
    _make_handle: MakeHandle
    _find_call: FindCall
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _last: int = 0  # the number of the last call
    _responses: dict[int, DeploymentResponse | DeploymentResponseGenerator] = field(
        default_factory=dict
    )
    # Those that are no response of a handle.
    _works: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _selections: dict[int, ReplicaSelection] = field(default_factory=dict)
    _windows: dict[int, SendWindow] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def on_frame(self, kind: int, number: int, content: memoryview, buffers: Buffers) -> None:
        if kind in (Frame.CALL, Frame.STREAM):
            if number <= self._last:
                raise FrameError(f"call {number} after call {self._last}")
            self._last = number
            with failing(self._frames, number):  # by an argument, or by a deployment that is gone
                self._begin(kind, number, loads(content, buffers))
        elif kind not in (Frame.CREDIT, Frame.WAIT, Frame.CANCEL, Frame.CLOSE):
            raise unknown(kind)
        elif number > self._last:
            raise FrameError(f"a frame of call {number}, which it did not make")
        elif number in self._works or number in self._selections:
            if kind in (Frame.CANCEL, Frame.CLOSE):
                self._withdraw(number)
        elif number in self._responses:  # else its answer is on its way
            if kind == Frame.CREDIT:
                if number in self._windows:
                    self._windows[number].give(content)
            elif kind == Frame.WAIT:
                waiter, begins = loads(content)
                (self._begin_wait if begins else self._end_wait)(number, waiter)
            else:  # CANCEL, or CLOSE
                self._responses[number].cancel()
                if number in self._windows:
                    self._windows[number].close()  # `_pump` may wait for room

    def _begin(self, kind: int, number: int, content: Any) -> None:
        envelope, args, kwargs, deployment_id, parent, waiters, target = content
        check(envelope)
        metadata = metadata_of(
            envelope, deployment_id, is_http=False, is_streaming=kind == Frame.STREAM
        )
        handle = self._make_handle(deployment_id).options(
            method_name=metadata.method_name,
            stream=metadata.is_streaming,
            multiplexed_model_id=metadata.multiplexed_model_id,
            session_id=metadata.session_id,
            priority=_PRIORITY_NAMES[metadata.priority],
            fairness_key=metadata.fairness_key,
        )
        context = Context()
        adopt(envelope[-1], context)
        # A call of a batch, or of a task that outlives its request, has no parent here.
        origin = self._find_call(parent) or Call(metadata, NO_WORK, context)
        context.run(CURRENT_CALL.set, origin)
        if target in (BROADCAST, CHOOSE):
            work = self._choose(number, handle, args, kwargs)
            if target == BROADCAST:
                method = metadata.method_name
                work = self._broadcast(context.run(handle.broadcast, method, *args, **kwargs))
            task = self._loop.create_task(self._answer(number, work), context=context)
            self._works[number] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        response: Any
        if target is None:
            response = context.run(handle.remote, *args, **kwargs)
        else:
            selection = self._selections[target]
            selection._handle = handle  # which knows whether this is a stream
            response = context.run(handle.dispatch, selection, *args, **kwargs)
        self._responses[number] = response
        if isinstance(response, DeploymentResponseGenerator):
            self._windows[number] = SendWindow()
            task = self._loop.create_task(self._pump(number, response))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            mailbox = mailbox_of(self._loop)
            response._call.when_settled(lambda call: mailbox.post(self._end, number, call))
        for waiter in waiters:
            self._begin_wait(number, waiter)

    def _withdraw(self, number: int) -> None:
        """End a broadcast or a choice, or give the slot of a choice back."""
        if (task := self._works.get(number)) is not None:
            task.cancel()
        else:
            self._selections.pop(number).release()

    async def _answer(self, number: int, work: Coroutine[Any, Any, object]) -> None:
        try:
            with failing(self._frames, number):
                self._frames.post(Frame.DONE, number, encode(await work))
        except asyncio.CancelledError:
            self._frames.post(Frame.DONE, number)  # the child does not wait any more
            raise
        finally:
            del self._works[number]

    async def _choose(
        self, number: int, handle: DeploymentHandle, args: Any, kwargs: Any
    ) -> object:
        self._selections[number] = selection = await handle.reserve(args, kwargs)
        return selection.to_dict()

    async def _broadcast(self, response: DeploymentBroadcastResponse) -> object:
        """Return the values and errors of the replicas."""
        await response.results_async(return_exceptions=True)
        outcomes: list[tuple[object, bytes | None]] = []
        for each in response._root.value:
            error = each.error
            try:
                encode(as_sent(each.value))
            except Exception as problem:  # of the code of its class: the child gets it
                error = unsendable(each.deployment_name, problem, result=each.value)
            outcomes.append((None, pickled_error(error)) if error else (as_sent(each.value), None))
        return outcomes

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

    def _end(self, number: int, call: Call) -> None:
        """Send the outcome of a call."""
        self._responses.pop(number, None)
        self._windows.pop(number, None)
        error = call.error
        if error is None:
            try:
                value = as_sent(call.value)
                self._frames.post(Frame.DONE, number, b"" if value is None else encode(value))
                return
            except Exception as problem:  # of the code of its class: the child gets it
                error = unsendable(call.deployment_name, problem, result=call.value)
        self._frames.post(Frame.FAILED, number, pickled_error(error))

    async def _pump(self, number: int, items: DeploymentResponseGenerator) -> None:
        """Send the items of a stream, as fast as the child takes them."""
        window = self._windows[number]
        try:
            with failing(self._frames, number):
                try:
                    async for item in items:
                        content = item_as_sent(items._call.deployment_name, item)
                        await window.take(size_of_content(content))
                        self._frames.post(Frame.ITEM, number, content)
                except Exception:
                    items.cancel()
                    raise
                self._frames.post(Frame.DONE, number)
        finally:
            self._responses.pop(number, None)
            self._windows.pop(number, None)

    def stop(self) -> None:
        """Cancel the calls: the child has ended."""
        for response in list(self._responses.values()):
            response.cancel()
        for selection in self._selections.values():
            selection.release()
        for task in self._tasks:
            task.cancel()


class ServerDirectory(LoopOfHandles):
    """The directory of a child's handles, a `handle.Directory`. Thread-safe.

    Its calls run on the user loop. `frames` are set before the first handle is made.
    """

    __slots__ = (
        "_last",
        "_numbers",
        "_routers",
        "_waiters",
        "frames",
        "works",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, mailbox_of(loop))
        self.frames: Frames
        self.works: dict[int, RemoteWork] = {}
        self._last = UPWARD
        self._routers: dict[DeploymentID, ServerRouter] = {}
        # Of the calls that are awaited, or on their way: the calls that wait, and the numbers.
        self._waiters: dict[Call, set[int]] = {}
        self._numbers: dict[Call, int] = {}

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return directory_here, ()  # of the process in which a handle arrives

    def handle(self, deployment_id: DeploymentID) -> DeploymentHandle:
        return DeploymentHandle(deployment_id, self)

    def router(self, deployment_id: DeploymentID) -> CallRouter:
        router = self._routers.get(deployment_id)
        if router is None:
            router = ServerRouter(self, deployment_id, self._loop)
            router = self._routers.setdefault(deployment_id, router)
        return router

    def methods(self, deployment_id: DeploymentID) -> list[str] | None:
        """Return `None`, for any name: the server's process checks the name at the call."""
        return None

    def send(self, call: Call, invocation: Invocation, deployment_id: DeploymentID) -> RemoteWork:
        """Send the frame of a call. Called on the user loop. Raises as `unsendable`."""
        args, kwargs = invocation.args, invocation.kwargs
        envelope = envelope_of(call.metadata, span_headers())
        waiters = [*self._waiters.get(call, ()), *_members_that_wait(call)]
        kind = Frame.CALL if invocation.channel is None else Frame.STREAM
        target: object = None
        if isinstance(invocation, BoundInvocation):
            target = BROADCAST if invocation.slot is None else invocation.slot.number
        elif isinstance(invocation, Reservation):
            target = CHOOSE
        value = envelope, args, kwargs, deployment_id, number_of(call._parent), waiters, target
        try:
            content = encode(value)
            self._last += 1
            self.frames.post(kind, self._last, content)
        except Exception as problem:
            raise unsendable(deployment_id.name, problem, args=args, kwargs=kwargs) from problem
        work = self.works[self._last] = RemoteWork(kind, self._last, self.frames)
        self._numbers[call] = self._last
        return work

    def forget(self, call: Call) -> None:
        """Drop the records of a call that has ended. Called on the user loop."""
        self._waiters.pop(call, None)
        self._numbers.pop(call, None)

    # The waits, of which the server's process has to know: it looks for deadlocks.

    def note_wait(self, number: int, node: object, *, begins: bool) -> None:
        """Note that the call with a number begins, or ceases, to wait for a node. Thread-safe."""
        if not (isinstance(node, Call) and isinstance(node.queue, ServerRouter)):
            return
        # A call that is settled before it is sent, as its argument fails, is not forgotten at the
        # end of a task: it has none.
        if not node.settled or (not begins and node in self._waiters):
            if running_loop() is self._loop:
                self._note_wait(number, node, begins)
            else:
                self._mailbox.post(self._note_wait, number, node, begins)

    def _note_wait(self, number: int, call: Call, begins: bool) -> None:
        if begins and call.settled:
            return  # it may be forgotten already
        waiters = self._waiters.setdefault(call, set())
        (waiters.add if begins else waiters.discard)(number)
        if not waiters:
            del self._waiters[call]
        sent = self._numbers.get(call)
        if sent is not None and not call.settled:
            self.frames.post(Frame.WAIT, sent, dumps((number, begins)))


class Waits(set[Node]):
    """The nodes that a call of a child waits for. It tells the directory of each."""

    __slots__ = ("_directory", "_number")

    def __init__(self, directory: ServerDirectory, number: int) -> None:
        super().__init__()
        self._directory = directory
        self._number = number

    def add(self, node: Node) -> None:
        super().add(node)
        self._directory.note_wait(self._number, node, begins=True)

    def discard(self, node: object) -> None:
        super().discard(node)
        self._directory.note_wait(self._number, node, begins=False)


def _members_that_wait(call: Call) -> list[int]:
    """Return the numbers of the calls of a batch that waits for a call which it has made."""
    batch = call._parent
    if batch is None or batch.members is None or call not in batch.waits_for:
        return []
    return [number_of(each) for each in batch.members]


def number_of(call: Call | None) -> int:
    """Return the number of a call that this process serves; 0 for any other."""
    return getattr(call, "number", 0)


class ServerRouter(CallTasks):
    """The `CallRouter` of a deployment that a child calls. Its tasks run on the user loop.

    The server's process knows the calls that hold the slots.
    """

    __slots__ = ("_deployment_id", "_directory")

    def __init__(
        self,
        directory: ServerDirectory,
        deployment_id: DeploymentID,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(loop, mailbox_of(loop))
        self._directory = directory
        self._deployment_id = deployment_id

    def end(self, call: Call, task: asyncio.Task[None]) -> None:
        self._directory.forget(call)
        super().end(call, task)

    async def run(self, call: Call) -> None:
        invocation = call.work
        assert isinstance(invocation, Invocation)
        work: RemoteWork | None = None
        try:
            work = self._directory.send(call, invocation, self._deployment_id)
            if isinstance(invocation, Reservation):
                place: Any = await work.outcome()
                invocation.hold(call, RemoteSlot(work, self._mailbox), place)
                return
            if isinstance(invocation, BoundInvocation) and invocation.slot is None:
                found: Any = await work.outcome()
                outcomes = ((each, error and unpickled_error(error)) for each, error in found)
                self.settle_each(call, outcomes)
                return
            if invocation.channel is None:
                call.settle(await work.outcome())
                return
            while items := await work.take():
                for item in items:
                    if not await pass_on(item, invocation.channel):
                        work.frames.post(Frame.CLOSE, work.number)
                        call.settle()
                        return
                work.give()
            call.settle()
        except asyncio.CancelledError:
            if work is not None and not work.is_over:
                work.frames.post(Frame.CANCEL, work.number)


@dataclass(frozen=True, slots=True)
class RemoteSlot:
    """A slot that the server holds for a call of this process. Thread-safe."""

    work: RemoteWork
    mailbox: Mailbox

    @property
    def number(self) -> int:
        return self.work.number

    def release(self, call: Call) -> None:
        self.mailbox.post(self.work.frames.post, Frame.CLOSE, self.number)
