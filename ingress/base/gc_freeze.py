"""Keep what applications are made of out of the garbage collector's full passes.

A full pass goes through every object of the process with the GIL held: 25 ms for FastAPI, pydantic
and ten routes, seconds for a model of Python objects. Requests that are in flight when the young
generations are collected move on to the oldest, and when that has grown by a quarter comes the next
full pass: one request in a hundred met one. What is alive once applications run is seldom garbage
before one of them stops, so until then nobody looks at it: `gc.freeze`, which is there for servers.
"""

from __future__ import annotations

import asyncio
import gc

SETTLE_S = 1.0
"""Between a start or stop and the full pass that follows; whoever did it has let go by then."""


class SettledObjects:
    """What has been set aside, and when to do so again. Owned by the control loop.

    The collector is the process's, and so is this: one per engine, and one engine.
    """

    __slots__ = ("_timer",)

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def renew(self, *, is_needed: bool) -> None:
        """Give back what is set aside, some of it may be garbage now; if needed, begin anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gc.unfreeze()
        if is_needed:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._set_aside)

    def _set_aside(self) -> None:
        self._timer = None
        if gc.isenabled():  # else there are no passes to stay out of
            gc.collect()  # what is garbage already must not stay
            gc.freeze()
