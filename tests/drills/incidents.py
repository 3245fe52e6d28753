"""The applications of the drills: each has one thing wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import ingress as serve
from tests.servers import bind

LOCK = threading.Lock()
KEPT: list[bytearray] = []


@serve.deployment(max_ongoing_requests=5)
class Locked:
    @serve.method(execution="threadpool")
    def __call__(self, request: Any) -> str:
        LOCK.acquire()  # never released
        return "x"


@serve.deployment
class Napping:
    async def __call__(self, request: Any) -> str:
        time.sleep(1.0)  # in the loop
        return "x"


@serve.deployment
class Leaking:
    async def __call__(self, request: Any) -> str:
        KEPT.append(bytearray(40_000))  # kept for good
        return "x"


@serve.deployment
class Downstream:
    async def __call__(self) -> str:
        await asyncio.Event().wait()  # the other server hangs
        return "x"


@serve.deployment(max_ongoing_requests=5)
class Caller:
    def __init__(self, downstream: Any) -> None:
        self._downstream = downstream

    async def __call__(self, request: Any) -> str:
        answer: str = await self._downstream.remote()  # waits for it
        return answer


@serve.deployment(max_ongoing_requests=2)
class Overloaded:
    async def __call__(self, request: Any) -> str:
        await asyncio.sleep(0.05)  # 40 a second fit
        return "x"


@serve.deployment(num_replicas=3)
class Uneven:
    async def __call__(self, request: Any) -> str:
        if serve.get_replica_context().replica_tag == "1":
            raise ConnectionError("its connection is broken")
        return "x"


lock = bind(Locked)
nap = bind(Napping)
leak = bind(Leaking)
hang = bind(Caller, bind(Downstream))
overload = bind(Overloaded)
replica = bind(Uneven)
