"""The places of a deployment's callables, called by handle, observed inside, at every flag value.

The cases are those of the table "Where each callable runs" (Ray 2.60.0), the places those of
`ingress`: the flag decides for a `def`, all other code runs on the user event loop.
"""

from __future__ import annotations

import asyncio
import gc
import operator
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.settings import Settings
from tests.conformance.observe import FEW_FLAGS, TIMEOUT_S, Served, here, here_async, served

pytestmark = pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")

LOOP, FLAG = "the loop", "where the flag says"


def traced(func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method; the result is a `def`, which notes its place in `self.before`."""

    @wraps(func)
    def wrapper(self: Any, *args: Any) -> Any:
        self.before = here()
        return func(self, *args)

    return wrapper


def expected(served: Served, flags: Settings, *places: str) -> list[str]:
    """Return the value of `here()` at each of the places."""
    flag = served.worker if flags.run_sync_in_threadpool else served.loop
    return [flag if place == FLAG else served.loop for place in places]


class Here:
    def __call__(self) -> list[str]:
        return [here()]


class HereAsync:
    async def __call__(self) -> list[str]:
        return [here()]


class Methods:
    """Methods that return the places of their lines."""

    before: str

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.lambda_attribute = lambda: [here()]
        self.callable_object = Here()
        self.async_callable_object = HereAsync()
        self.partial_of_def = partial(self.def_method)
        self.partial_of_async_def = partial(self.async_def)
        self.partial_of_partial = partial(self.partial_of_def)
        self.c_callable = partial(operator.call, self.def_method)

    async def async_def(self) -> list[str]:
        return [here()]

    def def_method(self) -> list[str]:
        return [here()]

    @staticmethod
    def static_def() -> list[str]:
        return [here()]

    @classmethod
    def class_def(cls) -> list[str]:
        return [here()]

    @staticmethod
    async def static_async_def() -> list[str]:
        return [here()]

    @classmethod
    async def class_async_def(cls) -> list[str]:
        return [here()]

    class_lambda = lambda self: [here()]  # noqa: E731

    def returns_coroutine(self) -> Coroutine[Any, Any, list[str]]:
        before = here()

        async def after() -> list[str]:
            return [before, here()]

        return after()

    def returns_future(self) -> asyncio.Future[list[str]]:
        before = here()
        future: asyncio.Future[list[str]] = self.loop.create_future()
        self.loop.call_soon_threadsafe(lambda: future.set_result([before, here()]))
        return future

    def returns_task(self) -> asyncio.Task[list[str]]:
        before = here()

        async def after() -> list[str]:
            return [before, here()]

        made = []
        done = threading.Event()

        def make() -> None:
            made.append(self.loop.create_task(after()))
            done.set()

        if before.startswith("loop"):
            make()
        else:
            self.loop.call_soon_threadsafe(make)
        assert done.wait(TIMEOUT_S)
        return made[0]

    def returns_awaitable(self) -> Any:
        before = here()

        class After:
            def __await__(self) -> Generator[Any, None, list[str]]:
                return after().__await__()

        async def after() -> list[str]:
            return [before, here()]

        return After()

    @traced
    async def wrapped_async_def(self) -> list[str]:
        return [self.before, here()]


PLACES: dict[str, list[str]] = {
    "async_def": [LOOP],
    "static_async_def": [LOOP],
    "class_async_def": [LOOP],
    "partial_of_async_def": [LOOP],
    "async_callable_object": [LOOP],
    "def_method": [FLAG],
    "lambda_attribute": [FLAG],
    "class_lambda": [FLAG],
    "static_def": [FLAG],
    "class_def": [FLAG],
    "partial_of_def": [FLAG],
    "partial_of_partial": [FLAG],
    "callable_object": [FLAG],
    "c_callable": [FLAG],
    "returns_coroutine": [FLAG, LOOP],
    "returns_future": [FLAG, LOOP],
    "returns_task": [FLAG, LOOP],
    "returns_awaitable": [FLAG, LOOP],
    "wrapped_async_def": [FLAG, LOOP],
}


def test_each_method_runs_where_the_table_says(flags: Settings) -> None:
    with served(serve.deployment(Methods).bind(), flags) as it:
        found = {
            name: it.handle.options(method_name=name).remote().result(timeout_s=TIMEOUT_S)
            for name in PLACES
        }
        assert found == {name: expected(it, flags, *places) for name, places in PLACES.items()}


def test_a_wrapper_that_runs_a_loop_of_its_own_works_in_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")

    class K:
        def method(self) -> str:
            return asyncio.run(here_async())

    with served(serve.deployment(K).bind()) as it:
        inside = it.handle.method.remote().result(timeout_s=TIMEOUT_S)

    assert inside.startswith("loop K#0-worker-")


@FEW_FLAGS
def test_async_init_and_its_methods_share_one_loop(flags: Settings) -> None:
    class K:
        async def __init__(self) -> None:  # type: ignore[misc]  # Ray Serve's extension
            self.loop = asyncio.get_running_loop()

        async def is_same(self) -> bool:
            return asyncio.get_running_loop() is self.loop

    with served(serve.deployment(K).bind(), flags) as it:
        assert it.handle.is_same.remote().result(timeout_s=TIMEOUT_S)


async def async_function(x: int) -> list[Any]:
    return [here(), x]


def def_function(x: int) -> list[Any]:
    return [here(), x]


@FEW_FLAGS
@pytest.mark.parametrize(("func", "place"), [(async_function, LOOP), (def_function, FLAG)])
def test_a_function_deployment_runs_where_its_def_says(
    flags: Settings, func: Callable[..., Any], place: str
) -> None:
    with served(serve.deployment(func).bind(), flags) as it:
        assert it.handle.remote(7).result(timeout_s=TIMEOUT_S) == [*expected(it, flags, place), 7]


class Streams:
    """Generators that yield their place and thread."""

    def __init__(self) -> None:
        self.partial_of_def_generator = partial(self.def_generator)

    async def async_generator(self) -> AsyncIterator[tuple[str, int]]:
        for _ in range(3):
            yield here(), threading.get_ident()

    def def_generator(self) -> Iterator[tuple[str, int]]:
        for _ in range(3):
            yield here(), threading.get_ident()

    def returns_generator(self) -> Iterator[tuple[str, int]]:
        return self.def_generator()

    def returns_async_generator(self) -> AsyncIterator[tuple[str, int]]:
        return self.async_generator()

    async def async_def_returns_generator(self) -> Iterator[tuple[str, int]]:
        return self.def_generator()

    async def async_def_returns_async_generator(self) -> AsyncIterator[tuple[str, int]]:
        return self.async_generator()

    @traced
    def wrapped_generator(self) -> Iterator[tuple[str, int]]:
        yield here(), threading.get_ident()

    async def no_generator(self) -> int:
        return 1


ITERATED = {
    "async_generator": LOOP,
    "def_generator": FLAG,
    "partial_of_def_generator": FLAG,
    "wrapped_generator": FLAG,
    "returns_generator": FLAG,
    "returns_async_generator": LOOP,
    "async_def_returns_generator": LOOP,
    "async_def_returns_async_generator": LOOP,
}


def test_a_generator_is_iterated_where_the_function_that_returned_it_ran(flags: Settings) -> None:
    with served(serve.deployment(Streams).bind(), flags) as it:
        for method, place in ITERATED.items():
            items = list(it.handle.options(stream=True, method_name=method).remote())
            assert {found for found, _ in items} == set(expected(it, flags, place)), method
            assert len({thread for _, thread in items}) == 1, "one thread for its whole life"


@FEW_FLAGS
def test_a_generator_without_stream_and_a_stream_without_one_are_type_errors(
    flags: Settings,
) -> None:
    with served(serve.deployment(Streams).bind(), flags) as it:
        for method in ("async_generator", "def_generator", "returns_generator"):
            message = rf"Method '{method}' returned a generator\..*options\(stream=True\)"
            with pytest.raises(TypeError, match=message):
                it.handle.options(method_name=method).remote().result(timeout_s=TIMEOUT_S)
        message = r"method 'no_generator' .* did not return a generator"
        with pytest.raises(TypeError, match=message):
            next(it.handle.options(stream=True).no_generator.remote())


@FEW_FLAGS
def test_init_and_del_run_on_the_loop_and_hooks_where_their_def_says(flags: Settings) -> None:
    places: dict[str, str] = {}

    class Def:
        def __init__(self) -> None:
            places["__init__"] = here()

        def reconfigure(self, config: dict[str, int]) -> None:
            places[f"reconfigure {config}"] = here()

        def check_health(self) -> None:
            places["check_health"] = here()

        def __del__(self) -> None:
            places["__del__"] = here()

    with served(serve.deployment(user_config={"a": 1})(Def).bind(), flags) as it:
        loop, flag = expected(it, flags, LOOP, FLAG)

    assert places == {
        "__init__": loop,
        "reconfigure {'a': 1}": flag,
        "check_health": flag,
        "__del__": loop,
    }


class Half:
    """A class whose constructor does not end well. `gone` tells that its `__del__` has run."""

    is_reached: threading.Event
    gone: list[str]

    def __init__(self) -> None:
        self.part = "part"
        raise ValueError("no weights")

    async def __del__(self) -> None:
        await asyncio.sleep(0)
        self.gone.append(self.part)

    async def __call__(self) -> None: ...


class AsyncHalf(Half):
    async def __init__(self) -> None:  # type: ignore[misc]
        self.part = "part"
        await asyncio.sleep(0)
        raise ValueError("no weights")


class EndlessHalf(Half):
    async def __init__(self) -> None:  # type: ignore[misc]
        self.part = "part"
        self.is_reached.set()
        await asyncio.Event().wait()


class SyncDelHalf(AsyncHalf):
    def __del__(self) -> None:  # type: ignore[override]
        self.gone.append(self.part)


class SyncHalf(Half):
    def __del__(self) -> None:  # type: ignore[override]
        self.gone.append(self.part)


# Ray 2.60.0, replica.py, `call_destructor`: the instance is there before its `__init__` runs.
@FEW_FLAGS
@pytest.mark.parametrize(
    "half", [Half, AsyncHalf, SyncDelHalf, SyncHalf], ids=lambda each: each.__name__
)
def test_the_del_of_an_instance_runs_once_if_its_constructor_fails(
    half: type[Half], flags: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Half, "gone", [], raising=False)

    with pytest.raises(RuntimeError, match="no weights"):
        serve.run(serve.deployment(half).bind(), route_prefix=None)
    serve.shutdown()
    gc.collect()

    assert half.gone == ["part"]


@FEW_FLAGS
def test_the_del_of_an_instance_runs_once_if_its_constructor_is_cancelled(
    flags: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Half, "gone", [], raising=False)
    monkeypatch.setattr(Half, "is_reached", threading.Event(), raising=False)
    target = serve.deployment(EndlessHalf).bind()
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(serve.run, target, route_prefix=None)
        assert EndlessHalf.is_reached.wait(TIMEOUT_S)

        serve.shutdown()

        with pytest.raises(BaseException):  # noqa: B017 - its type is no subject here
            start.result(TIMEOUT_S)
    gc.collect()
    assert EndlessHalf.gone == ["part"]


# Ray 2.60.0, replica.py, `call_reconfigure`: "only pass rank if it is an argument".
@pytest.mark.parametrize("options", [{}, {"user_config": {"a": 1}}], ids=["without", "with"])
def test_reconfigure_gets_the_rank_if_it_has_a_parameter_for_it(
    options: dict[str, Any], shutdown: None
) -> None:
    class Ranked:
        async def reconfigure(self, config: Any, rank: Any) -> None:
            self.given = config, rank.rank, rank.node_rank, rank.local_rank

        async def given_here(self) -> Any:
            return self.given, serve.get_replica_context().rank.rank

    target = serve.deployment(num_replicas=2, **options)(Ranked).bind()
    handle = serve.run(target, route_prefix=None)

    found: set[int] = set()
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < 2 and time.monotonic() < deadline:
        (config, *ranks), rank = handle.given_here.remote().result()
        assert config == options.get("user_config")
        assert ranks == [rank, 0, rank]
        found.add(rank)
    assert found == {0, 1}


@FEW_FLAGS
def test_every_async_hook_runs_on_the_loop(flags: Settings) -> None:
    places: dict[str, str] = {}

    class Async:
        async def __init__(self) -> None:  # type: ignore[misc]  # Ray Serve's extension
            places["__init__"] = here()

        async def reconfigure(self, config: dict[str, int]) -> None:
            places["reconfigure"] = here()

        async def check_health(self) -> None:
            places["check_health"] = here()

        async def __del__(self) -> None:
            places["__del__"] = here()

    with served(serve.deployment(user_config={"a": 1})(Async).bind(), flags) as it:
        loop = it.loop

    hooks = ("__init__", "reconfigure", "check_health", "__del__")
    assert places == dict.fromkeys(hooks, loop)
