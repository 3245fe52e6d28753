"""The public functions of `serve`; each delegates to the current engine."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Never, TypeVar

from ingress._unsupported import refuse
from ingress.app.declaration.declaration import Application, Deployment
from ingress.app.declaration.names import check_names
from ingress.config import HTTPOptions, LoggingConfig
from ingress.context import get_replica_context
from ingress.core.base.ctrl_c import without_traceback
from ingress.core.base.settings import TRACING, export
from ingress.core.base.signals import StopSignals
from ingress.engines import current_engine
from ingress.exceptions import RayServeException
from ingress.handle import DeploymentHandle
from ingress.schema import ApplicationStatus, ServeStatus
from ingress.serving.http.admin_address import AdminOptions
from ingress.telemetry.watchdog import WATCHDOG, Stall

logger = logging.getLogger("ingress")

Chosen = TypeVar("Chosen", HTTPOptions, LoggingConfig)
T = TypeVar("T")

_LOGGING_EXAMPLE = "serve.LoggingConfig(log_level='DEBUG')"
LAME_DUCK_S = 0.2  # seconds between the signal and the refusal of new requests


def start(
    http_options: HTTPOptions | dict[str, Any] | None = None,
    *,
    engine: str | None = None,
    grpc_options: dict[str, Any] | None = None,
    logging_config: LoggingConfig | dict[str, Any] | None = None,
    tracing: bool = False,
    admin: str | None = None,
    admin_token: str | None = None,
    **unsupported: Never,
) -> None:
    """Start the HTTP server before any application. The server runs until `shutdown`.

    `http_options` set the address that `run` listens on; `host=None` disables HTTP. `engine` is
    "local" for this process, or "ray"; the default is `INGRESS_ENGINE`. `logging_config` is for the
    loggers `ingress`, `ingress.access`, `ray.serve` and uvicorn's, and for deployments that have
    none: docs/logging.md. `tracing` makes spans of calls by handle and of batches, as
    `INGRESS_TRACING=1` does: it sets that variable. `admin` is the address of the admin listener,
    with `/metrics`: "127.0.0.1:8265", the path of a Unix socket, "" for the first free port from
    8265 on, or "off"; one that other machines reach needs `admin_token`. Ray has its own metrics.
    `grpc_options` are those of Ray Serve, for engine="ray"; this process has no gRPC server.
    Raises `RuntimeError` if an address cannot be bound, or the engine cannot be used.
    """
    refuse("serve.start", unsupported, start)
    if grpc_options is not None and not current_engine(engine).use_grpc(grpc_options):
        refuse("serve.start", {"grpc_options": grpc_options}, start)
    if tracing:
        export({TRACING: "1"})  # the replicas read it, also those in processes of their own
    current_engine(engine).start(
        _options(HTTPOptions, http_options, "http_options", "serve.HTTPOptions(port=8000)"),
        None if admin is None else AdminOptions(admin, admin_token),
        _options(LoggingConfig, logging_config, "logging_config", _LOGGING_EXAMPLE),
    )


def run(
    target: Application[T],
    blocking: bool = False,
    name: str = "default",
    route_prefix: str | None = "/",
    logging_config: LoggingConfig | dict[str, Any] | None = None,
    *,
    engine: str | None = None,
    **unsupported: Never,
) -> DeploymentHandle[T]:
    """Start an application and return a handle to it once all its replicas are ready.

    The application is served over HTTP under `route_prefix`; `None` disables HTTP for it. It
    replaces an application of the same name, which stops when the new one is ready, or at once if
    it is still starting. With `blocking`, returns on Ctrl-C or SIGTERM, after shutting everything
    down. `logging_config` is for the deployments that have none: docs/logging.md. `engine` is
    "local" for this process, or "ray"; the default is the engine that runs applications already,
    else `INGRESS_ENGINE`. Raises `RuntimeError` if a replica does not start (`__cause__` is the
    exception of user code): `status` then has the application as DEPLOY_FAILED, and its requests
    get 503, until it is deleted or replaced. Raises it too if the application is deleted, replaced
    or shut down while it starts.
    """
    refuse("serve.run", unsupported, run)
    _check_target(target)
    check_names(name, route_prefix)
    logging_options = _options(LoggingConfig, logging_config, "logging_config", _LOGGING_EXAMPLE)
    with serving_until_signal() if blocking else nullcontext():
        return current_engine(engine).run(target, name, route_prefix, logging_options)


@dataclass(init=False, slots=True)
class RunTarget:
    """One application for `run_many`. The fields are the parameters of `run`."""

    target: Application
    name: str
    route_prefix: str | None
    logging_config: LoggingConfig | dict[str, Any] | None

    def __init__(
        self,
        target: Application,
        name: str = "default",
        route_prefix: str | None = "/",
        logging_config: LoggingConfig | dict[str, Any] | None = None,
        **unsupported: Never,
    ) -> None:
        refuse("serve.RunTarget", unsupported, RunTarget.__init__)
        self.target, self.name, self.route_prefix = target, name, route_prefix
        self.logging_config = logging_config


def run_many(
    targets: Sequence[RunTarget], blocking: bool = False, **unsupported: Never
) -> list[DeploymentHandle]:
    """Start several applications, one after another, and return their handles.

    If one does not start, those that run already keep running. Raises as `run` does, and
    `ValueError`, before anything starts, if two applications have the same name.
    """
    refuse("serve.run_many", unsupported, run_many)
    names = [each.name for each in targets]
    if len({*names}) < len(names):
        raise ValueError(
            f"applications must have different names, got {names}; give each its own name"
        )
    with serving_until_signal() if blocking else nullcontext():
        return [
            run(
                each.target,
                name=each.name,
                route_prefix=each.route_prefix,
                logging_config=each.logging_config,
            )
            for each in targets
        ]


@contextmanager
def serving_until_signal(hang_up: Callable[[], None] | None = None) -> Iterator[None]:
    """Serve what the block starts until Ctrl-C, SIGTERM or SIGHUP, then drain and stop everything.

    The signals are handled from before the block begins, so that no signal can end the process
    while it answers requests. A signal before an application runs aborts the start: Ctrl-C with
    `KeyboardInterrupt`, the others with `SystemExit`. A second signal ends the process at once.
    Outside of the main thread, which alone gets signals, serves for ever. SIGHUP calls `hang_up`
    instead, if that is given.
    """
    with StopSignals(hang_up) as signals:
        try:
            yield
            signals.end_start()
            with WATCHDOG.reporting_on_signal(), current_engine().writing_on_signal():
                signals.wait()
        except KeyboardInterrupt:
            if signals.first is None:
                raise  # by user code
            if not _is_serving():
                shutdown()
                if signals.first == signal.SIGINT:
                    # Python then exits as for Ctrl-C.
                    raise without_traceback(KeyboardInterrupt()) from None
                raise SystemExit(128 + signals.first) from None
        logger.info("stopping: waiting for running requests; a second signal stops at once")
        # Requests that are on their way are still served.
        time.sleep(max(LAME_DUCK_S, current_engine().leave()))
        shutdown()


def delete(name: str) -> None:
    """Drain and stop an application, or abort its start. No effect if there is none."""
    if not isinstance(name, str):
        raise TypeError(f"serve.delete() takes the name of one application, got {name!r}")
    current_engine().delete(name)


def shutdown() -> None:
    """Drain and stop all applications of this process, and its HTTP server."""
    current_engine().shutdown()


async def shutdown_async() -> None:
    """Call `shutdown` in a thread, so that the running event loop stays free."""
    await asyncio.to_thread(shutdown)


def status() -> ServeStatus:
    """Return the status of everything that runs, in Ray Serve's shape; empty if nothing runs."""
    return current_engine().status()


