"""`serve.run` and friends: one line each, to the current engine."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Never

from ingress.base.signals import Stopped, StopSignals
from ingress.base.unsupported import refuse
from ingress.config import HTTPOptions
from ingress.context import get_replica_context
from ingress.declaration.declaration import Application, Deployment
from ingress.engines import current_engine
from ingress.exceptions import RayServeException
from ingress.handle import DeploymentHandle
from ingress.schema import ApplicationStatus, ServeStatus
from ingress.watchdog import WATCHDOG, Stall

logger = logging.getLogger("ingress")

LAME_DUCK_S = 0.2  # between the signal and the refusal of new requests


def start(
    http_options: HTTPOptions | dict[str, Any] | None = None,
    *,
    engine: str | None = None,
    **unsupported: Never,
) -> None:
    """Start the HTTP server before any application. It then stays until `shutdown`.

    `http_options` say where `run` listens; `host=None` means no HTTP. `engine` is "local" for this
    process, or "ray"; by default what `INGRESS_ENGINE` says. Raises `RuntimeError` if the address
    cannot be bound, or the engine cannot be used.
    """
    refuse("serve.start", unsupported)
    if isinstance(http_options, dict):
        http_options = HTTPOptions(**http_options)
    elif not isinstance(http_options, HTTPOptions | None):
        raise TypeError(
            f"http_options must be an HTTPOptions or a dict of its options, got {http_options!r}; "
            "use serve.start(serve.HTTPOptions(port=8000))"
        )
    current_engine(engine).start(http_options)


def run(
    target: Application,
    blocking: bool = False,
    name: str = "default",
    route_prefix: str | None = "/",
    *,
    engine: str | None = None,
    **unsupported: Never,
) -> DeploymentHandle:
    """Start an application and return a handle to it once all its replicas are ready.

    It is served over HTTP under `route_prefix`, `None` for not at all. An application of the same
    name is replaced: it stops when the new one is ready, and is ended at once if it still starts.
    `blocking` returns on Ctrl-C or SIGTERM, after shutting everything down. `engine` is "local" for
    this process, or "ray"; by default that which runs applications already, else what
    `INGRESS_ENGINE` says. Raises `RuntimeError`, from what user code raised, if a replica does not
    start; also if the application is deleted, replaced or shut down while it starts.
    """
    refuse("serve.run", unsupported)
    _check_target(target)
    _check_name(name)
    _check_route_prefix(route_prefix)
    with serving_until_signal() if blocking else nullcontext():
        return current_engine(engine).run(target, name, route_prefix)


@dataclass(init=False, slots=True)
class RunTarget:
    """One application for `run_many`; what its fields mean says `run`."""

    target: Application
    name: str
    route_prefix: str | None

    def __init__(
        self,
        target: Application,
        name: str = "default",
        route_prefix: str | None = "/",
        **unsupported: Never,
    ) -> None:
        refuse("serve.RunTarget", unsupported)
        self.target, self.name, self.route_prefix = target, name, route_prefix


def run_many(
    targets: Sequence[RunTarget], blocking: bool = False, **unsupported: Never
) -> list[DeploymentHandle]:
    """Start several applications, one after another, and return their handles.

    Those that run already stay if one of them does not start. Raises as `run`, and `ValueError`
    before anything starts if two have one name.
    """
    refuse("serve.run_many", unsupported)
    names = [each.name for each in targets]
    if len({*names}) < len(names):
        raise ValueError(f"applications must have different names, got {names}; name each")
    with serving_until_signal() if blocking else nullcontext():
        return [
            run(each.target, name=each.name, route_prefix=each.route_prefix) for each in targets
        ]


@contextmanager
def serving_until_signal() -> Iterator[None]:
    """Serve what the block starts until Ctrl-C, SIGTERM or SIGHUP, then drain and stop everything.

    The signals are heard from before the block begins, so that none can end the process while it
    answers requests. One that comes before anything runs ends the start: with `KeyboardInterrupt`
    if it is Ctrl-C, else with `SystemExit`. The second signal ends the process at once. In a thread
    other than the main one, which gets no signals, serves for ever.
    """
    with StopSignals() as signals:
        try:
            yield
            signals.end_start()
            with WATCHDOG.reporting_on_signal(), current_engine().writing_on_signal():
                signals.wait()
        except Stopped as stopped:
            if not _is_serving():
                shutdown()
                if stopped.number == signal.SIGINT:
                    raise KeyboardInterrupt from None  # by which Python knows how to end
                raise SystemExit(128 + stopped.number) from None
        logger.info("stopping: waiting for what runs; a second signal stops at once")
        current_engine().leave()
        time.sleep(LAME_DUCK_S)  # who is on the way here is served
        shutdown()


def delete(name: str) -> None:
    """Drain and stop an application, or end its start. Without effect if there is none."""
    current_engine().delete(name)


def shutdown() -> None:
    """Drain and stop everything that this process runs."""
    current_engine().shutdown()


async def shutdown_async() -> None:
    """Do what `shutdown` does, in a thread: the running event loop stays free."""
    await asyncio.to_thread(shutdown)


def status() -> ServeStatus:
    """Return what runs, in the shape of Ray Serve; empty when nothing does."""
    return current_engine().status()


def stalls() -> list[Stall]:
    """Return the event loops that stood still lately, the latest last, those that do so now too."""
    return WATCHDOG.stalls()


def get_app_handle(name: str) -> DeploymentHandle:
    """Return a handle to an application. Raises `RayServeException` if there is none."""
    return current_engine().app_handle(name)


def get_deployment_handle(deployment_name: str, app_name: str | None = None) -> DeploymentHandle:
    """Return a handle to one deployment, by default of the caller's own application.

    Raises `RayServeException` outside of a deployment without `app_name`, `KeyError` if there is
    no such deployment.
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
    applications = status().applications.values()
    return any(each.status is ApplicationStatus.RUNNING for each in applications)


def _check_target(target: Any) -> None:
    if isinstance(target, Application):
        return
    expects = "`serve.run` expects an `Application` returned by `Deployment.bind()`."
    if isinstance(target, Deployment):
        raise TypeError(f"{expects} Got the deployment {target.name!r}; use {target.name}.bind().")
    raise TypeError(f"{expects} Got {target!r} of type {type(target).__name__}.")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise RayServeException(f"Application name must a non-empty string, got {name!r}.")


def _check_route_prefix(prefix: Any) -> None:
    """Raise `ValueError`, in Ray's words, for a prefix that is none."""
    if prefix is None:
        return
    if not isinstance(prefix, str) or not prefix.startswith("/"):
        raise ValueError(f"Invalid route_prefix {prefix!r}, must start with a forward slash ('/').")
    if prefix != "/" and prefix.endswith("/"):
        raise ValueError(f"Invalid route_prefix {prefix!r}, may not end with a trailing '/'.")
    if "{" in prefix or "}" in prefix:
        raise ValueError(f"Invalid route_prefix {prefix!r}, may not contain wildcards.")
