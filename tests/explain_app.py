"""An application with every kind of row that `ingress explain` knows; a function runs them all."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from anyio import from_thread
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, Request, WebSocket
from fastapi.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security.base import SecurityBase
from starlette.background import BackgroundTask
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

import ingress as serve
from tests.conformance.observe import TIMEOUT_S, Served
from tests.servers import bind, wait_until

FOLDER = tempfile.gettempdir()


class DefError(Exception):
    pass


class AsyncError(Exception):
    pass


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def router_lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


def router_startup() -> None:
    pass


async def router_shutdown() -> None:
    pass


class PureMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self.app(scope, receive, send)


async def dispatched(request: Request, call_next: Callable[..., Any]) -> Any:
    return await call_next(request)


router = APIRouter(lifespan=router_lifespan)
started = APIRouter(on_startup=[router_startup], on_shutdown=[router_shutdown])
api = FastAPI(lifespan=lifespan, middleware=[Middleware(PureMiddleware)])
api.middleware("http")(dispatched)


@api.exception_handler(DefError)
def handle_def(request: Request, error: Exception) -> Response:
    return PlainTextResponse("def")


@api.exception_handler(AsyncError)
async def handle_async(request: Request, error: Exception) -> Response:
    return PlainTextResponse("async")


# Dependencies.


def innermost() -> int:
    return 1


def def_dependency(number: int = Depends(innermost)) -> int:
    return number


async def async_dependency() -> int:
    return 1


def def_yields() -> Iterator[int]:
    yield 1


async def async_yields() -> AsyncIterator[int]:
    yield 1


@functools.wraps(async_dependency)
def wraps_async() -> Any:
    return async_dependency()


class ClassDependency:
    def __init__(self) -> None:
        pass


class DefScheme(SecurityBase):
    def __init__(self) -> None:
        self.scheme_name = "def"
        self.model: Any = None

    def __call__(self, request: Request) -> int:
        return 1


@router.get("/included-def")
def included(
    a: int = Depends(def_dependency),
    b: int = Depends(async_dependency),
    c: int = Depends(def_yields),
    d: int = Depends(async_yields),
    e: int = Depends(wraps_async),
    f: ClassDependency = Depends(),
) -> str:
    return "ok"


# Background tasks, streams and files.


def def_task() -> None:
    pass


async def async_task() -> None:
    pass


def def_items() -> Iterator[str]:
    yield "1"


async def async_items() -> AsyncIterator[str]:
    yield "1"


class SpyPath:
    """A path whose `__fspath__` runs in the thread that opens the file."""

    def __fspath__(self) -> str:
        return __file__


@api.get("/file")
async def file() -> Response:
    return FileResponse(SpyPath(), media_type="text/plain")


# Mounted and added routes, which are bound to no replica.


def starlette_def(request: Request) -> Response:
    return PlainTextResponse("ok", background=BackgroundTask(def_task))


async def starlette_async(request: Request) -> Response:
    return PlainTextResponse("ok")


class Endpoint(HTTPEndpoint):
    def get(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def post(self, request: Request) -> Response:
        return PlainTextResponse("ok")


def sub_dependency() -> int:
    return 1


sub = FastAPI()


@sub.get("/def")
def sub_def(number: int = Depends(sub_dependency)) -> str:
    return "ok"


@sub.get("/stream")
async def sub_stream() -> Response:
    return StreamingResponse(sub_items())


def sub_items() -> Iterator[str]:
    yield "1"


def raw(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
    return PlainTextResponse("ok")(scope, receive, send)


api.add_route("/starlette-def", starlette_def)
api.add_route("/starlette-async", starlette_async)
api.add_route("/endpoint", Endpoint)  # type: ignore[arg-type]
api.mount("/sub", sub)
api.mount("/static", StaticFiles(directory=FOLDER))
api.mount("/raw", raw)


@serve.batch(max_batch_size=2, batch_wait_timeout_s=0)
def module_batch(values: list[int]) -> list[int]:
    return values


class Model:
    def __del__(self) -> None:
        pass


@serve.deployment(max_ongoing_requests=20)
class Plain:
    def def_method(self) -> int:
        return 1

    async def async_method(self) -> int:
        return 1

    @staticmethod
    def static_method() -> int:
        return 1

    def def_stream(self) -> Iterator[int]:
        yield 1

    async def async_stream(self) -> AsyncIterator[int]:
        yield 1

    def returns_def(self) -> Any:
        def returned() -> Iterator[int]:
            yield 1

        return returned()

    async def async_returns_def(self) -> Any:
        def returned_by_async() -> Iterator[int]:
            yield 1

        return returned_by_async()

    async def async_returns_async(self) -> Any:
        async def returned_async() -> AsyncIterator[int]:
            yield 1

        return returned_async()

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0)
    async def async_batch(self, values: list[int]) -> list[int]:
        return values

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0, max_concurrent_batches=3)
    def _def_batch(self, values: list[int]) -> list[int]:
        return values

    async def batches(self, value: int) -> int:
        return int(await self._def_batch(value)) + int(await module_batch(value))

    @serve.multiplexed(max_num_models_per_replica=1)
    async def load(self, model_id: str) -> Model:
        return Model()

    def def_health(self) -> None:
        pass


@serve.deployment
def function(value: int) -> int:
    return value


@serve.deployment(user_config={"a": 1})
@serve.ingress(api)
class Gateway:
    def __init__(self, plain: Any, function: Any) -> None:
        self.plain = plain
        self.function = function

    def reconfigure(self, user_config: Any) -> None:
        pass

    def check_health(self) -> None:
        pass

    async def method(self) -> int:
        return 1

    def _dependency(self) -> int:
        return 1

    def _yields(self) -> Iterator[int]:
        yield 1

    def _task(self) -> None:
        pass

    @api.get("/def")
    def def_endpoint(
        self,
        number: int = Depends(_dependency),
        yielded: int = Depends(_yields),
        scheme: int = Depends(DefScheme()),
    ) -> str:
        return "ok"

    @api.get("/async")
    async def async_endpoint(self) -> str:
        return "ok"

    @api.get("/lines")
    def lines(self) -> Iterator[int]:
        yield 1

    @api.get("/async-lines")
    async def async_lines(self) -> AsyncIterator[int]:
        yield 1

    @api.get("/tasks")
    async def tasks(self, tasks: BackgroundTasks) -> str:
        async def inner_task() -> None:
            pass

        tasks.add_task(def_task)
        tasks.add_task(async_task)
        tasks.add_task(self._task)
        tasks.add_task(inner_task)
        tasks.add_task(functools.partial(partial_task, 1))
        return "ok"

    @api.get("/task-not-known")
    async def task_not_known(self, tasks: BackgroundTasks) -> str:
        for task in (def_task, async_task):
            tasks.add_task(task)
        return "ok"

    @api.get("/stream")
    async def stream(self) -> Response:
        return StreamingResponse(def_items())

    @api.get("/async-stream")
    async def async_stream(self) -> Response:
        return StreamingResponse(content=async_items())

    @api.get("/expression")
    def expression(self) -> Response:
        return StreamingResponse(str(number) for number in range(2))

    @api.get("/def-error")
    async def def_error(self) -> None:
        raise DefError

    @api.get("/async-error")
    async def async_error(self) -> None:
        raise AsyncError

    @api.websocket("/ws")
    async def ws(self, websocket: WebSocket, number: int = Depends(def_dependency)) -> None:
        await websocket.accept()
        await websocket.close()

    @api.websocket("/def-ws")
    def def_ws(self, websocket: WebSocket) -> None:
        from_thread.run(websocket.accept)
        from_thread.run(websocket.close)

    def __del__(self) -> None:
        pass


def partial_task(number: int) -> None:
    pass


api.include_router(router)
api.include_router(started)

app = bind(Gateway, bind(Plain), bind(function))

PATHS = [
    "/def", "/async", "/lines", "/async-lines", "/tasks", "/task-not-known", "/stream",
    "/async-stream", "/expression", "/def-error", "/async-error", "/included-def", "/file",
    "/starlette-def", "/starlette-async", "/endpoint", "/sub/def", "/sub/stream", "/raw",
]  # fmt: skip


def call_everything(it: Served) -> None:
    for path in PATHS:
        response = it.get(path)
        assert response.status_code == 200, (path, response.text)
    assert it.client.post("/endpoint").status_code == 200
    assert it.get("/static/none").status_code == 404
    for path in ("/ws", "/def-ws"):
        with it.client.websocket_connect(path) as socket:  # type: ignore[union-attr]
            assert socket.receive()["type"] == "websocket.close"
            wait_until(lambda: it.ongoing() == 0)
    asyncio.run(_call_by_handle())
    it.handle.method.remote().result(timeout_s=TIMEOUT_S)


async def _call_by_handle() -> None:
    plain = serve.get_deployment_handle("Plain", "default")
    for name in ("def_method", "async_method", "static_method", "def_health"):
        await getattr(plain, name).remote()
    streams = plain.options(stream=True)
    for name in (
        "def_stream", "async_stream", "returns_def", "async_returns_def", "async_returns_async",
    ):  # fmt: skip
        assert [item async for item in getattr(streams, name).remote()] == [1]
    assert await plain.async_batch.remote(1) == 1
    assert await plain.batches.remote(1) == 2
    for model_id in ("a", "b"):  # loading "b" unloads "a"
        await plain.load.remote(model_id)
    assert await serve.get_deployment_handle("function", "default").remote(1) == 1
