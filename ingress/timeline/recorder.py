"""What is recorded of requests while they run.

    Journey    one request in one deployment: arrives, has a slot, begins, ends
    Run        a stretch of time in which a thread ran for one of them, without a break
    Timeline   a copy of the last of both, with the stalls of the event loops meanwhile

All times are `time.monotonic()` seconds.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from itertools import count
from time import monotonic, time
from typing import NamedTuple, TypeVar

from ingress.calls.call import CURRENT_CALL, Call
from ingress.watchdog import WATCHDOG, Stall

T = TypeVar("T")

REQUESTS = 10_000
"""How many requests that have ended are remembered."""

RUNS = 50_000
"""How many of the stretches of time in which they ran."""


@dataclass(eq=False, frozen=True, slots=True)
class Track:
    """One thread while it lives. The system may give its number, and we its name, to another."""

    name: str
    is_loop: bool


@dataclass(eq=False, slots=True)
class Journey:
    """One request in one deployment; one that calls others has several.

    `kind` is "request", "call" if it came by a handle, or "batch". A time that is 0.0 has not come.
    `was_queued` says that it had to wait for a slot; `began_at` is when its event loop came to it.
    `ended_at` is when its slot was given back, or it was answered without one. `error` is the type
    of what it failed with, "" if it did not.
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
    """`asked_at` is when it began to wait for the thread; 0.0 on an event loop."""

    journey: Journey
    track: Track
    asked_at: float
    began_at: float
    ended_at: float


class Standstill(NamedTuple):
    """A stall of the event loop of a track, and when it was."""

    track: Track
    began_at: float
    ended_at: float
    stall: Stall


@dataclass(frozen=True, slots=True)
class Timeline:
    """A copy that changes no more. What has not ended yet ends at `now`, and is in `unfinished`."""

    journeys: list[Journey]
    runs: list[Run]
    standstills: list[Standstill]
    tracks: list[Track]
    unfinished: frozenset[Journey]
    now: float

    @property
    def began_at(self) -> float:
        """When the first of its requests arrived."""
        return min((each.arrived_at for each in self.journeys), default=self.now)

    @property
    def ended_at(self) -> float:
        """When the last of them ended, or a thread that worked for it."""
        ends = [each.ended_at for each in self.journeys] + [run.ended_at for run in self.runs]
        return max(ends, default=self.now)


