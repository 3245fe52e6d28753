"""A client that leaves while its response is sent: background tasks and exits run nevertheless."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, Request
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ingress as serve
from tests import process_app
from tests.servers import (
    PATIENCE_S,
    Connection,
    bind,
    forking,
    get,
    ongoing,
    scope_of,
    served,
    set_flags,
    turns,
    until,
    wait_until,
)

pytestmark = pytest.mark.anyio

CHUNK = b"x" * 1024


@pytest.fixture(autouse=True, params=["0", "1"], ids=["separate0", "separate1"])
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_flags(monkeypatch, request.param)
    yield
    serve.shutdown()


class Listening(Response):
    """A response that sends in its own way, beside a task that waits for the disconnect."""

    def __init__(self, items: AsyncIterator[bytes], background: BackgroundTask) -> None:
        super().__init__(background=background)
        self.items = items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen, receive, group.cancel_scope)
            async for item in self.items:
                await send({"type": "http.response.body", "body": item, "more_body": True})
        if self.background is not None:
            await self.background()

    async def _listen(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()


class InGroup(StreamingResponse):
    """A response that is sent by its base class, in a task of a group."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(super().__call__, scope, receive, send)


class Shielded(Listening):
    """A response whose task learns of the disconnect by an error, which its group raises."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_items, send)
        if self.background is not None:
            await self.background()

    async def _send_items(self, send: Send) -> None:
        with anyio.CancelScope(shield=True):
            async for item in self.items:
                await send({"type": "http.response.body", "body": item, "more_body": True})


class GroupMiddleware:
    """A middleware that runs the app below in a task of a group."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._run, scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def streams(seen: list[str], folder: Path, *, middleware: str = "bare") -> type:
    """Return a class whose endpoints send without an end, and note what runs afterwards."""
    app = FastAPI()

    async def note(what: str) -> None:
        try:
            await asyncio.sleep(0.001)  # a second cancellation would come here
        except asyncio.CancelledError:
            seen.append(f"{what} cancelled")
            raise
        seen.append(what)

    async def exits() -> AsyncIterator[None]:
        yield
        await note("exit")  # without `finally`: an error would skip it

    async def items() -> AsyncIterator[bytes]:
        while True:
            yield CHUNK
            await asyncio.sleep(0.001)

    def def_items() -> Iterator[bytes]:
        while True:
            yield CHUNK

    def task() -> BackgroundTask:
        return BackgroundTask(note, "task")

    if middleware == "group":
        app.add_middleware(GroupMiddleware)
    elif middleware == "http":

        @app.middleware("http")
        async def pass_on(request: Request, call_next: Callable[..., Any]) -> Response:
            response: Response = await call_next(request)
            return response

    @serve.ingress(app)
    class Streams:
        @app.get("/items", dependencies=[Depends(exits)])
        async def items(self) -> StreamingResponse:
            return StreamingResponse(items(), background=task())

        @app.get("/def-items", dependencies=[Depends(exits)])
        def def_items(self) -> StreamingResponse:
            return StreamingResponse(def_items(), background=task())

        @app.get("/injected", dependencies=[Depends(exits)])
        async def injected(self, tasks: BackgroundTasks) -> StreamingResponse:
            tasks.add_task(note, "task")
            return StreamingResponse(items())

        @app.get("/lines", dependencies=[Depends(exits)])
        async def lines(self, tasks: BackgroundTasks) -> AsyncIterator[str]:
            tasks.add_task(note, "task")
            async for item in items():
                yield item.decode()

        @app.get("/file", dependencies=[Depends(exits)])
        async def file(self) -> FileResponse:
            path = folder / "large"
            path.write_bytes(CHUNK * 2**14)
            return FileResponse(path, background=task())

        @app.get("/own-class", dependencies=[Depends(exits)])
        async def own_class(self) -> Listening:
            return Listening(items(), task())

        @app.get("/in-group", dependencies=[Depends(exits)])
        async def in_group(self) -> InGroup:
            return InGroup(items(), background=task())

        @app.get("/shielded", dependencies=[Depends(exits)])
        async def shielded(self) -> Shielded:
            return Shielded(items(), task())

        @app.get("/tasks")
        async def tasks(self) -> int:
            return len(asyncio.all_tasks())

        @app.get("/running", dependencies=[Depends(exits)])
        async def running(self, tasks: BackgroundTasks) -> None:
            tasks.add_task(note, "task")
            seen.append("running")
            try:
                await asyncio.Event().wait()
            finally:
                await note("cancelled")

    return Streams


