"""`http.connections`: limits on size, time and number of connections, over sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from fastapi import Request
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.settings import (
    HEADER_TIMEOUT_S,
    LIMIT_CONNECTIONS,
    MAX_HEADER_BYTES,
    HTTPLimits,
    Settings,
)
from ingress.serving.http.connections import HEADER_FIELDS
from tests.servers import (
    INGRESS,
    PATIENCE_S,
    Connection,
    ServerProcess,
    bind,
    environment,
    get,
    process,
    served,
    wait_until,
    write_module,
)

APP = """
import ingress as serve
from fastapi import FastAPI, Request, WebSocket

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Small:
    @app.get("/")
    async def get(self): return "here"

    @app.post("/length")
    async def length(self, request: Request): return len(await request.body())

    @app.post("/early")
    async def early(self): return "early"

    @app.websocket("/ws")
    async def chat(self, websocket: WebSocket):
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())

small = Small.bind()
"""

TIMEOUT_S = 0.4
H11 = [
    *INGRESS[:-1],
    "import sys; sys.modules['httptools'] = None; from ingress.cli.commands import main; main()",
]
HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"
CHUNKED = b"POST /length HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module", params=[INGRESS, H11], ids=["httptools", "h11"])
def parser(request: pytest.FixtureRequest) -> list[str]:
    """The command-line options for each of uvicorn's parsers."""
    command: list[str] = request.param
    return command


