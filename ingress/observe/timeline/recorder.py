"""The recorder of requests: of all that an application serves, or of a server for some seconds.

    Journey    one request in one deployment: arrives, has a slot, begins, ends
    Run        a time span in which a thread ran for one request, without a break
    Timeline   a copy of the last journeys and runs, with the stalls of event loops meanwhile

`NOTABLE` tells it of each call that ends. `instrumentation` adds each run and each call that a
router refuses; `sampling` adds the runs that it sees. All times are `time.monotonic()` seconds.
"""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import count
from time import monotonic, time
from typing import NamedTuple, Self, TypeVar

from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.telemetry.logs import logger
from ingress.telemetry.notable import NOTABLE, Ended
from ingress.telemetry.watchdog import WATCHDOG, Stall

T = TypeVar("T")

REQUESTS = 10_000
"""Number of ended requests that are kept."""

RUNS = 50_000
"""Number of runs that are kept."""

CHILDREN = 16
"""Number of ended child processes whose timelines are kept."""

ASK_S = 20.0  # for the answer of a child, which imports this module first
QUEUED_S = 0.005  # from the making of a call to its slot: longer, and it was queued


class Track(NamedTuple):
    """One thread. A later thread with its name and ident goes on with its track."""

    name: str
    is_loop: bool
    ident: int = 0


def current_track(*, is_loop: bool) -> Track:
    return Track(threading.current_thread().name, is_loop, threading.get_ident())


@dataclass(eq=False, slots=True)
class Journey:
    """One request in one deployment. A request that calls other deployments has several journeys.

    `kind` is "request", "call" if it came by a handle, or "batch". A time of 0.0 has not come yet.
    `was_queued` says that it waited for a slot. `began_at` is the time when its event loop began to
    run it. `ended_at` is the time when its slot was released, or when it was answered before it
    began. `error` is the type of its exception, "" without one.
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

    def follow(self, call: Call) -> None:
        """Take over how far its call has come. Callable from any thread, any number of times."""
        self.slot_at, self.began_at = call.assigned_at, call.began_at
        if call.members is not None:  # a batch waits for no slot
            self.slot_at = self.began_at = self.arrived_at
        self.was_queued = self.was_queued or self.slot_at - self.arrived_at > QUEUED_S
        if call.runner is not None:
            self.replica = str(call.runner.replica_id)


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


class WaitKind(StrEnum):
    """The reason why a request waits."""

    QUEUE = "queue"
    """For a slot: each replica has `max_ongoing_requests` requests."""
    LOOP = "loop"
    """For its replica's event loop: it has a slot, and has not begun."""
    THREAD = "thread"
    """For a worker thread, to run a `def`."""


class Span(NamedTuple):
    """A part of a request, and of its bar. `kind` is a key of `picture.LEGEND`."""

    kind: str
    began_at: float
    ended_at: float


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


Ask = Callable[[], Callable[[], Timeline]]
"""It begins to ask a child for its timeline, and returns a function that waits for it."""


