"""The engine that `ingress.api` uses: it is made at its first use, and stays while it runs."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import RLock
from typing import TYPE_CHECKING, Protocol

from ingress.core.base.settings import ENGINES, engine_name

if TYPE_CHECKING:
    from ingress.app.declaration.declaration import Application
    from ingress.config import HTTPOptions, LoggingConfig
    from ingress.engines.local import LocalEngine
    from ingress.engines.ray.engine import RayEngine
    from ingress.handle import DeploymentHandle
    from ingress.schema import ServeStatus
    from ingress.serving.http.admin_address import AdminOptions


class Engine(Protocol):
    """The operations of an engine, for `ingress.api`.

    Thread-safe; those that block must not run in an event loop.
    """

    @property
    def is_running(self) -> bool:
        """True while the engine has something to stop."""

    def use_grpc(self, options: dict[str, object]) -> bool:
        """Take Ray Serve's gRPC options for `start`. Returns False without a gRPC server."""

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


_local: LocalEngine | None = None
_ray: RayEngine | None = None
_chosen: Engine | None = None
_of_replica: Engine | None = None  # in the process of a replica
_making = RLock()


def local_engine() -> LocalEngine:
    """Return the engine of this process."""
    global _local
    with _making:  # first requests may come in several threads
        if _local is None:
            from ingress.engines.local import LocalEngine

            _local = LocalEngine()
            atexit.register(_local.shutdown, timeout_s=0.0)  # no caller is left to wait
        return _local


def ray_engine() -> RayEngine:
    """Return the Ray engine. Raises `RuntimeError` without Ray, or with another version of it."""
    global _ray
    with _making:
        if _ray is None:
            from ingress.engines.ray import check_installed

            check_installed()
            from ingress.engines.ray.engine import RayEngine

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
