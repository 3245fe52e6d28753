"""The places of a FastAPI app's callables, observed from inside them, at every flag value.

The flags choose the user event loop; they do not affect that a `def` runs in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from queue import SimpleQueue
from threading import Barrier
from typing import Any

import httpx
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse, Response, StreamingResponse

import ingress as serve
from ingress.core.base.settings import USER_CODE_IN_SEPARATE_THREAD, Settings
from tests.conformance.observe import ANYIO_WORKER, FEW_FLAGS, TIMEOUT_S, here, here_async, served

LOOP, WORKER, THREAD = "the loop", "a worker thread", "a thread of Starlette's"


class DefError(Exception):
    pass


class AsyncError(Exception):
    pass


def yields_here() -> Iterator[str]:
    yield here()


async def yields_here_async() -> AsyncIterator[str]:
    yield here()


def items() -> Iterator[str]:
    for _ in range(3):
        yield f"{here()}\n"


async def items_async() -> AsyncIterator[str]:
    for _ in range(3):
        yield f"{here()}\n"


class DependencyObject:
    def __call__(self) -> str:
        return here()


def application(places: SimpleQueue[str]) -> serve.Application:
    """Return an application whose routes answer with their place, or put it into `places`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        places.put(here())
        yield
        places.put(here())

    app = FastAPI(lifespan=lifespan)

    def note() -> None:
        places.put(here())

    async def note_async() -> None:
        places.put(here())

    @app.exception_handler(DefError)
    def handle_def(request: Request, error: Exception) -> Response:
        return JSONResponse(here())

    @app.exception_handler(AsyncError)
    async def handle_async(request: Request, error: Exception) -> Response:
        return JSONResponse(here())

    @app.middleware("http")
    async def middleware(request: Request, call_next: Callable[..., Any]) -> Response:
        response: Response = await call_next(request)
        response.headers["x-middleware"] = here()
        return response

    @app.get("/free-def")
    def free_def() -> str:
        return here()

    class K:
        def dependency(self) -> str:
            return here()

        async def async_dependency(self) -> str:
            return here()

        @app.get("/def")
        def def_endpoint(self) -> str:
            return here()

        @app.get("/async-def")
        async def async_endpoint(self) -> str:
            return here()

        @app.get("/static-def")
        @staticmethod
        def static_endpoint() -> str:
            return here()

        @app.get("/def-dependency")
        async def def_dependency(self, place: str = Depends(here)) -> str:
            return place

        @app.get("/def-dependency-of-def")
        def def_dependency_of_def(self, place: str = Depends(here)) -> str:
            return place

        @app.get("/async-dependency")
        def async_def_dependency(self, place: str = Depends(here_async)) -> str:
            return place

        @app.get("/method-dependency")
        async def method_dependency(self, place: str = Depends(dependency)) -> str:
            return place

        @app.get("/async-method-dependency")
        async def async_method_dependency(self, place: str = Depends(async_dependency)) -> str:
            return place

        @app.get("/object-dependency")
        async def object_dependency(self, place: str = Depends(DependencyObject())) -> str:
            return place

        @app.get("/yield-dependency")
        async def yield_dependency(self, place: str = Depends(yields_here)) -> str:
            return place

        @app.get("/async-yield-dependency")
        async def async_yield_dependency(self, place: str = Depends(yields_here_async)) -> str:
            return place

        @app.get("/background")
        async def background(self, tasks: BackgroundTasks) -> None:
            tasks.add_task(note)

        @app.get("/async-background")
        async def async_background(self, tasks: BackgroundTasks) -> None:
            tasks.add_task(note_async)

        @app.get("/exception-handler")
        async def exception_handler(self) -> None:
            raise DefError

        @app.get("/async-exception-handler")
        def async_exception_handler(self) -> None:
            raise AsyncError

        @app.get("/stream")
        async def stream(self) -> StreamingResponse:
            return StreamingResponse(items())

        @app.get("/async-stream")
        def async_stream(self) -> StreamingResponse:
            return StreamingResponse(items_async())

        @app.websocket("/websocket")
        async def websocket(self, socket: WebSocket) -> None:
            await socket.accept()
            await socket.send_text(here())
            await socket.close()

    return serve.deployment(serve.ingress(app)(K)).bind()


