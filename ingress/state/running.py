"""The code that runs on each replica now, read from outside.

    Replica.calls            its calls, each with its task
    stacks.current_frames    the line of each thread, once for all replicas
    ThreadClocks             the processor time of each loop's thread
    WATCHDOG.stalls          the recent stalls, and those that go on

A request pays nothing for it. A thread runs on while it is read: a call may have ended, or be in
two places for a moment.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic, time
from types import FrameType
from typing import TypedDict

from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.execution.threads import WorkerPool
from ingress.serving.replicas.host import Host, OwnPart
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.watchdog import WATCHDOG, Stall
from ingress.telemetry.watchdog import StallReason as StallReason
from ingress.telemetry.watchdog.clocks import ThreadClocks
from ingress.telemetry.watchdog.records import SPAN_S, Stalls
from ingress.telemetry.watchdog.stacks import (
    NOWHERE,
    CodeLine,
    awaiting,
    current_frames,
    is_idle_worker,
    read,
    running_task,
    value_in,
    worker_context,
)

CALLS = 20
"""Number of calls of a replica that are listed; the oldest come first."""

STOOD_S = 1.0  # four heartbeats of a child

STALLS = 5
"""Number of recent stalls of a replica that are listed."""

WORST = 10
"""Number of lines of a replica that are listed with their longest stall."""

MINUTE_S = 60.0


class Line(TypedDict):
    """A line of code with its source."""

    file: str
    line: int
    function: str
    source: str


class StallOfLoop(TypedDict):
    """A stall of an event loop. `at` is Unix time."""

    at: float
    ms: float
    reason: str
    is_over: bool
    method: str
    request_ids: list[str]
    waited: int
    imports: str
    line: Line | None
    holders: list[str]
    scarcity: str


class StallsIn(TypedDict):
    """The stalls at one line in some time: how often, the longest, the most that waited for one."""

    times: int
    ms: float
    waited: int


class StallsOfLine(StallOfLoop):
    """The longest stall at a line in 15 minutes, and all of them in that time and in a minute."""

    minute: StallsIn | None
    quarter: StallsIn


class Named(TypedDict):
    """A call as a line of `ingress top` names it. `ms` is its age."""

    request_id: str
    title: str
    ms: float | None


class LoopRun(Named):
    """A call that runs on an event loop."""

    method: str
    line: Line | None


class ThreadRun(LoopRun):
    """A call that runs in a worker thread."""

    thread: str


class Loop(TypedDict):
    """An event loop. `busy` is its thread's share of a processor since the last look."""

    thread: str
    is_shared: bool
    busy: float | None
    stands_ms: float
    runs: LoopRun | None


class Threads(TypedDict):
    """The worker threads of a replica, or of one lane."""

    limit: int
    alive: int
    queued: int
    runs: list[ThreadRun]


class Lane(Threads):
    """A declared lane, or "serial"; `queued` are the calls that wait for it."""

    name: str
    ongoing: int


class Batches(TypedDict):
    """The size and the wait that `target_latency_ms` has chosen for a function, and why."""

    name: str
    size: int
    wait_ms: float
    target_ms: float
    reason: str


class RunningCall(Named):
    """A call of a replica, and the place where it runs or waits."""

    queue_ms: float
    where: str
    line: Line | None
    is_orphan: bool


class ReplicaNow(TypedDict):
    """The calls and threads of a replica now. `pid` is that of its child process."""

    application: str
    deployment: str
    replica: str
    state: str
    pid: int | None
    slots: int
    ongoing: int
    loop: Loop
    threads: Threads
    lanes: list[Lane]
    batches: list[Batches]
    calls: list[RunningCall]
    more_calls: int
    stalls: list[StallOfLoop]
    worst: list[StallsOfLine]


