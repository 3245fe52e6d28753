"""`ingress` against plain FastAPI, Starlette and itself, side by side in one run.

How to read it: *ratio* is ingress over the baseline, the median of all pairs with the least and the
greatest. The two runs of a pair follow each other on two servers that were started for the row,
with the same uvicorn settings (uvloop, httptools, no access log), so that a noisy machine moves
both; the ratio is more reliable than the requests per second. Latencies are medians over the runs,
baseline → ingress.

    both 0     RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD and ..._ROUTER_IN_SEPARATE_LOOP at 0;
               otherwise they are at their defaults: user code has its own loop and thread
    sync 0, 1  RAY_SERVE_RUN_SYNC_IN_THREADPOOL

With --rows, the results are printed and not written.

With --before PATH, the baseline of each row that uvicorn serves is `ingress` of another checkout,
with that checkout's own `benchmarks.apps`; printed, not written. Each row has a second line with
the processor time of the server's threads, which varies less than the rate.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks import command, load, slices, starts
from benchmarks.comparison import in_turn
from benchmarks.results import MIN_PAIRS, Result, Sample
from benchmarks.rows import ROWS, Row
from benchmarks.servers import Server
from benchmarks.slices import SLICES
from benchmarks.starts import STARTS


def one_run(row: Row, server: Server, connections: int, seconds: int) -> Sample:
    if row.client == "wrk":
        return load.wrk(server, row.request, connections, seconds)
    return load.client(row.client, server, connections, seconds)


def run_with_cpu(row: Row, server: Server, connections: int, seconds: int) -> Sample:
    """Run as `one_run`; `cpu_us` is the server's processor time for each request."""
    before = server.cpu_s()
    sample = one_run(row, server, connections, seconds)
    served = next(iter(sample.values())) * seconds
    return {**sample, "cpu_us": (server.cpu_s() - before) * 1e6 / served}


def side_by_side(
    chosen: Sequence[Row], options: Namespace, run: Callable[..., Sample] = one_run
) -> command.Results:
    """Yield the results of rows, one pair of servers at a time."""
    for (baseline, ours), group in groupby(chosen, lambda row: (row.baseline, row.ours)):
        rows = list(group)
        first = rows[0].request
        with baseline.server(first) as theirs, ours.server(first) as mine:
            for row in rows:
                for server in (theirs, mine):
                    server.check(row.request)
                warm_up = partial(one_run, row, connections=max(row.connections), seconds=1)
                with ThreadPoolExecutor() as both:
                    list(both.map(warm_up, (theirs, mine)))
                for connections in row.connections:
                    runs, baseline_runs = in_turn(
                        partial(run, row, mine, connections, options.seconds),
                        partial(run, row, theirs, connections, options.seconds),
                        options.pairs,
                    )
                    many = f"{connections} connection{'s' if connections > 1 else ''}"
                    yield Result(row.name, many, row.setup, runs, baseline.label, baseline_runs)


def against(before: Path, options: Namespace) -> command.Results:
    """Yield the results of rows against an earlier version: the rate, then the processor time."""
    seen: list[tuple[object, ...]] = []
    chosen = []
    for row in ROWS:
        key = row.ours, row.request, row.connections
        if row.name in options.rows and key not in seen and row.ours.workers is None:
            seen.append(key)
            earlier = replace(row.ours, label="before", root=before.resolve())
            chosen.append(replace(row, baseline=earlier))
    for result in side_by_side(chosen, options, run_with_cpu):
        # Under names of their own: what is required is required against plain FastAPI.
        rate, processor = (
            ", ".join(filter(None, (result.setup, figure))) for figure in ("rate", "processor")
        )
        yield replace(result, setup=rate)
        runs, earlier_runs = (
            [{"cpu_us": run["cpu_us"]} for run in each]
            for each in (result.runs, result.baseline_runs)
        )
        yield replace(result, setup=processor, runs=runs, baseline_runs=earlier_runs)


def measure(options: Namespace) -> command.Results:
    """Yield the results of the rows asked for."""
    if options.before is not None:
        yield from against(options.before, options)
        return
    yield from side_by_side([row for row in ROWS if row.name in options.rows], options)
    yield from slices.measure(set(options.rows), options.pairs)
    yield from starts.measure(set(options.rows), options.pairs)


def main() -> int:
    names = list(dict.fromkeys([*(row.name for row in ROWS), *SLICES, *STARTS]))
    parser = ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=command.pairs, default=MIN_PAIRS, help="of runs (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=command.at_least(1), default=1, help="one run takes (default: 1)"
    )
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--before", type=Path, metavar="PATH", help="another checkout")
    parser.epilog = f"rows: {', '.join(names)}"
    options = parser.parse_args()
    command.require_wrk()
    whole = options.rows == names and options.before is None
    return command.run("http", measure(options), options.seconds, whole=whole)


if __name__ == "__main__":
    sys.exit(main())
