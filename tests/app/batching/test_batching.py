"""`@serve.batch` in a plain event loop: the calls of a batch, its start, and its results."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import inspect
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

import ingress as serve
from ingress.core.calls.call import current_calls
from ingress.core.execution.execution import Kind, kind
from ingress.exceptions import RayServeException, UserCodeExit
from tests.containment_app import ERRORS, boom
from tests.fakes import together
from tests.servers import PATIENCE_S, steady, turns

pytestmark = pytest.mark.anyio
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
LONG_S = 30.0
"""A wait that never ends while a test passes."""


class Recorder:
    """A handler's body: records each batch, and holds it until the test opens the door."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.batches: list[list[Any]] = []
        self.running = 0
        self.most_running = 0
        self.door = asyncio.Event()
        self.entered = asyncio.Event()
        if is_open:
            self.door.set()

    async def __call__(self, xs: list[Any]) -> list[Any]:
        self.batches.append(xs)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.entered.set()
        try:
            await self.door.wait()
            return xs
        finally:
            self.running -= 1


def batched(record: Any, **options: Any) -> Any:
    """Return a batched function whose handler is `record`, a `def` or an `async def`."""

    async def handler(xs: list[Any]) -> Any:
        made = record(xs)
        return await made if inspect.isawaitable(made) else made

    return serve.batch(**{"batch_wait_timeout_s": LONG_S, **options})(handler)


def queues(function: Any) -> int:
    return len(function.__ingress_batcher__._queues)


