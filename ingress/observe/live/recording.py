"""A recording of some seconds of a running server, for https://ui.perfetto.dev.

The calls that end meanwhile are recorded with their exact times, by `notable`. What runs on each
thread is sampled: a run that is shorter than the pause between two samples may be missing. Replicas
in child processes are recorded there, in the same way. A server that is not recorded pays nothing,
unlike one with INGRESS_TRACE, which records every step.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from time import monotonic, sleep
from typing import TypedDict

from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.notable import NOTABLE, Ended
from ingress.observe.timeline.chrome import as_json, merged
from ingress.observe.timeline.recorder import Journey, Run, Timeline, Track, standstills_of
from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.watchdog.stacks import (
    current_frames,
    running_task,
    value_in,
    worker_context,
)

PAUSE_S = 0.005
MOST_CALLS = 20_000
ASK_S = 20.0  # for the answer of a child, which imports this module first

logger = logging.getLogger("ingress")

_recording = threading.Lock()


class Recording(TypedDict):
    """A recording of one process; `trace` is `None` while another one is made."""

    pid: int
    trace: str | None


def record(replicas: Iterable[Replica], seconds: float) -> str | None:
    """Record for some seconds, and return the file's text; `None` if a recording goes on."""
    if not _recording.acquire(blocking=False):
        return None
    try:
        replicas = list(replicas)
        patience_s = seconds + ASK_S
        answers = [
            (each, each.host.look(_recorded_there, seconds, timeout_s=patience_s))
            for each in replicas
            if isinstance(each.host, ProcessHost)
        ]
        timelines = [_Recording(replicas).run(seconds)]
        for replica, answer in answers:
            try:
                timelines.append(answer())
            except Exception as error:  # it stands still, or has ended
                logger.warning("%s is missing in the recording: %r", replica.replica_id, error)
        return as_json(timelines, f"ingress, process {os.getpid()}")
    finally:
        _recording.release()


def _recorded_there(replica: Replica, seconds: float) -> Timeline:
    """Return a recording of a replica in its child process."""
    timeline = _Recording([replica]).run(seconds)
    return dataclasses.replace(timeline, process=f"{replica.replica_id}, process {timeline.pid}")


class _Recording:
    """One recording. The user loops add calls; the rest belongs to the thread that records."""

    __slots__ = ("_before", "_ended", "_journeys", "_replicas", "_runs", "_tracks")

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self._ended: list[Ended] = []
        self._journeys: dict[tuple[str, str, str], Journey] = {}
        self._runs: dict[Track, list[Run]] = {}
        self._tracks: dict[int, Track] = {}
        self._before = 0.0  # the time of the sample before

    def _add(self, ended: Ended) -> None:
        if len(self._ended) < MOST_CALLS:
            self._ended.append(ended)

    def run(self, seconds: float) -> Timeline:
        """Return what happens in this process in some seconds."""
        deadline = monotonic() + seconds
        NOTABLE.listen(self._add)
        try:
            while (now := monotonic()) < deadline:
                self._sample(now)
                self._before = now
                sleep(PAUSE_S)
        finally:
            NOTABLE.unlisten(self._add)
        return self._timeline()

    def _sample(self, now: float) -> None:
        frames = current_frames()
        names = {each.ident: each.name for each in threading.enumerate()}
        try:
            for replica in self._replicas:
                thread = replica.host.thread
                frame = frames.get(thread or 0)
                if thread is not None and frame is not None:
                    _, context = running_task(replica.loop, frame)
                    call = value_in(context, CURRENT_CALL)
                    if call is not None:
                        self._ran(thread, names, call, now, is_loop=True)
            for ident, frame in frames.items():
                call = value_in(worker_context(frame), CURRENT_CALL)
                if call is not None:
                    self._ran(ident, names, call, now, is_loop=False)
        finally:
            frames.clear()

    def _ran(
        self, ident: int, names: dict[int | None, str], call: Call, now: float, *, is_loop: bool
    ) -> None:
        """Note that a thread runs for a call: its run goes on if the sample before saw it, too."""
        track = self._tracks.setdefault(ident, Track(names.get(ident, "a thread"), is_loop))
        journey = self._journey(call)
        runs = self._runs.setdefault(track, [])
        last = runs[-1] if runs else None
        if last is not None and last.journey is journey and last.ended_at >= self._before:
            runs[-1] = last._replace(ended_at=now)
        else:
            runs.append(Run(journey, track, 0.0, now, now + PAUSE_S))

    def _journey(self, call: Call) -> Journey:
        name = call.metadata.deployment.name
        key = call.metadata.request_id, name, f"{call.started_at:.6f}"
        journey = self._journeys.get(key)
        if journey is None:
            journey = self._journeys[key] = Journey(
                len(self._journeys) + 1, "call", call.title(), key[0], name, call.started_at
            )
            journey.slot_at = call.assigned_at
            journey.began_at = call.assigned_at
        return journey

    def _timeline(self) -> Timeline:
        now = monotonic()
        for replica in self._replicas:
            for call in replica.calls:  # those that neither ran nor ended meanwhile
                self._journey(call)
        loops = {each.name: each for each in self._tracks.values() if each.is_loop}
        for each in self._ended:
            key = each.request_id, each.deployment, f"{each.arrived_at:.6f}"
            journey = self._journeys.get(key)
            if journey is None:
                journey = self._journeys[key] = Journey(
                    len(self._journeys) + 1, "call", "", key[0], each.deployment, each.arrived_at
                )
            journey.name, journey.error = each.name, each.error.partition(":")[0]
            journey.replica = f"{each.deployment}#{each.replica}"
            journey.loop = loops.setdefault(journey.replica, Track(journey.replica, is_loop=True))
            journey.slot_at, journey.began_at = each.assigned_at, each.began_at
            journey.was_queued = each.assigned_at - each.arrived_at > PAUSE_S
            journey.ended_at = each.ended_at
        journeys = sorted(self._journeys.values(), key=lambda each: each.arrived_at)
        unfinished = [each for each in journeys if not each.ended_at]
        for journey in unfinished:
            journey.ended_at = now
        runs = sorted(
            (run for runs in self._runs.values() for run in runs), key=lambda run: run.began_at
        )
        tracks = [*self._tracks.values(), *loops.values()]
        standstills = standstills_of(tracks, runs, journeys)
        tracks += [each.track for each in standstills]
        return Timeline(
            journeys, runs, standstills, [*dict.fromkeys(tracks)], frozenset(unfinished), now
        )


def merged_traces(parts: Sequence[Recording]) -> str | None:
    """Return the recordings of several processes as one file."""
    texts = [part["trace"] for part in parts if part["trace"] is not None]
    if len(texts) < 2:
        return texts[0] if texts else None
    return merged(texts)
