"""Replicas that wait for resources: how many of which deployment, for what, and what there is.

Ray's scheduler knows the requests that it cannot place, by their resources. A replica whose process
is starting has its resources already, and does not wait.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypedDict

import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.serve.context import _get_global_client

logger = logging.getLogger("ingress")

FIRST_LOOK_S = 2.0
LOOK_S = 1.0
NODES_SHOWN = 4
_HOW = "reserve less with ray_actor_options, or add a node"

Resources = Mapping[str, float]


@contextmanager
def telling_waits(name: str) -> Iterator[None]:
    """Log the deployments of an application that wait for resources, while the block deploys it.

    A wait is logged within 5 s, and again when it changes.
    """
    over = Event()
    thread = Thread(target=_tell, args=(name, over), name="ingress-ray-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _tell(name: str, over: Event) -> None:
    told: list[str] = []
    pause_s = FIRST_LOOK_S
    while not over.wait(pause_s):
        pause_s = LOOK_S
        try:
            news = waits_of(name)
        except Exception:  # Serve or the connection is about to end
            logger.debug("the waits of application %r are unknown", name, exc_info=True)
            continue
        for line in news:
            if line not in told and not over.is_set():
                logger.warning("%s", line)
        told = news


def waits_of(name: str | None = None) -> list[str]:
    """Return a line for each deployment, of one application or all, with replicas that wait."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return []
    pending = _pending()
    lines = []
    for app, application in client.get_serve_details()["applications"].items():
        for deployment, each in application["deployments"].items():
            waiting = pending[_shape(_needs(each))] if pending and name in (None, app) else 0
            starting = sum(replica["state"] == "STARTING" for replica in each["replicas"])
            if count := min(waiting, starting):
                lines.append(_line(app, deployment, count, each))
    return lines


def check_fits(needs: Sequence[tuple[str, int, Resources]]) -> None:
    """Raise `RuntimeError` if a cluster of one node, which never grows, cannot hold all replicas.

    `needs` are the deployments, the numbers of their replicas, and the resources of each replica.
    """
    there = ray.cluster_resources()
    total: Counter[str] = Counter()
    for _, count, resources in needs:
        for kind, amount in resources.items():
            total[kind] += count * amount  # type: ignore[assignment]
    short = [kind for kind, amount in total.items() if amount > there.get(kind, 0)]
    if not short:
        return
    asked = "; ".join(
        f"deployment {name!r} asks for {count} x {_text(resources)}"
        for name, count, resources in needs
        if not resources.keys().isdisjoint(short)
    )
    has = " and ".join(f"{there.get(kind, 0):g} {kind}" for kind in short)
    raise RuntimeError(
        f"{asked}, and the cluster that this process started has {has}; reserve less with "
        "ray_actor_options, or use a larger cluster with --address"
    )


def _pending() -> Counter[frozenset[tuple[str, float]]]:
    """Return the requests that Ray cannot place now, by their resources."""
    found = get_cluster_resource_state(ray_worker.global_worker.gcs_client)
    pending: Counter[frozenset[tuple[str, float]]] = Counter()
    for each in found.pending_resource_requests:
        pending[_shape(each.request.resources_bundle)] += each.count
    for gang in found.pending_gang_resource_requests:
        pending[_shape(_total(each.resources_bundle for each in gang.requests))] += 1
    return pending


def _total(bundles: Iterable[Resources]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in bundles:
        total.update(each)
    return total


class Wanting(TypedDict):
    """A deployment that waits for replicas, as Ray's scheduler reports it."""

    deployment_config: Mapping[str, Sequence[Resources] | None]
    required_resources: Resources


def _needs(deployment: Wanting) -> Resources:
    """Return the resources of a replica: those of its placement group, if it has one."""
    bundles = deployment["deployment_config"].get("placement_group_bundles")
    return _total(bundles) if bundles else deployment["required_resources"]


def _shape(resources: Resources) -> frozenset[tuple[str, float]]:
    return frozenset((kind, round(amount, 4)) for kind, amount in resources.items() if amount)


def _line(app: str, deployment: str, count: int, each: Wanting) -> str:
    needs = _needs(each)
    wait = "replica waits" if count == 1 else "replicas wait"
    is_group = " on one node or several" if needs is not each["required_resources"] else ""
    return (
        f"deployment {deployment!r} of application {app!r}: {count} {wait} for {_text(needs)}"
        f"{is_group}; the cluster has {_free(needs)}; {_HOW}"
    )


def _free(needs: Resources) -> str:
    """Return what the nodes have of these resources, free and in all."""
    free = ray_state.available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    texts = []
    for node in nodes[:NODES_SHOWN]:
        there = free.get(node["NodeID"], {})
        parts = [
            f"{there.get(kind, 0):g} of {node['Resources'].get(kind, 0):g} {kind}" for kind in needs
        ]
        texts.append(f"{' and '.join(parts)} free on {node['NodeManagerAddress']}")
    more = len(nodes) - NODES_SHOWN
    return ", ".join(texts) + (f", and {more} more nodes" if more > 0 else "")


def _text(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items() if amount)
