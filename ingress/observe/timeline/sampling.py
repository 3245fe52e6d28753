"""Recordings and profiles: the work of a running server's threads in some seconds.

A recording is for https://ui.perfetto.dev. It has the calls that end meanwhile with their exact
times, and samples of each thread: a run that is shorter than the pause between two samples may be
missing. A server that is not recorded pays nothing, unlike one with INGRESS_TRACE, which records
every step.

A profile is by replica, route and thread. Each thread is looked at a hundred times a second. One
that works for a request counts whether it computes or waits, as in a lock; any other counts while
it computes. Requests that wait in `await` have no thread. Looking takes at most a twentieth of one
core. A C call that holds the GIL is seen once it ends, and a profiler from outside, such as py-spy,
sees no route: it reads no contexts.

Replicas in child processes are looked at there, in the same way.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import PurePath
from random import uniform
from time import monotonic, sleep, thread_time
from traceback import walk_stack
from types import CodeType, FrameType
from typing import NamedTuple, TypedDict, TypeVar

from ingress.context import REPLICA
from ingress.core.base.libraries import is_library
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.observe.timeline.chrome import as_json, merged
from ingress.observe.timeline.picture import text, width_of
from ingress.observe.timeline.recorder import (
    ASK_S,
    Journey,
    Recorder,
    Run,
    Timeline,
    Track,
    gathered,
)
from ingress.serving.control.factories import ProcessHost, Replica
from ingress.state.looking import replicas_of
from ingress.state.server import Server
from ingress.telemetry.notable import Ended
from ingress.telemetry.watchdog import WATCHDOG
from ingress.telemetry.watchdog.clocks import ThreadClocks
from ingress.telemetry.watchdog.stacks import (
    current_frames,
    running_task,
    value_in,
    worker_context,
)

RECORD_PAUSE_S = 0.005
MOST_CALLS = 20_000

_recording = threading.Lock()

T = TypeVar("T")


def record(replicas: Iterable[Replica], seconds: float) -> str | None:
    """Record for some seconds, and return the file's text; `None` if a recording goes on."""
    if not _recording.acquire(blocking=False):
        return None
    try:
        timelines = _looked(list(replicas), seconds, _sampled, _sampled_there)
        return as_json(timelines, f"ingress, process {os.getpid()}")
    finally:
        _recording.release()


def _sampled_there(replica: Replica, seconds: float) -> Timeline:
    return _sampled([replica], seconds, replica.replica_id)


def _sampled(
    replicas: Sequence[Replica], seconds: float, replica_id: ReplicaID | None = None
) -> Timeline:
    """Return what happens in this process in some seconds."""
    deadline = monotonic() + seconds
    working: dict[Track, Run] = {}
    with _Sampler() as recorder:
        while monotonic() < deadline:
            seen = {
                track: call
                for track, context, _ in threads_now(replicas)
                if (call := value_in(context, CURRENT_CALL)) is not None
            }
            for track, run in list(working.items()):
                if track not in seen or recorder.see(seen[track]) is not run.journey:
                    recorder.leave(working.pop(track))
            for track in seen.keys() - working.keys():
                working[track] = recorder.enter(recorder.see(seen[track]), track)
            sleep(RECORD_PAUSE_S)
        for replica in replicas:
            for call in replica.calls:  # those that neither ran nor ended meanwhile
                recorder.see(call)
    return recorder.timeline(replica_id)


def _looked(
    replicas: Sequence[Replica],
    seconds: float,
    here: Callable[[Sequence[Replica], float], T],
    there: Callable[[Replica, float], T],
) -> list[T]:
    """Return what `here` returns in this process, and `there` in those of replicas meanwhile."""
    children = [
        (each.replica_id, partial(each.host.look, there, seconds, timeout_s=seconds + ASK_S))
        for each in replicas
        if isinstance(each.host, ProcessHost)
    ]
    return gathered(children, partial(here, replicas, seconds))


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


PAUSE_S = 0.01
SHARE = 20  # of one core: looking takes at most one part of so many
MOST_STACKS = 5_000  # of a process
DEPTH = 100  # functions of a stack
NO_REQUEST, NO_REPLICA = "no request", "other threads"

