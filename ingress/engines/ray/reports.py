"""The reports of a replica to Ray: its models, for the router, and its counts, as metrics.

Ray's router prefers replicas that have the model of a request. The metrics:

    name                                     labels         as in
    serve_batches_processed                  function_name  `ray.serve.batch`
    serve_batched_calls                      function_name  the calls in those batches
    serve_num_multiplexed_models                            `ray.serve.multiplexed`
    serve_multiplexed_models_load_counter
    serve_multiplexed_models_unload_counter
    serve_lane_calls                         lane, state    "ongoing" in its threads, or "queued"

`ray.serve.metrics` adds deployment, replica and application. The counters are the runtime's own
ints, which are read each `PERIOD_S`; a request makes no metric.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ray import serve as ray_serve
from ray.serve import metrics
from ray.serve._private.common import RequestRoutingInfo
from ray.serve.context import _get_global_client

from ingress.core.base.counters import LOAD, UNLOAD
from ingress.serving.replicas.replica import Replica

logger = logging.getLogger("ingress")

PERIOD_S = 2.0
MODELS_PERIOD_S = 0.1  # Ray's own. Source: Ray 2.60.0, constants.py

_Labels = Mapping[str, str]


class ReplicaMetrics:
    """The publisher of one replica's metrics. Owned by the loop on which Ray calls the replica."""

    __slots__ = ("_made", "_replica", "_task", "_told")

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._made: dict[str, metrics.Metric] = {}
        self._told: dict[tuple[str, str], int] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self._publish()
            except Exception:
                logger.exception("could not publish the metrics of %s", self._replica.replica_id)

    def _publish(self) -> None:
        replica, counts = self._replica, self._replica.host.counts()
        for function, count in counts.batches.items():
            self._count("serve_batches_processed", count.batches, function=function)
            self._count("serve_batched_calls", count.calls, function=function)
        times = counts.model_times
        if LOAD in times:
            self._set("serve_num_multiplexed_models", len(replica.model_ids), {})
            self._count("serve_multiplexed_models_load_counter", times[LOAD].count)
            if UNLOAD in times:
                self._count("serve_multiplexed_models_unload_counter", times[UNLOAD].count)
        for lane, load in counts.lanes.items():
            self._set("serve_lane_calls", load.ongoing, {"lane": lane, "state": "ongoing"})
            self._set("serve_lane_calls", load.queued, {"lane": lane, "state": "queued"})

    def _count(self, name: str, value: int, function: str = "") -> None:
        """Add to a counter what was counted since the last time."""
        more = value - self._told.get((name, function), 0)
        if more > 0:
            # As in Ray: the name without that of its class.
            labels = {"function_name": function.rpartition(".")[2]} if function else {}
            self._metric(metrics.Counter, name, labels).inc(more, tags=labels)
            self._told[name, function] = value

    def _set(self, name: str, value: int, labels: _Labels) -> None:
        self._metric(metrics.Gauge, name, labels).set(value, tags=dict(labels))

    def _metric(self, kind: type[metrics.Metric], name: str, labels: _Labels) -> metrics.Metric:
        if name not in self._made:
            self._made[name] = kind(name, description=_DESCRIPTIONS[name], tag_keys=tuple(labels))
        return self._made[name]


_DESCRIPTIONS = {
    "serve_batches_processed": "Batches that were run.",
    "serve_batched_calls": "Calls in the batches that were run.",
    "serve_num_multiplexed_models": "Models that the replica has or is loading.",
    "serve_multiplexed_models_load_counter": "Models that were loaded.",
    "serve_multiplexed_models_unload_counter": "Models that were unloaded.",
    "serve_lane_calls": "Calls in a lane, by their state.",
}


def make_rays(kind: str, name: str, **arguments: object) -> metrics.Metric:
    """Return Ray's own metric of `serve.metrics`, with the tags of the replica that Ray runs."""
    made = {"counter": metrics.Counter, "gauge": metrics.Gauge, "histogram": metrics.Histogram}
    return made[kind](name, **arguments)


@dataclass(eq=False, slots=True)
class ModelIds:
    """The reporter of one replica's models. Owned by the loop on which Ray calls the replica.

    Its task begins with the first `watch`.
    """

    _replica: Replica
    _told: frozenset[str] = frozenset()
    _task: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Report changes from now on. Called when a request names a model."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                self._tell(self._replica.model_ids)
            except Exception:
                logger.exception(
                    "could not report the models of %s to Ray", self._replica.replica_id
                )
            await asyncio.sleep(MODELS_PERIOD_S)

    def _tell(self, ids: frozenset[str]) -> None:
        if ids == self._told:
            return
        # As in `ray.serve.multiplexed`; there is no public name for it.
        _get_global_client().record_request_routing_info(
            RequestRoutingInfo(
                replica_id=ray_serve.get_replica_context().replica_id,
                multiplexed_model_ids=sorted(ids),
            )
        )
        self._told = ids
