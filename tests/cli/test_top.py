"""`ingress status` and `ingress top`: what they print, and what is on the screen."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from ingress.cli import status_tables
from ingress.cli.control_commands import status
from ingress.cli.control_socket import RunningServer
from ingress.cli.terminal import console
from ingress.cli.top_command import Screen, top
from ingress.core.base.settings import RUNTIME_DIR
from tests.programs import INGRESS, ServerProcess, environment, process, write_module
from tests.servers import PATIENCE_S, get, wait_until

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")

APP = """
import os
import time
from pathlib import Path

import ingress as serve
from fastapi import FastAPI

api = FastAPI()

def until(name):
    while not Path(name).exists():
        time.sleep(0.01)

@serve.deployment(lanes={"db": 2}, max_ongoing_requests=20)
@serve.ingress(api)
class Shop:
    @api.get("/")
    async def home(self):
        return "x"

    @api.get("/block")
    async def block(self):
        until("go-block")

    @api.get("/lane")
    @serve.method(lane="db")
    def lane(self):
        until("go-lane")

    @api.get("/fails")
    async def fails(self):
        raise ValueError("[bold]no markup[/bold]")

    def __init__(self):
        self.check_health()

    def check_health(self):
        if Path("is-full").exists():
            raise RuntimeError("the disk is full")

app = Shop.options(health_check_period_s=0.05).bind()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("top")
    write_module(made, "app", APP)
    return made


@pytest.fixture(scope="module")
def runtime() -> Iterator[str]:
    """The runtime folder. Its path is short: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as made:
        yield f"{made}/run"


@pytest.fixture(scope="module")
def environ(folder: Path, runtime: str) -> dict[str, str]:
    return {**environment(folder), RUNTIME_DIR: runtime}


@pytest.fixture(scope="module")
def server(folder: Path, environ: dict[str, str]) -> Iterator[ServerProcess]:
    command = [*INGRESS, "run", "app:app", "--port", "0"]
    with process(command, folder, environ) as running:
        running.wait_for("Ctrl-C to stop")
        yield running
        for name in ("go-block", "go-lane"):
            (folder / name).touch()


class Commands:
    """The commands, called in this process, with the servers of a runtime folder."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys, self._patch = capsys, patch

    def __call__(self, command: Callable[..., None], runtime: str, **given: Any) -> tuple[int, str]:
        """Return the exit code and the output."""
        self._patch.setenv(RUNTIME_DIR, runtime)
        self._capsys.readouterr()
        code = 0
        try:
            command(**given)
        except typer.Exit as ended:
            code = ended.exit_code
        return code, self._capsys.readouterr().out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setattr(console, "_width", 200)
    return Commands(capsys, monkeypatch)


def send(server: ServerProcess, path: str) -> threading.Thread:
    thread = threading.Thread(target=get, args=(server.port, path), daemon=True)
    thread.start()
    return thread


def test_status_says_what_is_wrong_and_top_prints_once_in_a_pipe(
    server: ServerProcess, runtime: str, run: Commands
) -> None:
    for _ in range(20):
        assert get(server.port, "/").status == 200
    assert get(server.port, "/fails").status == 500

    code, text = run(status, runtime)
    assert code == 0
    assert re.search(
        rf"server {server.process.pid} at {server.url}  \d+ MiB  healthy, with 1 remark", text
    )
    assert "default:Shop: 4.8% of its requests failed in the last minute" in text
    code, text = run(status, runtime, as_json=True)
    told = json.loads(text)
    assert (code, told["is_healthy"], told["target_capacity"]) == (0, True, None)
    assert told["proxies"] == {server.url: "HEALTHY"}
    application = told["applications"]["default"]
    assert application["status"] == "RUNNING"
    shop = application["deployments"]["Shop"]
    assert (shop["status"], shop["replica_states"]) == ("HEALTHY", {"RUNNING": 1})
    assert shop["status_trigger"] == "CONFIG_UPDATE_COMPLETED"
    assert shop["rate"] > shop["errors"] > 0
    assert 0 < shop["p50"] <= shop["p95"] <= shop["p99"]
    code, text = run(top, runtime)
    assert code == 0
    assert "Shop#0" in text
    assert "\x1b" not in text


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_top_shows_a_stall_by_its_line_while_it_lasts_and_takes_keys(
    server: ServerProcess, folder: Path, environ: dict[str, str], runtime: str
) -> None:
    (folder / "go-lane").unlink(missing_ok=True)
    lanes = [send(server, "/lane") for _ in range(3)]
    with Terminal(folder, environ, Path(runtime).parent / "tmux") as screen:
        screen.wait_for("db 2/2+1")
        screen.wait_for("Shop.lane ")
        blocked = send(server, "/block")
        text = screen.wait_for("STANDS ")
        assert "!! default:Shop: the event loop of Shop#0 stands for" in text
        assert "at app.py:" in text
        (folder / "go-block").touch()
        blocked.join(PATIENCE_S)
        wait_until(lambda: "STANDS" not in screen.text())
        text = screen.wait_for("an event loop stalled ")
        assert all(len(line) <= 80 for line in text.splitlines())
        screen.press("p")
        screen.wait_for("PAUSED")
        screen.press("p", "/", "n", "o", "n", "e")
        text = screen.wait_for("filter: none_")
        wait_until(lambda: "Shop#0" not in screen.text())
        screen.press("Escape")
        screen.wait_for("q quit")
        screen.wait_for("Shop#0")
        screen.press("q")
        screen.wait_for("ended: 0")
    (folder / "go-lane").touch()
    for each in lanes:
        each.join(PATIENCE_S)


