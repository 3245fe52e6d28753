"""The applications of this process, by name: what starts, what runs and what stops.

    reserve   a name and a route prefix, and end what starts under that name: the later one stays
    start     the constructors; then requests come to it, and what it replaces is stopped
    end       a start, whatever its constructors do
    stop      an application that runs; whoever asks waits for the same stop

Each of these is a few lines between two waits, so none waits for another application.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ingress.base.gc_freeze import SettledObjects
from ingress.base.types import DeploymentID
from ingress.control.controller import Controller, RunningApplication
from ingress.declaration.build import BuiltApplication
from ingress.engines.engine_http import EngineHTTP
from ingress.engines.progress import tell_while_starting
from ingress.exceptions import RayServeException
from ingress.http.proxy import RouteTable
from ingress.replicas.router import Router
from ingress.schema import ApplicationStatus, ApplicationStatusOverview

CLOSED = "it was closed while it started"
DELETED = "it was deleted while it started"
INTERRUPTED = "it was interrupted while it started"
REPLACED = "another one of its name was run while it started"
SHUT_DOWN = "everything was shut down while it started"


class StartEnded(RuntimeError):
    """An application was deleted, replaced or shut down while it started."""


@dataclass(eq=False, slots=True)
class Start:
    """One application that starts. Owned by the control loop, but for `reason` and `is_ready`.

    Of those two one is set, once: see `Applications.take`.
    """

    application: RunningApplication
    earlier: asyncio.Task[None] | None = None  # the end of one of the same name
    is_begun: bool = False
    deploying: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    is_ready: bool = False
    reason: str = ""

    def ended(self) -> StartEnded:
        """Return what those are told who wait for it."""
        return StartEnded(f"Deploying application '{self.application.name}' failed: {self.reason}")


class Applications:
    """Owned by the control loop; `running` and `starting` are read everywhere.

    Each application counts as a user of the engine's threads, from its start on: `release` counts
    one less. `controller` is set while there are threads.
    """

    __slots__ = (
        "_deciding", "_http", "_release", "_routers", "_settled", "_stops", "controller", "running",
        "starting",
    )  # fmt: skip

    def __init__(
        self, http: EngineHTTP, routers: dict[DeploymentID, Router], release: Callable[[], None]
    ) -> None:
        self.running: dict[str, RunningApplication] = {}
        self.starting: dict[str, Start] = {}
        self.controller: Controller | None = None
        self._http = http
        self._routers = routers
        self._release = release
        self._stops: set[asyncio.Task[None]] = set()
        self._settled = SettledObjects()
        self._deciding = threading.Lock()

    def take(self, start: Start, reason: str) -> bool:
        """Whether a start is the caller's to `end`, and to `release` after that. Thread-safe.

        Race of whoever ends it, and of the thread that waits for it and was interrupted, with each
        other and with the last replica that becomes ready: one of them comes first, here.
        """
        with self._deciding:
            if start.is_ready or start.reason:
                return False
            start.reason = reason
            return True

    def _is_ready(self, start: Start) -> bool:
        with self._deciding:
            start.is_ready = not start.reason
            return start.is_ready

    async def reserve(self, start: Start) -> None:
        """Take the name and the prefix. Raises `RayServeException` if another one has them."""
        application = start.application
        self._refuse_clash(application)
        earlier = self.starting.get(application.name)
        if earlier is not None and self.take(earlier, REPLACED):
            start.earlier = self._owned(self.end_and_release(earlier))
        self.starting[application.name] = start
        self._update_routes()

    async def start(
        self,
        start: Start,
        built: BuiltApplication,
        loop_of_replicas: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        """Run the constructors. Returns once it serves and what it replaces has stopped.

        Raises `StartEnded` if somebody ended it, else as `Controller.deploy`; nothing of it is left
        running then.
        """
        if start.reason:
            raise start.ended()  # before it began: it is over already
        start.is_begun = True
        application = start.application
        controller = self._controller()
        telling = asyncio.get_running_loop().create_task(tell_while_starting(application))
        try:
            if start.earlier is not None:
                await asyncio.shield(start.earlier)
            error: BaseException | None = None
            replaced: RunningApplication | None = None
            if not start.reason:
                start.deploying = asyncio.get_running_loop().create_task(
                    controller.deploy(application, built, loop_of_replicas())
                )
                await asyncio.wait([start.deploying])
                is_ended = start.deploying.cancelled()
                error = asyncio.CancelledError() if is_ended else start.deploying.exception()
                if error is None and self._is_ready(start):
                    replaced = self.running.get(application.name)
                    self._put_to_use(start)
            if not start.is_ready:
                self._give_back_routers(application)
                await controller.stop(application, timeout_s=0.0)
        finally:
            telling.cancel()
            self._forget(start)
            start.over.set()
        if start.reason:
            raise start.ended() from error
        if error is not None:
            raise error
        if replaced is not None:
            await self.stop(replaced, is_replaced=True)

    def _put_to_use(self, start: Start) -> None:
        application = start.application
        application.status = ApplicationStatus.RUNNING
        self.running[application.name] = application
        self._settled.renew(is_needed=True)

    def _give_back_routers(self, application: RunningApplication) -> None:
        """Have handles find the deployments of the one that serves on."""
        serving = self.running.get(application.name)
        if serving is None or serving.stopping is not None:
            return
        for name, deployment in application.deployments.items():
            deployment_id = deployment.router.deployment_id
            if (
                self._routers.get(deployment_id) is deployment.router
                and name in serving.deployments
            ):
                self._routers[deployment_id] = serving.deployments[name].router

    def _forget(self, start: Start) -> None:
        if self.starting.get(start.application.name) is start:
            del self.starting[start.application.name]
        self._update_routes()

    async def end(self, start: Start) -> None:
        """End a start that was taken. What is stuck in a constructor is left behind, with a record.

        Returns when that is done, within a second or so.
        """
        if start.deploying is not None:
            start.deploying.cancel()
        elif not start.is_begun:  # the thread that would begin it has not come that far
            self._forget(start)
            start.over.set()
        await start.over.wait()

    async def end_and_release(self, start: Start) -> None:
        """End a start that was taken, and let go of its threads. Others have them still."""
        try:
            await self.end(start)
        finally:
            self._release()

    async def stop(
        self,
        application: RunningApplication,
        timeout_s: float | None = None,
        *,
        is_replaced: bool = False,
    ) -> None:
        """Stop an application that runs. Whoever comes second waits for the first to have done."""
        if application.stopping is None:
            application.status = ApplicationStatus.DELETING
            application.stopping = self._owned(self._stop(application, timeout_s, is_replaced))
            self._update_routes()
        await asyncio.shield(application.stopping)

    async def _stop(
        self, application: RunningApplication, timeout_s: float | None, is_replaced: bool
    ) -> None:
        try:
            await self._controller().stop(application, timeout_s, is_replaced=is_replaced)
        finally:
            if self.running.get(application.name) is application:
                del self.running[application.name]
            self._settled.renew(is_needed=bool(self.running))
            self._release()

    async def delete(self, name: str) -> None:
        """End what starts and stop what runs under a name."""
        start, running = self.starting.get(name), self.running.get(name)
        if start is not None:
            if self.take(start, DELETED):
                await self.end_and_release(start)
            else:
                await start.over.wait()
        if running is not None:
            await self.stop(running)

    async def stop_all(self, timeout_s: float | None) -> None:
        """End and stop everything. Requests have `timeout_s`, by default what deployments say."""
        ends = [
            self.end_and_release(each)
            for each in self.starting.values()
            if self.take(each, SHUT_DOWN)
        ]
        stopping = set(self._stops)
        stops = [self.stop(each, timeout_s) for each in self.running.values()]
        await asyncio.gather(*ends, *stops)
        if stopping:
            await asyncio.wait(stopping, timeout=timeout_s)

    def overviews(self) -> dict[str, ApplicationStatusOverview]:
        """Return how all of them are. Thread-safe."""
        # In this order: what becomes ready in between is in both, and not in neither.
        starting = list(self.starting.items())
        running = dict(self.running)
        found = {name: each.overview() for name, each in running.items()}
        for name, start in starting:
            if running.get(name) is not start.application:
                found[name] = start.application.overview(running.get(name))
        return found

    def free_name(self) -> str:
        """Return the name of the next application that is served without one.

        On the control loop; nothing may be awaited before `reserve` takes the name.
        """
        name, number = "default", 0
        while name in self.running or name in self.starting:
            number += 1
            name = f"default_{number}"
        return name

    def _controller(self) -> Controller:
        assert self.controller is not None, "the caller holds an `acquire`"
        return self.controller

    def _owned(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run what goes on although whoever asked for it is interrupted."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        return task

    def _present(self) -> list[RunningApplication]:
        """Return those that serve or will."""
        starting = [each.application for each in self.starting.values() if not each.reason]
        return [*(each for each in self.running.values() if each.stopping is None), *starting]

    def _update_routes(self) -> None:
        routers: dict[str, Router] = {}
        starting: dict[str, str] = {}
        for each in self._present():
            if each.proxy is not self._http.proxy or each.route_prefix is None:
                continue
            if each.status is ApplicationStatus.RUNNING:
                routers[each.route_prefix] = each.ingress.router
            else:
                starting[each.route_prefix] = each.name
        self._http.proxy.table = RouteTable(routers, starting)

    def _refuse_clash(self, new: RunningApplication) -> None:
        proxy = self._http.proxy
        for other in self._present():
            if other.name == new.name and other.proxy is not new.proxy:
                raise RayServeException(
                    f'Application name "{new.name}" is being used by an application that is served '
                    "as an ASGI app. Give this one another name."
                )
            if other.name == new.name or other.proxy is not proxy or new.proxy is not proxy:
                continue
            if new.route_prefix is not None and other.route_prefix == new.route_prefix:
                raise RayServeException(
                    f'Prefix {new.route_prefix} is being used by application "{other.name}". '
                    f'Failed to deploy application "{new.name}". Give it another route_prefix.'
                )
