"""The indexed clone of an app selects the same route as the app's linear search."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import FastAPIError
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Match, Route
from starlette.testclient import TestClient
from starlette.types import Scope

import ingress
from ingress.app.asgi.route_index import RouteIndex
from tests.asgi_helpers import serve


class OnlyWithKey(APIRoute):
    """A route with a `matches` of its own."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if (b"x-key", b"1") not in scope["headers"]:
            return Match.NONE, {}
        return super().matches(scope)


def app_with_rivals() -> FastAPI:
    """Return an app whose routes compete for the same paths."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.add_api_route("/items/me", lambda: "added at start-up", methods=["DELETE"])
        yield

    app = FastAPI(lifespan=lifespan)
    keyed = APIRouter(route_class=OnlyWithKey)

    @keyed.get("/items/me")
    async def with_key() -> str:
        return "with key"

    app.router.routes.append(keyed.routes[0])

    @app.put("/items/{item}")
    async def put(item: str) -> str:
        return f"put {item}"

    @app.get("/items/me")
    async def me(request: Request) -> str:
        return request.url_for("item", item="me").path

    @app.get("/items/{item}")
    async def item(item: str) -> str:
        return f"item {item}"

    @app.post("/slash/")
    async def slash() -> str:
        return "slash"

    return app


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/items/me", {}),
        ("GET", "/items/me", {"x-key": "1"}),
        ("PUT", "/items/me", {}),
        ("DELETE", "/items/me", {}),
        ("PATCH", "/items/me", {}),
        ("HEAD", "/items/me", {}),
        ("GET", "/items/you", {}),
        ("GET", "/items/me%0A", {}),
        ("GET", "/items/me/", {}),
        ("POST", "/slash", {}),
        ("GET", "/nowhere", {}),
        ("GET", "/docs", {}),
    ],
)
def test_a_path_is_answered_as_by_the_app(method: str, path: str, headers: dict[str, str]) -> None:
    app = app_with_rivals()

    @ingress.ingress(app)
    class Rivals:
        pass

    answers: set[tuple[int, Any, Any]] = set()
    for client in (serve(Rivals), TestClient(app)):
        with client:
            for _ in range(2):  # the second time the path is known
                response = client.request(method, path, headers=headers, follow_redirects=False)
                answers.add((response.status_code, response.text, response.headers.get("allow")))
    assert len(answers) == 1


PATHS = [
    "/", "/items", "/items/", "/items/me", "/items/me/", "/items/{item}", "/items/{item}/parts",
    "/items/{item:int}", "/items-{item}", "/{page}", "/{page}/{item}", "/files/{path:path}",
    "/files/all", "/{path:path}", "/a/b", "/a/{item}",
]  # fmt: skip
PREFIXES = ["", "/items", "/v1", "/{tenant}", "/v1/{tenant}"]
ASKED = [
    "/", "/items", "/items/", "/items//", "/items/me", "/items/me/", "/items/7", "/items/7/",
    "/items/7/parts", "/items/me/parts", "/items-7", "/items\n", "/about", "/about/us", "/files",
    "/files/", "/files/a/b", "/files/all", "/a", "/a/", "/a/b", "/a/c", "/v1", "/v1/items",
    "/v1/items/me", "/v1/items/7", "/v1/acme/items", "/acme/items/me", "/nowhere/at/all/here",
]  # fmt: skip

routes = st.tuples(st.sampled_from(PATHS), st.sampled_from(["GET", "POST"]))
routers: st.SearchStrategy[Any] = st.recursive(
    st.lists(routes, min_size=1, max_size=4),
    lambda inner: st.lists(
        st.one_of(routes, st.tuples(st.sampled_from(PREFIXES), inner)), min_size=1, max_size=4
    ),
    max_leaves=6,
)


def build(app: Any, table: list[Any], name: str = "") -> Any:
    """Add the routes of a table, and its nested tables as included routers."""
    for number, (path, content) in enumerate(table):
        if isinstance(content, list):
            router = build(APIRouter(), content, f"{name}{number}.")
            try:
                app.include_router(router, prefix=path.replace("tenant", f"t{len(name)}"))
            except FastAPIError:  # prefix and path cannot be both empty
                continue
        else:

            async def endpoint(request: Request, name: str = f"{name}{number}") -> str:
                return f"{name} {request.path_params} {request.url_for('here').path}"

            app.add_api_route(path, endpoint, methods=[content], response_model=None)
    return app


# With a mount among the routes the narrowed router selects, without one the index does.
@given(table=routers, has_mount=st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_routes_select_as_without_an_index(table: list[Any], has_mount: bool) -> None:
    async def compare() -> None:
        apps = []
        for _ in range(2):
            app = build(FastAPI(openapi_url=None), table)
            app.add_api_route("/here", lambda: "", name="here")
            if has_mount:
                app.mount("/mounted", build(FastAPI(), [("/items/{item}", "GET")]))
            apps.append(app)
        apps[0].router.middleware_stack = RouteIndex(apps[0].router)
        for method in ("GET", "POST", "PUT"):
            for path in [*ASKED, "/mounted/items/7"]:
                answers = [await ask(app, method, path) for app in apps]
                assert answers[0] == answers[1], (method, path)

    anyio.run(compare)


async def ask(app: FastAPI, method: str, path: str) -> list[Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("no code reads the body")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "root_path": "", "query_string": b"", "headers": [(b"host", b"localhost")],
        "scheme": "http", "http_version": "1.1", "server": ("localhost", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("owner", [Route, APIRoute, APIRouter])
def test_what_a_tracer_has_replaced_is_called(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "app" if owner is APIRouter else "handle"
    original = getattr(owner, name)
    traced: list[str] = []

    async def tracing(self: Any, scope: Any, receive: Any, send: Any) -> None:
        traced.append(scope["path"])
        await original(self, scope, receive, send)

    monkeypatch.setattr(owner, name, tracing)
    app = build(FastAPI(openapi_url=None), [("/items/{item}", "GET")])
    app.add_api_route("/here", lambda: "", name="here")
    app.router.middleware_stack = RouteIndex(app.router)

    async def run() -> None:
        for _ in range(2):  # the second time the path is known
            assert (await ask(app, "GET", "/items/me"))[0]["status"] == 200

    anyio.run(run)
    assert traced == ["/items/me"] * 2


def test_what_routes_cost_does_not_grow_with_their_number() -> None:
    matched: list[str] = []

    app = FastAPI(openapi_url=None)
    for group in range(10):
        router = APIRouter()
        for number in range(10):
            router.add_api_route(f"/{number}/{{item}}", lambda item: item)
            router.add_api_route(f"/{number}", lambda: "")
        app.include_router(router, prefix=f"/{group}")
    app.router.middleware_stack = RouteIndex(app.router)
    before = sys.getprofile()

    def trace(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in (Route.matches.__code__, RouteIndex.find.__code__):
            matched.append("")
        if event == "call" and frame.f_code.co_qualname == "_EffectiveRouteContext.matches":
            matched.append("")

    async def run() -> None:
        await ask(app, "GET", "/9/9/x")  # makes the narrowed copies
        await ask(app, "GET", "/9/9")
        sys.setprofile(trace)
        try:
            assert (await ask(app, "GET", "/9/9/y"))[0]["status"] == 200
            assert (await ask(app, "GET", "/9/9"))[0]["status"] == 200
        finally:
            sys.setprofile(before)

    anyio.run(run)
    assert 2 <= len(matched) <= 8  # of 200; an included router matches twice
