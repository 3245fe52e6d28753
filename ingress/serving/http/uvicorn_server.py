"""uvicorn's server, with a shutdown that cuts no client while it sends a request."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import Any

import uvicorn

from ingress.serving.http import leaving

ASKING_S = 0.1  # for the first request on a connection that has just been made
READING_S = 0.005


class HostedServer(uvicorn.Server):
    """uvicorn's server on a loop of ours, which `stop` ends, and no signal."""

    def __init__(self, config: uvicorn.Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make it shut down. Call this on its loop."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        # uvicorn looks ten times a second whether it is to stop: a third of what an idle server
        # costs. The `date` header needs one look a second.
        seconds = 0
        while not await self.on_tick(10 * seconds):
            seconds += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()


class UvicornServer(uvicorn.Server):
    """uvicorn's server. Before it stops, it serves all requests that have been sent to it.

    `lame_duck_s` is the time that it goes on listening after it was told to stop; `owns_socket`
    says whether no other process listens on the same socket.
    """

    def __init__(
        self, config: uvicorn.Config, *, lame_duck_s: float = 0.0, owns_socket: bool = True
    ) -> None:
        super().__init__(config)
        self._lame_duck_s = lame_duck_s
        self.owns_socket = owns_socket

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        leaving.close_after_answers(self)
        await asyncio.sleep(self._lame_duck_s)
        self._refuse(sockets or ())
        await self._let_ask()
        await super().shutdown(sockets)

    def _refuse(self, sockets: Iterable[socket.socket]) -> None:
        if self.owns_socket:
            for each in sockets:
                leaving.refuse_handshakes(each)

    async def retire(self, wait_s: float) -> None:
        """Accept no more connections, and wait for the end of those that are open.

        An idle connection ends with its keep-alive time, as always: to close it earlier could meet
        a request. A socket that is shared stays open in the other process, with the connections
        that wait to be accepted.
        """
        leaving.close_after_answers(self)
        servers = getattr(self, "servers", ())
        self._refuse(each for server in servers for each in server.sockets)
        await asyncio.sleep(READING_S)  # waiting connections are accepted
        for each in servers:
            each.close()
        until = monotonic() + wait_s
        while self.server_state.connections and monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(leaving.LOOK_S)

    async def _let_ask(self) -> None:
        """Close the idle connections, once each had the time to send a request."""
        await asyncio.sleep(READING_S)  # waiting connections are accepted, and counted below
        until = monotonic() + ASKING_S
        while self.server_state.connections and monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(READING_S)
        until += ASKING_S
        while not leaving.close_idle(self) and monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(READING_S)


class HTTPThreadServer(HostedServer, UvicornServer):
    """The server of `serve.run` and `ingress run`, on the loop `ingress-http`."""
