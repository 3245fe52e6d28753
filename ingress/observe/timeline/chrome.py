"""A timeline as Chrome Trace Event JSON, for https://ui.perfetto.dev and chrome://tracing.

    M     names: the process, and each track
    X     on a thread's track: it ran for a request; on the track beside it: the loop stalled
    b, e  a request from its arrival to its end, and each of its waits inside; by `id2`

Source: "Trace Event Format". Slices of a track must nest, so overlapping requests are not `X`.
Events of one `id2` must nest too, so overlapping waits of a request have ids of their own.

A `Window` writes the recent requests of a running server to a file, `INGRESS_TRACE=trace.json`:
when the process gets SIGUSR2, and when its last application ends.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from ingress.core.base.signals import handling
from ingress.observe.timeline.recorder import (
    Journey,
    Recorder,
    Span,
    Standstill,
    Timeline,
    rows,
    waits_of,
)
from ingress.telemetry.logs import logger

Event = dict[str, object]


def as_json(timelines: Sequence[Timeline], title: str) -> str:
    """Return the text of a trace file, one line per event; its times are in microseconds.

    The processes of `timelines` share a machine, and so a clock. `zero_s` in the file is the time
    on that clock when its own times begin.
    """
    # A stall may have begun before the first request.
    stalls = (each.began_at for timeline in timelines for each in timeline.standstills)
    zero = min([*(each.began_at for each in timelines), *stalls])
    # Line by line: one call of the encoder would hold the GIL for the whole file.
    events = ",\n".join(
        json.dumps(event) for each in timelines for event in _Events(each, title, zero)
    )
    about = json.dumps({"title": title, "zero_s": zero})
    return f'{{"displayTimeUnit": "ms", "otherData": {about}, "traceEvents": [\n{events}\n]}}\n'


def merged(texts: Sequence[str]) -> str:
    """Return the trace files of several processes of a machine as one."""
    traces = [json.loads(text) for text in texts]
    zero = min(each["otherData"]["zero_s"] for each in traces)
    events = [event for each in traces for event in each["traceEvents"]]
    for each in traces:
        later_us = (each["otherData"]["zero_s"] - zero) * 1e6
        for event in each["traceEvents"]:
            if "ts" in event:
                event["ts"] = round(event["ts"] + later_us, 3)
    about = {**traces[0]["otherData"], "zero_s": zero}
    return json.dumps({**traces[0], "otherData": about, "traceEvents": events})


class _Events:
    """The events of one process."""

    def __init__(self, timeline: Timeline, title: str, zero: float) -> None:
        self._timeline = timeline
        self._title = timeline.process or title
        self._pid = timeline.pid
        self._zero = zero
        stalled = {each.track for each in timeline.standstills}
        tracks = [
            (track, kind)
            for track in timeline.tracks
            for kind in (["", " stalls"] if track in stalled else [""])
        ]
        self._tids = {each: number for number, each in enumerate(tracks, 1)}

    def __iter__(self) -> Iterator[Event]:
        yield self._metadata("process_name", 0, name=self._title)
        for (track, kind), tid in self._tids.items():
            yield self._metadata("thread_name", tid, name=track.name + kind)
            yield self._metadata("thread_sort_index", tid, sort_index=tid)
        for run in self._timeline.runs:
            yield self._slice(
                "run", run.journey.name, run.began_at, run.ended_at, self._tids[run.track, ""]
            ) | {"args": _identity(run.journey)}
        waits = waits_of(self._timeline)
        for journey in self._timeline.journeys:
            yield from self._request(journey, waits.get(journey, []))
        for each in self._timeline.standstills:
            yield self._stall(each)

    def _metadata(self, what: str, tid: int, **args: object) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "args": args}

    def _ns(self, at: float) -> int:
        return round((at - self._zero) * 1e9)

    def _slice(self, cat: str, name: str, began_at: float, ended_at: float, tid: int) -> Event:
        # Rounded before the subtraction, so that consecutive slices never overlap.
        began_ns, ended_ns = self._ns(began_at), self._ns(ended_at)
        times = {"ts": began_ns / 1e3, "dur": (ended_ns - began_ns) / 1e3}
        return {"ph": "X", "cat": cat, "name": name, **times, "pid": self._pid, "tid": tid}

    def _request(self, journey: Journey, waits: list[Span]) -> Iterator[Event]:
        number = f"{journey.number:#x}"
        args = _identity(journey) | {
            "kind": journey.kind,
            "deployment": journey.deployment,
            "replica": journey.replica,
            "loop": journey.loop.name if journey.loop is not None else "",
        }
        if journey.error:
            args["error"] = journey.error
        if journey in self._timeline.unfinished:
            args["unfinished"] = True
        tid = self._tids[journey.loop, ""] if journey.loop is not None else 0
        yield self._edge("b", number, journey.name, journey.arrived_at, tid) | {"args": args}
        for row, several in enumerate(rows(waits, lambda each: (each.began_at, each.ended_at))):
            own = f"{number}.{row}" if row else number
            for wait in several:
                name = f"wait: {wait.kind}"
                yield self._edge("b", own, name, wait.began_at, tid)
                yield self._edge("e", own, name, wait.ended_at, tid)
        yield self._edge("e", number, journey.name, journey.ended_at, tid)

    def _edge(self, phase: str, number: str, name: str, at: float, tid: int) -> Event:
        times = {"ts": self._ns(at) / 1e3, "pid": self._pid, "tid": tid}
        # Local ids: Perfetto shows the events with the threads of the process, not apart.
        return {"ph": phase, "cat": "request", "id2": {"local": number}, "name": name, **times}

    def _stall(self, each: Standstill) -> Event:
        stall, tid = each.stall, self._tids[each.track, " stalls"]
        return self._slice("stall", f"stall: {stall.reason}", each.began_at, each.ended_at, tid) | {
            "cname": "terrible",
            "args": {
                "text": str(stall),
                "reason": str(stall.reason),
                "method": stall.method,
                "place": str(stall.place) if stall.place.file else "",
                "waited": stall.waited,
                "request_ids": list(stall.request_ids),
            },
        }


def _identity(journey: Journey) -> dict[str, object]:
    return {"request": journey.number, "request_id": journey.request_id}


class Window:
    """A recorder of a running server, and the thread that writes its file. Thread-safe.

    "{pid}" in `path` becomes the process's id. Raises `ValueError` if the file cannot be written.
    """

    __slots__ = ("_asked", "_path", "_thread", "recorder")

    def __init__(self, path: str) -> None:
        self._path = Path(path.replace("{pid}", str(os.getpid())))
        check_writable(self._path, "INGRESS_TRACE")
        self.recorder = Recorder().__enter__()
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="ingress-trace", daemon=True)
        self._thread.start()

    def writing_on_signal(self) -> AbstractContextManager[None]:
        """Make SIGUSR2 write the file, unless it has a handler or this is not the main thread."""
        return handling("SIGUSR2", self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Not an `Event`: the line that the signal interrupts may hold the event's lock.
        self._asked.put(True)

    def stop(self, timeout_s: float) -> None:
        """Write the file for the last time."""
        self._asked.put(False)
        self._thread.join(timeout_s)
        self.recorder.__exit__()

    def _main(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._asked.get()
            try:
                self._write()
            except Exception:
                logger.exception("the trace of requests could not be written to %s", self._path)

    def _write(self) -> None:
        timelines = self.recorder.timelines()
        text = as_json(timelines, f"ingress, process {os.getpid()}")
        # Replaced in one step, because another process may be reading the file.
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        with part.open("x") as file:  # follows no link: the folder may be one of all users
            file.write(text)
        part.replace(self._path)
        logger.info("wrote the trace of %d requests to %s", len(timelines[0].journeys), self._path)


def check_writable(path: Path, what: str) -> None:
    """Raise `ValueError` if a file cannot be written. The file is not changed."""
    problem = ""
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {str(path.parent)!r}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "permission denied"
    if problem:
        raise ValueError(f"{what}={str(path)!r} cannot be written: {problem}; give another path")
