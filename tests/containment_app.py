"""Deployments in which each kind of callable raises the error that its request names.

python -m tests.containment_app thread      serves them, and prints the address
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, WebSocket
from starlette.middleware.base import RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import ingress as serve
from ingress.exceptions import BackPressureError


class BrokenRepr(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no string")

    __repr__ = __str__


def _refuse(*_: object) -> Any:
    raise ValueError("not for you")


def hostile(*names: str, base: type[BaseException] = Exception, refuse: Any = _refuse) -> Any:
    """Make an error whose attributes and methods raise when accessed."""
    dunder = {"__str__", "__repr__", "__eq__", "__hash__", "__bool__", "__len__"}
    own = {"__getattribute__", "__getattr__", "__setattr__", "__reduce_ex__", *dunder}
    body = {name: refuse if name in own else property(refuse) for name in names}
    return lambda: type("Hostile", (base,), body)("hostile")


def _exit(*_: object) -> Any:
    raise SystemExit(3)


def circular() -> BaseException:
    """Return an error that is the cause of its own cause."""
    error, cause = ValueError("circular"), KeyError("circular")
    error.__cause__, cause.__cause__ = cause, error
    return error


def deep() -> BaseException:
    """Return an error with more causes than Python has frames."""
    error = Exception("deep")
    for _ in range(1_500):
        following = Exception("deep")
        following.__cause__ = error
        error = following
    return error


def behind_another() -> BaseException:
    """Return an ordinary error with a hostile one as its cause."""
    error = ValueError("readable")
    error.__cause__ = error.__context__ = hostile("__traceback__", refuse=_exit)()
    return error


class Unpicklable(Exception):
    """An error that cannot be copied into another process."""

    def __init__(self, *_: object) -> None:
        super().__init__("unpicklable", threading.Lock())


class Handled(Exception):
    """An error whose handler raises another."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def recurse() -> None:
    recurse()


ERRORS: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: Exception("x"),
    "HTTPException": lambda: HTTPException(418, "teapot"),
    "SystemExit-0": lambda: SystemExit(0),
    "SystemExit-3": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "TimeoutError": TimeoutError,
    "StopIteration": lambda: StopIteration(7),
    "StopAsyncIteration": StopAsyncIteration,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("g", [SystemExit(1), ValueError()]),
    "BrokenRepr": BrokenRepr,
    "Unpicklable": Unpicklable,
    "BackPressureError": lambda: BackPressureError(1, 1, "K"),
}
HOSTILE: dict[str, Callable[[], BaseException]] = {
    "getattribute": hostile("__getattribute__"),
    "getattribute-exits": hostile("__getattribute__", refuse=_exit),
    "class": hostile("__class__"),
    "class-exits": hostile("__class__", refuse=_exit),
    "str-and-repr-exit": hostile("__str__", "__repr__", refuse=_exit),
    "cause": hostile("__cause__"),
    "context": hostile("__context__", "__suppress_context__"),
    "traceback": hostile("__traceback__", "with_traceback"),
    "notes": hostile("__notes__", "args", "add_note"),
    "dict": hostile("__dict__", "__setattr__", "__reduce_ex__"),
    "equality": hostile("__eq__", "__hash__", "__bool__", "__len__"),
    "status": hostile("status_code", "headers", "detail", "message", "retry_after_s"),
    "HTTPException-getattribute": hostile("__getattribute__", base=HTTPException),
    "circular": circular,
    "deep": deep,
    "BaseException": hostile("__getattribute__", base=BaseException),
    "in-a-group": lambda: ExceptionGroup("g", [ValueError(), hostile("__getattribute__")()]),
    "behind-another": behind_another,
}
"""Errors that raise when they are inspected, or whose chain of causes has no end."""
ALL = ERRORS | HOSTILE


def boom(name: str) -> None:
    secret = "a-local-secret", os.environ.get("A_SECRET")
    if name == "RecursionError":
        recurse()
    if name in ALL:
        raise ALL[name]()
    del secret


@serve.deployment
class Async:
    async def __call__(self, request: Request) -> str:
        boom(request.query_params["e"])
        return "ok"


@serve.deployment
class Sync:
    def __call__(self, request: Request) -> str:
        boom(request.query_params["e"])
        return "ok"


@serve.deployment
class AsyncGenerator:
    async def __call__(self, request: Request) -> AsyncIterator[str]:
        boom(request.query_params.get("first", ""))
        yield "ok"
        boom(request.query_params["e"])


@serve.deployment
class SyncGenerator:
    def __call__(self, request: Request) -> Iterator[str]:
        boom(request.query_params.get("first", ""))
        yield "ok"
        boom(request.query_params["e"])


