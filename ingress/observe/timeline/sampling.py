"""A recording of some seconds of a running server, for https://ui.perfetto.dev.

The calls that end meanwhile are recorded with their exact times. What runs on each thread is
sampled: a run that is shorter than the pause between two samples may be missing. Replicas in child
processes are recorded there, in the same way. A server that is not recorded pays nothing, unlike
one with INGRESS_TRACE, which records every step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextvars import Context
from functools import partial
from time import monotonic, sleep
from types import FrameType

from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.observe.timeline.chrome import as_json, merged
from ingress.observe.timeline.recorder import (
    ASK_S,
    Journey,
    Recorder,
    Run,
    Timeline,
    Track,
    gathered,
)
from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.notable import Ended
from ingress.telemetry.watchdog import WATCHDOG
from ingress.telemetry.watchdog.stacks import (
    current_frames,
    running_task,
    value_in,
    worker_context,
)

PAUSE_S = 0.005
MOST_CALLS = 20_000

_recording = threading.Lock()


def record(replicas: Iterable[Replica], seconds: float) -> str | None:
    """Record for some seconds, and return the file's text; `None` if a recording goes on."""
    if not _recording.acquire(blocking=False):
        return None
    try:
        replicas = list(replicas)
        children = [
            (
                each.replica_id,
                partial(each.host.look, _sampled_there, seconds, timeout_s=seconds + ASK_S),
            )
            for each in replicas
            if isinstance(each.host, ProcessHost)
        ]
        timelines = gathered(children, partial(_sampled, replicas, seconds))
        return as_json(timelines, f"ingress, process {os.getpid()}")
    finally:
        _recording.release()


def _sampled_there(replica: Replica, seconds: float) -> Timeline:
    return _sampled([replica], seconds, replica.replica_id)


def _sampled(
    replicas: list[Replica], seconds: float, replica_id: ReplicaID | None = None
) -> Timeline:
    """Return what happens in this process in some seconds."""
    deadline = monotonic() + seconds
    working: dict[Track, Run] = {}
    with _Sampler() as recorder:
        while monotonic() < deadline:
            seen = _seen(replicas)
            for track, run in list(working.items()):
                if track not in seen or recorder.see(seen[track]) is not run.journey:
                    recorder.leave(working.pop(track))
            for track in seen.keys() - working.keys():
                working[track] = recorder.enter(recorder.see(seen[track]), track)
            sleep(PAUSE_S)
        for replica in replicas:
            for call in replica.calls:  # those that neither ran nor ended meanwhile
                recorder.see(call)
    return recorder.timeline(replica_id)


def _seen(replicas: Iterable[Replica]) -> dict[Track, Call]:
    """Return the call that each thread runs for at this moment."""
    return {
        track: call
        for track, context, _ in threads_now(replicas)
        if (call := value_in(context, CURRENT_CALL)) is not None
    }


def threads_now(
    replicas: Iterable[Replica],
) -> Iterator[tuple[Track, Context | None, FrameType]]:
    """Yield each other thread, the context that it runs in, if one is known, and its frame."""
    frames = current_frames()
    names = {each.ident: each.name for each in threading.enumerate()}
    loops = {each.host.thread or WATCHDOG.thread_of(each.loop): each.loop for each in replicas}
    try:
        for ident, frame in frames.items():
            track = Track(names.get(ident, "a thread"), ident in loops, ident)
            if track.is_loop:
                yield track, running_task(loops[ident], frame)[1], frame
            else:
                yield track, worker_context(frame), frame
    finally:
        frames.clear()


class _Sampler(Recorder):
    """A recorder that also knows the calls that have ended: their tasks may run on. Thread-safe."""

    __slots__ = ("_known", "_lock")

    def __init__(self) -> None:
        super().__init__(None, None)
        self._known: dict[tuple[str, str, float], Journey] = {}
        self._lock = threading.Lock()

    def see(self, call: Call) -> Journey:
        key = call.metadata.request_id, call.metadata.deployment.name, call.started_at
        # Race of the thread that samples with the user loop, where the call ends.
        with self._lock:
            if key not in self._known:
                self._known[key] = super().see(call)
            return self._known[key]

    def end(self, call: Call, ended: Ended | None = None) -> None:
        if ended is not None and len(self._known) < MOST_CALLS:
            journey = self.see(call)
            journey.error = journey.error or ended.error.partition(":")[0]
        super().end(call, ended)


def merged_traces(parts: Sequence[str | None]) -> str | None:
    """Return the recordings of several processes as one; `None` of those that record already."""
    texts = [each for each in parts if each is not None]
    return merged(texts) if len(texts) > 1 else next(iter(texts), None)
