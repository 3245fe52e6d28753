"""What is paid before the first request: importing, starting, memory. Fresh processes, in turn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.comparison import in_turn
from benchmarks.results import Result, Sample
from benchmarks.rows import ASYNC, FASTAPI, METHODS, Served
from benchmarks.servers import ROOT, BenchmarkError

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
    """Yield the results of those that are asked for."""
    if "import" in names:
        runs, baseline = in_turn(
            partial(time_import, "ingress"), partial(time_import, "fastapi"), pairs
        )
        yield Result("import", "fresh process", "", runs, "`import fastapi`", baseline)
    if names & {"start", "memory"}:
        runs, baseline = in_turn(partial(start, METHODS), partial(start, FASTAPI), pairs)
        for name, figure in (("start", "first_answer_s"), ("memory", "rss_mb")):
            if name in names:
                ours, theirs = (
                    [{figure: run[figure]} for run in each] for each in (runs, baseline)
                )
                yield Result(name, "fresh process", "", ours, FASTAPI.label, theirs)


def time_import(name: str) -> Sample:
    """Return how long a fresh interpreter takes for it, files warm."""
    command = [sys.executable, "-c", TIMED_IMPORT.format(name=name)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise BenchmarkError(f"import {name} failed:\n{ran.stderr}")
    return {"import_ms": float(ran.stdout)}


def start(served: Served) -> Sample:
    with served.server(ASYNC) as server:
        return {"first_answer_s": server.first_answer_s, "rss_mb": server.rss_mb()}
