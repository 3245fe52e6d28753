"""The place of `__call__` for an HTTP request; `test_methods` has more ways to write a method."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial, wraps
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

import ingress as serve
from ingress.core.base.settings import Settings
from tests.conformance.observe import FEW_FLAGS, here, served

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    # Python 3.13 on a partial that is a class's attribute; until then it is no method.
    pytest.mark.filterwarnings("ignore:functools.partial will be:FutureWarning"),
]

LOOP, FLAG, WORKER = "the loop", "where the flag says", "a worker thread"


class AsyncDef:
    async def __call__(self, request: Request) -> str:
        return here()


class Def:
    def __call__(self, request: Request) -> str:
        return here()


class DefWithoutRequest:
    def __call__(self) -> str:
        return here()


class StaticDef:
    @staticmethod
    def __call__(request: Request) -> str:
        return here()


class PartialAsCall:
    __call__ = partial(lambda text, request: f"{text}{here()}", "")


class CallableObject:
    def __call__(self, request: Request) -> str:
        return here()


class ObjectAsCall:
    __call__ = CallableObject()


class ReturnsCoroutine:
    def __call__(self, request: Request) -> Coroutine[Any, Any, str]:
        before = here()

        async def after() -> str:
            return f"{before}\n{here()}"

        return after()


def traced(func: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(func)
    def wrapper(*args: Any) -> Any:
        return func(*args)

    return wrapper


class WrappedAsyncDef:
    @traced
    async def __call__(self, request: Request) -> str:
        return here()


class AsyncGenerator:
    async def __call__(self, request: Request) -> AsyncIterator[str]:
        for _ in range(3):
            yield f"{here()}\n"


class Generator:
    def __call__(self, request: Request) -> Iterator[str]:
        for _ in range(3):
            yield f"{here()}\n"


class AsyncDefReturnsGenerator:
    async def __call__(self, request: Request) -> Iterator[str]:
        return Generator()(request)


class StreamingResponseOfIterator:
    async def __call__(self, request: Request) -> StreamingResponse:
        return StreamingResponse(Generator()(request))


class StreamingResponseOfAsyncIterator:
    async def __call__(self, request: Request) -> StreamingResponse:
        return StreamingResponse(AsyncGenerator()(request))


async def async_function(request: Request) -> str:
    return here()


def def_function(request: Request) -> str:
    return here()


@pytest.mark.parametrize(
    ("func_or_class", "places"),
    [
        (AsyncDef, [LOOP]),
        (Def, [FLAG]),
        (DefWithoutRequest, [FLAG]),
        (StaticDef, [FLAG]),
        (PartialAsCall, [FLAG]),
        (ObjectAsCall, [FLAG]),
        (ReturnsCoroutine, [FLAG, LOOP]),
        (WrappedAsyncDef, [LOOP]),
        (AsyncGenerator, [LOOP] * 3),
        (Generator, [FLAG] * 3),
        (AsyncDefReturnsGenerator, [LOOP] * 3),
        (StreamingResponseOfIterator, [WORKER] * 3),
        (StreamingResponseOfAsyncIterator, [LOOP] * 3),
        (async_function, [LOOP]),
        (def_function, [FLAG]),
    ],
)
@FEW_FLAGS
def test_a_request_runs_where_the_table_says(
    flags: Settings, func_or_class: Any, places: list[str]
) -> None:
    with served(serve.deployment(func_or_class).bind(), flags) as it:
        response = it.get()

        flag = it.worker if flags.run_sync_in_threadpool else it.loop
        where = {LOOP: it.loop, FLAG: flag, WORKER: it.worker}
        assert response.text.splitlines() == [where[place] for place in places]
        assert response.status_code == 200
