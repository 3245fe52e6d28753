"""Log records on an application that starts slowly: its unfinished constructors and their lines."""

from __future__ import annotations

import asyncio
import logging

from ingress.serving.control.health import place_of_start
from ingress.serving.control.running import RunningApplication
from ingress.telemetry.watchdog.stacks import NOWHERE

logger = logging.getLogger("ingress")

STILL_STARTING_S = 10.0
_NAMED = 8


async def tell_while_starting(application: RunningApplication) -> None:
    """Log the unfinished constructors after `STILL_STARTING_S`, then each time that doubles."""
    passed_s, next_s = 0.0, STILL_STARTING_S
    while True:
        await asyncio.sleep(next_s - passed_s)
        passed_s, next_s = next_s, 2 * next_s
        logger.warning(
            "application '%s' is still starting after %.0f s: %s",
            application.name,
            passed_s,
            constructing(application),
        )


def constructing(application: RunningApplication) -> str:
    """Return the replicas that have not started, and the current lines of their constructors."""
    replicas = [replica for each in application.deployments.values() for replica in each.starting]
    texts = []
    for replica in replicas[:_NAMED]:
        place = place_of_start(replica)
        where = "" if place is NOWHERE else f" at {place}"
        texts.append(f"{replica.replica_id}{where}")
    if len(replicas) > _NAMED:
        texts.append(f"and {len(replicas) - _NAMED} more")
    nothing = "none of its replicas has begun; an application that it replaces ends first"
    return ", ".join(texts) or nothing
