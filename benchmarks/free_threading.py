"""Free-threaded Python against the same Python with the GIL, side by side in one run.

    python -m benchmarks.free_threading PYTHON FREE_THREADED_PYTHON [OLDER_PYTHON]

Each is the interpreter of an environment with this package; `make bench-free-threading` makes them.
Builds by the same script are comparable, others are not: profile-guided optimisation alone may be
worth more than what is measured here.

    def, async def      10 ms and 1.3 ms of Python for each request, 8 connections
    no-op, depends      what a server does beside user code
    HTTP threads        a no-op with `--http-threads 2` against 1, both without the GIL
    against processes   one replica in threads, without the GIL, against two processes with it
    model               NumPy on a shared array of 200 MB: rate, and memory of the server
    against the older   the processor time of a no-op, both with the GIL
    against peers       5 ms of Python in a `def`: LitServe and mosec with two processes, by the
                        Python with the GIL; FastAPI on granian with two threads, without it;
                        of those that the environments have
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import command, load
from benchmarks.apps.free_threading import PLACE, REPLICAS, ROWS
from benchmarks.comparison import in_turn
from benchmarks.peers.__main__ import START_S, STOP_S, VALUE, Command, litserve, mosec
from benchmarks.results import MIN_PAIRS, Result, Sample
from benchmarks.servers import BenchmarkError, Request, Server, ingress_run
from benchmarks.work import COMPUTES, WORKERS

READY = Request("/noop", b'"hello"')
LONG, SHORT = 400_000, 50_000
"""Additions in 10 ms and in 1.3 ms, on CPython 3.14 of this machine."""


def added(kind: str, rounds: int) -> Request:
    return Request(f"/{kind}/{rounds}", str(rounds * (rounds - 1) // 2).encode())


MODEL = Request("/model", b"%.1f" % (ROWS * 500))
SHORT_DEF = added("def", SHORT)
LONG_DEF = added("def", LONG)


@dataclass(frozen=True, slots=True)
class Row:
    """A request, and the servers of both sides: replicas, and whether they are processes."""

    name: str
    request: Request
    connections: int
    replicas: int = 1
    against_processes: int = 0


ROWS_OF_PYTHON = (
    Row("def, 10 ms", LONG_DEF, 8),
    Row("async def, 10 ms, 2 replicas", added("async", LONG), 8, replicas=2),
    Row("def, 1.3 ms", SHORT_DEF, 8),
    Row("async def, 1.3 ms, 2 replicas", added("async", SHORT), 8, replicas=2),
    Row("no-op", READY, 32),
    Row("no-op", READY, 1),
    Row("def + dependency", Request("/depends", b'"hello"'), 32),
    Row("def, 10 ms, against 2 processes", LONG_DEF, 8, against_processes=2),
    Row("def, 1.3 ms, against 2 processes", SHORT_DEF, 8, against_processes=2),
    Row("model of 200 MB", MODEL, 8),
    Row("model of 200 MB, against 2 processes", MODEL, 8, against_processes=2),
)


def server(name: str, python: str, replicas: int, place: str, *options: str) -> Server:
    env = {
        REPLICAS: str(replicas),
        PLACE: place,
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "OMP_NUM_THREADS": "1",
    }
    options = ("--no-access-log", *options)
    return ingress_run(name, "free_threading:app", options, READY, env, python=python)


def sampled(running: Server, row: Row, seconds: int) -> Sample:
    """Return one run of wrk, with the processor time of a request and the server's memory."""
    before_s = running.cpu_s()
    found = load.wrk(running, row.request, row.connections, seconds)
    spent_s = running.cpu_s() - before_s
    each_ms = spent_s * 1e3 / (found["requests_per_s"] * seconds)
    return {**found, "cpu_ms": each_ms, "rss_mb": running.rss_mb()}


def measured(row: Row, python: str, free: str, options: Namespace) -> Result:
    baseline = "2 processes, GIL" if row.against_processes else "GIL"
    place = "process" if row.against_processes else "thread"
    with (
        server("free-threaded", free, row.replicas, "thread") as ours,
        server(baseline, python, row.against_processes or row.replicas, place) as theirs,
    ):
        return compared(row, ours, theirs, baseline, options)


