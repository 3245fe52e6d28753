"""Autoscaling: the load of a deployment over time, and the decision about its number of replicas.

    ten times a second     the load: requests that run and that wait
    over look_back_period  mean, max or min of the load
    policy                 how many replicas that load needs; the rules of `autoscaling_policy`
    RunningDeployment      desires as many: replicas start, or drain

The user's own policy runs in a thread: it may be slow, and must not stop the control loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from time import time
from typing import Any, NamedTuple

from ingress import autoscaling_policy
from ingress.autoscaling_policy import STEADY, Policy, PolicyAnswerError, Trend, decided
from ingress.config import (
    DEFAULT_POLICY,
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    DeploymentConfig,
)
from ingress.core.base.types import DeploymentID, ReplicaID, TimeStampedValue
from ingress.core.execution.execution import kind
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.logs import logger
from ingress.telemetry.mistakes import described

RAYS = "ray.serve.autoscaling_policy"  # its functions are ours, under the same names
STATS_S = 10.0  # for `record_autoscaling_stats`. Source: Ray 2.60.0, constants.py
SAMPLE_S = 0.5  # the longest pause between two samples of the load


class LoadSample(NamedTuple):
    """The load from `at` until the next sample."""

    at: float
    total: float
    queued: float


def aggregated(
    points: Sequence[tuple[float, float]], since: float, now: float, function: str
) -> float:
    """Return mean, max or min of a step function between two times.

    `points` are times and values, in order. A value holds until the next point. The mean is
    weighted with time; what was before the first point is not counted.
    """
    ends = [at for at, _ in points[1:]] + [now]
    within = [
        (value, max(0.0, end - max(at, since)))  # each value with its duration
        for (at, value), end in zip(points, ends, strict=False)
        if end >= since
    ]
    if not within:
        return 0.0
    if function == "max":
        return max(value for value, _ in within)
    if function == "min":
        return min(value for value, _ in within)
    duration = sum(length for _, length in within)
    if not duration:
        return within[-1][0]
    return sum(value * length for value, length in within) / duration


class Scaler:
    """The load of one deployment, and its last decisions. Owned by the control loop."""

    __slots__ = (
        "_asking", "_down_at", "_failed", "_is_default", "_next_at", "_policy", "_record_at",
        "_recorded", "_recording", "_samples", "_state", "_trend", "_up_at", "config",
    )  # fmt: skip

    def __init__(self, config: AutoscalingConfig, policy: Policy) -> None:
        self.config = config
        self._policy = policy
        self._is_default = policy is autoscaling_policy.default_autoscaling_policy
        self._samples: deque[LoadSample] = deque()
        self._next_at = 0.0
        self._state: dict[str, Any] = {}
        self._trend: Trend = STEADY
        self._asking: asyncio.Task[tuple[int, dict[str, Any], Trend]] | None = None
        self._failed: type[Exception] | None = None
        self._record_at = 0.0
        self._recording: dict[ReplicaID, asyncio.Task[None]] = {}
        # By replica and name; `None` for a replica whose method returned what cannot be used.
        self._recorded: dict[ReplicaID, dict[str, list[TimeStampedValue]] | None] = {}
        self._up_at: float | None = None
        self._down_at: float | None = None

    def note(self, now: float, total: int, queued: int) -> None:
        """Note the load, as often as `metrics_interval_s` says, and at least twice a second.

        A change between none and some requests is noted at once.
        """
        samples = self._samples
        if now < self._next_at and bool(total) == bool(samples and samples[-1].total):
            return
        self._next_at = now + min(SAMPLE_S, self.config.metrics_interval_s)
        if not samples or samples[-1][1:] != (total, queued):
            samples.append(LoadSample(now, total, queued))
        oldest = now - self.config.look_back_period_s
        while len(samples) > 1 and samples[1].at <= oldest:
            samples.popleft()

    def record(self, now: float, replicas: Sequence[Replica]) -> None:
        """Ask each replica for its `record_autoscaling_stats`, as `metrics_interval_s` says."""
        if now < self._record_at:
            return
        self._record_at = now + self.config.metrics_interval_s
        recorded = self._recorded
        ids = [each.replica_id for each in replicas]
        self._recorded = {id: recorded.get(id, {}) for id in ids}
        self._recording = {id: task for id, task in self._recording.items() if not task.done()}
        for replica in replicas:
            id = replica.replica_id
            if self._recorded[id] is not None and id not in self._recording:
                task = asyncio.get_running_loop().create_task(self._record(replica))
                self._recording[id] = task

    async def _record(self, replica: Replica) -> None:
        id = replica.replica_id
        try:
            async with asyncio.timeout(STATS_S):
                stats = await replica.autoscaling_stats()
        except Exception as error:  # of user code
            logger.error("%s: record_autoscaling_stats raised %s", id, described(error))
            return
        series = self._recorded.get(id)
        if series is None:
            return  # it has left
        if not isinstance(stats, dict) or any(
            not isinstance(each, int | float) for each in stats.values()
        ):
            self._recorded[id] = None
            logger.error(
                "%s: record_autoscaling_stats returned %.200r, expected a dict of names and "
                "numbers; it is not called again",
                id,
                stats,
            )
            return
        now = time()
        for name, value in stats.items():
            values = series.setdefault(name, [])
            values.append(TimeStampedValue(now, value))

    def _metrics(
        self, running: list[ReplicaID]
    ) -> dict[str, dict[ReplicaID, list[TimeStampedValue]]]:
        """Return what the replicas have recorded in the look-back period, and drop the rest."""
        found: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
        since = time() - self.config.look_back_period_s
        for id in running:
            series = self._recorded.get(id) or {}
            for name in list(series):
                if recent := [each for each in series.pop(name) if each.timestamp >= since]:
                    series[name] = recent
                    found.setdefault(name, {})[id] = [*recent]
        return found

    def decide(self, now: float, id: DeploymentID, running: list[ReplicaID], target: int) -> int:
        """Return the number of replicas to have; `target` is the number that is desired so far."""
        context = self._context(now, id, running, target)
        if self._is_default:
            count, self._state, self._trend = decided(context, self._policy, self._trend, now)
        else:
            count = self._asked(context, now)
        if count > target:
            self._up_at = time()
        elif count < target:
            self._down_at = time()
        return count

    def _asked(self, context: AutoscalingContext, now: float) -> int:
        """Return the decision of the user's policy, which runs in a thread, once it has one."""
        asking, count = self._asking, context.target_num_replicas
        if asking is not None and asking.done():
            self._asking = None
            try:
                count, self._state, self._trend = asking.result()
                self._failed = None
            except Exception as error:
                if self._failed is not type(error):  # told once, not at each decision
                    self._failed = type(error)
                    is_ours = isinstance(error, PolicyAnswerError)
                    logger.error(
                        "the autoscaling policy of %s failed; its number of replicas stays: %s",
                        context.deployment_id,
                        error if is_ours else described(error),
                        exc_info=None if is_ours else error,
                    )
        elif asking is None:
            work = asyncio.to_thread(_decided, context, self._policy, self._trend, now)
            self._asking = asyncio.get_running_loop().create_task(work)
        return count

    def _context(
        self, now: float, id: DeploymentID, running: list[ReplicaID], target: int
    ) -> AutoscalingContext:
        """Return the facts that a policy gets."""
        config = self.config
        since, function = now - config.look_back_period_s, config.aggregation_function
        totals = [(each.at, each.total) for each in self._samples]
        queued = [(each.at, each.queued) for each in self._samples]
        raw, unix = self._metrics(running), time()
        return AutoscalingContext(
            deployment_id=id,
            deployment_name=id.name,
            app_name=id.app_name,
            current_num_replicas=len(running),
            target_num_replicas=target,
            running_replicas=running,
            total_num_requests=aggregated(totals, since, now, function),
            total_queued_requests=aggregated(queued, since, now, function),
            policy_state=dict(self._state),
            capacity_adjusted_min_replicas=config.min_replicas,
            capacity_adjusted_max_replicas=config.max_replicas,
            last_scale_up_time=self._up_at,
            last_scale_down_time=self._down_at,
            current_time=unix,
            config=config,
            raw_metrics=raw,
            aggregated_metrics={
                name: {
                    id: aggregated(values, unix - config.look_back_period_s, unix, function)
                    for id, values in by_replica.items()
                }
                for name, by_replica in raw.items()
            },
        )


