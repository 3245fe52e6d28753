"""Applications in this process: started, found, replaced and stopped."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ingress.attempts import RequestLimits
from ingress.build import BuiltApplication, build
from ingress.call import Call, when_all_settled
from ingress.config import HTTPOptions
from ingress.controller import Controller, RunningApplication
from ingress.declaration import Application
from ingress.engines.engine_http import EngineHTTP
from ingress.engines.engine_threads import EngineThreads
from ingress.exceptions import DeploymentUnavailableError, RayServeException
from ingress.garbage import SettledObjects
from ingress.handle import DeploymentHandle, DeploymentResponse
from ingress.loop_executor import lend_executor
from ingress.loops import run_blocking
from ingress.proxy import HTTPProxy, RouteTable
from ingress.router import Router
from ingress.schema import ServeStatus
from ingress.settings import Settings
from ingress.timeline.recorder import Recorder
from ingress.types import DeploymentID
from ingress.user_code import public_methods

logger = logging.getLogger("ingress")


class LocalEngine:
    """One per process; a `handle.Directory`. Thread-safe.

    The tables of routers and applications are changed on the control loop and read everywhere.
    `_lock` guards the threads and their count; `_operations` makes `run`, `delete` and `shutdown`
    take turns.
    """

    __slots__ = (
        "_controller", "_lock", "_operations", "_settled", "_starting", "_threads", "_users",
        "applications", "http", "recorder", "routers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.routers: dict[DeploymentID, Router] = {}
        self.applications: dict[str, RunningApplication] = {}
        self.recorder: Recorder | None = None  # of whoever sets it before anything starts
        self._starting: set[str] = set()
        self._settled = SettledObjects()
        self._lock = threading.Lock()
        self._operations = threading.RLock()
        self._users = 0
        self._threads: EngineThreads | None = None
        self._controller: Controller | None = None
        self.http = EngineHTTP()

    # The threads, counted.

    @property
    def threads(self) -> EngineThreads:
        assert self._threads is not None, "the caller holds an `acquire`"
        return self._threads

    def acquire(self) -> EngineThreads:
        """Count one more user of the threads, and start them for the first."""
        with self._lock:
            if self._threads is None:
                self._threads = EngineThreads(Settings.from_environment())
                settings, recorder = self._threads.settings, self.recorder or self._threads.recorder
                self._controller = Controller(settings, self.routers, self.handle, recorder)
            self._users += 1
            return self._threads

    def release(self) -> None:
        """Count one user less; the last one ends the threads."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.stop()

    def request_limits(self) -> RequestLimits:
        """Return how long HTTP requests may take, and what is retried."""
        return self.http.limits(self.threads.settings)

    # One application, on the control loop; the caller holds an `acquire`.

    async def start_application(
        self,
        built: BuiltApplication,
        route_prefix: str | None,
        proxy: HTTPProxy,
        serving_loop: Callable[[], asyncio.AbstractEventLoop],
    ) -> RunningApplication:
        assert self._threads is not None
        assert self._controller is not None
        if self._threads.settings.run_user_code_in_separate_thread:
            loop = self._threads.control.loop  # nobody will live there
        else:
            loop = serving_loop()
            lend_executor(loop)
        self._starting.add(built.name)
        try:
            running = await self._controller.deploy(built, route_prefix, proxy, loop)
        finally:
            self._starting.discard(built.name)
        self.applications[built.name] = running
        self._settled.renew(is_needed=True)
        return running

    async def stop_application(
        self,
        running: RunningApplication,
        timeout_s: float | None = None,
        *,
        is_replaced: bool = False,
    ) -> bool:
        """Stop an application. Returns True if this was the call that did, and has to `release`."""
        assert self._controller is not None
        if not await self._controller.stop(running, timeout_s, is_replaced=is_replaced):
            return False
        if self.applications.get(running.name) is running:
            del self.applications[running.name]
        self._settled.renew(is_needed=bool(self.applications))
        return True

    async def abandon_application(self, running: RunningApplication) -> None:
        """Stop an application whose loop is gone: nothing of it can still end well."""
        assert self._controller is not None
        if await self._controller.stop(running, timeout_s=0.0):
            self.applications.pop(running.name, None)
            self._settled.renew(is_needed=bool(self.applications))
            self.release()

    def free_name(self) -> str:
        """Return the name of the next application that is served without one.

        On the control loop; nothing may be awaited before `start_application` takes the name.
        """
        name, number = "default", 0
        while name in self.applications or name in self._starting:
            number += 1
            name = f"default_{number}"
        return name

    @property
    def is_running(self) -> bool:
        """Whether it has an application, or serves HTTP."""
        return self._users > 0

    # `serve.run` and friends: from a thread without a running loop.

    def start(self, http_options: HTTPOptions | None) -> None:
        http = self.http
        with self._operations:
            previous = http.options
            if http_options is not None:
                if http.server is not None:
                    http.update(http_options, self.threads)
                http.options = http_options
            if http.is_kept:
                return
            threads = self.acquire()
            try:
                http.start(threads)
            except BaseException:
                http.options = previous
                http.stop_if_unused(threads)
                self.release()
                raise
            http.is_kept = True

    def run(
        self, application: Application, name: str, route_prefix: str | None
    ) -> DeploymentHandle:
        built = build(application, name)
        http = self.http
        with self._operations:
            self._refuse_clash(name, route_prefix)
            previous = self.applications.get(name)
            threads = self.acquire()
            try:
                if route_prefix is not None:
                    http.start(threads)
                running = run_blocking(
                    threads.control.loop,
                    self.start_application(built, route_prefix, http.proxy, self._serving_loop),
                )
            except BaseException:
                http.stop_if_unused(threads)
                self.release()
                raise
            self._update_routes()
            if previous is not None:
                self._stop(previous, threads, is_replaced=True)
            return self.handle(running.ingress.router.deployment_id)

    def delete(self, name: str) -> None:
        with self._operations:
            running = self.applications.get(name)
            threads = self._threads
            if running is None or threads is None:
                return
            self._update_routes(without=running)
            self._stop(running, threads)

    def writing_on_signal(self) -> AbstractContextManager[None]:
        return self.threads.writing_on_signal()

    def refuse(self) -> None:
        """Answer new requests that the server is being drained, until `shutdown`."""
        for running in list(self.applications.values()):
            running.proxy.is_draining = True

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop everything. Requests have `timeout_s` to end, by default what deployments say."""
        with self._operations:
            threads = self._threads
            if threads is None:
                return
            self.refuse()
            stopped = run_blocking(threads.control.loop, self._stop_all(timeout_s))
            stopped += self.http.is_kept
            self.http.is_kept = False
            self._update_routes()
            self.http.stop_if_unused(threads)
            self.http.reset()
            for _ in range(stopped):
                self.release()

    async def _stop_all(self, timeout_s: float | None) -> int:
        applications = list(self.applications.values())
        stops = (self.stop_application(each, timeout_s) for each in applications)
        return sum(await asyncio.gather(*stops))

    def _stop(
        self, running: RunningApplication, threads: EngineThreads, *, is_replaced: bool = False
    ) -> None:
        stopped = run_blocking(
            threads.control.loop, self.stop_application(running, is_replaced=is_replaced)
        )
        self.http.stop_if_unused(threads)
        if stopped:
            self.release()

    def status(self) -> ServeStatus:
        url = self.http.url
        proxies = {} if url is None else {url: "HEALTHY"}
        applications = list(self.applications.items())
        return ServeStatus(proxies, {name: running.overview() for name, running in applications})

    def url(self) -> str | None:
        """Return where `serve.run` serves HTTP, if it does."""
        return self.http.url

    def _serving_loop(self) -> asyncio.AbstractEventLoop:
        assert self._threads is not None
        server = self.http.server
        return self._threads.user_loop() if server is None else server.home.loop

    def _update_routes(self, without: RunningApplication | None = None) -> None:
        self.http.proxy.table = RouteTable(
            {
                running.route_prefix: running.ingress.router
                for running in self.applications.values()
                if running.proxy is self.http.proxy
                and running.route_prefix is not None
                and running is not without
            }
        )

    def _refuse_clash(self, name: str, route_prefix: str | None) -> None:
        for other in self.applications.values():
            if other.name == name and other.proxy is not self.http.proxy:
                raise RayServeException(
                    f'Application name "{name}" is being used by an application that is served as '
                    "an ASGI app. Give this one another name."
                )
            if other.name == name or other.proxy is not self.http.proxy:
                continue
            if route_prefix is not None and other.route_prefix == route_prefix:
                raise RayServeException(
                    f'Prefix {route_prefix} is being used by application "{other.name}". '
                    f'Failed to deploy application "{name}". Give it another route_prefix.'
                )

    # Handles.

    def handle(self, deployment_id: DeploymentID) -> DeploymentHandle:
        return DeploymentHandle(deployment_id, self)

    def app_handle(self, name: str) -> DeploymentHandle:
        running = self.applications.get(name)
        if running is None:
            raise RayServeException(
                f"Application '{name}' does not exist. Running: {sorted(self.applications)}."
            )
        return self.handle(running.ingress.router.deployment_id)

    def deployment_handle(self, deployment_name: str, app_name: str) -> DeploymentHandle:
        deployment_id = DeploymentID(deployment_name, app_name)
        if deployment_id not in self.routers:
            known = sorted(str(each) for each in self.routers)
            raise KeyError(f"{deployment_id} does not exist. Running: {known}.")
        return self.handle(deployment_id)

    def router(self, deployment_id: DeploymentID) -> Router:
        try:
            return self.routers[deployment_id]
        except KeyError:
            raise DeploymentUnavailableError(
                f"{deployment_id} is unavailable because it is not deployed."
            ) from None

    def methods(self, deployment_id: DeploymentID) -> list[str] | None:
        """Return what a handle may call by name; `None` for a function, which has any name."""
        router = self.router(deployment_id)
        for replica in router.replicas:
            instance = replica.context.servable_object
            if isinstance(instance, type(lambda: None)):
                return None
            return public_methods(instance)
        return []

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

    def later(self, callback: Callable[[], Any]) -> None:
        threads = self._threads
        if threads is not None:
            threads.control.mailbox.post(callback)
