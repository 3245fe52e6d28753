"""The cost before the first request: import, start, memory. Measured on new processes, in turn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.comparison import in_turn
from benchmarks.results import Result, Sample
from benchmarks.rows import ASYNC, FASTAPI, METHODS
from benchmarks.servers import ROOT, BenchmarkError, Server

STARTS = {
    "import": "`import ingress` against `import fastapi`",
    "start": "from the start of the process to the first answer over HTTP",
    "memory": "resident, idle, after one answer; one replica",
}
TIMED_IMPORT = """
from time import perf_counter
begin = perf_counter()
import {name}
print((perf_counter() - begin) * 1e3)
"""


def measure(names: set[str], pairs: int) -> Iterator[Result]:
    """Yield the results of the rows asked for."""
    if "import" in names:
        runs, baseline = in_turn(
            partial(time_import, "ingress"), partial(time_import, "fastapi"), pairs
        )
        yield Result("import", "fresh process", "", runs, "`import fastapi`", baseline)
    if names & {"start", "memory"}:
        ours, theirs = (partial(served.server, ASYNC) for served in (METHODS, FASTAPI))
        for name, runs, baseline in starts(ours, theirs, pairs):
            if name in names:
                yield Result(name, "fresh process", "", runs, FASTAPI.label, baseline)


def starts(
    ours: Callable[[], Server], theirs: Callable[[], Server], pairs: int
) -> Iterator[tuple[str, list[Sample], list[Sample]]]:
    """Start two servers in turn; yield `start` and `memory`, with the runs of both."""
    runs, baseline = in_turn(partial(start, ours), partial(start, theirs), pairs)
    for name, figure in (("start", "first_answer_s"), ("memory", "rss_mb")):
        yield name, only(figure, runs), only(figure, baseline)


def only(figure: str, runs: list[Sample]) -> list[Sample]:
    return [{figure: run[figure]} for run in runs]


def start(make: Callable[[], Server]) -> Sample:
    with make() as server:
        return {"first_answer_s": server.first_answer_s, "rss_mb": server.rss_mb()}


def time_import(name: str) -> Sample:
    """Return the time of an import in a new interpreter, with its files in the page cache."""
    command = [sys.executable, "-c", TIMED_IMPORT.format(name=name)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise BenchmarkError(f"import {name} failed:\n{ran.stderr}")
    return {"import_ms": float(ran.stdout)}
