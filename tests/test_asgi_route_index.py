"""The indexed clone selects the route that the user's app, trying one after the other, selects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.testclient import TestClient
from starlette.types import Scope

import ingress
from tests.asgi_helpers import serve


class OnlyWithKey(APIRoute):
    """A route with a say of its own in whether it matches."""

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
def test_a_path_is_answered_as_by_the_users_app(
    method: str, path: str, headers: dict[str, str]
) -> None:
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
