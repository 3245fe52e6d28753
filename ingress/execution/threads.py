"""Worker threads: where `def` runs.

    WorkerThreads   a bounded set of daemon threads, started on demand, retired when idle
    WorkerPool      a replica's `def` calls: awaited on its loop, run in its worker threads

A call counts against the limit until its *thread* is done, whatever became of its awaiter: a
request that timed out leaves no room for one more thread. `anyio.from_thread` works inside. The
threads are daemons that nothing joins at interpreter exit, so a stuck one cannot hold it up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import aclosing
from contextvars import Context, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from anyio._backends._asyncio import AsyncIOBackend, CancelScope, WorkerThread
from anyio._core._eventloop import claim_worker_thread, threadlocals

from ingress.calls.call import CURRENT_CALL
from ingress.calls.channel import Channel, EndOfStream
from ingress.calls.loops import Home, Mailbox
from ingress.exceptions import StreamClosedError, is_cancellation
from ingress.execution.unreadable import readable

logger = logging.getLogger("ingress")

T = TypeVar("T")

IDLE_S = 10.0  # as anyio's workers
_SIZED = (str, bytes, bytearray, memoryview)
RESERVED_THREADS = 4  # for check_health, reconfigure and the closing of generators


class WorkerThreads:
    """Run submitted calls in at most `limit` daemon threads, in order. Thread-safe.

    A thread that has had nothing to do for `idle_s` ends; with `None` it stays.
    """

    __slots__ = (
        "_closed", "_idle_s", "_lock", "_loop", "_queue", "_started", "_threads", "_unfinished",
        "limit", "name",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        limit: int,
        loop: asyncio.AbstractEventLoop,
        idle_s: float | None = IDLE_S,
    ) -> None:
        self.name = name
        self.limit = limit
        self._idle_s = idle_s
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
        if start:
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left for us
                with self._lock:
                    self._threads.discard(thread)
                    if not self._threads:
                        self._unfinished -= 1
                        raise
        self._queue.put(call)

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
                    call = self._queue.get(timeout=self._idle_s)
                except Empty:
                    call = None
                if call is None:
                    if self._retire():
                        return
                    # Race with `submit`, which counts its call before it is in the queue: that
                    # comes behind the word of `close`, which nobody says again.
                    if self._closed:
                        self._queue.put(None)
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
    """Worker threads of one replica, those of a lane or the rest, as its loop sees them.

    Owned by the replica's user loop: `run` and `stream` are called there.
    """

    __slots__ = ("loop", "mailbox", "threads")

    def __init__(
        self, home: Home, limit: int, lane: str = "", *, idle_s: float | None = IDLE_S
    ) -> None:
        self.loop = home.loop
        # Answers travel in a mailbox of their own, so that one wake-up carries a burst of them.
        self.mailbox = Mailbox(home.loop)
        name = f"{home.name}-{lane}" if lane else home.name
        self.threads = WorkerThreads(name, limit, home.loop, idle_s)

    async def run(self, func: Callable[[], T], *, is_cleanup: bool = False) -> T:
        """Run `func` in a worker thread, in a copy of the current context.

        If the awaiting task is cancelled, a call that has not begun is withdrawn, unless it
        `is_cleanup`; one that runs is waited for, because no one can stop a thread, and then the
        cancellation goes on.
        """
        work = self.make_work(func, is_cleanup=is_cleanup)
        try:
            self.threads.submit(work)
            await work.done
        except RuntimeError:  # there is no thread
            self.take_back(work)
            raise
        except asyncio.CancelledError:
            if not is_cleanup:
                if self.take_back(work):
                    raise
                _Visitors(work.scope, self.loop).cancel()
            await work.really_done()
            if work.error is not None and not is_cancellation(work.error):
                _log_late(work.error)
            raise
        if work.error is not None:
            try:
                raise work.error
            finally:
                del work  # the traceback holds this frame: do not let it hold the error too
        return work.result  # type: ignore[no-any-return]

    def make_work(self, func: Callable[[], Any], *, is_cleanup: bool) -> Work:
        """Return the call that a thread is to run."""
        return Work(func, self.loop, self.mailbox)

    def take_back(self, work: Work) -> bool:
        """Whether a call need not be waited for, because no thread has begun it nor ever will."""
        return False

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


class Work:
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
            self.error = readable(error)
        self.mailbox.post(self.finish)

    def finish(self) -> None:
        """Run on the loop."""
        self.finished = True
        if not self.done.done():
            self.done.set_result(None)

    def release_references(self) -> None:
        """Forget what only the run would have needed."""
        self.func, self.context = _nothing, Context()

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


def _nothing() -> None: ...


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

    __slots__ = ("_loop", "_scope")

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
        error = readable(raised)
    try:
        if isinstance(items, Generator):  # not a file, which may be wanted again
            items.close()
    except BaseException as raised:
        if error is None:
            error = readable(raised)
    is_news = error is not None and not is_cancellation(error)
    if not channel.finish(error) and is_news:
        logger.warning("%r failed while it was closed", items, exc_info=error)


_report_result = WorkerThread._report_result


def _report_readable(
    self: WorkerThread, future: asyncio.Future[Any], result: Any, exc: BaseException | None
) -> None:
    """Report what a thread of AnyIO's own has done; it is called on the loop that waits.

    AnyIO asks the error for its class first. If that raises, nobody sets the future, and what
    awaits it (a background task, a dependency, an exception handler) holds its slot for ever.
    """
    _report_result(self, future, result, None if exc is None else readable(exc))


WorkerThread._report_result = _report_readable  # type: ignore[method-assign]
