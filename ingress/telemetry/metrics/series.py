"""The series that the metrics of user code count in.

    _definitions   the series of this process, by the name of the metric
    _told          the metrics that child processes have sent, each the last ones
    _ended         the counters of replicas that have ended, of this process or of a child

All three are guarded by `_lock`. The series of an ended replica stay, as `snapshot.keep` keeps its
other counters, and do not count as one of the `MAX_SERIES` any more.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from ingress.context import ReplicaRuntime
from ingress.core.base.snapshot import MAX_ENDED, UserMetric, UserSeries, merged_metrics

logger = logging.getLogger("ingress")

MAX_SERIES = 1000  # of a metric in a process; a label with a value for each user has more
MAX_SOURCES = 1000  # replicas that have ended, of all deployments
OTHER = "other"
OF_REPLICA = ("application", "deployment", "replica")


@dataclass(eq=False, slots=True)
class Definition:
    """A metric of a process, which all objects of its name share. Guarded by `lock`."""

    metric: UserMetric
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


Source = tuple[str, str, str, int]
"""A replica: its application, its deployment, its own name, and the process of its code."""

lock = threading.Lock()
_definitions: dict[str, Definition] = {}
_told: dict[Source, list[UserMetric]] = {}
_ended: dict[Source, list[UserMetric]] = {}


def defined(made: object, metric: UserMetric) -> Definition:
    """Return the definition of a new object: that of its name, if there is one."""
    with lock:
        there = _definitions.get(metric.name)
        if there is not None and replace(there.metric, description="") != replace(
            metric, description=""
        ):
            if there.objects:
                count = len(OF_REPLICA)
                first, second = there.metric.label_names[count:], metric.label_names[count:]
                raise ValueError(
                    f"metric {metric.name!r} is a {there.metric.kind} with the tags {first}, "
                    f"and cannot be a {metric.kind} with the tags {second}; give one of them "
                    "another name"
                )
            there = None  # of code that has ended: the application was replaced
        if there is None:
            _make_room_for(metric)
            there = _definitions[metric.name] = Definition(metric)
        there.objects.add(made)
        return there


def _make_room_for(metric: UserMetric) -> None:
    """Refuse a metric that would show a name of another one. Ended code has no say."""
    names = metric.shown_names()
    for each in list(_definitions.values()):
        other = each.metric
        if other.name == metric.name or names.isdisjoint(other.shown_names()):
            continue
        if each.objects:
            both = ", ".join(sorted(f"ray_{name}" for name in names & other.shown_names()))
            raise ValueError(
                f"the {metric.kind} {metric.name!r} and the {other.kind} {other.name!r} would both "
                f"be shown as {both}; give one of them another name"
            )
        del _definitions[other.name]


def source_of(replica: ReplicaRuntime, pid: int) -> Source:
    """Return the key of a replica whose code runs in this process."""
    return replica.app_name, replica.deployment, replica.replica_tag, pid


def take(source: Source, metrics: list[UserMetric]) -> None:
    """Take the metrics of a child process in the place of those that it has sent before."""
    with lock:
        # Race with the end of its replica: its last words may come after `replica_ended`.
        if source in _ended:
            _ended[source] = _counters(metrics)
        else:
            _told[source] = metrics


def replica_ended(source: Source) -> None:
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
        others = [each for each in (*_ended.values(), *_told.values()) if each]
    return merged_metrics([own, *others]) if others else own
