"""Endpoints that read malformed input, as a deployment and as plain FastAPI."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from fastapi import Body, FastAPI, Header, UploadFile, WebSocket
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

import ingress as serve
from tests.servers import bind

events: list[str] = []
FORBIDDEN = {"exec", "compile", "import", "marshal.loads", "pickle.find_class"}
FORBIDDEN |= {"os.exec", "os.fork", "os.system", "subprocess.Popen"}


def callers() -> set[Any]:
    """Return the names of the modules on the call stack."""
    found: set[Any] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return found


def watch() -> None:
    """Record from now on every audit event that could execute a client's bytes.

    Printing a traceback parses the source lines it shows, so that is exempt.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in FORBIDDEN and "traceback" not in callers():
            events.append(f"{event} {args!r:.200}")

    sys.addaudithook(hook)


def endpoints(app: FastAPI, *, methods: bool) -> Any:
    """Declare the endpoints on an app: as functions, or as methods of the returned class."""

    class Endpoints:
        @app.get("/")
        async def root(self) -> str:
            return "here"

        @app.post("/echo")
        async def echo(self, request: Request) -> int:
            return len(await request.body())

        @app.post("/kind")
        async def kind(self, value: Annotated[Any, Body()]) -> str:
            return type(value).__name__

        @app.post("/number")
        def number(self, value: Annotated[float, Body()]) -> str:
            return type(value).__name__

        @app.get("/query")
        async def query(self, value: float) -> str:
            return type(value).__name__

        @app.get("/path/{value}")
        async def path(self, value: int) -> str:
            return type(value).__name__

        @app.get("/header")
        async def header(self, x_value: Annotated[float, Header()]) -> str:
            return type(x_value).__name__

        @app.post("/mirror")
        async def mirror(self, value: Annotated[Any, Body()]) -> Any:
            return value

        @app.get("/out")
        async def out(self, where: str, value: str) -> Response:
            response: Response = Response("ok")
            if where == "header":
                response.headers["x-echo"] = value
            elif where == "cookie":
                response.headers.append("set-cookie", f"a={value}")
            elif where == "redirect":
                response = RedirectResponse("/")
                response.headers["location"] = value
            elif where == "raw":
                response.raw_headers.append((b"x-echo", value.encode("latin-1", "replace")))
            elif where == "name":
                response.raw_headers.append((value.encode("latin-1", "replace"), b"x"))
            return response

        @app.post("/upload")
        async def upload(self, file: UploadFile) -> int:
            return len(await file.read())

        @app.get("/file")
        async def file(self) -> Response:
            return FileResponse(Path(__file__))

        @app.get("/fails")
        async def fails(self) -> None:
            raise ValueError("it fails")

        @app.get("/watch")
        async def watch(self) -> None:
            watch()

        @app.get("/events")
        async def events(self) -> list[str]:
            return events

        @app.websocket("/ws")
        async def ws(self, websocket: WebSocket) -> None:
            await websocket.accept()
            while True:
                await websocket.send_text(await websocket.receive_text())

    if methods:
        return Endpoints
    instance = Endpoints()
    for route in list(app.routes):
        if (name := getattr(route, "name", "")) in vars(Endpoints):
            declared = getattr(instance, name)
            app.router.routes.remove(route)
            if hasattr(route, "methods"):
                app.add_api_route(route.path, declared, methods=list(route.methods))  # type: ignore[attr-defined]
            else:
                app.add_api_websocket_route(route.path, declared)  # type: ignore[attr-defined]
    return app


api = FastAPI()
app = bind(serve.deployment(serve.ingress(api)(endpoints(api, methods=True))))
plain = endpoints(FastAPI(), methods=False)
