"""`execution.execution`: the table in its docstring, observed from inside the callables."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from functools import partial, wraps
from typing import Any

import pytest

from ingress.core.calls.loops import BorrowedLoop
from ingress.core.execution.execution import (
    ExecutionMode,
    ExecutionPlan,
    Kind,
    Role,
    call_inline,
    kind,
    name_of,
    plan,
)
from ingress.core.execution.threads import WorkerPool
from ingress.exceptions import SyncMethodOnEventLoopWarning, UserCodeExit
from tests.fakes import together
from tests.servers import until

pytestmark = pytest.mark.anyio
ON_LOOP, IN_THREAD = ExecutionMode.EVENT_LOOP, ExecutionMode.THREADPOOL
Planned = Callable[..., ExecutionPlan]
PATIENCE_S = 60.0
WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="unset")


@pytest.fixture
async def planned() -> AsyncIterator[Planned]:
    """Return a function that plans a callable, by default as a method at flag 0."""
    pool = WorkerPool(BorrowedLoop("pool", asyncio.get_running_loop()), 4)

    def planned(func: Any, role: Role = Role.METHOD, *, flag: bool = False) -> ExecutionPlan:
        return plan(func, role, sync_in_threadpool=flag, pool=pool)

    yield planned
    pool.shutdown()
    assert pool.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore the warning at flag 0 that most plans cause; other tests check it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyncMethodOnEventLoopWarning)
        yield


def here() -> ExecutionMode:
    """Return the mode of this line: a worker thread has no running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return IN_THREAD
    return ON_LOOP


async def here_async() -> ExecutionMode:
    return here()


def gen() -> Iterator[ExecutionMode]:
    yield here()


async def agen() -> AsyncIterator[ExecutionMode]:
    yield here()


class Here:
    def __call__(self) -> ExecutionMode:
        return here()

    def method(self) -> ExecutionMode:
        return here()

    static = staticmethod(here)

    @classmethod
    def of_class(cls) -> ExecutionMode:
        return here()


class HereAsync:
    async def __call__(self) -> ExecutionMode:
        return here()

    async def method(self) -> ExecutionMode:
        return here()

    static = staticmethod(here_async)


class HereGen:
    def __call__(self) -> Iterator[ExecutionMode]:
        yield here()

    async def agen(self) -> AsyncIterator[ExecutionMode]:
        yield here()


class CallsAnObject:
    __call__ = HereAsync()


def sync_wrapper(func: Callable[[], Any]) -> Callable[[], Any]:
    @wraps(func)
    def wrapper() -> Any:
        return func()

    return wrapper


@pytest.mark.parametrize(
    "func",
    [here, Here(), Here().method, Here.static, Here.of_class, partial(here), partial(Here())],
    ids=["function", "object", "bound", "static", "class", "partial", "partial-object"],
)
@pytest.mark.parametrize(
    ("role", "flag", "expected"),
    [
        pytest.param(Role.METHOD, False, ON_LOOP, id="method-0"),
        pytest.param(Role.METHOD, True, IN_THREAD, id="method-1"),
        pytest.param(Role.ENDPOINT, False, IN_THREAD, id="endpoint-ignores-the-flag"),
        pytest.param(Role.ENDPOINT, True, IN_THREAD, id="endpoint-1"),
        pytest.param(Role.LIFECYCLE, False, ON_LOOP, id="lifecycle-0"),
        pytest.param(Role.LIFECYCLE, True, ON_LOOP, id="lifecycle-ignores-the-flag"),
        pytest.param(Role.BATCH, False, IN_THREAD, id="batch-ignores-the-flag"),
    ],
)
async def test_def_runs_where_its_role_says(
    func: Callable[[], Any], role: Role, flag: bool, expected: ExecutionMode, planned: Planned
) -> None:
    execution = planned(func, role, flag=flag)

    assert await execution.run() is execution.mode is expected


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    "func",
    [
        here_async,
        HereAsync(),
        HereAsync().method,
        HereAsync.static,
        partial(here_async),
        partial(partial(HereAsync().method)),
        CallsAnObject(),
    ],
    ids=["function", "object", "bound", "static", "partial", "partial-bound", "nested-object"],
)
async def test_async_def_never_leaves_the_loop(
    func: Callable[[], Any], role: Role, planned: Planned
) -> None:
    execution = planned(func, role, flag=True)

    assert await execution.run() is execution.mode is ON_LOOP


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (gen, Kind.GENERATOR),
        (HereGen(), Kind.GENERATOR),
        (partial(HereGen()), Kind.GENERATOR),
        (agen, Kind.ASYNC_GENERATOR),
        (HereGen().agen, Kind.ASYNC_GENERATOR),
        (sync_wrapper(here_async), Kind.FUNCTION),
        (sync_wrapper(gen), Kind.FUNCTION),
        (functools.lru_cache(here), Kind.FUNCTION),
        (len, Kind.FUNCTION),
        (Here, Kind.FUNCTION),
        (HereAsync, Kind.FUNCTION),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else name_of(value),
)
async def test_how_it_is_written_is_seen_through_partials_and_objects_not_through_wraps(
    func: Callable[..., Any], expected: Kind
) -> None:
    assert kind(func) is expected


