"""The admin listener of `ingress run`: on 127.0.0.1:8265, unless `--admin` says something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingress.core.base.settings import admin_settings
from ingress.engines import local_engine
from ingress.observe.live.observer import Observer
from ingress.observe.live.page import routes
from ingress.serving.http.admin_address import OFF, AdminOptions
from ingress.state.server import Snapshot

if TYPE_CHECKING:
    from ingress.observe.admin.listener import AdminListener


def admin_options(address: str | None, token: str | None) -> AdminOptions:
    """Return the options of the command line, or else of the environment.

    Raises `ValueError` for an address that is none, or that others reach and has no token.
    """
    known_address, known_token = admin_settings()
    token = token or known_token
    if address is not None:
        return AdminOptions(address, token)
    if known_address is not None:
        return AdminOptions(known_address, token, takes_next_port=True)
    return AdminOptions(token=token)


def resolved(options: AdminOptions | None) -> AdminOptions:
    """Return the options, or those of `serve.start` in the module where there are none."""
    if options is None:
        return AdminOptions(OFF)
    by_code = local_engine().admin.options
    return by_code if by_code is not None and not options.is_given else options


@dataclass(eq=False, slots=True)
class Admin:
    """The admin listener of a server, if it is on, and `line`, which names it while it listens."""

    _make: Callable[[], Snapshot]
    _options: AdminOptions
    _observer: Observer
    _listener: AdminListener | None = None
    line: str = ""

    def listen(self) -> None:
        """Begin to listen. Raises `RuntimeError` if the address is busy."""
        if self._options.is_off:
            return
        from ingress.observe.admin.listener import AdminListener

        self._listener = AdminListener(self._make, self._options, routes(self._observer))
        url = self._listener.url
        self.line = f"Metrics at {url}/metrics, page at {url}/"

    def close(self) -> None:
        """Stop listening. Once is enough."""
        if self._listener is not None:
            self._listener.stop()
