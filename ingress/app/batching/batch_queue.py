"""The queue of one batched function, on one instance and loop.

    submit -> waiting -> forming -> a run: one call of the handler -> each caller's result
              no permit  holds one, until it is full or its time is up

A permit is taken before a batch forms, so a batch goes on filling while others run. The calls of a
batch have one model and arguments of one shape; other calls keep their places. With
`target_latency_ms` a `SizeChooser` gives the size and the wait. No task collects calls: each change
checks whether a batch can start. An empty queue has no task and no timer; it calls `on_idle`, and
its owner drops it.

An item is in `_unbegun` until its batch begins. The thread that removes it from there decides: the
loop begins it, `take` gives it to another replica.
"""

from __future__ import annotations

import asyncio
import copy
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from ingress.app.batching.chooser import Choosers, SizeChooser
from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base.counters import BatchCount
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.core.calls.call import CURRENT_CALL, NO_WORK, Call, begin_wait, end_wait
from ingress.core.calls.channel import Channel
from ingress.core.calls.loops import BorrowedLoop, mailbox_of
from ingress.core.calls.tracing import TRACING, note_failure, trace_batch
from ingress.core.execution import execution
from ingress.core.execution.errors import readable
from ingress.core.execution.execution import Kind, Role
from ingress.exceptions import RayServeException, StreamClosedError, UserCodeExit, needs_no_record
from ingress.telemetry.logs import logger

if TYPE_CHECKING:
    from ingress.core.execution.threads import WorkerPool


@dataclass(eq=False, slots=True)
class Item:
    """One caller's part of a batch.

    Only items of one `group` run together: the model id and the shape of the arguments. `ready` is
    done when the item has its answer, or its stream begins. `span` is the caller's OpenTelemetry
    span. `is_over` says that the item was answered, or that its caller has left.
    """

    args: tuple[object, ...]
    kwargs: dict[str, object]
    group: tuple[str, int, frozenset[str]]
    call: Call | None
    ready: asyncio.Future[None]
    channel: Channel[object] | None
    span: object = None
    value: object = None
    error: BaseException | None = None
    is_over: bool = False
    dropped: weakref.ref[AsyncGenerator[object, None]] | None = None

    @property
    def has_left(self) -> bool:
        # Race with a cancellation: it reaches the future at once, but the caller calls `leave` on a
        # later turn of the loop, and a batch may start in between.
        return self.is_over or self.ready.cancelled()

    @property
    def model_id(self) -> str:
        return self.group[0]

    @property
    def first(self) -> object:
        """The value of the first parameter, `None` if there is none."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def begin(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def settle(self, value: object = None, error: BaseException | None = None) -> None:
        """Give the caller its answer, or end its stream. The first call counts."""
        if self.is_over:
            return
        self.is_over = True
        # Not in the future: it refuses a `StopIteration`, and logs an error that is not fetched,
        # because the caller has left at this very moment.
        self.value, self.error = value, error
        if self.channel is not None:
            self.channel.finish(error)
        self.begin()

    async def put(self, value: object) -> None:
        """Give the caller the next part of its stream; wait while it is too far behind."""
        assert self.channel is not None
        try:
            await self.channel.put(value, len(value) if isinstance(value, str | bytes) else 0)
        except StreamClosedError:  # the caller has left; the others go on
            self.is_over = True


def fail(items: list[Item], error: Exception) -> None:
    """Fail the items that have no answer yet, each with an error of its own.

    One error that several tasks raise would collect the frames and contexts of all of them.
    """
    copies: list[BaseException] = [error]
    copies += [_copy(error) for item in items[1:]]
    for item, each in zip(items, copies, strict=True):
        item.settle(error=each)


def _copy(error: Exception) -> BaseException:
    """Return an equal error of the same type, or the same one if it cannot be copied."""
    try:
        return execution.call_inline(_copied, error)
    except Exception:
        logger.debug("%s cannot be copied for each caller", type(error).__name__, exc_info=True)
        return error


def _copied(error: Exception) -> BaseException:
    made = copy.copy(error)
    if type(made) is not type(error):
        return error
    made.args = error.args  # a constructor may have changed its arguments
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


TOO_LARGE = (
    "Size of item is greater than max_batch_size. Please increase the max_batch_size or check the "
    "implementation of the batch_size_fn."
)
_NOWHERE = DeploymentID("", "")
_ABSENT = object()
NO_INSTANCE = object()
"""The instance of a function that is not a method."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch that `set_*` can change."""

    max_batch_size: int
    batch_wait_timeout_s: float


