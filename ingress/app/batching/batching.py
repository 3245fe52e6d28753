"""`@serve.batch`: calls that arrive one by one run together.

A decorated function has a `BatchQueue` for each instance, replica and loop, and only while a call
is in it. So nothing is shared between instances, and nothing keeps an instance or a loop alive.

The types of batched functions are for type checkers; at run time they are functions. Annotations
cannot turn the lists of a signature into their items. So the parameters are `...`, and
`ingress.mypy` fills them in.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from functools import partial, wraps
from numbers import Integral, Real
from types import FunctionType
from typing import Any, Never, ParamSpec, Protocol, TypeVar, overload

from ingress._unsupported import refuse
from ingress.app.batching.batch_queue import (
    NO_INSTANCE,
    BatchFunction,
    BatchLimits,
    BatchQueue,
    Item,
)
from ingress.app.batching.chooser import Choosers
from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base.foreign import stored
from ingress.core.base.signatures import signature_of
from ingress.core.calls.call import CURRENT_CALL
from ingress.core.calls.channel import Channel, EndOfStream
from ingress.core.calls.loops import mailbox_of, running_loop
from ingress.core.calls.tracing import TRACING, current_span
from ingress.core.execution import execution
from ingress.core.execution.execution import Kind
from ingress.telemetry.logs import logger

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Results = Sequence[R] | Awaitable[Sequence[R]]
BatchPart = Sequence[R | type[StopIteration]]
Parts = Iterator[BatchPart[R]] | AsyncIterator[BatchPart[R]]


class Limited(Protocol):
    """The functions of a batched function that change its limits."""

    __name__: str

    def set_max_batch_size(self, max_batch_size: int) -> None: ...
    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None: ...
    def _get_max_batch_size(self) -> int: ...
    def _get_batch_wait_timeout_s(self) -> float: ...


class Batched(Limited, Protocol[P, R_co]):
    """A batched function, to type checkers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]: ...


