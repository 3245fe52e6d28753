"""Costs and gains from one process to worker processes to a local Ray cluster.

    1 process     ingress run app
    2 workers     ingress run app --workers 2
    local Ray     ingress run app --engine ray, with two replicas, each a process

Each answers three kinds of requests: a no-op `async def`, a `def` that computes for some
milliseconds in Python, and an `async def` that waits for 50 ms, as for another server. Memory is
the sum of all processes under load; pages that processes share count in each of them.

Then the same no-op on one Ray cluster by Ray Serve itself and on our engine, in alternating pairs:
rates, and the processor time of a request in the replica and in the proxy.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from importlib.util import find_spec

from benchmarks import command, load
from benchmarks.comparison import in_turn
from benchmarks.results import MIN_PAIRS, Result, Sample
from benchmarks.servers import Request, Server, ingress_run

APP = "scaling:app"
SETUPS = {
    "1 process": (),
    "2 workers": ("--workers", "2"),
    "local Ray": ("--engine", "ray"),
}
REQUESTS = {
    "no-op": (Request("/noop", b'"hello"'), 32),
    "compute": (Request("/compute", b"4999950000"), 8),
    "wait": (Request("/wait", b'"waited"'), 64),
}
BESIDE = {"ours": "ingress", "native": "Ray Serve"}
START_S = 120.0
PROXY = "ProxyActor"  # the process of Ray Serve's HTTP server, one for each node


def server(setup: str) -> Server:
    """Return the server of a setup, which is ready when its no-op answers."""

    env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_RUN_SYNC_IN_THREADPOOL": "1"}
    return ingress_run(setup, APP, SETUPS[setup], REQUESTS["no-op"][0], env, START_S, 30.0)


def measure(options: Namespace) -> command.Results:
    for setup in SETUPS:
        if setup == "local Ray" and find_spec("ray") is None:
            print("local Ray is left out: ray is not installed", file=sys.stderr)
            continue
        with server(setup) as running:
            yield Result("start", setup, "", [{"first_answer_s": running.first_answer_s}])
            for name, (request, connections) in REQUESTS.items():
                running.check(request)
                load.wrk(running, request, connections, 1)
                before_s = running.cpu_s(PROXY)
                runs: list[Sample] = []
                alone: list[Sample] = []
                for _ in range(options.runs):
                    runs.append(load.wrk(running, request, connections, options.seconds))
                    one = load.wrk(running, request, 1, options.seconds)
                    alone.append(one)
                if name == "no-op" and setup == "local Ray":
                    spent_s = running.cpu_s(PROXY) - before_s
                    answered = sum(run["requests_per_s"] for run in [*runs, *alone])
                    each_ms = spent_s * 1e3 / (answered * options.seconds)
                    yield Result("proxy", setup, "", [{"cpu_ms": each_ms}])
                yield Result(name, f"{setup}, {connections} connections", "", runs)
                yield Result(name, f"{setup}, 1 connection", "", alone)
            yield Result("memory", setup, "", [{"rss_mb": running.rss_mb()}])
    if find_spec("ray") is not None:
        yield from beside_ray(options)


def beside_ray(options: Namespace) -> command.Results:
    """Measure the same no-op by Ray Serve itself and by ingress, on one cluster, in turn."""
    requests = {each: Request(f"/{each}/noop", b'"hello"') for each in BESIDE}
    run = [sys.executable, "-m", "benchmarks.apps.beside_ray"]
    env = {"RAY_USAGE_STATS_ENABLED": "0"}

    def measured(name: str, connections: int) -> Sample:
        replica_s, proxy_s = running.cpu_s(f"ServeReplica:{name}"), running.cpu_s(PROXY)
        sample = load.wrk(running, requests[name], connections, options.seconds)
        answered = sample["requests_per_s"] * options.seconds
        replica_ms = (running.cpu_s(f"ServeReplica:{name}") - replica_s) * 1e3 / answered
        proxy_ms = (running.cpu_s(PROXY) - proxy_s) * 1e3 / answered
        return {**sample, "replica_ms": replica_ms, "proxy_ms": proxy_ms}

    with Server(
        "beside Ray Serve",
        lambda port: [*run, str(port)],
        requests["ours"],
        env,
        START_S,
        30.0,
    ) as running:
        for request in requests.values():
            load.wrk(running, request, 16, 1)
        for connections in (1, 16):
            pairs = max(options.runs, MIN_PAIRS)
            ours, native = (partial(measured, name, connections) for name in BESIDE)
            sides = in_turn(ours, native, pairs)
            for name, runs in zip(BESIDE.values(), sides, strict=True):
                yield Result("beside Ray Serve", f"{name}, {connections} connections", "", runs)


def main() -> int:
    parser = ArgumentParser("python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--runs", type=command.at_least(1), default=3, help="of each rate")
    parser.add_argument("--seconds", type=command.at_least(1), default=3, help="of each run")
    options = parser.parse_args()
    command.require_wrk()
    whole = find_spec("ray") is not None
    others = {"ray": _version()} if whole else None
    return command.run("scaling", measure(options), options.seconds, whole=whole, others=others)


def _version() -> str:
    from importlib.metadata import version

    return version("ray")


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sys.exit(main())
