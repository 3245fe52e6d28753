"""`ingress.core.calls.channel`: items in order, bounded, and no waiter forgotten."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingress.core.calls.channel import MAX_BYTES, MAX_ITEMS, YIELD_EVERY, Channel, EndOfStream
from ingress.core.calls.loops import EventLoopThread, run_blocking, start_on
from ingress.exceptions import StreamClosedError
from tests.servers import turns

PATIENCE_S = 60.0

on_the_loop = pytest.mark.anyio


@pytest.fixture
def other() -> Iterator[EventLoopThread]:
    """A second loop."""
    home = EventLoopThread("other")
    yield home
    assert home.stop(PATIENCE_S)


async def produce(channel: Channel[Any], count: int, put: list[int] | None = None) -> None:
    for number in range(count):
        await channel.put(number)
        if put is not None:
            put.append(number)
    channel.finish()


def produce_blocking(channel: Channel[Any], count: int, put: list[int] | None = None) -> None:
    for number in range(count):
        channel.put_blocking(number)
        if put is not None:
            put.append(number)
    channel.finish()


async def consume(channel: Channel[Any]) -> list[int]:
    return [item async for item in channel]


def consume_blocking(channel: Channel[Any]) -> list[int]:
    got = []
    while True:
        try:
            got.append(channel.get_blocking(PATIENCE_S))
        except EndOfStream:
            return got


def in_thread(target: Callable[..., object], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args)
    thread.start()
    return thread


@pytest.mark.parametrize("producer", ["loop", "thread"])
@pytest.mark.parametrize("consumer", ["loop", "thread"])
def test_five_thousand_items_cross_in_order(
    other: EventLoopThread, producer: str, consumer: str, switch_interval: None
) -> None:
    channel: Channel[Any] = Channel()
    if producer == "loop":
        start_on(other.loop, produce(channel, 5_000))
    else:
        thread = in_thread(produce_blocking, channel, 5_000)

    got = asyncio.run(consume(channel)) if consumer == "loop" else consume_blocking(channel)

    assert got == list(range(5_000))
    if producer == "thread":
        thread.join(PATIENCE_S)


@on_the_loop
@pytest.mark.parametrize(("size", "room"), [(0, MAX_ITEMS), (MAX_BYTES // 4, 4), (MAX_BYTES, 1)])
async def test_a_full_channel_suspends_the_producer(size: int, room: int) -> None:
    channel: Channel[Any] = Channel()
    put: list[int] = []

    async def producer() -> None:
        for number in range(room + 2):
            await channel.put(number, size)
            put.append(number)

    task = asyncio.ensure_future(producer())
    await turns(50)
    assert len(put) == room

    for number in range((room + 1) // 2):  # woken once per half of the room, not per place
        assert await channel.get() == number
    await turns(50)
    assert len(put) == min(room + (room + 1) // 2, room + 2)
    for number in range((room + 1) // 2, room + 2):
        assert await channel.get() == number
    await task


@on_the_loop
async def test_a_waiting_producer_is_woken_when_the_channel_is_half_empty() -> None:
    """Not for each free place: a wake-up costs more than an item."""
    channel: Channel[Any] = Channel(16)
    for number in range(16):
        channel.put_nowait(number)
    producer = asyncio.ensure_future(channel.put(16))
    await turns()

    for _ in range(7):
        await channel.get()
        await turns()
        assert not producer.done()
    await channel.get()
    await turns()
    assert producer.done()


def test_a_full_channel_holds_a_producer_in_a_thread() -> None:
    channel: Channel[Any] = Channel()
    put: list[int] = []
    full = threading.Event()

    def producer() -> None:
        for number in range(MAX_ITEMS):
            channel.put_blocking(number)
            put.append(number)
        full.set()
        channel.put_blocking(MAX_ITEMS)
        put.append(MAX_ITEMS)

    thread = in_thread(producer)
    assert full.wait(PATIENCE_S)
    thread.join(0.02)
    assert thread.is_alive()
    assert len(put) == MAX_ITEMS

    for number in range(MAX_ITEMS // 2):
        assert channel.get_blocking(PATIENCE_S) == number
    thread.join(PATIENCE_S)
    assert len(put) == MAX_ITEMS + 1


@on_the_loop
async def test_items_taken_at_once_take_room_until_their_consumer_comes_back() -> None:
    channel: Channel[Any] = Channel()
    for number in range(MAX_ITEMS):
        await channel.put(number)
    assert await channel.get_many() == list(range(MAX_ITEMS))

    task = asyncio.ensure_future(channel.put("next"))
    await turns(50)
    assert not task.done()

    assert await channel.get_many() == ["next"]
    await task


@on_the_loop
async def test_a_channel_has_the_limits_it_was_made_with() -> None:
    channel: Channel[Any] = Channel(3, 100)
    for _ in range(3):
        await channel.put("item", 1)
    by_number = asyncio.ensure_future(channel.put("item", 1))
    other: Channel[Any] = Channel(3, 100)
    await other.put("large", 100)
    by_size = asyncio.ensure_future(other.put("item", 1))
    await turns(50)
    assert not by_number.done()
    assert not by_size.done()

    await channel.get_many()
    await other.get_many()
    channel.close()
    other.close()
    for waiting in (by_number, by_size):
        with pytest.raises(StreamClosedError):
            await waiting


@on_the_loop
async def test_a_producer_that_never_awaits_lets_its_loop_go_on() -> None:
    channel: Channel[Any] = Channel(1_000, MAX_BYTES)
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    turn()
    for number in range(160):
        await channel.put(number)

    assert turns > 160 // YIELD_EVERY


@pytest.mark.parametrize("takes", ["one", "all"])
@on_the_loop
async def test_a_consumer_that_never_has_to_wait_lets_its_loop_go_on(takes: str) -> None:
    channel: Channel[Any] = Channel()
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    for number in range(1, 161):
        channel.put_blocking(number)  # as a producer that is faster: there always is an item
        asyncio.get_running_loop().call_soon(turn)
        assert await (channel.get() if takes == "one" else channel.get_many())

    assert turns > 160 - YIELD_EVERY


@on_the_loop
async def test_an_item_larger_than_the_bound_goes_through_alone() -> None:
    channel: Channel[Any] = Channel()
    await channel.put("large", 10 * MAX_BYTES)

    assert await channel.get() == "large"


@on_the_loop
async def test_what_was_put_before_an_error_arrives_before_the_error() -> None:
    channel: Channel[Any] = Channel()
    await channel.put(1)
    await channel.put(2)
    channel.finish(ValueError("late"))
    channel.finish()  # the first end counts

    assert [await channel.get(), await channel.get()] == [1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="late"):
            await channel.get()
        with pytest.raises(ValueError, match="late"):
            channel.get_blocking()


@pytest.mark.parametrize("producer", ["loop", "thread"])
def test_closing_wakes_a_producer_that_waits(other: EventLoopThread, producer: str) -> None:
    channel: Channel[Any] = Channel()
    put: list[int] = []
    raised = threading.Event()
    full = threading.Event()

    def note(error: BaseException | None) -> None:
        if isinstance(error, StreamClosedError):
            raised.set()

    async def on_loop() -> None:
        asyncio.get_running_loop().call_later(0.01, full.set)
        await produce(channel, 100, put)

    def in_worker() -> None:
        threading.Timer(0.01, full.set).start()
        try:
            produce_blocking(channel, 100, put)
        except StreamClosedError as error:
            note(error)

    if producer == "loop":
        start_on(other.loop, on_loop()).add_done_callback(lambda each: note(each.exception()))
    else:
        thread = in_thread(in_worker)
    assert full.wait(PATIENCE_S)
    channel.close()
    channel.close()

    assert raised.wait(PATIENCE_S)
    assert len(put) == MAX_ITEMS
    with pytest.raises(StreamClosedError):
        channel.put_blocking(1)
    if producer == "thread":
        thread.join(PATIENCE_S)


@on_the_loop
async def test_a_cancelled_consumer_loses_no_item(switch_interval: None) -> None:
    channel: Channel[Any] = Channel()
    thread = in_thread(produce_blocking, channel, 2_000)
    choice = random.Random(3)
    got: list[int] = []

    async def one() -> None:
        got.append(await channel.get())

    while len(got) < 2_000:
        task = asyncio.ensure_future(one())
        for _ in range(choice.randrange(3)):
            await asyncio.sleep(0)
        if choice.random() < 0.5:
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
    thread.join(PATIENCE_S)

    assert got == list(range(2_000))


@on_the_loop
async def test_a_cancelled_producer_puts_an_item_wholly_or_not_at_all() -> None:
    channel: Channel[Any] = Channel()
    for number in range(MAX_ITEMS):
        await channel.put(number)
    task = asyncio.ensure_future(channel.put("late"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    channel.finish()

    assert await consume(channel) == list(range(MAX_ITEMS))


def test_an_item_that_does_not_come_is_a_timeout_and_no_item_is_lost() -> None:
    channel: Channel[Any] = Channel()
    with pytest.raises(TimeoutError):
        channel.get_blocking(0.01)
    channel.put_blocking("late")

    assert channel.get_blocking(PATIENCE_S) == "late"


@pytest.mark.reliability("D07")
@pytest.mark.parametrize("seed", range(20))
def test_finishing_closing_and_cancelling_at_once_leave_no_waiter(
    other: EventLoopThread, seed: int, switch_interval: None
) -> None:
    channel: Channel[Any] = Channel()
    choice = random.Random(seed)
    limit = choice.randrange(200)

    def producer() -> None:
        try:
            for number in range(limit):
                channel.put_blocking(number)
        except StreamClosedError:
            pass
        channel.finish()

    async def consumer() -> list[int]:
        got: list[int] = []
        try:
            async for item in channel:
                got.append(item)
                if len(got) == cut:
                    break
        finally:
            channel.close()
            await channel.finished()
        return got

    cut = choice.randrange(1, 200)
    consuming = start_on(other.loop, consumer())
    thread = in_thread(producer)
    if choice.random() < 0.3:
        consuming.cancel()
    else:
        assert consuming.result(PATIENCE_S) == list(range(min(limit, cut)))
    thread.join(PATIENCE_S)

    assert not thread.is_alive()


@on_the_loop
async def test_waiting_for_the_end_outlasts_cancellation_without_spinning() -> None:
    channel: Channel[Any] = Channel()
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if turns < 1_000:
            asyncio.get_running_loop().call_soon(turn)
        else:
            channel.finish()

    with anyio.CancelScope() as scope:
        scope.cancel()
        turn()
        await channel.finished()
    assert turns == 1_000, "it returned only when the producer had ended"

    other: Channel[Any] = Channel()
    task = asyncio.ensure_future(other.finished())
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    other.finish()
    with pytest.raises(asyncio.CancelledError):
        await task


sizes = st.integers(0, 3 * MAX_BYTES // 2)


@pytest.fixture(scope="module")
def loops() -> Iterator[tuple[EventLoopThread, EventLoopThread]]:
    one, two = EventLoopThread("one"), EventLoopThread("two")
    yield one, two
    assert one.stop(PATIENCE_S)
    assert two.stop(PATIENCE_S)


@pytest.mark.reliability("D06")
@given(
    chunks=st.lists(sizes, max_size=60),
    in_a_thread=st.booleans(),
    fails=st.booleans(),
    cut=st.none() | st.integers(0, 60),
    pauses=st.sets(st.integers(0, 60), max_size=3),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_comes_out_is_a_prefix_of_what_went_in_and_whole_unless_cut(
    loops: tuple[EventLoopThread, EventLoopThread],
    chunks: list[int],
    in_a_thread: bool,
    fails: bool,
    cut: int | None,
    pauses: set[int],
) -> None:
    channel: Channel[Any] = Channel()
    closed: list[int] = []

    def put_all() -> None:
        error = None
        try:
            for number, size in enumerate(chunks):
                channel.put_blocking((number, size), size)
        except StreamClosedError:
            closed.append(1)
        else:
            error = ValueError("failed") if fails else None
        channel.finish(error)

    async def put_all_on_loop() -> None:
        error = None
        try:
            for number, size in enumerate(chunks):
                await channel.put((number, size), size)
        except StreamClosedError:
            closed.append(1)
        else:
            error = ValueError("failed") if fails else None
        channel.finish(error)

    async def take() -> tuple[list[tuple[int, int]], bool]:
        got: list[tuple[int, int]] = []
        failed = False
        try:
            while cut is None or len(got) < cut:
                if len(got) in pauses:
                    await asyncio.sleep(0.001)
                got.append(await channel.get())
        except EndOfStream:
            pass
        except ValueError:
            failed = True
        finally:
            channel.close()
            await channel.finished()
        return got, failed

    one, two = loops
    taking = start_on(one.loop, take())
    if in_a_thread:
        in_thread(put_all).join(PATIENCE_S)
    else:
        run_blocking(two.loop, put_all_on_loop(), PATIENCE_S)
    got, failed = taking.result(PATIENCE_S)

    sent = list(enumerate(chunks))
    assert got == sent[: len(got)]
    if cut is None or cut > len(chunks):
        assert got == sent
        assert failed == fails
        assert not closed
    else:
        assert len(got) == cut
        assert not failed


# Several producers: the handlers of a WebSocket application that broadcast. Several consumers: the
# tasks of one request.


def wakes_nothing() -> None:
    """Wake no consumer."""


@on_the_loop
@pytest.mark.parametrize("end", ["takes", "closes"])
async def test_all_producers_that_wait_for_room_are_woken(end: str) -> None:
    channel: Channel[Any] = Channel(2)
    for number in range(2):
        await channel.put(number)
    waiting = [asyncio.ensure_future(channel.put(number)) for number in (2, 3)]
    await turns()
    assert not channel.put_nowait(4)  # which must not drop the wake-ups of those that wait

    if end == "takes":
        assert [await channel.get() for _ in range(4)] == [0, 1, 2, 3]
        await asyncio.gather(*waiting)
    else:
        channel.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in answers] == [StreamClosedError] * 2


@on_the_loop
async def test_a_producer_beside_the_one_that_finishes_does_not_wait_for_ever() -> None:
    channel: Channel[Any] = Channel(1)
    await channel.put(0)
    waiting = asyncio.ensure_future(channel.put(1))
    await turns()
    channel.finish()

    assert [item async for item in channel] in ([0], [0, 1])

    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(StreamClosedError):
        await channel.put(2)


@on_the_loop
@pytest.mark.parametrize("end", ["items", "finish"])
async def test_all_consumers_that_wait_are_woken(end: str) -> None:
    channel: Channel[Any] = Channel()
    waiting = [asyncio.ensure_future(channel.get()) for _ in range(3)]
    await turns()
    waiting.pop(1).cancel()
    await turns()

    if end == "items":
        await channel.put(0)
        await channel.put(1)
        assert sorted(await asyncio.gather(*waiting)) == [0, 1]
    else:
        channel.finish()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in answers] == [EndOfStream] * 2


@on_the_loop
@pytest.mark.parametrize("takes", ["one", "all", "in a thread", "without waiting"])
async def test_an_empty_channel_keeps_nothing_of_consumers_that_gave_up(takes: str) -> None:
    channel: Channel[Any] = Channel()
    for _ in range(5):
        if takes == "in a thread":
            with pytest.raises(TimeoutError):
                channel.get_blocking(0.001)
        elif takes == "without waiting":
            assert channel.get_nowait(wakes_nothing) == []
        else:
            with anyio.move_on_after(0.001):
                await (channel.get() if takes == "one" else channel.get_many())

    assert channel._wake_consumers == ((wakes_nothing,) if takes == "without waiting" else ())


@on_the_loop
async def test_items_that_are_taken_without_waiting_make_room_and_the_next_one_wakes() -> None:
    channel: Channel[Any] = Channel(2)
    for number in range(2):
        await channel.put(number)
    waiting = asyncio.ensure_future(channel.put(2))
    await turns()
    woken: list[int] = []

    assert channel.get_nowait(lambda: woken.append(1)) == [0, 1]
    assert woken == []
    await waiting
    assert woken == [1]

    channel.finish()
    assert channel.get_nowait(lambda: woken.append(2)) == [2]
    assert woken == [1, 2]  # for the end, which has come before
    with pytest.raises(EndOfStream):
        channel.get_nowait(wakes_nothing)


@on_the_loop
async def test_a_producer_may_have_the_consumer_woken_later() -> None:
    channel: Channel[Any] = Channel()
    waiting = asyncio.ensure_future(channel.get())
    await turns()
    later: list[Callable[[], object]] = []

    assert channel.put_nowait(1, wake_by=later.append)
    await turns()
    assert not waiting.done()

    later.pop()()
    assert await waiting == 1


@on_the_loop
async def test_a_full_channel_keeps_nothing_of_producers_that_were_cancelled() -> None:
    channel: Channel[Any] = Channel(1)
    await channel.put(0)
    for _ in range(5):
        with anyio.move_on_after(0.001):
            await channel.put(1)

    assert channel._wake_producers == ()


def test_items_of_several_producers_all_cross(switch_interval: None) -> None:
    channel: Channel[Any] = Channel(4)

    def produce_some(first: int) -> None:
        for number in range(first, first + 500):
            channel.put_blocking(number)

    threads = [in_thread(produce_some, first) for first in range(0, 2_000, 500)]

    assert sorted([channel.get_blocking(PATIENCE_S) for _ in range(2_000)]) == list(range(2_000))
    for thread in threads:
        thread.join(PATIENCE_S)
