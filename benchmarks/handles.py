"""Calls by handle in one process, and the guide's own benchmarks.

    call            one no-op deployment, called from the benchmark's own loop
    chain of n      each deployment awaits the next; the last does nothing
    1,000 replicas  the no-op deployment on 1,000 replicas against one on a single replica, in turn
    recursive       10 deployments x 100 replicas; each calls the next five at once: a request makes
                    480 calls; 4 clients, one run of a minute
    ensemble        one input to 10 nodes that each do a little arithmetic, and their sum; 4 clients
                    x 20 requests

A rate is the median of the runs, with the least and the greatest. The last three have the shape of
"Performance and known benchmarks" in the guide, on one machine instead of 33.
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from functools import partial
from time import perf_counter
from typing import Any

import uvloop

import ingress as serve
from benchmarks import command
from benchmarks.comparison import in_turn
from benchmarks.guides import CLIENTS, clients, ensemble, one_answer, one_run, recursive
from benchmarks.results import Result, Sample
from benchmarks.servers import rss_mb
from ingress.handle import DeploymentHandle

CALLS = 8_000  # per run


class Noop:
    async def __call__(self) -> int:
        return 1


class Link:
    def __init__(self, following: DeploymentHandle) -> None:
        self.following = following

    async def __call__(self) -> int:
        return 1 + await self.following.remote()  # type: ignore[no-any-return]


def deployed(cls: type, *args: Any, replicas: int = 1, name: str | None = None) -> Any:
    made = serve.deployment(name=name or cls.__name__, num_replicas=replicas)(cls)
    return made.bind(*args)


def chain(length: int) -> Any:
    node = deployed(Noop)
    for number in range(length - 1):
        node = deployed(Link, node, name=f"Link{number}")
    return node


async def call(handle: DeploymentHandle, in_flight: int, calls: int = CALLS) -> Sample:
    """Make calls, a number of them at a time."""

    async def client() -> None:
        for _ in range(calls // in_flight):
            await handle.remote()

    begin = perf_counter()
    await asyncio.gather(*(client() for _ in range(in_flight)))
    each_s = (perf_counter() - begin) / (calls // in_flight * in_flight)
    return {"call_ms": each_s * 1e3} if in_flight == 1 else {"calls_per_s": 1 / each_s}


def run(handle: DeploymentHandle, in_flight: int, calls: int = CALLS) -> Sample:
    return uvloop.run(call(handle, in_flight, calls))


def calls(options: Namespace) -> command.Results:
    for length in (1, 2, 5):
        name = "call" if length == 1 else f"chain of {length}"
        handle = serve.run(chain(length), route_prefix=None)
        for in_flight, load in ((1, "one at a time"), (32, "32 in flight")):
            run(handle, in_flight, 500)
            yield Result(name, load, "", [run(handle, in_flight) for _ in range(options.runs)])
        serve.shutdown()


def many_replicas(options: Namespace) -> command.Results:
    name = f"{options.replicas:,} replicas"
    one = serve.run(deployed(Noop), name="one", route_prefix=None)
    before, begin = rss_mb([os.getpid()]), perf_counter()
    many = serve.run(deployed(Noop, replicas=options.replicas), name="many", route_prefix=None)
    yield Result(name, "start", "", [{"start_s": perf_counter() - begin}])
    each_mb = (rss_mb([os.getpid()]) - before) / options.replicas
    yield Result(name, "memory each", "", [{"rss_mb": each_mb}])
    for handle in (one, many):
        run(handle, 32, 500)
    runs, baseline = in_turn(partial(run, many, 32), partial(run, one, 32), options.runs)
    yield Result(name, "32 in flight", "", runs, "one replica", baseline)
    serve.shutdown()


def guides(options: Namespace) -> command.Results:
    handle = serve.run(recursive(serve, 10, 100), route_prefix=None)
    assert uvloop.run(one_answer(handle)) == 480
    deadline = perf_counter() + options.seconds
    found = uvloop.run(clients(lambda: handle.remote(1), lambda _: perf_counter() >= deadline))
    yield Result("recursive", f"{CLIENTS} clients", "", [found])
    serve.shutdown()

    handle = serve.run(ensemble(serve), route_prefix=None)
    uvloop.run(one_run(handle))
    runs = [uvloop.run(one_run(handle)) for _ in range(options.runs)]
    yield Result("ensemble", f"{CLIENTS} clients", "", runs)
    serve.shutdown()


def measure(options: Namespace) -> command.Results:
    try:
        for part in (calls, many_replicas, guides):
            yield from part(options)
    finally:
        serve.shutdown()


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.handles",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=command.pairs, default=7, help="of a rate")
    parser.add_argument("--seconds", type=command.at_least(1), default=60, help="of `recursive`")
    parser.add_argument("--replicas", type=command.at_least(1), default=1000)
    options = parser.parse_args()
    whole = options.seconds >= 60 and options.replicas == 1000
    return command.run("handles", measure(options), options.seconds, whole=whole)


if __name__ == "__main__":
    sys.exit(main())
