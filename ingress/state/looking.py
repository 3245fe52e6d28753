"""A look at this process: its snapshot, and what runs on each of its replicas now.

Each child process tells what runs there when it is asked. A child whose event loop stands still
cannot answer. Its replica then has what the server's process knows: its calls, and how long the
loop has stood.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.replica import Replica
from ingress.state.running import RUNNING, STOOD_S, ReplicaNow, stood_s
from ingress.state.server import Server, Snapshot, snapshot_of
from ingress.telemetry.logs import logger
from ingress.telemetry.logs.last_lines import LAST_LINES
from ingress.telemetry.logs.last_lines import LogLine as LogLine
from ingress.telemetry.notable import NOTABLE

ANSWER_S = 0.3  # for the answers of all children together


@dataclass(slots=True)
class Look:
    """The state of a process now. `slowest` and `failed` are calls of `telemetry.notable`."""

    snapshot: Snapshot
    replicas: list[ReplicaNow]
    slowest: list[dict[str, Any]]
    failed: list[dict[str, Any]]

    @property
    def pid(self) -> int:
        return self.snapshot.pid


def look_at(server: Server) -> Look:
    """Return the state of this process. Thread-safe; it blocks."""
    replicas = replicas_of(server)
    answers = [_asked(each) for each in replicas]
    deployed_at_s = {name: each.deployed_at_s for name, each in dict(server.applications).items()}
    seen = RUNNING.look(replicas, deployed_at_s)
    _add(seen, answers)
    slowest, failed = NOTABLE.recent()
    return Look(
        snapshot_of(server),
        seen,
        [each.as_json() for each in slowest],
        [each.as_json() for each in failed],
    )


def replicas_of(server: Server) -> list[Replica]:
    """Return the replicas of the applications that run."""
    return [
        replica
        for application in dict(server.applications).values()
        for deployment in dict(application.deployments).values()
        for replica in deployment.replicas
    ]


def _asked(replica: Replica) -> Callable[[float], ReplicaNow | None] | None:
    """Begin to ask the child of a replica; `None` without a child that answers."""
    host = replica.host
    if not isinstance(host, ProcessHost) or replica.is_ending or stood_s(host) > STOOD_S:
        return None
    try:
        return host.look(_seen_there, timeout_s=ANSWER_S)
    except RuntimeError:  # its loop has ended
        return None


def _seen_there(replica: Replica) -> ReplicaNow:
    return RUNNING.look([replica], {})[0]


def _add(
    seen: Sequence[ReplicaNow],
    answers: Sequence[Callable[[float], ReplicaNow | None] | None],
) -> None:
    """Add the answers of children to what the server's process has seen of their replicas."""
    deadline = monotonic() + ANSWER_S
    for here, answer in zip(seen, answers, strict=True):
        try:
            there = None if answer is None else answer(max(0.0, deadline - monotonic()))
        except Exception:  # late, or it has ended
            logger.debug("the child of %s does not answer", here["replica"], exc_info=True)
            continue
        if there is not None:
            here["loop"] = {**there["loop"], "stands_ms": here["loop"]["stands_ms"]}
            here["threads"], here["lanes"] = there["threads"], there["lanes"]
            known = {(each["request_id"], each["title"]): each for each in there["calls"]}
            for call in here["calls"]:
                found = known.get((call["request_id"], call["title"]))
                if found is not None:
                    call["where"], call["line"] = found["where"], found["line"]


def last_lines() -> dict[tuple[int, str, str, str], list[LogLine]]:
    """Return the last log lines of the replicas of this process, the oldest first.

    They are by the id of the process, application, deployment and replica.
    """
    return {(os.getpid(), *key): lines for key, lines in LAST_LINES.all().items()}