def leave(port: int, path: str, until_received: bytes = CHUNK[:10]) -> None:
    with Connection(port, receive_buffer=4096) as client:
        client.request(path)
        if until_received:
            client.receive_until(until_received)


KINDS = ["items", "def-items", "injected", "lines", "file", "own-class", "in-group", "shielded"]


@pytest.mark.parametrize("middleware", ["bare", "http", "group"])
def test_a_response_that_is_cut_runs_its_background_task_and_then_the_exits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, middleware: str
) -> None:
    caplog.set_level("WARNING")
    seen: list[str] = []
    deployment = serve.deployment(streams(seen, tmp_path, middleware=middleware))
    port = served(bind(deployment))
    for kind in KINDS:
        leave(port, f"/{kind}")
        wait_until(lambda: "exit" in seen or ongoing() == 0)
        assert seen == ["task", "exit"], kind
        seen.clear()
    wait_until(lambda: ongoing() == 0)
    serve.shutdown()
    assert not caplog.records


def test_nothing_is_left_of_many_responses_that_were_cut(tmp_path: Path) -> None:
    seen: list[str] = []
    port = served(bind(serve.deployment(streams(seen, tmp_path, middleware="http"))))

    def leave_all() -> None:
        with ExitStack() as stack:
            for kind in KINDS:
                client = stack.enter_context(Connection(port, receive_buffer=4096))
                client.request(f"/{kind}")
                client.receive_until(CHUNK[:10])
        wait_until(lambda: ongoing() == 0)

    def held() -> list[int]:
        folder = Path("/proc/self/fd")
        files = len([*folder.iterdir()]) if folder.exists() else 0
        return [int(get(port, "/tasks").body), threading.active_count(), files]

    leave_all()
    gc.collect()
    before = held()
    for _ in range(25):
        leave_all()
    gc.collect()
    # Fewer, if those of an earlier test have ended meanwhile.
    wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    assert [seen.count(each) for each in ("task", "exit")] == [26 * len(KINDS)] * 2


def test_a_background_task_that_fails_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    app = FastAPI()

    class Sent(StreamingResponse):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await super().__call__(scope, receive, send)

    async def endless() -> AsyncIterator[bytes]:
        yield CHUNK
        await asyncio.Event().wait()

    async def fail() -> None:
        seen.append("task")
        raise ConnectionError("the task's own")

    @app.get("/")
    async def root() -> Sent:
        return Sent(endless(), background=BackgroundTask(fail))

    @serve.deployment
    @serve.ingress(app)
    class Fails: ...

    leave(served(bind(Fails)), "/")
    wait_until(lambda: "the task's own" in caplog.text)
    wait_until(lambda: ongoing() == 0)
    assert seen == ["task"]


def test_a_background_task_in_a_group_that_a_stop_cancels_does_not_run_again() -> None:
    app, seen = FastAPI(), list[str]()

    async def waits() -> None:
        seen.append("begins")
        await asyncio.Event().wait()

    async def items() -> AsyncIterator[bytes]:
        yield CHUNK

    @serve.deployment(graceful_shutdown_timeout_s=0.1)
    @serve.ingress(app)
    class Api:
        @app.get("/")
        async def get(self) -> Response:
            return InGroup(items(), background=BackgroundTask(waits))

    port = served(bind(Api))
    with Connection(port) as client:
        client.request("/")
        client.receive_until(b"\r\n0\r\n\r\n")
        wait_until(lambda: seen == ["begins"])
        serve.shutdown()
    assert seen == ["begins"]


def test_an_endpoint_that_is_cancelled_before_it_returns_runs_no_background_task(
    tmp_path: Path,
) -> None:
    seen: list[str] = []
    port = served(bind(serve.deployment(streams(seen, tmp_path))))
    with Connection(port) as client:
        client.request("/running")
        wait_until(lambda: seen == ["running"])
    wait_until(lambda: ongoing() == 0)
    assert seen == ["running", "cancelled"]


def test_a_middlewares_response_runs_its_background_task_and_the_app_below_is_cancelled() -> None:
    seen: list[str] = []
    app = FastAPI()

    async def note(what: str) -> None:
        await asyncio.sleep(0.001)
        seen.append(what)

    async def endless() -> AsyncIterator[bytes]:
        yield CHUNK
        await asyncio.Event().wait()

    @app.middleware("http")
    async def wrap(request: Request, call_next: Callable[..., Any]) -> Response:
        response = await call_next(request)
        return StreamingResponse(response.body_iterator, background=BackgroundTask(note, "outer"))

    @app.get("/")
    async def root() -> StreamingResponse:
        return StreamingResponse(endless(), background=BackgroundTask(note, "inner"))

    @serve.deployment
    @serve.ingress(app)
    class Wrapped: ...

    leave(served(bind(Wrapped)), "/")
    wait_until(lambda: ongoing() == 0)
    assert sorted(seen) == ["inner", "outer"]


