"""`ingress.serving.http.body`: bodies that stall, or are too large, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import (
    APIRouter,
    Body,
    Depends,
    FastAPI,
    HTTPException,
    Request,
    Response,
    WebSocket,
)
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.sync.client import connect

import ingress as serve
from ingress.app.declaration.declaration import Application
from ingress.core.base.settings import BODY_IDLE_TIMEOUT_S, MAX_BODY_SIZE
from ingress.serving.http import body as body_module
from tests.servers import (
    PATIENCE_S,
    UVICORN,
    Answer,
    Connection,
    bind,
    environment,
    forking,
    get,
    ongoing,
    process,
    served,
    set_flags,
    wait_until,
    write_module,
)

IDLE_S = 0.4
BUFFER_BYTES = serve.HTTPOptions().body_buffer_bytes
LARGE = 3 * BUFFER_BYTES


@pytest.fixture(autouse=True, params=["0", "1"], ids=["separate0", "separate1"])
def stopped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_flags(monkeypatch, request.param, sync="1")
    yield
    serve.shutdown()


def post(connection: Connection, path: str, length: int, sent: int, headers: str = "") -> None:
    """Start a POST of that length, and send a part of it."""
    connection.request(path, method="POST", headers=f"Content-Length: {length}\r\n{headers}")
    connection.send(b"7" * sent)


def chunk(size: int) -> bytes:
    return b"%x\r\n" % size + b"x" * size + b"\r\n"


def uploads(log: list[str], **options: Any) -> Application:
    """Return an application with every way to read a body, which logs what requests do."""
    app = FastAPI()

    @serve.deployment(**options)
    @serve.ingress(app)
    class Uploads:
        @app.get("/")
        async def get(self) -> str:
            return "here"

        @app.post("/parameter")
        async def parameter(self, value: Annotated[int, Body()]) -> str:
            log.append("called")
            return "called"

        @app.post("/def-parameter")
        def def_parameter(self, value: Annotated[int, Body()]) -> str:
            log.append("called")
            return "called"

        @app.post("/stream")
        async def stream(self, request: Request) -> int:
            size = 0
            log.append("began")
            try:
                async for part in request.stream():
                    size += len(part)
            except BaseException:
                log.append("ended")
                raise
            return size

        @app.post("/late")
        async def late(self, request: Request) -> int:
            await asyncio.sleep(3 * IDLE_S)
            return len(await request.body())

        @app.post("/echo")
        async def echo(self, request: Request) -> StreamingResponse:
            async def parts() -> AsyncIterator[bytes]:
                async for part in request.stream():
                    yield part

            return StreamingResponse(parts())

    return bind(Uploads)


# Stalls.


@pytest.mark.reliability("C06")
def test_clients_that_stop_in_a_small_body_hold_no_slot_and_get_a_408() -> None:
    log: list[str] = []
    port = served(uploads(log, max_ongoing_requests=2), body_idle_timeout_s=IDLE_S)
    begun = time.monotonic()
    with ExitStack() as opened:
        clients = [opened.enter_context(Connection(port)) for _ in range(10)]
        for each, path in zip(clients, ["/stream", "/parameter"] * 5, strict=True):
            post(each, path, 100, 1)
        for _ in range(5):
            assert get(port, "/").body == b'"here"'
            assert ongoing() == 0
        answers = [each.answer() for each in clients]

    assert {(each.status, each.is_complete) for each in answers} == {(408, True)}
    assert {each.headers["connection"] for each in answers} == {"close"}
    assert answers[0].body.endswith(b" stalled for 0.4s.")
    assert log == []
    assert IDLE_S <= time.monotonic() - begun < IDLE_S + 2


@pytest.mark.reliability("C06")
@pytest.mark.parametrize("path", ["/stream", "/parameter", "/def-parameter"])
def test_a_large_body_that_stops_is_answered_408_and_frees_its_slot(path: str) -> None:
    log: list[str] = []
    port = served(uploads(log, max_ongoing_requests=2), body_idle_timeout_s=IDLE_S)
    with ExitStack() as opened:
        clients = [opened.enter_context(Connection(port)) for _ in range(6)]
        for each in clients:
            post(each, path, LARGE, LARGE - 10)
        wait_until(lambda: ongoing() == 2)
        answers = [each.answer() for each in clients]
        wait_until(lambda: ongoing() == 0)

    assert {(each.status, each.is_complete) for each in answers} == {(408, True)}
    assert get(port, "/").body == b'"here"'
    assert "called" not in log
    assert log.count("began") == log.count("ended")


def test_a_response_is_cut_when_its_body_stops(caplog: pytest.LogCaptureFixture) -> None:
    port = served(uploads([]), body_idle_timeout_s=IDLE_S)
    with caplog.at_level(logging.WARNING, "ingress"), Connection(port) as connection:
        post(connection, "/echo", LARGE, BUFFER_BYTES)
        answer = connection.answer()
        wait_until(lambda: "stalled for" in caplog.text)

    assert (answer.status, answer.is_complete) == (200, False)
    assert "to /echo was cut: The body of request" in caplog.text


def test_a_body_that_comes_slowly_has_all_the_time_it_needs() -> None:
    port = served(uploads([]), body_idle_timeout_s=2.0)
    with Connection(port) as small, Connection(port) as large:
        post(small, "/stream", 6, 0, "Connection: close\r\n")
        post(large, "/stream", BUFFER_BYTES + 6, BUFFER_BYTES, "Connection: close\r\n")
        for _ in range(6):
            time.sleep(0.5)  # 3 s in total
            small.send(b"x")
            large.send(b"x")

        assert small.answer().body == b"6"
        assert large.answer().body == b"%d" % (BUFFER_BYTES + 6)


def late(port: int) -> int:
    """Send a large body that is read late; return the size that user code has read."""
    body = b"x" * 40 * BUFFER_BYTES
    return int(httpx.post(f"http://127.0.0.1:{port}/late", content=body, timeout=PATIENCE_S).text)


def test_user_code_that_takes_its_time_is_not_the_clients_fault() -> None:
    port = served(uploads([]), body_idle_timeout_s=IDLE_S)
    assert late(port) == 40 * BUFFER_BYTES  # more than all buffers together hold


# Too slow.

FAST = 100_000_000
"""Bytes a second that no client reaches here."""


@pytest.fixture
def grace(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(body_module, "GRACE_S", 0.3)
    return 0.3


def drip(connection: Connection, part: bytes = b"x") -> Answer:
    """Send a part again and again until there is an answer."""
    connection.socket.settimeout(0.02)
    while True:
        try:
            connection.receive_until(b"\r\n\r\n")
            connection.socket.settimeout(PATIENCE_S)
            return connection.answer()
        except TimeoutError:
            connection.send(part)


@pytest.mark.parametrize(
    ("path", "is_chunked"), [("/stream", True), ("/parameter", False), ("/def-parameter", False)]
)
def test_a_dripping_body_is_a_408_and_closed(path: str, is_chunked: bool, grace: float) -> None:
    with Connection(served(uploads([]), min_body_rate=1_000)) as connection:
        length = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 100000"
        connection.request(path, method="POST", headers=f"{length}\r\n")
        answer = drip(connection, chunk(1) if is_chunked else b"x")

    assert (answer.status, answer.is_complete, answer.headers["connection"]) == (408, True, "close")
    assert b"too slow: it came at less than 1000 bytes a second for 0.3s." in answer.body


def test_a_large_body_that_drips_frees_its_slot(grace: float) -> None:
    log: list[str] = []
    port = served(uploads(log, max_ongoing_requests=1), min_body_rate=FAST)
    with Connection(port) as connection:
        post(connection, "/stream", LARGE, BUFFER_BYTES)
        wait_until(lambda: log == ["began"])
        assert drip(connection).status == 408
        assert get(port, "/").body == b'"here"'
    assert log == ["began", "ended"]


@pytest.mark.parametrize(("rate", "size"), [(1_000, 1_000), (0, 1)])
def test_a_body_that_is_fast_enough_is_not_cut(rate: int, size: int, grace: float) -> None:
    with Connection(served(uploads([]), min_body_rate=rate)) as connection:
        post(connection, "/stream", 12 * size, 0, "Connection: close\r\n")
        connection.send_slowly(*[b"x" * size] * 12)  # 0.6 s in all
        assert connection.answer().body == b"%d" % (12 * size)


def test_the_time_in_which_user_code_does_not_read_does_not_count(grace: float) -> None:
    port = served(uploads([]), min_body_rate=FAST)
    # Its first part and its last are here before and after a pause of four times the grace.
    assert late(port) == 40 * BUFFER_BYTES


def test_the_time_in_which_the_loop_stalls_does_not_count(grace: float) -> None:
    is_here, never = threading.Event(), threading.Event()

    @serve.deployment
    class Length:
        async def __call__(self, request: Request) -> int:
            if request.url.path == "/stall":
                is_here.set()
                never.wait(3 * grace)
            return len(await request.body())

    port = served(bind(Length), min_body_rate=FAST)
    with Connection(port) as slow, Connection(port) as other:
        post(slow, "/", 2, 1, "Connection: close\r\n")
        other.request("/stall")
        assert is_here.wait(PATIENCE_S)
        slow.send(b"x")
        assert slow.answer().body == b"2"


def test_a_response_that_has_begun_lets_its_client_send_slowly(grace: float) -> None:
    with Connection(served(uploads([]), min_body_rate=FAST, body_buffer_bytes=1)) as connection:
        post(connection, "/echo", 8, 1, "Connection: close\r\n")
        connection.receive_until(b"7")
        connection.send_slowly(*[b"x"] * 7, pause_s=0.1)
        assert connection.answer().body.endswith(b"x" * 7)


def test_a_websocket_has_no_least_rate(grace: float, app: FastAPI) -> None:
    @app.websocket("/")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())

    @serve.deployment
    @serve.ingress(app)
    class Echo: ...

    port = served(bind(Echo), min_body_rate=FAST)
    with connect(f"ws://127.0.0.1:{port}/") as client:
        with pytest.raises(TimeoutError):
            client.recv(2 * grace)
        client.send("x")
        assert client.recv(PATIENCE_S) == "x"


def test_a_conversation_needs_a_buffer_of_one_byte() -> None:
    with Connection(served(uploads([]), body_buffer_bytes=1)) as connection:
        headers = "Transfer-Encoding: chunked\r\nConnection: close\r\n"
        connection.request("/echo", method="POST", headers=headers)
        for word in (b"one", b"two"):
            connection.send(b"3\r\n" + word + b"\r\n")
            connection.receive_until(word)
        connection.send(b"0\r\n\r\n")

        assert connection.answer().body == b"onetwo"


# Too large.


@pytest.mark.reliability("C05")
@pytest.mark.parametrize("path", ["/stream", "/parameter", "/nowhere"])
def test_a_body_whose_length_is_over_the_limit_is_refused_before_it_is_read(path: str) -> None:
    log: list[str] = []
    with Connection(served(uploads(log), max_body_size=1000)) as connection:
        post(connection, path, 1001, 0, "Expect: 100-continue\r\n")
        connection.receive_until(b"1000 bytes.")
        answer = Answer(connection.received)

    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert answer.headers["x-request-id"]
    assert answer.body == b"The request's body is too large: the limit is 1000 bytes."
    assert log == []


@pytest.mark.reliability("C05")
def test_a_client_that_reads_only_after_sending_a_large_body_gets_the_answer_too() -> None:
    with Connection(served(uploads([]), max_body_size=1000)) as connection:
        post(connection, "/stream", 20_000_000, 20_000_000)

        assert connection.answer().status == 413


@pytest.mark.reliability("C05")
@pytest.mark.parametrize("limit", [1000, 4 * BUFFER_BYTES], ids=["buffered", "flowing"])
def test_a_body_of_unknown_length_is_refused_as_soon_as_it_is_too_large(limit: int) -> None:
    log: list[str] = []
    port = served(uploads(log, max_ongoing_requests=1), max_body_size=limit)

    def send(size: int) -> Answer:
        with Connection(port) as connection:
            headers = "Transfer-Encoding: chunked\r\nConnection: close\r\n"
            connection.request("/stream", method="POST", headers=headers)
            connection.send(chunk(size - 1) + chunk(1) + (b"" if size > limit else b"0\r\n\r\n"))
            return connection.answer()

    assert send(limit).body == b"%d" % limit
    log.clear()
    refused = send(limit + 1)
    wait_until(lambda: ongoing() == 0)

    assert (refused.status, refused.headers["connection"]) == (413, "close")
    assert log in ([], ["began", "ended"])
    assert log == [] or limit > BUFFER_BYTES


def test_the_limits_can_be_changed_while_it_serves() -> None:
    port = served(uploads([]))
    serve.start(serve.HTTPOptions(max_body_size=1))

    assert httpx.post(f"http://127.0.0.1:{port}/stream", content=b"xx").status_code == 413


# Under another server.


@pytest.mark.thorough
def test_the_test_client_and_bare_uvicorn_have_these_limits_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(MAX_BODY_SIZE, "10")
    monkeypatch.setenv(BODY_IDLE_TIMEOUT_S, str(IDLE_S))
    with TestClient(uploads([])) as client:
        assert client.post("/stream", content=b"x" * 10).text == "10"
        assert client.post("/stream", content=b"x" * 11).status_code == 413
        assert client.post("/stream", content=iter([b"x" * 6] * 2)).status_code == 413

    source = """