@dataclass(eq=False, slots=True)
class Running:
    """The looks at the replicas of this process. Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _clocks: ThreadClocks = field(default_factory=ThreadClocks)
    # By thread: when it was read, and its time.
    _ran: dict[int, tuple[float, float]] = field(default_factory=dict)

    def look(
        self, replicas: Iterable[Replica], deployed_at_s: Mapping[str, float]
    ) -> list[ReplicaNow]:
        """Return what runs on each of these replicas, with the stalls since the deployments."""
        with self._lock:
            return self._look(list(replicas), deployed_at_s)

    def _look(
        self, replicas: list[Replica], deployed_at_s: Mapping[str, float]
    ) -> list[ReplicaNow]:
        now = monotonic()
        frames = current_frames()
        threads = {each.ident: each for each in threading.enumerate() if each.ident is not None}
        loops = {id(each): each.host.thread or WATCHDOG.thread_of(each.loop) for each in replicas}
        busy = self._busy(set(loops.values()) - {0}, now)
        stalls: dict[Whose, list[Stall]] = {}
        for stall in WATCHDOG.stalls():
            # The names are given again, if an application is deleted and deployed anew.
            if stall.began_at_s >= deployed_at_s.get(stall.application, 0.0):
                stalls.setdefault(_whose(stall), []).append(stall)
        worst: dict[Whose, list[StallsOfLine]] = {}
        minute = {_line_of(each): each for each in WATCHDOG.worst(time() - MINUTE_S)}
        for line in WATCHDOG.worst(time() - SPAN_S):
            stall = line.longest
            if stall.began_at_s >= deployed_at_s.get(stall.application, 0.0):
                found = _stalls_of_line(line, minute.get(_line_of(line)))
                worst.setdefault(_whose(stall), []).append(found)
        try:
            return [
                _Look(
                    each,
                    frames,
                    threads,
                    loops[id(each)],
                    busy.get(loops[id(each)]),
                    stalls.get((here.app_name, here.deployment, here.replica_tag), []),
                    worst.get((here.app_name, here.deployment, here.replica_tag), []),
                    now,
                ).as_json()
                for each in replicas
                for here in (each.context,)
            ]
        finally:
            frames.clear()  # their locals are the user's objects

    def _busy(self, idents: set[int], now: float) -> dict[int, float]:
        """Return the share of a processor that each thread had since the last look."""
        ran = self._clocks.read(idents)
        before, self._ran = self._ran, {ident: (now, each) for ident, each in ran.items()}
        return {
            ident: (each - before[ident][1]) / (now - before[ident][0])
            for ident, each in ran.items()
            if ident in before and now > before[ident][0] and each >= before[ident][1]
        }


RUNNING = Running()


@dataclass(eq=False, slots=True)
class _Look:
    """One look at one replica."""

    _replica: Replica
    _frames: dict[int, FrameType]
    _threads: dict[int, threading.Thread]
    _ident: int
    _busy: float | None
    _stalls: list[Stall]
    _worst: list[StallsOfLine]
    _now: float
    # The thread and the line of calls that run.
    _at: dict[Call, tuple[str, CodeLine]] = field(default_factory=dict)

    def as_json(self) -> ReplicaNow:
        replica = self._replica
        pools, counts = replica.host.pools, replica.host.counts()
        loads = counts.lanes
        named = {} if pools is None else pools.by_lane()
        lanes = {name: self._pool(named.get(name)) for name in ("", *loads)}
        loop = self._loop()
        calls = sorted(replica.calls.items(), key=lambda each: each[0].started_at)
        return {
            "application": replica.context.app_name,
            "deployment": replica.context.deployment,
            "replica": replica.context.replica_tag,
            "state": replica.state.value,
            "pid": pid if (pid := replica.host.pid) not in (0, os.getpid()) else None,
            "slots": replica.slots.max_ongoing,
            "ongoing": replica.ongoing,
            "loop": loop,
            "threads": lanes.pop(""),
            "lanes": [
                {
                    "name": name,
                    **lanes[name],
                    "limit": load.limit,
                    "ongoing": load.ongoing,
                    "queued": load.queued,
                }
                for name, load in loads.items()
            ],
            "batches": [
                {
                    "name": name,
                    "size": chosen.size,
                    "wait_ms": round(chosen.wait_s * 1e3, 2),
                    "target_ms": round(chosen.target_s * 1e3, 3),
                    "reason": chosen.reason,
                }
                for name, each in counts.batches.items()
                if (chosen := each.chosen) is not None
            ],
            "calls": [self._call(*each) for each in calls[:CALLS]],
            "more_calls": max(0, len(calls) - CALLS),
            "stalls": [stall_as_json(each) for each in self._stalls[-STALLS:]][::-1],
            "worst": self._worst[:WORST],
        }

    def _loop(self) -> Loop:
        """Return the replica's event loop, and the call that runs on it."""
        replica = self._replica
        thread = self._threads.get(self._ident)
        frame = self._frames.get(self._ident)
        runs: LoopRun | None = None
        if frame is not None:
            _, context = running_task(replica.loop, frame)
            call = value_in(context, CURRENT_CALL)
            if call is not None and call.runner is replica:
                stack = read(frame, replica.context)
                self._at[call] = "loop", stack.place
                runs = {**self._named(call), "method": stack.method, "line": line_of(stack.place)}
        stands_ms = max(
            (each.duration_ms for each in self._stalls if not each.is_over), default=0.0
        )
        isolation = replica.host.isolation
        if isolation is OwnPart.PROCESS and (found := stood_s(replica.host)) > STOOD_S:
            stands_ms = found * 1e3  # it cannot tell the line meanwhile
        return {
            "thread": "" if thread is None else thread.name,
            "is_shared": isolation is OwnPart.NONE,
            "busy": None if self._busy is None else round(min(1.0, self._busy), 3),
            "stands_ms": round(stands_ms, 1),
            "runs": runs,
        }

    def _pool(self, pool: WorkerPool | None) -> Threads:
        """Return the threads of a lane, or the others, and the calls that run in them."""
        if pool is None:  # in another process
            return {"limit": self._replica.slots.max_ongoing, "alive": 0, "queued": 0, "runs": []}
        threads, unfinished = pool.threads.at_work()
        runs: list[ThreadRun] = []
        for thread in threads:
            if (frame := self._frames.get(thread.ident or 0)) is None or is_idle_worker(frame):
                continue
            call = value_in(worker_context(frame), CURRENT_CALL)
            stack = read(frame, self._replica.context)
            named: Named = {"request_id": "", "title": "", "ms": None}
            if call is not None:
                self._at[call] = thread.name, stack.place
                named = self._named(call)
            if call is not None or stack.is_users:
                line = line_of(stack.place)
                runs.append({**named, "method": stack.method, "thread": thread.name, "line": line})
        return {
            "limit": pool.threads.limit,
            "alive": len(threads),
            "queued": max(0, unfinished - len(threads)),
            "runs": runs,
        }

    def _named(self, call: Call) -> Named:
        members = call.members or ()
        return {
            "request_id": call.metadata.request_id,
            "title": f"batch of {len(members)}" if members else call.title(),
            "ms": round((self._now - call.started_at) * 1e3, 3),  # compared in `problems`
        }

    def _call(self, call: Call, task: asyncio.Future[None] | None) -> RunningCall:
        """Return one call: where it runs, or what it awaits."""
        where, place = self._at.get(call, ("", NOWHERE))
        if not where:
            where = "awaits" if call.began_at else "starts"
            place = awaiting(task.get_coro()) if isinstance(task, asyncio.Task) else NOWHERE
        return {
            **self._named(call),
            "queue_ms": round(max(0.0, call.assigned_at - call.started_at) * 1e3, 1),
            "where": where,
            "line": line_of(place),
            "is_orphan": call.settled,
        }


