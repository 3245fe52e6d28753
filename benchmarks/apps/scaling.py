"""The application of `benchmarks.scaling`: two replicas, and an endpoint for each request."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

import ingress as serve

api = FastAPI()


@serve.deployment(num_replicas=2)
@serve.ingress(api)
class Scaling:
    @api.get("/noop")
    async def noop(self) -> str:
        return "hello"

    @api.get("/compute")
    def compute(self) -> int:
        total = 0
        for number in range(100_000):
            total += number
        return total

    @api.get("/wait")
    async def wait(self) -> str:
        await asyncio.sleep(0.05)
        return "waited"


app = Scaling.bind()
