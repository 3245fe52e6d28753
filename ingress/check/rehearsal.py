"""Calling a `def` from many threads at once, on an instance that serves no more.

    while it serves    the last arguments of each call of a watched `def` are kept
    when it stops      those calls are made again, from `THREADS` threads at once and with a switch
                       after each read, before its lifespan ends and its `__del__` runs

So no request meets what goes wrong: its instance behaves as ever as long as it has requests. What
the calls do elsewhere, in a file or a database, they do again.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from time import monotonic
from typing import Any, ClassVar

from ingress.asgi import BoundApp
from ingress.check.write_recording import (
    CONTAINERS,
    Line,
    Trace,
    Writes,
    traced_class,
    traced_state,
)
from ingress.context import ReplicaContext
from ingress.execution.execution import ExecutionPlan, Kind, Role
from ingress.replicas.user_code import MakePlan, UserCode

THREADS = 8
ROUNDS = 8
CALLS_PER_ROUND = 8
BUDGET_S = 3.0
"""How long the rehearsal of one instance may begin new rounds."""

TIMES = 2
"""How many instances a function is rehearsed on."""

_SAMPLES = 3
_ITEMS = 100
_SWITCH_INTERVAL_S = 1e-6


@dataclass(frozen=True, slots=True)
class LoopProbe:
    """What a rehearsal is to decide: `attribute` of the instances of whom these functions are."""

    functions: tuple[str, ...]
    attribute: str


@dataclass(slots=True)
class Outcome:
    """What was seen: what a line has written, and what was raised there. Thread-safe."""

    writes: dict[Line, Writes] = field(default_factory=dict)
    errors: dict[tuple[str, int], str] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wants(self, name: str) -> bool:
        """Whether a function is to be rehearsed once more: a suite may make many replicas."""
        with self._lock:
            self._times[name] += 1
            return self._times[name] <= TIMES

    def add(self, trace: Trace) -> None:
        # Replicas stop side by side, each with its rehearsal.
        with self._lock:
            for line, seen in trace.writes.items():
                known = self.writes.setdefault(line, Writes())
                known.count += seen.count
                known.lost += seen.lost
                known.threads |= seen.threads

    def add_error(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            for frame, line in traceback.walk_tb(error.__traceback__):
                self.errors.setdefault((frame.f_code.co_filename, line), text)


@dataclass(slots=True)
class _Recording:
    """A planned function, and how it was called last."""

    plan: ExecutionPlan
    samples: deque[tuple[contextvars.Context, tuple[Any, ...], dict[str, Any]]]


class RehearsingUserCode(UserCode):
    """As `UserCode`, with a rehearsal before it stops. Owned by the replica's user loop."""

    __slots__ = ("_deadline", "_recordings", "_state")

    watched: ClassVar[tuple[LoopProbe, ...]] = ()
    outcome: ClassVar[Outcome] = Outcome()
    _turn: ClassVar[threading.Lock] = threading.Lock()  # the switch interval is the process's

    def __init__(
        self,
        func_or_class: Callable[..., Any],
        bound_app: BoundApp | None,
        context: ReplicaContext,
        make_plan: MakePlan,
    ) -> None:
        self._recordings: dict[str, _Recording] = {}
        self._state: dict[str, Any] = {}
        self._deadline = 0.0

        def make_recorded(func: Callable[..., Any], role: Role) -> ExecutionPlan:
            return self._recorded(make_plan(func, role), role)

        super().__init__(func_or_class, bound_app, context, make_recorded)

    async def start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any = None
    ) -> None:
        await super().start(args, kwargs, user_config)
        # As it is before the first request: what is made by need is not there yet.
        state = getattr(self._instance, "__dict__", {})
        self._state = {name: _copied(value) for name, value in state.items()}

    async def stop(self) -> None:
        instance = self._instance
        try:
            called = [
                each
                for name, each in self._recordings.items()
                if each.samples and self.outcome.wants(name)
            ]
            if called:
                self._deadline = monotonic() + BUDGET_S
                await asyncio.to_thread(self._rehearse, instance, called)
        finally:
            # Race with the rehearsal, if the replica has no time left for it: its threads look at
            # this before each call, and what they have changed they put back themselves.
            self._deadline = 0.0
            await super().stop()

    def _recorded(self, plan: ExecutionPlan, role: Role) -> ExecutionPlan:
        """Return the plan of a watched `def` with its calls noted."""
        is_watched = any(_names(each.functions, plan.name) for each in self.watched)
        if not is_watched or plan.kind.is_async or role not in (Role.METHOD, Role.ENDPOINT):
            return plan
        samples: deque[Any] = deque(maxlen=_SAMPLES)
        func = plan.func

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            samples.append((contextvars.copy_context(), args, kwargs))
            return func(*args, **kwargs)

        self._recordings[plan.name] = _Recording(plan, samples)
        return replace(plan, func=call)

    def _rehearse(self, instance: Any, recordings: list[_Recording]) -> None:
        """Make the recorded calls again, and put the instance back as it was."""
        with self._turn:
            self._rehearse_alone(instance, recordings)

    def _rehearse_alone(self, instance: Any, recordings: list[_Recording]) -> None:
        trace = Trace(frozenset(each.attribute for each in self.watched))
        cls, state = type(instance), getattr(instance, "__dict__", None)
        before = None if state is None else dict(state)
        interval = sys.getswitchinterval()
        try:
            instance.__class__ = traced_class(cls, trace)
        except Exception:
            pass  # a function, or a class that cannot be subclassed or exchanged: it tells nothing
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            for _ in range(ROUNDS):
                if monotonic() > self._deadline:
                    break
                if state is not None:
                    fresh = {name: _copied(value) for name, value in self._state.items()}
                    state.clear()
                    state.update(traced_state(fresh, trace))
                for recording in recordings:
                    self._round(recording, trace)
        finally:
            sys.setswitchinterval(interval)
            if type(instance) is not cls:
                instance.__class__ = cls
            if state is not None and before is not None:
                state.clear()
                state.update(before)
        self.outcome.add(trace)

    def _round(self, recording: _Recording, trace: Trace) -> None:
        """Make calls from all threads at once."""
        samples = list(recording.samples)
        begin = threading.Barrier(THREADS)

        def work(number: int) -> None:
            begin.wait()
            for turn in range(CALLS_PER_ROUND):
                if monotonic() > self._deadline:
                    break
                context, args, kwargs = samples[(number + turn) % len(samples)]
                # A context may be entered once at a time.
                context.copy().run(self._call, recording.plan, args, kwargs, trace)

        threads = [
            threading.Thread(target=work, args=(number,), name=f"rehearsal-{number}", daemon=True)
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # What is stuck is left behind.
            thread.join(max(0.0, self._deadline - monotonic()) + 1.0)

    def _call(
        self, plan: ExecutionPlan, args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace
    ) -> None:
        trace.begin_call()
        try:
            result = plan.func(*args, **kwargs)
            if plan.kind is Kind.GENERATOR:
                for _ in islice(result, _ITEMS):
                    pass
                result.close()
            elif asyncio.iscoroutine(result):
                result.close()
        except BaseException as error:
            # Often only because its request is over, and what it was given with it.
            self.outcome.add_error(error)


def _copied(value: Any) -> Any:
    """Return a shallow copy of a container, anything else itself."""
    return value.copy() if type(value) in CONTAINERS else value


def _names(functions: Iterable[str], name: str) -> bool:
    """Whether a function as it is called at run time is among those of the sources."""
    return any(each == name or each.endswith(f".{name}") for each in functions)
