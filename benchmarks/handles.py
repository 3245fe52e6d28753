"""Handle calls in one process, and the guide's own benchmarks: `python -m benchmarks.handles`.

    call            one no-op deployment, called from a loop of the benchmark's
    chain of n      each deployment awaits the next; the last does nothing
    many replicas   the no-op deployment on 1,000 replicas against one on a single replica, in turn
    recursive       10 deployments x 100 replicas; each calls the next five at once, so a request is
                    480 calls; 4 clients
    ensemble        one input to 10 nodes that each do a little arithmetic, and their sum; 4 clients
                    x 20 requests

A rate is the median of the runs, with the least and the greatest. The last three have the shape of
"Performance and known benchmarks" in the guide, on one machine instead of 33.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Awaitable, Callable
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import uvloop

import ingress as serve
from benchmarks.measure import MIN_PAIRS, ROOT
from ingress.handle import DeploymentHandle

RESULTS = ROOT / "benchmarks" / "results" / "handles.json"
CALLS = 8_000  # in one run of a rate
FAN_OUT = 5
CLIENTS = 4


class Noop:
    async def __call__(self) -> int:
        return 1


class Link:
    def __init__(self, following: DeploymentHandle) -> None:
        self.following = following

    async def __call__(self) -> int:
        return 1 + await self.following.remote()  # type: ignore[no-any-return]


class Recursive:
    def __init__(self, *following: DeploymentHandle) -> None:
        self.following = following

    async def __call__(self) -> int:
        return 1 + sum(await asyncio.gather(*(each.remote() for each in self.following)))


class Node:
    def __init__(self, number: int) -> None:
        self.number = number

    async def __call__(self, value: int) -> int:
        return value * self.number


class Ensemble:
    def __init__(self, *nodes: DeploymentHandle) -> None:
        self.nodes = nodes

    async def __call__(self, value: int) -> int:
        return sum(await asyncio.gather(*(node.remote(value) for node in self.nodes)))


def deployed(cls: type, *args: Any, replicas: int = 1, name: str | None = None) -> Any:
    return serve.deployment(cls, name=name or cls.__name__, num_replicas=replicas).bind(*args)


def chain(length: int) -> Any:
    node = deployed(Noop)
    for number in range(length - 1):
        node = deployed(Link, node, name=f"Link{number}")
    return node


def recursive(replicas: int) -> Any:
    """Return the first of ten deployments, each of which calls up to five that come after it."""
    nodes: list[Any] = []
    for number in reversed(range(10)):
        nodes.insert(
            0, deployed(Recursive, *nodes[:FAN_OUT], replicas=replicas, name=f"Node{number}")
        )
    return nodes[0]


async def rate(handle: DeploymentHandle, in_flight: int, calls: int = CALLS) -> float:
    """Return calls per second with that many at a time."""

    async def client() -> None:
        for _ in range(calls // in_flight):
            await handle.remote()

    begin = perf_counter()
    await asyncio.gather(*(client() for _ in range(in_flight)))
    return calls // in_flight * in_flight / (perf_counter() - begin)


async def clients(
    request: Callable[[], Awaitable[Any]], until: Callable[[int], bool]
) -> dict[str, Any]:
    """Have `CLIENTS` clients make requests, each `until` its count says so. Latencies in ms."""
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
        "requests": len(latencies),
        "errors": errors,
        "requests_per_s": len(latencies) / (perf_counter() - begin),
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
    }


def summary(rates: list[float]) -> dict[str, float]:
    return {"median": median(rates), "min": min(rates), "max": max(rates)}


def shown(rates: dict[str, float]) -> str:
    return f"{rates['median']:,.0f}/s [{rates['min']:,.0f}-{rates['max']:,.0f}]"


def rss_mb() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def rates_of(name: str, handle: DeploymentHandle, runs: int) -> dict[str, Any]:
    """Measure a handle one at a time and 32 in flight."""
    result: dict[str, Any] = {}
    for in_flight in (1, 32):
        uvloop.run(rate(handle, in_flight, 500))
        found = summary([uvloop.run(rate(handle, in_flight)) for _ in range(runs)])
        result[f"{in_flight} in flight"] = found
        each = f", {1e3 / found['median']:.3f} ms each" if in_flight == 1 else ""
        print(f"{name}, {in_flight} in flight: {shown(found)}{each}")
    return result


def many_replicas(replicas: int, runs: int) -> dict[str, Any]:
    one = serve.run(deployed(Noop), name="one", route_prefix=None)
    before, begin = rss_mb(), perf_counter()
    many = serve.run(deployed(Noop, replicas=replicas), name="many", route_prefix=None)
    start_s = perf_counter() - begin
    each_mb = (rss_mb() - before) / replicas
    ones, manys = [], []
    for handle in (one, many):
        uvloop.run(rate(handle, 32))
    for _ in range(runs):
        ones.append(uvloop.run(rate(one, 32)))
        manys.append(uvloop.run(rate(many, 32)))
    ratio = median(many / one for one, many in zip(ones, manys, strict=True))
    print(
        f"{replicas:,} replicas: started in {start_s:.2f} s, {each_mb:.2f} MB each, 32 in flight "
        f"{shown(summary(manys))}, {ratio:.2f} x one replica"
    )
    return {
        "replicas": replicas,
        "start_s": start_s,
        "mb_each": each_mb,
        "32 in flight": summary(manys),
        "one replica": summary(ones),
        "ratio": ratio,
    }


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.handles",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=7, help=f"of a rate; at least {MIN_PAIRS}")
    parser.add_argument("--seconds", type=int, default=60, help="of `recursive`")
    parser.add_argument("--replicas", type=int, default=1000, help="of `many replicas`")
    options = parser.parse_args()
    if options.runs < MIN_PAIRS:
        parser.error(f"--runs must be at least {MIN_PAIRS}")
    document: dict[str, Any] = {"machine": f"{os.cpu_count()} cores"}

    for length in (1, 2, 5):
        name = "call" if length == 1 else f"chain of {length}"
        handle = serve.run(chain(length), route_prefix=None)
        document[name] = rates_of(name, handle, options.runs)
        serve.shutdown()

    document["many replicas"] = many_replicas(options.replicas, options.runs)
    serve.shutdown()

    handle = serve.run(recursive(100), route_prefix=None)
    calls = uvloop.run(_one(handle))
    deadline = perf_counter() + options.seconds
    found = uvloop.run(clients(handle.remote, lambda _: perf_counter() >= deadline))
    document["recursive"] = {"calls_per_request": calls, **found}
    print(f"recursive, {calls} calls a request: {_line(found)}")
    serve.shutdown()

    nodes = [deployed(Node, number, name=f"Node{number}") for number in range(10)]
    handle = serve.run(deployed(Ensemble, *nodes), route_prefix=None)
    uvloop.run(clients(lambda: handle.remote(1), lambda count: count == 20))
    runs = [
        uvloop.run(clients(lambda: handle.remote(1), lambda count: count == 20))
        for _ in range(options.runs)
    ]
    found = sorted(runs, key=lambda run: run["requests_per_s"])[len(runs) // 2]
    document["ensemble"] = found
    print(f"ensemble, {CLIENTS} x 20 requests: {_line(found)}")
    serve.shutdown()

    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {RESULTS.relative_to(ROOT)}")
    return 0


async def _one(handle: DeploymentHandle) -> Any:
    return await handle.remote()


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['requests']:,} requests, {found['errors']} errors, "
        f"{found['requests_per_s']:,.1f}/s, p50 {found['p50_ms']:.1f} ms, "
        f"p99 {found['p99_ms']:.1f} ms"
    )


if __name__ == "__main__":
    sys.exit(main())
