"""The plan that decides where user code runs, and the containment of its errors.

Every call of user code starts on the replica's user loop. An `async def` stays there; a `def` may
move to a worker thread. Only this module makes that choice, so every call follows its plan.

    role                           async def     def
    METHOD     of a deployment     event loop    as RAY_SERVE_RUN_SYNC_IN_THREADPOOL says
    ENDPOINT   of a FastAPI app    event loop    threadpool
    LIFECYCLE  __init__, __del__   event loop    event loop
    BATCH      @serve.batch        event loop    threadpool
    UNLOAD     a model's __del__   event loop    threadpool
    STREAM     a response's body   event loop    threadpool
    FRAMEWORK  Starlette calls it  event loop    a thread of AnyIO's
    ASGI       apps, middleware    event loop    event loop

`@serve.method` overrides this for one METHOD, ENDPOINT or BATCH `def`: on the loop, in a lane
(threads with a limit of their own), or in the serial thread. All serial methods of a replica share
one thread; if a class has such a method, its LIFECYCLE runs in that thread, too.

A generator runs in the same place as the function that returned it. The loop awaits an awaitable
that a `def` returns. An error that is not an `Exception` becomes `UserCodeExit` here, and an
error that cannot be read becomes `UnreadableError`.

The kind of a callable is looked up through `partial`, bound methods and callable objects. For an
ENDPOINT it is FastAPI's, which looks through `__wrapped__`, too; elsewhere a sync wrapper around an
`async def` is a `def`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import AsyncGeneratorType, CodeType, GeneratorType
from typing import Any, Protocol, TypeVar

from ingress.core.execution.errors import readable
from ingress.exceptions import SyncMethodOnEventLoopWarning, UserCodeExit

_GENERATORS = (GeneratorType, AsyncGeneratorType)  # a union takes a third more time to check


class Kind(Enum):
    """The kind of a callable, as it is written in the source."""

    FUNCTION = "def"
    COROUTINE = "async def"
    GENERATOR = "def generator"
    ASYNC_GENERATOR = "async def generator"

    @property
    def is_async(self) -> bool:
        return self in (Kind.COROUTINE, Kind.ASYNC_GENERATOR)


def mark_stream(func: Any) -> None:
    """Mark a `def` that returns an async generator as an `async def` generator.

    The mark is the function itself, so that it does not hold for a wrapper that copies attributes.
    """
    func.__ingress_stream__ = func


def kind(func: Callable[..., object]) -> Kind:
    func = underlying(func)
    if getattr(func, "__ingress_stream__", None) is func:
        return Kind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(func) or _is_marked(func):
        return Kind.COROUTINE
    if inspect.isasyncgenfunction(func):
        return Kind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(func):
        return Kind.GENERATOR
    return Kind.FUNCTION


def kind_for_fastapi(func: Callable[..., object]) -> Kind:
    """Return the kind of `func` in FastAPI's view, which looks through `__wrapped__`, too."""
    outer = kind(func)
    if outer is not Kind.FUNCTION:
        return outer
    func = without_partials(func)
    inner = inspect.unwrap(func)
    if inner is func and not (inspect.isroutine(func) or inspect.isclass(func)):
        inner = inspect.unwrap(type(func).__call__)
    return kind(inner)


def _is_marked(func: Callable[..., object]) -> bool:
    """Return whether a `def` is marked as one that returns a coroutine, in the way of Python 3.11.

    From 3.12 on the mark is `inspect.markcoroutinefunction`, which `inspect` reads itself.
    """
    mark = getattr(asyncio.coroutines, "_is_coroutine", None)
    return mark is not None and getattr(func, "_is_coroutine", None) is mark


def is_generator(value: object) -> bool:
    """Return whether `value` is a generator, sync or async."""
    return isinstance(value, _GENERATORS)


def name_of(func: Callable[..., object]) -> str:
    """Return `Class.method` or the function's name, without the scope it was defined in."""
    func = underlying(func)
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    return str(name).rpartition("<locals>.")[2]


def code_of(func: Callable[..., object]) -> CodeType | None:
    """Return the code object of `func`, `None` if it is not written in Python."""
    code = getattr(underlying(func), "__code__", None)
    return code if isinstance(code, CodeType) else None


def without_partials(func: Any) -> Any:
    """Return the callable inside of `partial`s."""
    while isinstance(func, partial):
        func = func.func
    return func


def underlying(func: Callable[..., object]) -> Callable[..., object]:
    """Return the function, builtin or class that a call of `func` runs."""
    while True:
        if isinstance(func, partial):
            func = func.func
        elif inspect.ismethod(func):
            func = func.__func__
        elif inspect.isroutine(func) or inspect.isclass(func):
            return func
        else:
            func = type(func).__call__


logger = logging.getLogger("ingress")

T = TypeVar("T")