async def patiently(awaitable: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return await awaitable


async def all_of(*calls: Any, errors: bool = False) -> list[Any]:
    """Await calls that were started in this order."""
    results: list[Any] = await patiently(asyncio.gather(*calls, return_exceptions=errors))
    return results


async def started(*calls: Any) -> list[asyncio.Task[Any]]:
    """Start calls, and return once each waits."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await turns()
    return tasks


# Decorating functions and methods


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_batch_size": 0}, ValueError, "max_batch_size must be an integer >= 1, got 0"),
        ({"max_batch_size": 1.5}, TypeError, "max_batch_size must be an integer >= 1, got 1.5"),
        ({"max_batch_size": "8"}, TypeError, "max_batch_size must be an integer >= 1, got '8'"),
        ({"max_batch_size": True}, TypeError, "max_batch_size must be an integer >= 1"),
        ({"max_batch_size": float("inf")}, TypeError, "max_batch_size must be an integer >= 1"),
        ({"batch_wait_timeout_s": -1}, ValueError, "batch_wait_timeout_s must be a float >= 0"),
        ({"batch_wait_timeout_s": float("nan")}, ValueError, "must be a float >= 0, got nan"),
        ({"batch_wait_timeout_s": float("inf")}, ValueError, "must be a float >= 0, got inf"),
        ({"batch_wait_timeout_s": "1"}, TypeError, "batch_wait_timeout_s must be a float >= 0"),
        ({"max_concurrent_batches": 0}, TypeError, "max_concurrent_batches must be an integer"),
        ({"max_concurrent_batches": 1.5}, TypeError, "max_concurrent_batches must be an integer"),
        ({"batch_size_fn": 3}, TypeError, "batch_size_fn must be a callable or None, got 3"),
        ({"batch_size_fn": turns}, TypeError, "batch_size_fn must be a plain `def`"),
        ({"per_item_errors": "no"}, TypeError, "per_item_errors must be True or False, got 'no'"),
    ],
)
def test_a_wrong_option_is_refused_at_decoration(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        serve.batch(**options)


@pytest.mark.parametrize("what", [3, int, serve.deployment(Recorder)], ids=repr)
def test_what_is_no_function_is_refused_at_decoration(what: Any) -> None:
    for decorate in (serve.batch, serve.batch()):
        with pytest.raises(TypeError, match=r"@serve\.batch decorates a function, got"):
            decorate(what)


def test_a_function_without_a_parameter_to_collect_is_refused_at_decoration() -> None:
    with pytest.raises(TypeError, match=r"K\.nothing' has no parameter for a list"):

        class K:
            @serve.batch
            async def nothing(self) -> list[Any]:
                return []


async def test_a_call_with_wrong_arguments_says_of_what() -> None:
    f = batched(Recorder())
    for args in ((), (1, 2)):
        with pytest.raises(TypeError, match=r"\(\): (missing|too many)"):
            await f(*args)
    assert queues(f) == 0


@pytest.mark.parametrize("make", [FastAPI, APIRouter])
@pytest.mark.parametrize(
    ("is_above", "text"),
    [
        (True, r"K\.route.*Decorate an inner method and await it from"),
        (False, r"K\.route is a route and a @serve.batch.*inner method"),
    ],
    ids=["batch over route", "route over batch"],
)
def test_a_batch_that_is_a_route_is_refused_when_the_class_is_decorated(
    make: type[FastAPI] | type[APIRouter], is_above: bool, text: str
) -> None:
    app = make()
    decorators: list[Decorator] = [app.get("/"), serve.batch]
    below, above = decorators if is_above else decorators[::-1]

    class K:
        @above
        @below
        async def route(self, xs: list[int]) -> list[int]:
            return xs

    with pytest.raises(TypeError, match=text):
        serve.ingress(app)(K)


def test_an_integral_float_is_a_size_as_in_ray() -> None:
    assert batched(None, max_batch_size=8.0)._get_max_batch_size() == 8


def test_the_decorated_function_keeps_its_name_and_signature() -> None:
    @serve.batch
    async def predict(xs: list[int]) -> list[int]:
        """Predict."""
        return xs

    assert (predict.__name__, predict.__doc__) == ("predict", "Predict.")
    assert inspect.iscoroutinefunction(predict)


async def test_every_way_to_write_a_handler_is_batched() -> None:
    async def size(xs: list[int]) -> list[int]:
        return [len(xs)] * len(xs)

    async def of_self(self: Any, xs: list[int]) -> list[int]:
        return await size(xs)

    class K:
        bare = serve.batch(of_self)
        called = serve.batch()(of_self)

        @serve.batch
        def sync(self, xs: list[int]) -> list[int]:
            return [len(xs)] * len(xs)

        static_above = staticmethod(serve.batch(size))
        static_below = serve.batch(staticmethod(size))
        class_above: Any = classmethod(serve.batch(of_self))

        @serve.batch
        @classmethod
        async def class_below(cls, xs: list[int]) -> list[int]:
            return await size(xs)

    k: Any = K()
    for name in ("bare", "called", "sync", "static_above", "static_below", "class_above"):
        assert await all_of(getattr(k, name)(1), getattr(k, name)(2)) == [2, 2], name
    assert await all_of(k.class_below(1), K.class_below(2)) == [2, 2]


# Start of a batch


async def test_the_time_begins_with_the_first_call_and_not_again_with_the_next() -> None:
    record = Recorder(is_open=True)
    f = batched(record, batch_wait_timeout_s=0.05)
    begin = time.monotonic()
    first = asyncio.ensure_future(f(0))
    late = []
    while not first.done():
        late.append(asyncio.ensure_future(f(1)))
        await asyncio.sleep(0.01)
        assert time.monotonic() - begin < LONG_S

    assert record.batches[0] == [0] + [1] * (len(record.batches[0]) - 1)
    assert len(record.batches[0]) < 10
    await all_of(*late)


async def test_the_wall_clock_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    f = batched(Recorder(is_open=True), batch_wait_timeout_s=0.01)
    monkeypatch.setattr(time, "time", lambda: 0.0)

    assert await all_of(f(0), f(1)) == [0, 1]


async def test_a_queue_that_is_empty_is_no_object_no_task_and_no_timer() -> None:
    f = batched(Recorder())
    before = asyncio.all_tasks()
    [task] = await started(f(0))
    assert queues(f) == 1
    task.cancel()
    await turns()

    assert queues(f) == 0
    assert asyncio.all_tasks() == before
    loop: Any = asyncio.get_running_loop()
    assert [timer for timer in loop._scheduled if not timer.cancelled()] == []


# Setters


async def test_what_is_set_holds_from_the_next_batch_on() -> None:
    record = Recorder(is_open=True)
    f = batched(record, max_batch_size=3)
    [first] = await started(f(0))
    f.set_max_batch_size(2)
    assert f._get_max_batch_size() == 2
    await all_of(first, f(1), f(2), f(3), f(4))

    assert record.batches == [[0, 1, 2], [3, 4]]

    f.set_batch_wait_timeout_s(0)
    assert f._get_batch_wait_timeout_s() == 0
    await all_of(f(5))
    assert record.batches[2:] == [[5]]


def test_what_is_set_is_validated() -> None:
    f = batched(None)
    with pytest.raises(ValueError, match="max_batch_size must be an integer >= 1, got 0"):
        f.set_max_batch_size(0)
    with pytest.raises(ValueError, match="batch_wait_timeout_s must be a float >= 0, got -1"):
        f.set_batch_wait_timeout_s(-1)
    assert (f._get_max_batch_size(), f._get_batch_wait_timeout_s()) == (10, LONG_S)


# Calls of one batch


async def test_instances_do_not_share_batches() -> None:
    class K:
        def __init__(self, name: str) -> None:
            self.name = name

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
        async def f(self, xs: list[int]) -> list[Any]:
            return [(self.name, xs)] * len(xs)

    class Sub(K):
        async def f(self, x: int) -> Any:
            return "sub", await super().f(x)

    a, b, c = K("a"), K("b"), Sub("c")
    mixed = [a.f(1), b.f(2), c.f(5), a.f(3), b.f(4), c.f(6)]
    assert await all_of(*mixed) == [("a", [1, 3]), ("b", [2, 4]), ("sub", ("c", [5, 6]))] * 2


async def test_an_instance_needs_neither_a_dict_nor_weak_references_and_is_not_kept() -> None:
    class Slotted:
        __slots__ = ("other",)

        @serve.batch(batch_wait_timeout_s=0)
        async def f(self, xs: list[int]) -> list[int]:
            return xs

    class Weak:
        @serve.batch(batch_wait_timeout_s=0)
        async def f(self, xs: list[int]) -> list[int]:
            return xs

    slotted: Any = Slotted()
    assert await all_of(slotted.f(1)) == [1]
    instance: Any = Weak()
    assert await all_of(instance.f(1)) == [1]
    await turns()
    gone = weakref.ref(instance)
    del instance
    gc.collect()
    assert gone() is None


def test_a_second_loop_after_the_first_has_gone_in_the_middle_of_a_batch() -> None:
    f = batched(Recorder())
    first = asyncio.new_event_loop()
    task = first.create_task(f(0))
    first.run_until_complete(turns())
    first.close()
    gone = weakref.ref(first)

    f2 = batched(Recorder(is_open=True), max_batch_size=2)
    for _ in range(2):
        assert asyncio.run(all_of(f2(1), f2(2))) == [1, 2]
    f.set_batch_wait_timeout_s(0)

    async def one() -> None:
        task = await started(f(7))
        assert queues(f) == 1
        task[0].cancel()

    asyncio.run(one())
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task, first
    gc.collect()
    assert gone() is None


def test_loops_of_many_threads_do_not_meet(switch_interval: None) -> None:
    class K:
        @serve.batch(max_batch_size=4, batch_wait_timeout_s=0)
        async def f(self, xs: list[int]) -> list[Any]:
            return [(threading.get_ident(), x) for x in xs]

    k: Any = K()
    found: list[bool] = []

    def main() -> None:
        async def calls() -> None:
            for _ in range(20):
                results = await all_of(*(k.f(x) for x in range(7)))
                found.append(results == [(threading.get_ident(), x) for x in range(7)])

        asyncio.run(calls())

    together(*[main] * 4)
    assert found == [True] * 80
    assert queues(K.f) == 0


def test_two_threads_that_each_change_a_limit_lose_neither(switch_interval: None) -> None:
    f, lost = batched(None), []
    for number in range(1, 300):
        together(
            lambda: f.set_max_batch_size(number),  # noqa: B023
            lambda: f.set_batch_wait_timeout_s(number),  # noqa: B023
        )
        limits = f._get_max_batch_size(), f._get_batch_wait_timeout_s()
        if limits != (number, number):
            lost.append(limits)
    assert not lost


# Arguments


async def test_every_parameter_becomes_a_list_however_it_was_given() -> None:
    seen = []

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def f(xs: list[int], ys: list[int], *, zs: list[int]) -> list[int]:
        seen.append((xs, ys, zs))
        return [x + y + z for x, y, z in zip(xs, ys, zs, strict=True)]

    calls = f(1, 10, zs=100), f(2, ys=20, zs=200), f(zs=300, ys=30, xs=3)
    assert await all_of(*calls) == [111, 222, 333]
    assert seen == [([1, 2, 3], [10, 20, 30], [100, 200, 300])]


async def test_a_missing_argument_is_the_callers_own_error() -> None:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def f(xs: list[int], ys: list[int]) -> list[int]:
        return xs

    good, *bad = await started(f(1, 2), f(1), f(1, 2, 3), f(1, y=2))  # type: ignore[call-arg]
    for task, text in zip(bad, ["missing .* argument: 'ys'", "too many", "'ys'"], strict=True):
        with pytest.raises(TypeError, match=text):
            await task
    assert await all_of(good, f(3, 4)) == [1, 3]


async def test_calls_of_different_shapes_do_not_mix_and_a_default_is_no_list() -> None:
    seen = []

    @serve.batch(batch_wait_timeout_s=0)
    async def f(xs: list[int], ys: Any = None, *more: list[int], **named: list[int]) -> list[int]:
        seen.append((xs, ys, more, named))
        return xs

    calls = f(1), f(2, 20), f(3), f(4, 40, 400), f(5, ys=50), f(6, a=60), f(7, b=70), f(8, a=80)
    assert await all_of(*calls) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert seen == [
        ([1, 3], None, (), {}),
        ([2, 5], [20, 50], (), {}),
        ([4], [40], ([400],), {}),
        ([6, 8], None, (), {"a": [60, 80]}),
        ([7], None, (), {"b": [70]}),
    ]


# Callers that leave


async def test_a_call_cancelled_in_the_very_turn_the_batch_would_be_full_takes_no_place() -> None:
    record = Recorder(is_open=True)
    f = batched(record, max_batch_size=2)
    [first] = await started(f(0))
    second = asyncio.ensure_future(f(1))  # checks before `first` leaves
    first.cancel()
    await turns()

    assert record.batches == []
    assert await all_of(second, f(2)) == [1, 2]
    assert record.batches == [[1, 2]]


async def test_a_call_cancelled_in_the_very_turn_the_time_is_up_is_not_in_the_batch() -> None:
    record = Recorder(is_open=True)
    f = batched(record, batch_wait_timeout_s=0.02)
    first, second = await started(f(0), f(1))
    asyncio.get_running_loop().call_later(0.001, first.cancel)
    time.sleep(0.05)  # both timers are due when the loop continues

    assert await all_of(second) == [1]
    assert first.cancelled()
    assert record.batches == [[1]]


# Results of the handler


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        ([1], RayServeException, "has length 2 but the returned list has length 1."),
        ([1, 2, 3], RayServeException, "has length 2 but the returned list has length 3."),
        (None, TypeError, "has length 2 but .* returned NoneType, which is not a list"),
        ({1: 1, 2: 2}, TypeError, "returned dict, which is not a list"),
        ({1, 2}, TypeError, "returned set, which is not a list"),
        ("ab", TypeError, "returned str, which is not a list"),
        (b"ab", TypeError, "returned bytes, which is not a list"),
        ((x for x in range(2)), TypeError, "returned generator, which is not a list"),
        (7, TypeError, "returned int, which is not a list"),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
async def test_a_result_that_is_not_one_for_each_fails_all_and_not_the_next_batch(
    result: Any, error: type[Exception], text: str
) -> None:
    results = [result, [5, 6]]
    f = batched(lambda xs: results.pop(0), max_batch_size=2)

    for failed in await all_of(f(1), f(2), errors=True):
        assert type(failed) is error
        with pytest.raises(error, match="Batched function doesn't preserve batch size"):
            raise failed
        with pytest.raises(error, match=text):
            raise failed
    assert await all_of(f(1), f(2)) == [5, 6]


async def test_a_tuple_and_an_array_are_lists() -> None:
    import numpy as np

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def f(xs: list[Any]) -> Any:
        return np.array(xs) if isinstance(xs[0], list) else tuple(xs)

    assert await all_of(f(1), f(2)) == [1, 2]
    one, two = await all_of(f([1, 2]), f([3, 4]))
    assert (one.tolist(), two.tolist()) == ([1, 2], [3, 4])


async def test_a_length_that_exits_fails_the_callers_and_not_the_loop() -> None:
    class Exits(list[int]):
        def __len__(self) -> int:
            raise SystemExit(3)

    f = batched(lambda xs: Exits(), batch_wait_timeout_s=0)

    assert [type(each) for each in await all_of(f(1), f(2), errors=True)] == [UserCodeExit] * 2


async def test_an_exception_among_the_results_is_a_value_by_default() -> None:
    error = ValueError("mine")
    f = batched(lambda xs: [error, 2], batch_wait_timeout_s=0)

    assert await all_of(f(1), f(2)) == [error, 2]


@pytest.mark.parametrize("name", ERRORS)
async def test_with_per_item_errors_an_exception_as_a_result_is_its_callers(name: str) -> None:
    error = ERRORS[name]()
    f = batched(lambda xs: [1, error, 3], batch_wait_timeout_s=0, per_item_errors=True)
    one, failed, three = await all_of(f(1), f(2), f(3), errors=True)
    assert (one, three) == (1, 3)
    if isinstance(error, StopIteration):
        assert isinstance(failed, RuntimeError)
    else:
        assert failed is error or failed.__cause__ is error or failed.original is error


# Errors of the handler


@pytest.mark.parametrize("written", ["async def", "def"])
@pytest.mark.parametrize("name", ERRORS)
async def test_each_caller_gets_an_error_and_the_next_batch_runs(name: str, written: str) -> None:
    def handler(xs: list[int]) -> list[int]:
        if xs[0] == 0:
            boom(name)
        return xs

    options: dict[str, Any] = {"max_batch_size": 3, "batch_wait_timeout_s": LONG_S}
    f: Any = serve.batch(**options)(handler) if written == "def" else batched(handler, **options)
    failed = await all_of(f(0), f(1), f(2), errors=True)
    expected: Any = type(ERRORS[name]())
    if name.startswith("StopIteration"):
        expected = RuntimeError
    elif not issubclass(expected, Exception):
        expected = UserCodeExit
    elif name == "StopAsyncIteration":
        expected = (StopAsyncIteration, RuntimeError)
    assert [isinstance(each, expected) for each in failed] == [True] * 3
    assert await all_of(f(1), f(2), f(3)) == [1, 2, 3]


class Coded(Exception):
    """An error that changes its argument, and stores it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Uncopyable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


async def test_each_caller_raises_an_error_of_its_own_with_the_same_words_and_cause() -> None:
    cause = KeyError("why")

    def fail(xs: list[int]) -> list[int]:
        raise Coded(5) from cause

    f = batched(fail, max_batch_size=3)
    errors = await all_of(f(0), f(1), f(2), errors=True)
    assert len({id(error) for error in errors}) == 3
    for error in errors:
        assert type(error) is Coded
        assert (str(error), error.code, error.__cause__) == ("code 5", 5, cause)
        depth, tb = 0, error.__traceback__
        while tb is not None:
            depth, tb = depth + 1, tb.tb_next
        assert depth < 10  # not the frames of all three


async def test_an_error_that_cannot_be_copied_is_shared() -> None:
    def fail(xs: list[int]) -> list[int]:
        raise Uncopyable(1, 2)

    f = batched(fail, max_batch_size=2)
    one, other = await all_of(f(0), f(1), errors=True)
    assert isinstance(one, Uncopyable)
    assert one is other


async def test_a_cancelled_batch_answers_its_callers() -> None:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def f(xs: list[int]) -> list[int]:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()
        return xs

    assert [type(each) for each in await all_of(f(0), f(1), errors=True)] == [UserCodeExit] * 2


async def test_a_batch_cancelled_before_its_first_step_answers_its_callers() -> None:
    record = Recorder()
    f = batched(record, max_batch_size=2)
    before = asyncio.all_tasks()
    calls = [asyncio.ensure_future(f(0)), asyncio.ensure_future(f(1))]
    await asyncio.sleep(0)
    [run] = asyncio.all_tasks() - before - set(calls)
    run.cancel()

    assert [type(each) for each in await all_of(*calls, errors=True)] == [UserCodeExit] * 2
    assert record.batches == []


# batch_size_fn


def size_is_sum(xs: list[int]) -> int:
    return sum(xs)


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_an_item_that_can_never_fit_fails_alone(place: int) -> None:
    record = Recorder(is_open=True)
    f = batched(record, max_batch_size=10, batch_size_fn=size_is_sum, batch_wait_timeout_s=0)
    values = [1, 2]
    values.insert(place, 11)
    results = await all_of(*(f(x) for x in values), errors=True)

    error = results.pop(place)
    assert type(error) is RuntimeError
    assert str(error) == (
        "Size of item is greater than max_batch_size. Please increase the max_batch_size or check "
        "the implementation of the batch_size_fn."
    )
    assert results == [1, 2]
    assert [x for xs in record.batches for x in xs] == [1, 2]


async def test_a_size_that_is_no_number_fails_the_item() -> None:
    f = batched(Recorder(), batch_size_fn=lambda xs: None)
    with pytest.raises(TypeError, match="batch_size_fn must return a number, got None"):
        await patiently(f(1))
    assert queues(f) == 0


# Context


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.mark.parametrize("wait_s", [0, LONG_S])
async def test_a_variable_of_one_caller_is_not_seen_by_the_others(wait_s: float) -> None:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=wait_s)
    async def f(xs: list[int]) -> list[str]:
        seen = variable.get()
        variable.set("the batch's")
        return [seen] * len(xs)

    async def caller(name: str) -> tuple[str, str]:
        variable.set(name)
        return await f(1), variable.get()

    for _ in range(2):
        assert await all_of(caller("a"), caller("b")) == [("unset", "a"), ("unset", "b")]


