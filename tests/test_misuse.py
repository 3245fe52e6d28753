"""Mistakes are refused at once, with the right error and a message that says what to do.

A message contains the words a user would search for. Cases with the same number are one
mistake.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from fastapi import FastAPI
from starlette.requests import Request

import ingress as serve
from ingress.base.settings import SYNC_IN_THREADPOOL
from ingress.exceptions import RayServeException
from tests.servers import PATIENCE_S, bind

SOON_S = 1.0


class Model:
    def __init__(self, size: int = 1) -> None:
        self.size = size

    async def __call__(self, request: Request) -> str:
        return "answered"

    async def items(self) -> Any:
        yield "item"


class Empty: ...


async def function(request: Request) -> str:
    return "answered"


def deploy(**options: Any) -> Any:
    return serve.deployment(**options)(Model)


def run(target: Any, **options: Any) -> Any:
    return serve.run(target, **{"route_prefix": None, **options})


def with_route() -> Any:
    app = FastAPI()

    class Routed:
        @app.get("/")
        async def route(self) -> None: ...

    return app, Routed


def call_and_route() -> Any:
    app, routed = with_route()
    return serve.ingress(app)(type("Both", (routed,), {"__call__": function}))


def route_without_self() -> Any:
    app = FastAPI()

    class Routed:
        @app.get("/")
        async def route() -> None: ...  # type: ignore[misc]

    return serve.ingress(app)(Routed)


def swapped() -> Any:
    app, routed = with_route()
    deployment: Any = serve.deployment(routed)
    return serve.ingress(app)(deployment)


def batch_over_route() -> Any:
    app = FastAPI()

    class Routed:
        @serve.batch
        @app.get("/")
        async def route(self, items: list[int]) -> list[int]:
            return items

    return serve.ingress(app)(Routed)


def subclass() -> Any:
    deployment: Any = serve.deployment(Model)

    class Other(deployment): ...  # type: ignore[misc]


def both_limits() -> Any:
    return deploy(max_ongoing_requests=1, max_concurrent_queries=1)


def two_with_one_prefix() -> None:
    run(deploy().bind(), name="one", route_prefix="/same")
    run(deploy().bind(), name="two", route_prefix="/same")


def result_in_a_loop() -> None:
    handle = run(deploy().bind())

    async def ask() -> None:
        handle.remote(None).result()

    asyncio.run(ask())


def unknown_method() -> None:
    run(deploy().bind()).itemz.remote()


def generator_without_stream() -> None:
    run(deploy().bind()).items.remote().result(timeout_s=PATIENCE_S)


def stream_without_generator() -> None:
    [*run(deploy().bind()).options(stream=True).remote(None)]


def busy_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        serve.start({"port": busy.getsockname()[1]})


def bad_host() -> None:
    serve.start({"host": "256.0.0.1", "port": 0})


def batch_of(result: Any) -> Callable[[], None]:
    """Return the mistake of a batch handler that returns `result` for two items."""

    def mistake() -> None:
        class Batched:
            @serve.batch(max_batch_size=2, batch_wait_timeout_s=5)
            async def __call__(self, items: list[int]) -> Any:
                return result

        handle = run(serve.deployment(Batched).bind())
        both = [handle.remote(1), handle.remote(2)]
        for each in both:
            with pytest.raises(Exception):  # noqa: B017
                each.result(timeout_s=PATIENCE_S)
        both[0].result(timeout_s=PATIENCE_S)

    return mistake


def wrong_batch(**options: Any) -> Callable[[], Any]:
    return lambda: serve.batch(**options)(lambda items: items)


Mistake = Callable[[], Any]
CASES: list[tuple[int, Mistake, tuple[type[Exception], ...], list[str]]] = [
    (
        1,
        lambda: serve.ingress(FastAPI())(cast(Any, function)),
        (ValueError,),
        ["must be used with a class"],
    ),
    (2, call_and_route, (ValueError,), ["__call__"]),
    (3, swapped, (TypeError,), ["@serve.deployment above @serve.ingress"]),
    (4, lambda: serve.ingress(Model), (TypeError,), ["@serve.ingress(app)"]),
    (5, lambda: serve.ingress(None)(Empty), (ValueError,), ["Empty", "__serve_build_asgi_app__"]),
    (6, lambda: serve.ingress("app")(Model), (TypeError,), ["str", "FastAPI"]),
    (7, route_without_self, (RayServeException,), ["self", "route"]),
    (8, lambda: serve.deployment(Model()), (TypeError,), ["class or function"]),
    (9, lambda: deploy()(), (RuntimeError,), ["bind("]),
    (10, lambda: run(deploy()), (TypeError,), ["bind()"]),
    *(
        (11, lambda n=n: deploy(num_replicas=n), (ValueError, TypeError), ["num_replicas", repr(n)])
        for n in (0, -1, 1.5, True, "many")
    ),
    (
        12,
        lambda: deploy(num_replicas=1, autoscaling_config={"min_replicas": 1}),
        (ValueError,),
        ["Manually setting num_replicas is not allowed"],
    ),
    (13, lambda: deploy(max_ongoing_requests=None), (ValueError,), ["null"]),
    *(
        (
            13,
            lambda n=n: deploy(max_ongoing_requests=n),
            (ValueError, TypeError),
            ["max_ongoing_requests", repr(n)],
        )
        for n in (0, -1, "5", True, float("nan"))
    ),
    *(
        (
            14,
            lambda n=n: deploy(max_queued_requests=n),
            (ValueError, TypeError),
            ["max_queued_requests", repr(n), "-1"],
        )
        for n in (0, -2, 1.5)
    ),
    (15, lambda: deploy(max_ongoing_request=1), (TypeError,), ["max_ongoing_requests"]),
    (15, both_limits, (ValueError, TypeError), ["max_concurrent_queries"]),
    (
        16,
        lambda: deploy(autoscaling_config={"min_replicas": 3, "max_replicas": 2}),
        (ValueError,),
        ["3", "2"],
    ),
    *(
        (17, lambda n=n: deploy(name=n), (ValueError, TypeError), ["name", repr(n)])
        for n in ("a#b", "", 7)
    ),
    *(
        (
            18,
            lambda p=p: run(deploy().bind(), route_prefix=p),
            (ValueError,),
            ["route_prefix"],
        )
        for p in ("api", "/api/", "/{x}")
    ),
    (19, two_with_one_prefix, (RayServeException,), ["one", "/same"]),
    (20, lambda: serve.deployment(function).bind(1), (ValueError,), ["function deployments"]),
    (21, lambda: deploy().bind(1, 2, 3), (TypeError,), ["size"]),
    (22, lambda: run(deploy(user_config={}).bind()), (ValueError,), ["Model", "reconfigure"]),
    (23, lambda: deploy(user_config={"a": [object()]}), (ValueError,), ["a"]),
    (24, lambda: serve.batch(cast(Any, 7)), (TypeError,), ["7"]),
    *(
        (25, wrong_batch(max_batch_size=n), (ValueError, TypeError), ["max_batch_size", repr(n)])
        for n in (0, 1.5, "8")
    ),
    *(
        (
            25,
            wrong_batch(batch_wait_timeout_s=n),
            (ValueError, TypeError),
            ["batch_wait_timeout_s", repr(n)],
        )
        for n in (-1, float("nan"))
    ),
    (
        25,
        wrong_batch(max_concurrent_batches=0),
        (ValueError, TypeError),
        ["max_concurrent_batches"],
    ),
    *(
        (26, batch_of(result), (Exception,), ["batch"])
        for result in ([1], [1, 2, 3], None, {"a": 1}, (x for x in "ab"))
    ),
    (28, batch_over_route, (TypeError,), ["route"]),
    (29, result_in_a_loop, (RuntimeError,), ["asyncio", "await"]),
    (30, generator_without_stream, (TypeError,), ["stream=True"]),
    (30, stream_without_generator, (TypeError,), ["stream"]),
    (31, unknown_method, (RayServeException, AttributeError), ["itemz", "items"]),
    (32, serve.get_replica_context, (RayServeException,), ["may only be called from within"]),
    (36, busy_port, (RuntimeError,), ["Failed to bind to address", "127.0.0.1"]),
    (36, bad_host, (RuntimeError,), ["256.0.0.1"]),
    (45, subclass, (TypeError,), ["func_or_class"]),
]


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    yield
    serve.shutdown()


@pytest.mark.reliability("C09")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("mistake", "types", "parts"),
    [pytest.param(*case, id=f"{number}") for number, *case in CASES],
)
def test_a_mistake_is_refused_where_it_is_made(
    mistake: Mistake, types: tuple[type[Exception], ...], parts: list[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(types) as refused:
        mistake()

    assert time.monotonic() - began < SOON_S
    said = str(refused.value)
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.reliability("C09")
def test_a_flag_that_is_neither_0_nor_1_is_refused_when_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "yes")
    with pytest.raises(ValueError, match=re.escape("0 or 1, got 'yes'")):
        run(bind(serve.deployment(Model)))
