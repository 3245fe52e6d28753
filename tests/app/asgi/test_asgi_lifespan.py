"""Lifespans: start-up, shutdown, and the state of each replica."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import Context, ContextVar
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.applications import Starlette
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

import ingress as ingress_package
from ingress.app.asgi.spec import ingress
from ingress.context import REPLICA
from ingress.exceptions import RayServeException, UserCodeExit
from tests.asgi_helpers import Deployment, Replica, bound, json_of, serve

pytestmark = pytest.mark.anyio


def application_with(lifespan: Any) -> Any:
    app = FastAPI(lifespan=lifespan)
    app.get("/")(lambda: "root")
    return ingress_package.deployment(ingress(app)()).bind()


def replica_of(app: Any) -> Replica:
    cls = ingress(app)()
    return Replica(cls, bound(cls))


def test_the_order_is_constructor_start_up_requests_shutdown() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        log.append("start-up")
        yield
        log.append("shutdown")

    app = FastAPI(lifespan=lifespan)

    @ingress(app)
    class K:
        def __init__(self) -> None:
            log.append("constructor")

        @app.get("/")
        def root(self) -> None:
            log.append("request")

    with serve(K) as client:
        client.get("/")

    assert log == ["constructor", "start-up", "request", "shutdown"]


async def test_start_up_and_shutdown_are_one_task_in_the_replica() -> None:
    variable: ContextVar[str] = ContextVar("variable")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        token, task = variable.set("x"), asyncio.current_task()
        assert REPLICA.get().asgi_app is app
        async with anyio.create_task_group():
            yield
        assert asyncio.current_task() is task
        variable.reset(token)

    replica = replica_of(FastAPI(lifespan=lifespan))
    await asyncio.create_task(replica.start())
    await asyncio.create_task(replica.stop())

    assert REPLICA.get(None) is None


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (LookupError("no model"), LookupError),
        (SystemExit(3), UserCodeExit),
        (KeyboardInterrupt(), UserCodeExit),
        (asyncio.CancelledError(), UserCodeExit),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
@pytest.mark.parametrize("phase", ["start-up", "shutdown"])
async def test_what_the_lifespan_raises_is_raised(
    phase: str, raised: BaseException, expected: type[Exception]
) -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if phase == "start-up":
            raise raised
        yield
        raise raised

    replica = replica_of(FastAPI(lifespan=lifespan))
    if phase == "start-up":
        with pytest.raises(expected) as caught:
            await replica.start()
        await replica.stop()
    else:
        await replica.start()
        with pytest.raises(expected) as caught:
            await replica.stop()
        await replica.stop()  # the error is raised once only

    assert caught.value is raised or caught.value.__cause__ is raised


async def test_a_middleware_that_cannot_be_built_fails_the_start(app: FastAPI) -> None:
    def broken(app: Any) -> Any:
        raise LookupError("no config")

    app.add_middleware(broken)
    with pytest.raises(LookupError, match="no config"):
        await replica_of(app).start()


async def test_a_cancelled_start_cancels_the_lifespan() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        started.set()
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        yield

    task = asyncio.create_task(replica_of(FastAPI(lifespan=lifespan)).start())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        await cancelled.wait()


async def raises(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    await PlainTextResponse("served")(scope, receive, send)


async def returns(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await PlainTextResponse("served")(scope, receive, send)


async def reads_and_raises(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await receive()
        raise RuntimeError("what is this?")
    await PlainTextResponse("served")(scope, receive, send)


@pytest.mark.parametrize("app", [raises, returns, reads_and_raises])
def test_an_app_without_lifespan_is_served_without(app: Callable[..., Any]) -> None:
    with serve(ingress(app)()) as client:
        assert client.get("/").text == "served"


async def test_a_raw_app_says_that_its_start_up_failed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    with pytest.raises(RayServeException, match="no database"):
        await replica_of(app).start()


def test_each_request_gets_a_copy_of_what_the_lifespan_yields() -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        yield {"model": "m"}

    app = FastAPI(lifespan=lifespan)

    @ingress(app)
    class K:
        @app.get("/")
        def root(self, request: Request) -> list[Any]:
            seen = [request.state.model, getattr(request.state, "mine", None)]
            request.state.mine = "x"
            return seen

    with serve(K) as client:
        assert client.get("/").json() == client.get("/").json() == ["m", None]


@asynccontextmanager
async def yields_a_name(app: FastAPI) -> AsyncIterator[dict[str, str]]:
    yield {"name": "K"}


def test_the_callers_scope_gets_what_the_lifespan_yields() -> None:
    with TestClient(application_with(yields_a_name)) as client:
        assert client.app_state == {"name": "K"}
    assert client.app_state == {"name": "K"}


async def test_a_replica_that_ends_before_its_application_takes_its_state_back() -> None:
    cls = application_with(yields_a_name).deployment.func_or_class
    state: dict[str, object] = {"other": 1}
    replica = Replica(cls, bound(cls))
    await replica.start()
    assert replica.context.lifespan is not None
    replica.context.lifespan.share(state)
    assert state == {"other": 1, "name": "K"}
    await replica.stop()
    assert state == {"other": 1}


def test_an_error_after_the_yield_of_a_lifespan_is_raised_where_the_application_is_left() -> None:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        raise LookupError("no model to unload")

    client = TestClient(application_with(lifespan))
    with pytest.raises(LookupError, match="no model to unload"), client:
        assert client.get("/").json() == "root"

    parent = FastAPI(lifespan=application_with(lifespan).lifespan)
    with pytest.raises(LookupError, match="no model to unload"), TestClient(parent):
        pass


def test_a_middleware_that_refuses_the_lifespan_leaves_the_app_without_as_under_uvicorn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NeedsHeaders:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            assert scope["headers"]
            await self.app(scope, receive, send)

    app = FastAPI()
    app.add_middleware(NeedsHeaders)
    app.get("/")(lambda: "root")

    assert json_of(ingress(app)(), "/") == "root"
    (record,) = [each for each in caplog.records if each.name == "ingress"]
    assert "let the middleware pass on scopes whose type is 'lifespan'" in record.message


def test_start_up_handlers_of_included_routers_run() -> None:
    log: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        log.append("up")
        yield
        log.append("down")

    app, router = FastAPI(), APIRouter(lifespan=lifespan)
    app.include_router(router)

    with serve(ingress(app)()):
        assert log == ["up"]
    assert log == ["up", "down"]


def test_app_state_is_each_replicas_own_under_the_name_of_the_users_app(app: FastAPI) -> None:
    app.state.shared = "shared"

    @ingress(app)
    class K:
        count = 0

        def __init__(self) -> None:
            K.count += 1
            app.state.number = K.count

        @app.get("/")
        def root(self, request: Request) -> list[Any]:
            same = request.app.state.number == app.state.number
            return [app.state.number, same, "number" in app.state, app.state["shared"]]

    with serve(K, replicas=2) as client:
        assert client.get("/").json() == [1, True, True, "shared"]
        assert client.get("/").json() == [2, True, True, "shared"]
        assert not hasattr(app.state, "number")
        with pytest.raises(AttributeError, match="where no replica would see it"):
            app.state.late = 1
    assert app.state.shared == "shared"


@pytest.mark.parametrize("of_constructor", [False, True], ids=["lifespan", "constructor"])
def test_what_opens_once_ends_the_start_of_a_second_replica_with_the_way_out(
    tmp_path: Path, of_constructor: bool
) -> None:
    def opens_once() -> None:
        (tmp_path / "lock").touch(exist_ok=False)

    @asynccontextmanager
    async def lifespan(given: FastAPI) -> AsyncIterator[None]:
        if not of_constructor:
            opens_once()
        yield

    class K:
        def __init__(self) -> None:
            if of_constructor:
                opens_once()

    web = ingress_package.deployment(num_replicas=2)(ingress(FastAPI(lifespan=lifespan))(K))
    with (
        pytest.raises(
            RuntimeError, match=r"lock'\nAnother replica .* has started\..*num_replicas=1"
        ),
        TestClient(web.bind()),
    ):
        pass


def test_an_error_of_all_replicas_says_nothing_about_other_replicas() -> None:
    @ingress_package.deployment(num_replicas=2)
    class K:
        def __init__(self) -> None:
            raise OSError("the licence has already expired")

    with pytest.raises(RuntimeError, match="already expired") as raised:
        ingress_package.run(K.bind(), route_prefix=None)
    assert "Another replica" not in str(raised.value)


def in_own_thread(read: Callable[[], Any]) -> Any:
    """Return the result or the error of `read` in a thread with an empty context."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(Context().run, read)
        return done.exception() or done.result()