def answers(requests: list[Request]) -> list[str]:
    for request in requests:
        boom(request.query_params["e"])
    return ["ok"] * len(requests)


@serve.deployment
class Batch:
    @serve.batch(batch_wait_timeout_s=0)
    async def __call__(self, requests: list[Request]) -> list[str]:
        return answers(requests)


@serve.deployment
class SyncBatch:
    @serve.batch(batch_wait_timeout_s=0)
    def __call__(self, requests: list[Request]) -> list[str]:
        return answers(requests)


@serve.deployment
class BatchGenerator:
    @serve.batch(batch_wait_timeout_s=0)
    async def __call__(self, requests: list[Request]) -> AsyncIterator[list[str]]:
        for request in requests:
            boom(request.query_params.get("first", ""))
        yield ["ok"] * len(requests)
        answers(requests)


def make_app() -> FastAPI:
    app = FastAPI()

    @app.exception_handler(Handled)
    async def handled(request: Request, error: Handled) -> Response:
        boom(error.name)
        return Response("ok")

    return app


def async_dependency(e: str) -> None:
    boom(e)


async def dependency_on_the_loop(e: str) -> None:
    boom(e)


def yield_before(e: str) -> Iterator[None]:
    boom(e)
    yield


async def async_yield_before(e: str) -> AsyncIterator[None]:
    boom(e)
    yield


async def yield_after(e: str) -> AsyncIterator[None]:
    yield
    boom(e)


plain_app, wrapped_app = make_app(), make_app()


@wrapped_app.middleware("http")
async def middleware(request: Request, call_next: RequestResponseEndpoint) -> Response:
    boom(request.query_params.get("middleware", ""))
    return await call_next(request)


class Endpoints:
    async def async_endpoint(self, e: str) -> str:
        boom(e)
        return "ok"

    def def_endpoint(self, e: str) -> str:
        boom(e)
        return "ok"

    async def def_dependency(self, _: Annotated[None, Depends(async_dependency)]) -> str:
        return "ok"

    async def async_dependency(self, _: Annotated[None, Depends(dependency_on_the_loop)]) -> str:
        return "ok"

    async def async_yield_dependency(self, _: Annotated[None, Depends(async_yield_before)]) -> str:
        return "ok"

    async def yield_dependency(self, _: Annotated[None, Depends(yield_before)]) -> str:
        return "ok"

    async def yield_dependency_teardown(self, _: Annotated[None, Depends(yield_after)]) -> str:
        return "ok"

    async def exception_handler(self, e: str) -> str:
        raise Handled(e)

    async def background_task(self, e: str, tasks: BackgroundTasks) -> str:
        tasks.add_task(boom, e)
        return "ok"

    async def async_stream(self, e: str) -> Response:
        async def items() -> AsyncIterator[str]:
            yield "ok"
            boom(e)

        return StreamingResponse(items())

    async def sync_stream(self, e: str) -> Response:
        def items() -> Iterator[str]:
            yield "ok"
            boom(e)

        return StreamingResponse(items())

    async def in_middleware(self) -> str:
        return "ok"

    async def websocket(self, websocket: WebSocket, e: str) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())
        boom(e)
        await websocket.close()

    async def websocket_early(self, websocket: WebSocket, e: str) -> None:
        boom(e)
        await websocket.accept()
        await websocket.close()


def endpoints_on(app: FastAPI, name: str) -> type:
    """Make a class of the endpoints; each app gets its own functions."""
    body: dict[str, Any] = {}
    for key, function in vars(Endpoints).items():
        if key.startswith("_"):
            continue
        if key.startswith("websocket"):
            body[key] = app.websocket(f"/{key}")(function)
        else:
            body[key] = app.get(f"/{key}")(function)
    return serve.ingress(app)(type(name, (Endpoints,), body))


Plain = endpoints_on(plain_app, "Plain")
Wrapped = endpoints_on(wrapped_app, "Wrapped")


APPLICATIONS: dict[str, Any] = {
    "async": Async,
    "sync": Sync,
    "agen": AsyncGenerator,
    "gen": SyncGenerator,
    "batch": Batch,
    "sync_batch": SyncBatch,
    "batch_gen": BatchGenerator,
    "plain": serve.deployment(Plain),
    "middleware": serve.deployment(Wrapped),
}


def main() -> None:
    isolation = sys.argv[1]
    serve.start({"port": 0})
    for name, deployment in APPLICATIONS.items():
        application = deployment.options(isolation=isolation).bind()
        serve.run(application, name=name, route_prefix=f"/{name}")
    (url,) = serve.status().proxies
    print("serving on", url, "pid", os.getpid(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