async def test_outside_of_a_replica_there_is_no_request_to_know_of() -> None:
    f = batched(lambda xs: [current_calls()] * len(xs), batch_wait_timeout_s=0)

    assert await all_of(f(1), f(2)) == [(), ()]
    assert current_calls() == ()


# Streams


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def stream_of(steps: Callable[[list[Any]], Iterator[Any]], written: str, **options: Any) -> Any:
    """Return a batched generator, written one way or the other."""
    options = {"batch_wait_timeout_s": LONG_S, **options}
    if written == "def":

        @serve.batch(**options)
        def stream(xs: list[Any]) -> Iterator[Any]:
            yield from steps(xs)

    else:

        @serve.batch(**options)
        async def stream(xs: list[Any]) -> AsyncIterator[Any]:
            for step in steps(xs):
                yield step

    return stream


both_generators = pytest.mark.parametrize("written", ["async def", "def"])


@both_generators
async def test_a_generator_yields_to_each_caller_its_own(written: str) -> None:
    def steps(xs: list[int]) -> Iterator[list[int]]:
        for factor in range(40):
            yield [x * factor for x in xs]

    f = stream_of(steps, written, max_batch_size=3)
    results = await all_of(*(collect(f(x)) for x in range(3)))
    assert results == [[x * factor for factor in range(40)] for x in range(3)]
    await turns()
    assert queues(f) == 0


