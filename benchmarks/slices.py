"""The cost of the stall watchdog: one server under load, with the watchdog on and off in turn.

Two servers, or two runs of a second, differ by ten times that cost. Neighbouring slices of one run
differ as much, but there are hundreds of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks import load
from benchmarks.comparison import in_turn
from benchmarks.results import Result, Sample
from benchmarks.rows import ASYNC, WATCHED
from benchmarks.servers import BenchmarkError, Server

SLICES = {
    "watchdog": "`async`, with the stall watchdog; one server, slices of 50 ms with and without it"
}
CONNECTIONS = 32
TIMES = 100
"""Number of slices for each run of other rows."""
SLICE_S = 0.075
"""Upper estimate of the time of a slice, also on a busy machine."""


def measure(names: set[str], pairs: int) -> Iterator[Result]:
    """Yield the result if the row is asked for."""
    if "watchdog" not in names:
        return
    count = pairs * TIMES
    seconds = int(2 * count * SLICE_S) + 5
    with WATCHED.server(ASYNC) as server, ThreadPoolExecutor() as other:
        load.wrk(server, ASYNC, CONNECTIONS, 1)
        loading = other.submit(load.wrk, server, ASYNC, CONNECTIONS, seconds)
        one_slice(server, watched=1)  # until wrk has started
        runs = in_turn(partial(one_slice, server, 1), partial(one_slice, server, 0), count)
        if loading.done():
            raise BenchmarkError(f"watchdog: {count} pairs took more than {seconds} s")
        loading.result()
    yield Result("watchdog", f"{CONNECTIONS} connections", "", runs[0], "without it", runs[1])


def one_slice(server: Server, watched: int) -> Sample:
    rate = json.loads(server.get(f"/slice?watched={watched}"))
    if not rate:
        raise BenchmarkError(f"{server.name}: nothing was answered in a slice")
    return {"requests_per_s": round(rate, 1)}
