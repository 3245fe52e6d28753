"""The status of a server as JSON: of one process, and the sum of several workers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ingress.engines import local_engine

_GRAVEST = ("DEPLOY_FAILED", "UNHEALTHY", "DELETING", "DEPLOYING", "UPDATING", "NOT_STARTED")


def snapshot() -> dict[str, Any]:
    """Return the status of this process: that of `serve.status()`, and its process id."""
    engine = local_engine()
    applications = {}
    for name, each in engine.status().applications.items():
        found = asdict(each)
        for deployment in found["deployments"].values():
            deployment["ongoing"] = sum(replica["ongoing"] for replica in deployment["replicas"])
        applications[name] = found
    pid = os.getpid()
    return {
        "pid": pid,
        "url": engine.url(),
        "workers": [pid],
        "applications": applications,
    }


def summed(pid: int, url: str | None, workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the status of all workers together: counts are sums, a status is the gravest.

    `per_worker` has the number of a deployment's replicas in each worker.
    """
    applications: dict[str, Any] = {}
    for worker in workers:
        for name, each in worker["applications"].items():
            applications.setdefault(name, []).append(each)
    return {
        "pid": pid,
        "url": url,
        "workers": [worker["pid"] for worker in workers],
        "applications": {
            name: _application(parts, len(workers)) for name, parts in applications.items()
        },
    }


def _application(parts: Sequence[Mapping[str, Any]], workers: int) -> dict[str, Any]:
    deployments: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        for name, each in part["deployments"].items():
            deployments.setdefault(name, []).append(each)
    return {
        "status": _gravest(parts) if len(parts) == workers else "DEPLOYING",
        "message": "; ".join(dict.fromkeys(part["message"] for part in parts if part["message"])),
        "last_deployed_time_s": max(part["last_deployed_time_s"] for part in parts),
        "deployments": {name: _deployment(each) for name, each in deployments.items()},
    }


def _deployment(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    states: Counter[str] = Counter()
    for part in parts:
        states.update(part["replica_states"])
    counts = {name: sum(part[name] for part in parts) for name in ("requests", "queued", "ongoing")}
    return {
        **parts[0],
        "status": _gravest(parts),
        "message": "; ".join(dict.fromkeys(part["message"] for part in parts if part["message"])),
        "replica_states": dict(states),
        "per_worker": [sum(part["replica_states"].values()) for part in parts],
        "replicas": [replica for part in parts for replica in part["replicas"]],
        **counts,
    }


def _gravest(parts: Sequence[Mapping[str, Any]]) -> str:
    found = {part["status"] for part in parts}
    return next((each for each in _GRAVEST if each in found), str(parts[0]["status"]))