@pytest.mark.parametrize("of_loop", [False, True], ids=["signal", "loop"])
def test_a_signal_handler_in_a_lifespan_ends_the_start_with_the_way_out(of_loop: bool) -> None:
    @asynccontextmanager
    async def lifespan(given: FastAPI) -> AsyncIterator[None]:
        if of_loop:
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, int)
        else:
            signal.signal(signal.SIGUSR2, lambda *_: None)
        yield

    with (
        pytest.raises(RuntimeError, match=r"main thread.*\. .* after `yield`"),
        TestClient(application_with(lifespan)),
    ):
        pass


def test_own_threads_find_the_state_of_the_only_replica(app: FastAPI) -> None:
    @asynccontextmanager
    async def lifespan(given: FastAPI) -> AsyncIterator[None]:
        app.state.value = "of the lifespan"
        app.mine = "mine"  # type: ignore[attr-defined]
        yield

    app.router.lifespan_context = lifespan

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self) -> list[Any]:
            return [app.state.value, in_own_thread(lambda: app.mine)]  # type: ignore[attr-defined]

    with serve(K) as client:
        assert in_own_thread(lambda: app.state.value) == "of the lifespan"
        app.state.value = "of the test"
        assert client.get("/").json() == ["of the test", "mine"]
    assert not hasattr(app.state, "value")


