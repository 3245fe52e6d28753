"""What is said of an application that takes its time to start: what still constructs, and where."""

from __future__ import annotations

import asyncio
import logging

from ingress.control.controller import RunningApplication
from ingress.watchdog.stacks import current_frames, read

logger = logging.getLogger("ingress")

STILL_STARTING_S = 30.0
_NAMED = 8


async def tell_while_starting(application: RunningApplication) -> None:
    """Log what still constructs, after `STILL_STARTING_S` and then after twice the time again."""
    passed_s, next_s = 0.0, STILL_STARTING_S
    while True:
        await asyncio.sleep(next_s - passed_s)
        passed_s, next_s = next_s, 2 * next_s
        logger.warning(
            "application '%s' still starts after %.0f s: %s",
            application.name,
            passed_s,
            constructing(application),
        )


def constructing(application: RunningApplication) -> str:
    """Return which replicas have not started, and the line of those whose constructors run."""
    deployments = application.deployments.values()
    replicas = [replica for each in deployments for replica in each.starting]
    frames = current_frames()
    texts = []
    for replica in replicas[:_NAMED]:
        stack = read(None if replica.thread is None else frames.get(replica.thread))
        where = f" at {stack.place}" if stack.is_users else ""
        texts.append(f"{replica.replica_id}{where}")
    if len(replicas) > _NAMED:
        texts.append(f"and {len(replicas) - _NAMED} more")
    return ", ".join(texts) or "what it replaces is yet to end"
