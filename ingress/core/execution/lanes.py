"""`@serve.method` and `lanes=`: declarations of the place where a `def` runs.

    @serve.deployment(lanes={"db": 8})
    class Reports:
        @serve.method(lane="db")
        def make(self): ...

    execution=      the `def` runs
    "event_loop"    on the event loop, and without the warning
    "threadpool"    in the replica's worker threads
    "serial"        in one thread of the replica, the one that ran `__init__`
    lane=           in the lane's own threads; `lanes` sets their number per replica

A call that waits for a thread of a lane delays no call of another lane, or of none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, TypeVar

from ingress.core.base.foreign import stored, undisguised
from ingress.core.base.options import LANE_RULE, is_lane
from ingress.core.execution.execution import (
    OVERRIDE,
    ExecutionMode,
    Kind,
    Lanes,
    Override,
    kind,
    name_of,
    no_such_lane,
    override_of,
)

RESERVED_THREADS = 4  # for check_health, reconfigure and the closing of generators

F = TypeVar("F", bound=Callable[..., object])

_MODES = {
    "event_loop": ExecutionMode.EVENT_LOOP,
    "threadpool": ExecutionMode.THREADPOOL,
    "serial": ExecutionMode.SERIAL,
}
_LIFECYCLE = ("__new__", "__init__", "__del__", "__serve_build_asgi_app__")


def method(
    _func: None = None,
    /,
    *,
    execution: Literal["event_loop", "threadpool", "serial"] | None = None,
    lane: str | None = None,
) -> Callable[[F], F]:
    """Choose where a `def` runs: a method, an endpoint, a dependency, or one under `@batch`.

    It takes precedence over the function's role and the flag, and works above and below `@app.get`.
    `lane` is one of the deployment's `lanes`. Raises `ValueError` for a bad value and for an
    `async def`, which runs on the event loop, `TypeError` for an object that is no function.
    """
    override = _override(_func, execution, lane)

    def decorate(func: F) -> F:
        inner = func.__func__ if isinstance(func, (staticmethod, classmethod)) else func
        _check_function(inner, override)
        setattr(inner, OVERRIDE, override)
        return func

    return decorate


def lanes_of(
    func_or_class: Callable[..., object], max_ongoing: int, limits: Mapping[str, int]
) -> Lanes:
    """Return the threads that a replica may have, as declared."""
    marks = (override for _, override in _overrides(func_or_class))
    is_serial = any(mark.mode is ExecutionMode.SERIAL for mark in marks)
    # Each call that has a slot can have a thread.
    return Lanes(max_ongoing + RESERVED_THREADS, dict(limits), is_serial)


def check_lanes(func_or_class: Callable[..., object], limits: Mapping[str, int]) -> None:
    """Raise `ValueError` for an undeclared lane, or an `async def __init__` with "serial"."""
    for name, override in _overrides(func_or_class):
        if override.lane and override.lane not in limits:
            raise ValueError(no_such_lane(name, override.lane, limits))
        if override.mode is ExecutionMode.SERIAL and inspect.isclass(func_or_class):
            init = func_or_class.__init__
            if kind(init).is_async:
                raise ValueError(
                    f"{name} has execution='serial', so {name_of(init)} must run in the same "
                    "thread, but an `async def` runs on the event loop; make the constructor a "
                    "`def`"
                )


def _override(func: object, execution: object, lane: object) -> Override:
    """Return the `Override` for the options. Raises `TypeError` or `ValueError` for bad ones."""
    if func is not None or (execution is None and lane is None):
        got = f", got {func!r}" if func is not None else ""
        raise TypeError(
            f"@serve.method needs execution= or lane={got}; "
            "write @serve.method(execution='threadpool')"
        )
    if execution is not None and (not isinstance(execution, str) or execution not in _MODES):
        raise ValueError(
            f"execution must be one of {', '.join(map(repr, _MODES))}, got {execution!r}; without "
            "@serve.method, the role of the function and the flag decide"
        )
    if lane is None:
        return Override(_MODES[str(execution)])
    if not is_lane(lane):
        raise ValueError(
            f"lane must be {LANE_RULE}, got {lane!r}; give it one of the names in "
            "@serve.deployment(lanes={...})"
        )
    if execution not in (None, "threadpool"):
        raise ValueError(
            f"lane must be left out with execution={execution!r}, got {lane!r}: a lane has threads "
            "of its own; leave one of the two out"
        )
    return Override(ExecutionMode.THREADPOOL, str(lane))


def _check_function(func: object, override: Override) -> None:
    if hasattr(func, "func_or_class") or inspect.isclass(func):
        raise TypeError(
            f"{override} decorates a function, got {func!r}; put it on a method of the class, or "
            "below @serve.deployment on the function"
        )
    if hasattr(func, "__ingress_batcher__"):
        raise TypeError(f"{override} stands above @serve.batch; put it below, next to the `def`")
    if not inspect.isfunction(func):
        raise TypeError(f"{override} decorates a function, got {func!r}; put it next to the `def`")
    name = name_of(func)
    if func.__name__ in _LIFECYCLE:
        raise ValueError(
            f"{override} is not allowed on {name}, which runs on the event loop, or in the serial "
            "thread if a method has execution='serial'; put it on a method"
        )
    if kind(func).is_async and override.mode is not ExecutionMode.EVENT_LOOP:
        raise ValueError(
            f"{override} is not allowed on {name}, an `{kind(func).value}`, which runs on the "
            "event loop; make it a `def`, or leave @serve.method out"
        )
    before = override_of(func)
    if before not in (None, override) and not hasattr(func, "__wrapped__"):
        raise ValueError(f"{name} has {before} and {override}; leave one of them out")


def _overrides(func_or_class: Callable[..., object]) -> Iterator[tuple[str, Override]]:
    """Yield the functions with an `Override` in the class, or the function itself, by name."""
    names = dir(func_or_class) if inspect.isclass(func_or_class) else ()
    # A static lookup, so that no property of the user's runs.
    members = [inspect.getattr_static(func_or_class, name) for name in names]
    for member in members or [func_or_class]:
        member = undisguised(member)
        func = stored(member, "__func__", member)
        if inspect.isroutine(func) and (override := override_of(func)) is not None:
            is_batched = hasattr(func, "__ingress_batcher__")
            if is_batched or kind(func) in (Kind.FUNCTION, Kind.GENERATOR):
                yield name_of(func), override
