"""The guide's own benchmarks, on Ray Serve or `ingress`: `python -m benchmarks.guides ingress`.

    ensemble   an input goes to ten nodes that each do a little arithmetic; their sum comes back
    recursive  each deployment calls the next five at once: a request makes 480 calls with ten
               deployments, 32 with six
    replicas   a no-op on many replicas

4 clients x 20 requests. The argument is the module to use: `ingress`, or `ray.serve`, whose
replicas are processes, so it runs six deployments x 2 replicas, and 8 replicas.

For each benchmark name on a line of standard input it runs that benchmark once and prints a line of
JSON. It ends with its input.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
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
FAN_OUT = 5
RAY_REPLICAS = 8
RAY_DEPLOYMENTS = 6
RAY_REPLICAS_EACH = 2
ISOLATION = "BENCHMARK_ISOLATION"
"""The variable with the `isolation` of every replica of `ingress`."""
EXPECTED = {"ensemble": sum(range(NODES)), "recursive": 32, "replicas": 1}
SHAPES = tuple(EXPECTED)


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


class Recursive:
    """A deployment that returns the number of calls that one call to it makes."""

    def __init__(self, *following: Any) -> None:
        self.following = following

    async def __call__(self, value: int) -> int:
        counts: list[int] = await asyncio.gather(*(each.remote(value) for each in self.following))
        return value + sum(counts)


def deployed(serve: Any, cls: type, *args: Any, name: str, replicas: int = 1) -> Any:
    """Return a bound deployment; on Ray Serve its actors reserve no cores."""
    own: dict[str, Any] = {"isolation": os.environ.get(ISOLATION, "thread")}
    if serve.__name__ == "ray.serve":
        own = {"ray_actor_options": {"num_cpus": 0}}
    made = serve.deployment(name=name, num_replicas=replicas, max_ongoing_requests=100, **own)
    return made(cls).bind(*args)


def ensemble(serve: Any) -> Any:
    nodes = [deployed(serve, Node, number, name=f"Node{number}") for number in range(NODES)]
    return deployed(serve, Ensemble, *nodes, name="Ensemble")


def recursive(serve: Any, deployments: int, replicas: int) -> Any:
    """Return the first of a row of deployments, each of which calls up to the next five."""
    nodes: list[Any] = []
    for number in reversed(range(deployments)):
        following = nodes[:FAN_OUT]
        name = f"Recursive{number}"
        nodes.insert(0, deployed(serve, Recursive, *following, name=name, replicas=replicas))
    return nodes[0]


def application(serve: Any, shape: str) -> Any:
    """Return one of `SHAPES` in a size that Ray Serve can run on one machine."""
    if shape == "ensemble":
        return ensemble(serve)
    if shape == "recursive":
        return recursive(serve, RAY_DEPLOYMENTS, RAY_REPLICAS_EACH)
    return deployed(serve, Node, 1, name="Noop", replicas=RAY_REPLICAS)


async def clients(
    request: Callable[[], Awaitable[Any]], until: Callable[[int], bool]
) -> dict[str, float]:
    """Run `CLIENTS` clients; each makes requests until `until(count)` is true."""
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


async def one_run(handle: Any) -> dict[str, float]:
    return await clients(lambda: handle.remote(1), lambda count: count == REQUESTS)


async def one_answer(handle: Any) -> Any:
    return await handle.remote(1)


def serve_runs(serve: Any) -> None:
    shape, handle = "", None
    # One loop for all runs: in its throughput mode, a router of Ray Serve is bound to its first.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            if line.strip() != shape:
                if handle is not None:
                    serve.delete(shape)
                shape = line.strip()
                handle = serve.run(application(serve, shape), name=shape, route_prefix=None)
                if (answer := runner.run(one_answer(handle))) != EXPECTED[shape]:
                    sys.exit(f"{shape} gave {answer}, not {EXPECTED[shape]}")
            print(json.dumps(runner.run(one_run(handle))), flush=True)


def main(module: str, *cluster: str) -> None:
    serve = importlib.import_module(module)
    if cluster:
        importlib.import_module("benchmarks.peers.ray_app").begin(*cluster)
    # So that `finally` runs at SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        serve_runs(serve)
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
