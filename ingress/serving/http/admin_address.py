"""The address of the admin listener, and who may use it."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, field
from ipaddress import ip_address

from ingress.core.base.settings import metrics_routes
from ingress.serving.http.address import BACKLOG, Address

HOST, PORT = "127.0.0.1", 8265  # the port of Ray's dashboard
OFF = "off"
DEFAULT = ""  # HOST:PORT, or the next free port
TRIES = 20
_MODE = 0o600
TOKEN_LENGTH = 16  # at least, where other machines may try tokens


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """The options of an admin listener.

    `address` is HOST:PORT, the path of a Unix socket, "off", or "" for 127.0.0.1:8265 or the next
    free port. `token` is what a client must send as `Authorization: Bearer TOKEN`; `None` for none.
    `takes_next_port` says that a busy port of an address is replaced too. `metrics_routes` is how
    many routes of an application `/metrics` names; `None` for all.
    """

    address: str = DEFAULT
    token: str | None = None
    takes_next_port: bool = False
    metrics_routes: int | None = field(default_factory=metrics_routes)

    def __post_init__(self) -> None:
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ValueError("admin_token must be printable ASCII; choose another one")
        if self.token == "":
            raise ValueError("admin_token must not be empty; leave it out for none")
        if self.is_off or self.path is not None:
            return
        host, _ = self.host_and_port
        if is_loopback(host):
            return
        if self.token is None:
            raise ValueError(
                f"admin={self.address!r} can be reached from other machines; give a token "
                "(--admin-token, or INGRESS_ADMIN_TOKEN), or listen on 127.0.0.1"
            )
        if len(self.token) < TOKEN_LENGTH:
            raise ValueError(
                f"admin={self.address!r} can be reached from other machines, and the token has "
                f"{len(self.token)} characters; give one of at least {TOKEN_LENGTH} (such as that "
                "of `openssl rand -hex 16`), or listen on 127.0.0.1"
            )

    @property
    def is_given(self) -> bool:
        """Return whether the user has chosen an address."""
        return self.address != DEFAULT

    @property
    def is_off(self) -> bool:
        return self.address == OFF

    @property
    def path(self) -> str | None:
        """The path of the Unix socket; `None` for a host and a port."""
        text = self.address.removeprefix("unix:")
        return os.path.abspath(text) if "/" in text or text != self.address else None

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The host and the port. Raises `ValueError` for an address that has neither."""
        if self.address == DEFAULT:
            return HOST, PORT
        host, colon, port = self.address.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(
                f"admin must be HOST:PORT, such as {HOST}:{PORT}, the path of a Unix socket, or "
                f"{OFF!r}, got {self.address!r}"
            )
        return host.removeprefix("[").removesuffix("]"), int(port)

    def listen(self) -> tuple[Address, socket.socket]:
        """Return a socket that listens, and its address. Raises `RuntimeError` if it is busy.

        Without an address that the user has chosen, a busy port is replaced by the next free one.
        """
        if self.path is not None:
            address = Address(uds=self.path)
            bound = address.bind()
            os.chmod(self.path, _MODE)  # before it listens: no other user may connect
            bound.listen(BACKLOG)
            bound.setblocking(False)
            return address, bound
        host, port = self.host_and_port
        for tried in range(TRIES):
            address = Address(host, port + tried)
            try:
                return address, address.listen()
            except RuntimeError as error:
                cause = error.__cause__
                is_busy = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
                if not is_busy or (self.is_given and not self.takes_next_port):
                    raise
        address = Address(host, 0)
        return address, address.listen()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host's address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
