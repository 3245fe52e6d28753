"""Servers in processes of their own, and wrk against them.

Server    `uvicorn benchmarks.apps:name` on a free loopback port, ended by its own pid
load      one run of wrk: requests per second, median and p99 latency
compare   pairs of runs, plain and ingress in turn, so that what else the machine does hits both
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent
START_S = 20.0
STOP_S = 5.0
MIN_PAIRS = 5  # fewer say nothing about the spread

JSON = "application/json"
POST = b"""wrk.method = "POST"
wrk.headers["content-type"] = "%b"
wrk.body = [[%b]]
"""
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


class BenchmarkError(Exception):
    """What stops a benchmark; its text is for the terminal."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of wrk."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of wrk, one right after the other."""

    plain: Sample
    ingress: Sample

    @property
    def ratio(self) -> float:
        return self.ingress.requests_per_s / self.plain.requests_per_s


class Server:
    """One app under uvicorn; a context manager. `tree` is where `benchmarks` is imported from."""

    def __init__(self, app: str, env: Mapping[str, str], tree: Path = ROOT) -> None:
        self.app = app
        self.port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        command = [sys.executable, "-m", "uvicorn", f"benchmarks.apps:{app}"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--loop", "uvloop"]
        command += ["--http", "httptools", "--no-access-log", "--log-level", "warning"]
        self.process = subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), **env},
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> Server:
        try:
            self._wait_until_it_listens()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def check(self, path: str, expected: bytes, body: bytes | None = None) -> None:
        """Raise `BenchmarkError` unless the answer is 200 with exactly what is expected.

        With a body the request is a POST of JSON, else a GET; here and in `load`.
        """
        method = "GET" if body is None else "POST"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            connection.request(method, path, body, {"content-type": JSON} if body else {})
            response = connection.getresponse()
            status, answer = response.status, response.read()
        except (OSError, HTTPException) as error:
            raise BenchmarkError(f"{self.app}: {method} {path} failed: {error!r}") from error
        finally:
            connection.close()
        if (status, answer) != (200, expected):
            gave = f"{status} {answer!r}, not {expected!r}"
            raise BenchmarkError(f"{self.app}: {method} {path} gave {gave}")

    def load(self, path: str, connections: int, seconds: int, body: bytes | None = None) -> Sample:
        """Load the server with wrk. Raises `BenchmarkError` if one answer is not a success."""
        command = [
            "wrk",
            "--latency",
            "-t1",
            f"-c{connections}",
            f"-d{seconds}s",
            "--timeout",
            "10s",
        ]
        url = f"http://127.0.0.1:{self.port}{path}"
        with tempfile.NamedTemporaryFile("wb", suffix=".lua") as script:
            if body is not None:
                script.write(POST % (JSON.encode(), body))
                script.flush()
                command += ["--script", script.name]
            ran = subprocess.run([*command, url], capture_output=True, text=True, check=False)
        if ran.returncode or "Non-2xx" in ran.stdout or "Socket errors" in ran.stdout:
            raise BenchmarkError(f"{self.app}: wrk {url} failed:\n{ran.stdout}{ran.stderr}")
        return parse(ran.stdout)

    def _wait_until_it_listens(self) -> None:
        deadline = monotonic() + START_S
        while monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
            except OSError:
                sleep(0.05)
            else:
                return
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")
        raise BenchmarkError(f"{self.app} did not start:\n{said}")


def parse(output: str) -> Sample:
    """Return what `wrk --latency` printed."""
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    latency = dict(re.findall(r"^\s+(50|99)%\s+([\d.]+\w+) *$", output, re.MULTILINE))
    if rate is None or len(latency) != 2 or not float(rate[1]):
        raise BenchmarkError(f"wrk printed something else than expected:\n{output}")
    return Sample(float(rate[1]), _to_ms(latency["50"]), _to_ms(latency["99"]))


def compare(plain: Callable[[], Sample], ingress: Callable[[], Sample], count: int) -> list[Pair]:
    """Measure `count` pairs, the order turned round each time. Both are warmed up by a run."""
    if count < MIN_PAIRS:
        raise BenchmarkError(f"{count} pairs are too few for a median; give {MIN_PAIRS} or more")
    plain()
    ingress()
    pairs = []
    for number in range(count):
        if number % 2:
            second, first = ingress(), plain()
        else:
            first, second = plain(), ingress()
        pairs.append(Pair(first, second))
    return pairs


def median_of(samples: list[Sample]) -> Sample:
    return Sample(
        median(each.requests_per_s for each in samples),
        median(each.p50_ms for each in samples),
        median(each.p99_ms for each in samples),
    )


def _to_ms(text: str) -> float:
    number = text.rstrip("msu")
    return float(number) * _UNITS_MS[text[len(number) :]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
