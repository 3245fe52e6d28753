"""`execution.threads`: calls in worker threads, their limit, and the results for awaiters."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from itertools import repeat
from typing import Any

import anyio
import anyio.from_thread
import pytest

from ingress.core.calls.loops import BorrowedLoop
from ingress.core.execution import threads
from ingress.core.execution.threads import LoopExecutor, WorkerPool, WorkerThreads, lend_executor
from ingress.exceptions import StreamClosedError
from tests.servers import PATIENCE_S, run_python, turns, until

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who")

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def worker_pool(limit: int = 4) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(BorrowedLoop("pool", asyncio.get_running_loop()), limit)
    try:
        yield pool
    finally:
        pool.shutdown()
        assert await asyncio.to_thread(pool.join, PATIENCE_S)


@contextmanager
def worker_threads(limit: int) -> Iterator[WorkerThreads]:
    loop = asyncio.new_event_loop()
    workers = WorkerThreads("workers", limit, loop)
    yield workers
    workers.close()
    assert workers.join(PATIENCE_S)
    loop.close()


@contextmanager
def loop_executor(limit: int, loop: asyncio.AbstractEventLoop) -> Iterator[LoopExecutor]:
    executor = LoopExecutor("executor", limit, loop)
    yield executor
    executor.shutdown()
    assert executor.threads.join(PATIENCE_S)


def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system refuse threads."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


class Ledger:
    """Numbers of calls that run now, and that ran at once at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now = self.most = self.total = 0

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.total += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


async def test_context_variables_are_visible_and_changes_stay_in_the_copy() -> None:
    def call() -> str:
        seen = WHO.get()
        WHO.set("changed in the thread")
        return seen

    async with worker_pool() as pool:
        WHO.set("caller")
        assert await pool.run(call) == "caller"
        assert WHO.get() == "caller"


async def test_anyio_from_thread_works_inside() -> None:
    async def on_loop() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    def call() -> tuple[str, str, str]:
        anyio.from_thread.check_cancelled()
        return (
            threading.current_thread().name,
            anyio.from_thread.run(on_loop),
            anyio.from_thread.run_sync(lambda: threading.current_thread().name),
        )

    async with worker_pool() as pool:
        worker, run, run_sync = await pool.run(call)

    assert worker.startswith("pool-worker-")
    assert run == run_sync == threading.current_thread().name


