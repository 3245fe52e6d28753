"""Worker processes that share a port, each with a socket of its own.

Of one socket for all whoever wakes first takes every connection that is there: those of a client
that keeps them open end up in one worker, and the others have nothing to do. Linux deals them out
by a hash of the client's address and port if each worker has a socket of its own.
"""

from __future__ import annotations

import socket
import sys
from typing import Any, Self

import uvicorn
from uvicorn.supervisors import Multiprocess


class SharedPort(socket.socket):
    """A bound TCP socket; the process that it is sent to gets another one, on the same port.

    This one never listens. It keeps the port while workers come and go.
    """

    @classmethod
    def of(cls, bound: socket.socket) -> Self:
        # After it was bound: a port that another server has was refused, whatever that had set.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return cls(fileno=bound.detach())

    @classmethod
    def bind_again(cls, family: int, address: Any) -> Self:
        # With the protocol, by which asyncio knows that it may switch Nagle's algorithm off.
        made = cls(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPort.bind_again, (self.family, self.getsockname())


def run_workers(config: uvicorn.Config) -> None:
    """Serve in `config.workers` processes until told to stop. Exits with 3 if the port is taken."""
    bound = config.bind_socket()
    sock = SharedPort.of(bound) if sys.platform == "linux" else bound
    Multiprocess(config, sockets=[sock]).run()