class Role(Enum):
    """The role of a callable in the framework."""

    METHOD = "method"
    ENDPOINT = "endpoint"
    LIFECYCLE = "lifecycle"
    BATCH = "batch"
    UNLOAD = "unload"
    STREAM = "stream"
    """The iterator of a `StreamingResponse`; see `responses.take_over_stream`."""
    FRAMEWORK = "framework"
    """Code that Starlette and FastAPI call: the plan only tells where, and is never run."""
    ASGI = "ASGI"
    """As FRAMEWORK, for apps and middleware, and for the code that starts and stops them."""


class ExecutionMode(Enum):
    """The place where a call runs; the values are the words that users read."""

    EVENT_LOOP = "event loop"
    THREADPOOL = "threadpool"
    SERIAL = "serial thread"
    ANYIO = "AnyIO thread"


class ThreadPool(Protocol):
    """Worker threads, as `execution` uses them; `threads.WorkerPool` implements it."""

    async def run(self, func: Callable[[], T], *, is_cleanup: bool = False) -> T: ...

    def stream(self, items: Iterable[T]) -> AsyncGenerator[T, None]: ...

    def batches(self, items: Iterable[T]) -> AsyncGenerator[list[T], None]: ...


@dataclass(frozen=True, slots=True)
class Override:
    """The options of `@serve.method` for one callable. `lane` is "" for the shared threads.

    `by` names another decorator that has set them, "" for `@serve.method` itself.
    """

    mode: ExecutionMode
    lane: str = ""
    by: str = ""

    def __str__(self) -> str:
        if self.by:
            return self.by
        given = f"lane={self.lane!r}" if self.lane else f"execution={self.mode.name.lower()!r}"
        return f"@serve.method({given})"


@dataclass(frozen=True, slots=True)
class Lanes:
    """The threads of a deployment's replica: their numbers and, in a running replica, the pools.

    `limit` is the number of threads for calls without a lane, `limits` the number for each lane.
    `is_serial` is true if the class has a method for the serial thread.
    """

    limit: int
    limits: Mapping[str, int] = field(default_factory=dict)
    is_serial: bool = False
    pools: Mapping[str, ThreadPool] = field(default_factory=dict)


SERIAL_LANE = "serial"
"""The name of the serial thread among the pools of `Lanes`."""