async def test_a_cancelled_call_that_runs_sees_it_and_is_waited_for() -> None:
    started, cancelled, leave = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        assert cancelled.wait(PATIENCE_S)
        try:
            anyio.from_thread.check_cancelled()
        except BaseException as error:
            seen.append(type(error))
        assert leave.wait(PATIENCE_S)
        seen.append("ended")

    seen: list[Any] = []
    async with worker_pool() as pool:
        task = asyncio.ensure_future(pool.run(call))
        await asyncio.to_thread(started.wait, PATIENCE_S)
        task.cancel()
        await asyncio.sleep(0)
        cancelled.set()
        await until(lambda: seen)  # the thread has seen it
        for _ in range(3):
            await turns()
            assert not task.done(), "no one can stop a thread, so the awaiter stays with it"
            task.cancel()  # repeated cancellations are allowed
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert seen == [asyncio.CancelledError, "ended"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_coroutine_that_a_cancelled_thread_runs_on_the_loop_is_cancelled(when: str) -> None:
    """It may begin before or after the cancellation: AnyIO's functions wait for its result."""
    began, told = threading.Event(), threading.Event()
    outcome: list[str] = []

    async def wait() -> None:
        began.set()
        await anyio.sleep_forever()

    def call() -> None:
        if when == "after":
            began.set()
            assert told.wait(PATIENCE_S)
        try:
            anyio.from_thread.run(wait)
        except BaseException as error:
            outcome.append(type(error).__name__)
            raise

    async with worker_pool() as pool:
        task = asyncio.create_task(pool.run(call))
        await until(began.is_set)
        task.cancel()
        await asyncio.sleep(0)
        told.set()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(PATIENCE_S):
                await task

    assert outcome == ["CancelledError"]


async def test_a_cancelled_call_that_has_not_begun_never_does() -> None:
    leave = threading.Event()
    ran: list[int] = []
    async with worker_pool(limit=1) as pool:
        first = asyncio.ensure_future(pool.run(lambda: leave.wait(PATIENCE_S)))
        second = asyncio.ensure_future(pool.run(lambda: ran.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)  # the awaiter is told before the thread is free
        leave.set()
        assert await first
        with pytest.raises(asyncio.CancelledError):
            await second

    assert ran == []


async def test_cancellation_under_an_anyio_scope_does_not_spin() -> None:
    started, leave = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        leave.wait(PATIENCE_S)

    async with worker_pool() as pool:
        with anyio.CancelScope() as scope:
            task = asyncio.ensure_future(asyncio.to_thread(started.wait, PATIENCE_S))
            task.add_done_callback(lambda _: scope.cancel())
            asyncio.get_running_loop().call_later(0.3, leave.set)
            before = time.thread_time()
            await pool.run(call)
        spent = time.thread_time() - before

    assert scope.cancelled_caught
    assert spent < 0.15, "a cancelled scope cancels again on every turn of the loop"


async def test_never_more_threads_than_the_limit(switch_interval: None) -> None:
    ledger = Ledger()
    all_threads = threading.Barrier(5, timeout=PATIENCE_S)

    def call() -> str:
        with ledger:
            all_threads.wait()
            return threading.current_thread().name

    async with worker_pool(limit=5) as pool:
        names = await asyncio.gather(*(pool.run(call) for _ in range(300)))

    assert ledger.total == 300
    assert ledger.most == 5
    assert len(set(names)) == 5


async def test_the_limit_follows_the_thread_and_not_the_awaiter() -> None:
    """Cancel the awaiters and submit more calls: the number that run never exceeds the limit."""
    ledger = Ledger()
    leave = threading.Event()

    def call() -> None:
        with ledger:
            leave.wait(PATIENCE_S)

    async with worker_pool(limit=3) as pool:
        tasks = [asyncio.ensure_future(pool.run(call)) for _ in range(3)]
        await until(lambda: ledger.now == 3)
        for _ in range(5):
            for task in tasks:
                task.cancel()
            tasks += [asyncio.ensure_future(pool.run(call)) for _ in range(3)]
            await turns()
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("pool-worker-") for name in names) == 3
        assert ledger.now == ledger.most == 3
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert ledger.most == 3


async def test_ten_thousand_calls_under_random_cancellation_all_come_back(
    switch_interval: None,
) -> None:
    ledger = Ledger()
    choice = random.Random(1)

    def call(number: int) -> int:
        with ledger:
            return number

    async def one(number: int) -> bool:
        task = asyncio.ensure_future(pool.run(lambda: call(number)))
        for _ in range(choice.randrange(3)):
            await asyncio.sleep(0)
        if choice.random() < 0.3:
            task.cancel()
        try:
            return await task == number
        except asyncio.CancelledError:
            return True

    async def client() -> bool:
        return all([await one(number) for number in range(150)])

    async with worker_pool(limit=6) as pool:
        assert all(await asyncio.gather(*(client() for _ in range(20))))

    assert ledger.most <= 6
    assert ledger.now == 0


def test_a_call_submitted_while_a_thread_retires_always_runs(
    monkeypatch: pytest.MonkeyPatch, switch_interval: None
) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.0005)
    choice = random.Random(2)
    with worker_threads(2) as workers:
        for _ in range(1_500):
            ran = threading.Event()
            workers.submit(ran.set)
            assert ran.wait(PATIENCE_S)
            time.sleep(choice.random() * 0.0012)


def test_closing_runs_what_was_submitted_and_refuses_the_rest() -> None:
    leave = threading.Event()
    ran: list[int] = []
    with worker_threads(1) as workers:
        workers.submit(lambda: ran.append(leave.wait(PATIENCE_S)))
        for number in range(3):
            workers.submit(lambda number=number: ran.append(number))  # type: ignore[misc]
        workers.close()
        with pytest.raises(RuntimeError, match="closed"):
            workers.submit(lambda: None)
        assert workers.join(0.01) is False
        leave.set()
    assert ran == [True, 0, 1, 2]


def test_a_call_runs_in_a_thread_that_is_there_if_the_system_has_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, done = threading.Event(), threading.Event()

    def hold() -> None:
        gate.wait(PATIENCE_S)

    with worker_threads(2) as workers:
        workers.submit(hold)
        with monkeypatch.context() as full:
            no_more_threads(full)
            workers.submit(done.set)
        gate.set()
        assert done.wait(PATIENCE_S)


