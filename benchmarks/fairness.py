"""The latency of a polite client beside a greedy one, without and with `fairness_key`.

The greedy client has 64 connections, and sends on each as soon as it has its answer; the polite one
has one. Each call sleeps for 10 ms. Then a burst of 60 greedy calls waits before one polite call.
"""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from itertools import product
from statistics import quantiles
from time import perf_counter

import uvloop

from benchmarks.client import Conversation
from benchmarks.servers import Request, ingress_run

GREEDY = 64
BURST = 60
ANSWER = b'"slept"'


async def ask(connection: Conversation, tenant: str) -> float:
    """Send a request, and return the ms until its answer."""
    begin = perf_counter()
    head = f"GET / HTTP/1.1\r\nhost: localhost\r\nx-tenant: {tenant}\r\n\r\n"
    await connection.ask(head.encode(), ANSWER)
    return (perf_counter() - begin) * 1e3


async def keep_asking(port: int, tenant: str, seconds: float) -> list[float]:
    until = perf_counter() + seconds
    connection, times = await Conversation.begin(port), []
    while perf_counter() < until:
        times.append(await ask(connection, tenant))
    connection.end()
    return times


async def beside(port: int, greedy: int, seconds: float) -> list[float]:
    """Return the ms of the polite client's answers beside so many greedy connections."""
    others = [keep_asking(port, "greedy", seconds) for _ in range(greedy)]
    return (await asyncio.gather(keep_asking(port, "polite", seconds), *others))[0]


async def after_a_burst(port: int) -> float:
    """Return the ms of a polite call that comes after a burst of greedy ones."""
    connections = [await Conversation.begin(port) for _ in range(BURST + 1)]
    *greedy, polite = connections
    burst = [asyncio.create_task(ask(each, "greedy")) for each in greedy]
    await asyncio.sleep(0.005)  # until the first of them has its slot
    took_ms = await ask(polite, "polite")
    await asyncio.gather(*burst)
    for each in connections:
        each.end()
    return took_ms


def main() -> None:
    parser = ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    print("slots  fairness_key  alone: p50, p99 ms  beside 64: p50, p99 ms  p99/alone  burst: ms")
    for slots, key in product((1, 8), ("", "x-tenant")):
        app = f"fairness:{'fair' if key else 'plain'}_{slots}"
        with ingress_run(app, app, (), Request("/", ANSWER)) as server:
            alone = quantiles(uvloop.run(beside(server.port, 0, given.seconds)), n=100)
            crowded = quantiles(uvloop.run(beside(server.port, GREEDY, given.seconds)), n=100)
            burst_ms = uvloop.run(after_a_burst(server.port))
        print(
            f"{slots:5}  {key or '-':12}  {alone[49]:9.1f} {alone[98]:8.1f}  {crowded[49]:13.1f} "
            f"{crowded[98]:8.1f}  {crowded[98] / alone[98]:9.2f}  {burst_ms:9.1f}"
        )


if __name__ == "__main__":
    main()
