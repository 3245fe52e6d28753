"""Deployments of known capacity, for `benchmarks.overload`."""

from __future__ import annotations

import asyncio
import time

import ingress as serve
from benchmarks.work import compute

SLOTS = 10
SLEEP_S = 0.05


@serve.deployment(max_ongoing_requests=SLOTS)
class Sleeping:
    async def __call__(self) -> str:
        await asyncio.sleep(SLEEP_S)
        return "slept"


@serve.deployment(max_ongoing_requests=SLOTS)
class Blocking:
    @serve.method(execution="threadpool")
    def __call__(self) -> str:
        time.sleep(SLEEP_S)
        return "slept"


@serve.deployment(max_ongoing_requests=8)
class Computing:
    @serve.method(execution="threadpool")
    def __call__(self) -> str:
        compute()
        return "computed"


@serve.deployment
class ComputingOnLoop:
    async def __call__(self) -> str:
        compute()
        return "computed"


sleeping = Sleeping.bind()
blocking = Blocking.bind()
computing = Computing.bind()
computing_on_loop = ComputingOnLoop.bind()
computing_many = Computing.options(max_ongoing_requests=100).bind()
