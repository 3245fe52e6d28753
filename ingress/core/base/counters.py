"""The counters of replicas and of user code: plain ints and floats, each with one owner.

Snapshots (`ingress.state`) have copies of these counters; no other code counts again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

# Ray 2.60.0's default latency buckets, upper bounds in ms. Floats: a float is compared with a float
# in half the time.
LATENCY_BUCKETS_MS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 300.0, 400.0, 500.0, 1000.0, 2000.0, 5000.0,
    10_000.0, 60_000.0, 120_000.0, 300_000.0, 600_000.0,
)  # fmt: skip
# Those of its batches.
BATCH_SIZE_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
UTILIZATION_BUCKETS = (
    5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 100.0,
)  # fmt: skip


MAX_ENDED = 100  # replicas of a deployment that have ended, whose counters keep their name


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """The load of one lane of a replica: calls that run in its threads, and calls that wait."""

    limit: int
    ongoing: int
    queued: int


class Exemplar(NamedTuple):
    """One of the requests of a bucket: its trace, its latency, and when it ended, in Unix time."""

    trace_id: str
    value_ms: float
    at_s: float


@dataclass(slots=True)
class Latency:
    """The latencies of one route's requests: `serve_deployment_processing_latency_ms`.

    `cancelled` counts those whose callers have cancelled them, or whose clients have left: they are
    no errors. `exemplars` has the latest request of each bucket that has a trace.
    """

    errors: int = 0
    cancelled: int = 0
    total_ms: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS_MS) + 1))
    exemplars: list[Exemplar | None] | None = None

    @property
    def count(self) -> int:
        """The number of requests."""
        return sum(self.buckets)

    def add(self, latency_ms: float) -> None:
        self.total_ms += latency_ms
        self.buckets[bisect_left(LATENCY_BUCKETS_MS, latency_ms)] += 1

    def merge(self, other: Latency) -> None:
        """Add the requests of another route, or of another process."""
        self.errors += other.errors
        self.cancelled += other.cancelled
        self.total_ms += other.total_ms
        self.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]
        for bucket, each in enumerate(other.exemplars or ()):
            if each is not None:
                self.keep(bucket, each)

    def keep(self, bucket: int, exemplar: Exemplar) -> None:
        """Keep a request as the exemplar of its bucket, unless a later one is there."""
        if self.exemplars is None:
            # Of its full length: another thread may be reading it, and finds each place or `None`.
            self.exemplars = [None] * len(self.buckets)
        there = self.exemplars[bucket]
        if there is None or there.at_s <= exemplar.at_s:
            self.exemplars[bucket] = exemplar

    def copy(self) -> Latency:
        """Return a copy, which the owner of this does not write. Thread-safe."""
        exemplars = self.exemplars
        return Latency(
            self.errors,
            self.cancelled,
            self.total_ms,
            list(self.buckets),
            None if exemplars is None else list(exemplars),
        )


@dataclass(slots=True)
class Distribution:
    """The sum of some values, and their numbers by upper bound; the last has no bound."""

    buckets: list[int]
    total: float = 0.0

    def add(self, bounds: tuple[float, ...], value: float) -> None:
        self.total += value
        self.buckets[bisect_left(bounds, value)] += 1

    def merge(self, other: Distribution) -> None:
        self.total += other.total
        self.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]

    def copy(self) -> Distribution:
        return Distribution(list(self.buckets), self.total)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The size and the wait that `target_latency_ms` had chosen for the last batch, and why."""

    size: int
    wait_s: float
    target_s: float
    reason: str


@dataclass(slots=True)
class BatchCount:
    """The batches of one function of a replica that were run, and the calls in them.

    `wait` has the times from the first call of a batch until it was complete or its time was over,
    `execution` those that the function took. `sizes` are as `batch_size_fn` measures them,
    `utilizations` the percentage of `max_batch_size`. `chosen` is for the last batch, `None` with
    fixed limits.
    """

    batches: int = 0
    calls: int = 0
    wait: Latency = field(default_factory=Latency)
    execution: Latency = field(default_factory=Latency)
    sizes: Distribution = field(
        default_factory=lambda: Distribution([0] * (len(BATCH_SIZE_BUCKETS) + 1))
    )
    utilizations: Distribution = field(
        default_factory=lambda: Distribution([0] * (len(UTILIZATION_BUCKETS) + 1))
    )
    chosen: BatchChoice | None = None

    def begin(self, calls: int, size: float, limit: int, wait_ms: float) -> None:
        """Count a batch that begins. `limit` is its `max_batch_size`."""
        self.batches += 1
        self.calls += calls
        self.wait.add(wait_ms)
        self.sizes.add(BATCH_SIZE_BUCKETS, size)
        self.utilizations.add(UTILIZATION_BUCKETS, 100.0 * size / limit)

    def merge(self, other: BatchCount) -> None:
        """Add the batches of another replica, or of another process."""
        self.batches += other.batches
        self.calls += other.calls
        self.wait.merge(other.wait)
        self.execution.merge(other.execution)
        self.sizes.merge(other.sizes)
        self.utilizations.merge(other.utilizations)
        self.chosen = other.chosen or self.chosen

    def copy(self) -> BatchCount:
        """Return a copy, which the owner of this does not write. Thread-safe."""
        return BatchCount(
            self.batches,
            self.calls,
            self.wait.copy(),
            self.execution.copy(),
            self.sizes.copy(),
            self.utilizations.copy(),
            self.chosen,
        )


LOAD, UNLOAD = "load", "unload"  # of a model
METHODS = frozenset(
    ("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE", "WS")
)
OTHER_METHOD = "OTHER"  # a client may send any word: the number of labels must be bounded
CLIENT_LEFT = 499  # the status of a request whose client left before the answer, as in Ray


