"""Engines run applications: `local` in this process, `ray` in a Ray cluster.

The caller chooses an engine at a start, `serve.run(app, engine="ray")`, else by `INGRESS_ENGINE`.
It stays the current engine until its applications have ended. An `Application` that is used as an
ASGI app runs in its server's process with either engine.

An engine is imported at its first use: a module that only declares deployments, such as a test or a
command line, takes little longer to import than FastAPI.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from threading import Lock

from starlette.types import Receive, Scope, Send

from ingress.app.declaration.declaration import Application, ApplicationHost
from ingress.core.base.settings import engine_name
from ingress.engines.current import Engine, current_engine, local_engine, ray_engine

__all__ = ["Engine", "current_engine", "local_engine", "ray_engine"]

_making = Lock()


class _FirstUse:
    """The host until an application is used. It makes the permanent host and delegates to it."""

    __slots__ = ()

    def __call__(
        self, application: Application, scope: Scope, receive: Receive, send: Send
    ) -> Coroutine[None, None, None]:
        if _is_meant_for_ray():
            return _refuse(scope, receive, send)
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
                Application._host = Hosting(local_engine())
        return Application._host


def _is_meant_for_ray() -> bool:
    try:
        return engine_name() == "ray"
    except ValueError:  # reported when the engine starts
        return False


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        "INGRESS_ENGINE='ray' is not possible under another server, which runs the application "
        "in its own process; use ingress run --engine ray, or unset INGRESS_ENGINE"
    )
    if scope["type"] != "lifespan":
        raise RuntimeError(message)
    await receive()
    # An error without an answer means "no lifespan" to uvicorn, which would serve anyway.
    await send({"type": "lifespan.startup.failed", "message": message})


Application._host = _FirstUse()
