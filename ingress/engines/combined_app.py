"""Several applications as one ASGI app, for a server that is not that of `serve.run`.

They start with the server's lifespan, through the engine, and share its proxy: routes, health check
and drain are those of `serve.run`. A later `serve.run` in the process changes what is served.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from starlette.types import Receive, Scope, Send

from ingress.engines.hosting import StoppingServer, leave_with, must_stop, uvicorn_server
from ingress.engines.local import LocalEngine
from ingress.telemetry.mistakes import format_failed_start
from ingress.telemetry.watchdog import WATCHDOG


@dataclass(eq=False, slots=True)
class CombinedApp:
    """The ASGI app of the applications that `start` starts. `start` runs in a thread.

    Owned by the HTTP loop.
    """

    _engine: LocalEngine
    _start: Callable[[], None]
    _drained_at: float | None = None  # deadline of the drain, once it has begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._engine.http.proxy(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        engine = self._engine
        loop = asyncio.get_running_loop()
        engine.lender = loop
        server = uvicorn_server()
        watching = None if server is None else loop.create_task(self._stop_with(server))
        try:
            try:
                await asyncio.to_thread(self._start)
            except Exception as error:  # the server prints it, and ends
                text = traceback.format_exc()
                if error.__cause__ is not None:  # user code raised it
                    text = format_failed_start(error)
                await asyncio.to_thread(engine.shutdown, 0.0)
                await send({"type": "lifespan.startup.failed", "message": text})
                return
            with WATCHDOG.reporting_on_signal(), engine.writing_on_signal():
                await send({"type": "lifespan.startup.complete"})
                await receive()
            left_s = None if self._drained_at is None else self._drained_at - monotonic()
            await asyncio.to_thread(engine.shutdown, None if left_s is None else max(0.0, left_s))
        finally:
            engine.lender = None
            if watching is not None:
                watching.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _stop_with(self, server: StoppingServer) -> None:
        """Wait until uvicorn must stop, then end the starts and begin to drain."""
        await must_stop(server)
        engine = self._engine
        if engine.apps.starting:  # otherwise uvicorn would wait for them
            await asyncio.to_thread(engine.shutdown, 0.0)
            return
        proxy = engine.http.proxy
        await leave_with(server, proxy, self._engine.http.command_line.drain_delay_s)
        timeout_s = engine.http.command_line.shutdown_timeout_s
        running = list(engine.applications.values())
        if timeout_s is None:
            timeout_s = max((each.graceful_shutdown_timeout_s for each in running), default=0.0)
        self._drained_at = monotonic() + timeout_s
        drains = (proxy.in_flight.drain(each.ingress.router, timeout_s) for each in running)
        await asyncio.gather(*drains)