_profiling = threading.Lock()


class Where(NamedTuple):
    """The owner of a stack. `replica` is a deployment's name and a replica's id."""

    application: str
    replica: str
    route: str
    thread: str


class ProfiledStack(TypedDict):
    """A stack, the outermost function first, by their numbers, and the seconds in it."""

    where: Where
    functions: list[int]
    seconds: float


class Profile(TypedDict):
    """The stacks of one process. A function is its name, its file and its first line."""

    pid: int
    problem: str
    seconds: float
    functions: list[tuple[str, str, int]]
    stacks: list[ProfiledStack]


def profile(server: Server, seconds: float) -> list[Profile]:
    """Return the profiles of this process and of its replicas' children. It blocks."""
    return _looked(list(replicas_of(server)), seconds, _profiled, _profiled_there)


def _profiled_there(replica: Replica, seconds: float) -> Profile:
    return _profiled([replica], seconds)


def _profiled(replicas: Sequence[Replica], seconds: float) -> Profile:
    """Return what the threads of this process run in some seconds."""
    found = Profile(pid=os.getpid(), problem="", seconds=0.0, functions=[], stacks=[])
    if not _profiling.acquire(blocking=False):
        return {**found, "problem": "another profile is being made"}
    counts: Counter[tuple[Where, tuple[CodeType, ...]]] = Counter()
    clocks, ran, looks, began = ThreadClocks(), dict[int, float](), 0, monotonic()
    try:
        while monotonic() < began + seconds:
            cost_s = thread_time()
            before, ran = ran, clocks.read([each.ident or 0 for each in threading.enumerate()])
            for ident, key in _seen(replicas):
                is_idle = key[0].route == NO_REQUEST and ran.get(ident, 1.0) == before.get(ident)
                if not is_idle and (key in counts or len(counts) < MOST_STACKS):
                    counts[key] += 1
            looks += 1
            # Not in step with code that runs at regular times.
            sleep(uniform(0.5, 1.5) * max(PAUSE_S, SHARE * (thread_time() - cost_s)))
    finally:
        _profiling.release()
    found["seconds"] = monotonic() - began
    numbers: dict[tuple[str, str, int], int] = {}
    for (where, codes), count in counts.items():
        names = [(each.co_qualname, each.co_filename, each.co_firstlineno) for each in codes]
        stack = [numbers.setdefault(each, len(numbers)) for each in names]
        part_s = found["seconds"] * count / looks
        found["stacks"].append({"where": where, "functions": stack, "seconds": part_s})
    return {**found, "functions": list(numbers)}


def _seen(replicas: Sequence[Replica]) -> Iterator[tuple[int, tuple[Where, tuple[CodeType, ...]]]]:
    """Yield the ident of each thread that runs user code or a request, and its stack."""
    for track, context, frame in threads_now(replicas):
        codes = _users(frame)
        call, replica = value_in(context, CURRENT_CALL), value_in(context, REPLICA)
        if call is None and not codes:
            continue
        app, name = "", NO_REPLICA
        if replica is not None:
            app, name = replica.app_name, f"{replica.deployment}#{replica.replica_tag}"
        route = NO_REQUEST if call is None else call.title()
        yield track.ident, (Where(app, name, route, track.name), codes or (frame.f_code,))


def _users(frame: FrameType) -> tuple[CodeType, ...]:
    """Return a stack from its outermost function of user code on; none without user code."""
    frames = [each for each, _ in walk_stack(frame)][::-1]
    for number, each in enumerate(frames):
        is_main = str(each.f_globals.get("__name__")) in ("__main__", "__mp_main__")
        if not is_main and not is_library(each.f_code.co_filename):
            return tuple(one.f_code for one in frames[number : number + DEPTH])
    return ()


Path = tuple[str, ...]


