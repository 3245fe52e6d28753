"""Prometheus metrics that each replica registers: one in the process, which counts all of them.

A middleware or a constructor makes its metrics once for each replica. `prometheus_client` refuses
the second one of the same name, so the start would fail; or the library that makes them catches
the error, and the other replicas would not be counted. On Ray Serve each replica is a process.
"""

from __future__ import annotations

import functools
import sys
import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ingress.context import REPLICA
from ingress.core.base.types import DeploymentID, ReplicaID

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Made:
    """A metric that replicas of one deployment share; guarded by `_lock`."""

    collector: Any
    deployment: DeploymentID
    replicas: set[ReplicaID]


_made: WeakKeyDictionary[Any, dict[Any, _Made]] = WeakKeyDictionary()
"""The metrics that replicas registered, by registry, class and names."""


def share_collectors() -> None:
    """Make replicas of one deployment share metrics of one name, if `prometheus_client` is there.

    A second metric of the same name within one replica is refused as before.
    """
    module: Any = sys.modules.get("prometheus_client.registry")
    with _lock:
        if module is not None and not hasattr(module.CollectorRegistry.register, "__wrapped__"):
            module.CollectorRegistry.register = _sharing(module.CollectorRegistry.register)


def _sharing(register: Any) -> Any:
    @functools.wraps(register)
    def register_shared(registry: Any, collector: Any) -> None:
        replica = REPLICA.get(None)
        if replica is None or not type(collector).__module__.startswith("prometheus_client"):
            register(registry, collector)
            return
        mine = replica.replica_id
        # Not each of that library's collectors has it: `MultiProcessCollector` does not.
        describe = getattr(collector, "describe", tuple)
        key = (type(collector), tuple(each.name for each in describe()))
        # Race of two replicas that start: without the lock, the second one could be refused before
        # the first one's metric is noted.
        with _lock:
            here = _made.setdefault(registry, {})
            try:
                register(registry, collector)
            except ValueError:
                made = here.get(key)
                if made is None or made.deployment != mine.deployment_id or mine in made.replicas:
                    raise
                made.replicas.add(mine)
                vars(collector).update(vars(made.collector))
            else:
                here[key] = _Made(collector, mine.deployment_id, {mine})

    return register_shared
