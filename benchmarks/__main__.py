"""Plain FastAPI + uvicorn against `ingress`, side by side in one run: `python -m benchmarks`.

How to read it: *ratio* is ingress requests per second over plain ones, the median of the pairs with
the least and the greatest. The two runs of a pair follow each other on two servers that were
started for the line, with the same uvicorn settings (uvloop, httptools, no access log), so that a
noisy machine moves both; the ratio says more than the requests per second. Latencies are medians of
what wrk found in each run. *added p50* is what a lone client waits longer.

    async         `async def`, returns a string              functions on plain FastAPI
    async-query   `async def`, path and query, returns JSON  functions on plain FastAPI
    def           `def`, returns a string                    functions on plain FastAPI
    model         pydantic body in, `response_model` out     functions on plain FastAPI
    def-depends   `def` with a `def` dependency              functions on plain FastAPI
    stream        1,000 chunks of 1 KiB, `async def`         StreamingResponse(async generator)
    stream-def    the same from a sync generator            StreamingResponse(sync generator)
    lines-def     the same from a `def` generator endpoint  JSON lines on plain FastAPI
    events-def    the same as server-sent events            on plain FastAPI
    call          plain `async def __call__`, no FastAPI     a plain Starlette route
    batch-32      a NumPy model behind `@batch`, 32 a batch  the same model on `ingress` without it;
                                                             alone, a client waits for company

    default       the SEPARATE flags as they are: user code on a loop and thread of its own
    both 0        RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD and ..._ROUTER_IN_SEPARATE_LOOP at 0
"""

from __future__ import annotations

import shutil
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich.console import Console

from benchmarks.apps import CHUNK, CHUNKS
from benchmarks.measure import MIN_PAIRS, ROOT, BenchmarkError, Server, compare
from benchmarks.report import WIDTH, Result, table, write

CONNECTIONS = (32, 1)
FEW = (4, 1)  # a stream of 1 MB keeps a server busy for tens of milliseconds


@dataclass(frozen=True, slots=True)
class Row:
    """One request, and the two apps that answer it alike. With a body it is a POST of JSON."""

    name: str
    path: str
    answer: bytes
    plain: str = "fastapi_app"
    ingress: str = "ingress_app"
    body: bytes | None = None
    connections: tuple[int, ...] = CONNECTIONS

    @property
    def apps(self) -> tuple[str, str]:
        return self.plain, self.ingress


ITEM = b'{"name":"lamp","price":12.5,"tags":["a","b"]}'
ROWS = (
    Row("async", "/async", b'"hello"'),
    Row("async-query", "/async/7?name=me", b'{"item_id":7,"name":"me"}'),
    Row("def", "/def", b'"hello"'),
    Row("model", "/model", ITEM, body=ITEM),
    Row("def-depends", "/def-depends?name=me", b'"hello me"'),
    Row("stream", "/stream", CHUNK.encode() * CHUNKS, connections=FEW),
    Row("stream-def", "/stream-def", CHUNK.encode() * CHUNKS, connections=FEW),
    Row("lines-def", "/lines", f'"{CHUNK}"\n'.encode() * CHUNKS, connections=FEW),
    Row("events-def", "/events", f'data: "{CHUNK}"\n\n'.encode() * CHUNKS, connections=FEW),
    Row("call", "/", b"hello", "starlette_app", "ingress_plain_app"),
    Row("batch-32", "/?sample=3", b"8", "unbatched_app", "batched_app"),
)
FLAGS = {
    "default": {},
    "both 0": {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    },
}
RESULTS = ROOT / "benchmarks" / "results" / "latest.json"


def measure(options: Namespace, console: Console) -> Iterator[Result]:
    """Yield the lines of the table, one pair of servers at a time."""
    flags_to_run = ["default"] if options.quick else list(FLAGS)
    chosen = [row for row in ROWS if row.name in options.rows]
    for flags in flags_to_run:
        for (plain_app, ingress_app), rows in groupby(chosen, lambda row: row.apps):
            with Server(plain_app, {}) as plain, Server(ingress_app, FLAGS[flags]) as ours:
                for row in rows:
                    for server in (plain, ours):
                        server.check(row.path, row.answer, row.body)
                    for connections in row.connections[: 1 if options.quick else None]:
                        load = (row.path, connections, options.seconds, row.body)
                        pairs = compare(
                            partial(plain.load, *load), partial(ours.load, *load), options.pairs
                        )
                        result = Result(row.name, connections, flags, pairs)
                        ratios = " ".join(f"{pair.ratio:.2f}" for pair in pairs)
                        console.print(f"{row.name}, {connections} conn., {flags}: {ratios}")
                        yield result


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--pairs", type=int, default=7, help=f"of runs; at least {MIN_PAIRS}")
    parser.add_argument("--seconds", type=int, default=1, help="one run of wrk takes")
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--quick", action="store_true", help="32 connections, default flags")
    options = parser.parse_args()
    if options.pairs < MIN_PAIRS or options.seconds < 1:
        parser.error(f"--pairs must be at least {MIN_PAIRS} and --seconds at least 1")
    if shutil.which("wrk") is None:
        print("wrk is missing; get it with `apt-get install wrk`", file=sys.stderr)
        return 1
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    try:
        results = list(measure(options, console))
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    console.print(table(results))
    write(RESULTS, results, options.seconds)
    console.print(f"written to {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