@dataclass(eq=False, slots=True)
class HTTPCounts:
    """The HTTP requests of one deployment, by thread, route template, method and status.

    Each thread writes its own entries. A thread that reads them adds those of all threads up.
    """

    by_label: dict[tuple[int, str, str, int], Latency] = field(default_factory=dict)

    def of(self, thread: int, route: str, method: str, status: int) -> Latency:
        """Return the latencies of the current thread with these labels."""
        method = method if method in METHODS else OTHER_METHOD
        return self.by_label.setdefault((thread, route, method, status), Latency())

    def summed(self) -> dict[tuple[str, str, int], Latency]:
        """Return the requests by route, method and status. Thread-safe."""
        found: dict[tuple[str, str, int], Latency] = {}
        for key in list(self.by_label):
            found.setdefault(key[1:], Latency()).merge(self.by_label[key])
        return found


def copied(latencies: Mapping[str, Latency]) -> dict[str, Latency]:
    """Return copies of latencies that another thread writes. Thread-safe."""
    return {key: latencies[key].copy() for key in list(latencies)}


@dataclass(slots=True)
class ReplicaCounts:
    """The counters of one replica. They are kept when the replica has ended.

    routes         processing times, by route template
    errors         numbers of failed calls, by route template and type of the exception; calls that
                   their callers have cancelled have not failed
    stalls         durations of its event loop's stalls, by method
    thread_waits   times that `def` calls waited for a worker thread, by lane; "" for no lane
    batches        batches and the calls in them, by function
    model_gets     times that code asked for a model
    model_times    times of models, by LOAD and UNLOAD
    """

    starts: int = 1
    routes: dict[str, Latency] = field(default_factory=dict)
    errors: dict[str, dict[str, int]] = field(default_factory=dict)
    stalls: dict[str, Latency] = field(default_factory=dict)
    thread_waits: dict[str, Latency] = field(default_factory=dict)
    batches: dict[str, BatchCount] = field(default_factory=dict)
    model_gets: int = 0
    model_times: dict[str, Latency] = field(default_factory=dict)

    def add(self, other: ReplicaCounts) -> None:
        """Add the counters of another replica, or of the same one in another process."""
        self.starts += other.starts
        for mine, theirs in (
            (self.routes, other.routes),
            (self.stalls, other.stalls),
            (self.thread_waits, other.thread_waits),
            (self.model_times, other.model_times),
        ):
            for key, latency in theirs.items():
                mine.setdefault(key, Latency()).merge(latency)
        for route, types in other.errors.items():
            self.errors[route] = dict(Counter(self.errors.get(route)) + Counter(types))
        for function, batch in other.batches.items():
            self.batches.setdefault(function, BatchCount()).merge(batch)
        self.model_gets += other.model_gets

    def renamed(self, routes: Mapping[str, str]) -> ReplicaCounts:
        """Return the same counters under other names of their routes."""
        found: dict[str, Latency] = {}
        errors: dict[str, Counter[str]] = {}
        for route, latency in self.routes.items():
            found.setdefault(routes[route], Latency()).merge(latency)
        for route, types in self.errors.items():
            errors.setdefault(routes[route], Counter()).update(types)
        return replace(self, routes=found, errors=dict(errors))


def keep(ended: dict[str, ReplicaCounts], name: str, counts: ReplicaCounts) -> None:
    """Add a replica's counters to those of a replica of the same id; the oldest are dropped."""
    ended[name] = total = ended.pop(name, ReplicaCounts(starts=0))
    total.add(counts)
    while len(ended) > MAX_ENDED:
        del ended[next(iter(ended))]


@dataclass(slots=True)
class UserSeries:
    """One series of a user's metric: the values of its labels, and its value.

    A histogram has `latency`, whose buckets belong to the metric's boundaries.
    """

    labels: list[str]
    value: float = 0.0
    buckets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class UserMetric:
    """A metric of `serve.metrics`. `kind` is "counter", "gauge" or "histogram".

    `place` is the file and line of user code that declares it, "" if they are not known.
    """

    name: str
    kind: str
    description: str
    label_names: list[str]
    boundaries: list[float] = field(default_factory=list)
    series: list[UserSeries] = field(default_factory=list)
    place: str = ""

    def signature(self) -> tuple[str, str, tuple[str, ...], tuple[float, ...]]:
        """Return what metrics must have in common for their series to be added up."""
        return self.name, self.kind, tuple(self.label_names), tuple(self.boundaries)

    def shown_names(self) -> set[str]:
        """Return the names of its samples, without Ray's prefix, and its own, for OpenMetrics."""
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        return {self.name, *(self.name + each for each in suffixes.get(self.kind, ()))}


def encodable(text: str) -> str:
    """Return a text that UTF-8 can carry: a client may send half a surrogate pair, in JSON."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def merged_metrics(parts: Iterable[list[UserMetric]]) -> list[UserMetric]:
    """Return the users' metrics of all processes: counters and gauges of one series are added.

    Metrics of one name that differ otherwise, such as those of two versions, stay apart.
    """
    found: dict[object, UserMetric] = {}
    series: dict[object, UserSeries] = {}
    for part in parts:
        for each in part:
            signature = each.signature()
            metric = found.setdefault(signature, replace(each, series=[]))
            for one in each.series:
                key = (signature, *one.labels)
                if key not in series:
                    series[key] = replace(one, buckets=list(one.buckets))
                    metric.series.append(series[key])
                    continue
                there = series[key]
                there.value += one.value
                there.buckets = [a + b for a, b in zip(there.buckets, one.buckets, strict=True)]
    return list(found.values())