class Recorder:
    """The records of requests. Thread-safe without a lock: its appends and pops are atomic.

    It hears of each call that ends while it is open as a context manager.
    """

    __slots__ = ("_ended", "_numbers", "_open", "_running", "_runs", "children", "left")

    def __init__(self, requests: int | None = REQUESTS, runs: int | None = RUNS) -> None:
        self._numbers = count(1)
        self._open: dict[Call, Journey] = {}
        self._ended: deque[Journey] = deque(maxlen=requests)
        self._running: dict[Track, Run] = {}
        self._runs: deque[Run] = deque(maxlen=runs)
        self.children: dict[object, Ask] = {}
        self.left: deque[Timeline] = deque(maxlen=CHILDREN)

    def __enter__(self) -> Self:
        NOTABLE.listen(self.end)
        return self

    def __exit__(self, *_: object) -> None:
        NOTABLE.unlisten(self.end)

    def see(self, call: Call) -> Journey:
        if (journey := self._open.get(call)) is None:
            kind, name, metadata = "call", call.title(), call.metadata
            if call.members is not None:
                kind, name = "batch", f"{metadata.method_name} x {len(call.members)}"
            elif call.work.scope is not None:
                kind = "request"
            journey = self._open[call] = Journey(
                next(self._numbers),
                kind,
                name,
                metadata.request_id,
                metadata.deployment.name,
                call.started_at,
            )
            call.when_settled(partial(self._answered, journey))
        return journey

    def current(self) -> Journey | None:
        """Return the journey that the running code works for, if there is one."""
        call = CURRENT_CALL.get(None)
        return None if call is None else self._open.get(call)

    def _answered(self, journey: Journey, call: Call) -> None:
        if call.error is not None:
            journey.error = type(call.error).__name__
        if not call.began_at:  # refused, or cancelled early; batches have no replica to begin them
            self.end(call)

    def end(self, call: Call, ended: Ended | None = None) -> None:
        """Record that a call has ended, on its loop, or that it will not begin."""
        # Race of the replica, which begins the call, with the answer: the thread that pops the
        # journey ends it.
        if (journey := self._open.pop(call, None)) is None:
            return
        journey.follow(call)
        journey.ended_at = monotonic()
        if ended is not None:
            journey.loop = journey.loop or current_track(is_loop=True)
            journey.ended_at = ended.ended_at
            if not ended.name.endswith(f" {call.metadata.route}"):  # a route was found
                journey.name = ended.name
        self._ended.append(journey)

    def enter(self, journey: Journey, track: Track, asked_at: float = 0.0) -> Run:
        """Record that a thread begins to run for a request, on its track."""
        if track.is_loop:
            journey.loop = track
        run = self._running[track] = Run(journey, track, asked_at, monotonic(), 0.0)
        return run

    def leave(self, run: Run) -> None:
        """Record the end of a run."""
        # Race with `timeline`: it reads the running ones first, so that it misses none. A run that
        # it reads twice counts once.
        ended_at = run.journey.ended_at
        if run.asked_at or ended_at < run.began_at:  # it may go on for a request that has ended
            ended_at = monotonic()
        self._runs.append(run._replace(ended_at=ended_at))
        self._running.pop(run.track, None)

    def timelines(self) -> list[Timeline]:
        """Return the timeline of this process, and those of its children. It blocks."""
        found = gathered(self.children.items(), self.timeline)
        # Not earlier: a child that was asked may have left meanwhile, and is here then.
        return [*{(each.pid, each.process): each for each in [*found, *self.left.copy()]}.values()]

    def timeline(self, replica_id: ReplicaID | None = None) -> Timeline:
        """Return a copy of the records, of a replica in a child process if one is given.

        May be called at any time, from any thread. A request that ends at this moment may be
        missing; the next copy has it.
        """
        running = [*self._running.copy().values()]
        opened = self._open.copy()
        runs = self._runs.copy()  # in one step, as `list` of a deque does not
        ended = self._ended.copy()
        for call, journey in opened.items():
            journey.follow(call)
        # Copies, because open journeys still change.
        journeys = {each: copy(each) for each in dict.fromkeys([*ended, *opened.values()])}
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
        standstills = _standstills([*tracks], whole, [*journeys.values()])
        tracks |= dict.fromkeys(each.track for each in standstills)
        in_order = sorted(journeys.values(), key=lambda each: each.arrived_at)
        return Timeline(
            in_order,
            whole,
            standstills,
            _sorted(tracks, in_order),
            frozenset(unfinished),
            now,
            process="" if replica_id is None else f"{replica_id}, process {os.getpid()}",
        )


def gathered(
    children: Iterable[tuple[object, Callable[[], Callable[[], T]]]], own: Callable[[], T]
) -> list[T]:
    """Return the recording of this process, and those of children, made at the same time.

    A child that does not answer in time is logged, and left out.
    """
    answers = []
    for child, ask in list(children):
        with suppress(RuntimeError):  # its loop has ended
            answers.append((child, ask()))
    found = [own()]
    for child, answer in answers:
        try:
            found.append(answer())
        except Exception as error:
            logger.warning("%s is missing in the recording: %r", child, error)
    return found


def _standstills(tracks: list[Track], runs: list[Run], journeys: list[Journey]) -> list[Standstill]:
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
            divided.append(row := [])
        row.append(item)
    return divided
