"""The state of a server in numbers and words: one snapshot of each process, summed by the parent.

    LocalEngine.snapshot()      made by each process of itself, when asked
    merged(snapshots)           of all workers, in the supervisor: counters and gauges are sums
    kept(snapshot)              the counters that a process leaves behind

`/metrics`, `/api/snapshot`, `ingress status`, `ingress top` and the page read it. The counters are
copies of ints and floats that the request path writes, each in one thread. The JSON form has the
names of the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ingress.core.base.counters import BatchCount, LaneLoad, Latency

MAX_ENDED = 100  # replicas of a deployment that have ended, whose counters keep their name
GRAVEST = ("DEPLOY_FAILED", "UNHEALTHY", "DELETING", "DEPLOYING", "UPDATING", "NOT_STARTED")


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


@dataclass(slots=True)
class ReplicaSnapshot:
    """One replica. `process` is the name of the server process that it belongs to.

    `pid` is the process that its user code runs in, `batch_queues` has the calls that wait for
    their batch, by function.
    """

    replica_id: str
    process: str
    pid: int
    state: str
    ongoing: int
    max_ongoing: int
    orphans: int
    unhealthy_reason: str
    failed_health_checks: int
    lanes: dict[str, LaneLoad]
    models: list[str]
    batch_queues: dict[str, int]
    counts: ReplicaCounts


@dataclass(slots=True)
class HTTPCount:
    """The HTTP requests of one route template, method and status: their number and times.

    Method "WS" is a WebSocket, status 101 if it was accepted. Status 499: the client left before
    the answer.
    """

    route: str
    method: str
    status: int
    latency: Latency


@dataclass(slots=True)
class DeploymentSnapshot:
    """One deployment: its status, its router's counters, and its replicas.

    requests   calls that its router accepted
    rejected   calls refused because the queue was full, or because they could not be answered in
               time
    shed       calls that were taken out of the queue, because they could not be answered in time
    retries    calls that were sent to another replica
    expired    calls whose deadline passed
    losses     replicas that ended by themselves, such as a process that was killed
    failed_starts  starts of replicas that failed
    ended      the counters of replicas that have ended, by their ids, at most `MAX_ENDED`
    held_s     seconds for which the same calls have held all slots; 0.0 if one is free
    """

    status: str
    status_trigger: str
    message: str
    target_replicas: int
    queued: int = 0
    requests: int = 0
    rejected: int = 0
    shed: int = 0
    retries: int = 0
    expired: int = 0
    losses: int = 0
    failed_starts: int = 0
    http: list[HTTPCount] = field(default_factory=list)
    replicas: list[ReplicaSnapshot] = field(default_factory=list)
    ended: dict[str, ReplicaCounts] = field(default_factory=dict)
    held_s: float = 0.0

    @property
    def ongoing(self) -> int:
        return sum(each.ongoing for each in self.replicas)

    def counts(self) -> dict[str, ReplicaCounts]:
        """Return the counters of all replicas, by id: of those that run and those that ended."""
        found: dict[str, ReplicaCounts] = {}
        running = [(each.replica_id, each.counts) for each in self.replicas]
        for name, counts in (*self.ended.items(), *running):
            found.setdefault(name, ReplicaCounts(starts=0)).add(counts)
        return found


@dataclass(slots=True)
class ApplicationSnapshot:
    """One application. `deployed_at_s` is Unix time; the last deployment gets the requests."""

    status: str
    message: str
    route_prefix: str | None
    deployed_at_s: float
    deployments: dict[str, DeploymentSnapshot] = field(default_factory=dict)


@dataclass(slots=True)
class ProcessSnapshot:
    """One process of the server; a figure that the system does not give is 0.

    name        "server", "worker-1", or that with the replica whose process it is, such as
                "worker-1/default/Model#0"
    cpu_s       seconds of CPU time so far
    gil_wait_s  seconds by which the watchdog woke late because other threads held the GIL
    processor_wait_s  seconds for which the watchdog was ready to run and had no processor
    """

    name: str
    pid: int
    rss_bytes: int = 0
    cpu_s: float = 0.0
    threads: int = 0
    gil_wait_s: float = 0.0
    processor_wait_s: float = 0.0


@dataclass(slots=True)
class StallSnapshot:
    """A stall of an event loop, see `watchdog.Stall`. `text` is its log record."""

    began_at_s: float
    duration_ms: float
    reason: str
    loop: str
    application: str
    deployment: str
    replica: str
    method: str
    request_ids: list[str]
    file: str
    line: int
    is_over: bool
    text: str


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


@dataclass(slots=True)
class Snapshot:
    """The state of a server at `made_at_s`, in Unix time.

    `workers` are the process ids of the workers that answered, `silent` of those that did not.
    `unrouted` are requests that no application's route matched, or that came while none served.
    """

    made_at_s: float
    pid: int
    url: str | None = None
    workers: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    processes: list[ProcessSnapshot] = field(default_factory=list)
    applications: dict[str, ApplicationSnapshot] = field(default_factory=dict)
    unrouted: list[HTTPCount] = field(default_factory=list)
    stalls: list[StallSnapshot] = field(default_factory=list)
    metrics: list[UserMetric] = field(default_factory=list)


def merged(parts: Sequence[Snapshot], left: Snapshot | None = None) -> Snapshot:
    """Return the sum of the snapshots of several workers; `left` is of those that have ended.

    Counts are sums, a status is the gravest. An application that not every worker has is DEPLOYING.
    """
    newest = max(parts, key=lambda each: each.made_at_s)
    names = dict.fromkeys(name for part in parts for name in part.applications)
    everything = [*parts, left] if left is not None else list(parts)
    return Snapshot(
        newest.made_at_s,
        newest.pid,
        newest.url,
        [pid for part in parts for pid in part.workers],
        [pid for part in parts for pid in part.silent],
        [process for part in parts for process in part.processes],
        {name: _application(name, everything, len(parts)) for name in names},
        summed_http(part.unrouted for part in everything),
        sorted((each for part in parts for each in part.stalls), key=lambda each: each.began_at_s),
        merged_metrics(each.metrics for each in everything),
    )


def kept(snapshot: Snapshot) -> Snapshot:
    """Return what stays of a process that has ended: its counters, and no status or gauge."""
    applications = {}
    for name, application in snapshot.applications.items():
        deployments = {
            each: replace(
                deployment,
                status="",
                message="",
                target_replicas=0,
                queued=0,
                held_s=0.0,
                replicas=[],
                ended=dict(list(deployment.counts().items())[-MAX_ENDED:]),
            )
            for each, deployment in application.deployments.items()
        }
        applications[name] = replace(application, status="", message="", deployments=deployments)
    counted = [each for each in snapshot.metrics if each.kind != "gauge"]
    return replace(
        snapshot, workers=[], processes=[], stalls=[], applications=applications, metrics=counted
    )


def both_kept(one: Snapshot | None, other: Snapshot) -> Snapshot:
    """Return the counters that two ended processes leave behind."""
    other = kept(other)
    return other if one is None else merged([one, other])


def encodable(text: str) -> str:
    """Return a text that UTF-8 can carry: a client may send half a surrogate pair, in JSON."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def keep(ended: dict[str, ReplicaCounts], name: str, counts: ReplicaCounts) -> None:
    """Add a replica's counters to those of a replica of the same id; the oldest are dropped."""
    ended[name] = total = ended.pop(name, ReplicaCounts(starts=0))
    total.add(counts)
    while len(ended) > MAX_ENDED:
        del ended[next(iter(ended))]


