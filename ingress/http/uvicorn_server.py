"""uvicorn's server, with a shutdown that cuts no client while it sends a request."""

from __future__ import annotations

import asyncio
import socket
from time import monotonic

import uvicorn

from ingress.http import leaving

ASKING_S = 0.1  # for the first request on a connection that has just been made
READING_S = 0.005


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
        self._owns_socket = owns_socket

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        leaving.close_after_answers(self)
        await asyncio.sleep(self._lame_duck_s)
        if self._owns_socket:
            for each in sockets or ():
                leaving.refuse_handshakes(each)
        await self._let_ask()
        await super().shutdown(sockets)

    async def _let_ask(self) -> None:
        """Close the idle connections, once each had the time to send a request."""
        await asyncio.sleep(READING_S)  # waiting connections are accepted, and counted below
        until = monotonic() + ASKING_S
        while self.server_state.connections and monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(READING_S)
        until += ASKING_S
        while not leaving.close_idle(self) and monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(READING_S)
