"""Which engine runs applications: `local` is this process.

It is imported when something runs for the first time: what only declares deployments, as a test or
a command line does, takes little longer to import than FastAPI.
"""

from __future__ import annotations

import atexit
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from threading import RLock
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from ingress.declaration import Application, ApplicationHost

if TYPE_CHECKING:
    from ingress.engines.local import LocalEngine

__all__ = ["current_engine"]

_local: LocalEngine | None = None
_making = RLock()


def current_engine() -> LocalEngine:
    """Return the engine that `ingress.api` speaks to."""
    global _local
    if _local is None:
        from ingress.engines.local import LocalEngine

        with _making:  # first requests may come in several threads
            if _local is None:
                engine = LocalEngine()
                atexit.register(engine.shutdown, timeout_s=0.0)  # nobody is left to wait
                _local = engine
    return _local


class _FirstUse:
    """The host until an application is used: makes the one that stays, and asks that."""

    def __call__(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> Coroutine[Any, Any, None]:
        return self._host()(application, scope, receive, send)

    async def start(self, application: Application) -> str:
        return await self._host().start(application)

    async def close(self, application: Application, *, unless_in_lifespan: bool = False) -> None:
        await self._host().close(application, unless_in_lifespan=unless_in_lifespan)

    def lifespan(self, application: Application) -> AbstractAsyncContextManager[None]:
        return self._host().lifespan(application)

    def _host(self) -> ApplicationHost:
        from ingress.engines.hosting import Hosting

        with _making:
            if Application._host is self:
                Application._host = Hosting(current_engine())
        return Application._host


Application._host = _FirstUse()
