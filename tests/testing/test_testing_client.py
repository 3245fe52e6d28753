"""`ingress.testing.TestClient`: FastAPI's client with handles; it stops everything at its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import from_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response, WebSocket
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Mount
from starlette.testclient import TestClient as StarletteClient
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL
from ingress.engines import local_engine
from ingress.testing import AsyncClient, TestClient
from tests.programs import UVICORN, environment, process, run_python, write_module
from tests.servers import bind, set_flags


def greeter(greeting: str = "hello") -> serve.Application:
    """Return an application of two deployments."""
    app = FastAPI()

    @serve.deployment
    class Loud:
        async def __call__(self, text: str) -> str:
            return text.upper()

    def language() -> str:
        return "en"

    @serve.deployment(name="Greeter")
    @serve.ingress(app)
    class Greeter:
        def __init__(self, loud: serve.DeploymentHandle) -> None:
            self.loud = loud
            self.greeting = greeting

        @app.get("/greet")
        async def greet(self, name: str, spoken: str = Depends(language)) -> str:
            return f"{self.greeting}, {await self.loud.remote(name)} ({spoken})"

        async def say(self, name: str) -> str:
            return f"{self.greeting}, {name}"

    return bind(Greeter, bind(Loud))


either = pytest.mark.parametrize("make", [StarletteClient, TestClient], ids=["starlettes", "ours"])


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_it_serves_a_bound_deployment_and_has_its_handles() -> None:
    with TestClient(greeter()) as client:
        assert client.get("/greet", params={"name": "you"}).json() == "hello, YOU (en)"
        assert client.handle.say.remote("you").result() == "hello, you"
        assert client.get_deployment_handle("Loud").remote("you").result() == "YOU"
        with pytest.raises(KeyError, match="Quiet"):
            client.get_deployment_handle("Quiet")


def test_it_takes_what_fastapis_takes() -> None:
    application = greeter()

    with TestClient(
        application, base_url="http://there", headers={"x-test": "1"}, raise_server_exceptions=False
    ) as client:
        response = client.get("/greet", params={"name": "you"})
        assert (response.request.url.host, response.request.headers["x-test"]) == ("there", "1")
        assert client.app is application
        assert isinstance(client, StarletteClient)


def test_what_the_lifespan_of_a_user_does_is_done() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        events.append("began")
        yield
        events.append("ended")

    app = FastAPI(lifespan=lifespan)

    @serve.deployment
    @serve.ingress(app)
    class App: ...

    with TestClient(bind(App)):
        assert events == ["began"]
    assert events == ["began", "ended"]


def mounted(application: Any, path: str = "/v1") -> Starlette:
    return Starlette(routes=[Mount(path, application)])


def included(application: serve.Application) -> FastAPI:
    router, app = APIRouter(), FastAPI()
    router.mount("/v1", application)
    app.include_router(router)
    return app


MOUNTED: dict[str, Any] = {
    "mounted": mounted,
    "mounted in a mounted app": lambda app: mounted(mounted(app, "/")),
    "mounted behind a middleware": lambda app: mounted(GZipMiddleware(app)),
    "in a router that is included": included,
    "the app itself behind a middleware": lambda app: TrustedHostMiddleware(mounted(app)),
}


@pytest.mark.parametrize("make", MOUNTED.values(), ids=MOUNTED)
def test_a_parent_apps_application_has_handles_and_is_stopped(make: Any, separate: str) -> None:
    before = names_of_threads()

    with TestClient(make(greeter())) as client:
        assert client.handle.say.remote("you").result() == "hello, you"
        assert client.get("/v1/greet", params={"name": "you"}).json() == "hello, YOU (en)"
    assert names_of_threads() == before


def test_what_a_parents_lifespan_starts_is_started_once_and_lives_on_its_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_flags(monkeypatch, "0")
    made: list[str] = []
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class App:
        def __init__(self) -> None:
            made.append(threading.current_thread().name)

        @app.get("/")
        async def where(self) -> str:
            return threading.current_thread().name

    application = bind(App)
    parent = FastAPI(lifespan=application.lifespan)
    parent.mount("/v1", application)

    @parent.get("/where")
    async def where() -> str:
        return threading.current_thread().name

    with TestClient(parent) as client:
        loop = client.get("/where").json()
        assert made == [loop]
        assert client.get("/v1/").json() == loop
        assert client.handle.where.remote().result() == loop
    assert len(made) == 1


def test_of_several_applications_one_is_named() -> None:
    first, second = greeter("hello"), greeter("bye")
    parent = Starlette(routes=[Mount("/1", first), Mount("/2", second), Mount("/again", first)])

    with TestClient(parent) as client:
        with pytest.raises(ValueError, match="which one"):
            client.handle
        assert client.get_app_handle(second).say.remote("you").result() == "bye, you"
        loud = client.get_deployment_handle("Loud", first)
        assert loud.remote("you").result() == "YOU"
        assert loud.app_name != client.get_app_handle(second).app_name
        with pytest.raises(ValueError, match="not Application"):
            client.get_app_handle(greeter())


def test_a_handle_outside_of_the_with_says_what_is_missing() -> None:
    client = TestClient(greeter())

    with pytest.raises(RuntimeError, match="with TestClient"):
        client.handle


def test_without_with_a_request_starts_it_and_close_stops_it() -> None:
    before = names_of_threads()

    client = TestClient(greeter())
    assert client.get("/greet", params={"name": "you"}).status_code == 200
    assert names_of_threads() != before
    client.close()
    assert names_of_threads() == before


def test_one_client_leaves_what_another_ones_lifespan_has() -> None:
    application = greeter()

    with TestClient(application) as first:
        with TestClient(mounted(application)) as second:
            assert second.handle.say.remote("you").result() == "hello, you"
        assert first.handle.say.remote("you").result() == "hello, you"


def test_a_deployment_that_is_not_bound_is_refused() -> None:
    @serve.deployment
    class Model:
        pass

    with pytest.raises(TypeError, match=r"TestClient\(Model\.bind"):
        TestClient(Model)  # type: ignore[arg-type]


# WebSockets.


def sockets() -> serve.Application:
    app = FastAPI()

    @app.middleware("http")
    async def passes_on(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        return response

    @serve.deployment
    @serve.ingress(app)
    class Sockets:
        @app.websocket("/never")
        async def never(self, websocket: WebSocket) -> None:
            pass

        @app.websocket("/waits")
        async def waits(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await asyncio.Event().wait()

        @app.websocket("/ends")
        def ends(self, websocket: WebSocket) -> None:
            from_thread.run(websocket.accept)
            from_thread.run(websocket.close)

        @app.websocket("/echo")
        async def echo(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text(await websocket.receive_text())

    return bind(Sockets)


@pytest.mark.usefixtures("separate")
def test_a_handler_that_returns_without_an_answer_is_an_error_where_it_was_connected() -> None:
    with TestClient(sockets()) as client:
        with pytest.raises(RuntimeError, match="'/never' returned without an answer"):
            with client.websocket_connect("/never"):
                pass
        with client.websocket_connect("/echo") as socket:
            socket.send_text("hey")
            assert socket.receive_text() == "hey"


def test_starlettes_own_client_waits_for_ever_for_such_a_handler_of_starlettes() -> None:
    """If this fails, the workaround in `ingress.testing.TestClient` can go."""
    script = """