Whose = tuple[str, str, str]
"""An application, a deployment and a replica."""


def _whose(stall: Stall) -> Whose:
    return stall.application, stall.deployment, stall.replica


def _line_of(stalls: Stalls) -> tuple[object, ...]:
    stall = stalls.longest
    return *_whose(stall), stall.reason, stall.place.file, stall.place.line


def _stalls_of_line(quarter: Stalls, minute: Stalls | None) -> StallsOfLine:
    return {
        **stall_as_json(quarter.longest),
        "minute": None if minute is None else _in_words(minute),
        "quarter": _in_words(quarter),
    }


def _in_words(stalls: Stalls) -> StallsIn:
    ms = round(stalls.longest.duration_ms, 1)
    return {"times": stalls.times, "ms": ms, "waited": stalls.waited}


def stood_s(host: Host) -> float:
    """Return the seconds for which the user loop of a process has not turned."""
    standing = host.standing()
    return 0.0 if standing is None else monotonic() - standing[0]


def line_of(place: CodeLine) -> Line | None:
    """Return a line of code with its source; `None` for no line."""
    if not place.file:
        return None
    return {
        "file": place.file,
        "line": place.line,
        "function": place.function,
        "source": linecache.getline(place.file, place.line).strip(),
    }


def stall_as_json(stall: Stall) -> StallOfLoop:
    """Return a stall of an event loop, with its line."""
    return {
        "at": stall.began_at_s,
        "ms": round(stall.duration_ms, 1),
        "reason": stall.reason.value,
        "is_over": stall.is_over,
        "method": stall.method,
        "request_ids": list(stall.request_ids),
        "waited": stall.waited,
        "imports": stall.imports,
        "line": line_of(stall.place),
        "holders": [each.thread for each in stall.holders]
        if stall.reason is StallReason.GIL
        else [],
        "scarcity": stall.scarcity,
    }
