"""Worker threads: where `def` runs.

    WorkerThreads   a bounded set of daemon threads, started on demand, retired when idle
    WorkerPool      a replica's `def` calls: awaited on its loop, run in its worker threads
    LoopExecutor    what `asyncio.to_thread` and `run_in_executor(None, ...)` use on a user loop

A call counts against the limit until its *thread* is done, whatever became of its awaiter: a
request that timed out leaves no room for one more thread. `anyio.from_thread` works inside. The
threads are daemons that nothing joins at interpreter exit, so a stuck one cannot hold it up.
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
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from anyio._backends._asyncio import AsyncIOBackend, CancelScope
from anyio._core._eventloop import claim_worker_thread, threadlocals

from ingress.call import CURRENT_CALL
from ingress.channel import Channel, EndOfStream
from ingress.exceptions import RequestCancelledError, StreamClosedError, is_only
from ingress.loops import Home, Mailbox

logger = logging.getLogger("ingress")

T = TypeVar("T")

IDLE_S = 10.0  # as anyio's workers
_SIZED = (str, bytes, bytearray, memoryview)
RESERVED_THREADS = 4  # for check_health, reconfigure and the closing of generators


class WorkerThreads:
    """Run submitted calls in at most `limit` daemon threads, in order. Thread-safe."""

    def __init__(self, name: str, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.limit = limit
        self._loop = loop
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._unfinished = 0
        self._started = 0
        self._closed = False

    def submit(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the worker threads of {self.name} are closed")
            self._unfinished += 1
            start = len(self._threads) < min(self._unfinished, self.limit)
            if start:
                thread = threading.Thread(
                    target=self._main, name=f"{self.name}-worker-{self._started}", daemon=True
                )
                self._started += 1
                self._threads.add(thread)
        self._queue.put(call)
        if start:
            thread.start()

    def retire_idle(self) -> None:
        """Let the threads that have nothing to do end now instead of after `IDLE_S`."""
        with self._lock:
            idle = len(self._threads) - self._unfinished
        for _ in range(idle):
            self._queue.put(None)

    def close(self) -> None:
        """Accept nothing more; threads end as soon as what they run returns."""
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
                    call = self._queue.get(timeout=IDLE_S)
                except Empty:
                    call = None
                if call is None:
                    if self._retire():
                        return
                    continue
                try:
                    call()
                except BaseException:  # what a callback of a user's future let out
                    logger.exception("in a worker thread of %s, which goes on", self.name)
                del call  # a thread that waits must not keep the last call's objects alive
                with self._lock:
                    self._unfinished -= 1

    def _retire(self) -> bool:
        # Race with `submit`: it counts the call and decides whether to start a thread under this
        # same lock. A thread may go only while more threads live than calls are unfinished,
        # otherwise the call that counted on it would never run.
        with self._lock:
            if len(self._threads) <= self._unfinished:
                return False
            self._threads.discard(threading.current_thread())
            return True


class WorkerPool:
    """The worker threads of one replica, as its loop sees them.

    Owned by the replica's user loop: `run` and `stream` are called there.
    """

    def __init__(self, home: Home, limit: int) -> None:
        self._loop = home.loop
        # Answers travel in a mailbox of their own, so that one wake-up carries a burst of them.
        self._mailbox = Mailbox(home.loop)
        self.threads = WorkerThreads(home.name, limit, home.loop)

    async def run(self, func: Callable[[], T]) -> T:
        """Run `func` in a worker thread, in a copy of the current context.

        If the awaiting task is cancelled, a call that has not begun is withdrawn; one that runs is
        waited for, because no one can stop a thread, and then the cancellation goes on.
        """
        work = _Work(func, self._loop, self._mailbox)
        self.threads.submit(work)
        try:
            await work.done
        except asyncio.CancelledError:
            _Visitors(work.scope, self._loop).cancel()
            await work.really_done()
            if work.error is not None and not is_only(work.error, (RequestCancelledError,)):
                _log_late(work.error)
            raise
        if work.error is not None:
            try:
                raise work.error
            finally:
                del work  # the traceback holds this frame: do not let it hold the error too
        return work.result  # type: ignore[no-any-return]

    async def stream(self, items: Iterable[Any]) -> AsyncGenerator[Any, None]:
        """Yield what an iterable yields, iterated and closed in one worker thread.

        It runs ahead of its consumer by what a `Channel` holds, then its thread waits.
        """
        batches = self.batches(items)
        del items  # the thread's own from here on: what has no `close` ends there, too
        async with aclosing(batches):
            async for batch in batches:
                for item in batch:
                    yield item

    async def batches(self, items: Iterable[Any]) -> AsyncGenerator[list[Any], None]:
        """Yield, as `stream`, all items that wait at a time."""
        channel = Channel()
        self.threads.submit(partial(copy_context().run, _pump, items, channel))
        del items
        try:
            while True:
                yield await channel.get_many()
        except EndOfStream:
            return
        finally:
            # Not the consumer's to skip: the generator's `finally` has run when this returns.
            channel.close()
            await channel.finished()

    def shutdown(self) -> None:
        self.threads.close()

    def join(self, timeout_s: float) -> bool:
        return self.threads.join(timeout_s)


class _Work:
    """One call in a worker thread and its way back."""

    __slots__ = (
        "context",
        "done",
        "error",
        "finished",
        "func",
        "loop",
        "mailbox",
        "result",
        "scope",
    )

    def __init__(
        self, func: Callable[[], Any], loop: asyncio.AbstractEventLoop, mailbox: Mailbox
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
        # own class: `anyio.CancelScope` looks for the backend each time (1.5 us, not 0.4).
        self.scope = CancelScope()

    def __call__(self) -> None:
        """Run in the worker thread."""
        try:
            # Race with a cancellation on the loop: either order is right, because the awaiter
            # stays until this call has reported back.
            if not self.scope.cancel_called:
                threadlocals.current_cancel_scope = self.scope
                self.result = self.context.run(self.func)
        except StopIteration as error:
            # A future cannot carry it, and it would end the awaiting coroutine silently.
            self.error = RuntimeError("a def call raised StopIteration")
            self.error.__cause__ = error
        except BaseException as error:
            self.error = error
        self.mailbox.post(self._finish)

    def _finish(self) -> None:
        """Run on the loop."""
        self.finished = True
        if not self.done.done():
            self.done.set_result(None)

    async def really_done(self) -> None:
        """Wait for the thread, although the awaiting task was cancelled once or many times."""
        # Shielded, because a cancelled AnyIO scope cancels again on every turn of the loop.
        with CancelScope(shield=True):
            while not self.finished:
                self.done = self.loop.create_future()
                try:
                    await self.done
                except asyncio.CancelledError:
                    continue  # our caller is about to raise the first one


def _log_late(error: BaseException) -> None:
    """Log what a `def` raised when its caller was gone: nobody else will hear of it."""
    call = CURRENT_CALL.get(None)
    request_id = "" if call is None else call.metadata.request_id
    logger.warning("a def of request %s failed after it was cancelled", request_id, exc_info=error)


class _Visitors(set["asyncio.Task[Any]"]):
    """The coroutines that a worker thread runs on the loop, with `anyio.from_thread.run`.

    AnyIO puts them among the tasks of the thread's scope and cancels them with the task that is in
    that scope. Nothing ever enters ours, so this stands in for it once the scope is cancelled; one
    that comes later would otherwise wait, in AnyIO's functions, for a cancellation for ever.
    """

    def __init__(self, scope: CancelScope, loop: asyncio.AbstractEventLoop) -> None:
        # Not those of a loop of the user's, given with `token=`: it is not ours to reach into.
        super().__init__(task for task in scope._tasks if task.get_loop() is loop)
        self._scope = scope
        self._loop = loop
        scope._tasks = self

    def cancel(self) -> None:
        self._scope.cancel()
        self._scope._deliver_cancellation(self._scope)

    def add(self, task: asyncio.Task[Any], /) -> None:
        """Run on the task's own loop."""
        if task.get_loop() is self._loop:
            super().add(task)
            self._scope._deliver_cancellation(self._scope)


