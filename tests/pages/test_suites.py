"""Tests of FastAPI and Starlette that fail through a deployment: the lists, and their checks."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Match, Route
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

import ingress as serve
from ingress.app.asgi.compat import IncludedRouter
from ingress.exceptions import UserCodeExit
from tests.asgi_helpers import under_server
from tests.suites.differences import BORROWED, KINDS, differences
from tests.suites.sdist import PROJECTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("project", PROJECTS)
def test_each_listed_difference_has_a_reason_and_a_check_that_exists(project: str) -> None:
    listed = differences(project)
    assert listed
    deviations = (ROOT / "docs/deviations.md").read_text()
    for each in listed.values():
        assert each.kind in KINDS
        assert each.reason.endswith(".")
        if each.kind == "deviation":
            assert f"| {each.check} |" in deviations
        elif each.kind == "artefact" and each.check != BORROWED:
            path, _, name = each.check.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text()


def served(app: Any) -> Any:
    return serve.deployment(serve.ingress(app)()).bind()


class NotAnError(BaseException):
    pass


def test_an_exception_group_that_is_no_exception_fails_its_request_after_the_clean_up() -> None:
    app, events = FastAPI(), list[str]()

    async def fails() -> None:
        raise NotAnError

    async def dependency() -> AsyncIterator[None]:
        try:
            async with anyio.create_task_group() as group:
                yield
                group.start_soon(fails)
        finally:
            events.append("cleaned up")

    @app.get("/fails", dependencies=[Depends(dependency)])
    async def endpoint() -> str:
        return "ok"

    @app.get("/next")
    async def following() -> str:
        return "next"

    with TestClient(served(app)) as client:
        with pytest.raises(UserCodeExit) as caught:
            client.get("/fails")
        assert client.get("/next").json() == "next"
    assert isinstance(caught.value.__cause__, BaseExceptionGroup)
    assert events == ["cleaned up"]


def test_a_cancellation_that_an_endpoint_raises_itself_fails_its_request_only(app: FastAPI) -> None:
    error = asyncio.CancelledError()

    @app.get("/cancelled")
    async def cancelled() -> None:
        raise error

    @app.get("/next")
    async def following() -> str:
        return "next"

    with TestClient(served(app)) as client:
        with pytest.raises(UserCodeExit) as caught:
            client.get("/cancelled")
        assert client.get("/next").json() == "next"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("yields", [False, True])
def test_def_dependencies_run_although_the_callers_threads_are_taken(*, yields: bool) -> None:
    app = FastAPI()

    def value() -> str:
        return threading.current_thread().name

    def generator() -> Any:
        yield threading.current_thread().name

    @app.get("/")
    async def endpoint(name: str = Depends(generator if yields else value)) -> str:
        return name

    async def ask() -> str:
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens = 1
        async with limiter:
            transport = httpx.ASGITransport(app=under_server(application))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answer: str = (await client.get("/")).json()
            await application.aclose()
        return answer

    application = served(app)
    assert anyio.run(ask) != threading.current_thread().name


def test_the_methods_of_the_users_route_and_router_classes_are_called() -> None:
    events: list[str] = []

    class Noting(APIRoute):
        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            events.append("route.matches")
            return super().matches(scope)

        def get_route_handler(self) -> Any:
            handler = super().get_route_handler()

            async def noted(request: Any) -> Any:
                events.append("handler")
                return await handler(request)

            return noted

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            events.append("route.handle")
            await super().handle(scope, receive, send)

    class NotingRouter(APIRouter):
        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            events.append("router.matches")
            return super().matches(scope)  # type: ignore[misc,no-any-return,unused-ignore]

        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            events.append("router.handle")
            await super().handle(scope, receive, send)

    app, outer = FastAPI(), NotingRouter()
    inner = NotingRouter(route_class=Noting)

    @inner.get("/items")
    def items() -> str:
        return "items"

    outer.include_router(inner, prefix="/inner")
    app.include_router(outer, prefix="/outer")

    def called(target: Any) -> list[str]:
        events.clear()
        with TestClient(target) as client:
            assert client.get("/outer/inner/items").json() == "items"
        return sorted(events)

    expected = called(app)
    assert {"route.matches", "handler"} <= set(expected)
    if IncludedRouter is not None:
        assert expected.count("router.handle") == 2
    assert set(called(served(app))) == set(expected)


def test_a_def_endpoint_sees_the_context_of_its_request_in_its_thread(app: FastAPI) -> None:
    span: ContextVar[str] = ContextVar("span")

    @asynccontextmanager
    async def request_span() -> AsyncIterator[None]:
        token = span.set("of the request")
        yield
        span.reset(token)

    class Spans:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async with request_span():
                await self.app(scope, receive, send)

    app.add_middleware(Spans)

    @app.get("/")
    def endpoint() -> tuple[str, bool]:
        return span.get(), threading.current_thread() is loops_thread[0]

    loops_thread: list[threading.Thread] = []

    @app.get("/loop")
    async def loop() -> None:
        loops_thread.append(threading.current_thread())

    with TestClient(served(app)) as client:
        client.get("/loop")
        assert client.get("/").json() == ["of the request", False]


@pytest.mark.skipif(
    "max_body_size" not in inspect.signature(Starlette).parameters,
    reason="this Starlette has no limit of bodies",
)
def test_the_body_limit_of_a_starlette_stands_before_its_middleware() -> None:
    received: list[Any] = []

    class Reads:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                received.append(await receive())
            await self.app(scope, receive, send)

    async def endpoint(request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    app = Starlette(
        routes=[Route("/", endpoint, methods=["POST"])],
        middleware=[Middleware(Reads)],
        max_body_size=5,
    )
    with TestClient(served(app)) as client:
        assert client.post("/", content=b"123456").status_code == 413
        assert received == []
        assert client.post("/", content=b"12345").status_code == 200


def test_a_raw_app_that_raises_is_answered_as_under_a_server() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError

    with TestClient(served(app), raise_server_exceptions=False) as client:
        answer = client.get("/")
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")


@pytest.mark.anyio
async def test_messages_of_extensions_reach_the_server_in_order() -> None:
    sent: list[Message] = [
        {"type": "http.response.start", "status": 200, "headers": [], "trailers": True},
        {"type": "http.response.debug", "info": {}},
        {"type": "http.response.body", "body": b"hello"},
        {"type": "http.response.trailers", "headers": [(b"x-item", b"one")]},
    ]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in sent if scope["type"] == "http" else ():
            await send(message)

    async def receive() -> Message:
        return await inbound.get()

    async def send(message: Message) -> None:
        received.append(message["type"])

    inbound, received = asyncio.Queue[Message](), list[str]()
    inbound.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    application = served(app)
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    await application(scope, receive, send)
    await application.aclose()
    assert received == [each["type"] for each in sent]
