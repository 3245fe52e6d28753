"""The series that the metrics of user code count in.

    _definitions   the series of this process, by the name of the metric
    _told          the metrics that child processes have sent, each the last ones
    _ended         the counters of replicas that have ended, of this process or of a child
    _declared      the declarations in child processes, by each name that `/metrics` shows

All are guarded by `lock`. The series of an ended replica stay, as `counters.keep` keeps its
other counters, and do not count as one of the `MAX_SERIES` any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from ingress.context import ReplicaRuntime
from ingress.core.base.counters import MAX_ENDED, UserMetric, UserSeries, merged_metrics

logger = logging.getLogger("ingress")

MAX_SERIES = 1000  # of a metric in a process; a label with a value for each user has more
MAX_SOURCES = 1000  # replicas that have ended, of all deployments
OTHER = "other"
OF_REPLICA = ("application", "deployment", "replica")


@dataclass(eq=False, slots=True)
class Definition:
    """A metric of a process, which all objects of its name share. Guarded by `lock`.

    `deployment` is that of the first object, "" outside of a replica.
    """

    metric: UserMetric
    deployment: str = ""
    series: dict[tuple[str, ...], UserSeries] = field(default_factory=dict)
    objects: WeakSet[object] = field(default_factory=WeakSet)
    _has_warned: bool = False

    def one(self, labels: tuple[str, ...]) -> UserSeries:
        """Return the series of these labels; a shared one if there are too many."""
        if (found := self.series.get(labels)) is None and len(self.series) >= MAX_SERIES:
            self._drop_ended()
        if found is None and len(self.series) >= MAX_SERIES:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "metric %s has %d series; further values of its tags are counted as %r: a tag "
                    "must have few values, not one for each user or request",
                    self.metric.name,
                    MAX_SERIES,
                    OTHER,
                )
            of_replica, tags = labels[: len(OF_REPLICA)], labels[len(OF_REPLICA) :]
            labels = (*of_replica, *[OTHER] * len(tags))
            found = self.series.get(labels)
        if found is None:
            buckets = [0] * (len(self.metric.boundaries) + 1) if self.metric.boundaries else []
            found = self.series[labels] = UserSeries(list(labels), buckets=buckets)
        return found

    def counted(self, replica: tuple[str, ...]) -> UserMetric:
        """Remove the series of a replica that has ended, and return them.

        A gauge's stay until there are too many: a replica of the next version may have its labels.
        """
        labels = [each for each in self.series if each[: len(OF_REPLICA)] == replica]
        gone = [] if self.metric.kind == "gauge" else [self.series.pop(each) for each in labels]
        return replace(self.metric, series=gone)

    def _drop_ended(self) -> None:
        if self.metric.kind == "gauge" and not self._has_warned:
            ended = {each[: len(OF_REPLICA)] for each in _ended}
            for labels in [each for each in self.series if each[: len(OF_REPLICA)] in ended]:
                del self.series[labels]


MetricSource = tuple[str, str, str, int]
"""A replica: its application, its deployment, its own name, and the process of its code."""

lock = threading.Lock()
_definitions: dict[str, Definition] = {}
_told: dict[MetricSource, list[UserMetric]] = {}
_ended: dict[MetricSource, list[UserMetric]] = {}
_declared: dict[str, dict[object, tuple[MetricSource, Definition]]] = {}
_warned: set[str] = set()


def defined(made: object, metric: UserMetric, deployment: str) -> Definition:
    """Return the definition of a new object: that of its name, if there is one.

    Raises `ValueError` if code of this process that still runs declares it otherwise.
    """
    warnings: list[str] = []
    with lock:
        there = _definitions.get(metric.name)
        if there is not None and there.metric.signature() != metric.signature():
            if there.objects:
                raise ValueError(_difference(there, Definition(metric, deployment)))
            there = None  # of code that has ended: the application was replaced
        if there is None:
            there = Definition(metric, deployment)
            _make_room_for(there)
            _definitions[metric.name] = there
            warnings = _differences(there)
        there.objects.add(made)
    _warn(warnings)
    return there


def _make_room_for(new: Definition) -> None:
    """Refuse a metric that would show a name of another one. Ended code has no say."""
    for each in list(_definitions.values()):
        other = each.metric
        if other.name == new.metric.name or new.metric.shown_names().isdisjoint(
            other.shown_names()
        ):
            continue
        if each.objects:
            raise ValueError(_difference(each, new))
        del _definitions[other.name]


def _differences(new: Definition, source: MetricSource | None = None) -> list[str]:
    """Return the words for each metric of another process that shares a name and differs.

    `source` is the replica of the child that has sent the new one, `None` for one of this process.
    The caller holds `lock`.
    """
    others = [] if source is None else [each for each in _definitions.values() if each.objects]
    for name in new.metric.shown_names():
        declared = _declared.setdefault(name, {})
        for signature, (origin, each) in list(declared.items()):
            if origin not in _told:
                del declared[signature]  # its code has ended
            elif origin != source:
                others.append(each)
        if source is not None:
            declared[new.metric.signature()] = source, new
    found = []
    for each in others:
        one, other = sorted((each, new), key=lambda each: (each.deployment, str(each.metric)))
        shared = one.metric.shown_names() & other.metric.shown_names()
        if shared and one.metric.signature() != other.metric.signature():
            is_one = (one.metric.name, one.metric.kind) == (other.metric.name, other.metric.kind)
            shown = "both, but only one of two series with the same labels"
            shown = shown if is_one else "only one of them"
            found.append(f"{_difference(one, other)}. /metrics shows {shown}")
    return found


def _warn(texts: Iterable[str]) -> None:
    """Log each text once. Without the lock: a handler of log records may count them."""
    for text in texts:
        if text not in _warned and len(_warned) < MAX_SERIES:
            _warned.add(text)
            logger.warning("%s", text)


def _difference(one: Definition, other: Definition) -> str:
    """Return the words for two metrics that share a name: both values, both places, the remedy."""
    first, second = one.metric, other.metric
    remedy = "give one of them another name"
    if first.name != second.name:
        both = ", ".join(sorted(f"ray_{e}" for e in first.shown_names() & second.shown_names()))
        names = [f"the {each.kind} {each.name!r}" for each in (first, second)]
        ways = [name + _at(each) for name, each in zip(names, (one, other), strict=True)]
        return f"{' and '.join(ways)} would both be shown as {both}; {remedy}"
    differ = ["tags"] if first.label_names != second.label_names else []
    if first.kind == second.kind:
        differ += ["boundaries"] if first.boundaries != second.boundaries else []
        remedy = f"give both the same {' and '.join(differ)}, or one of them another name"
    ways = [_described(each, differ) for each in (one, other)]
    return f"metric {first.name!r} is declared in two ways: {', and '.join(ways)}; {remedy}"


def _described(definition: Definition, differ: Sequence[str]) -> str:
    metric = definition.metric
    values = {"tags": metric.label_names[len(OF_REPLICA) :], "boundaries": metric.boundaries}
    given = " and ".join(f"the {each} {values[each]}" for each in differ)
    return f"as a {metric.kind}{given and f' with {given}'}{_at(definition)}"


def _at(definition: Definition) -> str:
    """Return the words for the place of a declaration."""
    place, deployment = definition.metric.place, definition.deployment
    return (f" in deployment {deployment!r}" if deployment else "") + (place and f" at {place}")


def source_of(replica: ReplicaRuntime, pid: int) -> MetricSource:
    """Return the key of a replica whose code runs in this process."""
    return replica.app_name, replica.deployment, replica.replica_tag, pid


def take(source: MetricSource, metrics: list[UserMetric]) -> None:
    """Take the metrics of a child process in the place of those that it has sent before."""
    warnings: list[str] = []
    with lock:
        # Race with the end of its replica: its last words may come after `replica_ended`.
        if source in _ended:
            _ended[source] = _counters(metrics)
        else:
            known = {each.signature() for each in _told.get(source, ())}
            _told[source] = metrics
            for each in metrics:
                if each.signature() not in known:
                    new = Definition(replace(each, series=[]), source[1])
                    warnings += _differences(new, source)
    _warn(warnings)


def replica_ended(source: MetricSource) -> None:
    """Keep the counters of a replica that has ended, of the last `MAX_ENDED` of its deployment."""
    with lock:
        counted = [each.counted(source[:3]) for each in _definitions.values()]
        own = [each for each in counted if each.series]
        theirs = _counters(_told.pop(source, []))
        _ended[source] = merged_metrics([_ended.pop(source, []), own, theirs])
        of_deployment = [each for each in _ended if each[:2] == source[:2]]
        for each in [*of_deployment[:-MAX_ENDED], *list(_ended)[:-MAX_SOURCES]]:
            _ended.pop(each, None)


def _counters(metrics: list[UserMetric]) -> list[UserMetric]:
    return [each for each in metrics if each.kind != "gauge"]


def collected() -> list[UserMetric]:
    """Return the metrics of this process and of its children, summed. Thread-safe."""
    with lock:
        own = [
            replace(each.metric, series=[
                replace(one, buckets=list(one.buckets)) for one in each.series.values()
            ])
            for each in _definitions.values()
            if each.series
        ]  # fmt: skip
        # The living first: of two series with the same labels, `/metrics` shows the first.
        others = [each for each in (*_told.values(), *_ended.values()) if each]
    return merged_metrics([own, *others]) if others else own
