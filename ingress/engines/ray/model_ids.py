"""Reports of a replica's models to Ray's router, which prefers replicas that have the model."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from ray import serve as ray_serve
from ray.serve._private.common import RequestRoutingInfo
from ray.serve.context import _get_global_client

from ingress.serving.replicas.replica import Replica

logger = logging.getLogger("ingress")

PERIOD_S = 0.1  # Ray's own. Source: Ray 2.60.0, constants.py


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
            await asyncio.sleep(PERIOD_S)

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
