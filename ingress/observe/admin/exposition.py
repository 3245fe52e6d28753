"""A snapshot as text for Prometheus: its own format, or OpenMetrics.

The text is written here, because prometheus_client's exposition takes 340 ms for the processing
times of 1,000 replicas; `tests/observe/test_metrics.py` reads it with that library's parsers.

The routes that it names are limited: 500 routes on 8 replicas are 12 MB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isfinite
from threading import Lock

from ingress.core.base.counters import (
    BATCH_SIZE_BUCKETS,
    LATENCY_BUCKETS_MS,
    LOAD,
    UNLOAD,
    UTILIZATION_BUCKETS,
    BatchCount,
    Distribution,
    Exemplar,
    Latency,
    ReplicaCounts,
    UserMetric,
    encodable,
)
from ingress.observe.admin import families as f
from ingress.observe.admin.families import COUNTER, FAMILIES, HISTOGRAM, Family
from ingress.state.applications import ApplicationSnapshot
from ingress.state.deployments import (
    DeploymentSnapshot,
    HTTPCount,
    ReplicaSnapshot,
    summed_http,
)
from ingress.state.server import Snapshot

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_APPLICATION_STATUS = (
    "DEPLOY_FAILED", "UNHEALTHY", "NOT_STARTED", "DELETING", "DEPLOYING", "RUNNING",
)  # fmt: skip
_DEPLOYMENT_STATUS = (
    "DEPLOY_FAILED", "UNHEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING", "HEALTHY",
)  # fmt: skip
_RUNS = ("RUNNING", "STARTING", "STOPPING")
_MOST_MODELS = 100  # clients choose the ids of models
_MOST_OF_ID = 200


def exposition(snapshot: Snapshot, *, is_open_metrics: bool = False) -> bytes:
    """Return the text of all metrics of a snapshot, in UTF-8."""
    lines = _Lines(is_open_metrics=is_open_metrics)
    for name, application in snapshot.applications.items():
        _add_application(lines, name, application)
    _add_http(lines, "", snapshot.unrouted)
    for process in snapshot.processes:
        lines.add(_labels(process=process.name), *f.samples_of(f.PROCESS, process))
    lines.add(_labels(state="ready"), (f.WORKERS, len(snapshot.workers)))
    lines.add(_labels(state="silent"), (f.WORKERS, len(snapshot.silent)))
    text = list(lines.text())
    groups: dict[str, list[UserMetric]] = {}
    for metric in snapshot.metrics:
        # A process refuses a second metric with such a name, but two processes may have them. A
        # name has one type in the text; tags and boundaries may differ from series to series.
        names = metric.shown_names()
        there = [groups[name][0] for name in names if name in groups]
        if all((each.name, each.kind) == (metric.name, metric.kind) for each in there):
            group = groups[metric.name] if there else []
            group.append(metric)
            groups.update(dict.fromkeys(names, group))
    for name, group in groups.items():
        if name == group[0].name and not lines.has(_name_of(group[0])):
            text += _user_metric(group, is_open_metrics=is_open_metrics)
    if is_open_metrics:
        text.append("# EOF\n")
    return "".join(text).encode(errors="replace")


class _Lines:
    """The samples of all families, as lines. Only OpenMetrics has exemplars."""

    def __init__(self, *, is_open_metrics: bool) -> None:
        self._is_open_metrics = is_open_metrics
        self._lines: dict[str, list[str]] = {each.name: [] for each in FAMILIES}

    def has(self, name: str) -> bool:
        return name in self._lines

    def add(self, labels: str, *samples: tuple[Family, float | Latency]) -> None:
        """Add a sample of each family, all with the same labels; a latency is a histogram."""
        for family, value in samples:
            name = family.name
            if isinstance(value, Latency):
                in_ms = name.endswith("_ms")
                template, total = (_MS, value.total_ms) if in_ms else (_S, value.total_ms / 1e3)
                text = _histogram(name, labels, template, value.buckets, total)
                if self._is_open_metrics and value.exemplars is not None:
                    text = _with_exemplars(text, value.exemplars)
            else:
                text = f"{name}{{{labels}}} {value}\n"
            self._lines[name].append(text)

    def add_distribution(
        self, family: Family, labels: str, template: str, of: Distribution
    ) -> None:
        text = _histogram(family.name, labels, template, of.buckets, of.total)
        self._lines[family.name].append(text)

    def text(self) -> Iterator[str]:
        for family in FAMILIES:
            lines = self._lines[family.name]
            if lines:
                yield _head(family.name, family.kind, family.description, self._is_open_metrics)
                yield from lines


def _head(name: str, kind: str, description: str, is_open_metrics: bool) -> str:
    if is_open_metrics and kind == COUNTER:
        name = name.removesuffix("_total")
    description = description.replace("\\", r"\\").replace("\n", r"\n")
    if is_open_metrics:
        description = description.replace('"', r"\"")
    return f"# HELP {name} {description}\n# TYPE {name} {kind}\n"


def _histogram(name: str, labels: str, template: str, buckets: Sequence[int], total: float) -> str:
    """Return the lines of a histogram. By one template: it has more than 20, and each costs."""
    comma = "," if labels else ""
    begin = f"{name}_bucket{{{labels}{comma}".replace("%", "%%")
    lines = template.replace(_BEGIN, begin) % tuple(accumulate(buckets))
    return f"{lines}{name}_sum{{{labels}}} {total}\n{name}_count{{{labels}}} {sum(buckets)}\n"


def _with_exemplars(histogram: str, exemplars: Sequence[Exemplar | None]) -> str:
    """Return the lines of a histogram, those of its buckets with their exemplars."""
    lines = histogram.split("\n")  # a label may have other line ends
    for number, each in enumerate(exemplars):
        if each is not None:
            lines[number] += f' # {{trace_id="{each.trace_id}"}} {each.value_ms} {each.at_s:.3f}'
    return "\n".join(lines)


_BEGIN = "\0"


def _template(bounds: Sequence[float]) -> str:
    """Return the lines of the buckets, with places for their beginnings and counts."""
    texts = [*(str(float(each)) for each in bounds), "+Inf"]
    return "".join(f'{_BEGIN}le="{each}"}} %d\n' for each in texts)


# The times of Ray's metrics are in ms, those of ours in seconds, as Prometheus wants them.
_MS = _template(LATENCY_BUCKETS_MS)
_S = _template([each / 1e3 for each in LATENCY_BUCKETS_MS])
_SIZE, _UTILIZATION = _template(BATCH_SIZE_BUCKETS), _template(UTILIZATION_BUCKETS)


def _labels(**labels: str) -> str:
    """Return labels as text, without the empty ones, which Prometheus takes for absent."""
    return ",".join(
        f'{name}="{encodable(value).translate(_ESCAPES)}"'
        for name, value in labels.items()
        if value
    )


def _add_application(lines: _Lines, name: str, application: ApplicationSnapshot) -> None:
    labels = _labels(application=name)
    if application.status in _APPLICATION_STATUS:
        number = _APPLICATION_STATUS.index(application.status)
        lines.add(labels, (f.APPLICATION_STATUS, number + 1))
    for deployment, each in application.deployments.items():
        _add_deployment(lines, name, deployment, each)
    # The ingress of an earlier version may have another name; these labels do not have it.
    _add_http(lines, name, summed_http(each.http for each in application.deployments.values()))


def _add_deployment(lines: _Lines, app: str, name: str, deployment: DeploymentSnapshot) -> None:
    labels = _labels(application=app, deployment=name)
    if deployment.status in _DEPLOYMENT_STATUS:
        status = _DEPLOYMENT_STATUS.index(deployment.status) + 1
        lines.add(labels, (f.DEPLOYMENT_STATUS, status))
    lines.add(labels, *f.samples_of(f.DEPLOYMENT, deployment))
    for http in deployment.http:
        if http.status >= 400:
            error = _http_labels(app, http, "error_code", deployment=name)
            lines.add(error, (f.DEPLOYMENT_HTTP_ERRORS, http.latency.count))
    for replica, counts in deployment.counts().items():
        _add_counts(lines, _labels(application=app, deployment=name, replica=replica), counts)
    _add_gauges(lines, app, name, deployment.replicas)
    for key, queued in deployment.keys.items():
        lines.add(_and(labels, key=key), (f.QUEUED_BY_KEY, queued))
    if (jobs := deployment.jobs) is not None:
        with_queue = _and(labels, queue=jobs.queue)
        lines.add(with_queue, (f.JOBS_OLDEST, jobs.oldest_s))
        for state in ("waiting", "retrying", "running", "dead", "unreadable"):
            lines.add(_and(with_queue, state=state), (f.JOBS, getattr(jobs, state)))
        for state, number in jobs.ended.items():
            lines.add(_and(with_queue, state=state), (f.JOBS_ENDED, number))


def _add_http(lines: _Lines, app: str, counts: list[HTTPCount]) -> None:
    for each in counts:
        count, labels = each.latency.count, _http_labels(app, each, "status_code")
        lines.add(labels, (f.HTTP_REQUESTS, count), (f.HTTP_LATENCY, each.latency))
        if each.status >= 400:
            lines.add(_http_labels(app, each, "error_code"), (f.HTTP_ERRORS, count))


def _http_labels(app: str, each: HTTPCount, status: str, **more: str) -> str:
    labels = {"application": app, "route": each.route, "method": each.method}
    return _labels(**labels, **{status: str(each.status)}, **more)


def _add_counts(lines: _Lines, labels: str, counts: ReplicaCounts) -> None:
    """Add the counters of one replica id; with `--workers`, of that id in all workers."""
    lines.add(labels, (f.STARTS, counts.starts))
    for route, latency in counts.routes.items():
        lines.add(_and(labels, route=route), *f.samples_of(f.ROUTE, latency))
    for route, types in counts.errors.items():
        for name, count in types.items():
            lines.add(_and(labels, route=route, exception_type=name), (f.DEPLOYMENT_ERRORS, count))
    for method, latency in counts.stalls.items():
        lines.add(_and(labels, method=method), (f.STALLS, latency))
    for lane, latency in counts.thread_waits.items():
        lines.add(_and(labels, lane=lane), (f.THREAD_WAIT, latency))
    _add_batches(lines, labels, counts.batches)
    if counts.model_gets:
        loads = counts.model_times.get(LOAD, Latency())
        unloads = counts.model_times.get(UNLOAD, Latency())
        lines.add(
            labels,
            (f.MODEL_GETS, counts.model_gets),
            (f.MODEL_LOADS, loads.count),
            (f.MODEL_UNLOADS, unloads.count),
            (f.MODEL_LOAD_TIME, loads),
            (f.MODEL_UNLOAD_TIME, unloads),
        )


def _add_batches(lines: _Lines, labels: str, batches: Mapping[str, BatchCount]) -> None:
    # As in Ray: the name without that of its class. Two classes may have one of that name.
    summed: dict[str, BatchCount] = {}
    for function, batch in batches.items():
        summed.setdefault(_short(function), BatchCount()).merge(batch)
    for name, batch in summed.items():
        with_function = _and(labels, function_name=name)
        lines.add(with_function, *f.samples_of(f.BATCH, batch))
        if batch.chosen is not None:
            lines.add(with_function, (f.CHOSEN_SIZE, batch.chosen.size))
            lines.add(with_function, (f.CHOSEN_WAIT, batch.chosen.wait_s))
        lines.add_distribution(f.BATCH_SIZE, with_function, _SIZE, batch.sizes)
        lines.add_distribution(f.BATCH_UTILIZATION, with_function, _UTILIZATION, batch.utilizations)


def _short(function: str) -> str:
    return function.rpartition(".")[2]


def _and(labels: str, **more: str) -> str:
    added = _labels(**more)
    return f"{labels},{added}" if added else labels


def _add_gauges(
    lines: _Lines, app: str, deployment: str, replicas: Sequence[ReplicaSnapshot]
) -> None:
    """Add the gauges of replicas; those of one id in several workers are summed."""
    by_id: dict[str, list[ReplicaSnapshot]] = {}
    for replica in replicas:
        if replica.state in _RUNS:
            by_id.setdefault(replica.replica_id, []).append(replica)
    for name, ones in by_id.items():
        labels = _labels(application=app, deployment=deployment, replica=name)
        lines.add(
            labels,
            *f.summed_samples(f.REPLICA, ones),
            (f.HEALTHY, int(not any(each.unhealthy_reason for each in ones))),
        )
        if any(each.models for each in ones):
            lines.add(labels, (f.MODELS, sum(len(each.models) for each in ones)))
            models = {encodable(model)[:_MOST_OF_ID] for each in ones for model in each.models}
            for model in sorted(models)[:_MOST_MODELS]:
                lines.add(_and(labels, model_id=model), (f.MODEL_IDS, 1))
        for function, waiting in _queues(ones).items():
            lines.add(_and(labels, function_name=function), (f.BATCH_QUEUE, waiting))
        for lane in ones[0].lanes:
            loads = [each.lanes[lane] for each in ones if lane in each.lanes]
            with_lane = _and(labels, lane=lane)
            lines.add(with_lane, (f.LANE_LIMIT, sum(each.limit for each in loads)))
            for state in ("ongoing", "queued"):
                calls = sum(getattr(each, state) for each in loads)
                lines.add(_and(with_lane, state=state), (f.LANE_CALLS, calls))


def _queues(ones: Sequence[ReplicaSnapshot]) -> dict[str, int]:
    """Return the calls that wait for their batch; 0 for a function that has had one."""
    found = {_short(function): 0 for each in ones for function in each.counts.batches}
    for each in ones:
        for function, waiting in each.batch_queues.items():
            found[_short(function)] = found.get(_short(function), 0) + waiting
    return found


def _name_of(metric: UserMetric) -> str:
    return f"ray_{metric.name}{'_total' if metric.kind == COUNTER else ''}"


def _user_metric(group: list[UserMetric], *, is_open_metrics: bool) -> Iterator[str]:
    """Yield the lines of a user's metric, spelled as Ray spells it.

    `group` has the metrics of its name, whose tags or boundaries differ. Prometheus would drop the
    second of two series with the same labels, or the whole text.
    """
    name, kind = _name_of(group[0]), group[0].kind
    yield _head(name, kind, group[0].description, is_open_metrics)
    shown: set[frozenset[tuple[str, str]]] = set()
    for metric in group:
        template = _template(metric.boundaries)
        for each in metric.series:
            named = dict(zip(metric.label_names, each.labels, strict=True))
            key = frozenset(item for item in named.items() if item[1])
            if key in shown:
                continue
            shown.add(key)
            labels = _labels(**named)
            yield (
                _histogram(name, labels, template, each.buckets, each.value)
                if kind == HISTOGRAM
                else f"{name}{{{labels}}} {_number(each.value)}\n"
            )


def _number(value: float) -> str:
    if isfinite(value):
        return str(value)
    return "NaN" if value != value else ("+Inf" if value > 0 else "-Inf")


OTHER = "other"  # no template: those begin with a slash


@dataclass(eq=False, slots=True)
class RouteLimit:
    """The routes that are named: the busiest `most` of each application; `None` for all of them.

    All others are one, `other`. A route keeps the name that it got when it was first seen, its own
    or `other`: no counter decreases.

    Thread-safe: two scrapes may meet.
    """

    most: int | None
    # By application: the name that each route has got, its own or `OTHER`.
    _names: dict[str, dict[str, str]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def limited(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the names that its routes have got."""
        if self.most is None:
            return snapshot
        applications = {}
        for name, application in snapshot.applications.items():
            with self._lock:
                names = self._names.setdefault(name, {"": ""})
                _name_new(names, _requests(application), self.most)
            deployments = {
                each: _renamed(deployment, names, self.most)
                for each, deployment in application.deployments.items()
            }
            applications[name] = replace(application, deployments=deployments)
        return replace(snapshot, applications=applications)


