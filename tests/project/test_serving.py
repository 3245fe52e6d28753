"""Every way to serve an application, by real servers; none leaves anything behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from starlette.requests import Request
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ingress as serve
from ingress import testing
from ingress.engines import local_engine
from tests.asgi_helpers import request, under_server
from tests.programs import INGRESS, UVICORN, environment, process, run_ingress, write_module
from tests.servers import PATIENCE_S, bind, get, served, wait_until

APP = """
from fastapi import FastAPI, Request
import ingress as serve
app = FastAPI()

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Hello:
    def __init__(self, greeting="hello"):
        self.greeting = greeting

    @app.get("/sync")
    def sync_endpoint(self, name: str = "you"): return f"{self.greeting} {name}"

    @app.get("/where")
    async def where(self, request: Request):
        import os
        return {"pid": os.getpid(), "url": str(request.url_for("where"))}

hello = Hello.bind("hi")

@serve.deployment
class Failing:
    def __init__(self):
        raise ValueError("no model file")

failing = Failing.bind()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


# In a separate process.


@pytest.mark.reliability("F08")
@pytest.mark.parametrize(
    ("command", "separate"),
    [
        ([*UVICORN, "app:hello"], "1"),
        ([*UVICORN, "app:hello", "--loop", "asyncio", "--http", "h11"], "0"),
        ([*INGRESS, "run", "app:hello", "--port", "0"], "0"),
        ([*INGRESS, "run", "app:hello", "--port", "0"], "1"),
    ],
    ids=["uvicorn", "uvicorn-asyncio-h11", "ingress-run-shared", "ingress-run"],
)
def test_a_server_serves_it_and_stops_cleanly(
    folder: Path, command: list[str], separate: str
) -> None:
    with process(command, folder, environment(folder, separate=separate)) as server:
        assert get(server.port, "/sync?name=me").body == b'"hi me"'
        assert get(server.port, "/-/healthz").body == b"success"
        assert get(server.port, "/-/routes").body == b'{"/": "default"}'
        server.signal()
        assert server.wait() in (0, -15)
        assert "Traceback" not in server.output


@pytest.mark.reliability("F08")
def test_uvicorn_with_two_workers_has_the_application_in_each(folder: Path) -> None:
    command = [*UVICORN, "app:hello", "--workers", "2"]
    with process(command, folder, environment(folder)) as server:
        wait_until(lambda: server.output.count("Application startup complete") == 2)
        pids = set()
        for _ in range(400):
            pids.add(get(server.port, "/where").body.split(b",")[0])
            if len(pids) == 2:
                break
        assert len(pids) == 2
        server.signal()
        assert server.wait() in (0, -15)


@pytest.mark.parametrize(
    "command",
    [
        [*UVICORN, "app:hello", "--reload"],
        [*INGRESS, "run", "app:hello", "--port", "0", "--reload"],
    ],
    ids=["uvicorn", "ingress-run"],
)
def test_reload_serves_the_edited_file(folder: Path, command: list[str]) -> None:
    with process(command, folder, environment(folder)) as server:

        def says(body: bytes) -> bool:
            try:
                return get(server.port, "/sync").body == body
            except ConnectionRefusedError:  # the listening process has not started yet
                return False

        wait_until(lambda: says(b'"hi you"'))
        write_module(folder, "app", APP.replace('bind("hi")', 'bind("good morning")'))
        wait_until(lambda: says(b'"good morning you"'))
        server.signal()
        assert server.wait() in (0, -15)


def test_uvicorn_root_path_is_in_the_links(folder: Path) -> None:
    command = [*UVICORN, "app:hello", "--root-path", "/api"]
    with process(command, folder, environment(folder)) as server:
        answer = get(server.port, "/where")

        assert f"{server.url[:16]}/api/where".encode() in answer.body
        assert b'"/api/openapi.json"' in get(server.port, "/docs").body.replace(b"'", b'"')


def test_uvicorn_serves_it_on_a_unix_socket(folder: Path) -> None:
    path = folder / "s"
    command = [*UVICORN[:3], "app:hello", "--uds", str(path)]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("Uvicorn running")
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/sync").json() == "hi you"
            assert client.get("/-/routes").json() == {"/": "default"}