import os, threading
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient

returned, connected = threading.Event(), threading.Event()

async def never(websocket):
    returned.set()

def connect():
    app = Starlette(routes=[WebSocketRoute("/never", never)])
    try:
        with TestClient(app) as client, client.websocket_connect("/never"):
            pass
    finally:
        connected.set()

threading.Thread(target=connect, daemon=True).start()
assert returned.wait(20)
print("answered" if connected.wait(0.3) else "waits", flush=True)
os._exit(0)
"""
    assert output_of(script) == ["waits"]


@pytest.mark.usefixtures("separate", "switch_interval")
@pytest.mark.parametrize("path", ["/waits", "/ends", "/echo"])
@either
def test_a_client_that_leaves_a_handler_behind_middleware_is_not_cancelled_itself(
    path: str, make: type[StarletteClient]
) -> None:
    # What `receive` raises is the handler's error, as in Starlette; `close` has no client any more.
    told = pytest.raises(WebSocketDisconnect) if path == "/echo" else nullcontext()
    with make(sockets()) as client:
        for _ in range(10):
            with told, client.websocket_connect(path):
                pass


@pytest.mark.usefixtures("switch_interval")
@either
def test_a_client_that_leaves_returns_after_the_clean_up_of_a_handler_that_does_not_listen(
    make: type[StarletteClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags(monkeypatch, "1")  # on the client's loop its scope cancels the clean-up, as in plain
    app, cleaned_up = FastAPI(), list[str]()

    @serve.deployment
    @serve.ingress(app)
    class Waits:
        @app.websocket("/")
        async def endpoint(self, websocket: WebSocket) -> None:
            await websocket.accept()
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(1000):
                    await asyncio.sleep(0)
                cleaned_up.append("cleaned up")

    with make(bind(Waits)) as client:
        for count in range(1, 6):
            with client.websocket_connect("/"):
                pass
            assert len(cleaned_up) == count


@pytest.mark.usefixtures("switch_interval")
@either
@pytest.mark.parametrize("fails", ["after the disconnect", "before"])
def test_a_handler_ends_and_its_error_is_raised_in_the_test_that_leaves_it(
    fails: str, make: type[StarletteClient]
) -> None:
    app, events = FastAPI(), list[str]()

    @serve.deployment
    @serve.ingress(app)
    class Fails:
        @app.websocket("/")
        async def endpoint(self, websocket: WebSocket) -> None:
            await websocket.accept()
            if fails == "before":
                raise LookupError("no such room")
            try:
                await websocket.receive_text()
            except WebSocketDisconnect:
                for _ in range(100):
                    await asyncio.sleep(0)
                events.append("cleaned up")
                raise LookupError("no such room") from None

    with make(bind(Fails)) as client:
        for count in range(1, 11):
            with pytest.raises(LookupError, match="no such room"), client.websocket_connect("/"):
                pass
            assert events == ["cleaned up"] * (count if fails == "after the disconnect" else 0)


def test_a_server_answers_500_where_the_client_raises(tmp_path: Path) -> None:
    write_module(
        tmp_path,
        "never",
        "from fastapi import FastAPI, WebSocket\n"
        "import ingress as serve\n"
        "app = FastAPI()\n"
        "@serve.deployment\n"
        "@serve.ingress(app)\n"
        "class Sockets:\n"
        "    @app.websocket('/never')\n"
        "    async def never(self, websocket: WebSocket):\n"
        "        pass\n"
        "sockets = Sockets.bind()\n",
    )
    with process([*UVICORN, "never:sockets"], tmp_path, environment(tmp_path)) as server:
        with pytest.raises(InvalidStatus, match="500"):
            connect(f"ws://127.0.0.1:{server.port}/never", proxy=None)


# Cost without using it.


def output_of(script: str) -> list[str]:
    """Return the words of a program's output."""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", ["ingress", "ingress.cli.commands", "ingress.engines.local"])
