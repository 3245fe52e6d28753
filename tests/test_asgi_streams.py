"""Endpoints that are generators: JSON lines and server-sent events."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.testclient import TestClient

from ingress.app.asgi import ingress
from tests.asgi_helpers import WORKER, Deployment, bound, request, serve

sse = pytest.importorskip("fastapi.sse", reason="this FastAPI has no streaming endpoints")


class Item(BaseModel):
    n: int


class TextStream(StreamingResponse):
    media_type = "text/plain"


class Streams:
    """Endpoints, written once: methods for `ingress`, bound methods for plain FastAPI."""

    def sync(self, n: int = 2) -> Iterator[Item]:
        for each in range(n):
            yield Item(n=each)

    async def on_loop(self, n: int = 2) -> AsyncIterator[Item]:
        for each in range(n):
            yield Item(n=each)

    async def included(self) -> AsyncIterator[Item]:
        yield Item(n=1)

    def events(self) -> Iterator[Item]:
        yield Item(n=1)

    def text(self) -> Iterator[str]:
        yield "text"

    def untyped(self) -> Iterator[Item]:
        yield Item(n=1)


def app_of(methods: Any) -> FastAPI:
    app, router = FastAPI(), APIRouter()
    app.get("/sync")(methods.sync)
    app.get("/async")(methods.on_loop)
    router.get("/included")(methods.included)
    app.get("/events", response_class=sse.EventSourceResponse)(methods.events)
    app.get("/text", response_class=TextStream)(methods.text)
    app.get("/untyped", response_model=None)(methods.untyped)
    app.include_router(router)
    return app


def class_app() -> type:
    return ingress(app_of(Streams))(type("Served", (Streams,), {}))


@pytest.mark.parametrize(
    "path", ["/sync?n=3", "/async", "/included", "/events", "/text", "/untyped", "/sync?n=x"]
)
def test_a_generator_answers_as_the_same_function(path: str) -> None:
    with serve(class_app()) as served, TestClient(app_of(Streams())) as plain:
        ours, theirs = served.get(path), plain.get(path)

    assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")


def test_the_schema_of_the_items_is_the_same() -> None:
    assert bound(class_app()).openapi() == app_of(Streams()).openapi()


def test_a_def_generator_is_iterated_in_one_worker_of_the_replica(app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.get("/")
        def names(self) -> Iterator[str]:
            for _ in range(3):
                yield threading.current_thread().name

    with serve(K) as client:
        names = set(client.get("/").text.split())

    assert len(names) == 1
    assert names.pop().startswith(f'"{WORKER}')


def test_a_sync_decorator_over_a_generator_method_streams(app: FastAPI) -> None:
    def logged(func: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

        return wrapper

    @ingress(app)
    class K:
        @app.get("/")
        @logged
        async def numbers(self) -> AsyncIterator[int]:
            yield 1
            yield 2

    with serve(K) as client:
        assert client.get("/").text == "1\n2\n"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/sync", "/async"])
async def test_a_generator_that_exits_after_its_first_item_is_cut(path: str, app: FastAPI) -> None:
    @ingress(app)
    class K:
        @app.get("/sync")
        def sync(self) -> Iterator[int]:
            yield 1
            raise SystemExit

        @app.get("/async")
        async def on_loop(self) -> AsyncIterator[int]:
            yield 1
            raise KeyboardInterrupt

    deployment = Deployment(K)
    async with deployment.running():
        messages, error = await request(deployment, path)

    assert error is not None
    assert [each.get("more_body") for each in messages] == [None, True]
