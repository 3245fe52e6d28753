"""Applications whose requests share objects of one event loop, each with its load.

`app` is served by several replicas. `load(client, count)` sends the requests of `count` clients at
once, and fails if an answer is lost or wrong.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import ingress as serve

WITH_ASYNCIO_ALONE = ("broadcast", "condition", "held_generator", "user_locks")
WITH_PACKAGES = ("aiocache_memory", "async_lru_cache", "socketio_global", "socketio_mounted")


def fresh(name: str, replicas: int, loop: str | None = None) -> tuple[serve.Application, Any]:
    """Return an application of a module that no loop has used yet, and the module."""
    sys.modules.pop(f"{__name__}.{name}", None)
    module = importlib.import_module(f"{__name__}.{name}")
    options: Any = {"num_replicas": replicas, "loop": loop, "max_ongoing_requests": 100}
    deployment: Any = serve.deployment(**options)(serve.ingress(module.app)(type("Api", (), {})))
    return deployment.bind(), module
