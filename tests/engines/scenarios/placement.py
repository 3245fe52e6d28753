"""The place of user code: the replica's event loop, or a thread."""

import asyncio
import contextvars
import functools
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from tests.engines.api import serve
from tests.engines.client import Client, outcome
from tests.engines.probe import (
    here,
    hold,
    hold_blocking,
    note,
    notes,
    open_gate,
    thread,
    wait_for_notes,
)
from tests.engines.suite import Deviation, scenario

ONE_RULE = "a `def` is followed by what it returns: one rule at both values of the flag"
CONTEXT: contextvars.ContextVar[str] = contextvars.ContextVar("scenario", default="unset")


def logged(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def wrapper(*args: Any) -> Any:
        return func(*args)

    return wrapper


class Places:
    def __init__(self) -> None:
        self.constructed = [here(), thread()]
        self.lambda_attribute = lambda: here()
        self.bound_partial = functools.partial(self.add, 1)
        CONTEXT.set("of the constructor")

    def add(self, one: int, other: int) -> int:
        return one + other

    async def constructor(self) -> Any:
        place, number = self.constructed
        return [place, number == thread()]

    async def a_coroutine(self) -> Any:
        return [here(), self.constructed[1] == thread()]

    def plain(self) -> str:
        return here()

    lambda_of_class = lambda self: here()  # noqa: E731

    @staticmethod
    def static() -> str:
        return here()

    @classmethod
    def of_class(cls) -> str:
        return here()

    @logged
    async def decorated(self) -> str:
        return here()

    def returns_coroutine(self) -> Any:
        return self.a_place()

    async def a_place(self) -> str:
        return here()

    def returns_task(self) -> Any:
        return asyncio.ensure_future(self.a_place())

    async def in_to_thread(self) -> str:
        return await asyncio.to_thread(here)

    async def in_executor(self) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, here)

    def waits(self, key: str) -> str:
        hold_blocking(key)
        return "done"

    async def quick(self) -> str:
        return "quick"

    async def async_generator(self) -> AsyncIterator[str]:
        yield here()

    def generator(self) -> Iterator[Any]:
        for _ in range(3):
            yield [here(), thread()]

    def returns_generator(self) -> Iterator[str]:
        return iter_places()

    def returns_async_generator(self) -> AsyncIterator[str]:
        return self.async_generator()

    async def coroutine_of_generator(self) -> Iterator[str]:
        return iter_places()

    async def sets_context(self) -> None:
        CONTEXT.set("of another request")

    def reads_context(self) -> str:
        return CONTEXT.get()

    def number_of_ids(self) -> int:
        return thread()

    async def gathers(self) -> Any:
        return await asyncio.gather(self.a_place(), asyncio.to_thread(here))

    def starts_a_thread(self) -> list[str]:
        seen: list[str] = []
        each = threading.Thread(target=lambda: seen.append(here()))
        each.start()
        each.join()
        return seen


def iter_places() -> Iterator[str]:
    yield here()


def places() -> Any:
    return serve.deployment(max_ongoing_requests=8)(Places).bind()


@scenario("Where an `async def` runs", places)
def a_coroutine_runs_on_the_loop_that_ran_the_constructor(it: Client) -> Any:
    return [it.call("a_coroutine"), it.call("a_coroutine"), it.call("constructor")]


@scenario("Where a `def` runs", places)
def a_def_runs_where_the_flag_says(it: Client) -> Any:
    return it.call("plain")


@scenario("Where a `def` runs", places)
def static_and_class_methods_are_methods(it: Client) -> Any:
    return [it.call("static"), it.call("of_class"), it.call("lambda_of_class")]


@scenario("Where a `def` runs", places)
def a_function_set_in_the_constructor_is_a_method(it: Client) -> Any:
    return it.call("lambda_attribute")


@scenario(
    "Where a `def` runs",
    places,
    Deviation("called as what it wraps", row="`partial`, callable objects as methods"),
)
def a_partial_is_a_method(it: Client) -> Any:
    return outcome(lambda: it.call("bound_partial", 2))


