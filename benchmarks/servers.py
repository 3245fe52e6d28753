"""Programs in separate processes, such as servers on loopback, and their end.

A benchmark ends each process it started, and their child processes, by process id.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).resolve().parent.parent
START_S = 20.0
STOP_S = 5.0
POLL_S = 0.005
JSON = "application/json"


class BenchmarkError(Exception):
    """An error that stops a benchmark; its text is for the terminal."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and the body of its answer. With a body it is a POST of JSON, else a GET."""

    path: str
    answer: bytes
    body: bytes | None = None

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"


class Program:
    """A process and its child processes; a context manager that ends all of them.

    The output goes to an unnamed file, and is part of the error if the process fails.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        env: Mapping[str, str],
        start_s: float,
        stop_s: float,
        root: Path = ROOT,
    ) -> None:
        self.name = name
        self.start_s = start_s
        self._command = command
        self._root = root
        self._env = {**os.environ, "PYTHONPATH": str(root), **env}
        self._stop_s = stop_s

    def wait_until_ready(self) -> None:
        """Return once the process is ready, or raise `BenchmarkError` after `start_s`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._root,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=self.stdout,
                stderr=self._log,
            )
        except OSError as error:
            self._log.close()
            raise BenchmarkError(f"{self.name} did not start: {error}") from error
        try:
            self.wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def stdout(self) -> IO[bytes] | int:
        return self._log

    def failed(self, what: str) -> BenchmarkError:
        """Return the error with the end of the output."""
        ended = self.process.poll()
        after = "" if ended is None else f" and ended with {ended}"
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()[-2000:]
        return BenchmarkError(f"{self.name} {what}{after}" + (f":\n{said}" if said else ""))

    def rss_mb(self) -> float:
        """Return the resident memory of the process and its child processes."""
        return rss_mb([self.process.pid, *(pid for pid, _ in _descendants(self.process.pid))])

    def cpu_s(self, name: str = "") -> float:
        """Return the processor time so far of the process and its child processes.

        With `name`, of those whose command contains it.
        """
        found = 0.0
        for pid in (self.process.pid, *(pid for pid, _ in _descendants(self.process.pid))):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except FileNotFoundError:  # it has ended meanwhile
                continue
            if name in command:
                found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def _stop(self) -> None:
        # Before it ends: afterwards its child processes have no parent to be found by.
        family = _descendants(self.process.pid)
        assert self.process.stdin is not None
        self.process.stdin.close()  # which ends a program that reads it
        self.process.terminate()
        try:
            self.process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
        for pid, _ in family & {(pid, began) for pid, _, began in _processes()}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class Server(Program):
    """A command that serves HTTP on the port it is given.

    It is ready when it answers the `request` as expected; `first_answer_s` is the time until
    then.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str | Path]],
        request: Request,
        env: Mapping[str, str] | None = None,
        start_s: float = START_S,
        stop_s: float = STOP_S,
        root: Path = ROOT,
    ) -> None:
        self.port = free_port()
        self.first_answer_s = 0.0
        self._request = request
        super().__init__(name, command(self.port), env or {}, start_s, stop_s, root)

    def get(self, path: str) -> bytes:
        """Return the body of an answer. Raises `BenchmarkError` unless it is 200."""
        request = Request(path, b"")
        status, answer = self._answer(request)
        if status != 200:
            raise BenchmarkError(f"{self.name}: GET {path} gave {status} {answer[:200]!r}")
        return answer

    def check(self, request: Request) -> None:
        """Raise `BenchmarkError` unless the answer is 200 with exactly what is expected."""
        self._compare(request, *self._answer(request))

    def _answer(self, request: Request) -> tuple[int, bytes]:
        try:
            return self._ask(request, START_S)
        except (OSError, HTTPException) as error:
            asked = f"{request.method} {request.path}"
            raise BenchmarkError(f"{self.name}: {asked} failed: {error!r}") from error

    def wait_until_ready(self) -> None:
        begin = monotonic()
        while self.process.poll() is None and (left := begin + self.start_s - monotonic()) > 0:
            try:
                status, answer = self._ask(self._request, left)
            except (OSError, HTTPException):
                sleep(POLL_S)
                continue
            if status == 200:
                self.first_answer_s = monotonic() - begin
                return self._compare(self._request, status, answer)
            sleep(POLL_S)
        raise self.failed(f"did not answer in {self.start_s:.0f} s")

    def _ask(self, request: Request, timeout_s: float) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"content-type": JSON} if request.body else {}
            connection.request(request.method, request.path, request.body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _compare(self, request: Request, status: int, answer: bytes) -> None:
        if (status, answer) != (200, request.answer):
            gave = f"{status} {answer[:200]!r}, not {request.answer[:200]!r}"
            raise BenchmarkError(f"{self.name}: {request.method} {request.path} gave {gave}")


def uvicorn(
    app: str, request: Request, env: Mapping[str, str] | None = None, root: Path = ROOT
) -> Server:
    """Return a server of `benchmarks.apps.<app>` in a checkout; all have the same settings."""
    return Server(
        app,
        lambda port: [
            *(sys.executable, "-m", "uvicorn", f"benchmarks.apps.{app}", "--host", "127.0.0.1"),
            *("--port", str(port), "--loop", "uvloop"),
            *("--http", "httptools", "--no-access-log", "--log-level", "warning"),
        ],
        request,
        env,
        root=root,
    )


def ingress_run(
    name: str,
    app: str,
    options: Sequence[str],
    request: Request,
    env: Mapping[str, str] | None = None,
    start_s: float = START_S,
    stop_s: float = STOP_S,
    root: Path = ROOT,
    python: str = sys.executable,
) -> Server:
    """Return a server of `benchmarks.apps.<app>` in a checkout, by `ingress run`."""
    run = [python, "-c", "from ingress.cli.commands import main; main()", "run"]
    target = f"benchmarks.apps.{app}"
    return Server(
        name,
        lambda port: [*run, target, "--host", "127.0.0.1", "--port", str(port), *options],
        request,
        env,
        start_s,
        stop_s,
        root,
    )


def rss_mb(pids: Sequence[int]) -> float:
    """Return the resident memory of processes, in MB."""
    listed = ",".join(map(str, pids))
    ran = subprocess.run(["ps", "-o", "rss=", "-p", listed], capture_output=True, check=True)
    return sum(map(int, ran.stdout.split())) * 1024 / 1e6


def _processes() -> list[tuple[int, int, str]]:
    """Return pid, parent and start time of every process; a pid alone may be reused."""
    command = ["ps", "-A", "-o", "pid=,ppid=,lstart="]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = (line.split(maxsplit=2) for line in ran.stdout.splitlines())
    return [(int(pid), int(parent), began) for pid, parent, began in lines]


def _descendants(pid: int) -> set[tuple[int, str]]:
    """Return pid and start time of all descendants of a process."""
    found: set[tuple[int, str]] = set()
    processes = _processes()
    parents = {pid}
    while parents:
        children = {(child, began) for child, parent, began in processes if parent in parents}
        found |= children
        parents = {child for child, _ in children}
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