def test_a_stream_that_is_cut_by_its_deadline_runs_its_background_task(tmp_path: Path) -> None:
    seen: list[str] = []
    port = served(bind(serve.deployment(streams(seen, tmp_path))))
    with Connection(port) as client:
        client.request("/items", headers="x-request-timeout-seconds: 0.1\r\n")
        client.receive_all()
    wait_until(lambda: seen == ["task", "exit"])


def test_a_background_task_after_a_cut_has_no_deadline_and_is_told_of_the_disconnect() -> None:
    seen: list[Any] = []
    app = FastAPI()

    async def endless() -> AsyncIterator[bytes]:
        yield CHUNK
        await asyncio.Event().wait()

    @app.get("/")
    async def root(request: Request) -> StreamingResponse:
        async def task() -> None:
            seen.append(await request.is_disconnected())
            seen.append(await serve.get_deployment_handle("Echo", "default").remote())

        return StreamingResponse(endless(), background=BackgroundTask(task))

    @serve.deployment
    class Echo:
        async def __call__(self) -> bool:
            return serve.get_request_context().deadline is None

    @serve.deployment
    @serve.ingress(app)
    class Caller:
        def __init__(self, echo: Any) -> None: ...

    port = served(bind(Caller, bind(Echo)))
    with Connection(port) as client:
        client.request("/", headers="x-request-timeout-seconds: 60\r\n")
        client.receive_until(CHUNK[:10])
    wait_until(lambda: seen == [True, True])


# Applications that listen for the disconnect, as those of MCP and of events do: they are told.


class Listeners:
    """ASGI applications that note how they end once their client has left."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def _told(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.seen.append("told")

    async def streams(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream beside a task that listens."""
        listening = asyncio.create_task(self._told(receive))
        await self._begin(send)
        await listening
        await asyncio.sleep(0.001)  # a cancellation would come here
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.seen.append("ended")

    async def stays(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hear of the disconnect, and go on."""
        await self._begin(send)
        await self._told(receive)
        await self._wait()

    async def deaf(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Never ask."""
        await self._begin(send)
        await self._wait()

    async def fails(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._begin(send)
        await self._told(receive)
        raise LookupError("of its own end")

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})

    async def _wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    async def waits(self, request: Request) -> None:
        """Work in a task until the client leaves, as endpoints do that have no answer yet."""
        work = asyncio.create_task(self._wait())
        listening = asyncio.create_task(self._told(request.receive))
        self.seen.append("running")
        await asyncio.wait([work, listening], return_when=asyncio.FIRST_COMPLETED)
        work.cancel()

    async def asks(self, request: Request) -> None:
        self.seen.append("running")
        while not await request.is_disconnected():
            await asyncio.sleep(0.001)
        self.seen.append("told")
        if serve.cancellation().requested:  # before it is cancelled, which comes later
            self.seen.append("requested")


def listeners(*, middleware: bool = False) -> tuple[Listeners, int]:
    """Return applications that listen, and the port where they are served."""
    which, app = Listeners(), FastAPI()
    for name in ("streams", "stays", "deaf", "fails"):
        app.mount(f"/{name}", getattr(which, name))
    for name in ("waits", "asks"):
        app.get(f"/{name}")(getattr(which, name))
    if middleware:

        @app.middleware("http")
        async def pass_on(request: Request, call_next: Callable[..., Any]) -> Any:
            return await call_next(request)

    @serve.ingress(app)
    class Web: ...

    return which, served(bind(serve.deployment(Web)))


@pytest.mark.parametrize("middleware", [False, True], ids=["bare", "http"])
def test_an_application_that_listens_is_told_of_the_disconnect_and_ends_by_itself(
    caplog: pytest.LogCaptureFixture, middleware: bool
) -> None:
    caplog.set_level("WARNING")
    which, port = listeners(middleware=middleware)
    leave(port, "/streams/")
    wait_until(lambda: ongoing() == 0)
    assert which.seen == ["told", "ended"]
    assert not caplog.records


@pytest.mark.parametrize(
    ("path", "end"), [("waits", ["told", "cancelled"]), ("asks", ["told", "requested"])]
)
def test_an_endpoint_that_asks_before_its_answer_is_told_and_ends_by_itself(
    path: str, end: list[str]
) -> None:
    which, port = listeners()
    with Connection(port) as client:
        client.request(f"/{path}")
        wait_until(lambda: which.seen == ["running"])
    wait_until(lambda: which.seen == ["running", *end])
    wait_until(lambda: ongoing() == 0)