def stalls() -> list[Stall]:
    """Return the recent stalls of event loops, the latest last, including ongoing ones."""
    return WATCHDOG.stalls()


def get_app_handle(name: str) -> DeploymentHandle:
    """Return a handle to an application. Raises `RayServeException` if there is none."""
    return current_engine().app_handle(name)


def get_deployment_handle(deployment_name: str, app_name: str | None = None) -> DeploymentHandle:
    """Return a handle to a deployment, by default one of the caller's own application.

    Raises `RayServeException` outside of a deployment if `app_name` is left out, `KeyError` if
    there is no such deployment.
    """
    if app_name is None:
        try:
            app_name = get_replica_context().app_name
        except RayServeException:
            raise RayServeException(
                "get_deployment_handle() outside of a deployment needs the application's name: "
                f"get_deployment_handle({deployment_name!r}, app_name='default')."
            ) from None
    return current_engine().deployment_handle(deployment_name, app_name)


def _is_serving() -> bool:
    serving = (ApplicationStatus.RUNNING, ApplicationStatus.UNHEALTHY)
    return any(each.status in serving for each in status().applications.values())


def _options(kind: type[Chosen], given: object, name: str, example: str) -> Chosen | None:
    """Return options that were given as an object or a dict. Raises `TypeError` for others."""
    if isinstance(given, dict):
        return kind(**given)
    if isinstance(given, kind | None):
        return given
    raise TypeError(
        f"{name} must be a serve.{kind.__name__} or a dict of its options, got {given!r}; "
        f"use {example}"
    )


def _check_target(target: object) -> None:
    if isinstance(target, Application):
        return
    expects = "`serve.run` expects an `Application` returned by `Deployment.bind()`."
    if isinstance(target, Deployment):
        raise TypeError(f"{expects} Got the deployment {target.name!r}; use {target.name}.bind().")
    raise TypeError(f"{expects} Got {target!r} of type {type(target).__name__}.")
