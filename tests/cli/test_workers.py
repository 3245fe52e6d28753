"""`ingress run --workers`: workers that fail or die, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from uvicorn import Config

from ingress.cli.workers import Supervisor
from tests.programs import INGRESS, ServerProcess, environment, process, run_ingress, write_module
from tests.reliability.figures import Figures
from tests.servers import PATIENCE_S, Connection, get, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")

APP = """
import asyncio, gc, os, signal, struct, sys, threading
from multiprocessing.connection import Connection
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

@serve.deployment(graceful_shutdown_timeout_s=3)
@serve.ingress(app)
class App:
    @app.get("/pid")
    async def pid(self):
        return os.getpid()

    @app.get("/half")
    async def half(self):
        # It stands still in the middle of a message to the supervisor.
        for each in gc.get_objects():
            if isinstance(each, Connection) and each.writable and each.readable:
                os.write(each.fileno(), struct.pack("!i", 10**6) + b"the beginning")
        os.kill(os.getpid(), signal.SIGSTOP)

    @app.get("/slow")
    async def slow(self):
        print("slow began", flush=True)
        await asyncio.Event().wait()

hello = App.bind()

def starting(do):
    @serve.deployment
    class Model:
        def __init__(self):
            print("constructs", flush=True)
            do()
    return Model.bind()

def fail():
    raise ValueError("no model file")

def wait_for_a_file():
    while not os.path.exists("may-start"):
        threading.Event().wait(0.05)

failing = starting(fail)
waiting = starting(wait_for_a_file)
crashing = starting(lambda: os._exit(7))
hanging = starting(lambda: threading.Event().wait())
"""

UNABLE_TO_BIND = """
import socket, sys
if "--multiprocessing-fork" in sys.orig_argv:
    def bind(self, address):
        raise OSError(99, "Cannot assign requested address")
    socket.socket.bind = bind
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


@contextmanager
def run(folder: Path, app: str, *options: str) -> Iterator[ServerProcess]:
    command = [*INGRESS, "run", f"app:{app}", "--port", "0", "--workers", "2", *options]
    with process(command, folder, environment(folder)) as server:
        yield server


@contextmanager
def serving(folder: Path) -> Iterator[ServerProcess]:
    with run(folder, "hello") as server:
        server.wait_for("is ready at")
        yield server


def children_of(server: ServerProcess) -> list[int]:
    pid = server.process.pid
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(server: ServerProcess) -> list[int]:
    """Return the pids of the workers, without the process that cleans up after them."""
    return [each for each in children_of(server) if b"spawn_main" in words(each)]


def words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def have_gone(pids: list[int]) -> bool:
    return not any(words(pid) for pid in pids)


@pytest.mark.thorough
@pytest.mark.reliability("B23")
def test_a_start_that_fails_ends_the_command_and_says_why_once(
    folder: Path, figures: Figures
) -> None:
    with run(folder, "failing") as server:
        began = time.monotonic()

        assert server.wait() == 3
        took_s = time.monotonic() - began
    assert server.output.count('raise ValueError("no model file")') == 1
    assert server.output.count("deployment 'Model' failed to start") == 1
    figures.note("a start that fails ends the command in, s", took_s)


@pytest.mark.thorough
def test_a_worker_that_dies_as_it_starts_is_tried_three_times(folder: Path) -> None:
    with run(folder, "crashing") as server:
        assert server.wait(2 * PATIENCE_S) == 3  # it starts three times
        assert "failed to start 3 times in a row (exit code 7)" in server.output
        # The other worker may have come as far.
        assert 3 <= server.output.count("constructs") <= 6


@pytest.mark.thorough
def test_a_worker_that_cannot_bind_ends_the_command(folder: Path) -> None:
    write_module(folder, "sitecustomize", UNABLE_TO_BIND)
    with run(folder, "hello") as server:
        assert server.wait() == 3
        assert server.output.count("Cannot assign requested address") == 1
        assert "Traceback" not in server.output


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_heard_while_workers_start(
    folder: Path, number: signal.Signals, code: int
) -> None:
    with run(folder, "hanging") as server:
        wait_until(lambda: server.output.count("constructs") == 2)
        workers = workers_of(server)
        server.signal(number)
        began = time.monotonic()

        assert server.wait() == code
        assert time.monotonic() - began < 5.0
        assert len(workers) == 2
        assert have_gone(workers)


