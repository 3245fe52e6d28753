"""`ingress run --replace`, sockets of systemd, and its watchdog: no request is lost."""

from __future__ import annotations

import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from websockets.sync.client import connect

from ingress.core.base.settings import RUNTIME_DIR
from tests.programs import INGRESS, ServerProcess, environment, process, write_module
from tests.servers import PATIENCE_S, Connection, get, ingress_run, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="passes sockets as Linux does")

APP = """
import asyncio, os, pathlib
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
import ingress as serve

app = FastAPI()
GO = pathlib.Path("go")

@serve.deployment
@serve.ingress(app)
class Web:
    def __init__(self):
        if pathlib.Path("is-broken").exists():
            raise RuntimeError("the model is not there")

    @app.get("/")
    async def process(self) -> int:
        return os.getpid()

    @app.get("/stream")
    async def stream(self) -> StreamingResponse:
        async def parts():
            yield b"begin "
            while not GO.exists():
                await asyncio.sleep(0.01)
            yield b"end"
        return StreamingResponse(parts())

    @app.websocket("/ws")
    async def websocket(self, ws: WebSocket) -> None:
        await ws.accept()
        while await ws.receive_text() != "end":
            pass
        await ws.send_text(str(os.getpid()))
        await ws.close()

web = Web.bind()
"""


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder. Its path is short: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(RUNTIME_DIR, str(Path(folder) / "run"))
        yield Path(folder)


@pytest.fixture
def folder(tmp_path: Path, runtime: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


class Load:
    """Clients that ask again and again, every other one on a new connection each time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self.answers: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(number % 2 == 0,)) for number in range(4)
        ]

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join(PATIENCE_S)

    def _run(self, is_kept: bool) -> None:
        client = HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        while not self._is_over.is_set():
            try:
                client.request("GET", "/", headers={} if is_kept else {"connection": "close"})
                self.answers[client.getresponse().read().decode()] += 1
            except (OSError, HTTPException) as error:
                self.answers[repr(error)] += 1
                client.close()
        client.close()


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[ServerProcess]:
    with ingress_run(folder, "app:web", *options) as server:
        server.wait_for("is ready at")
        yield server


def port_of(server: ServerProcess) -> str:
    return str(server.port)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ()),
        pytest.param(("--workers", "2"), ("--workers", "2"), marks=pytest.mark.thorough),
        pytest.param((), ("--workers", "2"), marks=pytest.mark.thorough),
        pytest.param(("--workers", "2"), (), marks=pytest.mark.thorough),
    ],
)
def test_a_new_server_takes_over_and_the_old_one_ends_what_it_has(
    folder: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    with serving(folder, "--admin", "127.0.0.1:0", *before) as old, Load(old.port) as load:
        wait_until(lambda: load.answers.total() > 50)
        with (
            Connection(old.port) as stream,
            connect(f"ws://127.0.0.1:{old.port}/ws") as websocket,
        ):
            stream.send(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            stream.receive_until(b"begin ")
            websocket.send("hello")
            options = ["--replace", "--port", port_of(old), "--admin", "off", *after]
            with ingress_run(folder, "app:web", *options) as new:
                new.wait_for(f"replaces server {old.process.pid}, which ends its open connections")
                new.wait_for("is ready at")
                count = load.answers.total()
                wait_until(lambda: load.answers.total() > count + 200)
                assert old.process.poll() is None
                (folder / "go").touch()
                assert stream.answer().body == b"begin end"
                websocket.send("end")
                ended_by = websocket.recv()
                assert old.wait() == 0
                count = load.answers.total()
                wait_until(lambda: load.answers.total() > count + 50)
                pids = set(load.answers)
                assert ended_by in pids
                assert all(each.isdecimal() for each in pids), load.answers
                if not (before or after):
                    assert pids == {str(old.process.pid), str(new.process.pid)}
                load.__exit__()
        assert "retire" in old.output


def test_a_new_server_that_does_not_start_leaves_the_old_one_as_it_is(folder: Path) -> None:
    with serving(folder, "--admin", "off") as old, Load(old.port) as load:
        (folder / "is-broken").touch()
        options = ["--replace", "--port", port_of(old), "--admin", "off"]
        with ingress_run(folder, "app:web", *options) as new:
            assert new.wait() == 1
            assert "the model is not there" in new.output
        count = load.answers.total()
        wait_until(lambda: load.answers.total() > count + 50)
        load.__exit__()
        assert set(load.answers) == {str(old.process.pid)}
        assert get(old.port, "/-/healthz").status == 200


@pytest.mark.thorough
def test_there_may_be_nothing_to_replace(folder: Path) -> None:
    with serving(folder, "--admin", "off", "--replace", "--port", "0") as server:
        assert "no server at 127.0.0.1:0 to replace" in server.output
        assert get(server.port, "/").status == 200


class Systemd:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(PATIENCE_S)
        self.environ = {"NOTIFY_SOCKET": str(path)}

    def told(self) -> str:
        return self.socket.recv(200).decode()


@pytest.fixture
def systemd(runtime: Path) -> Iterator[Systemd]:
    made = Systemd(runtime / "notify")
    yield made
    made.socket.close()


def test_systemd_hears_of_the_new_process_from_the_old_one(folder: Path, systemd: Systemd) -> None:
    environ = {**environment(folder), **systemd.environ}
    command = [*INGRESS, "run", "app:web", "--admin", "off", "--port"]
    with process([*command, "0"], folder, environ) as old:
        assert systemd.told() == "READY=1"
        with process([*command, port_of(old), "--replace"], folder, environ) as new:
            assert systemd.told() == f"MAINPID={new.process.pid}"
            assert systemd.told() == "READY=1"
            assert old.wait() == 0
            assert get(new.port, "/").body == str(new.process.pid).encode()


def test_systemd_is_shown_that_the_serving_loop_turns_and_that_a_reload_is_over(
    folder: Path, systemd: Systemd
) -> None:
    (folder / "serve.yaml").write_text("applications: [{import_path: app:web}]")
    environ = {**environment(folder), **systemd.environ, "WATCHDOG_USEC": "400000"}
    command = [*INGRESS, "run", "serve.yaml", "--admin", "off", "--port", "0"]
    with process(command, folder, environ) as server:
        told = {systemd.told() for _ in range(3)}
        assert told == {"READY=1", "WATCHDOG=1"}
        server.signal(signal.SIGHUP)
        while "RELOADING=1\nMONOTONIC_USEC=" not in (text := systemd.told()):
            assert text == "WATCHDOG=1"
        while systemd.told() != "READY=1":
            pass


LAUNCHER = """
import os, socket, sys

given = socket.create_server(("127.0.0.1", 0))
print("given", given.getsockname()[1], flush=True)
os.dup2(given.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_socket_of_systemd_and_a_unix_socket_override_the_port_of_a_file(
    folder: Path, runtime: Path
) -> None:
    file = "{http_options: {port: 1}, applications: [{import_path: app:web}]}"
    (folder / "serve.yaml").write_text(file)
    write_module(folder, "launcher", LAUNCHER)
    command = [*INGRESS, "run", "serve.yaml", "--admin", "off"]
    environ = environment(folder)
    with process([sys.executable, "launcher.py", *command], folder, environ) as server:
        port = int(server.wait_for(r"given (\d+)")[1])
        server.wait_for(f"is ready at http://127.0.0.1:{port} ")
        assert get(port, "/").status == 200
    path = runtime / "web"
    with process([*command, "--uds", str(path)], folder, environ) as server:
        server.wait_for(f"is ready at unix:{path}")
        assert path.is_socket()