ANSWERS = {
    "/def": WORKER,
    "/async-def": LOOP,
    "/static-def": WORKER,
    "/free-def": WORKER,
    "/def-dependency": WORKER,
    "/def-dependency-of-def": WORKER,
    "/async-dependency": LOOP,
    "/method-dependency": WORKER,
    "/async-method-dependency": LOOP,
    "/object-dependency": WORKER,
    "/yield-dependency": THREAD,
    "/async-yield-dependency": LOOP,
    "/exception-handler": THREAD,
    "/async-exception-handler": LOOP,
    "/stream": WORKER,
    "/async-stream": LOOP,
}


@pytest.mark.reliability("F02")
def test_what_answers_a_request_runs_where_fastapi_says(flags: Settings) -> None:
    with served(application(SimpleQueue()), flags) as it:
        where = {LOOP: it.loop, WORKER: it.worker, THREAD: ANYIO_WORKER}
        for path, place in ANSWERS.items():
            response = it.get(path)
            found = {line.strip('"') for line in response.text.splitlines()}
            assert found == {where[place]}, path
            assert response.headers["x-middleware"] == it.loop


@pytest.mark.reliability("F02")
@FEW_FLAGS
def test_a_websocket_endpoint_runs_on_the_loop(flags: Settings) -> None:
    with served(application(SimpleQueue()), flags) as it:
        with it.client.websocket_connect("/websocket") as socket:  # type: ignore[union-attr]
            assert socket.receive_text() == it.loop


@pytest.mark.reliability("F02")
@FEW_FLAGS
def test_a_background_task_runs_where_its_def_says(flags: Settings) -> None:
    places: SimpleQueue[str] = SimpleQueue()
    with served(application(places), flags) as it:
        assert places.get(timeout=TIMEOUT_S) == it.loop, "the lifespan's start-up"
        for path, place in (("/background", ANYIO_WORKER), ("/async-background", it.loop)):
            it.get(path)
            assert places.get(timeout=TIMEOUT_S) == place


@pytest.mark.reliability("F02")
@FEW_FLAGS
def test_lifespan_runs_on_the_loop(flags: Settings) -> None:
    places: SimpleQueue[str] = SimpleQueue()
    with served(application(places), flags) as it:
        loop = it.loop

    assert [places.get_nowait(), places.get_nowait()] == [loop, loop]


@FEW_FLAGS
def test_a_def_endpoint_called_through_a_handle_is_a_method(flags: Settings) -> None:
    with served(application(SimpleQueue()), flags) as it:
        called = it.handle.def_endpoint.remote().result(timeout_s=TIMEOUT_S)
        requested = it.get("/def").json()

        assert called == (it.worker if flags.run_sync_in_threadpool else it.loop)
        assert requested == it.worker


def built_by_function(places: list[str]) -> serve.Application:
    def build() -> FastAPI:
        places.append(here())
        return FastAPI()

    class K: ...

    return serve.deployment(serve.ingress(build)(K)).bind()


def built_by_method(places: list[str]) -> serve.Application:
    class K:
        def __serve_build_asgi_app__(self) -> FastAPI:
            places.append(here())
            return FastAPI()

    return serve.deployment(serve.ingress()(K)).bind()


def built_by_async_method(places: list[str]) -> serve.Application:
    class K:
        async def __serve_build_asgi_app__(self) -> FastAPI:
            places.append(here())
            return FastAPI()

    return serve.deployment(serve.ingress()(K)).bind()


@pytest.mark.parametrize("make", [built_by_function, built_by_method, built_by_async_method])
@FEW_FLAGS
def test_a_builder_runs_on_the_loop(
    flags: Settings, make: Callable[[list[str]], serve.Application]
) -> None:
    places: list[str] = []
    with served(make(places), flags) as it:
        assert places == [it.loop]


@pytest.mark.parametrize("separate", ["1", "0"])
def test_as_many_yield_dependencies_run_at_once_as_requests(
    separate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AnyIO alone would run 40 of them, and the rest would wait forever."""
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, separate)
    requests = 60
    all_inside = Barrier(requests)

    def meets() -> Iterator[None]:
        all_inside.wait(TIMEOUT_S)
        yield

    app = FastAPI()

    @app.get("/", dependencies=[Depends(meets)])
    async def endpoint() -> str:
        return "met"

    @serve.ingress(app)
    class Service: ...

    application = serve.deployment(max_ongoing_requests=requests)(Service).bind()

    async def ask() -> list[str]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            asked = [client.get("/", timeout=TIMEOUT_S) for _ in range(requests)]
            answers = await asyncio.gather(*asked)
        await application.aclose()
        return [answer.json() for answer in answers]

    assert asyncio.run(ask()) == ["met"] * requests