def test_a_call_is_refused_if_the_system_has_no_thread_and_the_next_may_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = threading.Event()
    with worker_threads(1) as workers:
        with monkeypatch.context() as full:
            no_more_threads(full)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                workers.submit(lambda: None)
        workers.submit(done.set)
        assert done.wait(PATIENCE_S)


def test_a_thread_outlives_a_call_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """A callback of a future may raise `SystemExit`; the limit stays the same."""

    def let_out(_: object) -> None:
        sys.exit(3)

    loop = asyncio.new_event_loop()
    with loop_executor(1, loop) as executor:
        for number in range(3):
            leave = threading.Event()
            future = executor.submit(leave.wait, PATIENCE_S)
            future.add_done_callback(let_out)
            leave.set()
            assert executor.submit(lambda number=number: number).result(PATIENCE_S) == number
    loop.close()
    assert sum("the thread continues" in record.message for record in caplog.records) == 3


@pytest.mark.parametrize(
    ("raised", "arrives"),
    [
        (ValueError("no"), ValueError),
        (StopIteration(1), RuntimeError),
        (SystemExit(3), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (GeneratorExit(), GeneratorExit),
        (RecursionError(), RecursionError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
async def test_whatever_a_call_raises_reaches_its_awaiter(
    raised: BaseException, arrives: type[BaseException]
) -> None:
    def call() -> None:
        raise raised

    async with worker_pool() as pool:
        with pytest.raises(arrives) as caught:
            await pool.run(call)
        assert raised in (caught.value, caught.value.__cause__)
        assert await pool.run(lambda: "the next one") == "the next one"


async def test_an_idle_thread_keeps_nothing_of_its_last_call_alive() -> None:
    class Big:
        pass

    async with worker_pool() as pool:
        big = Big()
        alive = weakref.ref(big)
        await pool.run(lambda big=big: None)  # type: ignore[misc]
        del big
        await pool.run(lambda: None)
        gc.collect()

        assert alive() is None


# Generators.


def recording(seen: list[str], count: int = 3) -> Iterator[int]:
    try:
        for number in range(count):
            seen.append(threading.current_thread().name)
            yield number
    finally:
        seen.append(threading.current_thread().name)
        seen.append("closed")


async def test_a_generator_keeps_one_thread_and_one_context_for_its_life() -> None:
    seen: list[str] = []
    tokens: list[contextvars.Token[str]] = []

    def items() -> Iterator[str]:
        tokens.append(WHO.set("mine"))
        yield threading.current_thread().name
        yield threading.current_thread().name
        assert WHO.get() == "mine"
        WHO.reset(tokens[0])  # raises in any other context
        seen.append(threading.current_thread().name)

    async with worker_pool() as pool:
        WHO.set("caller")
        meeting = threading.Barrier(3, timeout=PATIENCE_S)  # beside the stream, which has a thread
        others = [asyncio.ensure_future(pool.run(meeting.wait)) for _ in range(9)]
        names = [name async for name in pool.stream(items())]
        await asyncio.gather(*others)

    assert len({*names, *seen}) == 1
    assert WHO.get() == "caller"


async def test_leaving_a_stream_early_runs_its_finally_in_its_thread_before_going_on() -> None:
    seen: list[str] = []
    async with worker_pool() as pool:
        async with aclosing(pool.stream(recording(seen, 1_000))) as items:
            async for item in items:
                if item == 2:
                    break

        assert seen[-1] == "closed"
        assert len(set(seen[:-1])) == 1
        assert seen[0].startswith("pool-worker-")
        assert len(seen) < 30, "it ran ahead by what a channel holds, no more"


async def test_a_thread_that_waits_for_its_reader_is_not_among_those_that_may_compute() -> None:
    async with worker_pool() as pool:
        async with aclosing(pool.stream(repeat(bytes(64 * 1024)))) as items:
            await anext(items)
            (ident,) = pool.threads.idents
            while pool.threads.idents:  # until the thread has waited for room for an item
                await anext(items)

        assert pool.threads.idents == [ident]


async def test_cancelling_a_stream_waits_for_its_finally() -> None:
    started, leave = threading.Event(), threading.Event()
    seen: list[str] = []

    def items() -> Iterator[int]:
        try:
            yield 1
            started.set()
            leave.wait(PATIENCE_S)
            yield 2
        finally:
            seen.append("closed")

    async def consume() -> None:
        async with aclosing(pool.stream(items())) as stream:
            async for _ in stream:
                pass

    async with worker_pool() as pool:
        task = asyncio.ensure_future(consume())
        await asyncio.to_thread(started.wait, PATIENCE_S)
        task.cancel()
        await turns()
        task.cancel()
        await turns()
        assert not task.done()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert seen == ["closed"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_what_a_generator_raises_comes_after_what_it_yielded(
    error: type[BaseException],
) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    got: list[int] = []
    async with worker_pool() as pool:
        with pytest.raises(error):  # noqa: PT012
            async for item in pool.stream(items()):
                got += [item]

    assert got == [1, 2]


async def test_a_stream_error_of_the_generators_own_is_not_taken_for_the_end() -> None:
    """User code may raise the error itself; only the error of `put` means a closed consumer."""

    def items() -> Iterator[int]:
        yield 1
        raise StreamClosedError("what I read from is gone")

    async with worker_pool() as pool:
        with pytest.raises(StreamClosedError, match="what I read from"):
            [item async for item in pool.stream(items())]


# The default executor of user loops.


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    loop = pytest.importorskip(request.param).new_event_loop()
    yield loop
    loop.close()


def test_the_executor_copies_the_context_and_runs_daemon_threads(
    loop: asyncio.AbstractEventLoop,
) -> None:
    def call() -> tuple[str, bool]:
        return WHO.get(), threading.current_thread().daemon

    async def main() -> None:
        WHO.set("caller")
        assert await loop.run_in_executor(None, call) == ("caller", True)
        assert await asyncio.to_thread(call) == ("caller", True)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.to_thread(next, iter(()))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await loop.run_in_executor(None, next, iter(()))
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    with loop_executor(2, loop) as executor:
        loop.set_default_executor(executor)
        loop.run_until_complete(main())


def test_a_call_cancelled_before_it_begins_is_not_run(loop: asyncio.AbstractEventLoop) -> None:
    leave = threading.Event()
    ran: list[int] = []
    with loop_executor(1, loop) as executor:
        first = executor.submit(leave.wait, PATIENCE_S)
        assert executor.submit(ran.append, 1).cancel()
        leave.set()
        assert first.result(PATIENCE_S)
    assert ran == []


def test_an_executor_is_lent_once(loop: asyncio.AbstractEventLoop) -> None:
    executor = lend_executor(loop)
    assert lend_executor(loop) is executor
    thread = loop.run_until_complete(loop.run_in_executor(None, threading.current_thread))
    assert thread.name.startswith("ingress-executor")


STUCK = """
import asyncio, contextlib, sys, threading
from ingress.core.calls.loops import BorrowedLoop, EventLoopThread
from ingress.core.execution.threads import LoopExecutor, lend_executor
from ingress.core.execution.threads import WorkerPool
began = threading.Event()
def stuck():
    began.set()
    threading.Event().wait()
async def main():
    loop = asyncio.get_running_loop()
    if {where!r} == "executor":
        lend_executor(loop)
        call = loop.run_in_executor(None, stuck)
        lend_executor(loop).submit(began.wait).result()
    elif {where!r} == "pool":
        WorkerPool(BorrowedLoop("stuck", loop), 2).threads.submit(stuck)
        began.wait()
    else:
        EventLoopThread("stuck").loop.call_soon_threadsafe(stuck)
        began.wait()
if {run!r} == "uvloop":
    import uvloop
    uvloop.run(main())
else:
    asyncio.run(main())
print("left")
"""


@pytest.mark.parametrize(
    ("where", "run"),
    [("executor", "asyncio"), ("executor", "uvloop"), ("pool", "asyncio"), ("loop", "asyncio")],
)
def test_a_stuck_thread_never_delays_interpreter_exit(where: str, run: str) -> None:
    begin = time.monotonic()
    result = run_python("-c", STUCK.format(where=where, run=run))

    assert (result.stdout, result.returncode) == ("left\n", 0), result.stderr
    assert time.monotonic() - begin < 20


def test_a_worker_thread_has_nothing_of_the_request_that_starts_it() -> None:
    """On free-threaded Python a thread has the context of the one that starts it."""
    seen: list[str] = []
    ended = threading.Event()

    def see() -> None:
        seen.append(WHO.get("nobody"))
        ended.set()

    request = contextvars.copy_context()
    request.run(WHO.set, "a request")
    with worker_threads(1) as workers:
        request.run(workers.submit, see)
        assert ended.wait(PATIENCE_S)
    assert seen == ["nobody"]
