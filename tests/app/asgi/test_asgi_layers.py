"""FastAPI's layers: no simple request enters them, and user code sees no difference."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from anyio import fail_after
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.applications import Starlette
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Router
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.spec import ingress
from tests.asgi_helpers import Deployment, request, serve
from tests.servers import PATIENCE_S

pytestmark = pytest.mark.anyio

LAYERS = (FastAPI, Starlette, ServerErrorMiddleware, ExceptionMiddleware, AsyncExitStackMiddleware)


class ShowsScope(PlainTextResponse):
    """A response whose code gets the scope."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = {key for key in scope if "ingress" not in key and scope[key] is not None}
        keys -= {"asgi"}  # Starlette's client gives none
        # A compiled route makes these for an endpoint that takes the request.
        keys -= {"fastapi_function_astack", "fastapi_inner_astack"}
        await PlainTextResponse(" ".join(sorted(keys)))(scope, receive, send)


class Refused(Exception):
    pass


def declare(app: FastAPI) -> None:
    @app.exception_handler(Refused)
    async def refused(request: Request, error: Exception) -> ShowsScope:
        return ShowsScope(status_code=403)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse(f"{request.url_for('item', item=1).path} {error}", 418)

    @app.get("/items/{item}")
    async def item(item: int) -> int:
        return item

    @app.get("/def")
    def in_a_thread() -> str:
        return "def"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            for chunk in "123":
                yield chunk

        return StreamingResponse(chunks())

    @app.get("/scope")
    async def shows_scope() -> ShowsScope:
        return ShowsScope()

    @app.get("/refused")
    async def refuses() -> None:
        raise Refused

    @app.get("/http")
    async def raises() -> None:
        raise HTTPException(409, "no")


async def frames_in_layers(app: FastAPI, path: str) -> dict[str, int]:
    """Return how often a request of a replica enters the functions of FastAPI's layers."""
    deployment = Deployment(ingress(app)(type("K", (), {})))
    codes: dict[Any, str] = {layer.__call__.__code__: layer.__name__ for layer in (*LAYERS, Router)}
    entered: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            entered[codes[frame.f_code]] += 1

    async with deployment.running():
        await request(deployment, path)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            messages, error = await request(deployment, path)
        finally:
            sys.setprofile(before)
    assert (messages[0]["status"], error) == (200, None)
    return entered


@pytest.mark.parametrize("path", ["/items/7", "/def", "/stream"])
async def test_a_simple_request_enters_no_layer(path: str, app: FastAPI) -> None:
    declare(app)
    assert await frames_in_layers(app, path) == {}


async def test_a_response_that_gets_the_scope_is_sent_inside_of_the_layers(app: FastAPI) -> None:
    declare(app)
    assert set(await frames_in_layers(app, "/scope")) == {cls.__name__ for cls in (*LAYERS, Router)}


@pytest.mark.parametrize("path", ["/items/7", "/items/x", "/scope", "/refused", "/http", "/none"])
@pytest.mark.parametrize("root_path", ["", "/root"])
def test_user_code_sees_the_scope_that_fastapi_gives(path: str, root_path: str) -> None:
    plain, app = FastAPI(), FastAPI()
    for each in (plain, app):
        each.root_path = root_path
        declare(each)
    with TestClient(plain) as expected, serve(ingress(app)(type("K", (), {}))) as client:
        for prefix in ("", "/root"):
            answers = [each.get(prefix + path) for each in (expected, client)]
            assert answers[0].text == answers[1].text
            assert answers[0].status_code == answers[1].status_code


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("is_late", [False, True])
async def test_what_a_tracer_puts_in_the_place_of_a_layers_function_is_called(
    layer: Any, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    traced: list[str] = []
    original = layer.__call__

    async def trace(self: Any, scope: Scope, receive: Receive, send: Send) -> None:
        traced.append(scope["type"])
        await original(self, scope, receive, send)

    app = FastAPI()
    declare(app)
    deployment = Deployment(ingress(app)(type("K", (), {})))
    if not is_late:
        monkeypatch.setattr(layer, "__call__", trace)
    async with deployment.running():
        await request(deployment, "/items/7")
        if is_late:
            assert "http" not in traced
            monkeypatch.setattr(layer, "__call__", trace)
            with fail_after(PATIENCE_S):
                while "http" not in traced:
                    await request(deployment, "/items/7")
        else:
            assert "http" in traced


def put_around_the_stack(app: FastAPI, layer: Callable[[Any], Any]) -> None:
    app.middleware_stack = layer(app.middleware_stack)


def put_around_the_routes(app: FastAPI, layer: Callable[[Any], Any]) -> None:
    app.router.middleware_stack = layer(app.router.middleware_stack)


@pytest.mark.parametrize("put", [put_around_the_stack, put_around_the_routes])
def test_a_layer_that_a_replica_puts_on_its_app_is_entered_from_then_on(
    put: Callable[[FastAPI, Callable[[Any], Any]], None],
) -> None:
    app = FastAPI()
    entered: list[str] = []

    class Layer:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            entered.append(scope["path"])
            await self.inner(scope, receive, send)

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self) -> str:
            return "root"

        @app.post("/")
        async def extend(self) -> None:
            put(app, Layer)

    with serve(K) as client:
        assert client.get("/").json() == "root"
        assert client.post("/").status_code == 200
        assert entered == []
        assert client.get("/").json() == "root"
        assert entered == ["/"]


async def test_an_exit_of_a_dependency_of_fastapi_is_answered_by_the_users_handler() -> None:
    app = FastAPI()

    @app.exception_handler(Exception)
    async def handle(request: Request, error: Exception) -> PlainTextResponse:
        return PlainTextResponse(type(error).__name__, status_code=500)

    async def leaves() -> None:
        raise SystemExit

    @ingress(app)
    class K:
        @app.get("/", dependencies=[Depends(leaves)])
        async def root(self) -> None: ...

    deployment = Deployment(K)
    async with deployment.running():
        messages, _ = await request(deployment, "/")

    assert messages[1]["body"] == b"UserCodeExit"