def _requests(application: ApplicationSnapshot) -> Counter[str]:
    """Return the requests of each route, as often as deployments have served them."""
    found: Counter[str] = Counter()
    for deployment in application.deployments.values():
        for http in deployment.http:
            found[http.route] += http.latency.count
        running = (each.counts for each in deployment.replicas)
        for counts in (*deployment.ended.values(), *running):
            for route, latency in counts.routes.items():
                found[route] += latency.count
            found.update(dict.fromkeys(counts.errors, 0))
    return found


def _name_new(names: dict[str, str], requests: Counter[str], most: int) -> None:
    named = sum(name != OTHER for route, name in names.items() if route)
    for route, _ in requests.most_common():
        if route not in names:
            names[route] = route if named < most else OTHER
            named += named < most


def _renamed(
    deployment: DeploymentSnapshot, names: dict[str, str], most_keys: int
) -> DeploymentSnapshot:
    http = [HTTPCount(names[e.route], e.method, e.status, e.latency) for e in deployment.http]
    keys = Counter(deployment.keys)
    named = Counter(dict(keys.most_common(most_keys)))
    return replace(
        deployment,
        http=summed_http([http]),
        keys=named + Counter({OTHER: keys.total() - named.total()}),
        replicas=[replace(e, counts=e.counts.renamed(names)) for e in deployment.replicas],
        ended={name: each.renamed(names) for name, each in deployment.ended.items()},
    )