@dataclass(frozen=True, slots=True, eq=False)
class BatchFunction:
    """The user's function, and its options for batches.

    per_model  `max_concurrent_batches` counts for each model: each has a queue of its own
    target_s   the target of the `SizeChooser` of size and wait, `None` with fixed limits
    """

    func: Callable[..., Any]
    name: str
    kind: Kind
    max_concurrent_batches: int
    batch_size_fn: Callable[[list[Any]], int] | None
    per_item_errors: bool
    per_model: bool = False
    target_s: float | None = None

    @property
    def at_once(self) -> int | None:
        """The most batches that a replica runs at once, `None` if each model has a limit."""
        return None if self.per_model else self.max_concurrent_batches

    @property
    def streams(self) -> bool:
        return self.kind in (Kind.GENERATOR, Kind.ASYNC_GENERATOR)


class BatchQueue:
    """The waiting, forming and running batches of one function. Owned by its loop.

    `limits` is called when a batch begins to form, `on_idle` when the queue is empty. `choosers`
    are those of its instance, by model: they stay when the queue goes.
    """

    __slots__ = (
        "_choosers", "_context", "_forming", "_forming_limits", "_forming_since",
        "_forming_size", "_handler", "_instance", "_limits", "_on_idle", "_own_pool", "_plan",
        "_replica", "_runs", "_timer", "_unbegun", "_waiting", "loop",
    )  # fmt: skip

    def __init__(
        self,
        handler: BatchFunction,
        instance: object,
        replica: ReplicaRuntime | None,
        loop: asyncio.AbstractEventLoop,
        limits: Callable[[], BatchLimits],
        choosers: Choosers,
        on_idle: Callable[[BatchQueue], None],
    ) -> None:
        self.loop = loop
        self._handler = handler
        self._instance = instance
        self._replica = replica
        self._limits = limits
        self._choosers = choosers
        self._on_idle = on_idle
        self._waiting: deque[Item] = deque()
        self._forming: list[Item] = []
        self._unbegun: dict[Item, None] = {}
        self._forming_limits = limits()
        self._forming_since = self._forming_size = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._runs: dict[asyncio.Task[None], tuple[Call, list[Item]]] = {}
        # An empty one: the variables of the request that comes first must not reach the others.
        self._context = Context()
        self._own_pool: WorkerPool | None = None
        if replica is not None:
            self._context.run(REPLICA.set, replica)
            replica.batch_queues[self] = None
        if replica is not None and replica.make_plan is not None and replica.loop is loop:
            self._plan = replica.make_plan(handler.func, Role.BATCH)
        else:  # outside of a replica, or on a loop that user code has made
            from ingress.core.execution.threads import WorkerPool  # imports AnyIO's backend

            home = BorrowedLoop(f"{handler.name}-batch", loop)
            pool = self._own_pool = WorkerPool(home, handler.max_concurrent_batches)
            self._plan = execution.plan(
                handler.func, Role.BATCH, sync_in_threadpool=True, pool=pool
            )

    @property
    def name(self) -> str:
        return self._handler.name

    @property
    def num_waiting(self) -> int:
        """The number of calls whose batch has not begun. Thread-safe."""
        return len(self._unbegun)

    def forget(self) -> None:
        """Remove it from its replica: it is empty, or its loop is closed."""
        if self._replica is not None:
            self._replica.batch_queues.pop(self, None)

    def submit(self, item: Item) -> None:
        self._unbegun[item] = None
        self._waiting.append(item)
        if (chooser := self._chooser(item)) is not None:
            chooser.came()
        self._advance()

    def take(self, can_move: Callable[[Call, BatchFunction], bool]) -> list[Item]:
        """Return the items that no batch will have, because their calls can move. Thread-safe.

        The loop does not turn. Their calls wait here until they are settled.
        """
        return [
            item
            for item in list(self._unbegun)
            if item.channel is None
            and item.call is not None
            and can_move(item.call, self._handler)
            and self._claims(item)
        ]

    def _claims(self, item: Item) -> bool:
        """Return whether this thread decides about an item that no batch has.

        Race of the loop, which may turn again at this moment, with `take` in another thread:
        removing a key is one step, so exactly one of them gets the item.
        """
        return self._unbegun.pop(item, _ABSENT) is None

    def leave(self, item: Item) -> None:
        """Remove the item of a caller that has left.

        The item takes no place in a batch that has not begun; a batch that has begun goes on for
        the others. Once all callers have left, the batch is told to stop (`cancellation()`) but
        goes on, as a `def` does; a generator is closed.
        """
        was_over, item.is_over = item.is_over, True
        self._unbegun.pop(item, None)
        if item in self._forming:
            self._forming.remove(item)
            if not self._forming:
                self._stop_timer()
        elif item in self._waiting:
            self._waiting.remove(item)
        elif not was_over:
            for task, (batch, items) in self._runs.items():
                if item in items and all(each.is_over for each in items):
                    if item.channel is not None:
                        task.cancel()
                    batch.interrupt()
                    break
        self._advance()

    # Forming.

    def _advance(self) -> None:
        """Start full batches, set the timer of the forming one, and report an empty queue."""
        while self._waiting and len(self._runs) < self._handler.max_concurrent_batches:
            if not self._fill():
                break
            self._start()
        if self._forming and self._timer is None:
            wait_s = self._forming_limits.batch_wait_timeout_s
            if self._handler.target_s is not None:
                wait_s = 0.0  # chosen on a later turn of the loop, which may bring more calls first
            self._timer = self.loop.call_later(wait_s, self._due, context=self._context)
        if not (self._waiting or self._forming or self._runs):
            if self._own_pool is not None:
                self._own_pool.shutdown()
            self.forget()
            self._on_idle(self)

    def _fill(self) -> bool:
        """Take the items that may run together. Returns whether the batch is complete."""
        others: deque[Item] = deque()
        is_complete = False
        while self._waiting and not is_complete:
            item = self._waiting.popleft()
            if item.has_left:
                continue
            if not self._forming:
                self._forming_limits = limits = self._limits()
                if (chooser := self._chooser(item)) is not None:
                    chooser.bound = limits.max_batch_size
                    self._forming_limits = replace(limits, max_batch_size=chooser.size)
                self._forming_since = monotonic()
            elif item.group != self._forming[0].group:
                others.append(item)
                continue
            is_complete = self._add(item)
            if is_complete and any(each.has_left for each in self._forming):
                self._waiting.extendleft(reversed(self._forming))  # again, without those items
                self._forming.clear()
                is_complete = False
        others.extend(self._waiting)
        self._waiting = others
        return is_complete

    def _add(self, item: Item) -> bool:
        """Add an item to the forming batch. Returns whether the batch is complete.

        An item that does not fit goes back to the front of the queue. An item that would never fit,
        or whose size is unknown, fails.
        """
        limit = self._forming_limits.max_batch_size
        size: float = len(self._forming) + 1
        if self._handler.batch_size_fn is not None:
            try:
                size = self._context.copy().run(
                    execution.call_inline,
                    _size_of,
                    self._handler.batch_size_fn,
                    [each.first for each in (*self._forming, item)],
                )
            except Exception as error:  # of user code: its caller gets it
                self._refuse(item, error)
                return False
            if size > limit:
                if self._forming:
                    self._waiting.appendleft(item)
                    return True
                # A size that was chosen is no limit for an item alone.
                if self._handler.target_s is None or size > self._limits().max_batch_size:
                    self._refuse(item, RuntimeError(TOO_LARGE))
                    return False
        self._forming.append(item)
        self._forming_size = size
        return size >= limit

    def _refuse(self, item: Item, error: Exception) -> None:
        if self._claims(item):
            item.settle(error=error)

    def _due(self) -> None:
        chooser = self._chooser(self._forming[0])
        if chooser is not None:
            wait_s = chooser.wait_s(self._forming_size, self._forming_since)
            if wait_s > 0.0:
                self._timer = self.loop.call_later(wait_s, self._due, context=self._context)
                return
        self._start()
        self._advance()

    def _chooser(self, item: Item) -> SizeChooser | None:
        """Return what chooses the batches of an item's model, `None` with fixed limits."""
        target_s = self._handler.target_s
        return None if target_s is None else self._choosers.of(item.model_id, target_s)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Running.

    def _start(self) -> None:
        self._stop_timer()
        items = [item for item in self._forming if not item.has_left and self._claims(item)]
        self._forming.clear()
        if not items:
            return
        replica = self._replica
        calls = [item.call for item in items]
        # A call of its own: calls made in a batch do not end with one of its members. No member is
        # the only one that a log record is about, so the request id is blank.
        metadata = RequestMetadata(
            request_id="",
            deployment=_NOWHERE if replica is None else replica.replica_id.deployment_id,
            method_name=self._handler.name,
            multiplexed_model_id=items[0].model_id,
            deadline=_latest_deadline(calls),
        )
        context = self._context.copy()
        batch = Call(metadata, NO_WORK, context, tuple(call for call in calls if call is not None))
        context.run(CURRENT_CALL.set, batch)
        if TRACING.tracer is not None or batch.started_at >= TRACING.next_look:
            trace_batch(batch, [item.span for item in items])
        # A task of its own: it goes on when the caller that completed the batch is cancelled.
        # A caller that left counts in the size of a `batch_size_fn`, which is not asked again.
        size = len(items) if self._handler.batch_size_fn is None else self._forming_size
        task = self.loop.create_task(self._run(items, batch, size), context=context)
        self._runs[task] = batch, items
        if replica is not None:
            replica.batches[task] = batch
            counts = replica.batch_counts.setdefault(self._handler.name, BatchCount())
            limit, since = self._forming_limits.max_batch_size, self._forming_since
            counts.begin(len(items), size, limit, (batch.started_at - since) * 1e3)
            if (chooser := self._chooser(items[0])) is not None:
                counts.chosen = chooser.chosen(size)
        task.add_done_callback(self._ended, context=self._context)

    async def _run(self, items: list[Item], batch: Call, size: float) -> None:
        args: list[object] = [
            list(values) for values in zip(*(item.args for item in items), strict=True)
        ]
        kwargs = {name: [item.kwargs[name] for item in items] for name in items[0].kwargs}
        if self._instance is not NO_INSTANCE:
            args.insert(0, self._instance)
        members = batch.members or ()
        for member in members:
            begin_wait(batch, member)
        chooser, began_at = self._chooser(items[0]), monotonic()
        try:
            if self._handler.streams:
                await self._stream(items, args, kwargs)
            else:
                result = await self._plan.run(*args, **kwargs)
                for item, value in zip(items, self._split(result, len(items)), strict=True):
                    error = self._error_in(value)
                    if error is not None:
                        self._log_late([item], error)
                    item.settle(value if error is None else None, error)
            # A batch that failed, or that was told to stop, teaches nothing.
            if chooser is not None and not batch.is_interrupted:
                chooser.learn(size, monotonic() - began_at)
        except Exception as error:  # of user code: the callers get it
            note_failure(error)
            self._log_late(items, error)
            fail(items, error)
        except asyncio.CancelledError as error:  # the replica stops, or user code cancelled it
            note_failure(error)
            fail(items, UserCodeExit(error, self._handler.name))
        finally:
            for member in members:
                end_wait(batch, member)
            del items  # an error's traceback holds this frame, which must not hold the error too

    async def _stream(
        self, items: list[Item], args: list[object], kwargs: dict[str, list[object]]
    ) -> None:
        """Hand the generator's results to the callers, at the pace of the slowest that listens.

        Each caller may be behind by as much as a `Channel` holds.
        """
        for item in items:
            item.begin()
        async with aclosing(self._plan.stream(*args, **kwargs)) as results:
            async for result in results:
                for item, value in zip(items, self._split(result, len(items)), strict=True):
                    if item.is_over:
                        continue
                    # By identity: `==` of an array is an array.
                    if value is StopIteration or value is StopAsyncIteration:
                        item.settle()
                    elif (error := self._error_in(value)) is not None:
                        item.settle(error=error)
                    else:
                        await item.put(value)
                if all(item.is_over for item in items):
                    return
        for item in items:
            item.settle()

    def _split(self, result: Any, count: int) -> list[object]:
        """Return each caller's part of the result. Raises if there is not one for each."""
        return execution.call_inline(_as_list, result, count, self._handler.name)

    def _error_in(self, value: Any) -> BaseException | None:
        """Return the error to raise for a caller, if its part of the result is an error."""
        # By its type: any other access to an unknown value may fail.
        if not self._handler.per_item_errors or not issubclass(type(value), BaseException):
            return None
        error: BaseException = readable(value)
        return error if isinstance(error, Exception) else UserCodeExit(error, self._handler.name)

    def _log_late(self, items: list[Item], error: BaseException) -> None:
        """Log an error if all callers that it is for have left: it would be lost otherwise."""
        if all(item.has_left for item in items) and not needs_no_record(error):
            ids = [item.call.metadata.request_id for item in items if item.call is not None]
            logger.warning(
                "%s failed after all requests of its batch were cancelled: %s",
                self._handler.name,
                ", ".join(ids),
                exc_info=error,
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        batch, items = self._runs.pop(task)
        batch.settle()
        if self._replica is not None:
            self._replica.batches.pop(task, None)
            counts = self._replica.batch_counts[self._handler.name]
            counts.execution.add((monotonic() - batch.started_at) * 1e3)
            models = self._replica.models
            if models is not None and models.loop is self.loop:
                models.end(batch)
            elif models is not None:
                mailbox_of(models.loop).post(models.end, batch)
        # Cancelled before its first step, the task has run no line: no caller may wait for ever.
        if any(not item.is_over for item in items):
            cancelled = asyncio.CancelledError("the batch was cancelled before it began")
            fail(items, UserCodeExit(cancelled, self._handler.name))
        self._advance()


def _latest_deadline(calls: list[Call | None]) -> float | None:
    """Return the latest deadline of these calls, `None` if a call has no deadline."""
    deadlines = [None if call is None else call.deadline for call in calls]
    known = [each for each in deadlines if each is not None]
    return max(known) if len(known) == len(deadlines) else None


def _size_of(size_fn: Callable[[list[Any]], int], values: list[object]) -> float:
    size = size_fn(values)
    try:
        return float(size)
    except (TypeError, ValueError):
        raise TypeError(f"batch_size_fn must return a number, got {size!r}") from None


def _as_list(result: Any, count: int, name: str) -> list[object]:
    problem = "Batched function doesn't preserve batch size. The input list has length"
    is_list = hasattr(result, "__getitem__") and hasattr(result, "__len__")
    if not is_list or isinstance(result, str | bytes | bytearray | Mapping):
        raise TypeError(
            f"{problem} {count} but '{name}' returned {type(result).__name__}, which is not a list."
        )
    if len(result) != count:
        raise RayServeException(
            f"{problem} {count} but the returned list has length {len(result)}."
        )
    return list(result)
