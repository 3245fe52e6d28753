"""The engine of `ingress.api` that runs applications on a Ray cluster."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ray import serve as ray_serve
from ray.serve.exceptions import RayServeException as TheirException

from ingress.app.declaration.build import BuiltApplication, BuiltDeployment, build
from ingress.app.declaration.declaration import Application
from ingress.config import HTTPOptions, LoggingConfig
from ingress.core.base.settings import Settings
from ingress.core.base.types import DeploymentID
from ingress.engines.ray.application import Lowering, application_for_ray, methods_of
from ingress.engines.ray.calls import RayDirectory, RayHandle, directory_here, use_here
from ingress.engines.ray.cluster import Cluster, environment_of_connection, owner_of, sign
from ingress.engines.ray.lowering import (
    environment_for_workers,
    http_options_for_ray,
    import_folders,
    request_timeout_s,
)
from ingress.engines.ray.waits import check_fits, telling_waits, waits_of
from ingress.exceptions import (
    DeploymentUnavailableError,
    OptionNotActedOnWarning,
    RayServeException,
)
from ingress.handle import DeploymentHandle
from ingress.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ServeStatus,
)
from ingress.serving.http.admin_address import AdminOptions
from ingress.serving.http.server import check_address
from ingress.serving.http.server_options import ServerOptions
from ingress.telemetry.logs import logger

_FAILED = ApplicationStatus.DEPLOY_FAILED.value
_START_FAILED = re.compile(r"deployment '[^\n]*' failed to start: .*")


@dataclass(eq=False, slots=True)
class RayEngine:
    """The Ray engine. One per process. Thread-safe.

    It is connected from the first use to `shutdown`, which stops the applications that this process
    deployed, and Serve and the cluster as `cluster` says. Applications of other processes stay.
    """

    # Connecting, starting and `shutdown` take turns.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    # One deployment at a time, under a lock of its own, because deploying is slow. Race of two
    # threads that declare Ray's options at once, in `DeploymentConfig` (Ray 2.60.0, config.py,
    # request_router_class).
    _deploying: threading.Lock = field(default_factory=threading.Lock)
    _cluster: Cluster | None = None
    _directory: RayDirectory | None = None
    _http_options: HTTPOptions = field(default_factory=HTTPOptions)
    _logging_config: LoggingConfig | None = None
    _grpc_options: dict[str, Any] | None = None
    _is_started: bool = False
    _applications: dict[str, BuiltApplication] = field(default_factory=dict)
    _address: str | None = None
    _working_dir: str | None = None
    _command_line: ServerOptions | None = None

    @property
    def is_running(self) -> bool:
        return self._cluster is not None

    @property
    def directory(self) -> RayDirectory:
        """The directory of deployments for handles. In a replica's process it is the replica's."""
        if directory_here() is None:
            self.connect()
        directory = directory_here()
        assert directory is not None
        return directory

    def use(self, address: str | None, working_dir: str | None, server: ServerOptions) -> None:
        """Set the options of a command line, which serves one application.

        They are the cluster's address, the folder that workers get a copy of, and the HTTP options.
        The default is the cluster at `RAY_ADDRESS`, or a new one on this machine. Call this before
        the first use.
        """
        self._address, self._working_dir, self._command_line = address, working_dir, server
        self._http_options = server.over(HTTPOptions())

    def connect(self, *, quietly: bool = False) -> Cluster:
        """Connect to a cluster, or start one. Raises `RuntimeError` if none is at the address.

        `quietly` is without the log of the cluster's processes.
        """
        with self._lock:
            if self._cluster is None:
                address = self._address or Settings.from_environment().ray_address
                self._cluster = Cluster.connect(address, self._working_dir, quietly=quietly)
                if self._cluster.was_connected and (self._address or self._working_dir):
                    logger.warning(
                        "this process is connected to Ray already: --address and --working-dir "
                        "have no effect"
                    )
                if directory_here() is None:
                    self._directory = RayDirectory(_find_handle, self._find_methods, self._is_known)
                    use_here(self._directory)
            return self._cluster

    def _would_be_ours(self) -> bool:
        return Cluster.would_be_ours(self._address or Settings.from_environment().ray_address)

    def use_grpc(self, options: dict[str, Any]) -> bool:
        self._grpc_options = options
        return True

    def start(
        self,
        http_options: HTTPOptions | None,
        admin: AdminOptions | None = None,
        logging_config: LoggingConfig | None = None,
    ) -> None:
        """Start Serve. In a module that a command serves, only record the options for its `run`.

        `logging_config` is for applications without one. No effect in a replica, which imports the
        module again. Ray has its own metrics: `admin` has no effect but a warning.
        """
        if admin is not None and not admin.is_off:
            warnings.warn(
                f"serve.start(admin={admin.address!r}) has no effect on Ray, whose nodes export "
                "the metrics; leave it out",
                OptionNotActedOnWarning,
                stacklevel=3,  # this, serve.start, the user's line
            )
        self._logging_config = logging_config or self._logging_config
        if self._command_line is not None:
            self._http_options = self._command_line.over(http_options or HTTPOptions())
            return
        if self._directory is None and directory_here() is not None:
            return
        with self._lock, self._nothing_left_if_it_fails():
            previous, self._http_options = self._http_options, http_options or self._http_options
            try:
                self._start(is_asked=http_options is not None)
            except BaseException:
                self._http_options = previous
                raise

    @contextmanager
    def _nothing_left_if_it_fails(self) -> Iterator[None]:
        """Shut down after a failure, if the engine did not run before and has no application."""
        was_running = self.is_running
        try:
            yield
        except BaseException:
            if not was_running and not self._applications:
                self.shutdown()
            raise

    def _start(
        self, needs: Sequence[tuple[str, int, dict[str, float]]] = (), *, is_asked: bool = False
    ) -> None:
        """Connect, and start Serve. Raises `RuntimeError` if a new cluster lacks the `needs`."""
        options = http_options_for_ray(self._http_options, Settings.from_environment())
        # Both checks come before the slow starts.
        if self._cluster is None and self._would_be_ours() and options["host"] is not None:
            check_address(options["host"], options["port"])
        cluster = self.connect()
        if cluster.is_ours:
            check_fits(needs)
        if is_asked or not self._is_started:  # a running one logs ignored options
            cluster.start_serve(
                options, self._http_options.model_fields_set, grpc=self._grpc_options
            )
            self._is_started = True

    def run(
        self,
        application: Application,
        name: str,
        route_prefix: str | None,
        logging_config: LoggingConfig | None = None,
    ) -> DeploymentHandle:
        built = build(application, name, acts_on_all=True)
        logging_config = logging_config or self._logging_config
        logging = logging_config and logging_config.model_dump(exclude_unset=True)
        with self._deploying, self._nothing_left_if_it_fails():
            # First, because errors in the application can be found without a cluster.
            lowered = application_for_ray(built, self._lowering())
            with self._lock:
                self._start(_needs_of(built))
            is_new = self._check_owner(name)
            sign(lowered)
            try:
                with telling_waits(name):
                    ray_serve.run(
                        lowered, name=name, route_prefix=route_prefix, logging_config=logging
                    )
            except BaseException as error:
                told = _failed_to_deploy(name, error) if isinstance(error, Exception) else error
                if is_new and self._is_listed_as_failed(name):
                    self._applications[name] = built  # `shutdown` deletes it
                elif is_new:
                    self.delete(name)
                if told is error:
                    raise
                raise told from error
            self._applications[name] = built
            self.directory.forget(name)
            return self.directory.handle(DeploymentID(built.ingress.name, name))

    def _is_listed_as_failed(self, name: str) -> bool:
        """Return whether Ray lists an application of this process whose start failed."""
        found = ray_serve.status().applications.get(name)
        return found is not None and found.status.value == _FAILED and self._owns(name)

    def _check_owner(self, name: str) -> bool:
        """Return whether there is no such application yet.

        Raises `RuntimeError` if it belongs to another process that is alive. Race of two processes
        that deploy the same new name in the same moment: the later one replaces the application,
        and the earlier one then leaves it alone.
        """
        if (owner := owner_of(name)) is None or owner.is_this_process:
            return owner is None
        if owner.is_alive:
            raise RuntimeError(
                f"application {name!r} is on this cluster already, deployed {owner.text}; choose "
                f"another name (--name, serve.run(name=...)), or end it first: ingress delete "
                f"{name} --address ..."
            )
        logger.info(
            "application %r is replaced: it was deployed %s, which has ended", name, owner.text
        )
        return False

    def _lowering(self) -> Lowering:
        settings = Settings.from_environment()
        if settings.trace_file is not None:
            raise ValueError(
                f"INGRESS_TRACE={settings.trace_file!r} records what one process does, and has no "
                "effect on Ray; unset it"
            )
        is_ours = self._would_be_ours() if self._cluster is None else self._cluster.is_ours
        folders = import_folders() if self._working_dir is None else []
        return Lowering(
            {**environment_of_connection(), **environment_for_workers(settings, folders)},
            # A cluster started by this process reserves no CPUs, as one process does not.
            default_cpus=0.0 if is_ours else None,
            request_timeout_s=request_timeout_s(self._http_options, settings),
            # The caller waits, and needs the error at once.
            constructor_tries=1,
        )

    def delete(self, name: str) -> None:
        self._applications.pop(name, None)
        if self._cluster is not None:
            ray_serve.delete(name)
            self.directory.forget(name)

    def leave(self) -> float:
        """Do nothing: Ray's proxies drain by themselves."""
        return 0.0

    def writing_on_signal(self) -> AbstractContextManager[None]:
        """Do nothing: no requests are recorded, see `_lowering`."""
        return nullcontext()

    def shutdown(self) -> None:
        """Delete the applications that this process deployed, and end what it started of Ray."""
        with self._lock:
            if (cluster := self._cluster) is None:
                return
            # First, because the end of Serve would cut the requests in flight in its proxies.
            # Not an application that another process has deployed again since.
            names = [name for name in self._applications if self._owns(name)]
            for name in names:  # side by side
                ray_serve.delete(name, _blocking=False)
            for name in names:
                ray_serve.delete(name)
            self._applications.clear()
            cluster.close()
            if self._directory is not None:  # not earlier: Ray's routers may live on its loop
                use_here(None)
                self._directory.close()
            self._cluster = self._directory = None
            self._is_started = False
            self._http_options = HTTPOptions()
            self._logging_config = None

    def _owns(self, name: str) -> bool:
        owner = owner_of(name)
        return owner is not None and owner.is_this_process

    def status(self) -> ServeStatus:
        if self._cluster is None and directory_here() is None:
            return ServeStatus()
        known = ray_serve.status()
        return ServeStatus(
            {node: str(state.value) for node, state in known.proxies.items()},
            {name: _overview(each) for name, each in known.applications.items()},
            known.target_capacity,
        )

    def deployer(self, name: str) -> str:
        """Return which process or tool deployed an application of the cluster."""
        owner = owner_of(name)
        return "" if owner is None else owner.text

    def waits(self) -> list[str]:
        """Return a line for each deployment of the cluster whose replicas wait for resources."""
        return waits_of()

    def url(self) -> str | None:
        return self._cluster.url() if self._cluster is not None and self._is_started else None

    def app_handle(self, name: str) -> DeploymentHandle:
        directory = self.directory
        try:
            found = ray_serve.get_app_handle(name)
        except Exception as error:
            running = sorted(ray_serve.status().applications)
            raise RayServeException(
                f"Application '{name}' does not exist. Running: {running}."
            ) from error
        return directory.handle(DeploymentID(found.deployment_name, name))

    def deployment_handle(self, deployment_name: str, app_name: str) -> DeploymentHandle:
        directory = self.directory
        deployment_id = DeploymentID(deployment_name, app_name)
        if not directory.is_known(deployment_id) and deployment_id not in (known := _running()):
            raise KeyError(f"{deployment_id} does not exist. Running: {sorted(map(str, known))}.")
        return directory.handle(deployment_id)

    def _is_known(self, deployment_id: DeploymentID) -> bool:
        built = self._applications.get(deployment_id.app_name)
        return built is not None and deployment_id.name in [each.name for each in built.deployments]

    def _find_methods(self, deployment_id: DeploymentID) -> list[str] | None:
        built = self._applications.get(deployment_id.app_name)
        return None if built is None else methods_of(built).get(deployment_id.name)


