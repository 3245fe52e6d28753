"""Goodput under overload, compared with an earlier version.

The server's deployment sleeps for 50 ms in 10 slots, so it can answer 200 requests a second on any
machine. A client sends requests at a steady rate, whether they are answered or not, each with a
deadline of one second. Goodput is the number of them answered with 200 within that second.

`--before PATH` is another checkout of this project, for the comparison.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import command
from benchmarks.open_loop import Stream, load
from benchmarks.results import Result, Sample
from benchmarks.servers import ROOT, Request, Server

APP = "benchmarks.apps.overload:sleeping"
CAPACITY = 200  # requests a second
LOADS = (1.0, 2.0, 5.0)
DEADLINE_S = 1
WARM_UP_S = 2  # until the queue has its full length; not counted
CONNECTIONS = 2000  # more than are in flight at five times the capacity
BASELINE = "order of arrival alone"


@contextmanager
def server(checkout: Path) -> Iterator[Server]:
    """Serve with the `ingress` of a checkout."""
    run = [sys.executable, "-P", "-c", "from ingress.cli.commands import main; main()", "run", APP]
    with TemporaryDirectory() as folder:
        Path(folder, "ingress").symlink_to(checkout.resolve() / "ingress")
        with Server(
            checkout.name,
            lambda port: [*run, "--port", str(port)],
            Request("/", b"slept"),
            {"PYTHONPATH": f"{folder}:{ROOT}"},
        ) as running:
            yield running


def sample(running: Server, factor: float, seconds: int) -> Sample:
    """Send requests at a rate, and return goodput and latencies."""
    stream = Stream(
        "/",
        CAPACITY * factor,
        seconds + WARM_UP_S,
        headers=f"x-request-timeout-seconds: {DEADLINE_S}\r\n",
        connections=CONNECTIONS,
        patience_s=DEADLINE_S + 5,
    )
    (found,) = load(running.port, stream)
    return {
        "good_per_s": found.rate(within_s=DEADLINE_S, since_s=WARM_UP_S),
        "worst_good_per_s": found.worst_second(within_s=DEADLINE_S, since_s=WARM_UP_S),
        "p50_ms": found.p99_ms(200, since_s=WARM_UP_S, quantile=0.5),
        "p99_ms": found.p99_ms(200, since_s=WARM_UP_S),
    }


def measure(options: Namespace) -> command.Results:
    with server(ROOT) as ours, server(options.before) as theirs:
        for factor in LOADS:
            runs: list[Sample] = []
            before: list[Sample] = []
            for _ in range(options.pairs):
                before.append(sample(theirs, factor, options.seconds))
                runs.append(sample(ours, factor, options.seconds))
            yield Result("goodput", f"{factor:g} x capacity", "", runs, BASELINE, before)


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.overload",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, required=True, metavar="PATH")
    parser.add_argument("--pairs", type=command.pairs, default=5)
    parser.add_argument("--seconds", type=command.at_least(2), default=5, help="of one run")
    options = parser.parse_args()
    return command.run("overload", measure(options), options.seconds)


if __name__ == "__main__":
    sys.exit(main())