def test_the_product_imports_nothing_of_it(module: str) -> None:
    names = ("ingress.testing", "pytest", "_pytest", "starlette.testclient")

    assert not output_of(
        f"import sys, {module}\nprint(*(name for name in sys.modules if name.startswith({names})))"
    )


def test_the_plugin_imports_no_http_client() -> None:
    assert not output_of(
        "import sys, ingress.testing.plugin\n"
        "print(*{'httpx', 'httpx2', 'starlette.testclient'} & {*sys.modules})"
    )


@pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")
@pytest.mark.parametrize(("flag", "thread"), [("0", "Where#0"), ("1", "Where#0-worker-0")])
def test_the_flags_are_those_of_the_environment_when_it_is_entered(
    flag: str, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @serve.deployment
    class Where:
        def name(self) -> str:
            return threading.current_thread().name

    client = TestClient(bind(Where))
    monkeypatch.setenv(SYNC_IN_THREADPOOL, flag)

    with client:
        assert client.handle.name.remote().result() == thread


# On the event loop of an async test.


@pytest.mark.parametrize("shape", ["bound", "mounted", "in a parent's lifespan"])
def test_an_async_client_runs_the_application_on_the_loop_of_the_test(shape: str) -> None:
    events: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, str]]:
        events.append("begun")
        yield {"key": "value"}
        events.append("ended")

    app = FastAPI(lifespan=lifespan)

    @serve.deployment(num_replicas=1)
    @serve.ingress(app)
    class Api:
        @app.get("/")
        async def root(self, request: Request) -> list[str]:
            return [threading.current_thread().name, *sorted(request.state._state.values())]

    application = bind(Api)

    @asynccontextmanager
    async def parents(parent: FastAPI) -> AsyncIterator[dict[str, str]]:
        async with anyio.create_task_group(), application.lifespan(parent):
            yield {"of": "parent"}

    target: Any = application
    if shape != "bound":
        target = FastAPI(lifespan=None if shape == "mounted" else parents)
        target.mount("/", application)

    async def ask() -> None:
        async with AsyncClient(target) as client:
            assert events == ([] if shape == "mounted" else ["begun"])
            here = threading.current_thread().name
            of = ["parent"] if shape == "in a parent's lifespan" else []
            assert (await client.get("/")).json() == [here, *of, "value"]
        assert events == ["begun", "ended"]
        assert not local_engine().is_running
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(ask())


def test_an_async_client_raises_the_errors_of_the_application() -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Fails:
        def __init__(self, *, starts: bool) -> None:
            if not starts:
                raise LookupError("no model")

        @app.get("/")
        async def root(self) -> None:
            raise LookupError("no row")

    async def ask() -> None:
        async with AsyncClient(bind(Fails, starts=True)) as client:
            with pytest.raises(LookupError, match="no row"):
                await client.get("/")
        shown = AsyncClient(bind(Fails, starts=True), raise_app_exceptions=False)
        async with shown as client:
            assert (await client.get("/")).status_code == 500
        with pytest.raises(RuntimeError, match="no model"):
            async with AsyncClient(bind(Fails, starts=False)):
                raise AssertionError("it has not started")
        assert not local_engine().is_running
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(ask())
