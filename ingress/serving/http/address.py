"""The place where a server listens: a host and a port, a Unix domain socket, or a descriptor.

Worker processes share a port, see `SharedPort`. If they share one socket, the first that wakes may
take every waiting connection: the connections of a client that keeps them open end up in one
worker, and the others are idle. If each worker has its own socket, Linux distributes connections by
a hash of the client's address and port. A Unix domain socket and a socket of another program cannot
be had twice: all workers share it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from dataclasses import dataclass
from typing import Any

BACKLOG = 2048  # uvicorn's
_MODE = 0o666  # uvicorn's: a proxy in front of the server may be another user
_NOT_OF_THIS_MACHINE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on: `fd`, else `uds`, else `host` and `port`.

    With port 0 the system chooses a port. `fd` is a socket that another program has bound; with
    `uds` too, its file is removed at the end. `is_shared` if a server of this user that it replaces
    listens at the port, too.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    fd: int | None = None
    is_shared: bool = False

    def bind(self) -> socket.socket:
        """Return a socket that is bound and does not listen yet. Raises `RuntimeError`."""
        if self.fd is not None:
            return _open(self.fd)
        if self.uds is not None:
            return _bind_path(self.uds)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # With the protocol: asyncio needs it to know that it may switch Nagle's algorithm off.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            raise self._refusal(error) from error
        return bound

    def listen(self, bound: socket.socket | None = None) -> socket.socket:
        """Return a socket that listens, so that a second server is refused. Raises as `bind`."""
        listening = bound or self.bind()
        try:
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise self._refusal(error) from error
        listening.setblocking(False)
        return listening

    def clean_up(self) -> None:
        """Remove the file of a Unix domain socket; the server has ended."""
        if self.uds is not None:
            try:
                os.unlink(self.uds)
            except OSError:
                pass

    def _refusal(self, error: OSError) -> RuntimeError:
        advice = "stop the program that listens there, or choose another port"
        if isinstance(error, socket.gaierror) or error.errno in _NOT_OF_THIS_MACHINE:
            advice = (
                f"host must be an address of this machine, got {self.host!r}; use 127.0.0.1 for "
                "clients on this machine, or 0.0.0.0 for all"
            )
        elif error.errno == errno.EACCES:
            advice = "choose a port from 1024 on, or 0 for a free one"
        what = self.fd if self.fd is not None else f"'{self.host}:{self.port}'"
        return RuntimeError(f"Failed to bind to address {what}: {error.strerror}; {advice}")


def url_of(bound: socket.socket, *, is_tls: bool) -> str:
    """Return the URL of a bound socket; `unix:PATH` for a Unix domain socket."""
    return url_of_name(bound.getsockname(), is_tls=is_tls)


def url_of_name(name: Any, *, is_tls: bool) -> str:
    """Return the URL of the name of a socket, as `url_of`."""
    if not isinstance(name, tuple):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind_path(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise RuntimeError(
            f"this system, such as Windows, has no Unix domain sockets, got {path!r}; give a host "
            "and a port"
        )
    mode = _MODE
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if (there := _mode_of(path)) and stat.S_ISSOCK(there):
            answer = bound.connect_ex(path)
            if answer == 0:
                raise OSError(errno.EADDRINUSE, "a server listens there already")
            if answer != errno.ECONNREFUSED:  # such as EACCES: another user's, which may live
                raise OSError(answer, os.strerror(answer))
            os.unlink(path)  # its server has ended without removing it
            mode = stat.S_IMODE(there)
            bound.close()
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(path)
        os.chmod(path, mode)
    except OSError as error:
        bound.close()
        raise RuntimeError(
            f"Failed to bind to the Unix domain socket {path!r}: {error.strerror or error}; give a "
            "path of at most 107 bytes in a folder that exists and can be written"
        ) from error
    return bound


def _mode_of(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def _open(number: int) -> socket.socket:
    copied = -1
    try:
        copied = os.dup(number)
        opened = socket.socket(fileno=copied)
        copied = -1
        opened.getsockname()
    except OSError as error:
        if copied >= 0:
            os.close(copied)
        raise RuntimeError(
            f"fd={number} is not an open socket: {error.strerror}; pass a socket that the program "
            "which starts this one has bound and made inheritable"
        ) from error
    return opened


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