class BatchedStream(Limited, Protocol[P, R_co]):
    """A batched generator, to type checkers."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[R_co, None]: ...


class BatchDecorator(Protocol):
    """The result of `batch(...)` with options: the decorator."""

    @overload
    def __call__(self, func: Callable[..., Parts[R]], /) -> BatchedStream[..., R]: ...
    @overload
    def __call__(self, func: Callable[..., Results[R]], /) -> Batched[..., R]: ...
    @overload
    def __call__(self, func: Callable[..., object], /) -> Any: ...


RECEIVERS = ("self", "cls")


class _Size(int):
    """A default that is no other object: it can be told from the same number, if that is given."""


class _Wait(float):
    """The same."""


SIZE, WAIT_S = _Size(10), _Wait(0.01)  # the numbers are Ray Serve's
INSTANCES = 100  # whose choosers are kept
Key = tuple[int, int, int, str]
CHOSEN_SIZE = 256  # the bound with `target_latency_ms`

_NO_NAMES: frozenset[str] = frozenset()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@overload
def batch(_func: Callable[..., Parts[R]], /) -> BatchedStream[..., R]: ...


@overload
def batch(_func: Callable[..., Results[R]], /) -> Batched[..., R]: ...


@overload
def batch(_func: Callable[..., object], /) -> Any: ...


@overload
def batch(
    _func: None = None,
    /,
    max_batch_size: int = 10,
    batch_wait_timeout_s: float = 0.01,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], int] | None = None,
    *,
    per_item_errors: bool = False,
    per_model: bool = False,
    target_latency_ms: float | None = None,
) -> BatchDecorator: ...


def batch(
    _func: Callable[..., object] | None = None,
    /,
    max_batch_size: int = SIZE,
    batch_wait_timeout_s: float = WAIT_S,
    max_concurrent_batches: int = 1,
    batch_size_fn: Callable[[list[Any]], int] | None = None,
    *,
    per_item_errors: bool = False,
    per_model: bool = False,
    target_latency_ms: float | None = None,
    **unsupported: Never,
) -> Any:
    """Turn a function of lists into a function of single values, whose calls run together.

    The function gets a list for each of its parameters and returns a list of as many results, in
    the same order. A generator yields such lists, with the class `StopIteration` in the place of a
    caller whose stream ends there; its calls are queued when they are made. A first parameter
    called `self` or `cls` is no list. The decorated function is awaited, or iterated with `async
    for`, also if it was written as a `def`: a `def` runs in the replica's worker threads.

    A batch starts when it has `max_batch_size` calls (by default 10), or `batch_wait_timeout_s` (by
    default 0.01) after it began to form; at 0 it starts with the calls that are there. With
    `target_latency_ms`, the time in ms in which a call should have its answer, size and wait are
    chosen from the measured calls and run times of each model and instance, within `max_batch_size`
    (by default 256): see docs/batching.md. At most `max_concurrent_batches` run at once, with
    `per_model` as many for each multiplexed model. `batch_size_fn(values)` returns how much of
    `max_batch_size` these values of the first parameter take, by default their number. With
    `per_item_errors` an exception among the results is raised for its caller; otherwise it is
    returned like any value.

    The decorated function has `set_max_batch_size` and `set_batch_wait_timeout_s`, which hold from
    the next batch on: inside a replica for that replica, elsewhere for all replicas that have not
    set their own.

    Raises `TypeError` or `ValueError`. Source: Ray 2.60.0, batching.py.
    """
    refuse("serve.batch", unsupported, batch)
    target_s = _target_s(target_latency_ms, batch_wait_timeout_s)
    if target_s is not None and max_batch_size is SIZE:
        max_batch_size = CHOSEN_SIZE
    limits = BatchLimits(_size(max_batch_size), _wait_s(batch_wait_timeout_s))
    if not _is_whole(max_concurrent_batches) or max_concurrent_batches < 1:
        raise TypeError(
            f"max_concurrent_batches must be an integer >= 1, got {max_concurrent_batches!r}"
        )
    for name, value in {"per_item_errors": per_item_errors, "per_model": per_model}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    _check_size_fn(batch_size_fn)

    def decorate(func: Any) -> Any:
        if isinstance(func, (staticmethod, classmethod)):
            return type(func)(decorate(func.__func__))
        if not callable(func) or inspect.isclass(func) or hasattr(func, "func_or_class"):
            raise TypeError(
                f"@serve.batch decorates a function, got {func!r}; put it on the method that takes "
                "the lists, and give options by name: @serve.batch(max_batch_size=8)"
            )
        handler = BatchFunction(
            func,
            execution.name_of(func),
            execution.kind(func),
            int(max_concurrent_batches),
            batch_size_fn,
            per_item_errors,
            per_model,
            target_s,
        )
        if target_s is not None and handler.streams:
            raise TypeError(
                f"target_latency_ms is for functions that return; '{handler.name}' is a generator, "
                "whose batch lasts as long as its callers read: give max_batch_size and "
                "batch_wait_timeout_s instead"
            )
        return Batcher(handler, limits).decorated()

    return decorate if _func is None else decorate(_func)


def _check_size_fn(func: object) -> None:
    if func is not None and not callable(func):
        raise TypeError(f"batch_size_fn must be a callable or None, got {func!r}")
    if func is not None and execution.kind(func) is not Kind.FUNCTION:
        raise TypeError(f"batch_size_fn must be a plain `def`, got {func!r}")


def warn_of_capacity(deployment: str, func_or_class: type | FunctionType, max_ongoing: int) -> None:
    """Log a warning for each batched method whose batches a replica can never fill."""
    owners = func_or_class.__mro__[::-1] if inspect.isclass(func_or_class) else ()
    members = {name: value for owner in owners for name, value in vars(owner).items()}
    for member in members.values() or (func_or_class,):
        batcher = stored(member, "__ingress_batcher__")
        if type(batcher) is Batcher:
            batcher.warn_of_capacity(deployment, max_ongoing)


class Batcher:
    """One decorated function. Thread-safe: each loop has queues of its own.

    `handler` is the user's function, with its options that do not change.
    """

    __slots__ = (
        "_arity", "_choosers", "_has_receiver", "_limits", "_lock", "_queues", "_signature",
        "handler",
    )  # fmt: skip

    def __init__(self, handler: BatchFunction, limits: BatchLimits) -> None:
        self.handler = handler
        self._lock = threading.Lock()  # for changes of the limits
        self._limits = limits
        parameters = list(signature_of(handler.func).parameters.values())
        self._has_receiver = bool(parameters) and parameters[0].name in RECEIVERS
        parameters = parameters[self._has_receiver :]
        if not parameters:
            raise TypeError(
                f"@serve.batch passes lists, but '{handler.name}' has no parameter for a list; "
                "give it a parameter for the collected values"
            )
        self._signature = inspect.Signature(parameters)
        # The number of arguments of a simple call, as nearly all are; -1 if no call can be simple.
        is_simple = all(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)
        self._arity = len(parameters) if is_simple else -1
        # A queue keeps the objects whose ids are its key, so that no other objects get these ids.
        self._queues: dict[Key, BatchQueue] = {}
        self._choosers: dict[Any, Choosers] = {}  # of the calls outside of replicas

    def decorated(self) -> Callable[..., Any]:
        """Return the function that takes the place of the user's function."""
        func: Any = self.handler.func
        wrapper: Any
        if self.handler.streams:

            @wraps(func)
            def stream(*args: object, **kwargs: object) -> AsyncGenerator[object, None]:
                return self.stream(args, kwargs)

            wrapper = stream
            execution.mark_stream(wrapper)
        else:

            @wraps(func)
            async def call(*args: object, **kwargs: object) -> object:
                return await self.call(args, kwargs)

            wrapper = call
        wrapper.__ingress_batcher__ = self
        wrapper.set_max_batch_size = self.set_max_batch_size
        wrapper.set_batch_wait_timeout_s = self.set_batch_wait_timeout_s
        wrapper._get_max_batch_size = lambda: self.limits().max_batch_size
        wrapper._get_batch_wait_timeout_s = lambda: self.limits().batch_wait_timeout_s
        if inspect.isfunction(func):
            func.__ingress_batched__ = func  # type: ignore[attr-defined]  # for `check_routes`
        return wrapper  # type: ignore[no-any-return]

    def limits(self, replica: ReplicaRuntime | None = None) -> BatchLimits:
        """Return the limits of a replica, by default of the current one."""
        replica = replica or REPLICA.get(None)
        return self._limits if replica is None else replica.batch_limits.get(self, self._limits)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the size of the next batches. Raises `TypeError` or `ValueError`."""
        self._set(max_batch_size=_size(max_batch_size))

    def set_batch_wait_timeout_s(self, batch_wait_timeout_s: float) -> None:
        """Set the wait of the next batches. Raises `TypeError` or `ValueError`."""
        if self.handler.target_s is not None:
            raise ValueError(
                f"'{self.handler.name}' has target_latency_ms, which chooses the wait; "
                "leave set_batch_wait_timeout_s out"
            )
        self._set(batch_wait_timeout_s=_wait_s(batch_wait_timeout_s))

    def _set(self, **changed: Any) -> None:
        replica = REPLICA.get(None)
        # Race with a change of the other limit in another thread: neither gets lost.
        with self._lock:
            limits = replace(self.limits(), **changed)
            if replica is None:
                self._limits = limits
            else:
                replica.batch_limits[self] = limits

    async def call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return the caller's own part of the result of its batch."""
        item, queue = self._submit(args, kwargs, None)
        try:
            await item.ready
        except asyncio.CancelledError:
            queue.leave(item)
            raise
        if item.error is not None:
            try:
                raise item.error
            finally:
                del item  # the traceback holds this frame, which must not hold the error too
        return item.value

    def stream(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> AsyncGenerator[object, None]:
        """Return the stream of the caller's own parts of the results of its batch.

        The call is queued at once, so that streams that are iterated one after another share a
        batch; without a running loop it is queued when the stream is first iterated.
        """
        if running_loop() is None:
            return self._stream_later(args, kwargs)
        # Without limits until it is iterated: its caller may first iterate the streams of others.
        channel: Channel[object] = Channel(sys.maxsize, sys.maxsize)
        item, queue = self._submit(args, kwargs, channel)
        items = self._items(item, queue, channel)
        leave = partial(mailbox_of(queue.loop).post, queue.leave, item)
        # The garbage collector may call this in any thread.
        item.dropped = weakref.ref(items, lambda _: leave())
        return items

    async def _stream_later(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> AsyncGenerator[object, None]:
        async with aclosing(self.stream(args, kwargs)) as items:
            async for item in items:
                yield item

    async def _items(
        self, item: Item, queue: BatchQueue, channel: Channel[object]
    ) -> AsyncGenerator[object, None]:
        item.dropped = None
        channel.limit()
        try:
            await item.ready
            while True:
                try:
                    value = await channel.get()
                except EndOfStream:
                    return
                yield value
        finally:
            channel.close()
            queue.leave(item)

    def _submit(
        self, args: tuple[object, ...], kwargs: dict[str, object], channel: Channel[object] | None
    ) -> tuple[Item, BatchQueue]:
        """Put a call into its queue. Raises `TypeError` for wrong arguments."""
        instance: object = NO_INSTANCE
        if self._has_receiver and args:
            instance, *rest = args
            args = tuple(rest)
        names = _NO_NAMES
        if kwargs or len(args) != self._arity:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self.handler.name}(): {error}") from None
            # Without the defaults: the handler does not expect a list of them.
            args, kwargs = bound.args, bound.kwargs
            names = frozenset(kwargs)
        loop = asyncio.get_running_loop()
        replica, call = REPLICA.get(None), CURRENT_CALL.get(None)
        model_id = call.metadata.multiplexed_model_id if call is not None else ""
        group = (model_id, len(args), names)
        span = None if TRACING.tracer is None else current_span()
        item = Item(args, kwargs, group, call, loop.create_future(), channel, span)
        key = (id(instance), id(replica), id(loop), model_id if self.handler.per_model else "")
        queue = self._queues.get(key)
        if queue is None:
            self._forget_closed_loops()
            queue = self._queues[key] = BatchQueue(
                self.handler,
                instance,
                replica,
                loop,
                limits=lambda: self.limits(replica),
                choosers=self._choosers_of(instance, replica),
                on_idle=lambda idle: self._forget(key, idle),
            )
        queue.submit(item)
        return item, queue

    def _choosers_of(self, instance: object, replica: ReplicaRuntime | None) -> Choosers:
        """Return the choosers of an instance on a replica. They stay when its queue goes."""
        choosers = self._choosers if replica is None else replica.batch_choosers
        # An id may be given again: what was learned is then of the other, for some batches.
        key = (self, id(instance), id(asyncio.get_running_loop()))
        found: Choosers = choosers.pop(key, Choosers())
        while len(choosers) >= INSTANCES:
            del choosers[next(iter(choosers))]
        choosers[key] = found
        return found

    def _forget(self, key: Key, queue: BatchQueue) -> None:
        if self._queues.get(key) is queue:
            del self._queues[key]

    def _forget_closed_loops(self) -> None:
        """Drop the queues whose loop was closed in the middle of their work."""
        for key in list(self._queues):  # other loops change this dict; see `Deadlines._ring`
            queue = self._queues.get(key)
            if queue is not None and queue.loop.is_closed():
                self._queues.pop(key, None)
                queue.forget()

    def warn_of_capacity(self, deployment: str, max_ongoing: int) -> None:
        size, concurrent = self._limits.max_batch_size, self.handler.max_concurrent_batches
        if self.handler.target_s is not None:
            return  # the size is only a bound
        # With a `batch_size_fn` the size is no number of calls.
        if self.handler.batch_size_fn is None and size * concurrent > max_ongoing:
            # The text is Ray 2.60.0's.
            logger.warning(
                "'%s' of deployment '%s': `max_batch_size` (%d) * `max_concurrent_batches` (%d) is "
                "larger than `max_ongoing_requests` (%d). This means the replica will never "
                "achieve the configured `max_batch_size` concurrently. Please update "
                "`max_ongoing_requests` to be >= `max_batch_size` * `max_concurrent_batches`.",
                *(self.handler.name, deployment, size, concurrent, max_ongoing),
            )


def _is_whole(value: object) -> bool:
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool)


def _size(value: Any) -> int:
    text = f"max_batch_size must be an integer >= 1, got {value!r}"
    if not _is_whole(value):
        raise TypeError(text)
    if value < 1:
        raise ValueError(text)
    return int(value)


def _wait_s(value: Any) -> float:
    text = f"batch_wait_timeout_s must be a float >= 0, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return float(value)


def _target_s(target_ms: Any, wait_s: object) -> float | None:
    """Return the target in seconds, `None` without one."""
    if target_ms is None:
        return None
    text = f"target_latency_ms must be a number of milliseconds > 0, got {target_ms!r}"
    if isinstance(target_ms, bool) or not isinstance(target_ms, Real):
        raise TypeError(text)
    if not math.isfinite(target_ms) or target_ms <= 0:
        raise ValueError(text)
    if wait_s is not WAIT_S:
        raise ValueError(
            f"target_latency_ms={target_ms!r} chooses the wait, so that "
            f"batch_wait_timeout_s={wait_s!r} would have no effect; leave one of them out"
        )
    return float(target_ms) / 1e3
