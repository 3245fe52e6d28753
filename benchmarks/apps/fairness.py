"""One deployment without and with a `fairness_key`, for `benchmarks.fairness`."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI

import ingress as serve

app = FastAPI()


@serve.deployment(max_ongoing_requests=1)
@serve.ingress(app)
class Sleeping:
    @app.get("/")
    async def sleep(self) -> str:
        await asyncio.sleep(0.01)
        return "slept"


plain_1 = Sleeping.bind()
plain_8 = Sleeping.options(max_ongoing_requests=8).bind()
fair_1 = Sleeping.options(fairness_key="x-tenant").bind()
fair_8 = Sleeping.options(fairness_key="x-tenant", max_ongoing_requests=8).bind()
