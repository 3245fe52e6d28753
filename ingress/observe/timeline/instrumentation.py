"""The router, replica and worker threads of an application that is recorded.

    Router.assign -> _take | _next    -> Replica.serve -> WorkerThreads.submit -> Router.release
    arrives          has a slot          begins           waits for a thread      ends

An application that starts with `record` among the engine's instruments uses these in place of their
base classes. Any other application has none of this code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from time import monotonic
from typing import Any

from ingress.app.asgi import route_template
from ingress.context import REPLICA
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL, Call, Work
from ingress.core.calls.retries import NotBegunError
from ingress.core.execution.execution import ExecutionPlan, Role
from ingress.core.execution.threads import Work as ThreadWork
from ingress.core.execution.threads import WorkerThreads
from ingress.observe.timeline.recorder import Journey, Recorder, Timeline
from ingress.serving.control.factories import Factories
from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.admission import Admission, AdmittingRunner
from ingress.serving.replicas.host import Host
from ingress.serving.replicas.overload import Shed
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.router import Router

ASK_S = 20.0  # for the records of a child

logger = logging.getLogger("ingress")


def record(recorder: Recorder, factories: Factories) -> Factories:
    """Return the factories of applications whose requests are recorded."""
    return replace(
        factories,
        router=partial(TracedRouter, recorder),
        replica=partial(TracedReplica, recorder),
        process_host=TracedProcessHost,
        threads=partial(TracedThreads, recorder),
        plan=partial(_plan, recorder, factories.plan),
    )


class TracedRouter(Router):
    """A router that records its calls. Thread-safe, as its base class."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    def assign(self, call: Call) -> None:
        kind = "request" if call.work.scope is not None else "call"
        self._recorder.arrive(call, kind, _name_of(call), self.deployment_id.name)
        call.when_settled(self._recorder.answer)
        super().assign(call)
        if not call.settled:
            self._recorder.stand_in_queue(call)

    def release(self, replica: AdmittingRunner, call: Call) -> None:
        # First, while no other call can have the slot.
        self._recorder.give_back(call)
        super().release(replica, call)

    def _give(self, slots: Admission, call: Call) -> None:
        super()._give(slots, call)
        self._recorder.take_slot(call)

    def _next(self, slots: Admission, shed: list[Shed]) -> Call | None:
        call = super()._next(slots, shed)
        if call is not None:
            self._recorder.leave_queue(call)
        return call


class _Traced(Replica):
    """A replica that records its calls. Lives on its user loop, as its base class."""

    __slots__ = ()
    _recorder: Recorder

    async def serve(self, call: Call) -> object:
        recorder, work = self._recorder, call.work
        journey = recorder.journey_of(call)
        if journey is None:
            return await super().serve(call)
        journey.replica = str(self.replica_id)
        journey.loop = recorder.track(is_loop=True)
        journey.began_at = monotonic()
        traced: Any = _TracedWork(work, journey, recorder)
        call.work = traced
        scope = work.scope
        try:
            return await super().serve(call)
        except NotBegunError:
            call.work = work  # another replica records it anew
            raise
        finally:
            if scope is not None and (path := route_template(scope)) is not None:
                method = scope.get("method", "WS")
                journey.name = f"{method} {call.metadata.route.rstrip('/')}{path}"


