"""Replicas in child processes, against plain FastAPI and against replicas in threads.

Read it as `python -m benchmarks`: pairs of runs, in turn, on servers with the same settings.

    process ...          over HTTP; see `rows.PROCESS_ROWS`
    health               `/-/healthz`, one connection, while 2 replicas compute all the time
    process call         a no-op by handle, from the benchmark's own loop, against a thread
    array                10 MB of NumPy by handle, there and back
    child                the start of one more replica, until it serves; its resident memory
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import uvloop

import ingress as serve
from benchmarks import command, handles, load
from benchmarks.__main__ import side_by_side
from benchmarks.apps.same import Same
from benchmarks.comparison import in_turn
from benchmarks.results import MIN_PAIRS, Result, Sample
from benchmarks.rows import COMPUTE, PROCESS_ROWS
from benchmarks.servers import Request
from ingress.handle import DeploymentHandle

CALLS = 4_000  # per run
ARRAYS = 20
ARRAY_BYTES = 10_000_000
HEALTH = Request("/-/healthz", b"success")


def process(name: str) -> Any:
    return serve.deployment(name=name, isolation="process")(Same).bind()


def health(options: Namespace) -> Iterator[Result]:
    """Yield the answers of the health check beside replicas that compute."""
    (row,) = (row for row in PROCESS_ROWS if row.request is COMPUTE)
    with row.ours.server(COMPUTE) as ours, row.baseline.server(COMPUTE) as theirs:

        def one(server: Any) -> Sample:
            with ThreadPoolExecutor() as other:
                seconds = options.seconds + 1
                computing = other.submit(load.wrk, server, COMPUTE, 4, seconds)
                found = load.wrk(server, HEALTH, 1, options.seconds)
                computing.result()
            return {"p99_ms": found["p99_ms"], "p50_ms": found["p50_ms"]}

        runs, baseline = in_turn(partial(one, ours), partial(one, theirs), options.pairs)
    yield Result("health", "1 connection", "", runs, "a thread", baseline)


async def arrays(handle: DeploymentHandle) -> Sample:
    array = np.arange(ARRAY_BYTES, dtype=np.uint8)
    times = []
    for _ in range(ARRAYS):
        begin = perf_counter()
        await handle.remote(array)
        times.append(perf_counter() - begin)
    return {"call_ms": median(times) * 1e3}


def by_handle(options: Namespace) -> Iterator[Result]:
    """Yield the calls, the arrays, and the start of a child."""
    thread = serve.run(handles.deployed(Same), name="thread", route_prefix=None)
    child = serve.run(process("Same"), name="process", route_prefix=None)
    for in_flight, many in ((1, "one at a time"), (32, "32 in flight")):
        ours = partial(handles.run, child, in_flight, CALLS)
        theirs = partial(handles.run, thread, in_flight, CALLS)
        for warm_up in (child, thread):
            handles.run(warm_up, in_flight, 500)
        runs, baseline = in_turn(ours, theirs, options.pairs)
        yield Result("process call", many, "", runs, "a thread", baseline)
    uvloop.run(arrays(child))  # to warm up
    found = [uvloop.run(arrays(child)) for _ in range(options.pairs)]
    yield Result("array", "10 MB there and back", "", found)
    yield Result("child", "fresh process", "", [one_child() for _ in range(options.pairs)])


def one_child() -> Sample:
    begin = perf_counter()
    handle = serve.run(process("Child"), name="child", route_prefix=None)
    start_s = perf_counter() - begin
    found = {"start_s": start_s, "rss_mb": handle.memory_mb.remote().result()}
    serve.delete("child")
    return found


def measure(options: Namespace) -> command.Results:
    try:
        yield from side_by_side(PROCESS_ROWS, options)
        yield from health(options)
        yield from by_handle(options)
    finally:
        serve.shutdown()


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.processes",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=command.pairs, default=MIN_PAIRS, help="of runs")
    parser.add_argument("--seconds", type=command.at_least(1), default=1, help="one run takes")
    options = parser.parse_args()
    command.require_wrk()
    return command.run("processes", measure(options), options.seconds)


if __name__ == "__main__":
    sys.exit(main())
