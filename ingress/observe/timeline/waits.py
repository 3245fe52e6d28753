"""The waits of requests before they run, and the layout of overlapping spans in rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple, TypeVar

from ingress.observe.timeline.recorder import Journey, Timeline

T = TypeVar("T")


class WaitKind(StrEnum):
    """The reason why a request waits."""

    QUEUE = "queue"
    """For a slot: each replica has `max_ongoing_requests` requests."""
    LOOP = "loop"
    """For its replica's event loop: it has a slot, and has not begun."""
    THREAD = "thread"
    """For a worker thread, to run a `def`."""


class Span(NamedTuple):
    """A part of a request, and of its bar. `kind` is a key of `words.LEGEND`, such as a wait's."""

    kind: str
    began_at: float
    ended_at: float


def waits_of(timeline: Timeline) -> dict[Journey, list[Span]]:
    """Return the waits of each request, in order. No wait ends after its request."""
    found: dict[Journey, list[Span]] = defaultdict(list)
    for journey in timeline.journeys:
        slot_at = journey.slot_at or journey.ended_at
        if journey.was_queued:
            found[journey].append(Span(WaitKind.QUEUE, journey.arrived_at, slot_at))
        began_at = journey.began_at or journey.ended_at
        if began_at > slot_at:
            found[journey].append(Span(WaitKind.LOOP, slot_at, began_at))
    for run in timeline.runs:
        # Work that a request started without awaiting it may go on after its end.
        ended_at = min(run.began_at, run.journey.ended_at)
        if run.asked_at and ended_at > run.asked_at:
            found[run.journey].append(Span(WaitKind.THREAD, run.asked_at, ended_at))
    return {
        journey: sorted(each, key=lambda wait: wait.began_at) for journey, each in found.items()
    }


def rows(items: Iterable[T], extent: Callable[[T], tuple[float, float]]) -> list[list[T]]:
    """Divide items among as few rows as possible, so that none overlap in a row."""
    divided: list[list[T]] = []
    for item in sorted(items, key=lambda each: extent(each)[0]):
        begin = extent(item)[0]
        row = next((each for each in divided if extent(each[-1])[1] <= begin), None)
        if row is None:
            divided.append([item])
        else:
            row.append(item)
    return divided