@both_generators
@pytest.mark.parametrize("end", [StopIteration, StopAsyncIteration])
async def test_the_class_of_an_end_ends_the_stream_of_its_caller(end: type, written: str) -> None:
    def steps(xs: list[int]) -> Iterator[list[Any]]:
        for step in range(4):
            yield [step if step < x else end for x in xs]

    f = stream_of(steps, written, max_batch_size=3)
    assert await all_of(*(collect(f(x)) for x in range(3))) == [[], [0], [0, 1]]


async def test_a_generator_is_closed_when_all_of_its_streams_have_ended() -> None:
    closed = []

    def steps(xs: list[int]) -> Iterator[list[Any]]:
        try:
            while True:
                yield [StopIteration] * len(xs)
        finally:
            closed.append(True)

    f = stream_of(steps, "async def", max_batch_size=2)
    assert await all_of(collect(f(0)), collect(f(1))) == [[], []]
    assert closed == [True]


@both_generators
async def test_arrays_are_streamed(written: str) -> None:
    import numpy as np

    def steps(xs: list[int]) -> Iterator[Any]:
        for _ in range(3):
            yield np.array([[x, x] for x in xs])

    f = stream_of(steps, written, max_batch_size=2)
    one, two = await all_of(collect(f(1)), collect(f(2)))
    assert [each.tolist() for each in one] == [[1, 1]] * 3
    assert [each.tolist() for each in two] == [[2, 2]] * 3