@dataclass(slots=True)
class ExecutionPlan:
    """The place where one callable runs, and the reason. Made once per replica, for all requests.

    `lane` is the lane whose threads run the callable, "" if it has none. `limit` is the number of
    calls that may be in those threads at once, `None` on the event loop and outside of a
    deployment.
    """

    func: Callable[..., Any]
    kind: Kind
    mode: ExecutionMode
    reason: str
    name: str
    pool: ThreadPool
    warns: bool = False
    lane: str = ""
    limit: int | None = None

    @property
    def where(self) -> str:
        """The place where the callable runs, as users read it: the mode, or the lane."""
        return f"lane {self.lane}" if self.lane else self.mode.value

    async def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function in its mode, then await the result if it is awaitable."""
        try:
            if self.kind is Kind.COROUTINE:
                return await self.func(*args, **kwargs)
            if self.mode is not ExecutionMode.EVENT_LOOP:
                result = await self.pool.run(partial(self.func, *args, **kwargs))
            else:
                if self.warns:
                    self._warn()
                result = self.func(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:
            contain(error, self.name)
            raise

    async def run_part(self, func: Callable[[], T], *, is_cleanup: bool = False) -> T:
        """Run a part of the function, such as the half after its `yield`, in its mode.

        With `is_cleanup`, it runs even if the awaiting task is cancelled before it begins.
        """
        with Containment(self.name):
            if self.mode is ExecutionMode.EVENT_LOOP:
                return func()
            return await self.pool.run(func, is_cleanup=is_cleanup)

    def stream(self, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of the generator that the function returns, and close it at the end.

        Raises `TypeError` if the function returns anything else.
        """
        if self.kind in (Kind.GENERATOR, Kind.ASYNC_GENERATOR):
            if self.warns:
                self._warn()
            return self.iterate(self.func(*args, **kwargs))  # the user's code has not begun yet
        return self._stream_returned(*args, **kwargs)

    async def _stream_returned(self, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        items = await self.run(*args, **kwargs)
        if not is_generator(items):
            raise TypeError(
                f"Called method '{self.name.rpartition('.')[2]}' with "
                "`handle.options(stream=True)` but it did not return a generator."
            )
        async with aclosing(self.iterate(items)) as stream:
            async for item in stream:
                yield item

    def items(self, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the items of a generator function in the current thread, with contained errors.

        For an iterator that other code drops: an error that its `finally` then raises would reach
        no caller, so it is logged.
        """
        items = self.func(*args, **kwargs)
        delivering = False
        try:
            for item in items:
                delivering = True
                yield item
                delivering = False
        except BaseException as error:
            if not (delivering and type(error) is GeneratorExit):
                contain(error, self.name, is_task=False)
                raise
            try:
                items.close()
            except BaseException as late:
                logger.warning("%s failed while it was closed", self.name, exc_info=readable(late))
            raise

    async def iterate(self, items: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of a generator that the function returned, and close it at the end.

        A sync generator of a threadpool plan keeps one thread and one context for its whole life. A
        sync generator of the serial thread keeps its context, but shares the thread item by item.
        """
        delivering = False
        try:
            if not inspect.isasyncgen(items) and self.mode is ExecutionMode.EVENT_LOOP:
                with closing(items):
                    for item in items:
                        delivering = True
                        yield item
                        delivering = False
                return
            stream = items if inspect.isasyncgen(items) else self.pool.stream(items)
            async with aclosing(stream):
                async for item in stream:
                    delivering = True
                    yield item
                    delivering = False
        except BaseException as error:
            if not (delivering and type(error) is GeneratorExit):
                contain(error, self.name)
            raise  # the consumer closes this generator; the user's has not raised it

    def _warn(self) -> None:
        self.warns = False
        _warn_of_def_on_loop(self.func, self.name)


_warned: set[tuple[str, str, int]] = set()
_warned_lock = threading.Lock()


def _warn_of_def_on_loop(func: Callable[..., object], name: str) -> None:
    """Warn, once for each method and process. Source: seed "Environment flags"."""
    # The method's own line, not the line of a wrapper, which all decorated methods share.
    code = code_of(inspect.unwrap(underlying(func)))
    file, line = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
    # Not the code object: equal code in two files compares equal.
    method = (name, file, line)
    with _warned_lock:
        if method in _warned:
            return
        _warned.add(method)
    text = (
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL_WARNING: Calling sync method "
        f"'{name}' directly on the asyncio loop. In a future version, sync methods will "
        "be run in a threadpool by default. While it runs, no other request of this replica "
        "makes progress. Once the method and what it shares are thread-safe, opt in with "
        "RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1, or with @serve.method(execution='threadpool') for "
        "this one; to stay on the loop, make it `async def`, or say execution='event_loop'. "
        f"({name} at {file}:{line})"
    )
    try:
        warnings.warn_explicit(text, SyncMethodOnEventLoopWarning, file, line)
    except SyncMethodOnEventLoopWarning:  # `-W error` is for tests; it must not fail the request
        logger.warning("%s", text)


_FIXED: Mapping[Role, tuple[ExecutionMode, str]] = {
    Role.FRAMEWORK: (ExecutionMode.ANYIO, "Starlette runs def with AnyIO"),
    Role.ASGI: (ExecutionMode.EVENT_LOOP, "ASGI calls it on the loop"),
    Role.STREAM: (ExecutionMode.THREADPOOL, "one thread iterates it from end to end"),
    Role.LIFECYCLE: (ExecutionMode.EVENT_LOOP, "constructors run on the loop"),
    Role.UNLOAD: (ExecutionMode.THREADPOOL, "models are unloaded in a threadpool"),
}
"""The places of a `def` that `@serve.method` does not change, with their reasons."""

_USUAL: Mapping[Role, tuple[ExecutionMode, str]] = {
    Role.ENDPOINT: (ExecutionMode.THREADPOOL, "FastAPI runs def in a threadpool"),
    Role.BATCH: (ExecutionMode.THREADPOOL, "a def batch function runs in a threadpool"),
}
"""The places of a `def` without `@serve.method`."""


def plan(
    func: Callable[..., object],
    role: Role,
    *,
    sync_in_threadpool: bool,
    pool: ThreadPool,
    lanes: Lanes | None = None,
) -> ExecutionPlan:
    """Decide where `func` runs.

    `sync_in_threadpool` is the flag; it affects only METHOD. `pool` runs a `def` without a lane;
    without `lanes`, outside of a deployment, it runs every `def`. Raises `ValueError` for a lane
    that the deployment does not have.
    """
    override = override_of(func)
    written = kind_for_fastapi(func) if role is Role.ENDPOINT and override is None else kind(func)
    warns = False
    lane = ""
    if written.is_async:
        mode, reason = ExecutionMode.EVENT_LOOP, "async def"
        if not kind(func).is_async:
            reason = "FastAPI sees the async def that it wraps"
    elif role is Role.LIFECYCLE and lanes is not None and lanes.is_serial:
        mode, reason = ExecutionMode.SERIAL, "its class has a method in the serial thread"
    elif role in _FIXED:
        mode, reason = _FIXED[role]
    elif override is not None:
        mode, lane, reason = override.mode, override.lane, str(override)
    elif role in _USUAL:
        mode, reason = _USUAL[role]
    else:
        mode = ExecutionMode.THREADPOOL if sync_in_threadpool else ExecutionMode.EVENT_LOOP
        reason = f"RAY_SERVE_RUN_SYNC_IN_THREADPOOL={int(sync_in_threadpool)}"
        warns = not sync_in_threadpool and code_of(func) is not None  # a builtin has no code
    made = ExecutionPlan(func, written, mode, reason, name_of(func), pool, warns)
    if mode in (ExecutionMode.THREADPOOL, ExecutionMode.SERIAL):
        _take_threads(made, lane, lanes)
    return made


def _take_threads(made: ExecutionPlan, lane: str, lanes: Lanes | None) -> None:
    """Set the lane, limit and pool in the plan of a `def` that leaves the loop."""
    if lanes is None:
        made.lane = lane
    elif made.mode is ExecutionMode.SERIAL:
        made.limit = 1
        made.pool = lanes.pools.get(SERIAL_LANE, made.pool)
    elif not lane:
        made.limit = lanes.limit
    elif lane in lanes.limits:
        made.lane, made.limit = lane, lanes.limits[lane]
        made.pool = lanes.pools.get(lane, made.pool)
    else:
        raise ValueError(no_such_lane(made.name, lane, lanes.limits))


def no_such_lane(name: str, lane: str, limits: Mapping[str, int]) -> str:
    """Return the error message for a callable whose deployment does not have its lane."""
    return (
        f"{name} runs in lane={lane!r}, but its deployment has lanes={dict(limits)!r}; add the "
        f"lane with its number of threads: @serve.deployment(lanes={{{lane!r}: 8}})"
    )


def override_of(func: Callable[..., object]) -> Override | None:
    """Return the `Override` of `func`, `None` if it has no `@serve.method`."""
    found = getattr(underlying(func), OVERRIDE, None)
    return found if isinstance(found, Override) else None


def stays_on_loop(func: Callable[..., object]) -> bool:
    """Return whether `@serve.method` keeps a `def` on the event loop."""
    override = override_of(func)
    return override is not None and override.mode is ExecutionMode.EVENT_LOOP


OVERRIDE = "__ingress_method__"
"""The attribute that holds the `Override` of a function, and of its wrappers."""


def call_inline(func: Callable[..., T], /, *args: object) -> T:
    """Call a short `def` here, without a plan, and contain its errors."""
    try:
        with Containment(func, is_task=False):
            return func(*args)
    except StopIteration as error:
        raise RuntimeError(f"{name_of(func)} raised StopIteration") from error


class Containment:
    """A context that user code runs in: an error that must not leave it as it is, is replaced.

    `where` is the name of the code, or the code itself; the rest is as for `contain`. It keeps
    nothing of a run, so it may be entered again. To make it costs 0.2 us, to enter it 0.2 us. So
    the code that all requests and all streams pass has an `except` clause instead:
    `ExecutionPlan.run`, `items` and `iterate`, `Replica.serve` and `ReplicaApp`.
    """

    __slots__ = ("_is_task", "_where")

    def __init__(self, where: str | Callable[..., object], *, is_task: bool = True) -> None:
        self._where = where
        self._is_task = is_task

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is not None:
            where = self._where if isinstance(self._where, str) else name_of(self._where)
            contain(error, where, is_task=self._is_task)


def contain(error: BaseException, where: str, *, is_task: bool = True) -> None:
    """Raise the replacement of an `error` that must not leave user code as it is.

    For `except BaseException as error: contain(error, ...); raise`, on paths on which requests
    would notice a `Containment`. Without `is_task`, a cancellation cannot have come from outside,
    so it is replaced, too.
    """
    told = contained(error, where, is_task=is_task)
    if told is not error:
        raise_instead(told)


def contained(error: BaseException, where: str, *, is_task: bool = True) -> BaseException:
    """Return the replacement of `error`, or `error` itself if it may leave user code as it is.

    A readable `Exception` may leave, and so may a cancellation.
    """
    safe: BaseException = readable(error)
    if issubclass(type(error), Exception) or (is_task and may_leave(error)):
        return safe
    told = UserCodeExit(safe, where)
    told.__cause__ = told.__context__ = safe
    return told


def raise_instead(told: BaseException) -> None:
    """Raise an error in place of the handled one, without the handled one as its context."""
    context = told.__context__
    try:
        raise told
    finally:
        told.__context__ = context  # `raise` set it to an error that may be unreadable


def may_leave(error: BaseException) -> bool:
    """Return whether an `error` that is not an `Exception` may leave its task as it is.

    A requested cancellation may, and the `GeneratorExit` of a coroutine that is collected together
    with its loop. Any other error becomes `UserCodeExit`, because it would end the loop.
    """
    task = _current_task()
    is_cancellation = issubclass(type(error), asyncio.CancelledError)
    return task is None or (is_cancellation and task.cancelling() > 0)


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
