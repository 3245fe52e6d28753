"""The decision of the control plane: the actions that make the replicas those that are desired.

    decide(desired, observed, now) -> actions            a pure function

    a start, an added replica           count is too low: START
    scaling down                        count is too high: DROP, the newest first
    a new version                       stale replicas count as surplus once fresh ones serve
    `check_health` failed three times   the replica is stale, as one of an old version
    a limit of requests or memory       the same
    a wedged loop, slots of orphans     PARK, and the count is too low; RETURN when it goes on
    a lost loop                         DROP at once
    a new `user_config`                 RECONFIGURE, one replica at a time

Healing, scaling, updates and changes of options are inputs of this one function: none of them has a
loop of its own. A new replica serves before the one that it replaces leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

RETRY_S = 0.5  # after the first start that failed; doubled after each further one
LONGEST_RETRY_S = 60.0


class Phase(Enum):
    """The relation of a replica to its router.

    STARTING   its constructor runs
    SERVING    the router gives it calls
    AWAY       its last calls end, or it is being reconfigured; then it comes back
    PARKED     it is stuck: it gets no calls until it goes on
    LEAVING    it drains or stops
    """

    STARTING = "starting"
    SERVING = "serving"
    AWAY = "away"
    PARKED = "parked"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Desired:
    """The replicas that a deployment should have.

    version    number of the code and its constructor arguments
    config     number of the `user_config`
    at_once    number of replicas that may be replaced at a time
    one_first  the first replica starts alone, and the others after it
    """

    count: int
    version: int = 0
    config: int = 0
    at_once: int = 1
    one_first: bool = False


@dataclass(frozen=True, slots=True)
class Fact:
    """One replica as it is. `number` grows from each replica to the next.

    is_ill    its health check failed, time after time, or it has reached a limit of its life
    is_stuck  its loop does not turn, or orphans hold all its slots
    is_lost   its loop has ended
    """

    number: int
    phase: Phase
    version: int = 0
    config: int = 0
    is_ill: bool = False
    is_stuck: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """The replicas of a deployment as they are.

    left_behind  number of stopped replicas whose threads still run user code
    retry_at     time before which no replica starts, because starts have failed
    """

    replicas: Sequence[Fact]
    left_behind: int = 0
    retry_at: float = 0.0


class ActionKind(Enum):
    START = "start"
    DROP = "drop"
    PARK = "park"
    RETURN = "return"
    RECONFIGURE = "reconfigure"


@dataclass(frozen=True, slots=True)
class Act:
    """One step towards the desired replicas; `number` is `None` for START."""

    kind: ActionKind
    number: int | None = None


def decide(desired: Desired, observed: Observed, now: float) -> list[Act]:
    """Return the actions for this moment, in order. Later calls see their effects as facts.

    No more than `desired.at_once` replicas serve or start beyond those that are desired, or that
    serve already. No serving replica is dropped while that leaves fewer than `desired.count`,
    unless its loop is lost: stuck replicas limit the starts, not those that serve.
    """
    actions: list[Act] = []
    serving: list[Fact] = []
    starting: list[Fact] = []
    away: list[Fact] = []
    for each in observed.replicas:
        match each.phase:
            case Phase.LEAVING:
                pass
            case _ if each.is_lost:
                actions.append(Act(ActionKind.DROP, each.number))
            case Phase.SERVING | Phase.AWAY if each.is_stuck:
                actions.append(Act(ActionKind.PARK, each.number))
            case Phase.SERVING:
                serving.append(each)
            case Phase.PARKED if not each.is_stuck:
                actions.append(Act(ActionKind.RETURN, each.number))
                serving.append(each)
            case Phase.STARTING if each.version == desired.version:
                starting.append(each)
            case Phase.STARTING:
                actions.append(Act(ActionKind.DROP, each.number))
            case Phase.AWAY:
                away.append(each)
    wanted = allowed(desired.count, num_stuck(observed))
    # Replicas that are away do not count here: until they are back, the others are needed.
    serving, dropped = _without_surplus(desired, serving)
    fresh = [each for each in serving if not _is_stale(desired, each)]
    if len(fresh) >= desired.count:  # `reconfigure` may take for ever
        dropped += away
    # Nor does a new version wait for those of an old one.
    missing = wanted - len(fresh) - sum(not _is_stale(desired, each) for each in away)
    room = max(wanted, len(serving)) + desired.at_once - len(serving) - len(away)
    if desired.one_first and not serving and not away:
        room = 1
    starts = max(0, min(missing, room))
    surplus = sorted(starting, key=lambda each: each.number)[starts:]
    actions += [Act(ActionKind.DROP, each.number) for each in (*dropped, *surplus)]
    if now >= observed.retry_at:
        actions += [Act(ActionKind.START)] * (starts - len(starting))
    if not away:
        behind = [each.number for each in fresh if each.config != desired.config]
        actions += [Act(ActionKind.RECONFIGURE, number) for number in behind[:1]]
    return actions


def num_stuck(observed: Observed) -> int:
    """Return the number of replicas that are stuck, running or stopped."""
    stuck = [each for each in observed.replicas if each.is_stuck and not each.is_lost]
    return observed.left_behind + sum(each.phase is not Phase.LEAVING for each in stuck)


def is_blocked(desired: Desired, observed: Observed) -> bool:
    """Return whether replicas are missing that may not start, because too many are stuck."""
    live = (Phase.STARTING, Phase.SERVING, Phase.AWAY)
    fresh = [
        each
        for each in observed.replicas
        if each.phase in live and not (each.is_stuck or each.is_lost or _is_stale(desired, each))
    ]
    wanted = allowed(desired.count, num_stuck(observed))
    return wanted < desired.count and len(fresh) < desired.count


def allowed(count: int, stuck: int) -> int:
    """Return the number of replicas to have, beside those that are stuck.

    A stuck replica is replaced, up to as many as there should be replicas. Beyond that, replacing
    would fill the process with threads that never end.
    """
    return max(0, min(count, 2 * count - stuck))


def retry_after_s(failures: int) -> float:
    """Return the pause after a number of failed starts, one after another."""
    return float(min(LONGEST_RETRY_S, RETRY_S * 2 ** min(failures - 1, 10)))


def replaced_at_once(count: int, percentage: float, surge_percent: float) -> int:
    """Return how many replicas an update replaces at a time.

    Source: Ray 2.60.0, deployment_state.py, `_rollout_size` and `_surge_replicas_to_start`. A new
    replica always starts before an old one leaves, so there is one more at least.
    """
    batch = max(1, int(percentage * count))
    return min(batch, math.ceil(surge_percent * count / 100)) if surge_percent else batch


def _is_stale(desired: Desired, replica: Fact) -> bool:
    return replica.is_ill or replica.version != desired.version


def _without_surplus(desired: Desired, serving: list[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Return the replicas to keep, and those to drop because enough others serve.

    Stale replicas are dropped first, ill ones before those of an old version; then the newest: the
    spare of a replica that came back.
    """
    ordered = sorted(
        serving,
        key=lambda each: (_is_stale(desired, each), each.is_ill, each.number),
    )
    if desired.count and ordered and _is_stale(desired, ordered[0]):
        return ordered, []  # until one of the new version serves, even if it has fewer replicas
    return ordered[: desired.count], ordered[desired.count :]