@pytest.mark.parametrize(
    ("command", "separate"),
    [([*UVICORN, "app:failing"], "0"), ([*INGRESS, "run", "app:failing", "--port", "0"], "1")],
    ids=["uvicorn", "ingress-run"],
)
def test_a_constructor_that_fails_ends_the_server_with_its_traceback(
    folder: Path, command: list[str], separate: str
) -> None:
    with process(command, folder, environment(folder, separate=separate)) as server:
        assert server.wait() not in (0, -15)
        assert "Failing" in server.output
        assert 'raise ValueError("no model file")' in server.output
        assert "deployment 'Failing' failed to start" in server.output


# In this process, each way twice.


async def answers(application: Any, *paths: str) -> list[httpx.Response]:
    """Ask for all these paths at once, in this process."""
    transport = httpx.ASGITransport(application, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await asyncio.gather(*map(client.get, paths))


def greeting(name: str = "you") -> serve.Application:
    app = FastAPI()

    @serve.deployment(num_replicas=2)
    @serve.ingress(app)
    class Hello:
        @app.get("/def")
        def def_endpoint(self) -> str:
            return f"hi {name}"

        @app.get("/async")
        async def async_endpoint(self) -> str:
            return f"hi {name}"

        @app.get("/boom")
        async def boom(self) -> None:
            raise ValueError("the user's own")

    return bind(Hello)


def by_run(application: serve.Application) -> list[str]:
    with httpx.Client(base_url=f"http://127.0.0.1:{served(application)}") as client:
        found = [client.get(path).json() for path in ("/def", "/async")]
    serve.shutdown()
    return found


def by_handle(application: serve.Application) -> list[str]:
    handle = serve.run(application, route_prefix=None)
    return [handle.def_endpoint.remote().result(), handle.async_endpoint.remote().result()]


def by_client_with(application: serve.Application) -> list[str]:
    with TestClient(application) as client:
        return [client.get(path).json() for path in ("/def", "/async")]


def by_client_without(application: serve.Application) -> list[str]:
    client = TestClient(application)
    return [client.get(path).json() for path in ("/def", "/async")]


def by_transport(application: serve.Application) -> list[str]:
    return [asyncio.run(answers(application, each))[0].json() for each in ("/def", "/async")]


def by_mount(application: serve.Application) -> list[str]:
    parent = FastAPI()
    parent.mount("/v1", application)
    with TestClient(parent) as client:
        return [client.get(path).json() for path in ("/v1/def", "/v1/async")]


def by_mount_with_lifespan(application: serve.Application) -> list[str]:
    parent = FastAPI(lifespan=application.lifespan)
    parent.mount("/v1", application)
    with TestClient(parent) as client:
        return [client.get(path).json() for path in ("/v1/def", "/v1/async")]


@pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")
@pytest.mark.parametrize(
    "way",
    [
        by_run,
        by_handle,
        by_client_with,
        by_client_without,
        by_transport,
        by_mount,
        by_mount_with_lifespan,
    ],
)
def test_it_is_served_twice_in_one_process(
    separate: str, way: Callable[[serve.Application], list[str]]
) -> None:
    application = greeting()
    assert way(application) == ["hi you"] * 2
    assert way(application) == ["hi you"] * 2
    serve.shutdown()
    assert way(application) == ["hi you"] * 2
    assert way(greeting("again")) == ["hi again"] * 2


def test_the_first_requests_start_it_once(separate: str) -> None:
    made: list[int] = []

    @serve.deployment(num_replicas=3)
    class Counted:
        def __init__(self) -> None:
            made.append(1)

        async def __call__(self) -> str:
            return "x"

    assert [each.text for each in asyncio.run(answers(bind(Counted), *["/"] * 30))] == ["x"] * 30
    assert len(made) == 3


def test_a_start_that_fails_fails_all_who_wait_and_is_tried_again(separate: str) -> None:
    attempts: list[int] = []
    all_wait = threading.Event()

    @serve.deployment
    class Flaky:
        def __init__(self) -> None:
            attempts.append(1)
            if len(attempts) == 1:
                assert all_wait.wait(PATIENCE_S)
                raise ValueError("not yet")

        async def __call__(self) -> str:
            return "x"

    application = bind(Flaky)

    async def never(*_: Any) -> Any:
        raise AssertionError("the start failed, so nothing is received or sent")

    async def come_first(count: int) -> list[Any]:
        scope = {"type": "http", "path": "/", "headers": []}
        comers = [asyncio.create_task(application(scope, never, never)) for _ in range(count)]
        asyncio.get_running_loop().call_soon(all_wait.set)  # every request waits now
        return await asyncio.gather(*comers, return_exceptions=True)

    failures = asyncio.run(come_first(5))
    assert [str(failure.__cause__) for failure in failures] == ["not yet"] * 5
    found = asyncio.run(answers(application, *["/"] * 5))
    assert [each.status_code for each in found] == [200] * 5
    assert len(attempts) == 2


@pytest.mark.anyio
async def test_a_first_comer_that_leaves_does_not_take_the_start_with_it(separate: str) -> None:
    may_start, made = threading.Event(), threading.Event()

    @serve.deployment
    class Slow:
        async def __init__(self) -> None:  # type: ignore[misc]
            made.set()
            await asyncio.to_thread(may_start.wait, PATIENCE_S)

        async def __call__(self) -> str:
            return "x"

    application = bind(Slow)
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        first = asyncio.ensure_future(client.get("/"))
        await asyncio.to_thread(made.wait, PATIENCE_S)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.ensure_future(client.get("/"))
        may_start.set()
        assert (await second).text == "x"
    await application.aclose()


# In this process, on the event loop of a client without a server.


async def connection() -> Any:
    raise AssertionError("the test overrides this")


async def where(application: serve.Application) -> str:
    """Return the name of the thread that runs an `async def` endpoint."""
    (found,) = await answers(application, "/where")
    name: str = found.json()
    return name


def on_loop_of_caller(
    up: list[str], waits: testing.Latch | None = None
) -> tuple[serve.Application, FastAPI]:
    """Return an application that notes in `up` the ends of its lifespans, and its FastAPI app."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        up.append("begun")
        try:
            yield
        finally:
            up.append("ended")

    app = FastAPI(lifespan=lifespan)

    @serve.deployment
    class Child:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=PATIENCE_S)
        async def __call__(self, names: list[str]) -> list[list[str]]:
            return [[*names, threading.current_thread().name]] * len(names)

    @serve.deployment(num_replicas=2)
    @serve.ingress(app)
    class Api:
        def __init__(self, child: serve.DeploymentHandle) -> None:
            self.child = child
            self.loop = asyncio.get_running_loop()

        @app.get("/line")
        async def line(self, of: Any = Depends(connection)) -> str:
            assert asyncio.get_running_loop() is self.loop
            of[1].write(b"hi\n")
            line: bytes = await of[0].readline()
            return line.decode()

        @app.get("/batch")
        async def batch(self) -> list[list[str]]:
            found: list[list[str]] = await asyncio.gather(*map(self.child.remote, "ab"))
            return found

        @app.get("/stream")
        async def stream(self) -> StreamingResponse:
            async def names() -> AsyncIterator[str]:
                yield threading.current_thread().name

            return StreamingResponse(names())

        @app.get("/def")
        def in_thread(self) -> str:
            return threading.current_thread().name

        @app.get("/where")
        async def thread(self) -> str:
            return threading.current_thread().name

        @app.get("/itself")
        async def itself(self) -> str:
            return await where(application)

        @app.get("/waits")
        async def wait(self) -> None:
            assert waits is not None
            waits.count_down()
            await asyncio.Event().wait()

        @app.websocket("/ws")
        async def ws(self, socket: WebSocket) -> None:
            await socket.accept()
            await socket.send_text(threading.current_thread().name)
            await socket.close()

    application = bind(Api, bind(Child))
    return application, app


def alone(application: serve.Application) -> Any:
    return nullcontext(application)


def under_parent(application: serve.Application) -> Any:
    parent = FastAPI()
    parent.mount("/", application)
    return nullcontext(parent)


@asynccontextmanager
async def in_lifespan(application: serve.Application) -> AsyncIterator[ASGIApp]:
    """Run the lifespan as `asgi_lifespan.LifespanManager` does, with its shared state."""
    received: asyncio.Queue[Message] = asyncio.Queue()
    sent: asyncio.Queue[Message] = asyncio.Queue()
    state: dict[str, Any] = {}

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
        await application({**scope, "state": state}, receive, send)

    running = asyncio.create_task(with_state({"type": "lifespan"}, received.get, sent.put))
    for phase in ("startup", "shutdown"):
        received.put_nowait({"type": f"lifespan.{phase}"})
        assert (await sent.get())["type"] == f"lifespan.{phase}.complete"
        if phase == "startup":
            yield with_state
    await running


@pytest.mark.parametrize("way", [alone, under_parent, in_lifespan])
def test_endpoints_may_use_objects_of_the_loop_that_calls_them(
    separate: str, way: Callable[[serve.Application], Any]
) -> None:
    up: list[str] = []
    application, app = on_loop_of_caller(up)
    before = set(threading.enumerate())

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    async def ask() -> list[Any]:
        async with (
            await asyncio.start_server(echo, "127.0.0.1", 0) as server,
            way(application) as it,
        ):
            opened = await asyncio.open_connection(*server.sockets[0].getsockname())
            app.dependency_overrides[connection] = lambda: opened
            paths = ("/line", "/batch", "/stream", "/itself", "/def")
            found = [(await answers(it, each))[0] for each in paths]
            opened[1].close()
            return [*(each.json() for each in found[:2]), *(each.text for each in found[2:])]

    here = threading.current_thread().name
    for _ in range(2):
        *on_loop, in_thread = asyncio.run(ask())
        assert on_loop == ["hi\n", [["a", "b", here]] * 2, here, f'"{here}"']
        assert "worker" in in_thread
        # The end of the loop has stopped the replicas, with their lifespans and threads.
        assert up.count("begun") == up.count("ended") == 2
        assert set(threading.enumerate()) == before
        up.clear()


def test_each_loop_of_callers_has_its_replicas() -> None:
    up: list[str] = []
    application, _ = on_loop_of_caller(up)

    async def elsewhere() -> str:
        return await asyncio.to_thread(asyncio.run, where(application))  # the first loop runs

    here = threading.current_thread().name
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    assert [first.run_until_complete(where(application)) for _ in range(2)] == [here] * 2
    assert len(up) == 2
    # The first is open, and does not run.
    assert second.run_until_complete(where(application)) == here
    assert first.run_until_complete(elsewhere()) != here
    assert first.run_until_complete(where(application)) == here
    assert (up.count("begun"), up.count("ended")) == (6, 2)
    second.run_until_complete(application.aclose())  # also that of the first, which does not run
    assert not local_engine().is_running
    second.run_until_complete(where(application))
    second.run_until_complete(second.shutdown_asyncgens())
    for loop in (first, second):
        assert not local_engine().is_running
        loop.close()


def test_requests_at_once_on_a_loop_have_one_instance_although_another_loop_was_closed() -> None:
    up: list[str] = []
    application, _ = on_loop_of_caller(up)
    closed, loop = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.run_until_complete(answers(application, "/itself"))
    closed.close()  # without the end of its asynchronous generators, which would stop the instance

    found = loop.run_until_complete(answers(application, "/itself", "/itself", "/itself"))

    assert [each.status_code for each in found] == [200] * 3
    assert up.count("begun") == 4  # of two replicas on each loop
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    assert not local_engine().is_running


def test_a_loop_that_ends_cancels_its_requests_and_starts() -> None:
    up: list[str] = []
    waits, starts = testing.Latch(), testing.Latch()
    application, _ = on_loop_of_caller(up, waits)

    @asynccontextmanager
    async def hangs(_: FastAPI) -> AsyncIterator[None]:
        starts.count_down()
        await asyncio.Event().wait()
        yield

    @serve.deployment
    @serve.ingress(FastAPI(lifespan=hangs))
    class Hangs: ...

    async def leave(target: serve.Application, latch: testing.Latch) -> asyncio.Task[Any]:
        request = asyncio.create_task(answers(target, "/waits"))
        await latch
        return request

    for target, latch in ((application, waits), (bind(Hangs), starts)):
        assert asyncio.run(leave(target, latch)).cancelled()
        assert not local_engine().is_running
    assert up.count("begun") == up.count("ended") == 2


def test_a_test_client_and_a_server_have_their_replicas_beside_those_of_a_loop() -> None:
    application, _ = on_loop_of_caller([])
    here = threading.current_thread().name
    for client in (TestClient(application), testing.TestClient(application)):
        with client:
            assert client.get("/where").json() != here
            assert client.get("/itself").json() != here  # it is that of the client
            assert asyncio.run(where(application)) == here
        assert client.get("/where").json() != here
        assert asyncio.run(where(application)) == here
        with client.websocket_connect("/ws") as socket:
            assert socket.receive_text() != here
    with TestClient(FastAPI(lifespan=application.lifespan)):  # as under a server
        assert asyncio.run(where(application)) != here
    assert asyncio.run(where(application)) == here
    serve.shutdown()


def test_a_stop_that_would_block_the_loop_of_the_replicas_is_refused() -> None:
    application, _ = on_loop_of_caller([])

    async def stop() -> None:
        await where(application)
        with pytest.raises(
            RuntimeError, match=r"'default' runs on, .* `await serve.shutdown_async"
        ):
            serve.shutdown()
        await serve.shutdown_async()
        assert not local_engine().is_running

    asyncio.run(stop())


either_client = pytest.mark.parametrize("make", [TestClient, testing.TestClient])


@either_client
def test_the_users_exception_is_raised_in_the_test_unless_it_wants_the_500(
    separate: str, make: type[TestClient]
) -> None:
    with make(greeting()) as client, pytest.raises(ValueError, match="the user's own"):
        client.get("/boom")
    with make(greeting(), raise_server_exceptions=False) as client:
        assert client.get("/boom").status_code == 500


@serve.deployment
class Failing:
    def __init__(self) -> None:
        raise ValueError("no model file")


@either_client
def test_a_constructor_that_fails_fails_the_client_with_its_error(
    separate: str, make: type[TestClient]
) -> None:
    with pytest.raises(RuntimeError, match="'Failing' failed to start: ValueError: no model"):
        with make(bind(Failing)):
            pass  # pragma: no cover


@pytest.mark.anyio
async def test_a_failed_start_is_answered_as_the_lifespan_protocol_says(separate: str) -> None:
    sent: list[Message] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(RuntimeError):
        await bind(Failing)({"type": "lifespan"}, receive, send)

    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    assert 'raise ValueError("no model file")' in message["message"]
    assert "deployment 'Failing' failed to start" in message["message"]


@pytest.mark.anyio
async def test_a_scope_without_asgi_is_served(separate: str) -> None:
    application = greeting()
    sent, _ = await request(application, "/async")
    await application.aclose()

    assert [sent[0]["status"], sent[1]["body"]] == [200, b'"hi you"']


def test_a_server_that_went_without_a_word_does_not_hang_the_next(separate: str) -> None:
    application = greeting()
    tasks: list[asyncio.Future[None]] = []

    async def start_and_die() -> None:
        started = asyncio.Event()
        messages = [{"type": "lifespan.startup"}]

        async def receive() -> dict[str, str]:
            if messages:
                return messages.pop()
            await asyncio.Future()
            raise AssertionError

        async def send(message: Message) -> None:
            started.set()

        application_task: Any = under_server(application)({"type": "lifespan"}, receive, send)
        tasks.append(asyncio.ensure_future(application_task))
        await started.wait()  # and no `lifespan.shutdown` follows

    loop = asyncio.new_event_loop()
    loop.run_until_complete(start_and_die())
    left = asyncio.all_tasks(loop)
    loop.close()
    assert by_client_with(application) == ["hi you"] * 2
    # Close the tasks here; otherwise the collector finds them in another test.
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # the loop is closed
            task.get_coro().close()


@pytest.mark.parametrize("is_running", [False, True])
def test_a_caller_whose_event_loop_is_not_asyncios_is_told_that_asyncio_is_needed(
    is_running: bool,
) -> None:
    async def receive() -> Message:
        return {"type": "lifespan.startup"}

    async def send(message: Message) -> None:
        assert "such as trio's" in message["message"]

    application = greeting()
    with TestClient(application) if is_running else nullcontext():
        for kind in ("lifespan", "http", "websocket"):
            scope: Scope = {"type": kind, "path": "/", "method": "GET", "headers": []}
            with pytest.raises(RuntimeError, match=r"not asyncio's, such as trio's"):
                application(scope, receive, send).send(None)  # as a loop that is not asyncio's
    assert serve.status().applications == {}


def test_the_applications_are_named_in_the_order_they_are_served(separate: str) -> None:
    with TestClient(greeting("a")) as one, TestClient(greeting("b")) as two:
        assert [one.get("/async").json(), two.get("/async").json()] == ["hi a", "hi b"]
        assert list(serve.status().applications) == ["default", "default_1"]
    assert serve.status().applications == {}


def test_handles_and_http_reach_the_same_replicas(separate: str) -> None:
    @serve.deployment
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        async def __call__(self, request: Request | None = None) -> int:
            self.count += 1
            return self.count

    with TestClient(bind(Counter)) as client:
        assert client.get("/").json() == 1
        assert serve.get_app_handle("default").remote().result(timeout_s=PATIENCE_S) == 2
        assert client.get("/").json() == 3


def test_http_may_be_off(separate: str) -> None:
    serve.start({"host": None})
    handle = serve.run(greeting())

    assert handle.def_endpoint.remote().result(timeout_s=PATIENCE_S) == "hi you"
    assert serve.status().proxies == {}


def test_two_applications_that_start_at_once_have_two_names(separate: str) -> None:
    both_construct = threading.Barrier(2)

    @serve.deployment(name="Same")
    class Same:
        async def __init__(self) -> None:  # type: ignore[misc]
            await asyncio.to_thread(both_construct.wait, PATIENCE_S)

        async def __call__(self) -> str:
            return serve.get_replica_context().app_name

    applications = [bind(Same), bind(Same)]

    async def ask_both() -> list[list[httpx.Response]]:
        return await asyncio.gather(*(answers(each, "/") for each in applications))

    found = [answer.text for (answer,) in asyncio.run(ask_both())]
    assert sorted(found) == ["default", "default_1"]
    for application in applications:
        asyncio.run(application.aclose())


def listening(port: int) -> int:
    """Return how many sockets listen on a port; Linux only."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    states = [(each.split()[1].rpartition(":")[2], each.split()[3]) for each in lines]
    return states.count((f"{port:04X}", "0A"))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they have one for all")
def test_worker_processes_have_sockets_of_their_own_and_share_connections(folder: Path) -> None:
    command = [*INGRESS, "run", "app:hello", "--port", "0", "--workers", "2"]
    with process(command, folder, environment(folder)) as server:

        def where() -> int:
            pid: int = json.loads(get(server.port, "/where").body)["pid"]
            return pid

        server.wait_for("is ready at")
        assert listening(server.port) == 2
        answered = Counter(where() for _ in range(64))
        assert len(answered) == 2
        assert min(answered.values()) >= 8  # it fails by chance less than once in a billion runs

        one, other = answered
        os.kill(one, signal.SIGKILL)
        wait_until(lambda: listening(server.port) == 1)
        assert {where() for _ in range(16)} == {other}
        server.wait_for(r"worker \d+ is ready")
        wait_until(lambda: len({where() for _ in range(16)}) == 2)
        server.signal()
        assert server.wait() in (0, -15)


@pytest.mark.thorough
@pytest.mark.parametrize("extra", [[], ["--workers", "2"], ["--reload"]])
def test_a_port_that_worker_processes_have_is_taken(folder: Path, extra: list[str]) -> None:
    run = ["run", "app:hello", "--port"]
    with process([*INGRESS, *run, "0", "--workers", "2"], folder, environment(folder)) as server:
        server.wait_for("is ready at")
        second = run_ingress(folder, *run, str(server.port), *extra)

        (line,) = second.stderr.splitlines()
        assert f"Failed to bind to address '127.0.0.1:{server.port}': Address already in" in line
        assert second.returncode == 1


@pytest.mark.anyio
async def test_the_end_of_an_application_does_not_block_its_callers_event_loop() -> None:
    blocks, may_end, seen = threading.Event(), threading.Event(), []

    async def holds_its_thread() -> None:
        try:
            await asyncio.Event().wait()
        finally:  # when the shared loop ends
            blocks.set()
            may_end.wait(PATIENCE_S)

    @serve.deployment(loop="shared")
    class Api:
        async def __call__(self) -> None:
            self.task = asyncio.create_task(holds_its_thread())

    async def watch() -> None:
        await asyncio.to_thread(blocks.wait, PATIENCE_S)
        seen.append("turns")
        may_end.set()

    application = Api.bind()
    transport = httpx.ASGITransport(under_server(application))
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await client.get("http://server/")).status_code == 200
    watching = asyncio.create_task(watch())
    await application.aclose()
    assert seen == ["turns"]
    await watching