def _pump(items: Iterable[Any], channel: Channel) -> None:
    """Iterate in the current worker thread until the end, or until nobody wants more."""
    threadlocals.current_cancel_scope = None
    error: BaseException | None = None
    try:
        for item in items:
            try:
                channel.put_blocking(item, len(item) if isinstance(item, _SIZED) else 0)
            except StreamClosedError:  # by `put` only: the generator's own is a failure
                break
    except BaseException as raised:
        error = raised
    try:
        if isinstance(items, Generator):  # not a file, which may be wanted again
            items.close()
    except BaseException as raised:
        error = error or raised
    is_news = error is not None and not is_only(error, (RequestCancelledError,))
    if not channel.finish(error) and is_news:
        logger.warning("%r failed while it was closed", items, exc_info=error)


class LoopExecutor(ThreadPoolExecutor):
    """The default executor of a user loop.

    `asyncio.to_thread` and `run_in_executor(None, ...)` are what the guides recommend; the
    standard executor's threads are joined by the interpreter at exit, so one stuck call would keep
    the process. `run_in_executor` gets a copy of the current context too. The standard class is
    only the type asyncio insists on.
    """

    def __init__(self, name: str, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        self._ingress_threads = WorkerThreads(name, limit, loop)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        context = copy_context()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(fn, *args, **kwargs)
            except StopIteration as error:
                # asyncio cannot carry it to the awaiting task, which would then wait for ever.
                stopped = RuntimeError("a call in a thread raised StopIteration")
                stopped.__cause__ = error
                future.set_exception(stopped)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._ingress_threads.submit(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept nothing more. Never waits: `asyncio.run` would wait for a stuck call."""
        self._ingress_threads.close()

    def retire_idle(self) -> None:
        """Let idle threads end now."""
        self._ingress_threads.retire_idle()

    def join(self, timeout_s: float) -> bool:
        return self._ingress_threads.join(timeout_s)


_lent: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopExecutor]] = (
    weakref.WeakKeyDictionary()
)
_lent_lock = threading.Lock()


def lend_executor(loop: asyncio.AbstractEventLoop) -> LoopExecutor:
    """Make a `LoopExecutor` the default executor of a loop that is not ours, once, for its life.

    The loop keeps it; stopping our use of the loop lets its idle threads go, no more.
    """
    with _lent_lock:
        lent = _lent.get(loop)
        executor = lent() if lent is not None else None
        if executor is None:
            executor = LoopExecutor("ingress-executor", 32, loop)
            loop.set_default_executor(executor)
            _lent[loop] = weakref.ref(executor)
        return executor