async def failing(items: AsyncIterator[Any]) -> tuple[list[Any], Exception]:
    got = []
    try:
        async for item in items:
            got.append(item)  # noqa: PERF401
    except Exception as error:
        return got, error
    raise AssertionError("it ended")


@both_generators
@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_of_a_generator_reaches_the_open_streams(name: str, written: str) -> None:
    def steps(xs: list[int]) -> Iterator[list[Any]]:
        yield xs
        yield [StopIteration, *xs[1:]]
        boom(name)

    f = stream_of(steps, written, max_batch_size=3)
    done, *failed = await all_of(collect(f(0)), failing(f(1)), failing(f(2)))
    assert done == [0]
    assert [got for got, _ in failed] == [[1, 1], [2, 2]]
    assert failed[0][1] is not failed[1][1]
    assert (await all_of(collect(f(0)), failing(f(1)), failing(f(2))))[0] == [0]


@both_generators
@pytest.mark.parametrize("bad", [[1], None, "ab", {1: 1, 2: 2}], ids=repr)
async def test_a_step_that_is_not_one_for_each_fails_all_and_closes_the_generator(
    bad: Any, written: str
) -> None:
    closed = []

    def steps(xs: list[int]) -> Iterator[Any]:
        try:
            yield xs
            yield bad
            yield xs
        finally:
            closed.append(True)

    f = stream_of(steps, written, max_batch_size=2)
    for got, error in await all_of(failing(f(1)), failing(f(2))):
        assert len(got) == 1
        assert "Batched function doesn't preserve batch size. The input list" in str(error)
    assert closed == [True]


