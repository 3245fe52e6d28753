"""Worker threads, which run `def`.

    WorkerThreads   a bounded set of daemon threads, started on demand, retired when idle
    WorkerPool      a replica's `def` calls: awaited on its loop, run in its worker threads
    LoopExecutor    the executor of `asyncio.to_thread` and `run_in_executor` on a user loop

A call counts against the limit until its *thread* is done, even if its awaiter is gone: a request
that timed out does not free a thread. `anyio.from_thread` works inside. The threads are daemons and
are not joined at interpreter exit, so a stuck thread cannot delay the exit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from ingress.core.base.counters import Latency
from ingress.core.calls.call import CURRENT_CALL
from ingress.core.calls.channel import Channel, EndOfStream
from ingress.core.calls.compat import (
    AsyncIOBackend,
    CancelScope,
    Visitors,
    claim_worker_thread,
    convert_errors,
    threadlocals,
)
from ingress.core.calls.loops import Home, Mailbox
from ingress.core.calls.tracing import TRACING, trace_thread
from ingress.core.execution.errors import readable
from ingress.core.execution.gil_pressure import GIL_PRESSURE
from ingress.exceptions import StreamClosedError, needs_no_record

logger = logging.getLogger("ingress")
convert_errors(readable)

T = TypeVar("T")

IDLE_S = 10.0  # as anyio's workers
_SIZED = (str, bytes, bytearray, memoryview)
ANYIO_RESERVE = 8  # threads of AnyIO, beyond one for each request


@dataclass(eq=False, slots=True)
class WorkerThreads:
    """At most `limit` daemon threads that run submitted calls, in order. Thread-safe.

    A thread that is idle for `idle_s` ends; with `None` it stays. `ahead` has the idents of the
    threads whose stream is ahead of its reader; each thread adds and discards its own.
    """

    name: str
    limit: int
    _loop: asyncio.AbstractEventLoop
    _idle_s: float | None = IDLE_S
    ahead: set[int] = field(default_factory=set)
    _queue: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: set[threading.Thread] = field(default_factory=set)
    _unfinished: int = 0
    _started: int = 0
    _closed: bool = False

    @property
    def idents(self) -> list[int]:
        """The idents of the threads, without those that wait for a reader. Thread-safe."""
        idents = [each.ident for each in list(self._threads) if each.ident is not None]
        return [each for each in idents if each not in self.ahead]

    @property
    def are_alive(self) -> bool:
        """Return whether one of the threads is alive, also after `close`."""
        with self._lock:
            return any(thread.is_alive() for thread in self._threads)

    def at_work(self) -> tuple[list[threading.Thread], int]:
        """Return the threads, and the number of submitted calls that have not ended."""
        with self._lock:
            return list(self._threads), self._unfinished

    def submit(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the worker threads of {self.name} are closed")
            self._unfinished = unfinished = self._unfinished + 1
            start = len(self._threads) < min(self._unfinished, self.limit)
            if start:
                thread = threading.Thread(
                    target=self._main, name=f"{self.name}-worker-{self._started}", daemon=True
                )
                self._started += 1
                self._threads.add(thread)
        if unfinished > GIL_PRESSURE.expected:
            GIL_PRESSURE.expect(unfinished)
        if start:
            try:
                Context().run(thread.start)  # not with this request's, see `EventLoopThread`
            except RuntimeError:  # the system has no more threads
                with self._lock:
                    self._threads.discard(thread)
                    if not self._threads:
                        self._unfinished -= 1
                        raise
        self._queue.put(call)

    def close(self) -> None:
        """Accept no more calls; each thread ends when its current call returns."""
        with self._lock:
            self._closed = True
            threads = len(self._threads)
        for _ in range(threads):
            self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end. Returns False if some still run after `timeout_s`."""
        with self._lock:
            threads = [thread for thread in self._threads if thread.is_alive()]
        deadline = monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _main(self) -> None:
        with claim_worker_thread(AsyncIOBackend, self._loop):
            threadlocals.current_cancel_scope = None
            while True:
                try:
                    call = self._queue.get(timeout=self._idle_s)
                except Empty:
                    call = None
                if call is None:
                    if self._retire():
                        return
                    # Race with `submit`, which counts its call before it queues it. The call
                    # comes after the `None` of `close`, which is put once for each thread.
                    if self._closed:
                        self._queue.put(None)
                    continue
                try:
                    call()
                except BaseException:  # raised by a callback of a user's future
                    logger.exception(
                        "a callback failed in a worker thread of %s; the thread continues",
                        self.name,
                    )
                del call  # an idle thread must not keep the last call's objects alive
                with self._lock:
                    self._unfinished -= 1

    def _retire(self) -> bool:
        # Race with `submit`: it counts the call and decides whether to start a thread under the
        # same lock. A thread may end only while there are more threads than unfinished calls,
        # otherwise the call that relies on the thread would never run.
        with self._lock:
            if len(self._threads) <= self._unfinished:
                return False
            self._threads.discard(threading.current_thread())
            return True


