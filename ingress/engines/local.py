"""Applications in this process: started, found, replaced and stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from time import monotonic
from types import FunctionType

from ingress.app.asgi.spec import users_app_of
from ingress.app.declaration.build import BuiltApplication, with_logging
from ingress.app.declaration.cluster_options import build_here
from ingress.app.declaration.declaration import Application
from ingress.app.declaration.names import PublicMethods
from ingress.config import DeploymentConfig, HTTPOptions, LoggingConfig
from ingress.core.base.settings import Settings, warn_of_unused
from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import Call, when_all_settled
from ingress.core.calls.loops import Wakeup, run_blocking, running_loop
from ingress.core.execution.threads import lend_executor
from ingress.engines.applications import INTERRUPTED, Applications, Start
from ingress.engines.engine_http import EngineHTTP
from ingress.engines.engine_threads import EngineThreads
from ingress.engines.views import EngineAdmin
from ingress.exceptions import (
    DeploymentUnavailableError,
    RayServeException,
)
from ingress.handle import DeploymentHandle, DeploymentResponse, directory_here, use_here
from ingress.schema import ServeStatus
from ingress.serving.control.changes import Change
from ingress.serving.control.controller import Controller
from ingress.serving.control.factories import Factories, Instrument
from ingress.serving.control.running import RunningApplication
from ingress.serving.http.admin_address import AdminOptions
from ingress.serving.http.proxy import HTTPProxy
from ingress.serving.http.retrying import RequestLimits
from ingress.serving.http.server_options import ServerOptions
from ingress.serving.replicas.router import Router
from ingress.state.applications import ApplicationSnapshot, status_of
from ingress.state.server import Snapshot, snapshot_of
from ingress.telemetry.logs.identity import leave_records
from ingress.telemetry.logs.options import LOGS, act_on_options, stop_using, use
from ingress.telemetry.notable import NOTABLE


class LocalEngine:
    """The engine of this process, a `handle.Directory`. One per process. Thread-safe.

    The tables of routers and applications are changed on the control loop; any thread reads them.
    `_lock` guards the threads, the count of their users, and the instruments. `_operations` guards
    the HTTP server: `shutdown` holds it throughout, other operations while a server starts or
    stops. No thread that holds it waits for a constructor.
    """

    __slots__ = (
        "_instruments", "_lock", "_operations", "_threads", "_users", "admin", "apps", "factories",
        "http", "lender", "routers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.routers: dict[DeploymentID, Router] = {}
        self.factories = Factories()  # of the applications that start now
        self._instruments: list[Instrument] = []
        self._lock = threading.Lock()
        self._operations = threading.RLock()
        self._users = 0
        self._threads: EngineThreads | None = None
        self.http = EngineHTTP()
        self.admin = EngineAdmin()
        # The loop of a server that is not this engine's, for replicas without loops of their own.
        self.lender: asyncio.AbstractEventLoop | None = None
        self.apps = Applications(self.http, self.routers, self.release)
        use_here(self)

    @property
    def applications(self) -> dict[str, RunningApplication]:
        return self.apps.running

    # The threads, counted.

    @property
    def threads(self) -> EngineThreads:
        assert self._threads is not None, "the caller holds an `acquire`"
        return self._threads

    @property
    def settings(self) -> Settings:
        """The settings of the threads, or of the environment while there are none."""
        threads = self._threads
        return Settings.from_environment() if threads is None else threads.settings

    def acquire(self) -> EngineThreads:
        """Count one more user of the threads; the first one starts them."""
        with self._lock:
            if self._threads is None:
                warn_of_unused()
                act_on_options()
                self._threads = EngineThreads(Settings.from_environment())
                self._apply_instruments()
                self.http.proxy = HTTPProxy()  # the last one has counts of threads that ended
                settings = self._threads.settings
                self.apps.freezes_gc = settings.freeze_gc
                self.apps.not_ready_after_s = settings.not_ready_after_s
                self.apps.controller = Controller(
                    settings,
                    self.routers,
                    self.handle,
                    self._threads.user_loop,
                    lambda: self.factories,
                )
                if self.http.command_line.admin is None and self.admin.options is None:
                    self.admin.start_by_environment(self)
            self._users += 1
            return self._threads

    def release(self) -> None:
        """Count one user less; the last one ends the threads."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            threads, self._threads = self._threads, None
            self._apply_instruments()
        if threads is not None:
            self.admin.stop()
            threads.stop()
            leave_records()
            stop_using()

    @contextmanager
    def instrumented(self, instrument: Instrument) -> Iterator[None]:
        """Make applications that start meanwhile with an instrument's factories."""
        with self._lock:
            self._instruments.append(instrument)
            self._apply_instruments()
        try:
            yield
        finally:
            with self._lock:
                self._instruments.remove(instrument)
                self._apply_instruments()

    def _apply_instruments(self) -> None:
        """Set the factories. The caller holds `_lock`."""
        factories = Factories()
        recording = None if self._threads is None else self._threads.instrument
        for instrument in (*([recording] if recording else []), *self._instruments):
            factories = instrument(factories)
        self.factories = factories

    def request_limits(self) -> RequestLimits:
        """Return the limits of HTTP requests and the retried methods."""
        return self.http.limits(self.threads.settings)

    # Applications that the caller's own ASGI server serves. `hosting` calls this on the control
    # loop, and holds an `acquire` for each application.

    async def start_application(
        self,
        start: Start,
        built: BuiltApplication,
        serving_loop: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        """Reserve the name and start the application. Raises as `Applications.start`."""
        await self.apps.reserve(start)
        await self.apps.start(start, built, partial(self._loop_of_replicas, serving_loop, built))

    def _loop_of_replicas(
        self, serving_loop: Callable[[], asyncio.AbstractEventLoop], built: BuiltApplication
    ) -> asyncio.AbstractEventLoop:
        if self.threads.settings.run_user_code_in_separate_thread:
            if any(each.deployment.config.isolation == "process" for each in built.deployments):
                return serving_loop()  # for the frames of the child processes
            return self.threads.control.loop  # unused: each replica has its own loop
        loop = serving_loop()
        lend_executor(loop)
        return loop

    @property
    def is_running(self) -> bool:
        """True while the engine has an application or serves HTTP."""
        return self._users > 0

    # `serve.run` and friends: from a thread without a running loop.

    def use(self, command_line: ServerOptions) -> None:
        """Set the options of the command line. Call this before the first use."""
        warn_of_unused()
        self.http.command_line = command_line
        self.http.options = command_line.over(HTTPOptions())

    def begin_http(self) -> None:
        """Accept connections, if the server has waited for that: it replaces another one."""
        with self.operating() as threads:
            if threads is not None:
                self.http.begin(threads)

    def retire(self, wait_s: float) -> None:
        """Serve the open connections to their ends, and no others: another server does. Blocks."""
        self.leave()
        with self.operating() as threads:
            if threads is not None and self.http.server is not None:
                run_blocking(threads.control.loop, self.http.server.retire(wait_s))

    def use_grpc(self, options: dict[str, object]) -> bool:
        return False

    def start(
        self,
        http_options: HTTPOptions | None,
        admin: AdminOptions | None = None,
        logging_config: LoggingConfig | None = None,
    ) -> None:
        http = self.http
        with self._operations:
            if logging_config is not None:
                use(logging_config)
                http.proxy.logs_requests = LOGS.is_logged
            if admin is not None:
                self.admin.options = admin
            previous = http.options
            if http_options is not None:
                http_options = http.command_line.over(http_options)
                if http.server is not None:
                    http.update(http_options, self.threads)
                http.options = http_options
            if http.command_line.admin is not None:
                admin = None
            if http.is_kept or not http.command_line.has_own_server:
                self.admin.start(self, admin)
                return
            threads = self.acquire()
            try:
                http.start(threads)
                self.admin.start(self, admin)
            except BaseException:
                http.options = previous
                http.stop_if_unused(threads)
                self.release()
                raise
            http.is_kept = True

    def run(
        self,
        application: Application,
        name: str,
        route_prefix: str | None,
        logging_config: LoggingConfig | None = None,
        *,
        keeps_same: bool = False,
    ) -> DeploymentHandle:
        """Start an application. With `keeps_same`, an update keeps replicas that are the same."""
        if logging_config is not None:
            application = with_logging(application, logging_config)
        built = build_here(application, name)
        with self._operations:
            threads = self.acquire()
            app = users_app_of(built.deployments[-1].deployment.func_or_class)
            starting = RunningApplication(
                name, route_prefix, self.http.proxy, app, keeps_same=keeps_same
            )
            start = Start(starting, lists_failure=True)
            try:
                run_blocking(threads.control.loop, self.apps.reserve(start))
                if route_prefix is not None:
                    self.http.start(threads)
            except BaseException:
                self._give_up(start, threads)
                raise
        # Not under the lock: a constructor may be slow, or hang.
        loop_of_replicas = partial(self._loop_of_replicas, self._serving_loop, built)
        try:
            run_blocking(threads.control.loop, self.apps.start(start, built, loop_of_replicas))
        except BaseException as error:
            self._give_up(start, threads)
            if isinstance(error, CancelledError) and start.reason:
                raise start.ended() from None  # the control loop ended before it could raise this
            raise
        return self.handle(start.application.ingress.router.deployment_id)

    def _give_up(self, start: Start, threads: EngineThreads) -> None:
        """Clean up a start that failed or was interrupted, unless another caller ended it."""
        if self.apps.take(start, INTERRUPTED):
            run_blocking(threads.control.loop, self.apps.end(start))
            with self._operations:
                self.http.stop_if_unused(threads)
            self.release()

    def delete(self, name: str) -> None:
        with self.operating() as threads:
            if threads is None:
                self.apps.failed.pop(name, None)
            else:
                until = monotonic() + self._shutdown_timeout_s()
                run_blocking(threads.control.loop, self.apps.delete(name))
                with self._operations:
                    self.http.stop_if_unused(threads, until)

    def change(
        self,
        app_name: str,
        options: Mapping[str, Mapping[str, object] | DeploymentConfig],
        *,
        origin: str = "",
    ) -> list[Change]:
        """Change options of a running application's deployments in place. Thread-safe.

            engine.change("default", {"Model": {"num_replicas": 4}})      `ingress scale`
            engine.change("default", {"Model": config, "Gate": config})   a file that was read again

        `options` has, by deployment, the options to change, or a whole `DeploymentConfig`; `origin`
        is the command or the file that asks for them, "" for code. All of
        them are checked first: either all apply, or an error is raised and nothing has changed.
        Returns what differed, an empty list if nothing did; replicas then start, drain or are
        reconfigured one after another while requests go on.

        The options that can be changed are those marked `IN_PLACE`. Raises `ValueError` for any
        other option, an unknown application or deployment, or a bad value; `TypeError` for an
        option that does not exist. Not to be called on the control loop.
        """
        with self.operating() as threads:
            running = self.applications.get(app_name)
            if threads is None or running is None or running.stopping is not None:
                known = ", ".join(map(repr, list(self.applications))) or "none"
                raise ValueError(f"application {app_name!r} does not run; running: {known}")

            async def change() -> list[Change]:
                return self.apps.controller.change(running, options, origin)

            return run_blocking(threads.control.loop, change())

    def writing_on_signal(self) -> AbstractContextManager[None]:
        window = self.threads.window
        return nullcontext() if window is None else window.writing_on_signal()

    def leave(self) -> float:
        """Serve on until `shutdown`, as a lame duck: clients are told to connect elsewhere.

        Returns `drain_delay_s`, the time to serve on.
        """
        for proxy in self.proxies():
            proxy.is_leaving = True
        if self.http.server is not None:
            self.http.server.leave()
        return self.http.command_line.drain_delay_s

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop everything. Requests have `timeout_s`, by default their deployments' timeouts."""
        if timeout_s is None:
            timeout_s = self.http.command_line.shutdown_timeout_s
        with self._operations, self.operating() as threads:
            if threads is None:
                self.apps.failed.clear()
                return
            until = monotonic() + (self._shutdown_timeout_s() if timeout_s is None else timeout_s)
            self.leave()
            for proxy in self.proxies():
                proxy.is_draining = True
            run_blocking(threads.control.loop, self.apps.stop_all(timeout_s))
            NOTABLE.clear()
            if self.http.is_kept:
                self.http.is_kept = False
                self.release()
            self.http.stop_if_unused(threads, until)
            self.http.reset()

    def _shutdown_timeout_s(self) -> float:
        """Return the longest timeout of the running applications."""
        running = list(self.applications.values())
        return max((each.graceful_shutdown_timeout_s for each in running), default=0.0)

    def proxies(self) -> list[HTTPProxy]:
        """Return the proxies of the server and of the applications that are served as ASGI apps."""
        return [self.http.proxy, *(each.proxy for each in list(self.applications.values()))]

    @contextmanager
    def operating(self) -> Iterator[EngineThreads | None]:
        """Keep the threads meanwhile, if there are any: another `release` does not end them.

        Raises `RuntimeError` on the loop of a caller that an application runs on: the operation
        blocks that loop.
        """
        if (here := running_loop()) is not None:
            for each in list(self.applications.values()):
                if each.callers_loop is here:
                    raise RuntimeError(
                        f"this call would block the event loop that the application {each.name!r} "
                        "runs on, which is that of its caller; use `await serve.shutdown_async()`, "
                        "`await application.aclose()`, or `await asyncio.to_thread(...)`"
                    )
        threads = self._keep()
        try:
            yield threads
        finally:
            if threads is not None:
                self.release()

    @asynccontextmanager
    async def operating_on_loop(self) -> AsyncIterator[EngineThreads | None]:
        """`operating` on a client's event loop: another thread waits for the end of the threads."""
        threads = self._keep()
        try:
            yield threads
        finally:
            if threads is not None:
                ended = Wakeup(asyncio.get_running_loop())

                def release() -> None:
                    try:
                        self.release()
                    finally:
                        ended.wake()

                releasing = threading.Thread(target=release, name="ingress-release")
                releasing.start()
                await ended.wait()
                while releasing.is_alive():  # noqa: ASYNC110  # its last microseconds
                    await asyncio.sleep(0)

    def _keep(self) -> EngineThreads | None:
        with self._lock:
            threads = self._threads
            self._users += threads is not None
        return threads

    def status(self) -> ServeStatus:
        return status_of(self.apps.snapshots(), self.http.url)

    def application_snapshots(self) -> dict[str, ApplicationSnapshot]:
        """Return the state of each application. Thread-safe."""
        return self.apps.snapshots()

    def snapshot(self, *, of_stopped: bool = False) -> Snapshot:
        """Return the state of this process in numbers. Thread-safe; it blocks for some ms.

        `of_stopped` adds the counters of the applications that have stopped.
        """
        found = snapshot_of(self)
        if of_stopped:
            found.applications = {**self.apps.stopped, **found.applications}
        return found

    def url(self) -> str | None:
        """Return the URL that `serve.run` serves HTTP at, if it does."""
        return self.http.url

    def _serving_loop(self) -> asyncio.AbstractEventLoop:
        assert self._threads is not None
        if self.lender is not None:
            return self.lender
        server = self.http.server
        return self._threads.user_loop() if server is None else server.home.loop

    # Handles.

    def handle(self, deployment_id: DeploymentID) -> DeploymentHandle:
        """Return a handle to a deployment; without its name, to its application."""
        if not deployment_id.name:
            return self.app_handle(deployment_id.app_name)
        return DeploymentHandle(deployment_id, self)

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return directory_here, ()  # of the process in which a handle arrives

    def app_handle(self, name: str) -> DeploymentHandle:
        running, failed = self.applications.get(name), self.apps.failed.get(name)
        if running is not None:
            return self.handle(running.ingress.router.deployment_id)
        if failed is not None:
            return self.handle(failed.ingress)
        raise RayServeException(
            f"Application '{name}' does not exist. Running: {sorted(self.applications)}."
        )

    def deployment_handle(self, deployment_name: str, app_name: str) -> DeploymentHandle:
        deployment_id = DeploymentID(deployment_name, app_name)
        if deployment_id not in self.routers and not self._has_failed(deployment_id):
            known = sorted(map(str, list(self.routers)))
            raise KeyError(f"{deployment_id} does not exist. Running: {known}.")
        return self.handle(deployment_id)

    def router(self, deployment_id: DeploymentID) -> Router:
        try:
            return self.routers[deployment_id]
        except KeyError:
            because = (
                "it failed to deploy" if self._has_failed(deployment_id) else "it is not deployed"
            )
            raise DeploymentUnavailableError(
                f"{deployment_id} is unavailable because {because}."
            ) from None

    def _has_failed(self, deployment_id: DeploymentID) -> bool:
        failed = self.apps.failed.get(deployment_id.app_name)
        return failed is not None and failed.has(deployment_id)

    def methods(self, deployment_id: DeploymentID) -> PublicMethods | None:
        """Return the methods that a handle may call; `None` for a function: any name calls it."""
        router = self.router(deployment_id)
        for replica in list(router.replicas):
            instance = replica.context.servable_object
            return PublicMethods(instance) if not isinstance(instance, FunctionType) else None
        target = self._declared(deployment_id)  # it has no replica at the moment
        return PublicMethods(target) if isinstance(target, type) else None

    def _declared(self, deployment_id: DeploymentID) -> type | FunctionType | None:
        """Return the class or function of a deployment that runs."""
        running = self.applications.get(deployment_id.app_name)
        deployment = None if running is None else running.deployments.get(deployment_id.name)
        return None if deployment is None else deployment.built.deployment.func_or_class

    def when_resolved(self, responses: list[DeploymentResponse], then: Callable[[], None]) -> None:
        router = self.threads.router
        when_all_settled(
            [response._call for response in responses],
            then if router is None else partial(router.mailbox.post, then),
        )

    def expire(self, call: Call, deadline: float) -> None:
        threads = self._threads
        if threads is not None:
            threads.deadlines.add(call, deadline)
            call.when_settled(threads.deadlines.discard)

    def later(self, callback: Callable[[], object]) -> None:
        threads = self._threads
        if threads is not None:
            threads.control.mailbox.post(callback)