import ingress as serve
from starlette.requests import Request

@serve.deployment
class Length:
    async def __call__(self, request: Request): return len(await request.body())

app = Length.bind()
"""
    write_module(tmp_path, "length", source)
    with process([*UVICORN, "length:app"], tmp_path, environment(tmp_path)) as server:
        with Connection(server.port) as connection:
            post(connection, "/", 10, 1)
            assert connection.answer().status == 408
        with Connection(server.port) as connection:
            post(connection, "/", 11, 11)
            assert connection.answer().status == 413


def test_a_small_body_is_one_message_however_it_comes() -> None:
    seen: list[int] = []
    has_all = threading.Event()

    @serve.deployment
    class Parts:
        async def __call__(self, request: Request) -> int:
            seen.extend([len(part) async for part in request.stream() if part])
            has_all.set()
            return len(seen)

    with Connection(served(bind(Parts))) as connection:
        post(connection, "/", 4, 0)
        connection.send_slowly(*[b"x"] * 4, pause_s=0.02)
        assert has_all.wait(PATIENCE_S)

    assert seen == [4]


# Bodies that are read only if user code asks.


in_child = FastAPI()


@serve.deployment(isolation="process")
@serve.ingress(in_child)
class InChild:
    @in_child.get("/")
    async def get(self, request: Request) -> str:
        return request.method

    @in_child.post("/deny")
    async def deny(self, request: Request) -> None:
        raise HTTPException(401)

    @in_child.post("/unread/{x}", dependencies=[Depends(HTTPBearer())])
    def unread(self, x: int) -> int:
        return x


EXPECTS = "Content-Length: 10\r\nExpect: 100-continue\r\n"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "where"),
    [(each, "threads") for each in ("GET", "HEAD", "OPTIONS", "DELETE")] + [("GET", "process")],
)
async def test_a_server_that_never_ends_a_body_over_http_2_is_asked_for_it_by_user_code_only(
    method: str, where: str
) -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class InThreads:
        @app.api_route("/", methods=["GET", "HEAD", "OPTIONS", "DELETE"])
        async def root(self, request: Request) -> str:
            return request.method

    application = bind(InThreads if where == "threads" else InChild)
    scope: Scope = {
        "type": "http", "http_version": "2", "method": method, "path": "/", "raw_path": b"/",
        "query_string": b"", "root_path": "", "scheme": "http", "headers": [],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    with forking():
        async with asyncio.timeout(PATIENCE_S):
            await application(scope, never, send)
        await application.aclose()
    assert statuses == [200]


@pytest.mark.parametrize("where", ["threads", "process"])
def test_an_endpoint_refuses_a_body_whose_client_waits_until_it_is_asked_for(where: str) -> None:
    log: list[str] = []
    with forking():
        port = served(denies(log) if where == "threads" else bind(InChild))
        with Connection(port) as client:
            client.request("/deny", method="POST", headers=EXPECTS)
            assert b" 401 " in client.receive_until(b"{")  # after "100 Continue", of a child
            if where == "threads":
                assert client.received.startswith(b"HTTP/1.1 401 ")
        serve.shutdown()


@pytest.mark.parametrize("sent", [0, 100_000])
@pytest.mark.parametrize("where", ["threads", "process"])
def test_a_route_that_needs_no_body_answers_before_it_is_here(where: str, sent: int) -> None:
    with forking():
        port = served(denies([]) if where == "threads" else bind(InChild))
        with Connection(port) as client:
            post(client, "/unread/1", 10_000_000, sent)
            assert client.receive_until(b"{").startswith(b"HTTP/1.1 401 ")
        serve.shutdown()


@serve.deployment
async def call(request: Request) -> None:
    raise HTTPException(401)


def behind_middleware() -> Application:
    app = FastAPI()

    @app.middleware("http")
    async def refuse(request: Request, call_next: Callable[..., Any]) -> Response:
        return PlainTextResponse("{", 401)

    @serve.deployment
    @serve.ingress(app)
    class Behind:
        @app.post("/deny")
        async def deny(self, value: Annotated[int, Body()]) -> None: ...

    return bind(Behind)


@pytest.mark.parametrize("where", ["threads", "process", "call", "middleware"])
def test_what_may_read_a_large_body_answers_before_it_is_here(where: str) -> None:
    with forking():
        made = {
            "threads": lambda: denies([]),
            "process": lambda: bind(InChild),
            "call": lambda: call.bind(),
            "middleware": behind_middleware,
        }
        port = served(made[where]())
        with Connection(port) as client:
            post(client, "/deny", BUFFER_BYTES + 1, 0)
            assert client.receive_until(b"\r\n\r\n").startswith(b"HTTP/1.1 401 ")
        serve.shutdown()


def test_a_large_body_that_fastapi_reads_takes_no_slot_before_the_buffer_is_full() -> None:
    port = served(uploads([], max_ongoing_requests=1))
    with Connection(port) as client:
        post(client, "/parameter", LARGE, BUFFER_BYTES - 1)
        for _ in range(5):
            assert get(port, "/").body == b'"here"'
        assert ongoing() == 0


def test_what_reads_a_body_without_declaring_it_gets_the_whole() -> None:
    app = FastAPI()

    class Reads(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            inner = super().get_route_handler()

            async def handler(request: Request) -> Response:
                size = len(await request.body())
                response = await inner(request)
                response.headers["x-size"] = str(size)
                return response

            return handler

    class Middleware:
        def __init__(self, inner: ASGIApp) -> None:
            self.inner = inner

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != "/in-middleware":
                await self.inner(scope, receive, send)
                return
            size, more = 0, True
            while more:
                message = await receive()
                more = message["more_body"]
                size += len(message["body"])
            await PlainTextResponse("", headers={"x-size": str(size)})(scope, receive, send)

    app.add_middleware(Middleware)
    router = APIRouter(route_class=Reads)

    @serve.deployment
    @serve.ingress(app)
    class Api:
        @router.post("/in-handler")
        async def in_handler(self) -> None:
            pass

        @app.post("/in-middleware")
        async def in_middleware(self) -> None:
            pass

    app.include_router(router)
    port = served(bind(Api))
    for path in ("/in-handler", "/in-middleware"):
        with Connection(port) as client:
            post(client, path, 300_000, 100_000)
            client.send(b"7" * 200_000)
            assert b"x-size: 300000" in client.receive_until(b"\r\n\r\n")


def test_a_body_whose_client_waits_is_asked_for_when_user_code_reads_it() -> None:
    with Connection(served(denies([]))) as client:
        client.request("/reads", method="POST", headers=EXPECTS)
        client.receive_until(b"100 Continue")
        client.send(b"0123456789")
        assert client.receive_until(b"\r\n\r\n10").endswith(b"\r\n\r\n10")


def test_a_client_that_leaves_while_its_body_is_not_asked_for_is_noticed() -> None:
    log: list[str] = []
    with Connection(served(denies(log))) as client:
        client.request("/waits", method="POST", headers=EXPECTS)
        wait_until(lambda: log == ["began"])
        client.socket.settimeout(0.1)  # some sweeps, which must not ask for the body
        with pytest.raises(TimeoutError):
            client.socket.recv(1)
    wait_until(lambda: log == ["began", "cancelled"])


def denies(log: list[str]) -> Application:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Denies:
        @app.post("/deny")
        async def deny(self, request: Request) -> None:
            raise HTTPException(401)

        @app.post("/unread/{x}", dependencies=[Depends(HTTPBearer())])
        def unread(self, x: int) -> int:
            return x

        @app.post("/reads")
        async def reads(self, request: Request) -> int:
            return len(await request.body())

        @app.post("/waits")
        async def waits(self, request: Request) -> None:
            log.append("began")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                log.append("cancelled")
                raise

    return bind(Denies)
