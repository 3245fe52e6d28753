"""`ingress.autoscaling_policy` decides as Ray's own functions do, on random histories."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ingress.autoscaling_policy import STEADY, bounded, decided, default_autoscaling_policy
from ingress.config import AutoscalingConfig, AutoscalingContext
from ingress.core.base.types import DeploymentID

theirs = pytest.importorskip("ray.serve.autoscaling_policy")
their_config = pytest.importorskip("ray.serve.config")

HISTORIES = 1000
STEPS = 60


def options(chance: random.Random) -> dict[str, Any]:
    low = chance.choice([0, 0, 1, 2, 5])
    high = low + chance.choice([1, 3, 10, 100])
    given: dict[str, Any] = {"min_replicas": low, "max_replicas": high}
    some: dict[str, list[float]] = {
        "initial_replicas": [low, high],
        "target_ongoing_requests": [0.5, 1, 2, 7.3],
        "smoothing_factor": [0.1, 0.6, 2.0],
        "upscaling_factor": [0.3, 1.0, 1.7],
        "downscaling_factor": [0.2, 0.9, 1.4],
        "upscale_smoothing_factor": [0.4, 3.0],
        "downscale_smoothing_factor": [0.15, 1.0],
        "upscale_delay_s": [0, 0.3, 5.0],
        "downscale_delay_s": [0, 0.7, 8.0],
        "downscale_to_zero_delay_s": [0, 2.0, 20.0],
    }
    for name, values in some.items():
        if chance.random() < 0.5:
            given[name] = chance.choice(values)
    return given


def custom(ctx: Any) -> tuple[float, dict[str, Any]]:
    """Ask for what the number of decisions so far says."""
    count = ctx.policy_state.get("count", 0) + 1
    return (ctx.total_num_requests / 3 + count % 4) / 1.5, {"count": count}


def history(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make decisions in both, and compare each with the other."""
    chance = random.Random(seed)
    given = options(chance)
    mine = AutoscalingConfig(**given)
    rays = their_config.AutoscalingConfig(**given)
    is_custom = chance.random() < 0.25
    policy = custom if is_custom else default_autoscaling_policy
    rays_policy = theirs._apply_autoscaling_config(
        custom if is_custom else theirs.default_autoscaling_policy
    )
    now = 1e9 * chance.random()
    monkeypatch.setattr(theirs.time, "time", lambda: now)
    target = current = mine.first_count
    state: dict[str, Any] = {}
    rays_state: dict[str, Any] = {}
    trend = STEADY
    total = 0.0
    for step in range(STEPS):
        now += chance.choice([0.1, 0.1, 0.5, 3.0])
        if chance.random() < 0.3:
            total = chance.choice([0.0, chance.random(), chance.uniform(0, 60)])
        context: dict[str, Any] = {
            "deployment_id": DeploymentID("D"),
            "deployment_name": "D",
            "app_name": "default",
            "current_num_replicas": current,
            "target_num_replicas": target,
            "running_replicas": [],
            "total_num_requests": total,
            "total_queued_requests": 0.0,
            "aggregated_metrics": {},
            "raw_metrics": {},
            "capacity_adjusted_min_replicas": mine.min_replicas,
            "capacity_adjusted_max_replicas": mine.max_replicas,
            "last_scale_up_time": None,
            "last_scale_down_time": None,
            "current_time": now,
        }
        count, state, trend = decided(
            AutoscalingContext(**context, policy_state=dict(state), config=mine), policy, trend, now
        )
        answer, rays_state = rays_policy(
            their_config.AutoscalingContext(**context, policy_state=dict(rays_state), config=rays)
        )
        assert count == bounded(answer, mine), (seed, step, given, total, current, target)
        target = count
        if chance.random() < 0.7:  # the replicas follow, sometimes late
            current = target


@pytest.mark.reliability("D05")
def test_a_thousand_random_histories_are_decided_as_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(HISTORIES):
        history(seed, monkeypatch)