def test_an_application_that_was_told_and_does_not_end_is_cancelled_at_its_deadline() -> None:
    which, port = listeners()
    with Connection(port) as client:
        client.request("/stays/", headers="x-request-timeout-seconds: 0.3\r\n")
        client.receive_until(CHUNK[:10])
    wait_until(lambda: which.seen == ["told", "cancelled"])
    wait_until(lambda: ongoing() == 0)


def test_an_application_that_never_asks_is_cancelled() -> None:
    which, port = listeners()
    leave(port, "/deaf/")
    wait_until(lambda: which.seen == ["cancelled"])
    wait_until(lambda: ongoing() == 0)


def test_an_error_after_the_disconnect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    which, port = listeners()
    leave(port, "/fails/")
    wait_until(lambda: ongoing() == 0)
    wait_until(lambda: "of its own end" in caplog.text)
    assert len(caplog.records) == 1
    assert which.seen == ["told"]


# The disconnect after the complete answer.


def test_receive_reports_the_disconnect_after_the_complete_answer() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        waiting: asyncio.Task[Message] | None = None
        if scope["path"] == "/waits":
            await receive()
            waiting = asyncio.create_task(receive())  # type: ignore[arg-type]
            await asyncio.sleep(0)
        is_stream = scope["path"] == "/stream"
        headers = [] if is_stream else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})
        message = await (receive() if waiting is None else waiting)
        seen.append(message["type"])

    @serve.deployment
    @serve.ingress(app)
    class Raw: ...

    port = served(bind(Raw))
    for path in ("/", "/waits", "/stream"):
        with Connection(port) as client:  # stays
            client.request(path, method="POST", headers="Content-Length: 1\r\n")
            client.send(b"x")
            client.receive_until(b"ok")
            wait_until(lambda: seen == ["http.disconnect"])
        seen.clear()


# The test is the server: its loop is the HTTP loop.


async def test_a_client_that_leaves_as_the_answer_is_complete_cancels_no_background_task(
    switch_interval: None,
) -> None:
    """The HTTP loop learns of the disconnect after user code has sent the answer.

    It has yet to take that answer, so it cancels the call.
    """
    outcomes: list[str] = []
    is_watched, may_send, is_sent = (threading.Event() for _ in range(3))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError
        await until(may_send.is_set)
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})
        is_sent.set()
        try:
            await turns()
            outcomes.append("ended")
        except asyncio.CancelledError:
            outcomes.append("cancelled")
            raise

    @serve.deployment
    @serve.ingress(app)
    class Raw: ...

    application = bind(Raw)
    for count in range(1, 21):
        for each in (is_watched, may_send, is_sent):
            each.clear()
        leaves = asyncio.get_running_loop().create_future()
        messages = [NO_BODY]

        async def receive(leaves: Any = leaves, messages: list[Message] = messages) -> Message:
            if messages:
                return messages.pop()
            is_watched.set()
            await leaves
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None: ...

        task = asyncio.create_task(application(scope_of(), receive, send))
        await until(is_watched.is_set)
        may_send.set()
        if is_separate():
            assert is_sent.wait(PATIENCE_S)  # this loop stands still meanwhile
        else:
            await until(is_sent.is_set)
        if not leaves.done():  # `receive` was cancelled
            leaves.set_result(None)
        await task
        await until(lambda count=count: len(outcomes) == count)  # type: ignore[misc]
    assert outcomes == ["ended"] * 20
    await application.aclose()


NO_BODY: Message = {"type": "http.request", "body": b"", "more_body": False}


def is_separate() -> bool:
    return os.environ["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] == "1"


# In a child process.


def test_a_response_of_a_child_that_is_cut_runs_its_background_task_and_a_listener_is_told(
    tmp_path: Path, stopped: None, caplog: pytest.LogCaptureFixture
) -> None:
    with forking():
        port = served(process_app.downloads)
        leave(port, f"/stream?note={tmp_path}/task")
        wait_until((tmp_path / "task").exists)
        wait_until(lambda: ongoing() == 0)
        assert get(port, "/receive").body == b'"ok"'
        leave(port, f"/receive?note={tmp_path}/told", b"ok")
        wait_until((tmp_path / "told").exists)
        leave(port, f"/listens/?{tmp_path}/listened", b"item")
        wait_until((tmp_path / "listened").exists)
        leave(port, f"/stream?note={tmp_path}/missing/task")
        wait_until(lambda: "FileNotFoundError" in caplog.text)
        serve.shutdown()
