"""An application on a cluster of three nodes, while nodes and replicas fail: `make test-ray-nodes`.

The nodes are on this machine. Each has a replica of both deployments, and all HTTP requests pass
the proxy of the first node. Requests arrive at an even rate. Each calls a child on any node. Prints
a row for each event, and exits with 1 if more requests failed than `LIMITS` allows.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx

import ingress as serve
from tests.engines import node_app

RATE = 20  # requests/s; the machine of three nodes has two cores
BEFORE_S, AFTER_S = 4, 20
PATIENCE_S = 120.0
LIMITS = {"a node removed": 0.05, "a replica killed": 0.05, "deployed again": 0.01}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "120",  # three nodes start on two cores
}


@dataclass
class Load:
    """The requests of one run: their statuses, the slowest answer, and when they failed."""

    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0
    failed_at: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    async def run(self, event: Callable[[], None]) -> None:
        """Send requests; call `event` in a thread after `BEFORE_S`."""
        begin = time.monotonic()
        async with httpx.AsyncClient(trust_env=False, timeout=30, limits=_LIMITS) as client:
            requests = []
            for number in range(RATE * (BEFORE_S + AFTER_S)):
                await asyncio.sleep(max(0.0, begin + number / RATE - time.monotonic()))
                if number == RATE * BEFORE_S:
                    requests.append(asyncio.create_task(asyncio.to_thread(event)))
                requests.append(asyncio.create_task(self._ask(client, begin)))
            await asyncio.gather(*requests)

    async def _ask(self, client: httpx.AsyncClient, begin: float) -> None:
        sent = time.monotonic()
        try:
            response = await client.get(self.url)
            status, text = response.status_code, response.text
        except httpx.HTTPError as error:
            status, text = 0, type(error).__name__
        self.statuses[status] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - sent)
        if status != 200:
            self.failed_at.append(time.monotonic() - begin - BEFORE_S)
            self.failures[f"{status} {text[:70]}"] += 1

    @property
    def failed(self) -> int:
        return len(self.failed_at)


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


def main() -> int:
    os.environ.update(ENVIRONMENT)
    ray = import_module("ray")
    cluster_utils = import_module("ray.cluster_utils")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        first = {"num_cpus": 2, "object_store_memory": 10**8, "temp_dir": folder}
        cluster = cluster_utils.Cluster(
            initialize_head=True, head_node_args={**first, "include_dashboard": False}
        )
        try:
            nodes = [_add(cluster), _add(cluster)]
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            return _observe(cluster, nodes, Path(folder))
        finally:
            serve.shutdown()
            ray.shutdown()
            cluster.shutdown()


def _add(cluster: Any) -> Any:
    return cluster.add_node(num_cpus=2, object_store_memory=10**8)


def _observe(cluster: Any, nodes: list[Any], folder: Path) -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # On one machine the proxies of several nodes would have one port.
    serve.start({"port": port, "location": "HeadOnly"}, engine="ray")
    begin = time.monotonic()
    serve.run(node_app.app, name="nodes")
    url = f"http://127.0.0.1:{port}"
    print(f"three nodes, {RATE} requests/s; started in {time.monotonic() - begin:.1f} s")
    _check_across_nodes(url, folder)

    def remove() -> None:
        cluster.remove_node(nodes.pop(), allow_graceful=False)

    def kill() -> None:
        _, (_, pid) = httpx.get(url, trust_env=False, timeout=30).json()
        os.kill(pid, signal.SIGKILL)

    def deploy() -> None:
        serve.run(node_app.app, name="nodes")

    events = {
        "nothing": lambda: None,
        "a node removed": remove,
        "a replica killed": kill,
        "deployed again": deploy,
    }
    print("| event | requests | failed | last failure after | slowest answer |")
    print("|---|---:|---:|---:|---:|")
    is_good = True
    for name, event in events.items():
        load = Load(url)
        asyncio.run(load.run(event))
        since = time.monotonic()
        if name == "a node removed":
            nodes.append(_add(cluster))
        _wait_until_whole(since)
        total = load.statuses.total()
        last = f"{max(load.failed_at):.1f} s" if load.failed else "-"
        print(f"| {name} | {total} | {load.failed} | {last} | {load.slowest_s:.2f} s |", flush=True)
        for text, count in load.failures.items():
            print(f"    {count} x {text}", flush=True)
        is_good &= load.failed <= LIMITS.get(name, 0.0) * total
    return 0 if is_good else 1


def _check_across_nodes(url: str, folder: Path) -> None:
    """Check that answers, a stream and a cancellation cross nodes."""
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        pairs = [client.get("/").json() for _ in range(60)]
        # Ray's proxy prefers the replica of its own node.
        crossed = sum(front[0] != child[0] for front, child in pairs)
        assert len({child[0] for _, child in pairs}) == 3
        print(f"{crossed} of 60 requests called a child on another node")
        for _ in range(6):
            lines = client.get("/lines", params={"count": 200}).text
            assert lines == "".join(f"{number}\n" for number in range(200))
        for number in range(6):
            ended = folder / f"ended{number}"
            try:
                client.get("/sleep", params={"ended": str(ended)}, timeout=1)
            except httpx.ReadTimeout:
                pass
            deadline = time.monotonic() + PATIENCE_S
            while not ended.exists():
                assert time.monotonic() < deadline, "a child was not cancelled"
                time.sleep(0.05)
    print("6 streams of 200 items arrived whole, 6 cancellations reached the children")


def _wait_until_whole(since: float) -> None:
    """Wait until each deployment has three running replicas."""
    running = {"RUNNING": 3}
    while True:
        deployments = serve.status().applications["nodes"].deployments.values()
        if all(each.replica_states == running for each in deployments):
            return
        assert time.monotonic() - since < PATIENCE_S, deployments
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
