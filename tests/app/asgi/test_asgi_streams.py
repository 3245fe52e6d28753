"""Endpoints that are generators: JSON lines and server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import wraps
from typing import Any

import pytest
from fastapi import FastAPI

from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import Deployment, request, serve

pytest.importorskip("fastapi.sse", reason="this FastAPI has no streaming endpoints")


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
