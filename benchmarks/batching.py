"""`@serve.batch(target_latency_ms=50)` against the best fixed setting, the default, and BentoML.

Two models: one whose time grows with its batch (NumPy), and one with a fixed cost of 20 ms. Three
arrivals: steady, bursts of 20, and slow (10 a second). The figure is the greatest rate of which
99 % is answered within the target, in steps of 5 %. A search finds the fixed setting with the
greatest; then all servers climb again, from the rate that each had last. The chosen and the fixed
setting begin each climb at one rate: where p99 hardly grows with the rate, a climb ends near its
beginning. All take turns after each step of two seconds, so that a machine that grows slower does
so for all of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from benchmarks import command
from benchmarks.open_loop import Load, Stream, load
from benchmarks.peers.__main__ import PEERS, bentoml
from benchmarks.results import Result, Sample
from benchmarks.servers import ROOT, Request, Server
from benchmarks.work import ONE_THREAD, TARGET_MS

CHOSEN: dict[str, Any] = {"target_latency_ms": TARGET_MS}
FIXED: list[dict[str, Any]] = [
    {"max_batch_size": size, "batch_wait_timeout_s": wait_s}
    for size, wait_s in ((64, 0), (64, 0.005), (32, 0), (32, 0.005), (128, 0), (16, 0))
]
MODELS = ("growing", "fixed")
ARRIVALS = {"steady": 1, "bursts of 20": 20}
SLOW = 10  # requests a second
RATES = [round(20 * 1.05**n) for n in range(120)]
STRIDE = 8  # places in RATES, of the first steps of a search
LOW = 40  # the place where the first search begins: 141 a second
WARM_UP_S, TRIAL_S = 0.5, 1.5
BENTOML = next(each for each in PEERS if each.package == "bentoml")


@dataclass
class Served:
    """A running server, and the place in `RATES` of the greatest rate that it had in time."""

    server: Server
    path: str = "/"
    body: str = ""
    place: int = LOW
    passed: dict[int, Load] = field(default_factory=dict)  # the last trial in time, by place

    def sent(self, rate: float, burst: int, seconds: float) -> Load:
        stream = Stream(
            self.path, rate, WARM_UP_S + seconds, connections=2000, patience_s=5, burst=burst,
            body=self.body,
        )  # fmt: skip
        [found] = load(self.server.port, stream)
        return found

    def is_in_time(self, place: int, burst: int) -> bool:
        """Try a rate until it was in time twice, or late twice: a trial may be lucky or not."""
        in_time: list[Load] = []
        late = 0
        while len(in_time) < 2 and late < 2:
            found = self.sent(RATES[place], burst, TRIAL_S)
            if found.share(TARGET_MS / 1e3, WARM_UP_S) >= 0.99:
                in_time.append(found)
            else:
                late += 1
        if late == 2:
            return False
        self.passed[place] = in_time[-1]
        return True

    def search(self, burst: int, known: int = LOW) -> None:
        """Find the greatest rate; a server that has not more than `known` fails at once."""
        low = high = known
        while high == low and high + STRIDE < len(RATES):
            first = low + (1 if low == known else STRIDE)
            if self.is_in_time(first, burst):
                low = high = first
            else:
                high = first
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.is_in_time(middle, burst) else (low, middle)
        self.place = low

    def steps(self, burst: int) -> Iterator[None]:
        """Find the greatest rate, from the one before: a step at a time."""
        self.passed.clear()
        while self.is_in_time(self.place + 1, burst):
            self.place += 1
            yield
        while self.place not in self.passed and not self.is_in_time(self.place, burst):
            self.place = max(0, self.place - 2)
            yield

    def found(self) -> Sample:
        """Return the greatest rate, and the latencies at it."""
        return {"requests_per_s": RATES[self.place], **latencies(self.passed[self.place])}


def latencies(found: Load) -> Sample:
    return {
        "p50_ms": found.p99_ms(200, since_s=WARM_UP_S, quantile=0.5),
        "p99_ms": found.p99_ms(200, since_s=WARM_UP_S),
    }


@contextmanager
def ours(model: str, options: dict[str, Any]) -> Iterator[Served]:
    """Serve a model with these options of `@serve.batch`."""
    run = [sys.executable, "-m", "ingress", "run", f"benchmarks.apps.batching:{model}"]
    with Server(
        json.dumps(options),
        lambda port: [*run, "--port", str(port), "--no-access-log"],
        Request("/", b"[1.0]"),
        {"PYTHONPATH": str(ROOT), "BATCH": json.dumps(options), **ONE_THREAD},
    ) as running:
        yield Served(running)


@contextmanager
def theirs(model: str) -> Iterator[Served]:
    """Serve a model with BentoML's adaptive batching and the same target."""
    peer = replace(
        BENTOML,
        command=partial(bentoml, app=f"benchmarks.peers.bentoml_batching:{model.title()}"),
        request=Request("/predict", b"[1.0]", b'{"rows":[1]}'),
    )
    with tempfile.TemporaryDirectory() as folder, peer.server(folder, **ONE_THREAD) as running:
        yield Served(running, "/predict", '{"rows":[1]}')