@pytest.mark.thorough
def test_status_is_1_for_an_unhealthy_server_and_for_none(
    folder: Path, environ: dict[str, str], run: Commands
) -> None:
    with tempfile.TemporaryDirectory() as other:
        runtime = f"{other}/run"
        alone = {**environ, RUNTIME_DIR: runtime}
        assert run(status, runtime) == (1, "")
        code, text = run(status, runtime, as_json=True)
        told = json.loads(text)
        assert (code, told["is_healthy"], told["applications"]) == (1, False, {})
        with process([*INGRESS, "run", "app:app", "--port", "0"], folder, alone) as server:
            server.wait_for("Ctrl-C to stop")
            (folder / "is-full").touch()
            wait_until(lambda: "the disk is full" in server_view(server, alone))
            code, text = run(status, runtime)
            assert code == 1
            assert "not healthy" in text
            assert "the disk is full" in text
            (folder / "is-full").unlink()


def server_view(server: ServerProcess, environ: dict[str, str]) -> str:
    """Return what the server says that is wrong."""
    socket_path = Path(environ[RUNTIME_DIR]) / f"{server.process.pid}.sock"
    return str(RunningServer(server.process.pid, socket_path).ask("view")["problems"])


class Terminal:
    """`ingress top` in a terminal of 80 x 24, by tmux with a server of its own."""

    def __init__(self, folder: Path, environ: dict[str, str], path: Path) -> None:
        self._tmux = ["tmux", "-S", str(path), "-f", os.devnull]
        self._folder = folder
        # A size of another terminal, as a shell that exports it leaves behind: it has no effect.
        wrong = {"COLUMNS": "200", "LINES": "9"}
        self._environ = {**environ, **wrong, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}

    def __enter__(self) -> Terminal:
        quoted = " ".join(f"'{each}'" for each in [*INGRESS, "top"])
        line = f"{quoted}; echo ended: $?; exec cat"
        self._run("new-session", "-d", "-x", "80", "-y", "24", line)
        return self

    def __exit__(self, *_: object) -> None:
        self._run("kill-server")

    def _run(self, *arguments: str) -> str:
        return subprocess.run(
            [*self._tmux, *arguments],
            cwd=self._folder,
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        ).stdout

    def text(self) -> str:
        return self._run("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def wait_for(self, expected: str) -> str:
        """Return the screen that has a text."""
        found: list[str] = [""]

        def look() -> bool:
            found.append(self.text())
            return expected in found[-1]

        try:
            wait_until(look)
        except AssertionError:
            raise AssertionError(f"no {expected!r} on the screen:\n{found[-1]}") from None
        return found[-1]


def rendered(view: Any, width: int = 80, height: int | None = 24, **chosen: Any) -> list[str]:
    screen = Console(width=width, height=height or 100, color_system=None, file=sys.stderr)
    with screen.capture() as capture:
        screen.print(Screen(**chosen).picture(view, width, height))
    return capture.get().splitlines()


def deployment(number: int, **values: Any) -> dict[str, Any]:
    return {
        "name": f"D{number}", "status": "HEALTHY", "state": "HEALTHY", "message": "",
        "replica_states": {"RUNNING": 2}, "ongoing": 1, "queued": 0, "jobs": None,
        "rate": 1.0, "errors": 0.0, "cancelled": 0.0, "left": 0.0, "p50": 1.0, "p95": 2.0,
        "p99": 3.0, "recent": {"rate": [0, 1, None, 4], "p99": [1, 2]}, **values,
    }  # fmt: skip


def replica(number: int, **values: Any) -> dict[str, Any]:
    return {
        "application": "app", "deployment": f"D{number}", "replica": "0", "pid": None, "process": 1,
        "ongoing": 0, "more_calls": 0,
        "loop": {"stands_ms": 0.0, "busy": 0.5, "runs": None, "thread": f"D{number}#0"},
        "threads": {"limit": 5, "runs": []}, "lanes": [], "calls": [], "stalls": [], **values,
    }  # fmt: skip


def a_view(count: int, **values: Any) -> dict[str, Any]:
    deployments = [deployment(number, rate=float(number)) for number in range(count)]
    return {
        "pid": 1, "url": "http://127.0.0.1:8000", "workers": [1], "at": 0.0, "is_healthy": True,
        "problems": [], "memory": [],
        "applications": [{"name": "app", "deployments": deployments}],
        "replicas": [replica(number) for number in range(count)], **values,
    }  # fmt: skip


def test_a_screen_of_80_x_24_is_never_too_small() -> None:
    long = {"level": "bad", "application": "app", "deployment": "D", "text": "word " * 100}
    lines = rendered(a_view(64, problems=[long] * 9))

    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert sum(" more" in line for line in lines) == 2
    assert lines[-1].startswith("q quit")


def test_the_rate_the_errors_and_the_latency_are_below_their_heads() -> None:
    view = a_view(0)
    values = deployment(0, rate=7.0, errors=5.0, p99=3.0)
    view["applications"] = [{"name": "app", "deployments": [values]}]
    lines = rendered(view)

    (head,) = (line for line in lines if line.startswith("deployment"))
    (row,) = (line for line in lines if line.startswith("D0 "))
    for name, value in (("req/s", "7.0"), ("err/s", "5.0"), ("p99", "3.0")):
        assert row[: head.index(name) + len(name)].endswith(value)


SORTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "name": lambda number: {"name": f"D{9 - number}"},
    "rate": lambda number: {"rate": number},
    "latency": lambda number: {"p99": number or None},
    "errors": lambda number: {"errors": number},
    "queue": lambda number: {"queued": number},
}


