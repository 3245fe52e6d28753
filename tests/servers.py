"""Applications served in this process, a client that sees the bytes, and waits for conditions."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Scope
from typer.testing import CliRunner, Result

import ingress as serve
from ingress.app.declaration.declaration import Application
from ingress.cli import commands as cli
from ingress.core.base import gil
from ingress.core.base.settings import (
    ROUTER_IN_SEPARATE_LOOP,
    START_METHOD,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
)
from ingress.core.calls.loops import run_blocking
from ingress.engines import local_engine
from ingress.schema import DeploymentStatusOverview
from tests.programs import INGRESS as INGRESS
from tests.programs import PATIENCE_S as PATIENCE_S
from tests.programs import ROOT as ROOT
from tests.programs import UVICORN as UVICORN
from tests.programs import ServerProcess as ServerProcess
from tests.programs import environment as environment
from tests.programs import free_port as free_port
from tests.programs import ingress_run as ingress_run
from tests.programs import process as process
from tests.programs import run_ingress as run_ingress
from tests.programs import run_python as run_python
from tests.programs import write_module as write_module

with_gil = pytest.mark.skipif(not gil.is_on(), reason="about threads that take turns")

ROUNDS = int(os.environ.get("INGRESS_RELIABILITY_ROUNDS", "0"))
"""Number of repetitions by `make test-reliability`; the default run does one, with fewer flags."""

UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
"""The headers of a handshake."""


@dataclass
class Answer:
    """The bytes of an answer over one connection."""

    raw: bytes
    status: int = field(init=False)
    headers: dict[str, str] = field(init=False)
    body: bytes = field(init=False)
    is_complete: bool = field(init=False)
    """The body ended as its headers promised; if false, the connection was cut."""

    def __post_init__(self) -> None:
        head, found, rest = self.raw.partition(b"\r\n\r\n")
        self.status, self.headers, self.body, self.is_complete = 0, {}, b"", False
        if not found:
            return
        line, *fields = head.decode("latin-1").split("\r\n")
        self.status = int(line.split()[1])
        for each in fields:
            name, _, value = each.partition(":")
            self.headers[name.lower()] = value.strip()
        if self.headers.get("transfer-encoding") == "chunked":
            self._read_chunks(rest)
        else:
            self.body = rest
            self.is_complete = len(rest) == int(self.headers.get("content-length", "0"))

    def _read_chunks(self, rest: bytes) -> None:
        while rest:
            size, found, rest = rest.partition(b"\r\n")
            if not found:
                return
            if int(size, 16) == 0:
                self.is_complete = True
                return
            self.body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]


class Connection:
    """One connection. Every wait is bounded: a hang is a failure."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self.received = b""

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_slowly(self, *pieces: bytes, pause_s: float = 0.05) -> None:
        """Send pieces, each after a pause in which the server reads all that came before."""
        for piece in pieces:
            time.sleep(pause_s)
            self.send(piece)

    def request(
        self, path: str, *, method: str = "GET", headers: str = "Connection: close\r\n"
    ) -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n"
        self.send(head.encode("latin-1"))

    def receive_until(self, expected: bytes) -> bytes:
        """Receive until `expected` has arrived. Fails at the end of the connection."""
        while expected not in self.received:
            data = self.socket.recv(65536)
            assert data, f"the connection ended without {expected!r}: {self.received!r}"
            self.received += data
        return self.received

    def receive_all(self) -> bytes:
        """Receive until the connection ends, cleanly or not."""
        try:
            while data := self.socket.recv(65536):
                self.received += data
        except ConnectionResetError:
            pass
        return self.received

    def answer(self) -> Answer:
        return Answer(self.receive_all())

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
        self.socket.close()


def get(port: int, path: str, headers: str = "") -> Answer:
    """Send one request over a new connection."""
    with Connection(port) as connection:
        connection.request(path, headers=headers + "Connection: close\r\n")
        return connection.answer()


def is_ready(port: int) -> bool:
    """Return whether a server's health check succeeds; its address is known before it listens."""
    try:
        return get(port, "/-/healthz").status == 200
    except ConnectionRefusedError:
        return False


def bind(deployment: Any, *args: Any, **kwargs: Any) -> Application:
    """Return `deployment.bind(...)`; to type checkers a decorated class is the class itself."""
    application: Application = deployment.bind(*args, **kwargs)
    return application


def served(
    target: Any, name: str = "default", route_prefix: str | None = "/", **http_options: Any
) -> int:
    """Serve an application in this process and return the port."""
    serve.start({"port": 0, **http_options})
    serve.run(target, name=name, route_prefix=route_prefix)
    (url,) = serve.status().proxies
    return int(url.rpartition(":")[2])


