"""The growth of a process: two looks at its objects, for `ingress memory`.

Allocations are traced meanwhile, which slows the process to about a third; a server that is not
asked pays nothing.
"""

from __future__ import annotations

import gc
import linecache
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from time import sleep
from typing import TypedDict

from ingress.core.base.foreign import title_of
from ingress.core.base.libraries import is_library
from ingress.core.base.process import process_facts
from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.replica import Replica
from ingress.state.looking import replicas_of
from ingress.state.server import Server
from ingress.telemetry.logs import logger

TOP = 10  # lines and types
_FRAMES = 12  # of an allocation: some are those of libraries
_ASK_S = 10.0  # for the answer of a child, which imports this module first

_looking = threading.Lock()


class GrownLine(TypedDict):
    """A line of code, and the bytes and blocks that it has allocated and that are in use."""

    file: str
    line: int
    source: str
    bytes: int
    blocks: int


class GrownType(TypedDict):
    """A type, and by how many its objects have become more."""

    type: str
    objects: int


class MemoryOfProcess(TypedDict):
    """The growth of one process between two moments; `problem` says why it is not known."""

    process: str
    problem: str
    before_bytes: int
    after_bytes: int
    lines: list[GrownLine]
    types: list[GrownType]


def memory(server: Server, seconds: float) -> list[MemoryOfProcess]:
    """Return what grows in this process and in the children of its replicas. It blocks."""
    answers = [
        (each, each.host.look(_memory_there, seconds, timeout_s=seconds + _ASK_S))
        for each in replicas_of(server)
        if isinstance(each.host, ProcessHost)
    ]
    name = server.http.command_line.process
    found = [memory_of(name, seconds)]
    for replica, answer in answers:
        try:
            told: MemoryOfProcess = answer()
        except Exception as error:  # it stands still, or has ended
            logger.debug("a replica does not tell its memory", exc_info=True)
            told = _empty(f"{name}/{replica.context.app_name}/{replica.replica_id}", repr(error))
        found.append({**told, "process": f"{name}/{told['process']}"})
    return found


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
    objects = gc.get_objects()
    kinds = {id(each): each for each in map(type, objects)}  # a metaclass may refuse to be hashed
    found: Counter[str] = Counter()
    for each, number in Counter(map(id, map(type, objects))).items():
        found[title_of(kinds[each])] += number  # classes of a factory have one name
    return found


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
