"""`ingress.asgi.compiled`: a route with fewer exit stacks does what it did with them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, File, UploadFile
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ingress.asgi import ingress
from tests.asgi_helpers import serve


def test_what_a_route_class_puts_before_its_app_stays_there() -> None:
    class Marked(APIRoute):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            inner = self.app

            async def marked(scope: Scope, receive: Receive, send: Send) -> None:
                scope["mark"] = "here"
                await inner(scope, receive, send)

            self.app = marked

    app = FastAPI()
    app.router.route_class = Marked

    @ingress(app)
    class Service:
        @app.get("/")
        async def endpoint(self, request: Request) -> str:
            return str(request.scope["mark"])

    with serve(Service) as client:
        assert client.get("/").json() == "here"


def test_an_override_with_yield_ends_before_the_response_is_complete_as_in_fastapi() -> None:
    events: list[str] = []
    app = FastAPI()

    def plain() -> str:
        return "plain"

    async def yielding() -> AsyncIterator[str]:
        events.append("enter")
        yield "override"
        events.append("exit")

    @ingress(app)
    class Service:
        @app.get("/")
        async def endpoint(self, value: str = Depends(plain)) -> str:
            events.append("endpoint")
            return value

    with serve(Service) as client:
        assert client.get("/").json() == "plain"
        app.dependency_overrides[plain] = yielding
        assert client.get("/").json() == "override"

    assert events == ["endpoint", "enter", "endpoint", "exit"]


def test_an_uploaded_file_is_closed_after_the_request() -> None:
    files: list[UploadFile] = []
    app = FastAPI()

    @ingress(app)
    class Service:
        @app.post("/")
        async def endpoint(self, file: Annotated[UploadFile, File()]) -> bool:
            files.append(file)
            return file.file.closed

    with serve(Service) as client:
        assert client.post("/", files={"file": ("name", b"x")}).json() is False

    assert files[0].file.closed
