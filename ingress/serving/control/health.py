"""The health of replicas: their checks, their loops, and the slots that orphans hold.

    check_health   asked once a period; three failures in a row make a replica ill
    a stuck loop   has not turned for longer than it may: the watchdog's heartbeat has no answer
    orphans        hold all slots for longer than they may: answered calls whose code runs on
    worn           a process has reached `max_requests_per_replica` or `max_memory_mb`

These are facts for `plan.decide`, which decides about the replica. Owned by the control loop.
"""

from __future__ import annotations

import asyncio

from ingress.context import REPLICA
from ingress.core.base.process import process_facts
from ingress.serving.control.plan import Phase
from ingress.serving.control.running import SHORT_LIFE_S, Member, RunningDeployment
from ingress.serving.replicas.host import OwnPart
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.logs import logger
from ingress.telemetry.mistakes import described
from ingress.telemetry.watchdog.stacks import (
    NOWHERE,
    CodeLine,
    awaiting,
    current_frames,
    read,
    value_in,
    worker_context,
)

LOOKS = 2  # in a row at which a replica seems stuck, until it counts as stuck
ORPHANS_S = 0.5  # between two counts of a full replica's orphans
EXTRA = 0.1  # of the requests, at most: replicas that started together retire at different times
TELL_S = 30.0  # between two log records on a replica that is still starting, or reconfiguring


def observe(deployment: RunningDeployment, now: float, wedged_after_s: float | None) -> None:
    """Look at each replica of a deployment, and start the health checks that are due.

    `wedged_after_s` replaces `health_check_timeout_s` for loops and orphans, unless it is `None`.
    """
    after_s = wedged_after_s or deployment.config.health_check_timeout_s
    for member in deployment.members:
        if member.phase in (Phase.SERVING, Phase.AWAY, Phase.PARKED):
            _note_stuck(member, now, after_s)
        elif member.phase is Phase.LEAVING and _stands(member, now, after_s):
            member.replica.hand_over()
        if member.phase is Phase.SERVING and deployment.has_started:
            _note_worn(deployment, member, now)
        if member.phase is Phase.SERVING and now >= member.looks.check_at and not member.stuck:
            member.looks.check_at = now + deployment.config.health_check_period_s
            check = member.looks.check
            if check is None or check.done():
                asking = _ask(deployment, member)
                member.looks.check = asyncio.get_running_loop().create_task(asking)
        elif member.phase is Phase.STARTING and deployment.has_started:
            _tell(member, now, member.started_at, "starting")
        elif member.phase is Phase.AWAY and member.replica.is_reconfiguring:
            _tell(member, now, member.away_at, "reconfiguring")
    deployment.left = [each for each in deployment.left if not each.host.has_left()]


async def _ask(deployment: RunningDeployment, member: Member) -> None:
    replica, timeout_s = member.replica, deployment.config.health_check_timeout_s
    is_overdue = "check_health" in replica.asked
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await replica.check_health()
    except Exception as error:
        if member.phase is not Phase.SERVING:
            return  # it was taken out of routing meanwhile: its loop may be stuck, or have ended
        reason = (
            f"check_health did not answer within {timeout_s} s"
            if limit.expired() or is_overdue
            else f"check_health raised {described(error)}"
        )
        member.failures += 1
        member.failed_checks += 1
        if member.is_ill:
            replica.unhealthy_reason = reason
        logger.warning("%s: %s (%d in a row)", replica.replica_id, reason, member.failures)
    else:
        member.failures = 0
        replica.unhealthy_reason = ""


def _note_stuck(member: Member, now: float, after_s: float) -> None:
    """Note whether a replica is stuck, and why. A log record tells when that changes."""
    reason = _stands(member, now, after_s) or _is_orphaned(member, now, after_s)
    if not reason:
        if member.stuck:
            logger.warning("%s goes on, and gets calls again", member.replica.replica_id)
        member.stuck, member.looks.suspected = "", 0
        return
    # Race with a loop that turns at this moment: the watchdog or this loop may have waited for the
    # GIL as long as that loop did, and has yet to see its answer.
    member.looks.suspected += 1
    if member.stuck or member.looks.suspected < LOOKS:
        return
    member.stuck = f"{reason} at {place}" if (place := _place(member.replica)) else reason
    fate = _FATES[member.replica.host.isolation]
    logger.error("%s is stuck: %s; %s", member.replica.replica_id, member.stuck, fate)


_FATES = {
    OwnPart.NONE: "its loop is not its own, so it cannot be replaced",
    OwnPart.THREAD: "it gets no more calls, and another replica takes its place",
    OwnPart.PROCESS: "its process is ended, and another replica takes its place",
}


def _stands(member: Member, now: float, after_s: float) -> str:
    """Return a reason if the event loop has not turned for too long.

    Timed here: the watchdog forgives a stall whenever the machine keeps it waiting itself.
    """
    host = member.replica.host
    standing = host.standing()
    if standing is None:
        member.looks.stands = None
        return ""
    beats, stack = standing
    if member.looks.stands is None or member.looks.stands[0] != beats:  # it has turned since
        member.looks.stands = beats, now
    if now - member.looks.stands[1] <= after_s or stack.is_debugged or host.may_stand:
        return ""
    return f"its event loop has not turned for more than {after_s:g} s"