MakeThreads = Callable[[str, int, asyncio.AbstractEventLoop, float | None], WorkerThreads]


class WorkerPool:
    """The worker threads of one replica, or of one of its lanes, as seen from the user loop.

    Owned by the replica's user loop: `run` and `stream` are called there. `waits` has the times
    that the calls of `run` waited for a thread.
    """

    __slots__ = ("loop", "mailbox", "threads", "waits")

    def __init__(
        self,
        home: Home,
        limit: int,
        lane: str = "",
        *,
        idle_s: float | None = IDLE_S,
        make_threads: MakeThreads = WorkerThreads,
    ) -> None:
        self.loop = home.loop
        # A mailbox for the answers alone, so that one wake-up delivers a burst of answers.
        self.mailbox = Mailbox(home.loop)
        self.waits = Latency()
        name = f"{home.name}-{lane}" if lane else home.name
        self.threads = make_threads(name, limit, home.loop, idle_s)

    async def run(self, func: Callable[[], T], *, is_cleanup: bool = False) -> T:
        """Run `func` in a worker thread, in a copy of the current context.

        If the awaiting task is cancelled, a call that has not begun is withdrawn, unless
        `is_cleanup`. A running call is awaited first, because a thread cannot be stopped; then the
        cancellation continues.
        """
        work = self.make_work(func, is_cleanup=is_cleanup)
        try:
            self.threads.submit(work)
            await work.done
        except RuntimeError:  # no thread could be started
            self.take_back(work)
            raise
        except asyncio.CancelledError:
            if not is_cleanup:
                if self.take_back(work):
                    raise
                Visitors(work.scope, self.loop).cancel()
            await work.really_done()
            if work.error is not None and not needs_no_record(work.error):
                _log_late(work.error)
            raise
        if work.began_at:
            self.waits.add((work.began_at - work.made_at) * 1e3)
            if TRACING.tracer is not None:
                trace_thread(work.made_at, work.began_at)
        if work.error is not None:
            try:
                raise work.error
            finally:
                del work  # the traceback holds this frame, which must not hold the error
        return work.result  # type: ignore[no-any-return]

    def make_work(self, func: Callable[[], object], *, is_cleanup: bool) -> ThreadWork:
        """Return the call for a worker thread."""
        return ThreadWork(func, self.loop, self.mailbox)

    def take_back(self, work: ThreadWork) -> bool:
        """Withdraw a call. Returns whether it will never run, so that it need not be awaited."""
        return False

    async def stream(self, items: Iterable[T]) -> AsyncGenerator[T, None]:
        """Yield what an iterable yields, iterated and closed in one worker thread.

        It runs ahead of its consumer until the `Channel` is full, then its thread waits.
        """
        batches = self.batches(items)
        del items  # only the thread keeps it, so it is deallocated there
        async with aclosing(batches):
            async for batch in batches:
                for item in batch:
                    yield item

    async def batches(self, items: Iterable[T]) -> AsyncGenerator[list[T], None]:
        """Yield, as `stream` does, but all waiting items at a time."""
        channel: Channel[T] = Channel()
        self.threads.submit(partial(copy_context().run, _pump, items, channel, self.threads.ahead))
        del items
        try:
            while True:
                yield await channel.get_many()
        except EndOfStream:
            return
        finally:
            # Waits even if cancelled: the generator's `finally` has run when this returns.
            channel.close()
            await channel.finished()

    def shutdown(self) -> None:
        self.threads.close()

    def join(self, timeout_s: float) -> bool:
        return self.threads.join(timeout_s)


