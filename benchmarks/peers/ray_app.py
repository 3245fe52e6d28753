"""A no-op on Ray Serve: `python -m benchmarks.peers.ray_app FOLDER PORT`; also starts a cluster.

The cluster keeps its files in FOLDER, and ends with this process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import ray
from ray import serve

from benchmarks.work import WORKERS

QUIET = {"enable_access_log": False}


def begin(folder: str, port: str = "") -> None:
    """Start a cluster, and an HTTP server if a port is given."""
    ray.init("local", include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    http: dict[str, Any] = {"port": int(port)} if port else {"location": "NoServer"}
    serve.start(http_options={"host": "127.0.0.1", **http}, logging_config=QUIET)


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0}, logging_config=QUIET)
class Noop:
    async def __call__(self, request: Any) -> str:
        return "hello"


if __name__ == "__main__":
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    begin(*sys.argv[1:])
    try:
        serve.run(Noop.options(num_replicas=int(os.environ.get(WORKERS, "1"))).bind())
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
