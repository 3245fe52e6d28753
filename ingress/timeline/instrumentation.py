"""The router, replica and worker threads of an application that is recorded.

    Router.assign -> _take | _next    -> Replica.serve -> WorkerThreads.submit -> Router.release
    arrives          has a slot          begins           waits for a thread      ends

An application that starts with `record` among the engine's instruments uses these in place of their
base classes. Any other application has none of this code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from time import monotonic
from typing import Any

from ingress.asgi import route_template
from ingress.calls.call import CURRENT_CALL, Call, Runner
from ingress.context import REPLICA
from ingress.control.factories import Factories
from ingress.execution.execution import ExecutionPlan, Role
from ingress.execution.threads import WorkerThreads
from ingress.http.exchange import Exchange
from ingress.replicas.overload import Shed
from ingress.replicas.replica import Replica
from ingress.replicas.router import Router
from ingress.replicas.slots import Slots
from ingress.timeline.recorder import Journey, Recorder


def record(recorder: Recorder, factories: Factories) -> Factories:
    """Return the factories of applications whose requests are recorded."""
    return replace(
        factories,
        router=partial(TracedRouter, recorder),
        replica=partial(TracedReplica, recorder),
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
        kind = "request" if isinstance(call, Exchange) else "call"
        self._recorder.arrive(call, kind, _name_of(call), self.deployment_id.name)
        call.when_settled(self._recorder.answer)
        super().assign(call)
        if not call.settled:
            self._recorder.stand_in_queue(call)

    def release(self, replica: Runner, call: Call) -> None:
        # First, while no other call can have the slot.
        self._recorder.give_back(call)
        super().release(replica, call)

    def _take(self, slots: Slots, call: Call) -> Runner:
        replica = super()._take(slots, call)
        self._recorder.take_slot(call)
        return replica

    def _next(self, slots: Slots, shed: list[Shed]) -> Call | None:
        call = super()._next(slots, shed)
        if call is not None:
            self._recorder.stand_in_queue(call)
            self._recorder.take_slot(call)
        return call


class TracedReplica(Replica):
    """A replica that records its calls. Lives on its user loop, as its base class."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    async def serve(self, call: Call) -> Any:
        recorder, work = self._recorder, call.work
        journey = recorder.journey_of(call)
        if journey is None or work is None:
            return await super().serve(call)
        journey.replica = str(self.replica_id)
        journey.loop = recorder.track(is_loop=True)
        journey.began_at = monotonic()
        call.work = lambda user_code: _Steps(work(user_code), journey, recorder)
        scope = call.scope if isinstance(call, Exchange) else None
        try:
            return await super().serve(call)
        finally:
            if scope is not None and (path := route_template(scope)) is not None:
                method = scope.get("method", "WS")
                journey.name = f"{method} {call.metadata.route.rstrip('/')}{path}"


class TracedThreads(WorkerThreads):
    """Worker threads that record their runs. Thread-safe."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder

    def submit(self, call: Callable[[], None]) -> None:
        journey = self._recorder.current()
        super().submit(call if journey is None else partial(self._run, call, journey, monotonic()))

    def _run(self, call: Callable[[], None], journey: Journey, asked_at: float) -> None:
        track = self._recorder.track(is_loop=False)
        run = self._recorder.enter(journey, track, asked_at)
        try:
            call()
        finally:
            self._recorder.leave(run)


@dataclass
class _BatchPlan(ExecutionPlan):
    """The plan of a function under `@batch`: each of its runs is recorded like a request."""

    __slots__ = ("recorder",)  # by hand: `super()` fails in a class that `dataclass` makes again

    _: KW_ONLY
    recorder: Recorder

    async def run(self, /, *args: Any, **kwargs: Any) -> Any:
        with self._recorded() as journey:
            return await _Steps(super().run(*args, **kwargs), journey, self.recorder)

    async def stream(self, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
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
    func: Callable[..., Any],
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

    def __init__(self, awaitable: Awaitable[Any], journey: Journey, recorder: Recorder) -> None:
        self._awaitable = awaitable
        self._journey = journey
        self._recorder = recorder

    def __await__(self) -> Generator[Any, Any, Any]:
        recorder, journey = self._recorder, self._journey
        track = recorder.track(is_loop=True)
        inner: Any = self._awaitable.__await__()
        result: Any = None
        error: BaseException | None = None
        while True:
            run = recorder.enter(journey, track)
            try:
                awaited = inner.send(result) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
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


def _name_of(call: Call) -> str:
    if isinstance(call, Exchange):
        return f"{call.scope.get('method', 'WS')} {call.scope['path']}"
    return f"{call.metadata.deployment.name}.{call.metadata.method_name}"
