"""Log records on an application that starts slowly: its unfinished constructors and their lines."""

from __future__ import annotations

import asyncio
import logging

from ingress.control.controller import RunningApplication
from ingress.watchdog.stacks import current_frames, read

logger = logging.getLogger("ingress")

STILL_STARTING_S = 30.0
_NAMED = 8


async def tell_while_starting(application: RunningApplication) -> None:
    """Log the unfinished constructors after `STILL_STARTING_S`, then each time that doubles."""
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
    """Return the replicas that have not started, and the current lines of their constructors."""
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