@scenario(
    "A `def` that returns an awaitable",
    places,
    Deviation(ONE_RULE, row="`def` that returns an awaitable, flag 1", flags="1"),
)
def what_a_def_decorator_returns_is_awaited(it: Client) -> Any:
    return outcome(lambda: it.call("decorated"))


@scenario(
    "A `def` that returns an awaitable",
    places,
    Deviation(ONE_RULE, row="`def` that returns an awaitable, flag 1", flags="1"),
)
def a_coroutine_that_a_def_returns_is_awaited(it: Client) -> Any:
    return outcome(lambda: it.call("returns_coroutine"))


@scenario(
    "A `def` that returns an awaitable",
    places,
    Deviation(ONE_RULE, row="`def` that returns a Task or Future", flags="0"),
)
def a_task_that_a_def_returns_is_awaited(it: Client) -> Any:
    return outcome(lambda: it.call("returns_task"))


@scenario("Where an `async def` runs", places)
def to_thread_and_the_executor_are_threads(it: Client) -> Any:
    return [it.call("in_to_thread"), it.call("in_executor"), it.call("gathers")]


@scenario("Where an `async def` runs", places)
def a_thread_the_user_starts_has_no_loop(it: Client) -> Any:
    return it.call("starts_a_thread")


@scenario("A `def` on the event loop", places)
def a_def_that_waits_blocks_the_loop_at_flag_0_only(it: Client) -> Any:
    waiting = it.handle.waits.remote("blocks")
    wait_for_notes("blocks")
    other = it.handle.quick.remote()
    try:
        other.result(timeout_s=3)
        blocked = False
    except TimeoutError:
        blocked = True
    open_gate("blocks")
    return {"blocked": blocked, "results": [waiting.result(), other.result()]}


@scenario("Where a `def` runs", places, flags="1")
def defs_overlap_in_threads(it: Client) -> Any:
    calls = [it.handle.waits.remote("overlap") for _ in range(3)]
    inside = len(wait_for_notes("overlap", 3))
    open_gate("overlap")
    return [inside, [call.result() for call in calls]]


@scenario("Where a `def` runs", places)
def context_variables_of_one_request_are_not_seen_by_the_next(it: Client) -> Any:
    it.call("sets_context")
    return it.call("reads_context") in ("unset", "of the constructor")


# Generators


@scenario("Streams", places)
def an_async_generator_streams_on_the_loop(it: Client) -> Any:
    return list(it.handle.options(stream=True).async_generator.remote())


@scenario("Streams", places)
def a_generator_runs_in_one_thread_from_its_first_item_to_its_last(it: Client) -> Any:
    items = list(it.handle.options(stream=True).generator.remote())
    return [{place for place, _ in items}.pop(), len({number for _, number in items})]


@scenario("Streams", places)
def a_generator_that_a_def_returns_streams(it: Client) -> Any:
    return list(it.handle.options(stream=True).returns_generator.remote())


@scenario(
    "Streams",
    places,
    Deviation(ONE_RULE, row="`def` that returns an async generator, flag 1", flags="1"),
)
def an_async_generator_that_a_def_returns_streams(it: Client) -> Any:
    stream = it.handle.options(stream=True).returns_async_generator.remote()
    return outcome(lambda: list(stream))


@scenario("Streams", places)
def a_generator_that_a_coroutine_returns_streams_on_the_loop(it: Client) -> Any:
    return list(it.handle.options(stream=True).coroutine_of_generator.remote())


# The warning


class Warned:
    def __init__(self) -> None:
        warnings.simplefilter("always")
        warnings.showwarning = self.show  # type: ignore[assignment]

    def show(self, message: Any, category: type, *_: Any) -> None:
        said = " ".join(str(message).split())
        if any(f"{name}'" in said for name in ("first", "second", "items")):
            note("warned", [issubclass(category, UserWarning), said])

    def first(self) -> None:
        pass

    def second(self) -> None:
        pass

    def items(self) -> Iterator[int]:
        yield 1


