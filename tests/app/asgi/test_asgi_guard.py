"""Errors of user code, wherever Starlette calls it, stay inside their request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from fastapi import BackgroundTasks, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.spec import ingress
from ingress.exceptions import RequestTimeoutError, UserCodeExit
from tests.asgi_helpers import Deployment, request
from tests.containment_app import boom, endpoints_on, make_app
from tests.servers import turns

pytestmark = pytest.mark.anyio

NAMES = ["Exception", "SystemExit-3", "KeyboardInterrupt", "CancelledError"]
NAMES += ["StopIteration", "RecursionError", "BaseException"]


async def fails() -> None:
    raise LookupError


async def chunks() -> AsyncIterator[str]:
    yield "1"
    raise LookupError


async def passing(request: Request, call_next: Callable[..., Any]) -> Response:
    response: Response = await call_next(request)
    return response


def add_passing(app: FastAPI, count: int = 1) -> None:
    """Add middleware that passes requests and responses on."""
    for _ in range(count):
        app.middleware("http")(passing)


def failing_app(middleware: int) -> type:
    app, mounted = make_app(), FastAPI()
    add_passing(app, middleware)
    app.mount("/mounted", mounted)
    add_passing(mounted)

    @mounted.get("/")
    async def below(e: str) -> None:
        boom(e)

    return endpoints_on(app, "K")


BEFORE_THE_ANSWER = [
    "/async_endpoint",
    "/def_endpoint",
    "/def_dependency",
    "/async_dependency",
    "/yield_dependency",
    "/async_yield_dependency",
    "/exception_handler",
    "/mounted/",
]


def is_answered(messages: list[dict[str, Any]], status: int) -> bool:
    """Return whether the response has this status and a clean end."""
    start, *_, last = messages
    is_complete = last["type"] == "http.response.body" and not last.get("more_body", False)
    return start["status"] == status and is_complete


async def answer(app: Any, path: str, **scope: Any) -> tuple[list[dict[str, Any]], Any]:
    """Serve an app by a deployment; return its answer to one request, and its error."""
    deployment = Deployment(ingress(app)())
    async with deployment.running():
        return await request(deployment, path, **scope)


async def check(
    app: Any, error: type[Exception], status: int = 500, path: str = "/", **scope: Any
) -> None:
    """Assert that a request is answered whole, and raises an error."""
    messages, raised = await answer(app, path, **scope)

    assert isinstance(raised, error)
    assert is_answered(messages, status)


async def exits() -> None:
    raise SystemExit


async def exiting(*_: Any) -> Any:
    raise SystemExit


async def failures(path: str, middleware: int) -> AsyncIterator[tuple[list[dict[str, Any]], Any]]:
    """Yield the answer to a request for each error, after one that was served behind it."""
    deployment = Deployment(failing_app(middleware))
    async with deployment.running():
        for error in NAMES:
            messages, raised = await request(deployment, f"{path}?e={error}")
            after, _ = await request(deployment, f"{path}?e=nothing")
            assert is_answered(after, 200), error
            assert isinstance(raised, Exception), error
            yield messages, raised


@pytest.mark.parametrize("middleware", [0, 1, 2])
@pytest.mark.parametrize("path", BEFORE_THE_ANSWER)
async def test_an_early_failure_is_a_500_and_the_next_is_served(path: str, middleware: int) -> None:
    async for messages, raised in failures(path, middleware):
        assert is_answered(messages, 500), raised


@pytest.mark.parametrize("middleware", [0, 1, 2])
@pytest.mark.parametrize("path", ["/sync_stream", "/async_stream"])
async def test_a_stream_that_fails_half_way_is_cut(path: str, middleware: int) -> None:
    async for (start, *body), raised in failures(path, middleware):
        assert (start["status"], body[0]["body"]) == (200, b"ok"), raised
        assert all(each["more_body"] for each in body), raised


@pytest.mark.parametrize("middleware", [0, 1, 2])
async def test_a_failing_background_task_leaves_the_answer_whole(middleware: int) -> None:
    async for messages, raised in failures("/background_task", middleware):
        assert is_answered(messages, 200), raised


async def test_a_cancelled_request_is_cancelled(app: FastAPI) -> None:
    waiting = asyncio.Event()
    add_passing(app)

    @app.get("/")
    async def root() -> None:
        waiting.set()
        await asyncio.Future()

    task = asyncio.create_task(answer(app, "/"))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("how", ["awaits", "shields", "sends", "groups"])
@pytest.mark.parametrize("middleware", [1, 2])
async def test_an_endpoint_below_middlewares_is_cancelled_once(middleware: int, how: str) -> None:
    """AnyIO would cancel it in every loop iteration; its cleanup must be able to end."""
    waiting = asyncio.Event()
    seen: list[str] = []
    app = FastAPI()

    add_passing(app, middleware)

    async def wait() -> None:
        try:
            waiting.set()
            await asyncio.Future()
        except asyncio.CancelledError:
            seen.append("cancelled")
            if how != "sends":
                raise
        finally:
            for _ in range(3):
                await asyncio.gather(turns())
            await anyio.sleep(0.001)
            seen.append("finally")

    @app.get("/")
    async def root() -> str:
        if how == "shields":
            with anyio.CancelScope(shield=True):
                waiting.set()
                for _ in range(3):
                    await asyncio.gather(turns())
                seen.append("shielded")
        if how == "groups":
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                await wait()
        await wait()
        return "swallowed"

    task = asyncio.create_task(answer(app, "/"))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await task

    assert seen == [*(["shielded"] if how == "shields" else []), "cancelled", "finally"]


async def test_a_middleware_that_fails_cancels_the_endpoint_below_it(app: FastAPI) -> None:
    seen: list[str] = []

    @app.middleware("http")
    async def failing(request: Request, call_next: Callable[..., Any]) -> Response:
        async with asyncio.timeout(0.01):
            response: Response = await call_next(request)
        return response

    @app.get("/")
    async def root() -> None:
        try:
            await asyncio.Future()
        finally:
            await asyncio.gather(turns())
            seen.append("finally")

    await check(app, TimeoutError)
    assert seen == ["finally"]


async def test_an_exit_in_a_middleware_between_others_is_contained(app: FastAPI) -> None:
    app.middleware("http")(exiting)
    add_passing(app)

    await check(app, UserCodeExit)


async def test_an_exit_below_a_mount_of_a_mount_is_contained() -> None:
    app, outer, inner = FastAPI(), FastAPI(), FastAPI()
    app.mount("/outer", outer)
    outer.mount("/inner", inner)

    add_passing(inner)

    inner.get("/")(exits)

    await check(app, UserCodeExit, path="/outer/inner/")


async def test_a_middleware_that_cancels_what_it_began_answers_for_it(app: FastAPI) -> None:
    class Impatient:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await self.app(scope, receive, send)
                return
            with anyio.CancelScope() as scope_of_app:

                async def cancelling_send(message: Any) -> None:
                    scope_of_app.cancel()
                    await anyio.lowlevel.checkpoint()

                await self.app(scope, receive, cancelling_send)
            await PlainTextResponse("too late", status_code=408)(scope, receive, send)

    app.add_middleware(Impatient)

    @app.get("/")
    async def root() -> Response:
        return StreamingResponse(chunks())

    messages, raised = await answer(app, "/")

    assert raised is None
    assert is_answered(messages, 408)


async def test_an_exit_in_the_middleware_of_a_mount_is_contained() -> None:

    middleware = [Middleware(BaseHTTPMiddleware, dispatch=passing)]
    app = FastAPI(routes=[Mount("/m", app=exiting, middleware=middleware)])

    await check(app, UserCodeExit, path="/m/")


async def test_an_exit_of_a_raw_app_is_contained() -> None:

    messages, raised = await answer(exiting, "/")

    assert isinstance(raised, UserCodeExit)
    assert messages == []


async def test_an_error_answer_in_place_of_a_kept_back_start_ends_clean(app: FastAPI) -> None:
    app.add_middleware(GZipMiddleware)  # holds the start back until the body

    class Broken(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise LookupError

    @app.get("/")
    async def root() -> Response:
        return Broken()

    await check(app, LookupError, headers=[(b"accept-encoding", b"gzip")])


class Hiding:
    """Middleware that ends a failed response, or just swallows the error."""

    def __init__(self, app: Any, *, ends: bool) -> None:
        self.app = app
        self.ends = ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception:
            if self.ends:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_a_middleware_that_hides_the_failure_does_not_hide_the_cut(app: FastAPI) -> None:
    app.add_middleware(Hiding, ends=True)

    @app.get("/")
    async def root() -> Response:
        return StreamingResponse(chunks())

    messages, raised = await answer(app, "/")

    assert isinstance(raised, LookupError)
    assert all(each["more_body"] for each in messages[1:])


async def test_a_background_failure_that_a_middleware_hides_leaves_the_answer_whole() -> None:
    app = FastAPI()
    app.add_middleware(Hiding, ends=False)

    @app.get("/")
    async def root(tasks: BackgroundTasks) -> None:
        tasks.add_task(fails)

    messages, raised = await answer(app, "/")

    assert raised is None
    assert is_answered(messages, 200)


async def test_an_exit_in_the_handler_for_every_exception_is_contained(app: FastAPI) -> None:
    app.exception_handler(Exception)(exiting)

    app.get("/")(fails)

    messages, raised = await answer(app, "/")

    assert isinstance(raised, UserCodeExit)
    assert messages == []


async def test_the_users_handler_for_every_exception_answers_an_exit(app: FastAPI) -> None:
    @app.exception_handler(Exception)
    async def handle(request: Request, error: Exception) -> Response:
        return PlainTextResponse(type(error).__name__, status_code=500)

    app.get("/")(exits)

    messages, _ = await answer(app, "/")

    assert messages[1]["body"] == b"UserCodeExit"


@pytest.mark.parametrize("middleware", [0, 1, 2])
async def test_the_error_of_a_call_that_ends_a_stream_is_raised_as_it_is(middleware: int) -> None:
    """It has a handler, for which Starlette raises another error once the response has begun."""
    app = FastAPI()
    add_passing(app, middleware)

    @app.get("/")
    async def stream() -> StreamingResponse:
        async def chunks() -> AsyncIterator[str]:
            yield "1"
            raise RequestTimeoutError("R", 1.0)

        return StreamingResponse(chunks())

    messages, raised = await answer(app, "/")

    assert isinstance(raised, RequestTimeoutError)
    assert messages[-1].get("more_body")
