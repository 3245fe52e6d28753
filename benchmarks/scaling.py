"""Costs and gains from one process to worker processes to a local Ray cluster.

    1 process     ingress run app
    2 workers     ingress run app --workers 2
    local Ray     ingress run app --engine ray, with two replicas, each a process

Each answers three kinds of requests: a no-op `async def`, a `def` that computes for some
milliseconds in Python, and an `async def` that waits for 50 ms, as for another server. Memory is
the sum of all processes under load; pages that processes share count in each of them.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec

from benchmarks import command, load
from benchmarks.results import Result, Sample
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