def test_own_threads_are_told_that_each_of_several_replicas_has_a_state(app: FastAPI) -> None:
    @ingress(app)
    class K:
        def __init__(self) -> None:
            app.state.value = 1

    app.state.before = "before"
    with serve(K, replicas=2):
        assert in_own_thread(lambda: app.state.before) == "before"
        error = in_own_thread(lambda: app.state.value)
        assert isinstance(error, AttributeError)
        assert "no attribute 'value'. Each replica has an app of its own" in str(error)
        assert "copy_context().run" in str(error)
        error = in_own_thread(lambda: app.state["value"])
        assert isinstance(error, KeyError)
        assert "copy_context().run" in str(error)
        for change, name in (
            (lambda: setattr(app.state, "value", 2), "app.state.value cannot be set"),
            (lambda: delattr(app.state, "value"), "app.state.value cannot be deleted"),
            (lambda: app.state.__setitem__("value", 2), "app.state.value cannot be set"),
            (lambda: app.state.__delitem__("value"), "app.state.value cannot be deleted"),
            (lambda: setattr(app, "mine", 2), "app.mine cannot be set"),
            (lambda: delattr(app, "mine"), "app.mine cannot be deleted"),
        ):
            error = in_own_thread(change)
            assert isinstance(error, AttributeError)
            assert f"{name} here, where no replica would see it" in str(error)
            assert "copy_context().run" in str(error)
        app.title = "of all"
        app.dependency_overrides = {}


def test_a_replicas_app_equals_the_users_app_and_no_other_replicas(app: FastAPI) -> None:
    apps: list[Any] = []

    @ingress(app)
    class K:
        @app.get("/")
        async def root(self, request: Request) -> list[bool]:
            apps.append(request.app)
            return [request.app == app, app == request.app, request.app in {app: 1}]

    with serve(K, replicas=2) as client:
        assert [client.get("/").json() for _ in range(2)] == [[True] * 3] * 2
        first, second = apps
        assert first != second
        assert len({app: 0, first: 1, second: 2}) == 3


def test_a_replica_that_touches_the_app_of_another_deployment_sees_that_apps_state() -> None:
    app, other = FastAPI(), FastAPI()
    other.state.name = "other"

    @ingress(app)
    class K:
        @app.get("/")
        def root(self) -> str:
            name: str = other.state.name
            return name

    with serve(K) as client, serve(ingress(other)()):
        assert client.get("/").json() == "other"


def test_a_starlette_has_a_state_of_its_own_in_each_replica() -> None:
    def root(request: StarletteRequest) -> PlainTextResponse:
        request.app.state.count = getattr(request.app.state, "count", 0) + 1
        return PlainTextResponse(str(app.state.count))

    app = Starlette(routes=[Route("/", root)])

    with serve(ingress(app)(), replicas=2) as client:
        assert [client.get("/").text for _ in range(4)] == ["1", "1", "2", "2"]


async def test_middleware_is_made_for_each_replica(app: FastAPI) -> None:
    made: list[Any] = []

    class Counting:
        def __init__(self, app: Any) -> None:
            self.app = app
            made.append(self)

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await self.app(scope, receive, send)

    app.add_middleware(Counting)

    async with Deployment(ingress(app)(), replicas=2).running():
        assert len(made) == 2
    assert app.middleware_stack is None
