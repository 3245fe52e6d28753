"""The memory of a server: how it grows, and the lines and types of objects that it grows by.

    Growth       the resident memory of each process in the last hour, from a look every minute
    memory_of    two looks at the objects of a process, for `ingress memory`

A look at the growth costs a read of `/proc`. `memory_of` traces allocations meanwhile, which slows
the process to about a third; a server that is not asked pays nothing.
"""

from __future__ import annotations

import gc
import linecache
import os
import threading
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import sleep

from ingress.core.base.libraries import is_library
from ingress.core.base.process import process_facts
from ingress.observe.live.documents import MemoryOfProcess, MemoryPart, ProcessMemory
from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.replica import Replica

STEP_S = 60.0
POINTS = 61
LEAST_S = 90.0
"""Seconds before which nothing is said about growth: a server that starts grows."""

TOP = 10  # lines and types
_FRAMES = 12  # of an allocation: some are those of libraries
_ASK_S = 10.0  # for the answer of a child, which imports this module first

_looking = threading.Lock()


@dataclass(eq=False, slots=True)
class Growth:
    """The resident memory of processes in the last hour, in bytes, by name. Of one thread."""

    _points: deque[tuple[float, Mapping[str, int]]] = field(
        default_factory=lambda: deque(maxlen=POINTS)
    )

    def add(self, at: float, found: Mapping[str, int]) -> list[ProcessMemory]:
        """Take the memory of now, and return it with its growth by the hour.

        `at` is monotonic. The growth is that since the first look at a process, or an hour ago.
        """
        if not self._points or at - self._points[-1][0] >= STEP_S:
            self._points.append((at, dict(found)))
        return [
            {"process": name, "rss_bytes": rss, "bytes_per_h": self._by_hour(name, at, rss)}
            for name, rss in found.items()
        ]

    def _by_hour(self, name: str, now: float, rss: int) -> float | None:
        first = next(((at, seen[name]) for at, seen in self._points if name in seen), None)
        # Not from the first look: imports and caches fill then.
        if first is None or now - first[0] < LEAST_S:
            return None
        later = next(
            (
                (at, seen[name])
                for at, seen in self._points
                if name in seen and at - first[0] >= STEP_S
            ),
            first,  # it did not answer since
        )
        span_s = now - later[0]
        return None if span_s < STEP_S / 2 else (rss - later[1]) / span_s * 3600.0


def rss_of(name: str, replicas: Iterable[Replica]) -> dict[str, int]:
    """Return the resident memory of this process, and of the child processes of replicas."""
    here = os.getpid()
    pids = {name: here} | {
        f"{name}/{each.context.app_name}/{each.replica_id}": each.host.pid
        for each in replicas
        if each.host.pid not in (0, here)
    }
    return {name: process_facts(pid).rss_bytes for name, pid in pids.items()}


def memory(name: str, replicas: Iterable[Replica], seconds: float) -> MemoryPart:
    """Return what grows in this process and in the children of its replicas. It blocks."""
    answers = [
        (each, each.host.look(_memory_there, seconds, timeout_s=seconds + _ASK_S))
        for each in replicas
        if isinstance(each.host, ProcessHost)
    ]
    found = [memory_of(name, seconds)]
    for replica, answer in answers:
        try:
            told: MemoryOfProcess = answer()
        except Exception as error:  # it stands still, or has ended
            told = _empty(f"{name}/{replica.context.app_name}/{replica.replica_id}", repr(error))
        found.append({**told, "process": f"{name}/{told['process']}"})
    return {"pid": os.getpid(), "processes": found}


def _memory_there(replica: Replica, seconds: float) -> MemoryOfProcess:
    return memory_of(f"{replica.context.app_name}/{replica.replica_id}", seconds)


def _empty(process: str, problem: str) -> MemoryOfProcess:
    return {
        "process": process,
        "problem": problem,
        "before_bytes": 0,
        "after_bytes": 0,
        "lines": [],
        "types": [],
    }


def memory_of(name: str, seconds: float) -> MemoryOfProcess:
    """Return the lines and types of objects by which this process grows in some seconds.

    A line is the innermost of user code that led to the allocation, or else that of the allocation.
    """
    if not _looking.acquire(blocking=False):
        return _empty(name, "another look goes on")
    was_tracing = tracemalloc.is_tracing()
    try:
        if not was_tracing:
            tracemalloc.start(_FRAMES)
        rss, types = process_facts(os.getpid()).rss_bytes, _types()
        before = tracemalloc.take_snapshot()
        sleep(seconds)
        gc.collect()  # what is garbage is no leak
        after = tracemalloc.take_snapshot()
        more = _types()
        more.subtract(types)
        lines = _lines(after.compare_to(before, "traceback"))
    finally:
        if not was_tracing:
            tracemalloc.stop()
        _looking.release()
    return {
        "process": name,
        "problem": "",
        "before_bytes": rss,
        "after_bytes": process_facts(os.getpid()).rss_bytes,
        "lines": [
            {
                "file": file,
                "line": line,
                "source": linecache.getline(file, line).strip(),
                "bytes": size,
                "blocks": count,
            }
            for (file, line), (size, count) in lines[:TOP]
        ],
        "types": [
            {"type": kind, "objects": count} for kind, count in more.most_common(TOP) if count > 0
        ],
    }


def _types() -> Counter[str]:
    """Return the numbers of objects, by type; those without references are not counted."""
    kinds = Counter(map(type, gc.get_objects()))
    return Counter({f"{each.__module__}.{each.__qualname__}": kinds[each] for each in kinds})


def _lines(
    found: Iterable[tracemalloc.StatisticDiff],
) -> list[tuple[tuple[str, int], tuple[int, int]]]:
    """Return the lines that have grown, each with its bytes and blocks, the largest first."""
    grown: dict[tuple[str, int], tuple[int, int]] = {}
    for each in found:
        frames = list(each.traceback)  # the outermost first
        if not frames or frames[-1].filename == tracemalloc.__file__:
            continue
        users = [one for one in frames if not is_library(one.filename)]
        place = (users or frames)[-1]
        size, count = grown.get((place.filename, place.lineno), (0, 0))
        key = place.filename, place.lineno
        grown[key] = size + each.size_diff, count + each.count_diff
    more = [(key, values) for key, values in grown.items() if values[0] > 0]
    return sorted(more, key=lambda each: -each[1][0])
