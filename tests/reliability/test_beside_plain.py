"""Requests that end, or hang, plain FastAPI on uvicorn, and their outcome in `ingress`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ingress.core.base.settings import HEADER_TIMEOUT_S
from tests.programs import INGRESS, UVICORN, ServerProcess, environment, process, write_module
from tests.reliability.figures import Figures
from tests.reliability.test_input import statuses
from tests.servers import Connection, get

pytestmark = pytest.mark.slow

APP = """
import sys, threading, time
from fastapi import Depends, FastAPI, Request
from starlette.responses import StreamingResponse
import ingress as serve

sessions = threading.Semaphore(5)  # as the pool of a database has them

def session():
    with sessions:
        yield

async def leaving():
    yield b"x"
    sys.exit(3)

def declare(api):
    @api.middleware("http")
    async def middleware(request: Request, call_next): return await call_next(request)

    @api.get("/ok")
    async def ok(): return "ok"

    @api.get("/session")
    def with_session(_=Depends(session)):
        time.sleep(0.02)
        return "done"

    @api.get("/exits")
    async def exits(): sys.exit(3)

    @api.get("/exits-in-thread")
    def exits_in_thread(): sys.exit(3)

    @api.get("/exits-in-stream")
    async def exits_in_stream(): return StreamingResponse(leaving())

    @api.get("/interrupts")
    async def interrupts(): raise KeyboardInterrupt

    return api

plain = declare(FastAPI())
api = declare(FastAPI())

@serve.deployment
@serve.ingress(api)
class Ours: ...

app = Ours.bind()
"""
READY = "is ready|Application startup complete"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "beside", APP)
    return tmp_path


@contextmanager
def serving(folder: Path, name: str, header_timeout_s: str = "15") -> Iterator[ServerProcess]:
    commands = {
        "plain": [*UVICORN, "beside:plain"],
        "ours": [*INGRESS, "run", "beside:app", "--port", "0"],
    }
    environ = environment(folder) | {HEADER_TIMEOUT_S: header_timeout_s}
    with process(commands[name], folder, environ) as server:
        server.wait_for(READY)
        yield server


@pytest.mark.reliability("B20")
def test_dependencies_that_wait_for_a_pool_of_five(figures: Figures, folder: Path) -> None:
    lasts_s, clients = 6.0, 80

    def answered(name: str) -> int:
        def one(_: int) -> bool:
            with Connection(server.port) as connection:
                connection.socket.settimeout(lasts_s)
                try:
                    connection.request("/session")
                    return connection.answer().status == 200
                except TimeoutError:
                    return False

        with serving(folder, name) as server, ThreadPoolExecutor(clients) as threads:
            return sum(threads.map(one, range(clients)))

    plain = answered("plain")
    what = f"answered of {clients} in {lasts_s:.0f} s, with a pool of 5"
    figures.at_least(what, answered("ours"), clients, plain=plain)


@pytest.mark.reliability("B06")
def test_handlers_that_exit(figures: Figures, folder: Path) -> None:
    paths = ["/exits", "/exits-in-thread", "/exits-in-stream", "/interrupts"]

    def ended(name: str) -> int:
        count = 0
        for path in paths:
            with serving(folder, name) as server:
                with Connection(server.port) as connection:
                    connection.request(path)
                    connection.receive_all()
                try:
                    count += get(server.port, "/ok").status != 200
                except OSError:
                    count += 1
        return count

    figures.at_most(
        f"servers ended by {len(paths)} handlers that exit", ended("ours"), 0, plain=ended("plain")
    )


@pytest.mark.reliability("C04")
def test_headers_of_16_mb(figures: Figures, folder: Path) -> None:
    def status(name: str) -> int:
        with serving(folder, name) as server, Connection(server.port) as connection:
            head = b"GET /ok HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX: "
            try:
                connection.send(head + b"x" * (16 * 2**20) + b"\r\n\r\n")
            except ConnectionError:
                pass  # cut before the end of the answer
            return (statuses(connection.receive_all()) or [0])[0]

    ours = status("ours")
    figures.note("status of a header of 16 MB", str(ours), plain=str(status("plain")))
    assert ours in (0, 431)


@pytest.mark.reliability("C06")
def test_connections_that_send_half_a_head(figures: Figures, folder: Path) -> None:
    count, limit_s = 50, 2.0

    def left_open(name: str) -> int:
        with serving(folder, name, str(limit_s)) as server, ExitStack() as stack:
            silent = [stack.enter_context(Connection(server.port)) for _ in range(count)]
            for each in silent:
                each.send(b"GET /ok HTTP/1.1\r\nHost:")
            time.sleep(limit_s + 2)
            found = 0
            for each in silent:
                each.socket.settimeout(0.05)
                try:
                    while each.socket.recv(4096):
                        pass
                except TimeoutError:
                    found += 1
                except ConnectionError:
                    pass
            return found

    what = f"open of {count} that sent half a head, {limit_s + 2:.0f} s later"
    figures.at_most(what, left_open("ours"), 0, plain=left_open("plain"))