@pytest.fixture(scope="module")
def server(parser: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`ingress run` with short timeouts."""
    variables = {HEADER_TIMEOUT_S: str(TIMEOUT_S), MAX_HEADER_BYTES: "20000"}
    with _serving(parser, tmp_path_factory.mktemp("small"), (), variables) as started:
        yield started


@contextmanager
def _serving(
    command: list[str], folder: Path, arguments: tuple[str, ...], variables: dict[str, str]
) -> Iterator[ServerProcess]:
    write_module(folder, "small", APP)
    environ = {**environment(folder), **variables}
    command = [*command, "run", "small:small", "--port", "0", *arguments]
    with process(command, folder, environ) as server:
        wait_until(lambda: _is_up(server))
        yield server


def _is_up(server: ServerProcess) -> bool:
    try:
        return get(server.port, "/").status == 200
    except OSError:
        return False


def resident_mb(server: ServerProcess) -> float:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# Ambiguous requests.

DOUBTS = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", ""),  # h11 has its own message
    "two hosts": (HEAD + b"Host: there\r\n\r\n", ""),
    "two hosts in one": (b"GET / HTTP/1.1\r\nHost: a,b\r\n\r\n", "its Host field is invalid"),
    "a user": (b"GET / HTTP/1.1\r\nHost: me@here\r\n\r\n", "its Host field is invalid"),
    "another HTTP": (b"GET / HTTP/2.0\r\nHost: here\r\n\r\n", "HTTP/2.0 is not supported"),
    "chunks in HTTP/1.0": (
        CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
        "it has Transfer-Encoding with HTTP/1.0",
    ),
    "two lengths": (
        CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"0\r\n\r\n",
        "",  # httptools has its own message
    ),
    "LF alone": (HEAD.replace(b"\r\n", b"\n") + b"\n", ""),
    "a line that goes on": (HEAD + b"X: a\r\n b\r\n\r\n", ""),
    "a control character": (HEAD + b"X: a\x01b\r\n\r\n", ""),
}


@pytest.mark.reliability("C02")
@pytest.mark.parametrize("name", DOUBTS)
def test_a_request_that_leaves_a_doubt_is_refused_and_its_connection_closed(
    server: ServerProcess, name: str
) -> None:
    raw, why = DOUBTS[name]
    with Connection(server.port) as connection:
        connection.send(raw + HEAD + b"\r\n")  # a request that could be smuggled in
        answer = connection.answer()

    assert answer.status == 400
    assert answer.raw.count(b"HTTP/1.1 ") == 1
    assert why.encode() in answer.body


@pytest.mark.parametrize(
    "host", [b"", b"here:80", b"[::1]:8000", b"a.b-c_d~", b"%41", b"127.0.0.1"], ids=repr
)
def test_what_a_host_may_be_is_served(server: ServerProcess, host: bytes) -> None:
    with Connection(server.port) as connection:
        connection.send(b"GET / HTTP/1.1\r\nHost:  " + host + b"\r\nConnection: close\r\n\r\n")
        assert connection.answer().status == 200


def test_the_first_http_needs_no_host(server: ServerProcess) -> None:
    with Connection(server.port) as connection:
        connection.send(b"GET / HTTP/1.0\r\n\r\n")
        assert connection.answer().status == 200


# Time.


@pytest.mark.reliability("C06")
def test_a_client_that_sends_nothing_or_half_a_head_is_closed_in_time(
    server: ServerProcess,
) -> None:
    port = server.port
    begun = time.monotonic()
    with ExitStack() as opened:
        silent = [opened.enter_context(Connection(port)) for _ in range(50)]
        halves = [opened.enter_context(Connection(port)) for _ in range(50)]
        for each in halves:
            each.send(HEAD + b"X-Slow: ")

        assert get(port, "/").status == 200
        assert {each.receive_all() for each in silent} == {b""}
        answers = [each.answer() for each in halves]
        took_s = time.monotonic() - begun

    assert {(each.status, each.is_complete) for each in answers} == {(408, True)}
    assert answers[0].headers["connection"] == "close"
    assert answers[0].body == b"The headers of the request did not arrive within 0.4 s."
    assert TIMEOUT_S <= took_s < TIMEOUT_S + 2


@pytest.mark.reliability("C06")
def test_bytes_now_and_then_do_not_buy_more_time(server: ServerProcess) -> None:
    port = server.port
    begun = time.monotonic()
    with Connection(port) as connection:
        connection.send(HEAD)
        connection.socket.settimeout(0.05)
        while True:
            assert time.monotonic() < begun + TIMEOUT_S + 2
            connection.send(b"X")
            try:
                connection.received += connection.socket.recv(4096)
                break
            except TimeoutError:
                continue

        assert connection.received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@pytest.mark.reliability("C06")
def test_the_second_head_of_a_connection_has_as_long_and_none_begins_while_it_rests(
    server: ServerProcess,
) -> None:
    with Connection(server.port) as connection:
        connection.request("/", headers="")
        connection.receive_until(b'"here"')
        connection.received = b""
        connection.send_slowly(HEAD, pause_s=2 * TIMEOUT_S)  # only the keep-alive timeout applies

        assert connection.answer().status == 408


def test_a_websocket_has_all_the_time_it_needs(server: ServerProcess) -> None:
    port = server.port
    with connect(f"ws://127.0.0.1:{port}/ws") as websocket:
        time.sleep(2 * TIMEOUT_S)
        websocket.send("hello")

        assert websocket.recv(5) == "hello"


def test_a_body_that_was_answered_early_may_come_slowly_and_not_stop(server: ServerProcess) -> None:
    with Connection(server.port) as connection:
        connection.request("/early", method="POST", headers="Content-Length: 200000\r\n")
        connection.send(b"x" * 70000)
        connection.receive_until(b'"early"')
        connection.send_slowly(*[b"x" * 10000] * 4, pause_s=TIMEOUT_S / 2)
        begun = time.monotonic()

        assert connection.receive_all().endswith(b'"early"')
        assert time.monotonic() < begun + TIMEOUT_S + 2


@pytest.mark.parametrize("pause_s", [0, 0.05], ids=["at-once", "its-end-alone"])
def test_the_rest_of_a_body_that_was_answered_early_is_not_parsed_as_a_head(
    server: ServerProcess, pause_s: float
) -> None:
    piece = b"6000\r\n" + b"x" * 0x6000 + b"\r\n"  # larger than the limit on headers
    with Connection(server.port) as again, Connection(server.port) as resting:
        for each in (again, resting):
            each.request("/early", method="POST", headers="Transfer-Encoding: chunked\r\n")
            each.send(3 * piece)  # more than the server reads before the request starts
            each.receive_until(b'"early"')
            if pause_s:
                each.send(piece)
                each.send_slowly(b"0\r\n\r\n", pause_s=pause_s)
            else:
                each.send(piece + b"0\r\n\r\n")
        again.request("/")

        assert again.answer().body.endswith(b'"here"')
        assert resting.receive_all().endswith(b'"early"')


# Size.


@pytest.mark.reliability("C04")
@pytest.mark.parametrize("pieces", [1, 20])
def test_headers_of_more_than_the_limit_are_refused(server: ServerProcess, pieces: int) -> None:

    def send(size: int) -> int:
        head = HEAD + b"X-Large: " + b"x" * size + b"\r\nConnection: close\r\n\r\n"
        step = len(head) // pieces + 1
        with Connection(server.port) as connection:
            parts = [head[begin : begin + step] for begin in range(0, len(head), step)]
            connection.send_slowly(*parts, pause_s=0.001)
            answer = connection.answer()
        assert answer.headers["connection"] == "close"
        return answer.status

    assert send(19_800) == 200
    assert send(20_001) == 431


@pytest.mark.reliability("C04")
def test_a_hundred_fields_are_the_limit(server: ServerProcess) -> None:
    port = server.port

    def send(fields: int) -> bytes:
        rest = b"".join(b"x-%d: y\r\n" % number for number in range(fields - 2))
        with Connection(port) as connection:
            connection.send(HEAD + b"Connection: close\r\n" + rest + b"\r\n")
            return connection.receive_all()

    assert send(HEADER_FIELDS).startswith(b"HTTP/1.1 200 OK")
    refused = send(HEADER_FIELDS + 1)
    assert refused.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert refused.endswith(b"the limit is 20000 bytes and 100 fields.")


@pytest.mark.reliability("C04")
@pytest.mark.parametrize(
    "begin",
    [HEAD + b"X-Large: ", b"GET /", CHUNKED + b"5\r\nhello\r\n0\r\nX-Trailer: "],
    ids=["field", "path", "trailer"],
)
def test_endless_headers_cost_no_memory(server: ServerProcess, begin: bytes) -> None:
    before = resident_mb(server)
    for _ in range(3):
        with Connection(server.port) as connection:
            connection.send(begin)
            with suppress(OSError):
                for _ in range(1000):
                    connection.send(b"x" * 65536)
            connection.receive_all()

    assert get(server.port, "/").status == 200
    assert resident_mb(server) < before + 5


# Number.


def test_a_connection_beyond_the_limit_is_refused_and_cut(
    parser: list[str], tmp_path: Path
) -> None:
    with (
        _serving(parser, tmp_path, ("--limit-connections", "3"), {}) as server,
        Connection(server.port) as resting,
        Connection(server.port) as silent,
        connect(f"ws://127.0.0.1:{server.port}/ws") as websocket,
    ):
        resting.request("/", headers="")
        resting.receive_until(b'"here"')
        refused = [get(server.port, "/") for _ in range(20)]

        assert {each.status for each in refused} == {503}
        assert refused[0].headers["retry-after"] == "1"
        assert refused[0].headers["connection"] == "close"
        assert refused[0].body == b"The server has reached its limit of 3 connections."
        assert server.output.count("3 connections are open, which is the limit") == 1

        websocket.send("hello")
        assert websocket.recv(5) == "hello"
        silent.socket.close()
        wait_until(lambda: get(server.port, "/").status == 200)


# The other ways to serve.


def test_serve_run_takes_the_limits_of_its_options() -> None:
    options = serve.HTTPOptions(
        port=0, limit_connections=2, max_header_bytes=1000, header_timeout_s=TIMEOUT_S
    )
    serve.start(options)
    (url,) = serve.status().proxies
    port = int(url.rpartition(":")[2])
    try:
        with Connection(port) as one, Connection(port) as other:
            one.send(HEAD)
            assert get(port, "/").status == 503
            other.send(HEAD + b"X: " + b"x" * 1000)
            assert other.answer().status == 431
            with Connection(port) as many:
                many.send(HEAD + b"X: in all 1000\r\n" * 90 + b"\r\n")
                assert many.answer().status == 431
            assert one.answer().status == 408
    finally:
        serve.shutdown()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="each worker has a socket of its own")
@pytest.mark.parametrize("arguments", [("--workers", "2"), ("--reload",)], ids=lambda each: each[0])
def test_worker_processes_have_the_same_limits(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {HEADER_TIMEOUT_S: str(TIMEOUT_S)}
    arguments = (*arguments, "--port", str(port), "--limit-connections", "1")
    with _serving(INGRESS, tmp_path, arguments, variables), ExitStack() as opened:
        for _ in range(20):  # at least one meets a worker that is full
            opened.enter_context(Connection(port)).send(HEAD + b"X: y\r\n\r\n")
        answers = [get(port, "/") for _ in range(20)]
        with Connection(port) as half:
            half.send(HEAD)
            assert half.answer().status in (408, 503)

    assert 503 in {each.status for each in answers}


def test_the_environment_yields_to_command_line_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_CONNECTIONS, "7")
    monkeypatch.setenv(MAX_HEADER_BYTES, "1000")
    settings = Settings.from_environment()
    options = serve.HTTPOptions(limit_connections=None, header_timeout_s=3)

    assert settings.http_limits.limit_connections == 7
    assert options.limits(settings.http_limits) == HTTPLimits(
        limit_connections=None, max_header_bytes=1000, header_timeout_s=3
    )


def test_a_malformed_request_behind_one_that_runs_ends_that_one() -> None:
    begun, ended = threading.Event(), threading.Event()

    @serve.deployment
    class Held:
        async def __call__(self, request: Request) -> str:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return "x"

    try:
        with Connection(served(bind(Held))) as connection:
            connection.request("/", headers="")
            assert begun.wait(PATIENCE_S)
            connection.send(b"GARBAGE\0\r\n\r\n")
            answer = connection.receive_all()
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.count(b"connection: close") == 1
            assert ended.wait(PATIENCE_S)
    finally:
        serve.shutdown()