def paths(
    profiles: Iterable[Profile], deployment: str | None = None, *, by_thread: bool = False
) -> dict[Path, float]:
    """Return the seconds of each path: replica, route, thread and functions, the outermost first.

    Without `by_thread`, the threads of a pool are one. `deployment` is a name, or APP:NAME.
    """
    profiles = list(profiles)
    found: dict[Path, float] = defaultdict(float)
    workers = len({each["pid"] for each in profiles}) > 1
    for each in profiles:
        names = [f"{name} ({PurePath(file).name}:{line})" for name, file, line in each["functions"]]
        for stack in each["stacks"]:
            app, replica, route, thread = stack["where"]
            name = replica.rpartition("#")[0]
            if deployment not in (None, name, f"{app}:{name}"):
                continue
            at = f" in process {each['pid']}" if workers else ""
            if not by_thread and "-worker-" in thread:
                thread = thread.rpartition("-")[0]
            labels = (f"{app}:{replica}{at}" if app else f"{replica}{at}", route, thread)
            found[*labels, *(names[number] for number in stack["functions"])] += stack["seconds"]
    return dict(found)


def hottest(found: Mapping[Path, float], most: int) -> list[tuple[float, str, str]]:
    """Return the functions in which most time was spent itself: seconds, route and function."""
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for path, seconds in found.items():
        spent[path[1], path[-1]] += seconds
    return sorted(((seconds, *key) for key, seconds in spent.items()), reverse=True)[:most]


def as_speedscope(found: Mapping[Path, float], title: str) -> str:
    """Return the file of https://www.speedscope.app: a profile for each thread of `paths`."""
    frames: dict[str, int] = {}
    threads: dict[str, list[tuple[Path, float]]] = defaultdict(list)
    for path, seconds in sorted(found.items()):
        threads[f"{path[0]}, thread {path[2]}"].append(((path[1], *path[3:]), seconds))
    profiles = [
        {
            "type": "sampled",
            "name": name,
            "unit": "seconds",
            "startValue": 0,
            "endValue": sum(seconds for _, seconds in stacks),
            "samples": [
                [frames.setdefault(one, len(frames)) for one in path] for path, _ in stacks
            ],
            "weights": [seconds for _, seconds in stacks],
        }
        for name, stacks in threads.items()
    ]
    return json.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "name": title,
            "exporter": "ingress",
            "shared": {"frames": [{"name": each} for each in frames]},
            "profiles": profiles,
        }
    )


WIDTH, ROW, LEAST = 1200.0, 18, 0.5  # of a picture, a function in it, and of what is drawn
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1f2328; } rect { stroke: #fff; stroke-width: .5; }
.l0 { fill: #d1d9e0; } .l1 { fill: #b6d7ff; } .l2 { fill: #c9e8c9; } .l3 { fill: #ffb77c; }
"""


@dataclass(slots=True)
class _Part:
    """A part of the picture: a label, or a function and those that it calls."""

    seconds: float = 0.0
    parts: dict[str, _Part] = field(default_factory=dict)


def as_flame_graph(found: Mapping[Path, float], title: str) -> str:
    """Return an SVG: the callers above the functions that they call, each as wide as its time."""
    root, lines, depth = _Part(), list[str](), 0
    for path, seconds in found.items():
        part = root
        part.seconds += seconds
        for name in path:
            part = part.parts.setdefault(name, _Part())
            part.seconds += seconds
    todo = [(title, root, 0, 0.0)]
    for name, part, level, x in todo:
        width = part.seconds / (root.seconds or 1.0) * WIDTH
        if width < LEAST:
            continue
        depth = max(depth, level + 1)
        share = f"{part.seconds:.2f} s, {width / WIDTH:.1%}"
        fits = int((width - 6) / width_of("x", 11))
        shown = name if len(name) <= fits else f"{name[: fits - 1]}…" if fits > 2 else ""
        size = f'x="{x:.1f}" y="{level * ROW}" width="{width:.1f}" height="{ROW}"'
        rect = f'<rect class="l{min(level, 4) - (level > 0)}" {size}/>'
        label = text(x + 3, level * ROW + 13, shown) if shown else ""
        lines.append(f"<g><title>{escape(name)}: {share}</title>{rect}{label}</g>")
        for each, below in sorted(part.parts.items()):
            todo.append((each, below, level + 1, x))
            x += below.seconds / (root.seconds or 1.0) * WIDTH
    box = f'viewBox="0 0 {WIDTH:.0f} {depth * ROW}" width="{WIDTH:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n<style>{STYLE}</style>'
    return "\n".join([head, *lines, "</svg>\n"])