def test_a_worker_that_is_killed_is_replaced_and_none_is_left_behind(folder: Path) -> None:
    with serving(folder) as server:
        first, second = workers_of(server)
        os.kill(first, signal.SIGKILL)
        server.wait_for(r"worker \d+ is ready")

        assert f"worker {first} ended (SIGKILL); another one starts" in server.output
        workers = workers_of(server)
        assert len(workers) == 2
        assert second in workers
        assert {int(get(server.port, "/pid").body) for _ in range(20)} <= {*workers}
        pids = children_of(server)
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.output
        assert "it is killed" not in server.output  # they end by SIGTERM
    wait_until(partial(have_gone, pids))


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_worker_that_stands_in_the_middle_of_a_message_holds_no_supervisor(folder: Path) -> None:
    with run(folder, "hello", "--timeout-worker-healthcheck", "5", "--workers", "3") as server:
        server.wait_for("is ready at")
        workers = workers_of(server)
        with Connection(server.port) as client:
            client.request("/half")
            wait_until(lambda: any(map(is_stopped, workers)))
            [standing] = filter(is_stopped, workers)
            other, healthy = set(workers) - {standing}
            os.kill(other, signal.SIGKILL)

            server.wait_for(rf"worker {other} ended \(SIGKILL\); another one starts")
            server.wait_for(rf"worker {standing} does not answer; it is killed")
        server.wait_for(rf"worker {standing} ended \(SIGKILL\); another one starts")
        wait_until(lambda: server.output.count(" is ready\n") == 2)
        assert healthy in workers_of(server)
        assert f"worker {healthy} " not in server.output
        server.signal()
        server.wait()


def test_a_server_whose_workers_start_again_is_not_healthy(folder: Path) -> None:
    (folder / "may-start").touch()
    with run(folder, "waiting") as server:
        server.wait_for("is ready at")
        (folder / "may-start").unlink()
        for pid in workers_of(server):
            os.kill(pid, signal.SIGKILL)
            server.wait_for(f"worker {pid} ended")

        status = run_ingress(folder, "status", "--pid", str(server.process.pid))
        assert status.returncode == 1, status
        assert "not healthy" in status.stdout
        for pid in workers_of(server):
            assert f"worker {pid} starts" in status.stdout
        server.signal()
        server.wait()


def test_an_unanswered_command_that_its_caller_gave_up_is_forgotten() -> None:
    supervisor = Supervisor(Config("app"), *[cast("Any", None)] * 4)
    process = SimpleNamespace(pid=1, is_alive=lambda: True)
    late: Any = SimpleNamespace(pid=1, process=process, is_ready=True, is_late=True, answers=[])
    supervisor._workers.append(late)
    asked = supervisor.ask("snapshot", {}, 0)
    supervisor._send_posted()
    assert asked in supervisor._asked.values()

    supervisor._take_answers(late)

    assert asked.waits_for == {1}
    assert asked not in supervisor._asked.values()


def signal_group(server: ServerProcess, number: signal.Signals) -> None:
    """Signal the command and its workers, as Ctrl-C at a terminal does."""
    for pid in (*workers_of(server), server.process.pid):
        os.kill(pid, number)


SENDERS: dict[str, Callable[[ServerProcess, signal.Signals], None]] = {
    "terminal": signal_group,
    "kill": ServerProcess.signal,
}


@pytest.mark.thorough
@pytest.mark.reliability("B17")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("how", SENDERS)
def test_a_second_signal_ends_workers_at_once(
    folder: Path, number: signal.Signals, how: str
) -> None:
    with serving(folder) as server, Connection(server.port) as client:
        client.request("/slow")
        server.wait_for("slow began")
        workers = workers_of(server)
        SENDERS[how](server, number)
        wait_until(partial(is_cancellation, server))
        SENDERS[how](server, number)
        began = time.monotonic()

        assert server.wait() == 128 + number
        wait_until(partial(have_gone, workers))
        assert time.monotonic() - began < 1.0
        assert "Traceback" not in server.output


def is_cancellation(server: ServerProcess) -> bool:
    """Return whether the server drains: the command logs that once."""
    return "stopping: waiting" in server.output


@pytest.mark.thorough
@pytest.mark.parametrize("way", [["--workers", "2"], ["--reload"]], ids=["workers", "reload"])
def test_what_serves_does_not_outlive_the_command(folder: Path, way: list[str]) -> None:
    command = [*INGRESS, "run", "app:hello", "--port", "0", *way]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("is ready at")
        pids = children_of(server)
        assert int(get(server.port, "/pid").body) in pids
        server.process.kill()
        server.wait()

        wait_until(partial(have_gone, pids))


def test_nohup_lives_on_in_workers(folder: Path) -> None:
    command = [*INGRESS, "run", "app:hello", "--port", "0", "--workers", "2"]
    quiet = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command]
    with process(quiet, folder, environment(folder)) as server:
        server.wait_for("is ready at")
        signal_group(server, signal.SIGHUP)

        assert get(server.port, "/pid").status == 200
        server.signal()
        assert server.wait() == 0
