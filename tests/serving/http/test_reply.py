"""`http.reply`: request bodies, streams, and clients that disconnect, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, File, UploadFile, WebSocket, WebSocketDisconnect
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.types import DeploymentID, RequestMetadata
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.engines import local_engine
from ingress.serving.http.in_flight import leave
from ingress.serving.http.reply import Reply
from ingress.serving.replicas.router import Router
from ingress.testing import Latch
from tests.servers import (
    PATIENCE_S,
    UPGRADE,
    Connection,
    bind,
    get,
    ongoing,
    overview,
    served,
    steady,
    uvicorn_in_a_thread,
    wait_until,
)

MEGABYTE = bytes(range(256)) * 4096
BUFFER_BYTES = serve.HTTPOptions().body_buffer_bytes


pytestmark = pytest.mark.usefixtures("threadpool")


def ends(user_code: threading.Event) -> None:
    """Wait until user code has ended and has given its slot back."""
    assert user_code.wait(PATIENCE_S), "it still runs"
    wait_until(lambda: ongoing() == 0)


# Bodies.


def test_code_that_hears_of_the_disconnect_late_is_not_cancelled_while_it_cleans_up(
    separate: str,
) -> None:
    """Its loop did not turn when the client left: cancellation and disconnect wait for it."""
    if separate == "0":
        pytest.skip("the server does not hear of the disconnect either")
    began, may_read, ended = Latch(), Latch(), Latch()
    seen: list[str] = []

    @serve.deployment
    class Reading:
        async def __call__(self, request: Request) -> None:
            try:
                async for _ in request.stream():
                    began.count_down()
                    may_read.wait()
            except (ClientDisconnect, asyncio.CancelledError):
                seen.append("gone")
                raise
            finally:
                for _ in range(3):
                    await asyncio.sleep(0.001)
                seen.append("cleaned up")
                ended.count_down()

    with Connection(served(bind(Reading))) as client:
        client.request("/", method="POST", headers=f"Content-Length: {BUFFER_BYTES + 10}\r\n")
        client.send(bytes(BUFFER_BYTES))
        began.wait()
    wait_until(lambda: overview("Reading").replicas[0].orphans == 1)
    may_read.count_down()
    ended.wait()
    assert seen == ["gone", "cleaned up"]


@serve.deployment
class Bodies:
    async def __call__(self, request: Request) -> Any:
        match request.url.path:
            case "/body":
                return hashlib.sha256(await request.body()).hexdigest()
            case "/stream":
                digest, chunks = hashlib.sha256(), 0
                async for chunk in request.stream():
                    digest.update(chunk)
                    chunks += 1
                return {"digest": digest.hexdigest(), "chunks": chunks}
            case "/echo":
                return Response(await request.body())
            case "/echo-stream":
                return StreamingResponse(request.stream())
            case "/ignore":
                return "ignored"
            case "/json":
                return await request.json()
        return None


DIGEST = hashlib.sha256(MEGABYTE).hexdigest()


def pieces() -> Iterator[bytes]:
    for start in range(0, len(MEGABYTE), 10_000):
        yield MEGABYTE[start : start + 10_000]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["content-length", "chunked"])
def test_a_large_body_arrives_whole_however_it_is_sent_and_read(is_chunked: bool) -> None:
    url = f"http://127.0.0.1:{served(bind(Bodies))}"
    with httpx.Client(base_url=url) as client:
        sent = (lambda: pieces()) if is_chunked else (lambda: MEGABYTE)
        assert client.post("/body", content=sent()).text == DIGEST
        read = client.post("/stream", content=sent()).json()
        assert read["digest"] == DIGEST
        assert read["chunks"] > 1
        assert client.post("/echo", content=sent()).content == MEGABYTE
        assert client.post("/echo-stream", content=sent()).content == MEGABYTE
        assert client.post("/ignore", content=sent()).text == "ignored"
        assert client.post("/json", json={"a": [1]}).json() == {"a": [1]}
        assert client.post("/body", content=b"").text == hashlib.sha256().hexdigest()


def test_an_upload_reaches_a_fastapi_endpoint() -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Uploads:
        @app.post("/upload")
        async def upload(self, file: UploadFile = File()) -> str:
            return hashlib.sha256(await file.read()).hexdigest()

    url = f"http://127.0.0.1:{served(bind(Uploads))}/upload"

    assert httpx.post(url, files={"file": MEGABYTE}).json() == DIGEST


def test_a_large_body_is_read_while_it_is_still_being_sent() -> None:
    arrived: list[bytes] = []
    has_first = threading.Event()

    @serve.deployment
    async def reader(request: Request) -> int:
        async for chunk in request.stream():
            arrived.append(chunk)
            has_first.set()
        return len(b"".join(arrived))

    with Connection(served(reader.bind())) as connection:
        head = f"Content-Length: {BUFFER_BYTES + 3}\r\nConnection: close\r\n"
        connection.request("/", method="POST", headers=head)
        connection.send(b"a" * BUFFER_BYTES)
        assert has_first.wait(PATIENCE_S)
        assert arrived == [b"a" * BUFFER_BYTES]
        connection.send(b"def")
        assert connection.answer().body == b"65539"


@pytest.mark.reliability("C06")
@pytest.mark.parametrize("begun", [0, 1])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["content-length", "chunked"])
def test_a_request_whose_body_fits_and_is_not_there_yet_holds_no_slot(
    begun: int, is_chunked: bool
) -> None:
    @serve.deployment(max_ongoing_requests=1)
    async def reader(request: Request) -> bytes:
        return await request.body()

    port = served(reader.bind())
    with Connection(port) as slow:
        head = "Transfer-Encoding: chunked\r\n" if is_chunked else "Content-Length: 2\r\n"
        slow.request("/", method="POST", headers=head + "Connection: close\r\n")
        first, rest = (b"1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n") if is_chunked else (b"a", b"b")
        if begun:
            slow.send(first)
        assert get(port, "/").status == 200
        assert ongoing() == 0
        slow.send(rest if begun else first + rest)
        assert slow.answer().body == b"ab"


def test_expect_100_continue_is_answered_before_the_body() -> None:
    head = "Content-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n"
    with Connection(served(bind(Bodies))) as connection:
        connection.request("/echo", method="POST", headers=head)
        connection.receive_until(b"100 Continue\r\n\r\n")
        connection.received = b""
        connection.send(b"ab")
        assert connection.answer().body == b"ab"


def test_a_client_that_leaves_in_the_middle_of_its_body_gives_its_slot_back() -> None:
    outcome: list[str] = []
    began, ended = threading.Event(), threading.Event()

    @serve.deployment
    async def reader(request: Request) -> str:
        try:
            async for _ in request.stream():
                began.set()
        except (ClientDisconnect, asyncio.CancelledError):
            outcome.append("gone")
            raise
        finally:
            ended.set()
        return "whole"

    with Connection(served(reader.bind())) as connection:
        connection.request("/", method="POST", headers=f"Content-Length: {BUFFER_BYTES + 3}\r\n")
        connection.send(b"a" * BUFFER_BYTES)
        assert began.wait(PATIENCE_S)

    ends(ended)
    assert outcome == ["gone"]


@pytest.mark.reliability("F06")
def test_requests_over_one_connection_do_not_mix() -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{served(bind(Bodies))}") as client:
        for number in range(20):
            body = b"%d" % number * number
            path = "/echo" if number % 2 else "/echo-stream"
            assert client.post(path, content=body).content == body


@pytest.mark.reliability("F06")
def test_pipelined_requests_are_answered_in_order() -> None:
    @serve.deployment
    async def echo(request: Request) -> str:
        return request.url.path

    with Connection(served(echo.bind())) as connection:
        connection.request("/1", headers="")
        connection.request("/2", headers="")
        connection.request("/3")
        received = connection.receive_all()

    assert 0 < received.index(b"\r\n\r\n/1") < received.index(b"/2") < received.index(b"/3")


# Streams.


class Stream:
    """A stream of chunks that records its progress and its end: endless, or it waits after one."""

    def __init__(self, chunk: bytes = b"x" * 100, *, waits: bool = True) -> None:
        self.chunk = chunk
        self.waits = waits
        self.made = 0
        self.closed = threading.Event()

    async def asynchronous(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self.made += 1
                yield self.chunk
                if self.waits:
                    await asyncio.Event().wait()
        finally:
            self.closed.set()

    def synchronous(self) -> Iterator[bytes]:
        try:
            while True:
                self.made += 1
                yield self.chunk
                if self.waits:
                    time.sleep(0.001)  # a thread cannot be interrupted, only closed at a `yield`
        finally:
            self.closed.set()


SHAPES = ["async-generator", "def-generator", "response-async", "response-def"]
SHAPES += ["fastapi-async", "fastapi-def", "fastapi-middleware"]


def streaming(stream: Stream, shape: str) -> serve.Application:
    """Return an application that answers with the stream, in one of several ways."""
    if not shape.startswith("fastapi"):
        return serve.deployment(_Generator).bind(stream, shape)
    app = FastAPI()
    if shape == "fastapi-middleware":

        @app.middleware("http")
        async def middleware(request: Request, call_next: Any) -> Any:
            return await call_next(request)

    @app.api_route("/", methods=["GET", "POST"])
    async def endpoint() -> Response:
        is_def = shape == "fastapi-def"
        return StreamingResponse(stream.synchronous() if is_def else stream.asynchronous())

    @serve.deployment
    @serve.ingress(app)
    class Streaming: ...

    return bind(Streaming)


class _Generator:
    def __init__(self, stream: Stream, shape: str) -> None:
        self.stream = stream
        self.shape = shape

    def __call__(self, request: Request) -> Any:
        is_async = self.shape.endswith(("async", "async-generator"))
        items: Any = self.stream.asynchronous() if is_async else self.stream.synchronous()
        return StreamingResponse(items) if self.shape.startswith("response") else items


@pytest.mark.parametrize("end", ["FIN", "RST"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_that_leaves_closes_the_generator_it_read(shape: str, end: str) -> None:
    stream = Stream()
    with Connection(served(streaming(stream, shape))) as connection:
        connection.request("/")
        connection.receive_until(b"xxx")
        assert not stream.closed.is_set()
        if end == "RST":
            connection.reset()

    ends(stream.closed)


@pytest.mark.reliability("A11")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_reader_that_does_not_read_suspends_the_producer_and_closes_it_when_it_leaves(
    shape: str,
) -> None:
    stream = Stream(b"x" * 65536, waits=False)
    with Connection(served(streaming(stream, shape)), receive_buffer=4096) as connection:
        connection.request("/")
        connection.receive_until(b"xxx")
        # At 64 KiB each; most are in the buffers of the sockets.
        assert steady(lambda: stream.made) < 150
        assert not stream.closed.is_set()

    ends(stream.closed)


@pytest.mark.parametrize("shape", ["async-generator", "response-async", "fastapi-middleware"])
def test_a_client_that_leaves_is_noticed_though_its_body_was_never_read(shape: str) -> None:
    stream = Stream()
    with Connection(served(streaming(stream, shape))) as connection:
        connection.request("/", method="POST", headers="Content-Length: 50000\r\n")
        connection.send(b"y" * 50_000)
        connection.receive_until(b"xxx")

    ends(stream.closed)


def test_a_stream_that_swallows_its_cancellation_ends_when_it_sends() -> None:
    closed = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        part = {"type": "http.response.body", "body": b"xxx", "more_body": True}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send(part)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        try:
            while True:  # the first message may still find the response open
                await send(part)
                await asyncio.sleep(0)
        except OSError:
            closed.set()
            raise

    @serve.deployment
    @serve.ingress(app)
    class Raw: ...

    with Connection(served(bind(Raw))) as connection:
        connection.request("/")
        connection.receive_until(b"xxx")

    ends(closed)


def test_a_background_task_runs_to_its_end_though_the_client_has_left() -> None:
    may_end, ended = threading.Event(), threading.Event()
    outcome: list[str] = []

    async def background() -> None:
        try:
            await asyncio.to_thread(may_end.wait, PATIENCE_S)
            outcome.append("ended")
        finally:
            ended.set()

    @serve.deployment
    async def answers(request: Request) -> Response:
        if request.url.path == "/stream":

            async def items() -> AsyncIterator[bytes]:
                yield b"ok"

            return StreamingResponse(items(), background=BackgroundTask(background))
        return Response("ok", background=BackgroundTask(background))

    port = served(answers.bind())
    for path in ("/", "/stream"):
        may_end.clear()
        ended.clear()
        assert get(port, path).body == b"ok"
        assert not ended.is_set()
        may_end.set()
        assert ended.wait(PATIENCE_S)

    assert outcome == ["ended"] * 2


def test_what_a_client_that_left_had_sent_does_not_wait_for_the_garbage_collector() -> None:
    began = threading.Event()

    @serve.deployment
    async def never_reads(request: Request) -> None:
        began.set()
        await asyncio.Event().wait()

    def replies() -> int:
        return sum(type(each) is Reply for each in gc.get_objects())

    port = served(never_reads.bind())
    wait_until(lambda: gc.collect() >= 0 and replies() == 0)  # those of earlier tests
    gc.disable()
    try:
        with Connection(port) as connection:
            connection.request("/", method="POST", headers=f"Content-Length: {len(MEGABYTE)}\r\n")
            connection.send(MEGABYTE[: len(MEGABYTE) // 4])
            assert began.wait(PATIENCE_S)
            assert replies() == 1

        wait_until(lambda: replies() == 0)
    finally:
        gc.enable()


def test_a_client_that_leaves_the_queue_never_reaches_a_replica() -> None:
    began, may_end = threading.Event(), threading.Event()
    seen: list[str] = []

    @serve.deployment(max_ongoing_requests=1)
    async def slow(request: Request) -> str:
        seen.append(request.url.path)
        began.set()
        await asyncio.to_thread(may_end.wait, PATIENCE_S)
        return "done"

    port = served(slow.bind())
    with Connection(port) as first:
        first.request("/first")
        assert began.wait(PATIENCE_S)
        with Connection(port) as second:
            second.request("/second")
            wait_until(lambda: overview("slow").queued == 1)
        wait_until(lambda: overview("slow").queued == 0, PATIENCE_S / 4)
        may_end.set()
        assert first.answer().body == b"done"

    assert get(port, "/third").status == 200
    assert seen == ["/first", "/third"]


# WebSockets.


def sockets(seen: list[Any], closed: threading.Event) -> serve.Application:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Sockets:
        prefix = "echo "

        @app.websocket("/echo")
        async def echo(self, websocket: WebSocket) -> None:
            await websocket.accept()
            try:
                while True:
                    await websocket.send_text(self.prefix + await websocket.receive_text())
            except WebSocketDisconnect as gone:
                seen.append(gone.code)
            finally:
                closed.set()

        @app.websocket("/bytes")
        async def bytes_(self, websocket: WebSocket) -> None:
            await websocket.accept("chat")
            await websocket.send_bytes(await websocket.receive_bytes())
            await websocket.close(4001, "enough")

        @app.websocket("/flood")
        async def flood(self, websocket: WebSocket) -> None:
            await websocket.accept()
            try:
                while True:
                    await websocket.send_bytes(b"x" * 65536)
                    seen.append(1)
            finally:
                closed.set()

    return bind(Sockets)


def test_a_websocket_echoes_and_sees_its_client_leave() -> None:
    seen: list[Any] = []
    closed = threading.Event()
    port = served(sockets(seen, closed))
    with connect(f"ws://127.0.0.1:{port}/echo", proxy=None) as client:
        for number in range(100):
            client.send(str(number))
            assert client.recv(timeout=PATIENCE_S) == f"echo {number}"

    ends(closed)
    assert seen == [1000]


def test_a_websocket_carries_bytes_subprotocols_and_close_codes() -> None:
    port = served(sockets([], threading.Event()))
    with connect(f"ws://127.0.0.1:{port}/bytes", subprotocols=["chat"], proxy=None) as client:  # type: ignore[list-item]
        assert client.subprotocol == "chat"
        client.send(MEGABYTE[:100_000])
        assert client.recv(timeout=PATIENCE_S) == MEGABYTE[:100_000]
        with pytest.raises(ConnectionClosed) as ended:
            client.recv(timeout=PATIENCE_S)

    assert ended.value.rcvd is not None
    assert (ended.value.rcvd.code, ended.value.rcvd.reason) == (4001, "enough")


@pytest.mark.parametrize("end", ["FIN", "RST"])
@pytest.mark.parametrize("path", ["/echo", "/flood"])
def test_a_websocket_whose_client_vanishes_gives_its_slot_back(path: str, end: str) -> None:
    closed = threading.Event()
    with Connection(served(sockets([], closed)), receive_buffer=4096) as connection:
        connection.request(path, headers=UPGRADE)
        connection.receive_until(b"101 Switching Protocols")
        if path == "/flood":
            connection.receive_until(b"xxx")
        if end == "RST":
            connection.reset()

    ends(closed)


@pytest.mark.parametrize("end", ["FIN", "RST"])
def test_a_websocket_whose_client_has_vanished_before_it_sends_lets_its_loop_go_on(
    end: str,
) -> None:
    entered, left, closed = (Latch(timeout_s=PATIENCE_S) for _ in range(3))
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Flood:
        @app.websocket("/flood")
        async def flood(self, websocket: WebSocket) -> None:
            await websocket.accept()
            entered.count_down()
            left.wait()  # on the loop, which cannot notice the disconnect
            try:
                while True:
                    await websocket.send_bytes(b"x" * 65536)
            finally:
                closed.count_down()

    with Connection(served(bind(Flood))) as connection:
        connection.request("/flood", headers=UPGRADE)
        entered.wait()
        if end == "RST":
            connection.reset()
    left.count_down()

    closed.wait()
    wait_until(lambda: ongoing() == 0)


@pytest.mark.parametrize("path", ["/echo", "/flood"])
def test_a_websocket_whose_client_answers_no_ping_gives_its_slot_back(path: str) -> None:
    closed = threading.Event()
    pings = {"ws_ping_interval": 0.1, "ws_ping_timeout": 0.1}
    with (
        uvicorn_in_a_thread(sockets([], closed), pings) as port,
        Connection(port, receive_buffer=4096) as connection,
    ):
        connection.request(path, headers=UPGRADE)
        connection.receive_until(b"101 Switching Protocols")

        ends(closed)  # the client stays, and reads no more


def test_a_client_that_does_not_read_suspends_a_websocket_that_sends() -> None:
    made: list[Any] = []
    with Connection(served(sockets(made, threading.Event())), receive_buffer=4096) as connection:
        connection.request("/flood", headers=UPGRADE)
        connection.receive_until(b"xxx")
        assert steady(lambda: len(made)) < 150


# Races of the call's end, and of its begin, with the end of its reply.


class Held:
    """A call's lock. Once the call is settled in user code's thread, that waits after release."""

    def __init__(self, call: Call, settled: Latch, may_go_on: Latch) -> None:
        self.call, self.settled, self.may_go_on, self.lock = call, settled, may_go_on, call.lock
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if self.call.settled and threading.get_ident() == self.thread:
            self.settled.count_down()
            self.may_go_on.wait()


def test_all_hear_of_the_end_of_a_call_whose_reply_has_left_meanwhile(
    separate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its server's task finds the call settled, and leaves before the call has told of its end."""
    if separate == "0":
        pytest.skip("one thread does both")
    settled, may_go_on, heard = Latch(), Latch(), Latch()

    @serve.deployment
    class Quick:
        async def __call__(self) -> str:
            call = CURRENT_CALL.get()
            call.when_settled(lambda _: heard.count_down())
            call.lock = Held(call, settled, may_go_on)  # type: ignore[assignment]
            (reply,) = local_engine().http.proxy.in_flight.replies
            reply.loop.call_soon_threadsafe(settled.wait)  # the server sees the answer only then
            return "quick"

    port = served(bind(Quick))
    assert get(port, "/").body == b"quick"
    wait_until(lambda: not local_engine().http.proxy.in_flight.replies)
    may_go_on.count_down()
    heard.wait()
    wait_until(lambda: ongoing() == 0)
    assert not [each.getMessage() for each in caplog.records if each.levelno > logging.INFO]


def test_work_whose_reply_has_left_before_it_begins_runs_all_the_same() -> None:
    """Its call was admitted, and cut at that moment."""

    async def unused(*_: object) -> Any:
        raise AssertionError("the reply has left")

    async def begun() -> object:
        router = Router(DeploymentID("D"))
        metadata = RequestMetadata("", router.deployment_id)
        reply = Reply(metadata, router, {"path": "/path"}, unused, unused)
        call, work = reply.call, reply.work
        runner: Any = SimpleNamespace(loop=None)
        call.runner = runner
        leave(reply, None)
        CURRENT_CALL.set(call)
        code: Any = SimpleNamespace(http=lambda scope, receive, send: scope["path"])
        return work(code)

    assert asyncio.run(begun()) == "/path"
