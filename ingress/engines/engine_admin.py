"""The admin listener of the engine: that of `serve.start(admin=...)`, or of INGRESS_ADMIN."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ingress.core.base.settings import ADMIN, admin_settings
from ingress.core.base.snapshot import Snapshot
from ingress.serving.http.admin_address import AdminOptions

if TYPE_CHECKING:
    from ingress.observe.admin.listener import AdminListener
    from ingress.observe.live.documents import Ask
    from ingress.observe.live.observer import Observer

logger = logging.getLogger("ingress")


@dataclass(eq=False, slots=True)
class EngineAdmin:
    """The admin listener of an engine, from `start` to `stop`. Guarded by the engine's locks.

    `snapshot` returns the state of the process in numbers, and `ask` the parts of it that the page
    asks for. `options` are those of the user's code, `None` if it gives none.
    """

    snapshot: Callable[[], Snapshot]
    ask: Ask
    options: AdminOptions | None = None
    _listener: AdminListener | None = None
    _observer: Observer | None = None

    @property
    def url(self) -> str | None:
        """The URL of the listener, if there is one."""
        listener = self._listener
        return None if listener is None else listener.url

    def start(self, options: AdminOptions | None) -> None:
        """Start the listener that the options ask for, if any, unless it runs already.

        Raises `RuntimeError` if its address is busy.
        """
        if self._listener is not None or options is None or options.is_off:
            return
        from ingress.observe.admin.listener import (
            AdminListener,  # not for a process without a listener
        )
        from ingress.observe.live.observer import Observer
        from ingress.observe.live.page import routes

        observer = Observer(self.ask)
        self._listener = AdminListener(self.snapshot, options, routes(observer))
        self._observer = observer
        observer.start()
        # Under uvicorn's own command only uvicorn's loggers print at this level.
        servers = logging.getLogger("uvicorn.error")
        told = logger if logger.isEnabledFor(logging.INFO) else servers
        told.info("admin listener at %s", self._listener.url)

    def start_by_environment(self) -> None:
        """Start the listener if INGRESS_ADMIN says so. A failure is logged: requests are served."""
        address, token = admin_settings()
        if address is None:
            return
        try:
            self.start(AdminOptions(address, token, takes_next_port=True))
        except (RuntimeError, ValueError) as error:
            logger.warning("no admin listener: %s (%s=%s)", error, ADMIN, address)

    def stop(self) -> None:
        """Stop the listener, if it runs."""
        listener, observer = self._listener, self._observer
        self.options = self._listener = self._observer = None
        if listener is not None:
            listener.stop()
        if observer is not None:
            observer.stop()
