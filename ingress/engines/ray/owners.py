"""The process that deployed each application of a cluster, and the one that started its Serve.

An application's version holds the id of the Ray job of its process, so that the record is Ray's
own: it changes when another tool deploys the application again, and goes with the application.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve as ray_serve
from ray._private import state as ray_state
from ray.experimental import internal_kv
from ray.serve.context import _get_global_client
from ray.serve.generated.serve_pb2 import DeploymentRoute

from ingress.core.base.types import new_request_id

logger = logging.getLogger("ingress")

COMMAND_SHOWN = 120  # characters
_PREFIX = "ingress"
_NAMESPACE = b"ingress"
_STARTED = b"started-serve"


@dataclass(frozen=True, slots=True)
class Owner:
    """The deployer of an application. `job` is empty if that was one of Ray's own tools."""

    job: str
    is_alive: bool
    text: str

    @property
    def is_this_process(self) -> bool:
        return self.job == _this_job()


def sign(application: ray_serve.Application) -> None:
    """Record this process as the owner of an application for Ray's `serve.run`.

    Each version is new, because Ray replaces no replica of a known version.
    """
    application._bound_deployment._version = f"{_PREFIX}-{_this_job()}-{new_request_id()}"


def owner_of(name: str) -> Owner | None:
    """Return the owner of an application, `None` if no application has this name."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    controller = client._controller
    ingress = ray.get(controller.get_ingress_deployment_name.remote(name))
    if ingress is None:
        return None
    try:
        found = ray.get(controller.get_deployment_info.remote(ingress, name))
    except Exception:  # a race with the end of the application
        logger.debug("application %r has no owner that is known", name, exc_info=True)
        return None
    prefix, _, rest = DeploymentRoute.FromString(found).deployment_info.version.partition("-")
    if prefix != _PREFIX:
        return Owner("", True, "with Ray's own `serve deploy` or `serve run`")
    job = rest.partition("-")[0]
    return Owner(job, _is_alive(job), f"by {_described(job)}")


def other_drivers() -> list[str]:
    """Return descriptions of the other processes that are connected to the cluster."""
    return [
        _described(each["JobID"])
        for each in ray_state.jobs()
        if not each["IsDead"] and each["JobID"] != _this_job()
    ]


def note_serve_started() -> None:
    """Record that ingress started the cluster's Serve: the last process to leave ends it."""
    internal_kv._internal_kv_put(_STARTED, _controller_id(), namespace=_NAMESPACE)


def is_serve_started_by_ingress() -> bool:
    """Return whether a process of ingress, this or another, started the Serve that runs now."""
    return bool(internal_kv._internal_kv_get(_STARTED, namespace=_NAMESPACE) == _controller_id())


def _controller_id() -> bytes:
    client = _get_global_client(raise_if_no_controller_running=False)
    return b"" if client is None else client._controller._actor_id.hex().encode()


def _this_job() -> str:
    return str(ray.get_runtime_context().get_job_id())


def _is_alive(job: str) -> bool:
    return any(each["JobID"] == job and not each["IsDead"] for each in ray_state.jobs())


def _described(job: str) -> str:
    for each in ray_state.jobs():
        if each["JobID"] == job:
            program, space, rest = each["Entrypoint"].partition(" ")
            command = f"{Path(program).name}{space}{rest}"[:COMMAND_SHOWN]
            where = f"process {each['DriverPid']} on {each['DriverIPAddress']}"
            return f"{where} ({command})" if command else where
    return f"a process whose Ray job was {job}"
