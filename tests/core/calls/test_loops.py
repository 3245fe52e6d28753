"""`ingress.core.calls.loops`: an item posted to a loop is delivered once, or handed back once."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from subprocess import run
from typing import Any

import pytest

from ingress.core.calls.loops import (
    BorrowedLoop,
    EventLoopThread,
    Mailbox,
    Wakeup,
    mailbox_of,
    run_blocking,
    run_on,
    start_on,
)
from ingress.testing import Latch
from tests.fakes import together
from tests.servers import turns

WHO: ContextVar[int] = ContextVar("who", default=-1)
PATIENCE_S = 60.0


@pytest.fixture
def home() -> Iterator[EventLoopThread]:
    home = EventLoopThread("home")
    yield home
    assert home.stop(PATIENCE_S)


@contextmanager
def blocked(home: EventLoopThread) -> Iterator[None]:
    """Keep the loop of `home` busy inside one callback."""
    entered, leave = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        leave.wait(PATIENCE_S)

    home.loop.call_soon_threadsafe(block)
    assert entered.wait(PATIENCE_S)
    yield
    leave.set()


def settled(home: EventLoopThread) -> None:
    """Return once all items posted so far have run."""
    done = threading.Event()
    home.mailbox.post(done.set)
    assert done.wait(PATIENCE_S)


def test_posts_of_one_thread_arrive_in_order(home: EventLoopThread, switch_interval: None) -> None:
    seen: list[int] = []
    for number in range(5_000):
        home.mailbox.post(seen.append, number)
    settled(home)

    assert seen == list(range(5_000))


def test_a_burst_wakes_the_loop_once(home: EventLoopThread) -> None:
    turns: list[int] = []
    with blocked(home):
        for number in range(100):
            home.mailbox.post(turns.append, number)
        # Scheduled after the one drain of the burst.
        home.loop.call_soon_threadsafe(turns.append, -1)
        home.mailbox.post(turns.append, 100)
    settled(home)

    assert turns == [*range(101), -1]


def test_a_flood_does_not_keep_the_loop(home: EventLoopThread) -> None:
    ended = threading.Event()

    def again() -> None:
        if not ended.is_set():
            home.mailbox.post(again)

    home.mailbox.post(again)
    home.loop.call_soon_threadsafe(ended.set)

    assert ended.wait(PATIENCE_S)


@pytest.mark.reliability("F06")
def test_a_drain_gives_each_request_its_own_context(home: EventLoopThread) -> None:
    seen: dict[int, int] = {}

    async def request(number: int) -> None:
        seen[number] = WHO.get()

    def start(number: int, context: Context) -> None:
        bare.append(WHO.get())
        tasks.append(home.loop.create_task(request(number), context=context))

    def post(number: int) -> None:
        WHO.set(number)
        home.mailbox.post(start, number, copy_context())

    tasks: list[asyncio.Task[None]] = []
    bare: list[int] = []
    with blocked(home):
        for number in range(32):
            copy_context().run(post, number)
    settled(home)
    settled(home)

    assert seen == {number: number for number in range(32)}
    assert bare == [-1] * 32, "the drain itself has no request's variables"


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
)
def test_a_raising_item_strands_no_other(home: EventLoopThread, error: type[BaseException]) -> None:
    reported: list[Any] = []
    home.loop.call_soon_threadsafe(
        home.loop.set_exception_handler, lambda loop, context: reported.append(context)
    )

    def fail() -> None:
        raise error

    seen: list[int] = []
    with blocked(home):
        for number in range(10):
            home.mailbox.post(fail)
            home.mailbox.post(seen.append, number)
    settled(home)

    assert seen == list(range(10))
    assert len(reported) == (0 if error in (SystemExit, KeyboardInterrupt) else 10)


@pytest.mark.reliability("D07")
def test_posting_to_a_dead_loop_fails_the_call(home: EventLoopThread) -> None:
    buried: list[Any] = []
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop, lambda callback, args: buried.append((callback, args)))
    loop.close()

    mailbox.post(print, 1)
    mailbox.post(print, 2)

    assert buried == [(print, (1,)), (print, (2,))]


def test_items_left_in_a_closed_loop_are_buried_with_the_next_post() -> None:
    """The lender of a loop may close it without notice, while a drain is scheduled."""
    buried: list[Any] = []
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop, lambda callback, args: buried.append(args))
    mailbox.post(print, 1)  # wakes the loop, which never runs
    loop.close()

    mailbox.post(print, 2)

    assert buried == [(1,), (2,)]


def test_what_waits_for_a_loop_that_user_code_closes_is_buried_without_another_post() -> None:
    buried: list[Any] = []
    home = EventLoopThread("home", lambda callback, args: buried.append(args))

    class Closes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            """Close the loop between two runs, while a drain is scheduled."""
            if "stopped the event loop" in record.getMessage():
                home.mailbox.post(print, 1)
                home.loop.close()
                closed.count_down()

    closes, closed = Closes(), Latch()
    logging.getLogger("ingress").addHandler(closes)
    try:
        home.loop.call_soon_threadsafe(home.loop.stop)
        closed.wait()
        assert home.stop(PATIENCE_S)
    finally:
        logging.getLogger("ingress").removeHandler(closes)
    assert buried == [(1,)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_start_is_refused_if_its_loops_could_not_have_their_descriptors() -> None:
    code = """
