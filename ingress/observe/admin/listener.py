"""The admin listener: a small server in a thread and on a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from starlette.routing import BaseRoute

from ingress.core.base.settings import HTTPLimits
from ingress.core.calls.loops import EventLoopThread, run_blocking, start_on
from ingress.observe.admin.app import admin_app
from ingress.observe.admin.source import Source
from ingress.serving.http.address import url_of
from ingress.serving.http.admin_address import AdminOptions
from ingress.state.server import Snapshot

if TYPE_CHECKING:
    from ingress.serving.http.uvicorn_server import HostedServer

# Of the listener; viewers that are more get 503, and the rest is served.
LIMITS = HTTPLimits(limit_connections=1024, header_timeout_s=10.0, body_buffer_bytes=1024)
STOP_S = 0.5
JOIN_S = 1.0


class AdminListener:
    """A listener that serves the snapshots that `make` makes, until `stop`.

    Raises `RuntimeError` if its address is busy. `url` is its URL, or `unix:PATH`. It answers in
    the loop `ingress-admin`, and makes snapshots in worker threads of that loop.
    """

    __slots__ = (
        "_address",
        "_home",
        "_is_stopped",
        "_server",
        "_serving",
        "_socket",
        "options",
        "url",
    )

    def __init__(
        self,
        make: Callable[[], Snapshot],
        options: AdminOptions,
        more: Sequence[BaseRoute] = (),
    ) -> None:
        self.options = options
        self._is_stopped = False
        self._address, self._socket = options.listen()
        self.url = url_of(self._socket, is_tls=False)
        self._home = EventLoopThread("ingress-admin")
        self._server = _uvicorn(Source(make), options, more)
        self._serving = start_on(self._home.loop, self._server.serve(sockets=[self._socket]))

    def stop(self) -> None:
        """Close the connections and end the thread, within two seconds. Once is enough."""
        if self._is_stopped:
            return
        self._is_stopped = True
        run_blocking(self._home.loop, self._end())
        self._socket.close()
        self._address.clean_up()
        self._home.stop(JOIN_S)

    async def _end(self) -> None:
        """Wait for the answers that are on their way, and no longer for streams."""
        self._server.stop()
        serving = asyncio.wrap_future(self._serving)
        done, _ = await asyncio.wait([serving], timeout=STOP_S)
        if not done:
            self._server.force_exit = True
            await asyncio.wait([serving], timeout=STOP_S)


def _uvicorn(source: Source, options: AdminOptions, more: Sequence[BaseRoute]) -> HostedServer:
    import uvicorn

    from ingress.serving.http.connections import Connections  # imports uvicorn
    from ingress.serving.http.uvicorn_server import HostedServer

    class Unlogged(Connections):
        def __call__(self, **given: Any) -> asyncio.Protocol:
            protocol: Any = super().__call__(**given)
            protocol.access_log = False
            return cast("asyncio.Protocol", protocol)

    return HostedServer(
        # No log option: `Config` sets the loggers of the whole process, which has other servers.
        uvicorn.Config(
            admin_app(source, options, more),
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,  # Prometheus asks every 15 to 60 s
            **Unlogged(LIMITS).options(),
        )
    )
