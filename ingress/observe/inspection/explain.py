"""The place where each callable of an application runs, for `ingress explain`.

    Application -> build -> parts -> sources -> execution.plan, at flag 0 and at 1 -> Row

A row's plan comes from the same function and role as a replica's plan, so the two cannot disagree.
Classes are inspected and apps are bound; no object of the user is created, called or started. So
attributes that a constructor sets are not known here.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import FunctionType
from typing import Any

from ingress.app.asgi.parts import Part
from ingress.app.batching.batching import Batcher
from ingress.app.declaration.build import BuiltDeployment, build
from ingress.app.declaration.declaration import Application
from ingress.app.declaration.names import TASK, PublicMethods
from ingress.config import DeploymentConfig
from ingress.core.base.foreign import stored, undisguised, unwrapped
from ingress.core.base.libraries import is_library
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.core.base.signatures import annotations_of
from ingress.core.execution import execution
from ingress.core.execution.execution import SERIAL_LANE, ExecutionMode, ExecutionPlan, Kind, Role
from ingress.core.execution.lanes import lanes_of
from ingress.core.execution.threads import ANYIO_RESERVE
from ingress.observe.inspection.budget import ThreadBudget, plans_of, thread_budget
from ingress.observe.inspection.sources import Use, mentions

_ANYIO_DEFAULT = 40  # AnyIO's threads for a loop outside ingress
_BOUND = (staticmethod, classmethod)
_HOOKS = ("check_health", "reconfigure")

logger = logging.getLogger("ingress")


class Level(StrEnum):
    """The level of a finding, in rising order. The values are the words that users read."""

    NOTE = "note"
    WARN = "warn"

    @property
    def gravity(self) -> int:
        return list(Level).index(self)


@dataclass(frozen=True, slots=True)
class Remark:
    """A remark about a row. `id` is short and does not change."""

    id: str
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a callable runs. `thread` is the name of its thread, `N` for a number.

    `lane` is "" for threads outside lanes. `threads` is the most that each replica has; `None` for
    no limit.
    """

    where: str
    thread: str
    lane: str
    threads: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One callable: its role, its kind of function, and its places at flag 0 and at 1.

    `func` is `None` if it is known only at run time. `findings` are for the current flag.
    `is_compiled` says of a FastAPI route whether it is compiled; `None` for all other callables.
    `guards` are the names of its dependencies, in the order in which FastAPI calls them.
    """

    deployment: str
    what: str
    name: str
    kind: str
    func: Callable[..., object] | None
    file: str
    line: int
    places: tuple[Place, Place]
    findings: tuple[Remark, ...]
    is_compiled: bool | None = None
    guards: tuple[str, ...] = ()

    @property
    def is_route(self) -> bool:
        """True for a route, whose `what` contains a path."""
        return " /" in self.what

    @property
    def moves(self) -> bool:
        """True if the flag decides the place."""
        return self.places[0].where != self.places[1].where


@dataclass(frozen=True, slots=True)
class Explanation:
    """The rows of an application, deployment by deployment, at these settings.

    `findings` are about the whole application.
    """

    settings: Settings
    deployments: tuple[BuiltDeployment, ...]
    rows: tuple[Row, ...]
    budget: ThreadBudget
    findings: tuple[Remark, ...]

    def count(self, level: Level) -> int:
        """Return the number of findings of this level or a graver one."""
        found = [*self.findings, *(each for row in self.rows for each in row.findings)]
        return sum(each.level.gravity >= level.gravity for each in found)


def explain(application: Application, settings: Settings) -> Explanation:
    """Return the places where the callables of `application` run.

    Raises the errors of `build` and of the binding of a FastAPI app.
    """
    built = build(application, "default")
    rows = rows_of(built.deployments, settings)
    budget = thread_budget(built, settings)
    findings = [Remark("oversubscription", Level.WARN, budget.warning)] if budget.warning else []
    return Explanation(settings, built.deployments, rows, budget, tuple(findings))


def rows_of(deployments: Sequence[BuiltDeployment], settings: Settings) -> tuple[Row, ...]:
    """Return the rows of the deployments of one application, of which the last is its ingress."""
    rows: list[Row] = []
    for each in deployments:
        planner = _Planner(each, settings, _anyio_limit(each, deployments, settings))
        rows += planner.rows(is_ingress=each is deployments[-1])
    return tuple(rows)


def has_own_loop(config: DeploymentConfig, settings: Settings) -> bool:
    """Return whether each replica has an event loop of its own, or the server's."""
    return settings.run_user_code_in_separate_thread or config.isolation == "process"


