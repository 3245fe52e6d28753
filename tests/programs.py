"""Programs in processes of their own: servers, and commands that are run to their end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ingress.core.base.settings import (
    ROUTER_IN_SEPARATE_LOOP,
    RUNTIME_DIR,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
    runtime_folder,
)

ROOT = Path(__file__).parent.parent
INGRESS = [sys.executable, "-c", "from ingress.cli.commands import main; main()"]
UVICORN = [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", "0"]
PATIENCE_S = 60.0
"""Time after which a wait counts as a hang."""
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


def environment(
    folder: Path, *, sync: str = "0", separate: str = "1", router: str | None = None
) -> dict[str, str]:
    """Return the environment of a process: the flags, and the import paths.

    `separate` is for user code, and for the router too unless `router` is given.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
        SYNC_IN_THREADPOOL: sync,
        USER_CODE_IN_SEPARATE_THREAD: separate,
        ROUTER_IN_SEPARATE_LOOP: router or separate,
    }


@contextmanager
def _heeding_signals() -> Iterator[None]:
    """Start processes with the signal handling of a terminal.

    A shell has its background jobs ignore SIGINT, and `nohup` its command SIGHUP, and so do the
    processes they start: Python then raises no `KeyboardInterrupt`.
    """
    defaults: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    ignored = [each for each in defaults if signal.getsignal(each) is signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        ignored = []
    for each in ignored:
        signal.signal(each, defaults[each])  # a new process gets the default
    try:
        yield
    finally:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)


class ServerProcess:
    """A process whose output goes to a file. SIGINT, as of Ctrl-C, reaches it."""

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        self._log = folder / f"output-{time.monotonic_ns()}.txt"
        with self._log.open("wb") as log, _heeding_signals():
            self.process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """Wait until the output matches. Fails if the process ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.output)):
            assert self.process.poll() is None, f"ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.output}"
            time.sleep(0.005)
        return found

    @property
    def port(self) -> int:
        return int(self.wait_for(_ADDRESS)[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def cpu_s(self) -> float:
        """The processor time that the process has used; only Linux tells it."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until the process has ended and return its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"alive after {timeout_s} s:\n{self.output}") from None


@contextmanager
def process(command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[ServerProcess]:
    """Run a command; kill the process at the end if it still runs."""
    server = ServerProcess(command, folder, environ)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        runtime = environ.get(RUNTIME_DIR)
        folder = runtime_folder() if runtime is None else Path(runtime)
        (folder / f"{server.process.pid}.sock").unlink(missing_ok=True)  # a killed one leaves it


@contextmanager
def ingress_run(
    folder: Path, target: str, *options: str, environ: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Serve by `ingress run` on a free port, in an environment as of `environment(folder)`."""
    command = [*INGRESS, "run", target, "--port", "0", *options]
    with process(command, folder, environment(folder) if environ is None else environ) as server:
        yield server


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def write_module(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)


def run_ingress(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, in a folder whose modules it can import."""
    return run_python(*INGRESS[1:], *arguments, folder=folder, **environ)


def run_python(
    *arguments: str, folder: Path | str = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, in a folder whose modules it can import."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment(Path(folder)), **environ},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


_EACH = """
import contextlib, io, json, sys
from ingress.cli.commands import app

for words in json.loads(sys.argv[1]):
    code = 0
    with contextlib.redirect_stderr(io.StringIO()) as err:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                app(words)
            except SystemExit as end:
                code = end.code
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def said_by(folder: Path, *commands: Sequence[str]) -> list[tuple[int, str, list[str]]]:
    """Run commands that fail, in one interpreter; return the code, stdout and stderr's lines."""
    ran = subprocess.run(
        [sys.executable, "-c", _EACH, json.dumps(commands)],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
        timeout=2 * PATIENCE_S,
        check=True,
    )
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(said) == len(commands), ran.stdout
    return [(code, out, err.splitlines()) for code, out, err in said]
