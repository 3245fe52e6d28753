"""A FastAPI no-op on one Ray cluster, twice: by Ray Serve itself, and by `ingress` on its engine.

python -m benchmarks.apps.beside_ray PORT    serves /native/noop and /ours/noop until SIGTERM
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve as native

import ingress as serve

OPTIONS: dict[str, Any] = {"max_ongoing_requests": 100, "ray_actor_options": {"num_cpus": 0}}
native_api, api = FastAPI(), FastAPI()


@native.deployment(**OPTIONS)
@native.ingress(native_api)
class Native:
    @native_api.get("/noop")
    async def noop(self) -> str:
        return "hello"


@serve.deployment(**OPTIONS)
@serve.ingress(api)
class Ours:
    @api.get("/noop")
    async def noop(self) -> str:
        return "hello"


def main() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ray.init("local", include_dashboard=False, log_to_driver=False)
    serve.start({"port": int(sys.argv[1])}, engine="ray")
    native.run(Native.bind(), name="native", route_prefix="/native")
    serve.run(Ours.bind(), name="ours", route_prefix="/ours")
    stop.wait()
    ray.shutdown()  # the cluster, and with it everything else


if __name__ == "__main__":
    main()
