"""`ingress.testing`: `Latch` between threads and loops, and `leak_check` of a user's test."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator

import pytest

import ingress as serve
from ingress.core.calls.loops import EventLoopThread, run_blocking
from ingress.testing import Latch, TestClient, leak_check
from tests.fakes import together
from tests.servers import bind, change, settle, turns, wait_until


@pytest.fixture
def home() -> Iterator[EventLoopThread]:
    home = EventLoopThread("home")
    yield home
    home.stop(5)


async def wait_at(latch: Latch) -> str:
    await latch
    return threading.current_thread().name


# Latches.


def test_a_latch_lets_threads_and_loops_through_once_it_is_counted_down(
    home: EventLoopThread,
) -> None:
    latch = Latch(2)
    passed: list[bool] = []

    def wait() -> None:
        latch.wait()
        passed.append(latch.is_open)

    async def wait_async() -> None:
        await latch
        passed.append(latch.is_open)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting = asyncio.run_coroutine_threadsafe(wait_async(), home.loop)
    latch.count_down()
    assert not latch.is_open
    assert passed == []
    latch.count_down()
    waiting.result(5)
    thread.join(5)
    assert passed == [True, True]


def test_an_open_latch_holds_no_caller_and_is_counted_down_without_effect(
    home: EventLoopThread,
) -> None:
    latch = Latch()
    latch.count_down()
    latch.count_down()

    latch.wait()
    assert run_blocking(home.loop, wait_at(latch), 5) == "home"
    assert repr(latch) == "<Latch: 1 of 1 counted, open>"


def test_a_wait_that_times_out_says_how_often_the_latch_was_counted_down(
    home: EventLoopThread,
) -> None:
    latch = Latch(3, timeout_s=0.01)
    latch.count_down()

    with pytest.raises(TimeoutError, match="1 of 3 counted"):
        latch.wait()
    with pytest.raises(TimeoutError, match="1 of 3 counted"):
        run_blocking(home.loop, wait_at(latch), 5)


def test_a_task_that_is_cancelled_at_a_latch_is_cancelled(home: EventLoopThread) -> None:
    latch = Latch()

    async def cancelled() -> bool:
        task = asyncio.create_task(wait_at(latch))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run_blocking(home.loop, cancelled(), 5)
    latch.count_down()


@pytest.mark.usefixtures("switch_interval")
def test_a_waiter_that_arrives_as_the_latch_opens_is_not_forgotten(home: EventLoopThread) -> None:
    for _ in range(100):
        latch = Latch(2, timeout_s=5)
        together(
            latch.count_down,
            latch.count_down,
            latch.wait,
            lambda latch=latch: run_blocking(home.loop, wait_at(latch), 5),  # type: ignore[misc]
        )


def test_a_latch_that_counts_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="count=0"):
        Latch(0)


def test_a_test_and_its_handler_wait_for_each_other(threadpool: str) -> None:
    began, go = Latch(2), Latch()

    @serve.deployment
    class Model:
        async def on_loop(self) -> str:
            began.count_down()
            await go
            return "loop"

        def in_thread(self) -> str:
            began.count_down()
            go.wait()
            return "thread"

    with TestClient(bind(Model)) as client:
        answers = [client.handle.on_loop.remote(), client.handle.in_thread.remote()]
        began.wait()
        assert not any(answer._call.settled for answer in answers)
        go.count_down()
        assert [answer.result() for answer in answers] == ["loop", "thread"]


# Leaks.


# The second is of a pool of the engine, which joins those threads: no engine runs here.
@pytest.mark.parametrize("name", ["stays", "ingress-control-worker-0"])
def test_a_thread_a_descriptor_and_a_file_that_stay_are_listed(name: str) -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, args=(30,), name=name)
    check = leak_check(grace_s=0)
    check.__enter__()
    thread.start()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(AssertionError, match="left behind") as failure:
        check.__exit__(None, None, None)

    assert f"thread {name} " in str(failure.value)
    assert os.devnull in str(failure.value)
    os.close(descriptor)
    leave.set()
    thread.join()


def test_what_was_there_before_and_what_goes_in_time_is_no_leak() -> None:
    gone = threading.Event()
    before = threading.Thread(target=gone.wait, args=(30,))
    before.start()

    with leak_check():
        threading.Timer(0.05, lambda: None).start()
    gone.set()
    before.join()


def test_a_body_that_raises_and_one_that_is_forgiven_are_not_checked() -> None:
    descriptors: list[int] = []

    def fail() -> None:
        descriptors.append(os.open(os.devnull, os.O_RDONLY))
        raise ValueError("no good")

    with pytest.raises(ValueError, match="no good"), leak_check(grace_s=0):
        fail()
    with leak_check(grace_s=0) as check:
        descriptors.append(os.open(os.devnull, os.O_RDONLY))
        assert len(check.left()) == 1
        check.forgive()
    for descriptor in descriptors:
        os.close(descriptor)


class Holds:
    """Leaks a task, and a slot with a call that waits for it."""

    go = Latch()

    async def spawn(self) -> None:
        self.task = asyncio.create_task(self.wait())

    async def wait(self) -> None:
        await self.go


@pytest.fixture
def holds() -> Iterator[TestClient]:
    Holds.go = Latch()
    with TestClient(bind(serve.deployment(max_ongoing_requests=1)(Holds))) as client:
        yield client
        Holds.go.count_down()


def test_a_task_that_user_code_leaves_on_its_loop_is_listed(holds: TestClient) -> None:
    with pytest.raises(AssertionError, match=r"task Task-\d+ on Holds#0: Holds.wait"):
        with leak_check(grace_s=0):
            holds.handle.spawn.remote().result()

    with leak_check():
        Holds.go.count_down()


def test_a_slot_that_is_held_and_a_place_in_the_queue_are_listed(holds: TestClient) -> None:
    with leak_check() as check:
        answers = [holds.handle.wait.remote(), holds.handle.wait.remote()]
        wait_until(lambda: any("task" in each for each in check.left()))

        told = " ".join(check.left())
        assert re.search(r"slot 0 of \S*Holds", told)
        assert re.search(r"place 0 in the queue of \S*Holds", told)
        Holds.go.count_down()
        assert [answer.result() for answer in answers] == [None, None]


def test_threads_that_have_joined_those_of_ended_replicas_are_no_leak(holds: TestClient) -> None:
    with leak_check():
        change("Holds", num_replicas=32)
        settle()
        change("Holds", num_replicas=1)
        settle()


@pytest.mark.anyio
async def test_an_async_test_lets_its_tasks_go_on_while_it_waits_for_them() -> None:
    async with leak_check():
        short = asyncio.create_task(turns())
    assert short.done()

    with pytest.raises(AssertionError, match=r"Event\.wait"):
        async with leak_check(grace_s=0.02):
            long = asyncio.create_task(asyncio.Event().wait())
    long.cancel()


@pytest.mark.anyio
async def test_a_plain_with_on_a_running_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="async with leak_check"):
        with leak_check():
            pass
