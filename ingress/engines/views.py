"""The views that an engine starts with its applications. Engines import none themselves.

The admin listener is that of `serve.start(admin=...)`, or of INGRESS_ADMIN.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ingress.core.base.settings import ADMIN, admin_settings
from ingress.serving.http.admin_address import AdminOptions
from ingress.telemetry.logs import logger

if TYPE_CHECKING:
    from ingress.serving.control.factories import Instrument
    from ingress.state.server import Server


class Recording(Protocol):
    """A file of the recent requests: `INGRESS_TRACE`."""

    def writing_on_signal(self) -> AbstractContextManager[None]:
        """Make a signal write the file, while this context is open."""

    def stop(self, timeout_s: float) -> None:
        """Write the file for the last time."""


class Views(Protocol):
    """The views of the room above."""

    def listen(self, server: Server, options: AdminOptions, /) -> tuple[str, Callable[[], None]]:
        """Start an admin listener. Returns its URL, and a function that stops it.

        Raises `RuntimeError` if its address is busy.
        """

    def record(self, path: str, /) -> tuple[Recording, Instrument]:
        """Start a recording. Returns it, and the instrument for applications that start.

        Raises `ValueError` if the file cannot be written.
        """


_views: Views


def use_views(views: Views) -> None:
    """Set the views of the room above: the package does, when it is imported."""
    global _views
    _views = views


def record(path: str) -> tuple[Recording, Instrument]:
    """Start a recording. Raises `ValueError` if the file cannot be written."""
    return _views.record(path)


@dataclass(eq=False, slots=True)
class EngineAdmin:
    """The admin listener of an engine, from `start` to `stop`. Guarded by the engine's locks.

    `options` are those of the user's code, `None` if it gives none. `url` is that of the listener,
    if there is one.
    """

    options: AdminOptions | None = None
    url: str | None = None
    _stop: Callable[[], None] | None = None

    def start(self, server: Server, options: AdminOptions | None) -> None:
        """Start the listener that the options ask for, if any, unless it runs already.

        Raises `RuntimeError` if its address is busy.
        """
        if self._stop is not None or options is None or options.is_off:
            return
        self.url, self._stop = _views.listen(server, options)
        # Under uvicorn's own command only uvicorn's loggers print at this level.
        servers = logging.getLogger("uvicorn.error")
        told = logger if logger.isEnabledFor(logging.INFO) else servers
        told.info("admin listener at %s", self.url)

    def start_by_environment(self, server: Server) -> None:
        """Start the listener if INGRESS_ADMIN says so. A failure is logged: requests are served."""
        address, token = admin_settings()
        if address is None:
            return
        try:
            self.start(server, AdminOptions(address, token, takes_next_port=True))
        except (RuntimeError, ValueError) as error:
            logger.warning("no admin listener: %s (%s=%s)", error, ADMIN, address)

    def stop(self) -> None:
        """Stop the listener, if it runs."""
        stop = self._stop
        self.options = self.url = self._stop = None
        if stop is not None:
            stop()