def _anyio_limit(
    each: BuiltDeployment, everyone: Iterable[BuiltDeployment], settings: Settings
) -> int:
    """Return the number of AnyIO's threads for a replica's loop."""
    if has_own_loop(each.deployment.config, settings):
        return each.deployment.config.max_ongoing_requests + ANYIO_RESERVE
    every = [one.deployment.config for one in everyone]
    configs = [c for c in every if not has_own_loop(c, settings)]  # they share the borrowed loop
    shares = (c.replica_count * (c.max_ongoing_requests + ANYIO_RESERVE) for c in configs)
    return _ANYIO_DEFAULT + sum(shares)


class _Planner:
    """The maker of the rows of one deployment."""

    def __init__(self, built: BuiltDeployment, settings: Settings, anyio_limit: int) -> None:
        self._name = built.name
        self._built = built
        self._settings = settings
        config = built.deployment.config
        target = built.deployment.func_or_class
        self._lanes = lanes_of(target, config.max_ongoing_requests, config.lanes)
        self._anyio_limit = anyio_limit

    def rows(self, *, is_ingress: bool) -> Iterator[Row]:
        target = self._built.deployment.func_or_class
        owner = target if inspect.isclass(target) else None
        seen = set()
        for part in parts_of(self._built, is_ingress=is_ingress):
            yield self._row(part)
            for mention in mentions(part.func, owner):
                # FastAPI handles an endpoint's return value, and other callers handle theirs.
                if mention.use is Use.RETURNED and part.role is not Role.METHOD:
                    continue
                key = (mention.key, part.role is Role.FRAMEWORK)
                if key not in seen:
                    seen.add(key)
                    yield self._mentioned(part, mention.use, mention.func, mention.text)

    def _mentioned(self, part: Part, use: Use, func: Any, text: str) -> Row:
        if use is Use.RETURNED:
            made = Part("generator", func, part.role)
            is_async = execution.kind(func) is Kind.ASYNC_GENERATOR
            # It is iterated where the function that returned it ran.
            return self._row(made, func if is_async else part.func)
        is_ours = use is Use.STREAM and part.role is not Role.FRAMEWORK
        role = Role.STREAM if is_ours else Role.FRAMEWORK
        if func is None:
            return self._unknown(use.value, text, role)
        made = Part(use.value, func, role)
        maker = plans_of(part.func, part.role, self._lanes)[self._flag]
        has_threads = maker.lane or maker.mode is ExecutionMode.SERIAL
        if is_ours and has_threads and not execution.kind(func).is_async:
            return self._row(replace(made, role=part.role), part.func)  # they iterate the stream
        row = self._row(made)
        return replace(row, name=text) if use is Use.FILE else row

    def _row(self, part: Part, planned: Callable[..., object] | None = None) -> Row:
        """Return the row of a part, which runs where `planned` or the part itself is planned."""
        func = part.func
        plans = plans_of(planned or func, part.role, self._lanes)
        kind = execution.kind(func)
        code = execution.code_of(func) or execution.code_of(getattr(func, "__init__", func))
        file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
        return Row(
            self._name,
            part.what,
            execution.name_of(func),
            kind.value,
            func,
            file,
            line,
            (self._place(plans[0], part), self._place(plans[1], part)),
            () if part.what == "teardown" else tuple(self._findings(plans[self._flag], kind)),
            part.is_compiled,
            part.guards,
        )

    def _unknown(self, what: str, text: str, role: Role) -> Row:
        """Return the row of a callable that is known only at run time."""
        either = [self._row(Part(what, func, role)) for func in (_a_def, _an_async_def)]
        of_def, of_async = (row.places[self._flag] for row in either)
        place = Place(
            f"{of_def.where} or {of_async.where}",
            f"{of_def.thread} or {of_async.thread}",
            "",
            of_def.threads,
            f"def or async def: {of_def.reason}",
        )
        return Row(
            self._name, what, text, "not known", None, "", 0, (place, place), either[0].findings
        )

    @property
    def _flag(self) -> int:
        return int(self._settings.run_sync_in_threadpool)

    def _place(self, plan: ExecutionPlan, part: Part) -> Place:
        threads = plan.limit
        if plan.mode is ExecutionMode.EVENT_LOOP:
            is_own = has_own_loop(self._built.deployment.config, self._settings)
            thread, threads = (f"{self._name}#N" if is_own else "the server's"), 1
        elif plan.mode is ExecutionMode.ANYIO:
            thread = "AnyIO worker thread"
            # FastAPI gives each exit a limiter of its own, so that a teardown can always run.
            threads = None if part.what == "teardown" else self._anyio_limit
        else:
            lane = SERIAL_LANE if plan.mode is ExecutionMode.SERIAL else plan.lane
            thread = f"{self._name}#N-{lane}-worker-N" if lane else f"{self._name}#N-worker-N"
        if part.at_once is not None and threads is not None:
            threads = min(threads, part.at_once)
        return Place(plan.where, thread, plan.lane, threads, plan.reason)

    def _findings(self, plan: ExecutionPlan, kind: Kind) -> Iterator[Remark]:
        is_on_loop = plan.mode is ExecutionMode.EVENT_LOOP
        if plan.warns:
            yield Remark(
                "def-on-loop",
                Level.WARN,
                "a def that runs on the event loop: until it returns, no other request of this "
                "replica makes progress. Make it `async def` if nothing in it waits or computes "
                "for long; else give it a thread, once it is thread-safe: "
                f"@serve.method(execution='threadpool') for one, {SYNC_IN_THREADPOOL}=1 for all. "
                "@serve.method(execution='event_loop') leaves it here without this warning",
            )
        elif is_on_loop and kind is Kind.GENERATOR and plan.kind.is_async:
            yield Remark(
                "generator-on-loop",
                Level.WARN,
                f"a def generator that {plan.name}, an async def, returns: it runs on the event "
                "loop whatever the flag, and delays all requests until its next item. Make it an "
                "async generator, or return it from a def",
            )
        elif plan.mode is ExecutionMode.ANYIO:
            yield Remark(
                "anyio",
                Level.NOTE,
                "runs in AnyIO's threads, which all that Starlette and FastAPI run themselves on "
                f"this loop share: {self._anyio_limit} at most, apart from the replica's own",
            )


