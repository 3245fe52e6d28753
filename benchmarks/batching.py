"""`@serve.batch(target_latency_ms=50)` against the best fixed setting, and the default one.

Two models: one whose time grows with its batch (NumPy), and one with a fixed cost of 20 ms. Three
arrivals: steady, bursts of 20, and slow (10 a second). For each model and arrival, a search finds
the fixed setting that answers the greatest rate with its p99 within the target. Then that setting,
the default one and the target get that rate in turn. Goodput is the number of answers a second that
come within the target.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks import command
from benchmarks.open_loop import Load, Stream, load
from benchmarks.results import Result, Sample
from benchmarks.servers import ROOT, Request, Server

TARGET_MS = 50
TARGET: dict[str, Any] = {"target_latency_ms": TARGET_MS}
FIXED: list[dict[str, Any]] = [
    {"max_batch_size": size, "batch_wait_timeout_s": wait_s}
    for size in (8, 16, 32, 64, 128)
    for wait_s in (0, 0.005)
]
MODELS = ("growing", "fixed")
ARRIVALS = {"steady": 1, "bursts of 20": 20}
SLOW = 10  # requests a second
RATES = [round(100 * 1.15**n) for n in range(30)]
WARM_UP_S = 1
TRIAL_S = 2  # of one rate in the search


@contextmanager
def server(model: str, options: dict[str, Any]) -> Iterator[Server]:
    """Serve a model with these options of `@serve.batch`."""
    run = [sys.executable, "-m", "ingress", "run", f"benchmarks.apps.batching:{model}"]
    with Server(
        json.dumps(options),
        lambda port: [*run, "--port", str(port), "--no-access-log"],
        Request("/", b"done"),
        {"PYTHONPATH": str(ROOT), "BATCH": json.dumps(options)},
    ) as running:
        yield running


def sent(running: Server, rate: float, burst: int, seconds: float) -> Load:
    stream = Stream("/", rate, seconds + WARM_UP_S, connections=2000, patience_s=5.0, burst=burst)
    [found] = load(running.port, stream)
    return found


def greatest_rate(running: Server, burst: int, known: int) -> int:
    """Return the place in `RATES` of the greatest whose p99 is within the target, or `known`.

    A setting that cannot do more than the best one so far costs one trial.
    """

    def is_in_time(place: int) -> bool:
        found = sent(running, RATES[place], burst, TRIAL_S)
        return found.p99_ms(since_s=WARM_UP_S) <= TARGET_MS and not found.lost

    low, high = known, len(RATES) - 1
    while low < high:
        middle = low + 1 if low == known else (low + high + 1) // 2
        low, high = (middle, high) if is_in_time(middle) else (low, middle - 1)
        if low == known:
            break
    return low


def sample(running: Server, rate: float, burst: int, seconds: int) -> Sample:
    found = sent(running, rate, burst, seconds)
    return {
        "good_per_s": found.rate(within_s=TARGET_MS / 1e3, since_s=WARM_UP_S),
        "p50_ms": found.p99_ms(200, since_s=WARM_UP_S, quantile=0.5),
        "p99_ms": found.p99_ms(200, since_s=WARM_UP_S),
    }


def in_turn(
    servers: list[Server], rate: float, burst: int, options: Namespace
) -> list[list[Sample]]:
    runs: list[list[Sample]] = [[] for _ in servers]
    for _ in range(options.pairs):
        for each, mine in zip(servers, runs, strict=True):
            mine.append(sample(each, rate, burst, options.seconds))
    return runs


def words(options: dict[str, Any]) -> str:
    size, wait_s = options["max_batch_size"], options["batch_wait_timeout_s"]
    return f"best fixed: {size}, {wait_s * 1e3:g} ms"


def measure(options: Namespace) -> command.Results:
    for model in MODELS:
        with ExitStack() as stack:
            chosen = stack.enter_context(server(model, TARGET))
            default = stack.enter_context(server(model, {}))
            for arrivals, burst in ARRIVALS.items():
                place, setting = 0, FIXED[0]
                for each in FIXED:
                    with server(model, each) as running:
                        found_place = greatest_rate(running, burst, place)
                    if found_place > place:
                        place, setting = found_place, each
                    print(f"{model}, {arrivals}, {each}: {RATES[found_place]}", file=sys.stderr)
                rate = RATES[place]
                with server(model, setting) as fixed:
                    found = in_turn([chosen, fixed, default], rate, burst, options)
                row = f"batches, {model} cost"
                how = f"{arrivals}, {rate}/s"
                yield Result(row, how, "", found[0], words(setting), found[1])
                yield Result(row, how, "", found[0], "default setting", found[2])
            with server(model, {"max_batch_size": 32, "batch_wait_timeout_s": 0}) as fixed:
                found = in_turn([chosen, fixed], SLOW, 1, options)
            latencies = [[{"p50_ms": s["p50_ms"], "p99_ms": s["p99_ms"]} for s in f] for f in found]
            yield Result(
                f"batches, {model} cost",
                f"slow, {SLOW}/s",
                "",
                latencies[0],
                "no wait",
                latencies[1],
            )


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.batching",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=command.pairs, default=5)
    parser.add_argument("--seconds", type=command.at_least(2), default=3, help="of one run")
    options = parser.parse_args()
    return command.run("batching", measure(options), options.seconds)


if __name__ == "__main__":
    sys.exit(main())