def _find_handle(deployment_id: DeploymentID) -> RayHandle:
    # Checked here, because Ray keeps handles, and a call to a deployment that is deleted, or whose
    # start failed, waits forever.
    application = ray_serve.status().applications.get(deployment_id.app_name)
    found = None if application is None else application.deployments.get(deployment_id.name)
    if application is None or found is None:
        raise DeploymentUnavailableError(
            f"{deployment_id} is unavailable because it is not deployed."
        )
    serves = any(str(getattr(state, "value", state)) == "RUNNING" and count
                 for state, count in found.replica_states.items())  # fmt: skip
    if application.status.value == _FAILED and not serves:
        raise DeploymentUnavailableError(
            f"{deployment_id} is unavailable because it failed to deploy."
        )
    handle: RayHandle = ray_serve.get_deployment_handle(deployment_id.name, deployment_id.app_name)
    return handle


def _running() -> set[DeploymentID]:
    return {
        DeploymentID(each, app)
        for app, overview in ray_serve.status().applications.items()
        for each in overview.deployments
    }


def _needs_of(built: BuiltApplication) -> list[tuple[str, int, dict[str, float]]]:
    """Return name, number of replicas, and resources of each, on a cluster of this process."""
    return [
        (each.name, each.deployment.config.replica_count, _reserved(each))
        for each in built.deployments
    ]