async def test_with_per_item_errors_an_exception_in_a_step_fails_just_its_stream() -> None:
    def steps(xs: list[int]) -> Iterator[list[Any]]:
        yield xs
        yield [xs[0], ValueError("mine")]
        yield xs

    f = stream_of(steps, "async def", max_batch_size=2, per_item_errors=True)
    ones, (twos, error) = await all_of(collect(f(1)), failing(f(2)))
    assert (ones, twos, str(error)) == ([1, 1, 1], [2], "mine")


@both_generators
async def test_a_caller_that_leaves_early_does_not_stop_the_others(written: str) -> None:
    def steps(xs: list[int]) -> Iterator[list[int]]:
        for _ in range(60):
            yield xs

    async def first_of(items: Any) -> Any:
        item = await anext(items)
        await items.aclose()
        return item

    f = stream_of(steps, written, max_batch_size=2)
    assert await all_of(first_of(f(1)), collect(f(2))) == [1, [2] * 60]


async def test_a_generator_without_consumers_is_closed_where_it_waits() -> None:
    closed = asyncio.Event()

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def f(xs: list[int]) -> AsyncIterator[list[int]]:
        try:
            yield xs
            await asyncio.Event().wait()
        finally:
            closed.set()

    one, two = f(1), f(2)
    assert await all_of(anext(one), anext(two)) == [1, 2]
    await one.aclose()
    await turns()
    assert not closed.is_set()
    await two.aclose()
    await patiently(closed.wait())
    await turns()
    assert queues(f) == 0


