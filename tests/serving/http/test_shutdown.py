"""Shutdown: refuse, drain, notify, cancel, run the user's cleanup, and end in time."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from fastapi import FastAPI, WebSocket
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import ingress as serve
from ingress.engines import local_engine
from ingress.serving.http import in_flight, leaving
from tests.programs import INGRESS, UVICORN, ServerProcess, environment, process, write_module
from tests.servers import (
    PATIENCE_S,
    UPGRADE,
    Connection,
    bind,
    get,
    is_ready,
    served,
    wait_until,
)

GRACEFUL_S = 0.5
LAST_WORDS_S = 4.0  # stuck code gets a second to end, and machines are slow

APP = """
import asyncio, os, threading
from contextlib import asynccontextmanager
from collections.abc import AsyncIterator
from fastapi import FastAPI, WebSocket
from starlette.responses import StreamingResponse
import ingress as serve

@asynccontextmanager
async def lifespan(app):
    yield
    print("lifespan ended", flush=True)

app = FastAPI(lifespan=lifespan)

@serve.deployment(graceful_shutdown_timeout_s=float(os.environ["GRACEFUL_S"]))
@serve.ingress(app)
class App:
    def __del__(self):
        print("deleted", flush=True)

    @app.get("/quick")
    async def quick(self): return "quick"

    @app.get("/slow")
    async def slow(self, s: float):
        print("slow began", flush=True)
        await asyncio.sleep(s)
        return "slow"

    @app.get("/held")
    async def held(self):
        print("held began", flush=True)
        while not os.path.exists("released"):
            await asyncio.sleep(0.005)
        return "held"

    @app.get("/stuck")
    def stuck(self):
        print("stuck began", flush=True)
        threading.Event().wait()

    @app.get("/blocked")
    async def blocked(self):
        print("blocked began", flush=True)
        threading.Event().wait()

    @app.get("/events")
    async def events(self):
        async def items() -> AsyncIterator[str]:
            try:
                while True:
                    yield "data: x\\n\\n"
                    await asyncio.sleep(0.01)
            finally:
                print("events closed", flush=True)
        return StreamingResponse(items(), media_type="text/event-stream")

    @app.websocket("/ws")
    async def ws(self, websocket: WebSocket):
        await websocket.accept()
        try:
            while True:
                await websocket.send_text(await websocket.receive_text())
        finally:
            print("websocket closed", flush=True)

hello = App.bind()
"""

BLOCKING = """
import ingress as serve
from app import hello
if __name__ == "__main__":
    serve.start({"port": 0})
    print("serving on", *serve.status().proxies, flush=True)
    serve.run(hello, blocking=True)
