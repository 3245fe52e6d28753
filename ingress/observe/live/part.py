"""The answers of this process to the observer of its server, which may have several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypedDict

from ingress.observe.live.configuration import Configuration, configuration_of
from ingress.observe.live.recording import Recording, record
from ingress.state.looking import Look, look_at, replicas_of
from ingress.state.memory import MemoryOfProcess, memory
from ingress.state.server import Server, Snapshot, snapshot_of
from ingress.telemetry.logs.last_lines import LAST_LINES, LogLine


class LinesOfReplica(TypedDict):
    """The last log lines of a replica, the oldest first."""

    application: str
    deployment: str
    replica: str
    lines: list[LogLine]


class LinesPart(TypedDict):
    """The last log lines of the replicas of one process."""

    pid: int
    replicas: list[LinesOfReplica]


def parts_of(server: Server, what: str, argument: float = 0.0) -> tuple[list[Any], dict[int, str]]:
    """Return the answer of this process as its `Observer` asks for it: no process is absent."""
    return [WHAT[what](server, argument)], {}


def snapshot(server: Server, argument: float = 0.0) -> Snapshot:
    """Return the state of this process."""
    return snapshot_of(server)


def look(server: Server, argument: float = 0.0) -> Look:
    """Return the state of this process, and what runs on its replicas now."""
    return look_at(server)


def configuration(server: Server, argument: float = 0.0) -> Configuration:
    """Return the options of this process, and the callables that the flag would move."""
    applications = list(server.applications.values())
    return configuration_of(applications, server.settings, server.http)


def last_lines(server: Server, argument: float = 0.0) -> LinesPart:
    """Return the last log lines of the replicas of this process."""
    return {
        "pid": os.getpid(),
        "replicas": [
            {
                "application": application,
                "deployment": deployment,
                "replica": replica,
                "lines": lines,
            }
            for (application, deployment, replica), lines in LAST_LINES.all().items()
        ],
    }


def recording(server: Server, seconds: float) -> Recording:
    """Return a recording of some seconds. It blocks."""
    return {"pid": os.getpid(), "trace": record(replicas_of(server), seconds)}


def growth(server: Server, seconds: float) -> list[MemoryOfProcess]:
    """Return what grows in some seconds. It blocks."""
    return memory(server.http.command_line.process, replicas_of(server), seconds)


WHAT: Mapping[str, Callable[[Server, float], Any]] = {
    "snapshot": snapshot,
    "look": look,
    "configuration": configuration,
    "lines": last_lines,
    "memory": growth,
    "record": recording,
}
"""The questions of an observer."""
