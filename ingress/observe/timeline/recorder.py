"""The recorder of running requests.

    Journey    one request in one deployment: arrives, has a slot, begins, ends
    Run        a time span in which a thread ran for one request, without a break
    Timeline   a copy of the last journeys and runs, with the stalls of event loops meanwhile

All times are `time.monotonic()` seconds.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, time
from typing import NamedTuple, TypeVar

from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.telemetry.watchdog import WATCHDOG, Stall

T = TypeVar("T")
logger = logging.getLogger("ingress")

REQUESTS = 10_000
"""Number of ended requests that are kept."""

RUNS = 50_000
"""Number of runs that are kept."""

CHILDREN = 16
"""Number of ended child processes whose timelines are kept."""


@dataclass(eq=False, frozen=True, slots=True)
class Track:
    """One thread while it lives. A later thread may have the same ident or name."""

    name: str
    is_loop: bool


@dataclass(eq=False, slots=True)
class Journey:
    """One request in one deployment. A request that calls other deployments has several journeys.

    `kind` is "request", "call" if it came by a handle, or "batch". A time of 0.0 has not come yet.
    `was_queued` says that it waited for a slot. `began_at` is the time when its event loop began to
    run it. `ended_at` is the time when its slot was released, or when it was answered without a
    slot. `error` is the type of its exception, "" without one.
    """

    number: int
    kind: str
    name: str
    request_id: str
    deployment: str
    arrived_at: float
    replica: str = ""
    loop: Track | None = None
    was_queued: bool = False
    slot_at: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0
    error: str = ""


class Run(NamedTuple):
    """A time span in which a thread ran for a request.

    `asked_at` is the time when the wait for the thread began; 0.0 on an event loop.
    """

    journey: Journey
    track: Track
    asked_at: float
    began_at: float
    ended_at: float


class Standstill(NamedTuple):
    """A stall of a track's event loop, with its times."""

    track: Track
    began_at: float
    ended_at: float
    stall: Stall


@dataclass(frozen=True, slots=True)
class Timeline:
    """A copy of the records, which does not change.

    Journeys and runs without an end get the end `now`; such journeys are in `unfinished`. `pid` and
    `process` are the id and the name of the process that they ran in: `time.monotonic` is the same
    clock in all processes of a machine.
    """

    journeys: list[Journey]
    runs: list[Run]
    standstills: list[Standstill]
    tracks: list[Track]
    unfinished: frozenset[Journey]
    now: float
    pid: int = field(default_factory=os.getpid)
    process: str = ""

    @property
    def began_at(self) -> float:
        """Arrival time of the first request."""
        return min((each.arrived_at for each in self.journeys), default=self.now)

    @property
    def ended_at(self) -> float:
        """End time of the last request or run."""
        ends = [each.ended_at for each in self.journeys] + [run.ended_at for run in self.runs]
        return max(ends, default=self.now)


AskChild = Callable[[], Callable[[], Timeline]]
"""It begins to ask a child for its timeline, and returns a function that waits for it."""