@pytest.mark.parametrize(
    "func",
    [
        sync_wrapper(here_async),
        partial(sync_wrapper(here_async)),
        sync_wrapper(sync_wrapper(HereAsync())),
        functools.update_wrapper(Here(), here_async),
    ],
    ids=["function", "partial", "twice", "object"],
)
async def test_an_endpoint_runs_where_fastapi_runs_it_which_looks_through_wraps(
    func: Callable[..., Any], planned: Planned
) -> None:
    assert planned(func, Role.ENDPOINT).where == ON_LOOP.value
    assert planned(func, Role.METHOD, flag=True).where == IN_THREAD.value


async def test_a_builtin_counts_as_def_and_does_not_warn(planned: Planned) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await planned(len).run([1, 2]) == 2


@pytest.mark.parametrize("func", [here, here_async, gen, agen], ids=lambda func: func.__name__)
@pytest.mark.parametrize("flag", [False, True])
async def test_a_plan_says_what_happens_and_why(
    func: Callable[..., Any], flag: bool, planned: Planned
) -> None:
    execution = planned(func, flag=flag)

    reason = "async def" if func in (here_async, agen) else f"IN_THREADPOOL={int(flag)}"
    assert reason in execution.reason
    assert execution.name == func.__name__


# Generators.


@pytest.mark.parametrize("flag", [False, True], ids=["loop", "thread"])
async def test_a_sync_generator_keeps_one_thread_and_context(flag: bool, planned: Planned) -> None:
    threads: list[str] = []

    def items() -> Iterator[str]:
        token = WHO.set("mine")
        for _ in range(40):
            threads.append(threading.current_thread().name)
            yield WHO.get()
        WHO.reset(token)
        threads.append(threading.current_thread().name)

    execution = planned(items, flag=flag)

    assert [item async for item in execution.stream()] == ["mine"] * 40
    assert len(threads) == 41
    assert len(set(threads)) == 1
    assert threads[0].startswith("pool-worker") == flag


@pytest.mark.parametrize("flag", [False, True], ids=["0", "1"])
@pytest.mark.parametrize("is_async", [False, True], ids=["gen", "agen"])
async def test_leaving_early_runs_the_finally_where_the_generator_ran(
    flag: bool, is_async: bool, planned: Planned
) -> None:
    seen: list[str] = []

    def note() -> None:
        seen.append(threading.current_thread().name)

    def items() -> Iterator[int]:
        note()
        try:
            yield from range(100)
        finally:
            note()

    async def aitems() -> AsyncIterator[int]:
        note()
        try:
            for number in range(100):
                yield number
        finally:
            await asyncio.sleep(0)
            note()

    stream = planned(aitems if is_async else items, flag=flag).stream()
    assert await anext(stream) == 0
    await stream.aclose()

    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0].startswith("pool-worker") == (flag and not is_async)


# Containment.

RAISED = [
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    StopIteration,
    RecursionError,
    ValueError,
]
BECOMES: dict[type[BaseException], type[Exception]] = {
    StopIteration: RuntimeError,
    RecursionError: RecursionError,
    ValueError: ValueError,
}


def raising(error: type[BaseException], how: str) -> Callable[[], Any]:
    """Return a callable that raises `error`, a generator after one item."""

    def function() -> None:
        raise error

    async def coroutine() -> None:
        raise error

    def generator() -> Iterator[int]:
        yield 1
        raise error

    async def async_generator() -> AsyncIterator[int]:
        yield 1
        raise error

    def returns_awaitable() -> Any:
        return coroutine()

    return {
        "def": function,
        "async": coroutine,
        "gen": generator,
        "agen": async_generator,
        "awaitable": returns_awaitable,
    }[how]


def contains(error: BaseException, raised: type[BaseException]) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if type(seen) is raised:
            return True
        seen = seen.__cause__
    return False


@pytest.mark.parametrize("flag", [False, True], ids=["0", "1"])
@pytest.mark.parametrize("how", ["def", "async", "awaitable", "gen", "agen"])
@pytest.mark.parametrize("error", RAISED, ids=lambda error: error.__name__)
async def test_whatever_user_code_raises_comes_as_an_exception(
    error: type[BaseException], how: str, flag: bool, planned: Planned
) -> None:
    execution = planned(raising(error, how), flag=flag)
    expected = BECOMES.get(error, UserCodeExit)
    got: list[int] = []

    with pytest.raises(expected) as caught:  # noqa: PT012
        if how in ("gen", "agen"):
            async for item in execution.stream():
                got += [item]
        else:
            await execution.run()

    assert got == ([1] if how in ("gen", "agen") else [])
    assert contains(caught.value, error)
    if expected is UserCodeExit:
        assert execution.name in str(caught.value)


