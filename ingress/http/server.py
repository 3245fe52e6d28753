"""uvicorn in a thread of its own, for `serve.run` and `ingress run`."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from ingress.calls.loops import EventLoopThread, run_on
from ingress.config import HTTPOptions
from ingress.http.leaving import close_after_answers
from ingress.http.proxy import HTTPProxy

if TYPE_CHECKING:
    from ingress.http.uvicorn_server import UvicornServer


logger = logging.getLogger("ingress")


class HTTPServer:
    """A server of an `HTTPProxy` on one address, on the loop `ingress-http`."""

    __slots__ = ("_options", "_server", "_serving", "_socket", "home", "host", "port", "proxy")

    def __init__(self, proxy: HTTPProxy, options: HTTPOptions, host: str) -> None:
        self.proxy = proxy
        self._options = options
        self._socket = _bind(host, options.port)
        self.host, self.port = self._socket.getsockname()[:2]
        self.home = EventLoopThread("ingress-http")
        self._server: UvicornServer | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        scheme = "https" if self._options.ssl_certfile else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"

    async def start(self) -> None:
        """Begin to accept connections."""
        await run_on(self.home.loop, self._start())

    async def _start(self) -> None:
        import uvicorn

        from ingress.http.connections import Connections
        from ingress.http.uvicorn_server import UvicornServer

        options = self._options
        config = uvicorn.Config(
            self.proxy,
            interface="asgi3",  # uvicorn looks for an `async def`, and the proxy's is none
            lifespan="off",  # the applications have lifespans of their own
            log_config=None,
            access_log=logging.getLogger("uvicorn.access").isEnabledFor(logging.INFO),
            root_path=options.root_path,
            timeout_keep_alive=int(options.keep_alive_timeout_s),
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_keyfile_password=options.ssl_keyfile_password,
            ssl_ca_certs=options.ssl_ca_certs,
            **Connections(self.proxy.limits.http).options(),
        )
        self._server = UvicornServer(config)
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

    async def stop(self) -> None:
        """Close the connections and end the thread, within a second. The requests have ended."""
        try:
            if self._server is not None:
                async with asyncio.timeout(0.9):
                    await run_on(self.home.loop, self._stop())
        except TimeoutError:
            logger.error("user code blocks the event loop of %s; left behind", self.home.name)
        finally:
            self._socket.close()
            self.home.stop(timeout_s=0.2)

    async def _stop(self) -> None:
        assert self._server is not None
        assert self._serving is not None
        self._server.should_exit = True
        done, _ = await asyncio.wait([self._serving], timeout=0.55)
        if not done:
            self._server.force_exit = True
            await asyncio.wait([self._serving], timeout=0.15)


def check_address(host: str, port: int) -> int:
    """Return a port of this machine that can be bound: `port`, or a free one for 0.

    Raises `RuntimeError` if it cannot be bound.
    """
    with _bind(host, port) as listening:
        return int(listening.getsockname()[1])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)  # uvicorn's backlog; now, so that a second server is refused at once
    except OSError as error:
        listening.close()
        raise RuntimeError(
            f"Failed to bind to address '{host}:{port}': {error.strerror}; stop what listens "
            "there, or choose another port"
        ) from error
    listening.setblocking(False)
    return listening