@pytest.mark.parametrize("sort", SORTS)
def test_the_deployments_are_sorted(sort: str) -> None:
    view = a_view(0)
    deployments = [deployment(number, **SORTS[sort](number)) for number in range(3)]
    view["applications"] = [{"name": "app", "deployments": deployments}]
    lines = [line for line in rendered(view, sort=sort) if line.startswith("D")]

    expected = ["D7", "D8", "D9"] if sort == "name" else ["D2", "D1", "D0"]
    assert [line.split()[0] for line in lines] == expected


def test_the_threads_of_a_process_are_counted_once_it_has_answered() -> None:
    run = {"method": "D0.work", "title": "D0", "ms": 3.0, "request_id": "", "line": None}
    threads = {"limit": 5, "runs": [run]}
    answered = replica(0, pid=7, threads=threads)
    silent = replica(1, pid=8, threads=threads, loop={**answered["loop"], "thread": ""})
    lines = rendered(a_view(0, replicas=[answered, silent]))

    (first,) = (line for line in lines if line.startswith("D0#0 7"))
    (second,) = (line for line in lines if line.startswith("D1#0 8"))
    assert "1/5" in first.split()
    assert "D0.work 3.0" in first
    assert "1/5" not in second.split()


def test_a_sparkline_has_a_bar_for_each_value_and_a_gap_for_none() -> None:
    assert status_tables.sparkline([9, 0, 1, None, 4], 4) == "▁▃ █"
    assert status_tables.sparkline([0, 0], 4) == "▁▁"
    assert status_tables.sparkline([], 4) == ""
