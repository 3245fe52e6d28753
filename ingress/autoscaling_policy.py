"""The policies of autoscaling, and the rules that apply to every policy. Pure functions.

    policy(context) -> the number of replicas for the load      the default, or the user's own
    decided(...)    -> the number to have: smoothed, delayed, within its bounds

A policy gets an `AutoscalingContext` and returns a number and a dict, its state, which the next
context has. Behaviour: Ray 2.60.0, autoscaling_policy.py and _private/autoscaling_state.py;
`make test-ray` compares the decisions with Ray's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ingress._unsupported import teller
from ingress.config import AutoscalingConfig, AutoscalingContext

TOLERANCE_S = 1e-6  # of delays: differences of large times are not exact

Policy = Callable[[AutoscalingContext], tuple[float, dict[str, Any]]]


def replica_queue_length_autoscaling_policy(
    ctx: AutoscalingContext,
) -> tuple[float, dict[str, Any]]:
    """Return as many replicas as give each `target_ongoing_requests`. The default policy."""
    first = first_replicas(ctx)
    if first is not None:
        return first, ctx.policy_state
    if not ctx.current_num_replicas:
        return ctx.target_num_replicas, {}
    assert ctx.config is not None
    return ctx.total_num_requests / ctx.config.target_ongoing_requests, {}


default_autoscaling_policy = replica_queue_length_autoscaling_policy


@dataclass(frozen=True, slots=True)
class Trend:
    """A wish for more (1) or fewer (-1) replicas, and since when it has lasted. 0: no wish."""

    direction: int = 0
    since: float = 0.0


STEADY = Trend()


class PolicyAnswerError(TypeError):
    """A policy returned something else than a number and a dict."""


def decided(
    ctx: AutoscalingContext, policy: Policy, trend: Trend, now: float
) -> tuple[int, dict[str, Any], Trend]:
    """Return the number of replicas to have, the policy's state, and the trend.

    `trend` is that of the last decision. `now` is in seconds of any clock that does not go back.
    Raises `PolicyAnswerError`, and what the policy raises.
    """
    assert ctx.config is not None
    first = first_replicas(ctx)
    if first is not None:
        return bounded(first, ctx.config), ctx.policy_state, trend
    answer: Any = policy(ctx)
    match answer:
        case (Real() as asked, dict() | None as state) if math.isfinite(asked):
            return settled(ctx, float(asked), trend, now, state or {})
    raise PolicyAnswerError(
        f"it returned {answer!r:.200}, expected a number of replicas and a dict, its state, such "
        "as `return 2, {}`"
    )


def settled(
    ctx: AutoscalingContext, asked: float, trend: Trend, now: float, state: dict[str, Any]
) -> tuple[int, dict[str, Any], Trend]:
    """Return the decision for a number that a policy asked for."""
    assert ctx.config is not None
    wanted = smoothed(asked, ctx.current_num_replicas, ctx.config)
    if not ctx.current_num_replicas and wanted > 0:  # requests wait: no delay
        return bounded(wanted, ctx.config), state, trend
    count, trend = delayed(max(0, wanted), ctx.target_num_replicas, ctx.config, trend, now)
    return bounded(count, ctx.config), state, trend


def first_replicas(ctx: AutoscalingContext) -> int | None:
    """Return the number of replicas for requests that wait for the first, `None` if none do."""
    if ctx.current_num_replicas or ctx.total_num_requests <= 0:
        return None
    assert ctx.config is not None
    return max(math.ceil(ctx.config.upscaling), ctx.target_num_replicas)


def smoothed(asked: float, current: int, config: AutoscalingConfig) -> int:
    """Return the number after the up- or downscaling factor, which scales the difference."""
    if not current:
        return math.ceil(asked)
    factor = config.upscaling if asked > current else config.downscaling
    count = math.ceil(current + factor * (asked - current))
    # Rounding up must not keep a small factor from ever scaling down.
    return count - (count == current and math.ceil(asked) < current)


def delayed(
    wanted: int, target: int, config: AutoscalingConfig, trend: Trend, now: float
) -> tuple[int, Trend]:
    """Return the wanted number once it was wanted long enough, `target` before; and the trend.

    The last replica ends alone, after `downscale_to_zero_delay_s`.
    """
    if wanted == target:
        return target, STEADY
    direction = 1 if wanted > target else -1
    since = trend.since if trend.direction == direction else now
    delay_s = config.upscale_delay_s
    if direction < 0:
        is_last = target == 1
        to_zero_s = config.downscale_to_zero_delay_s
        delay_s = config.downscale_delay_s if to_zero_s is None or not is_last else to_zero_s
        wanted = wanted if is_last else max(1, wanted)
    if now - since + TOLERANCE_S >= delay_s:
        return wanted, STEADY
    return target, Trend(direction, since)


def bounded(count: float, config: AutoscalingConfig) -> int:
    return max(config.min_replicas, min(config.max_replicas, math.ceil(count)))


__getattr__ = teller(__name__)