def _reserved(built: BuiltDeployment) -> dict[str, float]:
    options = built.deployment.config.ray_actor_options
    reserved = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus")}
    more = {**reserved, "memory": options.get("memory"), **(options.get("resources") or {})}
    return {kind: float(amount) for kind, amount in more.items() if amount}


def _failed_to_deploy(name: str, error: Exception) -> Exception:
    """Return the error of a failed deployment, with the same message as the local engine."""
    cause = getattr(error, "cause", error)  # the cause of the controller's error
    if isinstance(cause, TheirException):  # for example, a prefix is taken
        return RayServeException(str(cause))
    overview = ray_serve.status().applications.get(name)
    deployments = [] if overview is None else overview.deployments.values()
    texts = [*(each.message for each in deployments), str(error)]
    for text in texts:
        if found := _START_FAILED.search(text):
            return RuntimeError(f"Deploying application '{name}' failed: {found[0]}")
    return RuntimeError("\n".join([f"Deploying application '{name}' failed: {error}", *texts[:-1]]))


def _overview(theirs: Any) -> ApplicationStatusOverview:
    return ApplicationStatusOverview(
        ApplicationStatus(theirs.status.value),
        theirs.message,
        theirs.last_deployed_time_s,
        {
            name: DeploymentStatusOverview(
                status=DeploymentStatus(each.status.value),
                status_trigger=str(getattr(each.status_trigger, "value", each.status_trigger)),
                replica_states={
                    str(getattr(state, "value", state)): count
                    for state, count in each.replica_states.items()
                },
                message=each.message,
            )
            for name, each in theirs.deployments.items()
        },
    )
