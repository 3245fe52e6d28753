"""The application of `tests.engines.nodes`: a replica of each deployment on every node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import ingress as serve

api = FastAPI()
EVERYWHERE: dict[str, Any] = {
    "num_replicas": 3,
    "max_replicas_per_node": 1,
    "health_check_period_s": 1,
    "health_check_timeout_s": 5,
    "ray_actor_options": {"num_cpus": 0.1},
}


def place() -> list[Any]:
    return [ray.get_runtime_context().get_node_id(), os.getpid()]


@serve.deployment(**EVERYWHERE)
class Child:
    async def __call__(self) -> list[Any]:
        return place()

    async def items(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def sleep(self, ended: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            Path(ended).touch()


@serve.deployment(**EVERYWHERE)
@serve.ingress(api)
class Front:
    def __init__(self, child: serve.DeploymentHandle) -> None:
        self.child = child

    @api.get("/")
    async def root(self) -> list[Any]:
        """Return the places of this replica and of the child's that it called."""
        return [place(), await self.child.remote()]

    @api.get("/lines")
    async def lines(self, count: int) -> StreamingResponse:
        items = self.child.options(stream=True).items.remote(count)
        return StreamingResponse(f"{item}\n" async for item in items)

    @api.get("/sleep")
    async def sleep(self, ended: str) -> None:
        await self.child.sleep.remote(ended)


child: Any = Child
front: Any = Front
app: serve.Application = front.bind(child.bind())
