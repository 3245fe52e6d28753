"""A Ray cluster: connecting to it or starting it, with clear errors, and the owners of its parts.

started by this process    a cluster    ends with `close`, after the applications of others
started by any of ingress  Serve        ends with the last application, when its process leaves
started by another tool    both         stay

An application's version holds the id of the Ray job of the process that deployed it, so that the
record is Ray's own: it changes when another tool deploys the application again, and goes with the
application.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import logging
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import grpc
import ray
from ray import serve as ray_serve
from ray._private import state as ray_state
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.exceptions import RayActorError
from ray.experimental import internal_kv
from ray.serve._private.long_poll import LongPollClient
from ray.serve.context import _get_global_client, _set_global_client
from ray.serve.generated.serve_pb2 import DeploymentRoute

from ingress.core.base.signals import IN_USE
from ingress.core.base.types import new_request_id
from ingress.engines.ray import SUPPORTED
from ingress.engines.ray.messages import NOT_ON_THE_WORKERS
from ingress.serving.http.server import check_address
from ingress.telemetry.logs import logger

REACH_S = 5.0  # timeout for a cluster to answer at its address
OTHERS_S = 0.5  # between two looks at the other users of a cluster that is to end
END_OF_SERVE_S = 30.0  # as in Ray
END_OF_POLLS_S = 2.0
COMMAND_SHOWN = 120  # characters
_PREFIX = "ingress"
_NAMESPACE = b"ingress"
_STARTED = b"started-serve"
_CONTROLLER = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}


@dataclass(slots=True)
class Cluster:
    """The cluster this process is connected to. `address` is `None` if this process started it."""

    address: str | None
    is_ours: bool
    was_connected: bool = False

    @classmethod
    def connect(
        cls, address: str | None, working_dir: str | None, *, quietly: bool = False
    ) -> Cluster:
        """Connect to the cluster at `address`, else to a new one on this machine.

        Workers get `working_dir`, a folder or the address of one. An existing connection of this
        process is used as it is. Raises `RuntimeError` if there is no such cluster.
        """
        if ray.is_initialized():
            return cls(ray.get_runtime_context().gcs_address, is_ours=False, was_connected=True)
        runtime_env = None if working_dir is None else {"working_dir": working_dir}
        options: dict[str, Any] = {"include_dashboard": False}
        is_ours = address in (None, "local")
        if address is None or is_ours:
            address = "local"
        else:
            _check_reachable(address)
            level = logging.WARNING if quietly else logging.INFO
            options = {"log_to_driver": not quietly, "logging_level": level}
        try:
            ray.init(address=address, runtime_env=runtime_env, **options)
        except Exception as error:
            _disconnect()
            if is_ours:
                raise RuntimeError(f"cannot start a Ray cluster: {_first_line(error)}") from error
            if "InvalidAuthToken" in "".join(traceback.format_exception(error)):
                raise RuntimeError(
                    f"the Ray cluster at {address} requires a token: on its own machine use "
                    "--address auto, elsewhere set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
                ) from None
            raise _unreachable(address, _first_line(error)) from error
        if IN_USE and threading.current_thread() is threading.main_thread():
            IN_USE[-1].register()  # Ray has replaced them: SIGTERM would abort the process
        shorten_tracebacks()
        return cls(None if is_ours else address, is_ours)

    @staticmethod
    def would_be_ours(address: str | None) -> bool:
        """Return whether `connect` would start a cluster."""
        return address in (None, "local") and not ray.is_initialized()

    def start_serve(
        self,
        options: dict[str, Any],
        given: Set[str] = frozenset(),
        *,
        grpc: dict[str, Any] | None = None,
    ) -> None:
        """Start Ray Serve with these HTTP options, unless it runs.

        If it runs, the `given` options without effect are logged. Raises `RuntimeError` if the
        address cannot be bound.
        """
        if _CONTROLLER in ray.util.list_named_actors(all_namespaces=True):
            self._compare({name: options[name] for name in options.keys() & given})
            return
        host, port = options.get("host"), options["port"]
        if host is not None and self._is_here():
            options = {**options, "port": check_address(host, port)}
        elif port == 0:
            raise RuntimeError(
                f"port 0 has no meaning on the cluster at {self.address}; name a port"
            )
        try:
            ray_serve.start(http_options=options, grpc_options=grpc)
        except Exception as error:
            try:
                ray_serve.shutdown()
            except Exception:
                logger.debug("what did start could not be shut down", exc_info=True)
            raise RuntimeError(
                f"Ray Serve did not start on {host}:{port}: {_first_line(error)}"
            ) from error
        note_serve_started()

    def _compare(self, wanted: dict[str, object]) -> None:
        """Log the options that differ from those of the running Serve, which cannot change."""
        running = _get_global_client().http_config
        ignored = [
            f"{name}={value!r}"
            for name, value in wanted.items()
            if name in ("host", "port", "request_timeout_s") and getattr(running, name) != value
        ]
        if ignored:
            logger.warning(
                "%s has no effect: Ray Serve runs on this cluster already, at %s",
                ", ".join(ignored),
                self.url(),
            )

    def url(self) -> str | None:
        """Return the URL of Serve's proxies, as seen from their nodes."""
        options = _get_global_client().http_config
        if options.host is None:
            return None
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"{scheme}://{host}:{options.port}"

    def _is_here(self) -> bool:
        """Return whether the node with the first proxy is this machine."""
        if self.is_ours or self.address is None:
            return True
        host = self.address.rpartition(":")[0].strip("[]")
        try:
            return host == ray.util.get_node_ip_address() or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def close(self) -> None:
        """End what ingress started and has no other user. Never raises: no caller could handle it.

        Race with an application that another process deploys just now: it is listed from then on,
        and the end of Serve takes some milliseconds more.
        """
        try:
            if self.is_ours:
                _wait_for_others()
            if is_serve_started_by_ingress() and not ray_serve.status().applications:
                _end_serve()
        except Exception:
            logger.exception("Ray Serve could not be shut down")
        if self.is_ours:
            _disconnect()


