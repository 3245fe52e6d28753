"""uvicorn in threads of its own, one or several, for `serve.run` and `ingress run`."""

from __future__ import annotations

import asyncio
import socket
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ingress.core.calls.loops import EventLoopThread, run_on
from ingress.serving.http.address import Address, url_of
from ingress.serving.http.leaving import close_after_answers, flush
from ingress.serving.http.proxy import HTTPProxy
from ingress.telemetry.logs import logger

if TYPE_CHECKING:
    from ingress.serving.http.uvicorn_server import HTTPThreadServer


class HTTPServer:
    """A server of an `HTTPProxy` on one address, on the loop `ingress-http`.

    If it `waits`, no client can connect before `start`: a server that it replaces serves until
    then. The socket may be handed over to a server that replaces this one.

    With several `threads`, it is the first of as many servers, each with a loop and a socket: the
    kernel distributes connections among the sockets. What it is told goes for all of them.
    """

    __slots__ = (
        "_address", "_arguments", "_is_handed_over", "_others", "_server", "_serving", "_socket",
        "home", "proxy", "url",
    )  # fmt: skip

    def __init__(
        self,
        proxy: HTTPProxy,
        address: Address,
        arguments: dict[str, Any],
        *,
        waits: bool = False,
        threads: int = 1,
        name: str = "ingress-http",
    ) -> None:
        self.proxy = proxy
        self._address = address
        self._arguments = arguments
        self._is_handed_over = False
        self._socket = address.bind()
        if threads > 1:  # after `bind`, which has refused the port of another server
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if not waits:
            address.listen(self._socket)
        self.url = url_of(self._socket, is_tls=arguments["ssl_certfile"] is not None)
        self.home = EventLoopThread(name)
        self._server: HTTPThreadServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._others = [
            HTTPServer(
                proxy,
                replace(address, port=self._socket.getsockname()[1], is_shared=True),
                {**arguments, "http": copy(arguments["http"])},
                waits=waits,
                name=f"{name}-{number}",
            )
            for number in range(2, threads + 1)
        ]

    @property
    def is_begun(self) -> bool:
        """Return whether it accepts connections, or has."""
        return self._server is not None

    async def start(self) -> None:
        """Begin to accept connections."""
        await run_on(self.home.loop, self._start)
        for each in self._others:
            await each.start()

    async def _start(self) -> None:
        import uvicorn

        from ingress.serving.http.uvicorn_server import HTTPThreadServer

        arguments = {
            **self._arguments,
            "interface": "asgi3",  # uvicorn looks for an `async def`, and the proxy's is none
            "lifespan": "off",  # the applications have lifespans of their own
            "log_config": None,
        }
        config = uvicorn.Config(self.proxy, **arguments)
        owns_socket = self._address.fd is None and not self._is_handed_over
        self._server = HTTPThreadServer(config, owns_socket=owns_socket)
        opened = getattr(arguments["http"], "opened", [])  # without limits, it is uvicorn's own
        opened.append(self._server.server_state.connections)
        self._serving = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket])
        )
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError(f"uvicorn did not start on {self.url}")
            await asyncio.sleep(0.001)

    def leave(self) -> None:
        """Make each response from now on close its connection. Thread-safe."""
        if self._server is not None:
            self.home.mailbox.post(close_after_answers, self._server)
        for each in self._others:
            each.leave()

    def hand_over(self) -> list[socket.socket]:
        """Return the listening socket, for another process that serves on it. Thread-safe.

        Returns none if there are several: the other process makes its own on the same port.
        """
        if self._others:
            return []
        # Race with a stop just before: the other process finds a socket that refuses handshakes,
        # and no server that it could replace.
        self._is_handed_over = True
        if self._server is not None:
            self._server.owns_socket = False
        return [self._socket]

    async def retire(self, wait_s: float) -> None:
        """Accept no more connections, and wait until those that are open have ended."""
        self._address = replace(self._address, uds=None)  # the other process has its file
        if self._server is not None:
            others = [each.retire(wait_s) for each in self._others]
            await asyncio.gather(run_on(self.home.loop, self._server.retire, wait_s), *others)

    async def stop(self, flush_s: float = 0.0) -> None:
        """Close the connections and end the thread. The requests have ended.

        A client that still takes its answer has `flush_s`; all else takes a second at most.
        """
        await asyncio.gather(
            self._stop_own(flush_s), *(each.stop(flush_s) for each in self._others)
        )

    async def _stop_own(self, flush_s: float) -> None:
        try:
            if self._server is not None:
                async with asyncio.timeout(0.9) as limit:
                    if not await run_on(self.home.loop, self._stop):
                        limit.reschedule(asyncio.get_running_loop().time() + flush_s + 0.9)
                        await run_on(self.home.loop, self._flush, flush_s)
        except TimeoutError:
            logger.error(
                "user code blocks the event loop of %s; its thread is left behind", self.home.name
            )
        finally:
            self._socket.close()
            self._address.clean_up()
            self.home.stop(timeout_s=0.2)

    async def _stop(self) -> bool:
        """Close the connections. Returns whether all are closed."""
        assert self._server is not None
        assert self._serving is not None
        self._server.stop()
        done, _ = await asyncio.wait([self._serving], timeout=0.55)
        return bool(done)

    async def _flush(self, flush_s: float) -> None:
        assert self._server is not None
        assert self._serving is not None
        await flush(self._server, flush_s)
        self._server.force_exit = True
        await asyncio.wait([self._serving], timeout=0.15)


def check_address(host: str, port: int) -> int:
    """Return a port of this machine that can be bound: `port`, or a free one for 0.

    Raises `RuntimeError` if it cannot be bound.
    """
    with Address(host, port).listen() as listening:
        return int(listening.getsockname()[1])