def _application(name: str, parts: Sequence[Snapshot], live: int) -> ApplicationSnapshot:
    found = [part.applications[name] for part in parts if name in part.applications]
    deployments: dict[str, list[DeploymentSnapshot]] = {}
    for each in found:
        for deployment, one in each.deployments.items():
            deployments.setdefault(deployment, []).append(one)
    present = [each for each in found if each.status]
    return replace(
        found[0],
        status="DEPLOYING" if 0 < len(present) < live else gravest(present),
        message=_joined(present),
        deployed_at_s=max(each.deployed_at_s for each in found),
        deployments={each: _deployment(ones) for each, ones in deployments.items()},
    )


def _deployment(parts: Sequence[DeploymentSnapshot]) -> DeploymentSnapshot:
    ended: dict[str, ReplicaCounts] = {}
    for part in parts:
        for name, counts in part.ended.items():
            keep(ended, name, counts)
    present = [each for each in parts if each.status]
    return DeploymentSnapshot(
        gravest(present),
        parts[0].status_trigger,
        _joined(present),
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMS},
        http=summed_http(part.http for part in parts),
        replicas=[replica for part in parts for replica in part.replicas],
        ended=ended,
        held_s=max(part.held_s for part in parts),
    )


_SUMS = (
    "target_replicas", "queued", "requests", "rejected", "shed", "retries", "expired", "losses",
    "failed_starts",
)  # fmt: skip


def gravest(parts: Sequence[ApplicationSnapshot | DeploymentSnapshot]) -> str:
    """Return the gravest status, "" for no parts."""
    found = [part.status for part in parts]
    return next((each for each in GRAVEST if each in found), found[0] if found else "")


def _joined(parts: Sequence[ApplicationSnapshot | DeploymentSnapshot]) -> str:
    return "; ".join(dict.fromkeys(part.message for part in parts if part.message))


def summed_http(parts: Iterable[list[HTTPCount]]) -> list[HTTPCount]:
    """Return the requests of all parts, one count for each route, method and status."""
    found: dict[tuple[str, str, int], HTTPCount] = {}
    for counts in parts:
        for each in counts:
            key = (each.route, each.method, each.status)
            found.setdefault(key, HTTPCount(*key, Latency())).latency.merge(each.latency)
    return list(found.values())


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
