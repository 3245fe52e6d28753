"""`gc.freeze` for running applications: full collections skip the objects they consist of.

A full collection visits every object of the process with the GIL held: 25 ms for FastAPI, pydantic
and ten routes, seconds for a model of Python objects. Collections of the young generations move the
objects of requests in flight to the oldest generation. When that has grown by a quarter, the next
full collection runs: one request in a hundred met one. An object that is alive once applications
run is seldom garbage before one of them stops, so until then the collector skips it.
"""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass

SETTLE_S = 1.0
"""Seconds from a start or stop to the full collection; its temporary objects are free by then."""
FROZEN_BY_PYTHON = 1_000
"""More objects than the collector freezes by itself: that of 3.12 does so with immortal objects,
375 of them. Other code that calls `gc.freeze` freezes all there are, several thousand at least."""


@dataclass(eq=False, slots=True)
class SettledObjects:
    """The frozen objects, and the timer of the next freeze. Owned by the control loop.

    There is one for each process, as there is one collector. Objects that other code has frozen
    stay frozen: then nothing is frozen or unfrozen here.
    """

    _count: int = 0  # of the objects frozen here
    _timer: asyncio.TimerHandle | None = None

    def renew(self, *, is_needed: bool) -> None:
        """Unfreeze all objects, some of which may be garbage; if needed, freeze again later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # Frozen objects that are freed lower the count; only other code raises it.
        if 0 < gc.get_freeze_count() <= self._count:
            gc.unfreeze()
        self._count = 0
        if is_needed:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._set_aside)

    def _set_aside(self) -> None:
        self._timer = None
        # If the collector is off there are no collections to avoid.
        if gc.isenabled() and gc.get_freeze_count() < FROZEN_BY_PYTHON:
            gc.collect()  # existing garbage must not be frozen
            gc.freeze()
            self._count = gc.get_freeze_count()
