"""A server under load that counts requests with its stall watchdog on, or off.

`GET /slice?watched=1` or `0` answers after `SLICE_S` with the requests per second meanwhile.
"""

from __future__ import annotations

import asyncio
from time import perf_counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.apps import ours
from ingress.core.base.settings import Settings
from ingress.telemetry.watchdog import WATCHDOG
from ingress.telemetry.watchdog.loop_probe import Watched

SLICE_S = 0.05
SETTLE_S = 0.0125
"""Pause before a slice: half the interval between two looks, the first of which is immediate."""


class Slices:
    """An ASGI application, and an endpoint `/slice` in front of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun = 0
        self._replicas: list[tuple[asyncio.AbstractEventLoop, Watched]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/slice":
            rate = await self._slice(is_watched=scope["query_string"] == b"watched=1")
            await JSONResponse(rate)(scope, receive, send)
        else:
            self._begun += 1
            await self._app(scope, receive, send)

    async def _slice(self, *, is_watched: bool) -> float:
        self._switch(is_watched=is_watched)
        await asyncio.sleep(SETTLE_S)
        begin, before = perf_counter(), self._begun
        await asyncio.sleep(SLICE_S)
        return (self._begun - before) / (perf_counter() - begin)

    def _switch(self, *, is_watched: bool) -> None:
        self._replicas = self._replicas or [
            (loop, owner) for loop, each in WATCHDOG._loops.items() for owner in each.owners
        ]
        threshold_s = Settings().stall_threshold_s
        assert threshold_s is not None
        for loop, owner in self._replicas:
            if is_watched:
                loop.call_soon_threadsafe(WATCHDOG.watch, loop, owner, threshold_s)
            else:
                WATCHDOG.unwatch(loop, owner)


methods = Slices(ours.methods)