class ThreadWork:
    """One call in a worker thread, and its result."""

    __slots__ = (
        "began_at",
        "context",
        "done",
        "error",
        "finished",
        "func",
        "loop",
        "made_at",
        "mailbox",
        "result",
        "scope",
    )

    def __init__(
        self, func: Callable[[], object], loop: asyncio.AbstractEventLoop, mailbox: Mailbox
    ) -> None:
        self.func = func
        self.loop = loop
        self.mailbox = mailbox
        self.context: Context = copy_context()
        self.done: asyncio.Future[None] = loop.create_future()
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None
        # Never entered; `anyio.from_thread.check_cancelled` in the thread reads it. The backend's
        # own class, because `anyio.CancelScope` looks the backend up each time (1.5 us, not 0.4).
        self.scope = CancelScope()
        self.made_at = monotonic()
        self.began_at = 0.0  # written by the thread

    def __call__(self) -> None:
        """Run in the worker thread."""
        self.began_at = monotonic()
        try:
            # Race with a cancellation on the loop: either order is right, because the awaiter
            # stays until this call has ended.
            if not self.scope.cancel_called:
                threadlocals.current_cancel_scope = self.scope
                self.result = self.context.run(self.func)
        except StopIteration as error:
            # A future cannot carry it, and it would silently end the awaiting coroutine.
            self.error = RuntimeError("a def call raised StopIteration")
            self.error.__cause__ = error
        except BaseException as error:  # of user code: the loop raises it for the caller
            self.error = readable(error)
        self.mailbox.post(self.finish)

    def finish(self) -> None:
        """Run on the loop."""
        self.finished = True
        if not self.done.done():
            self.done.set_result(None)

    def release_references(self) -> None:
        """Drop the references that only the run would have needed."""
        self.func, self.context = _nothing, Context()

    async def really_done(self) -> None:
        """Wait for the thread, even if the awaiting task is cancelled once or many times."""
        # Shielded, because a cancelled AnyIO scope cancels again on every turn of the loop.
        with CancelScope(shield=True):
            while not self.finished:
                self.done = self.loop.create_future()
                try:
                    await self.done
                except asyncio.CancelledError:
                    continue  # the caller raises the first one


def _nothing() -> None: ...


def _log_late(error: BaseException) -> None:
    """Log what a `def` raised after its cancellation: no caller gets the error."""
    call = CURRENT_CALL.get(None)
    request_id = "" if call is None else call.metadata.request_id
    logger.warning("a def of request %s failed after it was cancelled", request_id, exc_info=error)


def _pump(items: Iterable[T], channel: Channel[T], ahead: set[int]) -> None:
    """Iterate in the current worker thread until the end, or until the consumer has gone.

    The thread is in `ahead` while each item waits for its consumer.
    """
    threadlocals.current_cancel_scope = None
    ident = threading.get_ident()
    error: BaseException | None = None
    try:
        for item in items:
            try:
                waited = channel.put_blocking(item, len(item) if isinstance(item, _SIZED) else 0)
            except StreamClosedError:  # only of `put`: the generator's own is a failure
                break
            if waited is not (ident in ahead):
                (ahead.add if waited else ahead.discard)(ident)
    except BaseException as raised:  # of user code: the channel's consumer gets it
        error = readable(raised)
    ahead.discard(ident)
    try:
        if isinstance(items, Generator):  # not a file, which may be wanted again
            items.close()
    except BaseException as raised:  # of its `finally`: the consumer gets it, or it is logged
        if error is None:
            error = readable(raised)
    is_news = error is not None and not needs_no_record(error)
    if not channel.finish(error) and is_news:
        logger.warning("%r failed while it was closed", items, exc_info=error)


class LoopExecutor(ThreadPoolExecutor):
    """The default executor of a user loop.

    The guides recommend `asyncio.to_thread` and `run_in_executor(None, ...)`. The interpreter joins
    the standard executor's threads at exit, so one stuck call would keep the process alive. Here
    `run_in_executor` gets a copy of the current context, too. The standard class is the base only
    because asyncio requires it.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        loop: asyncio.AbstractEventLoop,
        make_threads: MakeThreads = WorkerThreads,
    ) -> None:
        self.threads = make_threads(name, limit, loop, IDLE_S)

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        future: Future[T] = Future()
        context = copy_context()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(fn, *args, **kwargs)
            except StopIteration as error:
                # asyncio cannot pass it to the awaiting task, which would then wait for ever.
                stopped = RuntimeError("a call in a thread raised StopIteration")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:  # as `concurrent.futures`: the awaiting task gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        self.threads.submit(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls. Never waits: `asyncio.run` would wait for a stuck call."""
        self.threads.close()


_lent: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopExecutor]] = (
    weakref.WeakKeyDictionary()
)
_lent_lock = threading.Lock()


def lend_executor(loop: asyncio.AbstractEventLoop) -> LoopExecutor:
    """Make a `LoopExecutor` the default executor of a borrowed loop, once, for the loop's life.

    The loop keeps the executor, whose idle threads end by themselves.
    """
    with _lent_lock:
        lent = _lent.get(loop)
        executor = lent() if lent is not None else None
        if executor is None:
            executor = LoopExecutor("ingress-executor", 32, loop)
            loop.set_default_executor(executor)
            _lent[loop] = weakref.ref(executor)
        return executor