class TracedReplica(_Traced):
    """A replica that records its calls; a child records, too."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    async def start(self, *args: Any, **kwargs: Any) -> None:
        await super().start(*args, **kwargs)
        if isinstance(self.host, ProcessHost):
            self._recorder.join(self, partial(_ask, self.host))

    async def stop(self, timeout_s: float) -> None:
        """Keep what a child has recorded, and end the replica, all in `timeout_s`."""
        deadline = monotonic() + timeout_s
        if isinstance(self.host, ProcessHost):
            timeline: Timeline | None = None
            try:
                if not self.is_lost:
                    asked = _ask(self.host, min(ASK_S, timeout_s / 2))
                    timeline = await asyncio.to_thread(asked)
            except Exception as error:
                logger.warning("%s is missing in the trace: %r", self.replica_id, error)
            self._recorder.leave_for_good(self, timeline)
        await super().stop(max(0.0, deadline - monotonic()))


class ReplicaInChild(_Traced):
    """A replica in a child process: its recorder is its own, because no router is there."""

    __slots__ = ("_recorder",)

    def __init__(
        self, replica_id: ReplicaID, make_host: Callable[..., Host], **kwargs: Any
    ) -> None:
        self._recorder = Recorder()
        factories = record(self._recorder, Factories())
        super().__init__(replica_id, partial(make_host, factories=factories), **kwargs)

    async def serve(self, call: Call) -> object:
        kind = "request" if call.work.scope is not None else "call"
        journey = self._recorder.arrive(call, kind, _name_of(call), self.context.deployment)
        journey.arrived_at = journey.slot_at = call.started_at
        try:
            return await super().serve(call)
        finally:
            self._recorder.end(call)

    def timeline(self) -> Timeline:
        """Return a copy of its records. Thread-safe."""
        timeline = self._recorder.timeline()
        return replace(timeline, process=f"{self.replica_id}, process {timeline.pid}")


class TracedProcessHost(ProcessHost):
    """A child that records its calls."""

    __slots__ = ()
    made_there = ReplicaInChild

    def direct(self, call: Call) -> bool:
        return False  # in a task, where `serve` records it


def _ask(host: ProcessHost, timeout_s: float = ASK_S) -> Callable[[], Timeline]:
    return host.look(ReplicaInChild.timeline, timeout_s=timeout_s)


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
        track = self._recorder.track(is_loop=False)
        run = self._recorder.enter(journey, track, asked_at)
        try:
            return func()
        finally:
            self._recorder.leave(run)


@dataclass
class _BatchPlan(ExecutionPlan):
    """The plan of a function under `@batch`: each of its runs is recorded like a request."""

    __slots__ = ("recorder",)  # by hand: `super()` fails in a class that `dataclass` makes again

    _: KW_ONLY
    recorder: Recorder

    async def run(self, /, *args: object, **kwargs: object) -> object:
        with self._recorded() as journey:
            return await _Steps(super().run(*args, **kwargs), journey, self.recorder)

    async def stream(self, /, *args: object, **kwargs: object) -> AsyncGenerator[object, None]:
        with self._recorded():  # its steps on the loop are not recorded
            async with aclosing(super().stream(*args, **kwargs)) as items:
                async for item in items:
                    yield item

    @contextmanager
    def _recorded(self) -> Iterator[Journey]:
        recorder, replica, batch = self.recorder, REPLICA.get(), CURRENT_CALL.get()
        name = f"{self.name} x {len(batch.members or ())}"
        journey = recorder.arrive(batch, "batch", name, replica.deployment)
        journey.replica = str(replica.replica_id)
        journey.loop = recorder.track(is_loop=True)
        journey.slot_at = journey.began_at = journey.arrived_at
        try:
            yield journey
        finally:
            recorder.end(batch)


def _plan(
    recorder: Recorder,
    make_plan: Callable[..., ExecutionPlan],
    func: Callable[..., object],
    role: Role,
    **given: Any,
) -> ExecutionPlan:
    made = make_plan(func, role, **given)
    if role is not Role.BATCH:
        return made
    given = {each.name: getattr(made, each.name) for each in fields(ExecutionPlan)}
    return _BatchPlan(**given, recorder=recorder)


class _Steps:
    """An awaitable that records each step of a request's task. The loop is free between steps."""

    __slots__ = ("_awaitable", "_journey", "_recorder")

    def __init__(self, awaitable: Awaitable[object], journey: Journey, recorder: Recorder) -> None:
        self._awaitable = awaitable
        self._journey = journey
        self._recorder = recorder

    def __await__(self) -> Generator[object, object, object]:
        recorder, journey = self._recorder, self._journey
        track = recorder.track(is_loop=True)
        inner: Any = self._awaitable.__await__()
        result: object = None
        error: BaseException | None = None
        while True:
            run = recorder.enter(journey, track)
            try:
                awaited = inner.send(result) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            except NotBegunError:
                journey.began_at = 0.0  # so that it goes on in another replica
                raise
            except BaseException as raised:
                journey.error = type(raised).__name__
                raise
            finally:
                recorder.leave(run)
                error = None
            try:
                result = yield awaited
            except GeneratorExit:
                # The garbage collector closes coroutines of a closed loop, in any thread.
                inner.close()
                raise
            except BaseException as raised:  # thrown into the task, such as a cancellation
                error = raised


class _TracedWork:
    """The work of a call, which records its steps; in all else, the work itself."""

    __slots__ = ("_journey", "_recorder", "_work")

    def __init__(self, work: Work, journey: Journey, recorder: Recorder) -> None:
        self._work, self._journey, self._recorder = work, journey, recorder

    def __call__(self, user_code: Any) -> Awaitable[Any]:
        return _Steps(self._work(user_code), self._journey, self._recorder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _name_of(call: Call) -> str:
    scope = call.work.scope
    if scope is not None:
        return f"{scope.get('method', 'WS')} {scope['path']}"
    return f"{call.metadata.deployment.name}.{call.metadata.method_name}"
