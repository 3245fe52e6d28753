"""The code that runs now in the child processes of replicas: each child tells it when it is asked.

A child whose event loop stands still cannot answer. Its replica then has what the server's process
knows: its calls, and how long the loop has stood.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic

from ingress.observe.live.documents import ReplicaNow
from ingress.observe.live.running import STOOD_S, Running, stood_s
from ingress.serving.processes.process_host import ProcessHost
from ingress.serving.replicas.replica import Replica

logger = logging.getLogger("ingress")

ANSWER_S = 0.3  # for the answers of all children together

Answers = list[Callable[[float], ReplicaNow | None] | None]

_RUNNING = Running()


def ask(replicas: Sequence[Replica]) -> Answers:
    """Begin to ask the children of replicas; `None` for a replica without a child that answers."""
    return [_asked(each) for each in replicas]


def _asked(replica: Replica) -> Callable[[float], ReplicaNow | None] | None:
    host = replica.host
    if not isinstance(host, ProcessHost) or replica.is_ending or stood_s(host) > STOOD_S:
        return None
    try:
        return host.look(_seen_there, timeout_s=ANSWER_S)
    except RuntimeError:  # its loop has ended
        return None


def _seen_there(replica: Replica) -> ReplicaNow:
    """Return what runs on a replica, in its child process."""
    return _RUNNING.look([replica], {})[0]


def add(seen: Sequence[ReplicaNow], answers: Answers) -> None:
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