class Recorder:
    """Thread-safe, and without a lock: what is appended is whole, and who pops it first has it."""

    __slots__ = ("_ended", "_mine", "_numbers", "_open", "_running", "_runs")

    def __init__(self, requests: int = REQUESTS, runs: int = RUNS) -> None:
        self._numbers = count(1)
        self._mine = threading.local()
        self._open: dict[Call, Journey] = {}
        self._ended: deque[Journey] = deque(maxlen=requests)
        self._running: dict[Track, Run] = {}
        self._runs: deque[Run] = deque(maxlen=runs)

    # One request.

    def arrive(self, call: Call, kind: str, name: str, deployment: str) -> Journey:
        """A call asks for a slot, or a batch begins."""
        request_id = call.metadata.request_id
        number = next(self._numbers)
        journey = Journey(number, kind, name, request_id, deployment, monotonic())
        self._open[call] = journey
        return journey

    def journey_of(self, call: Call | None) -> Journey | None:
        """Return what is recorded of a call that has not ended; of no other."""
        return None if call is None else self._open.get(call)

    def current(self) -> Journey | None:
        """Return the journey that the running code works for, if it does for one."""
        return self.journey_of(CURRENT_CALL.get(None))

    def take_slot(self, call: Call) -> None:
        journey = self._open.get(call)
        if journey is not None:
            journey.slot_at = monotonic()

    def stand_in_queue(self, call: Call) -> None:
        """A call has asked for a slot, and has not been refused."""
        journey = self._open.get(call)
        if journey is not None and not journey.slot_at:
            journey.was_queued = True

    def give_back(self, call: Call) -> None:
        """A call gives its slot back, which ends it; unless it has not begun and goes elsewhere."""
        journey = self._open.get(call)
        if journey is not None:
            if journey.began_at or call.settled:
                self.end(call)
            else:
                journey.slot_at = 0.0

    def answer(self, call: Call) -> None:
        """A call is answered, which ends it unless it has a slot."""
        journey = self._open.get(call)
        # Race with the router, which may give it a slot at this moment: its replica then gives
        # that back unused, and ends it there.
        if journey is not None and not journey.slot_at:
            self.end(call)

    def end(self, call: Call) -> None:
        # Race of who gives the slot back with who answers: the one that pops it ends it.
        journey = self._open.pop(call, None)
        if journey is not None:
            journey.ended_at = monotonic()
            if call.error is not None:
                journey.error = type(call.error).__name__
            self._ended.append(journey)

    # One thread.

    def track(self, *, is_loop: bool) -> Track:
        """Return that of the current thread."""
        track: Track | None = getattr(self._mine, "track", None)
        if track is None:
            track = self._mine.track = Track(threading.current_thread().name, is_loop)
        return track

    def enter(self, journey: Journey, track: Track, asked_at: float = 0.0) -> Run:
        """The current thread, whose track it is, begins to run for a request."""
        run = self._running[track] = Run(journey, track, asked_at, monotonic(), 0.0)
        return run

    def leave(self, run: Run) -> None:
        """It runs for it no more, for now or for ever."""
        # Race with `timeline`: it looks at what runs first, so that it misses nothing. What it sees
        # twice it takes once.
        self._runs.append(run._replace(ended_at=monotonic()))
        self._running.pop(run.track, None)

    # All of it.

    def timeline(self) -> Timeline:
        """Return a copy. At any time, from any thread.

        Of what ends in this moment it may have nothing; the next copy has it.
        """
        running = list(self._running.values())
        opened = list(self._open.values())
        runs = _copied(self._runs)
        ended = dict.fromkeys([*_copied(self._ended), *opened])
        # Copies, because what is open changes on.
        journeys = {each: copy(each) for each in ended}
        now = monotonic()  # not before: nothing of them is later
        unfinished = [each for each in journeys.values() if not each.ended_at]
        for each in unfinished:
            each.ended_at = now
        known = {(run.track, run.began_at): run for run in running}
        known |= {(run.track, run.began_at): run for run in runs}
        whole = [
            run._replace(journey=journeys[run.journey], ended_at=run.ended_at or now)
            for run in known.values()
            if run.journey in journeys  # else it is gone from the window
        ]
        whole.sort(key=lambda run: run.began_at)
        tracks = dict.fromkeys(run.track for run in whole)
        tracks |= dict.fromkeys(each.loop for each in journeys.values() if each.loop is not None)
        standstills = self._standstills([*tracks], whole, [*journeys.values()])
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

    def _standstills(
        self, tracks: list[Track], runs: list[Run], journeys: list[Journey]
    ) -> list[Standstill]:
        """Return the watchdog's stalls while there were requests, on the tracks of their loops."""
        if not journeys:
            return []
        first_at = min(each.arrived_at for each in journeys)
        last_at = max(each.ended_at for each in journeys)
        # It says when in Unix time. Nobody set the clock since, as a rule.
        offset_s = time() - monotonic()
        found = []
        for stall in WATCHDOG.stalls():
            began_at = stall.began_at_s - offset_s
            ended_at = began_at + stall.duration_ms / 1e3
            if ended_at < first_at or began_at > last_at:
                continue
            ran = {run.track for run in runs if run.began_at < ended_at and run.ended_at > began_at}
            named = loops_of(stall, tracks, journeys)
            # Applications may have deployments of one name: the one that ran then is meant.
            track = next((each for each in named if each in ran), None)
            if track is None:
                track = named[0] if named else Track(stall.loop, is_loop=True)
                tracks.append(track)
            found.append(Standstill(track, began_at, ended_at, stall))
        return found


def _copied(items: deque[T]) -> list[T]:
    while True:
        try:
            return list(items)
        except RuntimeError:  # appended to meanwhile, in a thread that the copying let in
            continue


def loops_of(stall: Stall, tracks: list[Track], journeys: list[Journey]) -> list[Track]:
    """Return the tracks that may be that of the loop that stood still.

    By the name of its thread, which stands in parentheses if that is not the replica's. The last
    stall of an application may be told when that thread has ended, and nobody knows its name.
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
    # What no deployment owns, such as the server's loop, comes first.
    return sorted(
        tracks,
        key=lambda each: (rank.get(each.name.partition("#")[0], -1), _natural(each.name)),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts worker-10 behind worker-9, and a loop before its workers."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