def _a_def() -> None: ...


async def _an_async_def() -> None: ...


def parts_of(built: BuiltDeployment, *, is_ingress: bool) -> list[Part]:
    """Return the user's code in a deployment; `is_ingress` says whether it receives HTTP requests.

    That is: constructor, the parts of its app (`asgi.parts`), its public methods and its hooks; the
    functions inside `@batch` and `@multiplexed`, which run in place of the visible ones; `__del__`.
    Methods inherited from a library are left out, though a handle can call them: most library
    classes have dozens.

    Raises the errors of invalid routes in its app.
    """
    target = built.deployment.func_or_class
    call = "any /" if is_ingress else "call"
    parts: list[Part] = []
    if not inspect.isclass(target):
        parts += _unwrapped(call, target)
        return [*parts, *_inner_parts(target, parts)]
    if built.bound_app is not None:
        parts += built.bound_app.parts()
    served = {id(part.func) for part in parts}
    if inspect.isfunction(target.__init__):
        parts.insert(0, Part("constructor", target.__init__, Role.LIFECYCLE))
    handlers = [name for name in dir(target) if stored(stored(target, name), TASK)]
    for name in dict.fromkeys([*_calls(target), *PublicMethods(target), *handlers]):
        member = undisguised(getattr(target, name))
        if member is None or id(stored(member, "__func__", member)) in served:
            continue
        if inspect.isclass(member):
            continue
        if name != "__call__" and name not in _HOOKS and _is_of_a_library(target, name):
            continue
        what = call if name == "__call__" else name if name in _HOOKS else "method"
        if name in handlers:
            what = f"job {stored(member, TASK)}"
        parts += _unwrapped(what, member)
    parts += list(_inner_parts(target, parts))
    if hasattr(target, "__del__"):
        parts.append(Part("__del__", target.__del__, Role.LIFECYCLE))
    return parts