import os, resource
from ingress.core.calls.loops import DESCRIPTORS_PER_LOOP, reserve_descriptors
before = len(os.listdir("/proc/self/fd"))
for extra in (100, 0):
    limit = before + 20 * DESCRIPTORS_PER_LOOP + extra
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        reserve_descriptors(20)
    except RuntimeError as error:
        print(str(error)[:50])
    else:
        print("fits")
"""
    told = run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    fits, refused = told.splitlines()
    assert fits == "fits"
    assert refused.startswith("20 more event loops need ")


def test_burying_one_item_may_post_the_next_ten_thousand() -> None:
    """A freed slot goes to the next call, which is posted to the same dead loop."""
    loop = asyncio.new_event_loop()
    left = iter(range(10_000))
    count = 0

    def on_dead(callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        nonlocal count
        count += 1
        if next(left, None) is not None:
            mailbox.post(print)

    mailbox = Mailbox(loop, on_dead)
    loop.close()
    mailbox.post(print)

    assert count == 10_001


@pytest.mark.reliability("D07")
@pytest.mark.parametrize("seed", range(10))
def test_posting_while_the_loop_closes_loses_nothing(seed: int, switch_interval: None) -> None:
    delivered: list[int] = []
    buried: list[int] = []
    home = EventLoopThread("closing", lambda callback, args: buried.append(args[0]))
    count = 500

    def post(first: int) -> None:
        for number in range(first, first + count):
            home.mailbox.post(delivered.append, number)

    posts = (partial(post, first) for first in (0, count, 2 * count))
    together(*posts, lambda: home.stop(PATIENCE_S))

    assert Counter(delivered + buried) == Counter(range(3 * count))


@pytest.mark.parametrize("seed", range(10))
def test_posting_as_a_borrowed_loop_closes_loses_nothing(seed: int, switch_interval: None) -> None:
    """Its lender closes the loop without notice; `stop` hands back the remaining items."""
    delivered: list[int] = []
    buried: list[int] = []
    loop = asyncio.new_event_loop()
    borrowed = BorrowedLoop("lent", loop, lambda callback, args: buried.append(args[0]))
    count = 300

    def post(first: int) -> None:
        for number in range(first, first + count):
            borrowed.mailbox.post(delivered.append, number)

    def lend() -> None:
        for _ in range(20):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    together(lambda: post(0), lambda: post(count), lend)
    assert borrowed.stop(0.0)

    assert Counter(delivered + buried) == Counter(range(2 * count))


def test_a_mailbox_belongs_to_one_loop_and_dies_with_it() -> None:
    one, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    assert mailbox_of(one) is mailbox_of(one)
    assert mailbox_of(one) is not mailbox_of(other)
    one.close()
    other.close()
    mailbox = mailbox_of(one)
    del one
    gc.collect()

    mailbox.post(print, "dropped")  # neither raises nor prints


@pytest.mark.reliability("B29")
@pytest.mark.parametrize("how", ["exit", "interrupt", "stop", "callback"])
def test_a_loop_thread_outlives_what_user_tasks_do_to_it(
    home: EventLoopThread, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def task() -> None:
        if how == "exit":
            sys.exit(3)
        if how == "interrupt":
            raise KeyboardInterrupt
        asyncio.get_running_loop().stop()

    def callback() -> None:
        raise SystemExit

    async def start() -> None:
        kept.append(asyncio.ensure_future(task()))

    async def waits() -> str:
        await end
        return "still here"

    end = Latch()
    kept: list[asyncio.Future[None]] = []
    waiting = start_on(home.loop, waits())
    for _ in range(3):
        if how == "callback":
            home.loop.call_soon_threadsafe(callback)
        else:
            run_blocking(home.loop, start(), PATIENCE_S)
        settled(home)

    end.count_down()
    assert waiting.result(PATIENCE_S) == "still here"
    assert run_blocking(home.loop, asyncio.sleep(0, "and served"), PATIENCE_S) == "and served"
    assert any("home" in record.message for record in caplog.records)
    for future in kept:
        future.exception()


def test_stop_ends_tasks_and_runs_their_finally_in_the_thread() -> None:
    home = EventLoopThread("home")
    started = threading.Event()
    where: list[str] = []

    async def task() -> None:
        try:
            started.set()
            await asyncio.Future()
        finally:
            where.append(threading.current_thread().name)

    waiting = start_on(home.loop, task())
    assert started.wait(PATIENCE_S)

    assert home.stop(PATIENCE_S)
    assert home.stop(PATIENCE_S), "stopping twice is fine"
    assert where == ["home"]
    assert home.loop.is_closed()
    assert waiting.cancelled()


def test_stop_also_ends_what_tasks_start_while_they_end() -> None:
    home = EventLoopThread("home")
    started = threading.Event()
    seen: list[str] = []

    async def child() -> None:
        try:
            await asyncio.Future()
        finally:
            seen.append("child")

    async def parent() -> None:
        try:
            started.set()
            await asyncio.Future()
        finally:
            kept.append(asyncio.ensure_future(child()))
            await asyncio.sleep(0)
            seen.append("parent")

    kept: list[asyncio.Future[None]] = []
    start_on(home.loop, parent())
    assert started.wait(PATIENCE_S)

    assert home.stop(PATIENCE_S)
    assert sorted(seen) == ["child", "parent"]


@pytest.mark.parametrize("how", ["exit", "swallow", "agen"])
def test_stop_ends_every_task_if_one_misbehaves(how: str, caplog: pytest.LogCaptureFixture) -> None:
    home = EventLoopThread("home")
    ready = threading.Barrier(2)
    ended = threading.Event()

    async def bad() -> None:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            if how == "exit":
                sys.exit(3)
            if how == "swallow":
                await turns()

    async def good() -> None:
        try:
            await asyncio.Future()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def agen() -> Any:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def start() -> None:
        kept.append(asyncio.ensure_future(bad()))
        if how == "agen":
            kept.append(items := agen())
            await anext(items)
        else:
            kept.append(asyncio.ensure_future(good()))
        await asyncio.sleep(0)
        home.loop.call_soon(ready.wait)

    kept: list[Any] = []
    start_on(home.loop, start())
    ready.wait(PATIENCE_S)

    assert home.stop(PATIENCE_S)
    assert ended.is_set()
    kept[0].cancelled() or kept[0].exception()


def test_stop_is_bounded_when_user_code_blocks() -> None:
    buried: list[Any] = []
    home = EventLoopThread("home", lambda callback, args: buried.append(args))
    with blocked(home):
        home.mailbox.post(print, "queued behind it")

        assert home.stop(0.05) is False
        assert buried == [("queued behind it",)], "who waits for it is told at once"
        home.mailbox.post(print, "too late")
        assert buried[1:] == [("too late",)]
    assert home.stop(PATIENCE_S), "it ends when that code returns"


def test_a_loop_can_stop_its_own_thread(home: EventLoopThread) -> None:
    assert run_blocking(home.loop, on(home), PATIENCE_S) is True


async def on(home: EventLoopThread) -> bool:
    return home.is_current() and home.stop(0.0)


def test_cancelling_run_on_cancels_the_coroutine_there(home: EventLoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def there() -> None:
        try:
            started.set()
            await asyncio.Future()
        finally:
            ended.set()

    async def here() -> None:
        task = asyncio.ensure_future(run_on(home.loop, there))
        await asyncio.to_thread(started.wait, PATIENCE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(here())

    assert ended.wait(PATIENCE_S)


def test_starting_on_a_closed_loop_raises_and_leaves_no_coroutine_behind() -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    with pytest.raises(RuntimeError, match="closed"):
        start_on(loop, asyncio.sleep(0))


@pytest.mark.reliability("D07")
def test_ten_thousand_wake_ups_across_threads_and_none_is_lost(
    home: EventLoopThread, switch_interval: None
) -> None:
    async def wait_many() -> int:
        for _ in range(2_000):
            wakeup = Wakeup(asyncio.get_running_loop())
            home.mailbox.post(wakeup.wake)
            await wakeup.wait()
        return 2_000

    async def four() -> list[int]:
        return await asyncio.gather(*(wait_many() for _ in range(5)))

    assert sum(asyncio.run(four())) == 10_000


class StillLoop:
    """A loop that runs its callbacks when the test tells it to."""

    def __init__(self) -> None:
        self.told: list[Callable[[], object]] = []
        self.closed = False

    def call_soon_threadsafe(self, callback: Callable[[], object], context: Context) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.told.append(callback)

    def is_closed(self) -> bool:
        return self.closed

    def run(self) -> None:
        while self.told:
            self.told.pop(0)()


def interrupted(run: Callable[[], object], line: int, act: Callable[[], object]) -> bool:
    """Run `run`, and `act` just before the `line`-th line of the mailbox's code.

    Another thread may do the same at that moment. Returns False if there are fewer lines.
    """
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != Mailbox.post.__code__.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.mark.reliability("D02")
@pytest.mark.parametrize("first", ["post", "drain", "close", "lender closes"])
@pytest.mark.parametrize("second", ["post", "drain", "close", "lender closes"])
def test_between_any_two_lines_another_thread_may_come(first: str, second: str) -> None:
    """Interrupt each step of the mailbox at each line by each other step; no item is lost."""
    line = 0
    while True:
        line += 1
        delivered: list[str] = []
        buried: list[str] = []
        loop = StillLoop()
        mailbox = Mailbox(loop, lambda _, args: buried.append(args[0]))  # type: ignore[arg-type] # noqa: B023

        def lender_closes(loop: StillLoop = loop) -> None:
            loop.closed = True
            loop.told.clear()

        steps: dict[str, Callable[[], object]] = {
            "drain": loop.run,
            "close": mailbox.close,
            "lender closes": lender_closes,
        }
        for name in ("first", "second"):
            steps[f"post {name}"] = partial(mailbox.post, delivered.append, name)
        mailbox.post(delivered.append, "zeroth")
        reached = interrupted(
            steps["post first" if first == "post" else first],
            line,
            steps["post second" if second == "post" else second],
        )
        posted = ["zeroth"] + ["first"] * (first == "post")
        posted += ["second"] * (second == "post" and reached)
        loop.run()
        if "close" in first or "close" in second:
            mailbox.close()  # its owner closes it in the end

        assert Counter(delivered + buried) == Counter(posted), f"at line {line}"
        if not reached:
            break
    assert line > 1 or first == "lender closes"


def test_an_answer_to_a_loop_that_is_gone_is_dropped_quietly(
    home: EventLoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    async def make() -> Wakeup:
        return Wakeup(asyncio.get_running_loop())

    home.mailbox.post(asyncio.run(make()).wake)
    settled(home)

    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_waiter_on_a_closed_loop_is_not_woken_although_the_thread_id_is_the_same() -> None:
    loop = asyncio.new_event_loop()

    async def make() -> Wakeup:
        return Wakeup(loop)

    wakeup = loop.run_until_complete(make())
    told: list[Any] = []
    asyncio.ensure_future(wakeup.wait()).add_done_callback(told.append)
    loop.close()

    wakeup.wake()  # in the thread of the loop

    assert told == []