class Recorder:
    """The records of requests. Thread-safe without a lock: its appends and pops are atomic."""

    __slots__ = (
        "_children", "_ended", "_left", "_mine", "_numbers", "_open", "_running", "_runs",
    )  # fmt: skip

    def __init__(self, requests: int = REQUESTS, runs: int = RUNS) -> None:
        self._numbers = count(1)
        self._mine = threading.local()
        self._open: dict[Call, Journey] = {}
        self._ended: deque[Journey] = deque(maxlen=requests)
        self._running: dict[Track, Run] = {}
        self._runs: deque[Run] = deque(maxlen=runs)
        self._children: dict[object, AskChild] = {}
        self._left: deque[Timeline] = deque(maxlen=CHILDREN)

    # One request.

    def arrive(self, call: Call, kind: str, name: str, deployment: str) -> Journey:
        """Record that a call asks for a slot, or that a batch begins."""
        request_id = call.metadata.request_id
        journey = Journey(next(self._numbers), kind, name, request_id, deployment, monotonic())
        self._open[call] = journey
        return journey

    def journey_of(self, call: Call | None) -> Journey | None:
        """Return the journey of a call, `None` if it has ended or is not recorded."""
        return None if call is None else self._open.get(call)

    def current(self) -> Journey | None:
        """Return the journey that the running code works for, if there is one."""
        return self.journey_of(CURRENT_CALL.get(None))

    def take_slot(self, call: Call) -> None:
        if (journey := self._open.get(call)) is not None:
            journey.slot_at = monotonic()

    def stand_in_queue(self, call: Call) -> None:
        """Record that a call has asked for a slot and was not refused."""
        if (journey := self._open.get(call)) is not None and not journey.slot_at:
            journey.was_queued = True

    def leave_queue(self, call: Call) -> None:
        """Record that a call has waited for the slot that it has now."""
        journey = self._open.get(call)
        if journey is not None:
            journey.was_queued = True

    def give_back(self, call: Call) -> None:
        """Record that a call releases its slot. It ends, unless it moves elsewhere unbegun."""
        if (journey := self._open.get(call)) is not None:
            if journey.began_at or call.settled:
                self.end(call)
            else:
                journey.slot_at = 0.0

    def answer(self, call: Call) -> None:
        """Record that a call is answered. It ends, unless it has a slot."""
        # Race with the router, which may give the call a slot at this moment: then its replica
        # releases the slot unused, and the journey ends there.
        if (journey := self._open.get(call)) is not None and not journey.slot_at:
            self.end(call)

    def end(self, call: Call) -> None:
        # Race of the slot's release with the answer: the thread that pops the journey ends it.
        if (journey := self._open.pop(call, None)) is not None:
            journey.ended_at = monotonic()
            if call.error is not None:
                journey.error = type(call.error).__name__
            self._ended.append(journey)

    # One thread.

    def track(self, *, is_loop: bool) -> Track:
        """Return the track of the current thread."""
        track: Track | None = getattr(self._mine, "track", None)
        if track is None:
            track = self._mine.track = Track(threading.current_thread().name, is_loop)
        return track

    def enter(self, journey: Journey, track: Track, asked_at: float = 0.0) -> Run:
        """Record that the current thread begins to run for a request, on its track."""
        run = self._running[track] = Run(journey, track, asked_at, monotonic(), 0.0)
        return run

    def leave(self, run: Run) -> None:
        """Record the end of a run."""
        # Race with `timeline`: it reads the running ones first, so that it misses none. A run that
        # it reads twice counts once.
        self._runs.append(run._replace(ended_at=monotonic()))
        self._running.pop(run.track, None)

    # Replicas in child processes, which have recorders of their own.

    def join(self, child: object, ask: AskChild) -> None:
        """Have `timelines` ask a child, too."""
        self._children[child] = ask

    def leave_for_good(self, child: object, timeline: Timeline | None) -> None:
        """Keep the last timeline of a child that ends; `None` if it could not tell it."""
        if timeline is not None:
            self._left.append(timeline)
        self._children.pop(child, None)

    def timelines(self) -> list[Timeline]:
        """Return the timeline of this process, and those of its children. It blocks.

        A child that does not answer in time is logged, and left out.
        """
        answers = []
        for child, ask in list(self._children.items()):
            try:
                answers.append((child, ask()))
            except RuntimeError:  # its loop has ended
                continue
        own = self.timeline()
        children: dict[tuple[int, str], Timeline] = {}
        for child, answer in answers:
            try:
                timeline = answer()
            except Exception as error:
                logger.warning("%r is missing in the trace: %r", child, error)
            else:
                children[timeline.pid, timeline.process] = timeline
        # Not earlier: a child that was asked may have left meanwhile, and is here then.
        children |= {(each.pid, each.process): each for each in _copied(self._left)}
        return [own, *children.values()]

    # All of it.

    def timeline(self) -> Timeline:
        """Return a copy of the records. May be called at any time, from any thread.

        A request that ends at this moment may be missing; the next copy has it.
        """
        running = list(self._running.values())
        opened = list(self._open.values())
        runs = _copied(self._runs)
        ended = dict.fromkeys([*_copied(self._ended), *opened])
        # Copies, because open journeys still change.
        journeys = {each: copy(each) for each in ended}
        now = monotonic()  # not earlier, so that no recorded time is later
        unfinished = [each for each in journeys.values() if not each.ended_at]
        for each in unfinished:
            each.ended_at = now
        known = {(run.track, run.began_at): run for run in [*running, *runs]}
        whole = [
            run._replace(journey=journeys[run.journey], ended_at=run.ended_at or now)
            for run in known.values()
            if run.journey in journeys  # else its journey was dropped
        ]
        whole.sort(key=lambda run: run.began_at)
        loops = (each.loop for each in journeys.values() if each.loop is not None)
        tracks = dict.fromkeys([*(run.track for run in whole), *loops])
        standstills = standstills_of([*tracks], whole, [*journeys.values()])
        tracks |= dict.fromkeys(each.track for each in standstills)
        in_order = sorted(journeys.values(), key=lambda each: each.arrived_at)
        return Timeline(
            in_order,
            whole,
            standstills,
            _sorted(tracks, in_order),
            frozenset(unfinished),
            now,
        )


