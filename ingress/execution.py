"""Where user code runs.

Every call into user code starts on the replica's user event loop. An `async def` stays there; a
`def` may move to a worker thread. The choice is made here and nowhere else, so what the plan says
is what happens.

    role                           async def     def
    METHOD     of a deployment     event loop    as RAY_SERVE_RUN_SYNC_IN_THREADPOOL says
    ENDPOINT   of a FastAPI app    event loop    threadpool
    LIFECYCLE  __init__, __del__   event loop    event loop
    BATCH      @serve.batch        event loop    threadpool
    UNLOAD     a model's __del__   event loop    threadpool
    STREAM     a response's body   event loop    threadpool
    FRAMEWORK  Starlette calls it  event loop    a thread of AnyIO's
    ASGI       apps, middleware    event loop    event loop

A generator is iterated where the function that returned it ran. Whatever awaitable a `def`
returns is awaited on the loop. What is not an `Exception` becomes `UserCodeExit` here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CodeType
from typing import Any, Protocol, TypeVar

from ingress.exceptions import SyncMethodOnEventLoopWarning, UserCodeExit

logger = logging.getLogger("ingress")

T = TypeVar("T")


class Role(Enum):
    """What a callable is to the framework."""

    METHOD = "method"
    ENDPOINT = "endpoint"
    LIFECYCLE = "lifecycle"
    BATCH = "batch"
    UNLOAD = "unload"
    STREAM = "stream"
    """What a `StreamingResponse` iterates, which `responses.take_over_stream` sees to."""
    FRAMEWORK = "framework"
    """What Starlette and FastAPI call themselves: its plan says where, and is never run."""
    ASGI = "ASGI"
    """The same of apps and middleware, and of what starts and stops them."""


class Kind(Enum):
    """How a callable is written."""

    FUNCTION = "def"
    COROUTINE = "async def"
    GENERATOR = "def generator"
    ASYNC_GENERATOR = "async def generator"

    @property
    def is_async(self) -> bool:
        return self in (Kind.COROUTINE, Kind.ASYNC_GENERATOR)


class ExecutionMode(Enum):
    """Where a call runs; the values are the words users read."""

    EVENT_LOOP = "event loop"
    ANYIO = "AnyIO thread"
    THREADPOOL = "threadpool"


class ThreadPool(Protocol):
    """What `execution` asks of worker threads; `threads.WorkerPool` is one."""

    async def run(self, func: Callable[[], T]) -> T: ...

    def stream(self, items: Iterable[Any]) -> AsyncGenerator[Any, None]: ...

    def batches(self, items: Iterable[Any]) -> AsyncGenerator[list[Any], None]: ...


@dataclass(slots=True)
class ExecutionPlan:
    """Where one callable runs, and why. Made once per replica, used by every request."""

    func: Callable[..., Any]
    kind: Kind
    mode: ExecutionMode
    reason: str
    name: str
    pool: ThreadPool
    warns: bool = False

    async def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function in its mode, then await its result if that is awaitable."""
        try:
            if self.kind is Kind.COROUTINE:
                return await self.func(*args, **kwargs)
            if self.mode is ExecutionMode.THREADPOOL:
                result = await self.pool.run(partial(self.func, *args, **kwargs))
            else:
                if self.warns:
                    self._warn()
                result = self.func(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception:
            raise
        except BaseException as error:
            if may_leave(error):
                raise
            raise UserCodeExit(error, self.name) from error

    def stream(self, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Yield the items of the generator the function returns, and close it at the end.

        Raises `TypeError` if it returns anything else.
        """
        if self.kind in (Kind.GENERATOR, Kind.ASYNC_GENERATOR):
            if self.warns:
                self._warn()
            return self.iterate(self.func(*args, **kwargs))  # runs nothing of its body yet
        return self._stream_returned(*args, **kwargs)

    async def _stream_returned(self, /, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        items = await self.run(*args, **kwargs)
        if not is_generator(items):
            raise TypeError(
                f"Called method '{self.name}' with `handle.options(stream=True)` but it did not "
                "return a generator."
            )
        async with aclosing(self.iterate(items)) as stream:
            async for item in stream:
                yield item

    def items(self, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the items of a generator function in the current thread, contained.

        For an iterator that others hold: what its `finally` raises when they let go of it would
        reach nobody, so it is logged.
        """
        items = self.func(*args, **kwargs)
        delivering = False
        try:
            for item in items:
                delivering = True
                yield item
                delivering = False
        except Exception:
            raise
        except BaseException as error:
            if not (delivering and isinstance(error, GeneratorExit)):
                raise UserCodeExit(error, self.name) from error
            try:
                items.close()
            except BaseException as late:
                logger.warning("%s failed while it was closed", self.name, exc_info=late)
            raise

    async def iterate(self, items: Any) -> AsyncGenerator[Any, None]:
        """Yield what a generator the function returned yields, and close it at the end.

        A sync generator of a threadpool plan keeps one thread and one context for its whole life.
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
        except Exception:
            raise
        except BaseException as error:
            if delivering and isinstance(error, GeneratorExit):
                raise  # our consumer closes us; it is not the user's generator that raised it
            if may_leave(error):
                raise
            raise UserCodeExit(error, self.name) from error

    def _warn(self) -> None:
        """Warn of a `def` on the event loop, once per method and process."""
        self.warns = False
        # The method's own line, not that of a decorator's wrapper, which its methods share.
        code = code_of(inspect.unwrap(_underlying(self.func)))
        file, line = (code.co_filename, code.co_firstlineno) if code else ("<unknown>", 0)
        # Not the code: equal code in two files is equal.
        method = (self.name, file, line)
        with _warned_lock:
            if method in _warned:
                return
            _warned.add(method)
        text = (
            "RAY_SERVE_RUN_SYNC_IN_THREADPOOL_WARNING: Calling sync method "
            f"'{self.name}' directly on the asyncio loop. In a future version, sync methods will "
            "be run in a threadpool by default. While it runs, no other request of this replica "
            "makes progress. Once the method and what it shares are thread-safe, opt in with "
            "RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1; to stay on the loop, make it `async def`. "
            f"({self.name} at {file}:{line})"
        )
        logger.warning("%s", text)
        try:
            warnings.warn_explicit(text, SyncMethodOnEventLoopWarning, file, line)
        except SyncMethodOnEventLoopWarning:
            pass  # `-W error` is for tests to see; the request it hit is not to blame


_warned: set[tuple[str, str, int]] = set()
_warned_lock = threading.Lock()


def plan(
    func: Callable[..., Any], role: Role, *, sync_in_threadpool: bool, pool: ThreadPool
) -> ExecutionPlan:
    """Decide where `func` runs. `sync_in_threadpool` is the flag; only METHOD reads it."""
    written = kind(func)
    warns = False
    if written.is_async:
        mode, reason = ExecutionMode.EVENT_LOOP, "async def"
    elif role is Role.FRAMEWORK:
        mode, reason = ExecutionMode.ANYIO, "Starlette runs def with AnyIO"
    elif role is Role.ASGI:
        mode, reason = ExecutionMode.EVENT_LOOP, "ASGI calls it on the loop"
    elif role is Role.STREAM:
        mode, reason = ExecutionMode.THREADPOOL, "one thread iterates it from end to end"
    elif role is Role.LIFECYCLE:
        mode, reason = ExecutionMode.EVENT_LOOP, "constructors run on the loop"
    elif role is Role.ENDPOINT:
        mode, reason = ExecutionMode.THREADPOOL, "FastAPI runs def in a threadpool"
    elif role is Role.BATCH:
        mode, reason = ExecutionMode.THREADPOOL, "a def batch function runs in a threadpool"
    elif role is Role.UNLOAD:
        mode, reason = ExecutionMode.THREADPOOL, "models are unloaded in a threadpool"
    else:
        mode = ExecutionMode.THREADPOOL if sync_in_threadpool else ExecutionMode.EVENT_LOOP
        reason = f"RAY_SERVE_RUN_SYNC_IN_THREADPOOL={int(sync_in_threadpool)}"
        warns = not sync_in_threadpool and not _is_builtin(func)
    return ExecutionPlan(func, written, mode, reason, name_of(func), pool, warns)


def call_inline(func: Callable[..., T], /, *args: Any) -> T:
    """Call a short `def` here and now, contained: a question that cannot wait for a plan."""
    try:
        return func(*args)
    except StopIteration as error:
        raise RuntimeError(f"{name_of(func)} raised StopIteration") from error
    except Exception:
        raise
    except BaseException as error:
        raise UserCodeExit(error, name_of(func)) from error


def kind(func: Callable[..., Any]) -> Kind:
    """Return how `func` is written.

    Looks through `partial`, bound methods and callable objects, not through `__wrapped__`: a sync
    wrapper round an `async def` is a `def`.
    """
    func = _underlying(func)
    if inspect.iscoroutinefunction(func) or asyncio.iscoroutinefunction(func):
        return Kind.COROUTINE
    if inspect.isasyncgenfunction(func):
        return Kind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(func):
        return Kind.GENERATOR
    return Kind.FUNCTION


def is_generator(value: Any) -> bool:
    """Whether `value` is what calling a generator function gives, sync or async."""
    return inspect.isgenerator(value) or inspect.isasyncgen(value)


def may_leave(error: BaseException) -> bool:
    """Whether an `error` that is not an `Exception` may leave its task as it is.

    A cancellation somebody asked for may, and the `GeneratorExit` of a coroutine that is collected
    together with its loop. All else becomes `UserCodeExit`: it would end the loop.
    """
    task = _current_task()
    return task is None or (isinstance(error, asyncio.CancelledError) and task.cancelling() > 0)


def name_of(func: Callable[..., Any]) -> str:
    """Return `Class.method` or the function's name, without the scope it was defined in."""
    func = _underlying(func)
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    return str(name).rpartition("<locals>.")[2]


def code_of(func: Callable[..., Any]) -> CodeType | None:
    """Return the code object behind `func`, `None` for what is not written in Python."""
    code = getattr(_underlying(func), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _underlying(func: Callable[..., Any]) -> Callable[..., Any]:
    while True:
        if isinstance(func, partial):
            func = func.func
        elif inspect.ismethod(func):
            func = func.__func__
        elif inspect.isroutine(func) or inspect.isclass(func):
            return func
        else:
            func = type(func).__call__


def _is_builtin(func: Callable[..., Any]) -> bool:
    return code_of(func) is None


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
