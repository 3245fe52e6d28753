"""What requests wait for before they run, and how what overlaps is laid out side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple, TypeVar

from ingress.timeline.recorder import Journey, Timeline

T = TypeVar("T")


class WaitKind(StrEnum):
    """What a request waits for."""

    QUEUE = "queue"
    """A slot of a replica: `max_ongoing_requests` of each are taken."""
    LOOP = "loop"
    """It has a slot, and its replica's event loop has not come to it."""
    THREAD = "thread"
    """A worker thread, for a `def`."""


class Wait(NamedTuple):
    kind: WaitKind
    began_at: float
    ended_at: float


def waits_of(timeline: Timeline) -> dict[Journey, list[Wait]]:
    """Return the waits of each request, in order; none of them ends after it."""
    found: dict[Journey, list[Wait]] = defaultdict(list)
    for journey in timeline.journeys:
        slot_at = journey.slot_at or journey.ended_at
        if journey.was_queued:
            found[journey].append(Wait(WaitKind.QUEUE, journey.arrived_at, slot_at))
        began_at = journey.began_at or journey.ended_at
        if began_at > slot_at:
            found[journey].append(Wait(WaitKind.LOOP, slot_at, began_at))
    for run in timeline.runs:
        # What it started, and did not wait for, may go on behind it.
        ended_at = min(run.began_at, run.journey.ended_at)
        if run.asked_at and ended_at > run.asked_at:
            found[run.journey].append(Wait(WaitKind.THREAD, run.asked_at, ended_at))
    return {
        journey: sorted(each, key=lambda wait: wait.began_at) for journey, each in found.items()
    }


def rows(items: Iterable[T], extent: Callable[[T], tuple[float, float]]) -> list[list[T]]:
    """Divide what has a beginning and an end among as few rows as hold it without an overlap."""
    divided: list[list[T]] = []
    for item in sorted(items, key=lambda each: extent(each)[0]):
        begin = extent(item)[0]
        row = next((each for each in divided if extent(each[-1])[1] <= begin), None)
        if row is None:
            row = []
            divided.append(row)
        row.append(item)
    return divided
