"""The router, replica and worker threads of an application that is recorded.

    Router.assign -> Replica.serve -> WorkerThreads.submit -> its run
    arrives          each step        waits for a thread

An application that starts with `record` among the engine's instruments uses these in place of their
base classes. Any other application has none of this code.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, cast

from ingress.context import REPLICA
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.execution.execution import ExecutionPlan, Role
from ingress.core.execution.threads import ThreadWork, WorkerThreads
from ingress.observe.timeline.recorder import ASK_S, Journey, Recorder, Timeline, current_track
from ingress.serving.control.factories import Factories, Host, ProcessHost, Replica, Router
from ingress.telemetry.logs import logger


def record(recorder: Recorder, factories: Factories) -> Factories:
    """Return the factories of applications whose requests are recorded."""
    return replace(
        factories,
        router=partial(TracedRouter, recorder),
        replica=partial(TracedReplica, recorder),
        process_host=TracedProcessHost,
        threads=partial(TracedThreads, recorder),
        plan=cast(Any, partial(_plan, recorder, factories.plan)),
    )


class TracedRouter(Router):
    """A router that records its calls. Thread-safe, as its base class."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    def assign(self, call: Call) -> None:
        journey = _seen(self._recorder, call)
        journey.arrived_at = monotonic()  # its body has been read, its arguments are there
        super().assign(call)
        # Race with a replica that gives it a slot at this moment: then it has hardly waited.
        if not (call.settled or call.assigned_at):
            journey.was_queued = True


class TracedReplica(Replica):
    """A replica that records its calls; a child records, too. Lives on its user loop."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    async def serve(self, call: Call) -> object:
        return await _stepwise(super().serve(call), _seen(self._recorder, call), self._recorder)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        await super().start(*args, **kwargs)
        if isinstance(self.host, ProcessHost):
            self._recorder.children[self] = partial(self.host.look, _timeline, timeout_s=ASK_S)

    async def stop(self, timeout_s: float) -> None:
        """Keep what a child has recorded, and end the replica, all in `timeout_s`."""
        deadline = monotonic() + timeout_s
        self._recorder.children.pop(self, None)
        if isinstance(self.host, ProcessHost) and not self.is_lost:
            try:
                asked = self.host.look(_timeline, timeout_s=min(ASK_S, timeout_s / 2))
                self._recorder.left.append(await asyncio.to_thread(asked))
            except Exception as error:
                logger.warning("%s is missing in the trace: %r", self.replica_id, error)
        await super().stop(max(0.0, deadline - monotonic()))


class ReplicaInChild(TracedReplica):
    """A replica in a child process: its recorder is its own, because no router is there."""

    __slots__ = ()

    def __init__(
        self, replica_id: ReplicaID, make_host: Callable[..., Host], **kwargs: Any
    ) -> None:
        recorder = Recorder().__enter__()  # until the process ends
        factories = record(recorder, Factories())
        super().__init__(recorder, replica_id, partial(make_host, factories=factories), **kwargs)


def _timeline(replica: TracedReplica) -> Timeline:
    """Return the records of a replica, in its child process."""
    return replica._recorder.timeline(replica.replica_id)


class TracedProcessHost(ProcessHost):
    """A child that records its calls."""

    __slots__ = ()
    made_there = ReplicaInChild

    def direct(self, call: Call) -> bool:
        return False  # in a task, where `serve` records it


class TracedThreads(WorkerThreads):
    """Worker threads that record their runs. Thread-safe."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    def submit(self, call: Callable[[], None]) -> None:
        if (journey := self._recorder.current()) is not None:
            asked_at = monotonic()
            if isinstance(call, ThreadWork):
                # Its function alone: the loop may have the result before the call returns.
                call.func = partial(self._run, call.func, journey, asked_at)
            else:
                call = partial(self._run, call, journey, asked_at)
        super().submit(call)

    def _run(self, func: Callable[[], Any], journey: Journey, asked_at: float) -> Any:
        run = self._recorder.enter(journey, current_track(is_loop=False), asked_at)
        try:
            return func()
        finally:
            self._recorder.leave(run)


def _plan(
    recorder: Recorder,
    make_plan: Callable[..., ExecutionPlan],
    func: Callable[..., object],
    role: Role,
    **given: Any,
) -> ExecutionPlan | _BatchPlan:
    made = make_plan(func, role, **given)
    return _BatchPlan(made, recorder) if role is Role.BATCH else made


class _BatchPlan:
    """The part of a plan that a batch queue needs: each of its runs is recorded like a request."""

    __slots__ = ("_plan", "_recorder")

    def __init__(self, plan: ExecutionPlan, recorder: Recorder) -> None:
        self._plan, self._recorder = plan, recorder

    async def run(self, /, *args: object, **kwargs: object) -> object:
        return await _stepwise(self._plan.run(*args, **kwargs), self._begun(), self._recorder)

    def stream(self, /, *args: object, **kwargs: object) -> AsyncGenerator[object, None]:
        self._begun()  # its steps on the loop are not recorded
        return self._plan.stream(*args, **kwargs)

    def _begun(self) -> Journey:
        journey = self._recorder.see(CURRENT_CALL.get())
        journey.replica, journey.loop = str(REPLICA.get().replica_id), current_track(is_loop=True)
        return journey


@types.coroutine
def _stepwise(
    awaitable: Awaitable[object], journey: Journey, recorder: Recorder
) -> Generator[object, object, object]:
    """Record each step of a request's task. The loop is free between steps."""
    track = current_track(is_loop=True)
    inner: Any = awaitable.__await__()
    step, given = inner.send, None
    while True:
        run = recorder.enter(journey, track)
        try:
            awaited = step(given)
        except StopIteration as end:
            return end.value
        finally:
            recorder.leave(run)
        try:
            step, given = inner.send, (yield awaited)
        except GeneratorExit:
            # The garbage collector closes coroutines of a closed loop, in any thread.
            inner.close()
            raise
        except BaseException as error:  # thrown into the task, such as a cancellation
            step, given = inner.throw, error


def _seen(recorder: Recorder, call: Call) -> Journey:
    """Return the journey of a call; that of a request has its path, until its route is found."""
    journey, scope = recorder.see(call), call.work.scope
    if scope is not None:
        journey.name = f"{scope.get('method', 'WS')} {scope['path']}"
    return journey