@both_generators
async def test_a_stream_not_yet_begun_leaves_when_it_is_cancelled(written: str) -> None:
    f = stream_of(lambda xs: iter([xs]), written, max_batch_size=2)
    [task] = await started(collect(f(1)))
    task.cancel()
    await turns()
    assert queues(f) == 0
    assert await all_of(collect(f(2)), collect(f(3))) == [[2], [3]]


@both_generators
async def test_a_generator_waits_for_its_slowest_caller(written: str) -> None:
    made = []

    def steps(xs: list[int]) -> Iterator[list[int]]:
        for number in range(1000):
            made.append(number)
            yield xs

    f = stream_of(steps, written, max_batch_size=2)
    fast, slow = f(1), f(2)
    task = asyncio.ensure_future(collect(fast))
    await patiently(anext(slow))
    # The content of two channels, and one item at each end.
    assert await asyncio.to_thread(steady, lambda: len(made), 0.02) < 50
    assert len(await patiently(collect(slow))) == 999
    assert await patiently(task) == [1] * 1000


# Streams are queued when they are called.


@both_generators
async def test_streams_that_are_iterated_one_after_another_share_a_batch(written: str) -> None:
    batches = []

    def steps(xs: list[int]) -> Iterator[list[int]]:
        batches.append(xs)
        for _ in range(100):  # more than a channel holds
            yield xs

    f = stream_of(steps, written, max_batch_size=3, batch_wait_timeout_s=LONG_S)
    streams = [f(x) for x in range(3)]
    assert [await patiently(collect(each)) for each in streams] == [[x] * 100 for x in range(3)]
    assert batches == [[0, 1, 2]]
    await turns()
    assert queues(f) == 0