def _is_orphaned(member: Member, now: float, after_s: float) -> str:
    """Return a reason if orphans have held all slots for too long."""
    slots = member.replica.slots
    if slots.ongoing < slots.max_ongoing:
        member.looks.orphaned_at = None
        return ""
    if now >= member.looks.orphans_at:  # seldom, because it counts the calls
        member.looks.orphans_at = now + min(ORPHANS_S, after_s / 4)
        if member.replica.orphans < slots.ongoing:
            member.looks.orphaned_at = None
        elif member.looks.orphaned_at is None:
            member.looks.orphaned_at = now
    if member.looks.orphaned_at is None or now - member.looks.orphaned_at <= after_s:
        return ""
    return (
        f"all of its {slots.max_ongoing} slots have been held for more than {after_s:g} s by calls "
        "whose callers have gone, and whose code runs on"
    )


def _note_worn(deployment: RunningDeployment, member: Member, now: float) -> None:
    """Note whether a replica has reached a limit of its life: it serves until another does."""
    if member.worn or deployment.is_updating():
        return
    config, replica = deployment.config, member.replica
    most, most_mb = config.max_requests_per_replica, config.max_memory_mb
    if most is not None and replica.slots.begun >= most * (1 + EXTRA * member.looks.extra):
        member.worn = (
            f"it has begun {replica.slots.begun} requests (max_requests_per_replica={most})"
        )
        logger.info("%s retires: %s", replica.replica_id, member.worn)
    elif most_mb is None:
        member.excess = ""
    elif member.looks.measuring is None or member.looks.measuring.done():
        measuring = _note_memory(deployment, member, most_mb)
        member.looks.measuring = asyncio.get_running_loop().create_task(measuring)


async def _note_memory(deployment: RunningDeployment, member: Member, most_mb: float) -> None:
    """Note whether the process of a replica has too much memory."""
    facts = await asyncio.to_thread(process_facts, member.replica.host.pid)
    if member.phase is not Phase.SERVING or deployment.is_stopping:
        return
    has_mb, now = facts.rss_bytes / 1e6, asyncio.get_running_loop().time()
    if has_mb <= most_mb:
        member.excess = ""
        return
    served_s = now - member.served_at
    text = f"it has {has_mb:.0f} MB (max_memory_mb={most_mb:g})"
    if served_s < SHORT_LIFE_S and not member.excess:
        member.excess = f"{text} within {SHORT_LIFE_S:g} s of its start; raise max_memory_mb"
    if now < deployment.setbacks.retire_at:
        return
    member.worn = member.excess or text
    pause_s = deployment.setbacks.note_outgrown(0.0 if member.excess else served_s, now)
    later = f"; the next retires in {pause_s:g} s at the earliest" if pause_s else ""
    logger.warning("%s retires: %s%s", member.replica.replica_id, member.worn, later)


def _place(replica: Replica) -> str:
    """Return the line of user code that keeps a replica from going on, "" if it is not found."""
    if replica.host.isolation is OwnPart.PROCESS:
        return ""  # it is in another process
    standing = replica.host.standing()
    if standing is not None and standing[1].is_users:
        return str(standing[1].place)
    for frame in current_frames().values():
        if value_in(worker_context(frame), REPLICA) is replica.context:
            return str(read(frame, replica.context).place)
    for task in asyncio.all_tasks(replica.loop):
        if (place := awaiting(task.get_coro())) is not NOWHERE:
            return str(place)
    return ""


def _tell(member: Member, now: float, since: float, activity: str) -> None:
    """Log each `TELL_S` that a replica is still starting, with the line that user code is at."""
    if now < max(member.looks.tell_at, since + TELL_S):
        return
    member.looks.tell_at = now + TELL_S
    where = f" at {place}" if (place := place_of_start(member.replica)) is not NOWHERE else ""
    logger.warning(
        "%s is still %s after %.0f s%s", member.replica.replica_id, activity, now - since, where
    )


def place_of_start(replica: Replica) -> CodeLine:
    """Return the line that a constructor, lifespan or `reconfigure` of a replica is at."""
    frames = current_frames()
    thread = replica.host.thread
    stack = read(None if thread is None else frames.get(thread))
    return stack.place if stack.is_users else _awaited(replica.loop)


_STARTS = ("ThreadHost._start", "Lifespan._run", "Replica._reconfigure")
"""The coroutines that start a replica's user code, or change its `user_config`."""


def _awaited(loop: asyncio.AbstractEventLoop) -> CodeLine:
    """Return the line that such an `async` function on this loop awaits."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks(loop)]
    # A constructor's is awaited by the one of `run_on`.
    inner = [getattr(each, "cr_await", None) for each in coroutines]
    starts = (each for each in coroutines + inner if getattr(each, "__qualname__", "") in _STARTS)
    places = [place for each in starts if (place := awaiting(each)) is not NOWHERE]
    return places[0] if places else NOWHERE
