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
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any
from weakref import WeakKeyDictionary

from ingress.context import REPLICA
from ingress.core.base.types import DeploymentID, ReplicaID

_lock = threading.Lock()
_LIBRARY = "prometheus_client"
_REGISTRY = f"{_LIBRARY}.registry"


@dataclass(frozen=True, slots=True)
class _Made:
    """A metric that replicas of one deployment share; guarded by `_lock`."""

    collector: Any
    deployment: DeploymentID
    replicas: set[ReplicaID]


_made: WeakKeyDictionary[Any, dict[Any, _Made]] = WeakKeyDictionary()
"""The metrics that replicas registered, by registry, class and names."""


def share_collectors() -> None:
    """Make replicas of one deployment share metrics of one name, now or once there are metrics.

    A constructor may be the first that imports `prometheus_client`. A second metric of the same
    name within one replica is refused as before.
    """
    if (module := sys.modules.get(_REGISTRY)) is not None:
        _share(module)
    elif _WhenImported not in sys.meta_path:
        sys.meta_path.insert(0, _WhenImported)


def _share(module: Any) -> None:
    # Race with another thread that imports it now, and calls this once the class is there.
    registry = getattr(module, "CollectorRegistry", None)
    with _lock:
        if registry is not None and not hasattr(registry.register, "__wrapped__"):
            registry.register = _sharing(registry.register)


class _WhenImported:
    """A finder that has `_share` called as soon as the library's registry is imported."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == _REGISTRY else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _share(module)

        loader.exec_module = exec_module
        return spec


def _sharing(register: Any) -> Any:
    @functools.wraps(register)
    def register_shared(registry: Any, collector: Any) -> None:
        replica, kind = REPLICA.get(None), _kind_of(collector)
        if replica is None or kind is None:
            register(registry, collector)
            return
        mine = replica.replica_id
        # Not each of that library's collectors has it: `MultiProcessCollector` does not.
        describe = getattr(collector, "describe", tuple)
        key = (kind, tuple(each.name for each in describe()))
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


def _kind_of(collector: object) -> type | None:
    """Return the library's class of a metric; `None` for a collector of the user's own.

    A subclass of a metric may be another one in each replica, if its constructor defines it.
    """
    of_library = (each for each in type(collector).__mro__ if each.__module__.startswith(_LIBRARY))
    found = next(of_library, None)
    return None if found is None or found.__module__ == _REGISTRY else found