def _decided(*arguments: Any) -> tuple[int, dict[str, Any], Trend]:
    try:
        return decided(*arguments)
    except Exception:
        raise
    except BaseException as error:  # SystemExit would end the control loop
        raise RuntimeError(f"it raised {described(error)}") from error


def scaler_of(config: DeploymentConfig) -> Scaler | None:
    """Return the scaler of a deployment, `None` if its number of replicas is fixed.

    Raises `ValueError` if the policy cannot be imported, or is no plain function.
    """
    scaling = config.autoscaling
    return None if scaling is None else Scaler(scaling, policy_of(scaling.policy))


def policy_of(config: AutoscalingPolicy) -> Policy:
    """Return the function of a policy; a class is made first. Raises `ValueError`."""
    found: Any = config.policy_function
    if isinstance(found, str):
        module, _, name = found.partition(":") if ":" in found else found.rpartition(".")
        try:
            home = autoscaling_policy if module == RAYS else import_module(module)
            found = getattr(home, name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"policy_function={found!r} cannot be imported: {error}; give a function, or its "
                f"path, such as {DEFAULT_POLICY!r}"
            ) from error
    if inspect.isclass(found):
        found = found(**config.policy_kwargs)
    if not callable(found) or kind(found).is_async:
        raise ValueError(
            f"policy_function={config.policy_function!r} is no plain function; give a `def`, or a "
            "class with a `def __call__`, which takes a context and returns a number of replicas "
            "and a dict: it runs in a thread, and may block"
        )
    policy: Policy = found
    return policy