def warned() -> Any:
    return serve.deployment(Warned).bind()


def what_was_warned_of(it: Client) -> list[Any]:
    for method in ("first", "second", "first", "second"):
        it.call(method)
    list(it.handle.options(stream=True).items.remote())
    return notes("warned")


@scenario("A `def` on the event loop", warned)
def a_def_on_the_loop_is_a_user_warning_with_the_flag_in_its_text(it: Client) -> Any:
    found = what_was_warned_of(it)
    name = "RAY_SERVE_RUN_SYNC_IN_THREADPOOL"
    said = {(is_user_warning, name in text) for is_user_warning, text in found}
    return sorted(said)


@scenario(
    "A `def` on the event loop",
    warned,
    Deviation("every method is a decision", row="the warning", flags="0"),
)
def each_method_is_warned_of_once(it: Client) -> Any:
    return len(what_was_warned_of(it))


@scenario(
    "A `def` on the event loop",
    warned,
    Deviation("Ray Serve's words, with file and line", row="the warning", flags="0"),
)
def the_words_of_the_warning(it: Client) -> Any:
    return [text.partition(". ")[0] for _, text in what_was_warned_of(it)][:1]


class Hooks:
    """`reconfigure` and `check_health` are methods like any other."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def reconfigure(self, config: Any) -> None:
        self.seen.append(f"reconfigure {here()}")

    def check_health(self) -> None:
        self.seen.append(f"check_health {here()}")

    async def places(self) -> list[str]:
        return self.seen[:2]


def hooks() -> Any:
    return serve.deployment(user_config={"a": 1}, health_check_period_s=600)(Hooks).bind()


@scenario("Where a `def` runs", hooks)
def hooks_run_where_the_flag_says_configuration_first(it: Client) -> Any:
    return it.call("places")


def a_function(*args: Any) -> Any:
    return here()


def function_deployment() -> Any:
    return serve.deployment(a_function).bind()


@scenario("Where a `def` runs", function_deployment)
def a_function_deployment_runs_as_a_method_does(it: Client) -> Any:
    return [it.handle.remote().result(), it.get().text]


# @serve.method: `ingress` only


def chosen() -> Any:
    class Chosen:
        @serve.method(execution="event_loop")
        def on_loop(self) -> str:
            return here()

        @serve.method(execution="threadpool")
        def in_thread(self) -> str:
            return here()

        @serve.method(execution="serial")
        def serial(self) -> str:
            return here()

    return serve.deployment(Chosen).bind()


@scenario("Where a `def` runs", chosen, columns=("local", "ray"))
def a_method_says_where_it_runs_whatever_the_flag(it: Client) -> Any:
    return [it.call("on_loop"), it.call("in_thread"), it.call("serial")]


class Slow:
    def __init__(self) -> None:
        self.most = 0
        self.inside = 0
        self.lock = threading.Lock()

    def visit(self) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(0.01)
        with self.lock:
            self.inside -= 1

    async def seen(self) -> int:
        return self.most


def slow() -> Any:
    return serve.deployment(max_ongoing_requests=2)(Slow).bind()


@scenario("Where a `def` runs", slow)
def no_more_defs_run_at_once_than_ongoing_requests_are_allowed(it: Client) -> Any:
    for call in [it.handle.visit.remote() for _ in range(12)]:
        call.result()
    return it.call("seen") <= 2


async def held(key: str) -> str:
    await hold(key)
    return "done"


def coroutine_deployment() -> Any:
    return serve.deployment(held).bind()


@scenario("Where an `async def` runs", coroutine_deployment)
def coroutines_overlap_on_the_loop(it: Client) -> Any:
    calls = [it.handle.remote("coroutines") for _ in range(4)]
    inside = len(wait_for_notes("coroutines", 4))
    open_gate("coroutines")
    return [inside, [call.result() for call in calls]]