@both_generators
async def test_a_stream_that_is_dropped_without_a_look_leaves_its_batch(written: str) -> None:
    batches = []

    def steps(xs: list[int]) -> Iterator[list[int]]:
        batches.append(xs)
        yield xs

    f = stream_of(steps, written, max_batch_size=2, batch_wait_timeout_s=LONG_S)
    dropped = f(0)
    del dropped
    gc.collect()
    await turns()
    assert queues(f) == 0
    assert await all_of(collect(f(1)), collect(f(2))) == [[1], [2]]
    assert batches == [[1, 2]]


async def test_a_stream_that_is_dropped_while_its_batch_runs_ends_the_batch() -> None:
    closed = asyncio.Event()

    @serve.batch(max_batch_size=1)
    async def f(xs: list[int]) -> AsyncIterator[list[int]]:
        try:
            while True:
                yield xs
        finally:
            closed.set()

    dropped = f(0)
    await turns()
    del dropped
    gc.collect()
    await patiently(closed.wait())
    await turns()
    assert queues(f) == 0


async def test_wrong_arguments_of_a_stream_are_told_at_the_call() -> None:
    f = stream_of(lambda xs: iter([xs]), "async def")
    with pytest.raises(TypeError, match="argument"):
        f()
    assert queues(f) == 0


async def test_a_stream_called_in_a_thread_is_queued_when_it_is_iterated() -> None:
    f = stream_of(lambda xs: iter([xs]), "async def", max_batch_size=1)
    assert await collect(await asyncio.to_thread(f, 1)) == [1]


def test_a_batched_generator_is_an_async_generator_and_what_wraps_it_is_what_it_is() -> None:
    f = stream_of(lambda xs: iter([xs]), "async def")

    @functools.wraps(f)
    def wrapped(*args: Any) -> Any:
        return [f(*args)]

    assert (kind(f), kind(wrapped)) == (Kind.ASYNC_GENERATOR, Kind.FUNCTION)
