"""The admin listener of the engine: that of `serve.start(admin=...)`, or of INGRESS_ADMIN."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ingress.core.base.settings import ADMIN, admin_settings
from ingress.engines import views
from ingress.serving.http.admin_address import AdminOptions
from ingress.state.server import Server

logger = logging.getLogger("ingress")


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
        self.url, self._stop = views.VIEWS.listen(server, options)
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