def standstills_of(
    tracks: list[Track], runs: list[Run], journeys: list[Journey]
) -> list[Standstill]:
    """Return the watchdog's stalls while there were requests, on the tracks of their loops."""
    if not journeys:
        return []
    first_at = min(each.arrived_at for each in journeys)
    last_at = max(each.ended_at for each in journeys)
    # The watchdog has Unix times. The system clock was not set since, as a rule.
    offset_s = time() - monotonic()
    found = []
    for stall in WATCHDOG.own_stalls():
        began_at = stall.began_at_s - offset_s
        ended_at = began_at + stall.duration_ms / 1e3
        if ended_at < first_at or began_at > last_at:
            continue
        ran = {run.track for run in runs if run.began_at < ended_at and run.ended_at > began_at}
        named = loops_of(stall, tracks, journeys)
        # Applications may have deployments of the same name: take the one that ran then.
        if (track := next((each for each in named if each in ran), None)) is None:
            track = named[0] if named else Track(stall.loop, is_loop=True)
            tracks.append(track)
        found.append(Standstill(track, began_at, ended_at, stall))
    return found


def _copied(items: deque[T]) -> list[T]:
    while True:
        try:
            return list(items)
        except RuntimeError:  # another thread has appended meanwhile
            continue


def loops_of(stall: Stall, tracks: list[Track], journeys: list[Journey]) -> list[Track]:
    """Return the tracks that may belong to the stalled loop.

    They are found by the name of its thread, which is in parentheses if it is not the replica's.
    The last stall of an application may be reported after its thread has ended, without the name.
    """
    found = re.search(r" \((.+)\)$", stall.loop)
    names = (found[1] if found else stall.loop, f"{stall.deployment}#{stall.replica}")
    named = [each for each in tracks if each.is_loop and each.name in names]
    ids = set(stall.request_ids)
    return named or [
        each.loop for each in journeys if each.loop is not None and each.request_id in ids
    ]


def _sorted(tracks: Iterable[Track], journeys: list[Journey]) -> list[Track]:
    """Return the tracks in the order in which requests came to their deployments."""
    seen = list(dict.fromkeys(each.deployment for each in journeys))
    rank = {name: number for number, name in enumerate(seen)}
    # Tracks without a deployment, such as the server's loop, come first.
    return sorted(
        tracks,
        key=lambda each: (rank.get(each.name.partition("#")[0], -1), _natural(each.name)),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts worker-10 behind worker-9, and a loop before its workers."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
