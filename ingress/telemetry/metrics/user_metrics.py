"""The metrics of user code."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from math import inf
from os.path import basename
from types import FrameType
from typing import Any, Self

from ingress.context import REPLICA
from ingress.core.base.counters import UserMetric, encodable
from ingress.core.base.libraries import is_library
from ingress.request_context import get_request_context
from ingress.telemetry.metrics.series import OF_REPLICA, defined, lock

ROUTE = "route"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_TAG = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)

_make_theirs: Callable[..., object] | None = None


def use_theirs(make: Callable[..., object]) -> None:
    """Have `make(kind, **arguments)` make the metrics from now on: this is a process of Ray."""
    global _make_theirs
    _make_theirs = make


class _Metric:
    """A metric of user code. Thread-safe."""

    kind = ""
    _boundaries: Sequence[float] = ()

    def __init__(
        self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None
    ) -> None:
        self._name, self._description = name, description
        self._tag_keys = _checked_tags(name, tag_keys, self.kind)
        self._default_tags: dict[str, str] = {}
        replica = REPLICA.get(None)
        # As in Ray: those of the replica in whose code it is made.
        self._of_replica = (
            ("", "", "")
            if replica is None
            else (replica.app_name, replica.deployment, replica.replica_tag)
        )
        self._theirs: Any = None
        self._definition = defined(self, UserMetric(
            name, self.kind, description, [*OF_REPLICA, *self._tag_keys],
            [*self._boundaries], place=_place(),
        ), self._of_replica[1])  # fmt: skip

    def set_default_tags(self, default_tags: dict[str, str]) -> Self:
        """Set tags that each record has, unless it gives others. Returns the metric itself."""
        self._check(default_tags)
        self._default_tags = dict(default_tags)
        return self

    @property
    def info(self) -> dict[str, object]:
        """The name, description, tag keys and default tags."""
        return {
            "name": self._name,
            "description": self._description,
            "tag_keys": self._tag_keys,
            "default_tags": self._default_tags,
        }

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._name, self._description, self._tag_keys)

    def _check(self, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            if key not in self._tag_keys:
                raise ValueError(
                    f"Unrecognized tag key {key!r} of metric {self._name!r}; its tag_keys are "
                    f"{self._tag_keys}"
                )
            if not isinstance(value, str):
                raise TypeError(f"Tag values must be str, got {key}={value!r}.")

    def _labels(self, tags: Mapping[str, str] | None) -> tuple[str, ...]:
        if tags:
            self._check(tags)
        final = {**self._default_tags, **(tags or {})}
        if ROUTE in self._tag_keys and ROUTE not in final:
            final[ROUTE] = get_request_context().route
        if missing := [key for key in self._tag_keys if key not in final]:
            raise ValueError(
                f"Missing value for tag key(s) of metric {self._name!r}: {', '.join(missing)}."
            )
        return (*self._of_replica, *[encodable(final[key]) for key in self._tag_keys])

    def _rays(self) -> Any:
        """Return Ray's metric in the place of this one; `None` in a process that is not Ray's."""
        if self._theirs is None and _make_theirs is not None:
            arguments: dict[str, object] = (
                {"boundaries": self._boundaries} if self._boundaries else {}
            )
            self._theirs = _make_theirs(
                self.kind, self._name, description=self._description, tag_keys=self._tag_keys,
                **arguments,
            )  # fmt: skip
        return self._theirs

    def _tags(self, labels: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(self._tag_keys, labels[len(OF_REPLICA) :], strict=True))


class Counter(_Metric):
    """A count that only grows.

    The tags of the replica in whose code it is made come by themselves, and the tag "route" if
    `tag_keys` has it. Raises `ValueError` for an invalid name, for a reserved tag, and for a name
    that another metric of this process has with other tags.
    """

    kind = "counter"

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        """Add a value, which must be more than 0."""
        _check_number(value)
        if value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        labels = self._labels(tags)
        if (theirs := self._rays()) is not None:
            theirs.inc(value, tags=self._tags(labels))
            return
        with lock:
            self._definition.one(labels).value += value


class Gauge(_Metric):
    """A value that goes up and down: the last one that was set. Tags and errors as of `Counter`."""

    kind = "gauge"

    def set(self, value: float | None, tags: dict[str, str] | None = None) -> None:
        """Set the value; `None` leaves it as it is."""
        if value is None:
            return
        _check_number(value)
        labels = self._labels(tags)
        if (theirs := self._rays()) is not None:
            theirs.set(value, tags=self._tags(labels))
            return
        with lock:
            self._definition.one(labels).value = value


class Histogram(_Metric):
    """The distribution of values over buckets. Tags and errors as of `Counter`.

    `boundaries` are the upper bounds of the buckets: positive, in ascending order. A last bucket
    without a bound is always there.
    """

    kind = "histogram"

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: list[float] | None = None,
        tag_keys: tuple[str, ...] | None = None,
    ) -> None:
        if not boundaries:
            raise ValueError(
                "boundaries argument should be provided when using the Histogram class. e.g., "
                'Histogram("name", boundaries=[1.0, 2.0])'
            )
        finite = [float(each) for each in boundaries if each != inf]
        if (
            not finite
            or not all(each > 0 for each in finite)  # a NaN is not
            or sorted({*boundaries}) != list(boundaries)
        ):
            raise ValueError(
                "Invalid `boundaries` argument: positive numbers in ascending order are expected, "
                f"got {boundaries}."
            )
        self.boundaries, self._boundaries = boundaries, finite
        super().__init__(name, description, tag_keys)

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        """Count a value in its bucket."""
        _check_number(value)
        labels = self._labels(tags)
        if (theirs := self._rays()) is not None:
            theirs.observe(value, tags=self._tags(labels))
            return
        with lock:
            one = self._definition.one(labels)
            one.value += value
            one.buckets[bisect_left(self._boundaries, value)] += 1

    @property
    def info(self) -> dict[str, object]:
        """The name, description, tag keys, default tags and boundaries."""
        return {**super().info, "boundaries": self.boundaries}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._name, self._description, self.boundaries, self._tag_keys)


def _checked_tags(name: str, keys: tuple[str, ...] | None, kind: str) -> tuple[str, ...]:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"Invalid metric name: {name!r}. Metric names can only contain letters, numbers, _ and "
            ":, and cannot start with a number."
        )
    if name.startswith("serve_"):
        raise ValueError(f"Metric names that start with serve_ are Serve's own, got {name!r}.")
    keys = keys or ()
    if not isinstance(keys, tuple):
        raise TypeError(f"tag_keys should be a tuple type, got: {type(keys)}")
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"Tag keys must be str, got {type(key)}.")
        if key in OF_REPLICA:
            raise ValueError(f"'{key}' tag is reserved for Ray Serve metrics")
        if not _TAG.fullmatch(key) or (kind == "histogram" and key == "le"):
            raise ValueError(
                f"Invalid tag key {key!r} of metric {name!r}: letters, numbers and _ are expected, "
                "and neither a number nor __ at the start; `le` is a histogram's own."
            )
    if len({*keys}) < len(keys):
        raise ValueError(f"tag_keys of metric {name!r} must be different, got {keys}.")
    return keys


def check(metric: UserMetric) -> None:
    """Raise `ValueError` for a metric that another process has sent, and no user code can make."""
    keys, bounds = metric.label_names, metric.boundaries
    count = len(OF_REPLICA)
    _checked_tags(metric.name, tuple(keys[count:]), metric.kind)
    buckets = len(bounds) + 1 if metric.kind == Histogram.kind else 0
    if (
        metric.kind not in (Counter.kind, Gauge.kind, Histogram.kind)
        or keys[:count] != [*OF_REPLICA]
        or (bounds and not buckets)
        or any(len(e.labels) != len(keys) or len(e.buckets) != buckets for e in metric.series)
    ):
        raise ValueError(f"metric {metric.name!r} is no {metric.kind} with the tags {keys}")


def _place() -> str:
    """Return the line of user code that this is called for, "" if there is none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _check_number(value: object) -> None:
    if not isinstance(value, int | float):
        raise TypeError(f"value must be int or float, got {type(value)}.")
