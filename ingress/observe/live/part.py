"""The answers of this process to the observer of its server, which may have several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ingress.observe.live.configuration import configuration_of
from ingress.observe.timeline.sampling import record
from ingress.state.looking import last_lines, look_at, replicas_of
from ingress.state.memory import memory
from ingress.state.server import Server, snapshot_of


def parts_of(server: Server, what: str, argument: float = 0.0) -> tuple[list[Any], dict[int, str]]:
    """Return the answer of this process as its `Observer` asks for it: no process is absent."""
    return [WHAT[what](server, argument)], {}


WHAT: Mapping[str, Callable[[Server, float], Any]] = {
    "snapshot": lambda server, _: snapshot_of(server),
    "look": lambda server, _: look_at(server),
    "configuration": lambda server, _: configuration_of(server),
    "lines": lambda server, _: last_lines(),
    "memory": memory,
    "record": lambda server, seconds: {
        "pid": os.getpid(),
        "trace": record(replicas_of(server), seconds),
    },
}
"""The questions of an observer; the last two block for so many seconds."""
