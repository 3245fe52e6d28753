"""Calls of deployments whose replicas are in other processes: each is a task of one loop here.

CallTasks       the queue of one deployment: the tasks of its calls
LoopOfHandles   the part of a `handle.Directory` that needs the loop
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ingress.core.calls.call import NO_CONTEXT, NO_WORK, Call, when_all_settled
from ingress.core.calls.deadlines import deadlines_of
from ingress.core.calls.loops import Mailbox
from ingress.exceptions import RequestCancelledError


@dataclass(eq=False, slots=True)
class CallTasks:
    """The calls of one deployment, a `handle.CallRouter`. Owned by the loop.

    Any thread may assign and withdraw calls.
    """

    _loop: asyncio.AbstractEventLoop
    _mailbox: Mailbox
    _tasks: dict[Call, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self, call: Call) -> None:
        """Make the call, and settle it, or raise its error. Its cancellation is the call's."""
        raise NotImplementedError

    def assign(self, call: Call) -> None:
        self._mailbox.post(self._begin, call)

    def broadcast(self, call: Call) -> None:
        self.assign(call)

    def dispatch(self, reserved: Call, call: Call, slot: Any) -> None:
        work: Any = call.work
        work.slot = slot
        self.assign(call)

    def settle_each(self, call: Call, outcomes: Iterable[tuple[Any, Any]]) -> None:
        """Settle a broadcast with the calls of the replicas, by their values and errors."""
        calls = []
        for value, error in outcomes:
            calls.append(Call(call.metadata, NO_WORK, NO_CONTEXT))
            calls[-1].settle(value, error)
        call.settle(calls)

    def withdraw(self, call: Call) -> bool:
        self._mailbox.post(self._cancel, call)
        return True

    def holders(self, call: Call) -> None:
        """Return `None`: the calls that hold the slots are unknown in this process."""

    def note_expired(self) -> None:
        """Do nothing: the router in the other process counts the call."""

    def describe_deadlock(self, chain: str) -> str:
        return chain

    def _begin(self, call: Call) -> None:
        if call.settled:  # cancelled before it came here
            return
        # In the call's copy of the caller's context: tracers look there.
        task = self._loop.create_task(self.run(call), context=call.context)
        self._tasks[call] = task
        task.add_done_callback(lambda _: self.end(call, task))

    def _cancel(self, call: Call) -> None:
        task = self._tasks.get(call)
        if task is not None:
            task.cancel()

    def end(self, call: Call, task: asyncio.Task[None]) -> None:
        """Forget a call whose task has ended."""
        del self._tasks[call]
        error = None if task.cancelled() else task.exception()
        # Race with a cancellation before the task's first step: then the task runs no line.
        call.settle(error=error or RequestCancelledError(call.metadata.request_id))
        call.release_references()


@dataclass(eq=False, slots=True)
class LoopOfHandles:
    """The loop on which the handles of a directory wait. Thread-safe."""

    _loop: asyncio.AbstractEventLoop
    _mailbox: Mailbox

    def when_resolved(self, responses: Iterable[Any], then: Callable[[], None]) -> None:
        when_all_settled(
            [response._call for response in responses], lambda: self._mailbox.post(then)
        )

    def later(self, callback: Callable[[], Any]) -> None:
        self._mailbox.post(callback)

    def expire(self, call: Call, deadline: float) -> None:
        deadlines = deadlines_of(self._loop)
        deadlines.add(call, deadline)
        call.when_settled(deadlines.discard)
