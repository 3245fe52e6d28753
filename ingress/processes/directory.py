"""Handles in a child: calls of other deployments, which the server's process makes for it.

    handle.remote() -> ServerRouter.assign -> a task on the user loop -> CALL or STREAM -> `Errands`
                       the answer settles the call, as for a replica in this process

Numbers of these calls begin at `messages.UPWARD`, so that they differ from those of calls that the
child serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ingress.base.types import DeploymentID
from ingress.calls.call import Call, when_all_settled
from ingress.calls.channel import EndOfStream
from ingress.calls.deadlines import deadlines_of
from ingress.calls.loops import Mailbox, mailbox_of
from ingress.exceptions import RequestCancelledError
from ingress.handle import CallRouter, DeploymentHandle, DeploymentResponse, Invocation, pass_on
from ingress.processes.errors import unsendable
from ingress.processes.frames import Frames, dumps
from ingress.processes.link import RemoteWork
from ingress.processes.messages import UPWARD, Kind, envelope_of, size_of_item


class ServerDirectory:
    """The directory of a child's handles, a `handle.Directory`. Thread-safe.

    Its calls run on the user loop. `frames` are set before the first handle is made.
    """

    __slots__ = ("_last", "_loop", "_mailbox", "_routers", "frames", "works")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.frames: Frames
        self.works: dict[int, RemoteWork] = {}
        self._last = UPWARD
        self._loop = loop
        self._mailbox: Mailbox = mailbox_of(loop)
        self._routers: dict[DeploymentID, ServerRouter] = {}

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

    def when_resolved(self, responses: list[DeploymentResponse], then: Callable[[], None]) -> None:
        when_all_settled(
            [response._call for response in responses], lambda: self._mailbox.post(then)
        )

    def later(self, callback: Callable[[], Any]) -> None:
        self._mailbox.post(callback)

    def expire(self, call: Call, deadline: float) -> None:
        deadlines = deadlines_of(self._loop)
        deadlines.add(call, deadline)
        call.when_settled(deadlines.discard)

    def send(self, kind: Kind, content: bytes) -> RemoteWork:
        """Send the frame of a call. Called on the user loop."""
        self._last += 1
        work = self.works[self._last] = RemoteWork(self._last, self.frames)
        self.frames.post(kind, self._last, content)
        return work


class ServerRouter:
    """The `CallRouter` of a deployment that a child calls. Its tasks run on the user loop."""

    __slots__ = ("_deployment_id", "_directory", "_loop", "_mailbox", "_tasks")

    def __init__(
        self,
        directory: ServerDirectory,
        deployment_id: DeploymentID,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._directory = directory
        self._deployment_id = deployment_id
        self._loop = loop
        self._mailbox = mailbox_of(loop)
        self._tasks: dict[Call, asyncio.Task[None]] = {}

    def assign(self, call: Call) -> None:
        self._mailbox.post(self._begin, call)

    def withdraw(self, call: Call) -> bool:
        self._mailbox.post(self._cancel, call)
        return True

    def holders(self, call: Call) -> None:
        """Return `None`: the calls that hold the slots are unknown in this process.

        So a cycle through several processes is not detected.
        """

    def describe_deadlock(self, chain: str) -> str:
        return chain

    def _begin(self, call: Call) -> None:
        if call.settled:  # cancelled before it came here
            return
        task = self._loop.create_task(self._run(call), context=call.context)
        self._tasks[call] = task
        task.add_done_callback(lambda _: self._end(call))

    def _cancel(self, call: Call) -> None:
        task = self._tasks.get(call)
        if task is not None:
            task.cancel()

    def _end(self, call: Call) -> None:
        del self._tasks[call]
        # Race with a cancellation before the task's first step: then the task runs no line.
        call.settle(error=RequestCancelledError(call.metadata.request_id))
        call.release_references()

    async def _run(self, call: Call) -> None:
        invocation = call.work
        assert isinstance(invocation, Invocation)
        work: RemoteWork | None = None
        try:
            work = self._send(call, invocation)
            if invocation.channel is None:
                call.settle(await work.outcome())
                return
            while True:
                for item in (items := await work.take()):
                    if not await pass_on(item, invocation.channel):
                        work.frames.post(Kind.CLOSE, work.number)
                        call.settle()
                        return
                work.give(len(items), sum(map(size_of_item, items)))
        except EndOfStream:
            call.settle()
        except asyncio.CancelledError:
            if work is not None and not work.is_over:
                work.frames.post(Kind.CANCEL, work.number)
        except Exception as error:
            call.settle(error=error)

    def _send(self, call: Call, invocation: Invocation) -> RemoteWork:
        parent = getattr(call._parent, "number", 0)
        args, kwargs = invocation.args, invocation.kwargs
        try:
            head = envelope_of(call.metadata), args, kwargs, self._deployment_id, parent
            content = dumps(head)
        except Exception as problem:
            given: dict[Any, Any] = dict(enumerate(args))
            given.update(kwargs)
            raise unsendable("arguments", given, problem) from problem
        kind = Kind.CALL if invocation.channel is None else Kind.STREAM
        return self._directory.send(kind, content)