"""

COMMANDS = {
    "ingress run": [*INGRESS, "run", "app:hello", "--port", "0"],
    "serve.run": [sys.executable, "blocking.py"],
}


OTHER_COMMANDS = {
    "uvicorn": [*UVICORN, "app:hello"],
    "workers": [*INGRESS, "run", "app:hello", "--port", "0", "--workers", "2"],
}
"""Commands under which uvicorn, which knows no applications, gets the signal."""


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> list[str]:
    return {**COMMANDS, **OTHER_COMMANDS}[request.param]


@pytest.fixture
def graceful_s() -> float:
    return GRACEFUL_S


@pytest.fixture
def server(
    tmp_path: Path, command: list[str], separate: str, graceful_s: float
) -> Iterator[ServerProcess]:
    write_module(tmp_path, "app", APP)
    write_module(tmp_path, "blocking", BLOCKING)
    env = {**environment(tmp_path, separate=separate), "GRACEFUL_S": str(graceful_s)}
    with process(command, tmp_path, env) as running:
        wait_until(lambda: is_ready(running.port))
        yield running


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_a_stop_with_nothing_to_do_is_quick_and_clean(
    server: ServerProcess, number: signal.Signals
) -> None:
    server.signal(number)
    began = time.monotonic()

    assert server.wait() == 0
    assert time.monotonic() - began < LAST_WORDS_S
    assert server.output.count("deleted") == 1
    assert server.output.index("lifespan ended") < server.output.index("deleted")
    assert "Traceback" not in server.output


@pytest.mark.reliability("B15")
@pytest.mark.parametrize("graceful_s", [PATIENCE_S], ids=["patient"])
def test_what_runs_is_answered_and_what_comes_later_is_refused(
    server: ServerProcess, tmp_path: Path
) -> None:
    port = server.port
    with Connection(port) as running, Connection(port) as waiting:
        running.request("/held")
        server.wait_for("held began")
        server.signal()
        wait_until(lambda: get(port, "/quick").status == 503)
        waiting.request("/quick")
        refused = waiting.receive_all()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert refused.endswith(b"\r\n\r\nThis node is being drained.")
        assert refused.count(b"connection: close") == 1
        assert get(port, "/-/healthz").status == 503
        (tmp_path / "released").touch()
        assert running.answer().body == b'"held"'

    assert server.wait() == 0


@pytest.mark.thorough
def test_what_comes_right_after_the_signal_is_served_and_sent_elsewhere(
    server: ServerProcess,
) -> None:
    port = server.port
    with Connection(port) as busy, Connection(port) as idle:
        idle.request("/quick", headers="")
        idle.receive_until(b'"quick"')
        busy.request("/slow?s=0.15", headers="")
        server.wait_for("slow began")
        server.signal()
        wait_until(lambda: get(port, "/-/healthz").status == 503)
        idle.received = b""
        idle.request("/quick", headers="")
        last, slow = idle.answer(), busy.answer()

        assert (last.status, last.body, last.headers["connection"]) == (200, b'"quick"', "close")
        assert (slow.status, slow.body, slow.headers["connection"]) == (200, b'"slow"', "close")
    assert server.wait() == 0


@pytest.mark.thorough
def test_what_does_not_end_in_time_is_a_503_and_the_process_goes(server: ServerProcess) -> None:
    with Connection(server.port) as running:
        running.request("/slow?s=1000")
        server.wait_for("slow began")
        server.signal()
        began = time.monotonic()
        answer = running.answer()

        assert (answer.status, answer.is_complete) == (503, True)
        assert b"was stopped before it answered" in answer.body
    assert server.wait() == 0
    assert time.monotonic() - began < GRACEFUL_S + LAST_WORDS_S
    assert server.output.count("deleted") == 1
    assert "Traceback" not in server.output


@pytest.mark.thorough
@pytest.mark.reliability("B15")
@pytest.mark.parametrize("path", ["/stuck", "/blocked"])
def test_code_that_never_returns_does_not_keep_the_process(
    server: ServerProcess, path: str
) -> None:
    with Connection(server.port) as running:
        running.request(path)
        server.wait_for(f"{path[1:]} began")
        server.signal()
        began = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - began < GRACEFUL_S + LAST_WORDS_S


@pytest.mark.thorough
@pytest.mark.reliability("B15")
def test_open_streams_are_ended(server: ServerProcess) -> None:
    port = server.port
    with Connection(port) as events, connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as socket_:
        events.request("/events")
        events.receive_until(b"data")
        socket_.send("x")
        assert socket_.recv(timeout=PATIENCE_S) == "x"
        server.signal()
        began = time.monotonic()
        with pytest.raises(ConnectionClosed) as closed:
            socket_.recv(timeout=PATIENCE_S)
        assert not events.answer().is_complete

        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
    assert server.wait() == 0
    assert time.monotonic() - began < GRACEFUL_S + LAST_WORDS_S
    assert server.output.count("events closed") == server.output.count("websocket closed") == 1
    assert "to /events was cut: Deployment(name='App', app='default') was" in server.output
    assert "Traceback" not in server.output


@pytest.mark.thorough
@pytest.mark.parametrize("command", OTHER_COMMANDS, indirect=True)
def test_what_has_no_end_does_not_keep_a_server_that_waits_for_it(server: ServerProcess) -> None:
    """uvicorn shuts an application down only after all requests have ended."""
    port = server.port
    with Connection(port) as events, Connection(port) as running:
        events.request("/events")
        events.receive_until(b"data")
        running.request("/slow?s=1000")
        server.wait_for("slow began")
        server.signal()
        assert not events.answer().is_complete
        answer = running.answer()
        assert (answer.status, answer.is_complete) == (503, True)
    assert server.wait() in (0, -signal.SIGTERM)
    assert server.output.count("events closed") == 1
    assert "Traceback" not in server.output
    assert "timeout graceful shutdown exceeded" not in server.output


@pytest.mark.reliability("B17")
def test_a_second_signal_ends_it_at_once(server: ServerProcess) -> None:
    with Connection(server.port) as running:
        running.request("/slow?s=1000")
        server.wait_for("slow began")
        server.signal(signal.SIGINT)
        wait_until(lambda: get(server.port, "/-/healthz").status == 503)
        server.signal(signal.SIGINT)
        began = time.monotonic()

        assert server.wait() != 0
        assert time.monotonic() - began < 1.0


# In this process.


def test_callers_stop_before_those_they_call(separate: str) -> None:
    order: list[str] = []

    class Leaf:
        async def __call__(self) -> str:
            return "leaf"

        def __del__(self) -> None:
            order.append(type(self).__name__)

    class Middle(Leaf):
        def __init__(self, child: object) -> None:
            self.child = child

    class Root(Middle): ...

    leaf = serve.deployment(Leaf).bind()
    application = serve.deployment(Root).bind(serve.deployment(Middle).bind(leaf))
    serve.run(application, route_prefix=None)
    serve.shutdown()

    assert order == ["Root", "Middle", "Leaf"]


def test_shutdown_of_nothing_and_twice_is_nothing(separate: str) -> None:
    serve.shutdown()
    serve.run(serve.deployment(lambda_app).bind(), route_prefix=None)
    assert json.dumps(list(serve.status().applications)) == '["default"]'
    serve.shutdown()
    serve.shutdown()

    assert serve.status() == serve.status().__class__()


async def lambda_app() -> str:
    return "x"


def test_replacing_an_application_does_not_touch_the_requests_of_the_new_one(separate: str) -> None:
    began, may_end = threading.Event(), threading.Event()

    def version(number: int) -> serve.Application:
        @serve.deployment(name="app", graceful_shutdown_timeout_s=0.5)
        async def app(request: Request) -> str:
            if request.url.path == "/wait":
                began.set()
                assert await asyncio.to_thread(may_end.wait, PATIENCE_S)
            return str(number)

        return app.bind()

    port = served(version(1))
    with Connection(port) as old:
        old.request("/wait")
        assert began.wait(PATIENCE_S)
        began.clear()
        redeploy = threading.Thread(target=served, args=(version(2),))
        redeploy.start()
        wait_until(lambda: get(port, "/").body == b"2")
        with Connection(port) as new:
            new.request("/wait")
            assert began.wait(PATIENCE_S)
            redeploy.join()  # the old application's timeout is over by then
            may_end.set()
            assert new.answer().body == b"2"
        assert old.answer().status == 503


@pytest.mark.reliability("E04")
def test_a_port_is_free_again_after_shutdown(separate: str) -> None:
    port = served(serve.deployment(lambda_app).bind())
    serve.shutdown()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))  # raises if the port is still in use
        assert listener.getsockname()[1] == port


# Clients that are slow to take what they get.


@serve.deployment(graceful_shutdown_timeout_s=10 * PATIENCE_S)
class Bytes:
    """Sends 8 MB at once, or by a stream or a WebSocket without end."""

    async def __call__(self, request: Request) -> Response:
        chunk = b"x" * 65536
        if request.url.path == "/stream":
            return StreamingResponse(iter(lambda: chunk, b""))
        return Response(chunk * 128)


sockets = FastAPI()


@serve.deployment(graceful_shutdown_timeout_s=10 * PATIENCE_S)
@serve.ingress(sockets)
class Messages:
    @sockets.websocket("/")
    async def flood(self, websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            await websocket.send_bytes(b"x" * 65536)


@contextmanager
def stopping() -> Iterator[threading.Thread]:
    """Stop the server in a thread, which has ended afterwards."""
    thread = threading.Thread(target=serve.shutdown)
    thread.start()
    yield thread
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_client_that_is_still_taking_its_answer_gets_all_of_it(
    isolation: Literal["thread", "process"], separate: str
) -> None:
    port = served(bind(Bytes.options(isolation=isolation)))
    with Connection(port, receive_buffer=65536) as connection:
        connection.request("/")
        connection.receive_until(b"\r\n\r\n")
        with stopping() as thread:
            until = time.monotonic() + 1.5  # longer than connections have that take nothing
            while time.monotonic() < until and thread.is_alive():
                connection.received += connection.socket.recv(4096)
                thread.join(0.02)
            assert connection.answer().is_complete


@pytest.mark.parametrize("kind", ["/stream", "websocket"])
def test_a_client_that_takes_nothing_of_a_stream_delays_no_stop(
    kind: str, separate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (in_flight, "STREAM_GRACE_S"), (in_flight, "TAKING_S"), (leaving, "STALLED_S")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 0.2)
    port = served(bind(Messages if kind == "websocket" else Bytes))
    with Connection(port, receive_buffer=4096) as connection:
        headers = UPGRADE if kind == "websocket" else ""
        connection.request("/" if kind == "websocket" else kind, headers=headers)
        connection.receive_until(b"\r\n\r\n")
        with stopping():
            pass
        assert not connection.answer().is_complete


def test_a_stop_ends_a_request_whose_body_is_on_its_way(separate: str) -> None:
    """Nothing else would: its client may be as slow as it likes."""

    @serve.deployment(graceful_shutdown_timeout_s=0.2)
    class Reads:
        async def __call__(self, request: Request) -> int:
            return len(await request.body())

    port = served(Reads.bind(), body_idle_timeout_s=None, min_body_rate=None)
    with Connection(port) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n0123456789")
        wait_until(lambda: len(local_engine().http.proxy.in_flight.replies) == 1)
        serve.delete("default")
        assert client.receive_all().startswith(b"HTTP/1.1 503 ")
