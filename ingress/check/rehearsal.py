"""Rehearsal: calls of a `def` from many threads at once, on an instance that no longer serves.

    while it serves    the last arguments of each call of a watched `def` are kept
    when it stops      those calls are made again, from `THREADS` threads at once and with a switch
                       after each read, before its lifespan ends and its `__del__` runs

So no request meets a provoked race: the instance behaves as always while it has requests. Effects
of the calls elsewhere, in a file or a database, happen again.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from time import monotonic
from types import FunctionType
from typing import Any, ClassVar

from ingress.app.asgi import BoundApp
from ingress.check.write_recording import (
    CONTAINERS,
    Line,
    Trace,
    Writes,
    traced_class,
    traced_state,
)
from ingress.context import ReplicaRuntime
from ingress.core.execution.execution import ExecutionPlan, Kind, Role
from ingress.serving.replicas.user_code import MakePlan, UserCode

logger = logging.getLogger("ingress")

THREADS = 8
ROUNDS = 8
CALLS_PER_ROUND = 8
BUDGET_S = 3.0
"""Time in which the rehearsal of one instance may begin new rounds."""

TIMES = 2
"""Number of instances that a function is rehearsed on."""

_SAMPLES = 3
_ITEMS = 100
_SWITCH_INTERVAL_S = 1e-6


@dataclass(frozen=True, slots=True)
class WatchedCalls:
    """A subject of a rehearsal: `attribute` of the instances that have these functions."""

    functions: tuple[str, ...]
    attribute: str


@dataclass(slots=True)
class Outcome:
    """The outcome of rehearsals: the writes and the errors of each line. Thread-safe."""

    writes: dict[Line, Writes] = field(default_factory=dict)
    errors: dict[tuple[str, int], str] = field(default_factory=dict)
    _times: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wants(self, name: str) -> bool:
        """Return whether to rehearse a function once more: a suite may create many replicas."""
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
    """A planned function, and the arguments of its last calls."""

    plan: ExecutionPlan
    samples: deque[tuple[contextvars.Context, tuple[object, ...], dict[str, object]]]


class RehearsingUserCode(UserCode):
    """A `UserCode` with a rehearsal before it stops. Owned by the replica's user loop."""

    __slots__ = ("_deadline", "_outcome", "_recordings", "_state", "_watched")

    _turn: ClassVar[threading.Lock] = threading.Lock()  # the switch interval is the process's

    def __init__(
        self,
        watched: tuple[WatchedCalls, ...],
        outcome: Outcome,
        func_or_class: type | FunctionType,
        bound_app: BoundApp | None,
        context: ReplicaRuntime,
        make_plan: MakePlan,
    ) -> None:
        self._watched = watched
        self._outcome = outcome
        self._recordings: dict[str, _Recording] = {}
        self._state: dict[str, object] = {}
        self._deadline = 0.0

        def make_recorded(func: Callable[..., object], role: Role) -> ExecutionPlan:
            return self._recorded(make_plan(func, role), role)

        super().__init__(func_or_class, bound_app, context, make_recorded)

    async def start(
        self, args: Sequence[object], kwargs: Mapping[str, object], user_config: object = None
    ) -> None:
        await super().start(args, kwargs, user_config)
        # The state before the first request, without lazily created attributes.
        state = getattr(self._instance, "__dict__", {})
        self._state = {name: _copied(value) for name, value in state.items()}

    async def stop(self) -> None:
        instance = self._instance
        try:
            called = [
                each
                for name, each in self._recordings.items()
                if each.samples and self._outcome.wants(name)
            ]
            if called:
                self._deadline = monotonic() + BUDGET_S
                await asyncio.to_thread(self._rehearse, instance, called)
        finally:
            # Race with the rehearsal, if the replica has no time left for it: its threads check
            # this before each call, and they restore the instance themselves.
            self._deadline = 0.0
            await super().stop()

    def _recorded(self, plan: ExecutionPlan, role: Role) -> ExecutionPlan:
        """Return the plan of a function; a watched `def` gets one that records its calls."""
        is_watched = any(_names(each.functions, plan.name) for each in self._watched)
        if not is_watched or plan.kind.is_async or role not in (Role.METHOD, Role.ENDPOINT):
            return plan
        samples: deque[tuple[contextvars.Context, tuple[object, ...], dict[str, object]]] = deque(
            maxlen=_SAMPLES
        )
        func = plan.func

        @functools.wraps(func)
        def call(*args: object, **kwargs: object) -> object:
            samples.append((contextvars.copy_context(), args, kwargs))
            return func(*args, **kwargs)

        self._recordings[plan.name] = _Recording(plan, samples)
        return replace(plan, func=call)

    def _rehearse(self, instance: object, recordings: list[_Recording]) -> None:
        """Make the recorded calls again, and restore the instance."""
        with self._turn:
            self._rehearse_alone(instance, recordings)

    def _rehearse_alone(self, instance: object, recordings: list[_Recording]) -> None:
        trace = Trace(frozenset(each.attribute for each in self._watched))
        cls, state = type(instance), getattr(instance, "__dict__", None)
        before = None if state is None else dict(state)
        interval = sys.getswitchinterval()
        try:
            instance.__class__ = traced_class(cls, trace)
        except Exception:  # a function, or a class that cannot be subclassed or exchanged
            logger.debug("the writes of %s are not recorded", cls.__name__, exc_info=True)
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
        self._outcome.add(trace)

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
                # A context can be entered only once at a time.
                context.copy().run(self._call, recording.plan, args, kwargs, trace)

        threads = [
            threading.Thread(target=work, args=(number,), name=f"rehearsal-{number}", daemon=True)
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # A stuck thread is abandoned.
            thread.join(max(0.0, self._deadline - monotonic()) + 1.0)

    def _call(
        self, plan: ExecutionPlan, args: tuple[object, ...], kwargs: dict[str, object], trace: Trace
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
            # Often only because its request, and with it an argument, has ended.
            self._outcome.add_error(error)


def _copied(value: Any) -> object:
    """Return a shallow copy of a container, anything else itself."""
    return value.copy() if type(value) in CONTAINERS else value


def _names(functions: Iterable[str], name: str) -> bool:
    """Return whether a function's name at run time is among the names in the sources."""
    return any(each == name or each.endswith(f".{name}") for each in functions)