def _calls(cls: type) -> list[str]:
    # Not `hasattr`: the class itself is callable.
    return ["__call__"] if any("__call__" in vars(base) for base in cls.__mro__) else []


def _is_of_a_library(cls: type, name: str) -> bool:
    definer = next((base for base in cls.__mro__ if name in vars(base)), cls)
    package = definer.__module__.partition(".")[0]
    if package == cls.__module__.partition(".")[0]:
        return False
    file = stored(sys.modules.get(definer.__module__), "__file__")
    return not isinstance(file, str) or is_library(file)


def _unwrapped(what: str, member: Callable[..., object]) -> Iterator[Part]:
    """Yield a method, or the function inside an ingress decorator, which runs in its place."""
    decorated = list(_decorated(what, member))
    yield from decorated or [Part(what, member, Role.METHOD)]


def _decorated(what: str, member: Callable[..., object]) -> Iterator[Part]:
    batcher = stored(member, "__ingress_batcher__")
    if type(batcher) is Batcher:
        handler = batcher.handler
        what_it_is = f"{what}, batch".removeprefix(", ")
        if handler.target_s is not None:  # its size and wait are chosen
            what_it_is += f" for {handler.target_s * 1e3:g} ms"
        yield Part(what_it_is, handler.func, Role.BATCH, handler.at_once)
    if (loader := stored(member, "__ingress_loader__")) is not None:
        yield Part("model loader", loader, Role.METHOD)
        model = _returned_class(loader)
        if hasattr(model, "__del__"):
            yield Part("model __del__", model.__del__, Role.UNLOAD)


def _returned_class(func: Callable[..., object]) -> Any:
    try:
        return inspect.get_annotations(func, eval_str=True).get("return")
    except Exception:  # an annotation may be any expression, also with undefined names
        logger.debug("not all annotations of %r can be read", func, exc_info=True)
        return annotations_of(func).get("return")


def _inner_parts(target: type | FunctionType, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the decorated functions that only user code calls, not a handle.

    They are private in the class, or a function that is known so far names them in its module.
    """
    members: dict[str, object] = {}
    for base in reversed(target.__mro__) if inspect.isclass(target) else ():
        members.update(vars(base))
    found = [each for name, each in members.items() if name.startswith("_") and name != "__call__"]
    for function in _functions([*members.values(), *(part.func for part in parts)]):
        inner = unwrapped(function)
        if isinstance(inner, FunctionType):
            known = inner.__globals__
            found += [known[name] for name in inner.__code__.co_names if name in known]
    for each in dict.fromkeys(_functions(found)):
        yield from _decorated("", each)


def _functions(values: Iterable[object]) -> Iterator[FunctionType]:
    for each in map(undisguised, values):
        func = each.__func__ if isinstance(each, _BOUND) else each
        if inspect.isfunction(func):
            yield func
