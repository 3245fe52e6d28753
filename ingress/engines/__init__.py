"""Engines run applications: `local` in this process, `ray` in a Ray cluster.

The caller chooses an engine at a start, `serve.run(app, engine="ray")`, else by `INGRESS_ENGINE`.
It stays the current engine until its applications have ended. An `Application` that is used as an
ASGI app runs in its server's process with either engine.

An engine is imported at its first use: a module that only declares deployments, such as a test or a
command line, takes little longer to import than FastAPI.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from threading import RLock
from typing import TYPE_CHECKING, Protocol

from starlette.types import Receive, Scope, Send

from ingress.app.declaration.declaration import Application, ApplicationHost
from ingress.core.base.settings import ENGINES, engine_name

if TYPE_CHECKING:
    from ingress.config import HTTPOptions, LoggingConfig
    from ingress.engines.local import LocalEngine
    from ingress.engines.ray.engine import RayEngine
    from ingress.handle import DeploymentHandle
    from ingress.schema import ServeStatus
    from ingress.serving.control.factories import Instrument
    from ingress.serving.http.admin_address import AdminOptions
    from ingress.state.server import Server

__all__ = ["Engine", "current_engine", "local_engine", "ray_engine"]


class Engine(Protocol):
    """The operations of an engine, for `ingress.api`.

    Thread-safe; those that block must not run in an event loop.
    """

    @property
    def is_running(self) -> bool:
        """True while the engine has something to stop."""

    def start(
        self,
        http_options: HTTPOptions | None,
        admin: AdminOptions | None = None,
        logging_config: LoggingConfig | None = None,
    ) -> None:
        """Start the HTTP server, and an admin listener if there are options for one."""

    def run(
        self,
        application: Application,
        name: str,
        route_prefix: str | None,
        logging_config: LoggingConfig | None = None,
    ) -> DeploymentHandle: ...

    def delete(self, name: str) -> None: ...

    def leave(self) -> float:
        """Serve on until `shutdown`, and tell clients to connect elsewhere.

        Returns the least number of seconds to wait before `shutdown`.
        """

    def writing_on_signal(self) -> AbstractContextManager[None]:
        """Make a signal write the recorded requests, while this context is open."""

    def shutdown(self) -> None: ...

    def status(self) -> ServeStatus: ...

    def url(self) -> str | None:
        """Return the URL that applications are served at over HTTP, if they are."""

    def app_handle(self, name: str) -> DeploymentHandle: ...

    def deployment_handle(self, deployment_name: str, app_name: str) -> DeploymentHandle: ...


class Recording(Protocol):
    """A file of the recent requests: `INGRESS_TRACE`."""

    def writing_on_signal(self) -> AbstractContextManager[None]:
        """Make a signal write the file, while this context is open."""

    def stop(self, timeout_s: float) -> None:
        """Write the file for the last time."""


class Views(Protocol):
    """The views that an engine starts with its applications. Engines import none themselves."""

    def listen(self, server: Server, options: AdminOptions, /) -> tuple[str, Callable[[], None]]:
        """Start an admin listener. Returns its URL, and a function that stops it.

        Raises `RuntimeError` if its address is busy.
        """

    def record(self, path: str, /) -> tuple[Recording, Instrument]:
        """Start a recording. Returns it, and the instrument for applications that start.

        Raises `ValueError` if the file cannot be written.
        """


VIEWS: Views
"""The views of the room above, which `ingress.api` sets."""

_local: LocalEngine | None = None
_ray: RayEngine | None = None
_chosen: Engine | None = None
_of_replica: Engine | None = None  # in the process of a replica
_making = RLock()


def local_engine() -> LocalEngine:
    """Return the engine of this process."""
    global _local
    if _local is None:
        from ingress.engines.local import LocalEngine

        with _making:  # first requests may come in several threads
            if _local is None:
                engine = LocalEngine()
                atexit.register(engine.shutdown, timeout_s=0.0)  # no caller is left to wait
                _local = engine
    return _local


def ray_engine() -> RayEngine:
    """Return the Ray engine. Raises `RuntimeError` without Ray, or with another version of it."""
    global _ray
    if _ray is None:
        from ingress.engines.ray import check_installed

        check_installed()
        from ingress.engines.ray.engine import RayEngine

        with _making:
            if _ray is None:
                _ray = RayEngine()
    return _ray


_ENGINES: dict[str, Callable[[], Engine]] = {"local": local_engine, "ray": ray_engine}


def current_engine(name: str | None = None) -> Engine:
    """Return the engine that `ingress.api` uses; a `name` chooses it.

    Raises `ValueError` for an unknown name, `RuntimeError` if another engine runs something.
    """
    global _chosen
    if _of_replica is not None:
        return _of_replica
    if name is not None and name not in _ENGINES:
        raise ValueError(f"engine must be {' or '.join(map(repr, ENGINES))}, got {name!r}")
    with _making:
        running = _chosen if _chosen is not None and _chosen.is_running else None
        if name is None:
            _chosen = running or _ENGINES[engine_name()]()
        else:
            engine = _ENGINES[name]()
            if running is not None and running is not engine:
                raise RuntimeError(
                    f"engine={name!r} cannot be used while applications run on another engine; "
                    "call serve.shutdown() first"
                )
            _chosen = engine
        return _chosen


def use_only(engine: Engine) -> None:
    """Make `current_engine` return this one: the process is that of one replica."""
    global _of_replica
    _of_replica = engine


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