def _wait_for_others() -> None:
    """Wait until no other process uses the cluster: it ends with this process."""
    told: list[str] = []
    while there := _others():
        if there != told:
            logger.warning(
                "this process started the cluster, which ends with it, and waits for its other "
                "users: %s; a second signal ends the cluster at once",
                "; ".join(there),
            )
            told = there
        time.sleep(OTHERS_S)


def _others() -> list[str]:
    applications = [f"application {name!r}" for name in ray_serve.status().applications]
    return [*applications, *other_drivers()]


def _end_serve() -> None:
    """End Serve as `ray.serve.shutdown` does.

    That leaves tasks of the controller unfinished, which Ray then reports as tasks that it will
    retry: the one that ends it, and those that wait for news.
    """
    client = _get_global_client()
    client.shutdown_cached_handles()
    theirs = logging.getLogger("ray.serve")
    theirs.addFilter(_is_no_cancelled_poll)
    try:
        _cancel_polls()
        ended = client._controller.graceful_shutdown.options(max_task_retries=0).remote()
        with contextlib.suppress(RayActorError):
            ray.get(ended, timeout=END_OF_SERVE_S)
    finally:
        theirs.removeFilter(_is_no_cancelled_poll)
    client._shutdown = True
    _set_global_client(None)


def _cancel_polls() -> None:
    """End the tasks in which the routers of this process wait for news of the controller.

    No name leads to them: Ray caches some by their event loops. Source: Ray 2.60.0, long_poll.py.
    """
    clients = [each for each in gc.get_objects() if type(each) is LongPollClient]
    waiting = []
    for each in clients:
        each.stop()
        if (task := getattr(each, "_current_ref", None)) is not None:
            waiting.append(task)
            ray.cancel(task)
    if waiting:
        ray.wait(waiting, num_returns=len(waiting), timeout=END_OF_POLLS_S)


def _is_no_cancelled_poll(record: logging.LogRecord) -> bool:
    return not (isinstance(record.msg, str) and record.msg.startswith("LongPollHost errored"))


def environment_of_connection() -> dict[str, str]:
    """Return the variables that `ray.init(runtime_env=...)` of this process gives its workers.

    Serve gives them only to deployments without a `runtime_env`; deployments of ingress have one.
    """
    if not ray.is_initialized():
        return {}
    return dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})


def _disconnect() -> None:
    try:
        ray.shutdown()
    except Exception:
        logger.debug("could not disconnect from Ray", exc_info=True)


def _check_reachable(address: str) -> None:
    """Raise `RuntimeError` if no cluster answers. Ray itself would try for over a minute."""
    if address.startswith("ray://"):
        raise RuntimeError(
            f"address {address!r} is for Ray Client, which cannot stream; run on a node of the "
            "cluster with its host:port, or deploy with ingress build and serve deploy"
        )
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RuntimeError(
            f"address {address!r} is not host:port of a Ray cluster; `ray start --head` prints it"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from None
    channel = init_grpc_channel(address)
    try:
        grpc.channel_ready_future(channel).result(REACH_S)
    except grpc.FutureTimeoutError:
        raise _unreachable(address, "the server there is not a Ray cluster") from None
    finally:
        channel.close()


def _unreachable(address: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"cannot connect to a Ray cluster at {address}: {reason}; is Ray {SUPPORTED} running there "
        "(`ray start --head`)?"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


_PRINTER = "ray_print_logs"
_RECORD = re.compile(r"[A-Z]+ \d{4}-\d\d-\d\d ")


class LogBatch(TypedDict):
    """Lines of a worker, as Ray's dispatcher hands them on; it has other keys too."""

    lines: list[str]


def shorten_tracebacks() -> None:
    """Print no traceback for a module that the workers lack: the start's error has it all."""
    if (printer := dict(global_worker_stdstream_dispatcher.handlers).get(_PRINTER)) is None:
        return
    global_worker_stdstream_dispatcher.remove_handler(_PRINTER)
    global_worker_stdstream_dispatcher.add_handler(_PRINTER, _shortened(printer))


def _shortened(printer: Callable[[LogBatch], None]) -> Callable[[LogBatch], None]:
    def print_short(data: LogBatch) -> None:
        if any(NOT_ON_THE_WORKERS in line for line in data["lines"]):
            data = {**data, "lines": [each for each in data["lines"] if _RECORD.match(each)]}
        printer(data)

    return print_short


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