@contextmanager
def uvicorn_in_a_thread(
    target: Any, arguments: dict[str, Any], **http_options: Any
) -> Iterator[int]:
    """Serve an application by a separate uvicorn with these arguments, and return the port."""
    serve.start({"host": None, **http_options})
    config = uvicorn.Config(target, port=0, log_config=None, **arguments)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


@contextmanager
def forking(target: Any = None) -> Iterator[None]:
    """Have child processes forked, where that is possible: they start in 50 ms.

    While `target` is served, under the name "kept", the fork server of its module stays.
    """
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setenv(START_METHOD, "forkserver")
        if target is not None:
            served(target, "kept", None)
        yield
        serve.shutdown()


def set_flags(monkeypatch: pytest.MonkeyPatch, separate: str, sync: str = "0") -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, sync)
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, separate)
    monkeypatch.setenv(ROUTER_IN_SEPARATE_LOOP, separate)


def scope_of(path: str = "/") -> Scope:
    """Return the scope of a GET request, for a test that is the server itself."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "GET",
        "http_version": "1.1", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "scheme": "http", "headers": [], "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }  # fmt: skip


def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds, which another thread brings about. Fails at the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


def close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that its thread runs again as often as it is stopped."""
    deadline = time.monotonic() + PATIENCE_S
    while not loop.is_closed() and time.monotonic() < deadline:
        try:
            loop.call_soon_threadsafe(loop.stop)
            loop.close()
        except RuntimeError:
            continue


def steady(count: Callable[[], int], pause_s: float = 0.1) -> int:
    """Wait until a producer is suspended: a positive count stands for a pause. Return the count."""
    before = -1
    while before != (now := count()) or not now:
        before = now
        time.sleep(pause_s)
    return now


async def until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait as `wait_until` does, on an event loop that goes on meanwhile."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def turns(count: int = 12) -> None:
    """Let the running loop turn, until all callbacks that are due and their successors have run."""
    for _ in range(count):
        await asyncio.sleep(0)


def invoke(folder: Path, *arguments: str, **environ: str) -> Result:
    """Run the command line in this process, in a folder, and forget what it imported.

    Not `run`, which sets up the logging of its process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        for name in (SYNC_IN_THREADPOOL, USER_CODE_IN_SEPARATE_THREAD):
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        for path in folder.glob("*.py"):  # another test may have left a module of this name
            patch.delitem(sys.modules, path.stem, raising=False)
        try:
            return CliRunner().invoke(cli.app, arguments, prog_name="ingress")
        finally:
            for path in folder.glob("*.py"):
                sys.modules.pop(path.stem, None)


def result(response: Any) -> Any:
    """Return the result of a call by handle."""
    return response.result(timeout_s=PATIENCE_S)


def overview(name: str) -> DeploymentStatusOverview:
    """Return the status of a deployment of the application "default"."""
    return serve.status().applications["default"].deployments[name]


def ongoing() -> int:
    """Return the number of requests that hold a slot of the application "default"."""
    deployments = serve.status().applications["default"].deployments.values()
    return sum(replica.ongoing for each in deployments for replica in each.replicas)


def change(deployment: str, **options: Any) -> list[Any]:
    """Change options of a deployment of the application "default"; return the changes."""
    return [*local_engine().change("default", {deployment: options})]


def settle(timeout_s: float = PATIENCE_S) -> None:
    """Wait until the application "default" has the replicas that it should have.

    Raises `TimeoutError` if it has not by then.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        application = local_engine().application_snapshots()["default"]
        if all(each.is_settled for each in application.deployments.values()):
            return
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)


class _Keeping(logging.Handler):
    def __init__(self, kept: list[logging.LogRecord], filters: tuple[Any, ...]) -> None:
        super().__init__()
        self._kept = kept
        for each in filters:
            self.addFilter(each)

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append(record)


@contextmanager
def records_of(name: str, *filters: Any) -> Iterator[list[Any]]:
    """Yield the records of a logger, as a handler with these filters gets them."""
    kept: list[logging.LogRecord] = []
    handler = _Keeping(kept, filters)
    logging.getLogger(name).addHandler(handler)
    try:
        yield kept
    finally:
        logging.getLogger(name).removeHandler(handler)


def asking(timeout_s: object) -> str:
    """Return the header of a client that waits so long."""
    return f"x-request-timeout-seconds: {timeout_s}\r\n"


def end_a_replica(tag: str = "") -> None:
    """Remove a replica of the ingress as the control plane does, without draining it.

    `tag` is its `replica_tag`; by default the first one ends.
    """
    engine = local_engine()
    deployment = engine.applications["default"].ingress

    async def end() -> None:
        tags = [each.replica.context.replica_tag for each in deployment.members]
        member = deployment.members[tags.index(tag) if tag else 0]
        deployment.desire(count=deployment.desired.count - 1)
        deployment.members.remove(member)
        deployment.router.remove(member.replica)
        await member.replica.stop(0.5)

    run_blocking(engine.threads.control.loop, end(), PATIENCE_S)
