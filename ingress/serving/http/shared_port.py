"""The port of worker processes, each of which has a socket of its own.

If workers share one socket, the first that wakes may take every waiting connection: the connections
of a client that keeps them open end up in one worker, and the others are idle. If each worker has
its own socket, Linux distributes connections by a hash of the client's address and port. A Unix
domain socket and a socket of another program cannot be had twice: all workers share it.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from ingress.serving.http.address import Address, url_of_name


class SharedPort:
    """A port that one process reserves, and that the processes which get this object serve.

    If the processes have sockets of their own, the socket here never listens.
    """

    def __init__(self, bound: socket.socket, address: Address) -> None:
        self.has_own_sockets = (
            sys.platform == "linux" and address.fd is None and bound.family != socket.AF_UNIX
        )
        if self.has_own_sockets:
            # After `bind`, which has refused the port of another server, whatever its options.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.is_handed_over = False  # to a server that replaces this one
        self._bound: socket.socket | None = bound
        self._family, self._address = bound.family, bound.getsockname()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None if self.has_own_sockets else self._bound}

    def url(self, *, is_tls: bool) -> str:
        """Return the URL of the port, as `address.url_of`."""
        return url_of_name(self._address, is_tls=is_tls)

    def close(self) -> None:
        """Give the port up in this process. Those that serve it have sockets of their own."""
        if self._bound is not None:
            self._bound.close()

    def shared(self) -> list[socket.socket]:
        """Return the socket that all processes share; none if they have sockets of their own."""
        return [] if self._bound is None or self.has_own_sockets else [self._bound]

    def open(self) -> socket.socket:
        """Return the socket to serve on. Raises `OSError` if it cannot be bound."""
        if self._bound is not None:
            return self._bound
        # With the protocol: asyncio needs it to know that it may switch Nagle's algorithm off.
        made = socket.socket(self._family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(self._address)
        return made