def words(options: dict[str, Any]) -> str:
    size, wait_s = options["max_batch_size"], options["batch_wait_timeout_s"]
    return f"best fixed setting: {size} calls, {wait_s * 1e3:g} ms"


def best(model: str, arrivals: str, burst: int) -> dict[str, Any]:
    """Return the fixed setting with the greatest rate."""
    place, setting = LOW, FIXED[0]
    for each in FIXED:
        with ours(model, each) as running:
            running.search(burst, place)
        if running.place > place:
            place, setting = running.place, each
        print(f"{model}, {arrivals}, {words(each)}: {RATES[running.place]}/s", file=sys.stderr)
    return setting


def in_turn(servers: Sequence[Served], burst: int, pairs: int) -> list[list[Sample]]:
    """Return what each server has found in each pair: the chosen, the fixed, and other settings."""
    for each in servers:
        each.search(burst)
    runs: list[list[Sample]] = [[] for _ in servers]
    chosen, fixed, *_ = servers
    for _ in range(pairs):
        chosen.place = fixed.place = (chosen.place + fixed.place) // 2
        for _ in zip_longest(*(each.steps(burst) for each in servers)):
            pass  # one step of each
        for each, mine in zip(servers, runs, strict=True):
            mine.append(each.found())
        print(", ".join(f"{RATES[each.place]}/s" for each in servers), file=sys.stderr)
    return runs


def measure(options: Namespace) -> command.Results:
    for model in options.models:
        row = f"batches, {model} cost"
        with ExitStack() as stack:
            chosen = stack.enter_context(ours(model, CHOSEN))
            default = stack.enter_context(ours(model, {}))
            for arrivals, burst in ARRIVALS.items():
                setting = best(model, arrivals, burst)
                others = [("", words(setting)), (", default", "default setting")]
                with ExitStack() as those:
                    servers = [chosen, those.enter_context(ours(model, setting)), default]
                    if burst == 1:  # once is enough to compare with
                        servers.append(those.enter_context(theirs(model)))
                        others.append((", BentoML", f"BentoML {BENTOML.version()}"))
                    runs = in_turn(servers, burst, options.pairs)
                for (end, other), their_runs in zip(others, runs[1:], strict=True):
                    yield Result(row + end, arrivals, "", runs[0], other, their_runs)
            with ours(model, {"max_batch_size": 32, "batch_wait_timeout_s": 0}) as fixed:
                found: list[list[Sample]] = [[], []]
                for _ in range(options.pairs):
                    for each, mine in zip((chosen, fixed), found, strict=True):
                        mine.append(latencies(each.sent(SLOW, 1, options.seconds)))
            yield Result(row, f"{SLOW} a second", "", found[0], "no wait", found[1])


def main() -> int:
    parser = ArgumentParser(
        "python -m benchmarks.batching",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pairs", type=command.pairs, default=7)
    parser.add_argument("--seconds", type=command.at_least(2), default=3, help="of a slow run")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    options = parser.parse_args()
    whole = set(options.models) == set(MODELS)
    others = {"bentoml": BENTOML.version()}
    return command.run("batching", measure(options), options.seconds, whole=whole, others=others)


if __name__ == "__main__":
    sys.exit(main())