@pytest.mark.parametrize("flag", [False, True], ids=["0", "1"])
@pytest.mark.parametrize("how", ["gen", "agen"])
async def test_an_exit_from_the_finally_of_a_closed_generator_is_contained_too(
    how: str, flag: bool, planned: Planned
) -> None:
    closed = []

    def items() -> Generator[int, None, None]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(1)
            sys.exit(3)

    async def aitems() -> AsyncIterator[int]:
        with closing(items()) as inner:
            for item in inner:
                yield item

    stream = planned(items if how == "gen" else aitems, flag=flag).stream()
    await anext(stream)
    try:
        await stream.aclose()
    except UserCodeExit:
        pass

    assert closed == [1]


@pytest.mark.parametrize("flag", [False, True], ids=["0", "1"])
@pytest.mark.parametrize("how", ["async", "def"])
async def test_a_requested_cancellation_stays_one(how: str, flag: bool, planned: Planned) -> None:
    started = threading.Event()
    leave = threading.Event()

    def function() -> Any:
        started.set()
        if flag:
            return leave.wait(PATIENCE_S)
        return asyncio.Event().wait()

    async def coroutine() -> None:
        started.set()
        await asyncio.Event().wait()

    execution = planned(coroutine if how == "async" else function, flag=flag)
    task = asyncio.ensure_future(execution.run())
    await until(started.is_set)
    task.cancel()
    leave.set()

    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert caught.value.__cause__ is not caught.value


async def test_closing_an_on_loop_stream_is_not_the_users_generator_exit(planned: Planned) -> None:
    stream = planned(gen).stream()
    await anext(stream)

    await stream.aclose()  # raises nothing

    assert [item async for item in stream] == []


# The warning.


MODEL = """
class Model:
    def predict(self): return 1
    def items(self): yield 1
    async def apredict(self): return 1
"""
files = itertools.count()


def fresh() -> type:
    """Return a class from a new file, so that a warning once per process comes once per test."""
    namespace: dict[str, Any] = {}
    exec(compile(MODEL, f"model_{next(files)}.py", "exec"), namespace)
    return namespace["Model"]  # type: ignore[no-any-return]


async def call(execution: ExecutionPlan) -> None:
    if execution.kind is Kind.GENERATOR:
        async for _ in execution.stream():
            pass
    else:
        await execution.run()


async def test_the_warning_comes_once_although_replicas_call_at_once(
    switch_interval: None, planned: Planned
) -> None:
    model = fresh()
    plans = [planned(model().predict) for _ in range(8)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await asyncio.to_thread(together, *[partial(asyncio.run, call(each)) for each in plans])

    assert len(caught) == 1


async def test_like_methods_in_two_files_warn_for_themselves(planned: Planned) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (fresh(), fresh()):
            await planned(model().predict).run()

    assert len({each.filename for each in caught}) == 2


@pytest.mark.parametrize("method", ["predict", "items"])
async def test_warnings_as_errors_do_not_fail_the_request(method: str, planned: Planned) -> None:
    execution = planned(getattr(fresh()(), method))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await call(execution)


@pytest.mark.parametrize(
    ("method", "role", "flag"),
    [
        ("predict", Role.METHOD, True),
        ("items", Role.METHOD, True),
        ("predict", Role.ENDPOINT, False),
        ("predict", Role.LIFECYCLE, False),
        ("predict", Role.BATCH, False),
        ("apredict", Role.METHOD, False),
    ],
)
async def test_nothing_else_warns(method: str, role: Role, flag: bool, planned: Planned) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await call(planned(getattr(fresh()(), method), role, flag=flag))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ValueError("x"), ValueError),
        (StopIteration(1), RuntimeError),
        (SystemExit(1), UserCodeExit),
        (asyncio.CancelledError(), UserCodeExit),
        (GeneratorExit(), UserCodeExit),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_call_inline_is_contained(raised: BaseException, expected: type[Exception]) -> None:
    def func(value: int) -> int:
        if value:
            raise raised
        return value

    assert call_inline(func, 0) == 0
    with pytest.raises(expected) as found:
        call_inline(func, 1)
    assert found.value is raised or found.value.__cause__ is raised


async def test_the_items_of_a_generator_do_not_end_the_thread_that_asks_for_them(
    planned: Planned,
) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise SystemExit

    given = planned(items, flag=True).items()
    assert next(given) == 1
    with pytest.raises(UserCodeExit):
        next(given)
