"""The guide's ensemble, on Ray Serve or on `ingress`: `python -m benchmarks.ensemble ingress`.

An input goes to ten nodes that each do a little arithmetic, and their sum comes back; 4 clients x
20 requests. What differs between the two is the module it is given: `ingress`, or `ray.serve`.

It answers each line on its standard input with a line of JSON that tells of one run, and ends with
its input.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from statistics import quantiles
from time import perf_counter
from typing import Any

import uvloop

NODES = 10
CLIENTS = 4
REQUESTS = 20


class Node:
    def __init__(self, number: int) -> None:
        self.number = number

    async def __call__(self, value: int) -> int:
        return value * self.number


class Ensemble:
    def __init__(self, *nodes: Any) -> None:
        self.nodes = nodes

    async def __call__(self, value: int) -> int:
        return sum(await asyncio.gather(*(node.remote(value) for node in self.nodes)))


def application(serve: Any) -> Any:
    """Return the bound application; its actors reserve no cores, where there are actors."""
    light = {"ray_actor_options": {"num_cpus": 0}} if serve.__name__ == "ray.serve" else {}
    nodes = [
        serve.deployment(name=f"Node{number}", **light)(Node).bind(number)
        for number in range(NODES)
    ]
    return serve.deployment(**light)(Ensemble).bind(*nodes)


async def clients(
    request: Callable[[], Awaitable[Any]], until: Callable[[int], bool]
) -> dict[str, float]:
    """Have `CLIENTS` clients make requests, each `until` its count says so."""
    latencies: list[float] = []
    errors = 0

    async def client() -> None:
        nonlocal errors
        count = 0
        while not until(count):
            count += 1
            begin = perf_counter()
            try:
                await request()
            except Exception as error:
                errors += 1
                print(f"  {error!r}", file=sys.stderr)
            else:
                latencies.append((perf_counter() - begin) * 1e3)

    begin = perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    percentiles = quantiles(latencies, n=100)
    return {
        "requests_per_s": len(latencies) / (perf_counter() - begin),
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
        "errors": errors,
    }


async def ensemble(handle: Any) -> dict[str, float]:
    """Return one run of the guide's."""
    return await clients(lambda: handle.remote(1), lambda count: count == REQUESTS)


async def serve_runs(handle: Any) -> None:
    if (answer := await handle.remote(1)) != sum(range(NODES)):
        sys.exit(f"the ensemble gave {answer}")
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await ensemble(handle)), flush=True)


def main(module: str, *cluster: str) -> None:
    serve = importlib.import_module(module)
    if cluster:
        importlib.import_module("benchmarks.peers.ray_app").begin(*cluster)
    # So that `finally` runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        uvloop.run(serve_runs(serve.run(application(serve), route_prefix=None)))
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