def compared(row: Row, ours: Server, theirs: Server, baseline: str, options: Namespace) -> Result:
    for each in (ours, theirs):
        each.check(row.request)
        load.wrk(each, row.request, row.connections, 1)
    one = partial(sampled, row=row, seconds=options.seconds)
    runs, baseline_runs = in_turn(partial(one, ours), partial(one, theirs), options.pairs)
    several = "s" if row.connections > 1 else ""
    where = f"{row.connections} connection{several}"
    return Result(row.name, where, "", runs, baseline, baseline_runs)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of two processes or threads that answers a request of `PredictComputing`."""

    name: str
    package: str
    command: Command
    request: Request
    has_gil: bool = True

    def server(self, python: str, folder: str) -> Server:
        command = partial(self.command, Path(python).parent, folder)
        env = {WORKERS: "2", COMPUTES: "1", "OMP_NUM_THREADS": "1"}
        return Server(self.name, command, self.request, env, START_S, STOP_S)


def granian(bin_: Path, folder: str, port: int) -> list[str | Path]:
    app = (bin_ / "python", "-m", "granian", "benchmarks.apps.plain:computing_app")
    options = "--interface asgi --workers 2 --loop uvloop --log-level warning --host 127.0.0.1"
    return [*app, *options.split(), "--port", str(port)]


INFERENCE = Request("/inference", b"4", VALUE)
PEERS = (
    Peer(
        "LitServe, 2 processes",
        "litserve",
        litserve,
        Request("/predict", b'{"output":4}', VALUE),
    ),
    Peer("mosec, 2 processes", "mosec", mosec, INFERENCE),
    Peer("FastAPI on granian, 2 threads", "granian", granian, INFERENCE, has_gil=False),
)


def against_peers(pythons: Pythons, options: Namespace) -> command.Results:
    for peer in PEERS:
        python = pythons.with_gil if peer.has_gil else pythons.free
        if not has(python, peer.package):
            print(f"{peer.package} is not in the environment of {python}", file=sys.stderr)
            continue
        row = Row(f"def, 5 ms, against {peer.name}", peer.request, 8)
        app, extra = "ours:predict_computing", ("--no-access-log",)
        env = {"RAY_SERVE_LOG_TO_STDERR": "0"}
        with (
            TemporaryDirectory() as folder,
            ingress_run("free-threaded", app, extra, row.request, env, python=pythons.free) as ours,
            peer.server(python, folder) as theirs,
        ):
            yield compared(row, ours, theirs, peer.name, options)


def measure(pythons: Pythons, options: Namespace) -> command.Results:
    for row in ROWS_OF_PYTHON:
        yield measured(row, pythons.with_gil, pythons.free, options)
    for connections in (32, 256):
        row = Row("no-op, 2 HTTP threads", READY, connections, replicas=2)
        with (
            server("2 threads", pythons.free, 2, "thread", "--http-threads", "2") as ours,
            server("1 thread", pythons.free, 2, "thread") as theirs,
        ):
            yield compared(row, ours, theirs, "1 HTTP thread", options)
    yield from against_peers(pythons, options)
    if pythons.older:
        row = Row(f"no-op, Python {version(pythons.with_gil)}", READY, 32)
        name = f"Python {version(pythons.older)}"
        with (
            server("newer", pythons.with_gil, 1, "thread") as ours,
            server("older", pythons.older, 1, "thread") as theirs,
        ):
            yield compared(row, ours, theirs, name, options)


@dataclass(frozen=True, slots=True)
class Pythons:
    """A free-threaded Python, the one of its version with the GIL, and the oldest other one."""

    free: str
    with_gil: str
    older: str

    @classmethod
    def of(cls, pythons: list[str]) -> Pythons:
        """Choose among interpreters. Raises `BenchmarkError` if there is no pair."""
        versions = {each: version(each) for each in pythons}
        gil = {each: has_gil(each) for each in pythons}
        for free in (each for each in pythons if not gil[each]):
            for each in (each for each in pythons if gil[each]):
                if versions[each] == versions[free]:
                    older = [other for other in pythons if gil[other] and other != each]
                    return cls(free, each, min(older, key=lambda it: versions[it], default=""))
        found = ", ".join(f"{versions[each]}{'' if gil[each] else 't'}" for each in pythons)
        raise BenchmarkError(
            f"no Python of {found} is there with the GIL and without it, in the same version"
        )


def printed(python: str, code: str) -> str:
    command = [python, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def version(python: str) -> str:
    return printed(python, "import platform; print(platform.python_version())")


def has(python: str, package: str) -> bool:
    code = f"import importlib.util; print(importlib.util.find_spec({package!r}) is not None)"
    return printed(python, code) == "True"


def has_gil(python: str) -> bool:
    code = "import sys; print(getattr(sys, '_is_gil_enabled', lambda: True)())"
    return printed(python, code) == "True"


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.free_threading",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="interpreters to choose from")
    parser.add_argument("--pairs", type=command.pairs, default=MIN_PAIRS, help="of runs")
    parser.add_argument("--seconds", type=command.at_least(1), default=2, help="one run takes")
    options = parser.parse_args()
    command.require_wrk()
    try:
        pythons = Pythons.of(options.pythons)
    except BenchmarkError as error:
        raise SystemExit(str(error)) from None
    others = {"both": version(pythons.free)}
    return command.run("free-threading", measure(pythons, options), options.seconds, others=others)


if __name__ == "__main__":
    sys.exit(main())
