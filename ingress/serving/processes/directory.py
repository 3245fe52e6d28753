"""Handles in a child: calls of other deployments, which the server's process makes for it.

    handle.remote() -> ServerRouter.assign -> a task there -> CALL or STREAM -> ChildCalls
                       the answer settles the call, as for a replica in this process

Numbers of these calls begin at `messages.UPWARD`, so that they differ from those of calls that the
child serves.
"""

from __future__ import annotations

import asyncio

from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import Call
from ingress.core.calls.call_tasks import CallTasks, LoopOfHandles
from ingress.core.calls.deadlocks import Node
from ingress.core.calls.loops import mailbox_of, running_loop
from ingress.core.calls.tracing import span_headers
from ingress.handle import (
    CallRouter,
    DeploymentHandle,
    Invocation,
    directory_here,
    pass_on,
)
from ingress.serving.processes.errors import unsendable
from ingress.serving.processes.frames import Frames, dumps, encode
from ingress.serving.processes.link import RemoteWork
from ingress.serving.processes.messages import UPWARD, Kind, envelope_of


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

    def send(self, call: Call, kind: Kind, *head: object) -> RemoteWork:
        """Send the frame of a call. Called on the user loop."""
        waiters = self._waiters.get(call, ())
        content = encode((*head, [*waiters, *_members_that_wait(call)]))
        self._last += 1
        self.frames.post(kind, self._last, content)  # may raise: there is no work then
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
            self.frames.post(Kind.WAIT, sent, dumps((number, begins)))


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

    def end(self, call: Call) -> None:
        self._directory.forget(call)
        super().end(call)

    async def run(self, call: Call) -> None:
        invocation = call.work
        assert isinstance(invocation, Invocation)
        work: RemoteWork | None = None
        try:
            work = self._send(call, invocation)
            if invocation.channel is None:
                call.settle(await work.outcome())
                return
            while items := await work.take():
                for item in items:
                    if not await pass_on(item, invocation.channel):
                        work.frames.post(Kind.CLOSE, work.number)
                        call.settle()
                        return
                work.give()
            call.settle()
        except asyncio.CancelledError:
            if work is not None and not work.is_over:
                work.frames.post(Kind.CANCEL, work.number)
        except Exception as error:
            call.settle(error=error)

    def _send(self, call: Call, invocation: Invocation) -> RemoteWork:
        args, kwargs = invocation.args, invocation.kwargs
        envelope = envelope_of(call.metadata, span_headers())
        head = envelope, args, kwargs, self._deployment_id
        kind = Kind.CALL if invocation.channel is None else Kind.STREAM
        try:
            return self._directory.send(call, kind, *head, number_of(call._parent))
        except Exception as problem:
            name = self._deployment_id.name
            raise unsendable(name, problem, args=args, kwargs=kwargs) from problem
