"""The applications of this process, by name: those that start, run and stop, or failed to start.

    reserve   takes a name and a route prefix; an earlier start of that name is ended
    start     runs the constructors; then requests come, and the replaced application is stopped;
              if one fails, the application is listed as failed, and requests to it get 503
    end       ends a start, even if its constructors hang
    stop      stops a running application; all callers wait for the same stop

Each of them runs only a few lines between two waits, so none waits for another application.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import TypeVar

from ingress.app.declaration.build import BuiltApplication
from ingress.core.base.gc_freeze import SettledObjects
from ingress.core.base.types import DeploymentID
from ingress.engines.engine_http import EngineHTTP
from ingress.exceptions import RayServeException
from ingress.schema import ApplicationStatus
from ingress.serving.control.controller import Controller
from ingress.serving.control.health import place_of_start
from ingress.serving.control.running import RunningApplication
from ingress.serving.http.proxy import RouteTable
from ingress.serving.replicas.router import Router
from ingress.state.applications import ApplicationSnapshot, FailedStart, application_snapshot
from ingress.telemetry.logs import logger
from ingress.telemetry.logs.options import LOGS
from ingress.telemetry.watchdog.stacks import NOWHERE

A = TypeVar("A", RunningApplication, FailedStart)

STILL_STARTING_S = 10.0
_NAMED = 8  # replicas, in a record about a start

CLOSED = "it was closed while it started"
FAILED = "it failed to start"
DELETED = "it was deleted while it started"
INTERRUPTED = "it was interrupted while it started"
REPLACED = "another application of its name was run while it started"
SHUT_DOWN = "everything was shut down while it started"


class StartEnded(RuntimeError):
    """An application was deleted, replaced or shut down while it started."""


@dataclass(eq=False, slots=True)
class Start:
    """One application that starts. Owned by the control loop, except `reason` and `is_ready`.

    Either `reason` or `is_ready` is set, once: see `Applications.take`. `lists_failure` says that a
    failure is listed until the application is deleted or replaced. Until then an application with
    a prefix counts as a user of the engine's threads, because its requests are answered.
    """

    application: RunningApplication
    lists_failure: bool = False
    earlier: asyncio.Task[None] | None = None  # the end of an earlier start of the same name
    is_begun: bool = False
    deploying: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    is_ready: bool = False
    reason: str = ""

    def ended(self) -> StartEnded:
        """Return the error for the callers that wait for this start."""
        return StartEnded(f"Deploying application '{self.application.name}' failed: {self.reason}")


MAX_STOPPED = 20


@dataclass(eq=False, slots=True)
class Applications:
    """The applications of an engine. Owned by the control loop.

    Any thread reads `running`, `starting` and `failed`. Each application counts as a user of the
    engine's threads, from its start on; `release` counts one less. `controller` is set while there
    are threads.
    """

    _http: EngineHTTP
    _routers: dict[DeploymentID, Router]
    _release: Callable[[], None]
    running: dict[str, RunningApplication] = field(default_factory=dict)
    starting: dict[str, Start] = field(default_factory=dict)
    failed: dict[str, FailedStart] = field(default_factory=dict)
    # The counters of those that stopped last.
    stopped: dict[str, ApplicationSnapshot] = field(default_factory=dict)
    controller: Controller = field(init=False)
    _stops: set[asyncio.Task[None]] = field(default_factory=set)
    _settled: SettledObjects = field(default_factory=SettledObjects)
    freezes_gc: bool = True
    not_ready_after_s: float | None = None
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    def take(self, start: Start, reason: str) -> bool:
        """Return whether the caller must `end` a start, and then `release` it. Thread-safe.

        Race of several callers that end the start, and of its own interrupted thread, with each
        other and with the last replica that becomes ready: this lock decides which comes first.
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
        """Take the name and the prefix. Raises `RayServeException` if one of them is taken."""
        application = start.application
        self._refuse_clash(application)
        earlier = self.starting.get(application.name)
        if earlier is not None and self.take(earlier, REPLACED):
            start.earlier = self._owned(self.end_and_release(earlier))
        self.starting[application.name] = start
        self._forget_failure(application.name)
        self._update_routes()

    async def start(
        self,
        start: Start,
        built: BuiltApplication,
        loop_of_replicas: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        """Run the constructors. Returns once requests come and the replaced application has ended.

        Raises `StartEnded` if the start was ended, else as `Controller.deploy`. After an error none
        of its replicas run, and `failed` has it if `start.lists_failure`.
        """
        if start.reason:
            raise start.ended()  # it was ended before it began
        start.is_begun = True
        application = start.application
        controller = self.controller
        telling = asyncio.get_running_loop().create_task(tell_while_starting(application))
        failed: FailedStart | None = None
        try:
            if start.earlier is not None:
                await asyncio.shield(start.earlier)
            error: BaseException | None = None
            replaced: RunningApplication | None = None
            serving: RunningApplication | None = None
            if not start.reason:
                serving = self._updated_by(application)
                configs = {each.name: each.deployment.config for each in built.deployments}
                LOGS.set_application(
                    application.name, {key: each.logging_config for key, each in configs.items()}
                )
                start.deploying = asyncio.get_running_loop().create_task(
                    controller.deploy(application, built, loop_of_replicas(), serving)
                )
                await asyncio.wait([start.deploying])
                is_ended = start.deploying.cancelled()
                error = asyncio.CancelledError() if is_ended else start.deploying.exception()
                if error is None and self._is_ready(start):
                    replaced = self.running.get(application.name)
                    self._put_to_use(start)
            if isinstance(error, Exception) and start.lists_failure and not start.reason:
                names = (each.name for each in built.deployments)
                failed = FailedStart.of(application, names, error)
                if failed.is_answered and not self.take(start, FAILED):
                    failed = None
            if not start.is_ready:
                await self._undo(start, serving)
        finally:
            telling.cancel()
            if failed is not None:
                self._list_failure(start, failed)
            self._forget(start)
            start.over.set()
        if failed is None and start.reason:
            raise start.ended() from error
        if error is not None:
            raise error
        if replaced is not None:
            await self.stop(replaced, replaced_by=application)

    async def _undo(self, start: Start, serving: RunningApplication | None) -> None:
        """End the replicas of a start that has failed or was ended, and let `serving` go on."""
        application, controller = start.application, self.controller
        self._give_back_logging(application.name)
        self._give_back_routers(application)
        is_ending = start.reason in (DELETED, SHUT_DOWN)
        await controller.roll_back(application, serving, is_ending=is_ending)
        await controller.stop(application, timeout_s=0.0, kept=serving)

    def _updated_by(self, application: RunningApplication) -> RunningApplication | None:
        """Return the running application of which a new one is an update, `None` if there is none.

        Its deployments that both have go on: they get new replicas, one after another.
        """
        if (serving := self.running.get(application.name)) is None or serving.stopping is not None:
            return None
        return serving if serving.proxy is application.proxy else None

    def _put_to_use(self, start: Start) -> None:
        application = start.application
        # Not earlier: if another thread ends the start, the version before serves on.
        application.keep()
        application.status = ApplicationStatus.RUNNING
        self.running[application.name] = application
        self.controller.begin_consumers(application)
        application.proxy.conditions[application.name] = partial(
            application.condition, self.not_ready_after_s
        )
        self._settled.renew(is_needed=self.freezes_gc)

    def _list_failure(self, start: Start, failed: FailedStart) -> None:
        """List a failure, unless another start of the name has begun meanwhile."""
        if self.starting.get(failed.name) is start:
            self.failed[failed.name] = failed
        elif failed.is_answered:
            self._release()

    def _forget_failure(self, name: str) -> None:
        """List a failure no longer."""
        if (failed := self.failed.pop(name, None)) is not None and failed.is_answered:
            self._update_routes()
            self._release()

    def _give_back_routers(self, application: RunningApplication) -> None:
        """Make handles find the deployments of the application that serves on."""
        if (serving := self.running.get(application.name)) is None or serving.stopping is not None:
            return
        for name, deployment in application.deployments.items():
            deployment_id = deployment.router.deployment_id
            if (
                self._routers.get(deployment_id) is deployment.router
                and name in serving.deployments
            ):
                self._routers[deployment_id] = serving.deployments[name].router

    def _give_back_logging(self, name: str) -> None:
        """Log as the application of a name that runs says, if there is one."""
        running = self.running.get(name)
        deployments = {} if running is None else running.deployments
        LOGS.set_application(
            name, {key: each.config.logging_config for key, each in deployments.items()}
        )

    def _forget(self, start: Start) -> None:
        if self.starting.get(start.application.name) is start:
            del self.starting[start.application.name]
        self._update_routes()

    async def end(self, start: Start) -> None:
        """End a start that was taken. Returns within a second or so.

        A thread that is stuck in a constructor is abandoned, with a log record.
        """
        if start.deploying is not None:
            start.deploying.cancel()
        elif not start.is_begun:  # its thread has not called `start` yet
            self._forget(start)
            start.over.set()
        await start.over.wait()

    async def end_and_release(self, start: Start) -> None:
        """End a start that was taken, and count one user of the threads less."""
        try:
            await self.end(start)
        finally:
            self._release()

    async def stop(
        self,
        application: RunningApplication,
        timeout_s: float | None = None,
        *,
        replaced_by: RunningApplication | None = None,
    ) -> None:
        """Stop a running application. Later callers wait for the first caller's stop.

        The deployments that the application that replaces it has too go on.
        """
        if application.stopping is None:
            application.status = ApplicationStatus.DELETING
            application.stopping = self._owned(self._stop(application, timeout_s, replaced_by))
            self._update_routes()
        await asyncio.shield(application.stopping)

    async def _stop(
        self,
        application: RunningApplication,
        timeout_s: float | None,
        replaced_by: RunningApplication | None,
    ) -> None:
        try:
            await self.controller.stop(
                application, timeout_s, kept=replaced_by, is_replaced=replaced_by is not None
            )
        finally:
            if self.running.get(application.name) is application:
                del self.running[application.name]
                self._keep_counters(application)
                application.proxy.conditions.pop(application.name, None)
                if application.name not in self.starting:
                    self._give_back_logging(application.name)
            self._settled.renew(is_needed=bool(self.running) and self.freezes_gc)
            self._release()

    def _keep_counters(self, application: RunningApplication) -> None:
        self.stopped[application.name] = application_snapshot(application, None, "")
        while len(self.stopped) > MAX_STOPPED:
            del self.stopped[next(iter(self.stopped))]

    async def delete(self, name: str) -> None:
        """End the start and stop the running application of a name."""
        start, running = self.starting.get(name), self.running.get(name)
        if start is not None:
            if self.take(start, DELETED):
                await self.end_and_release(start)
            else:
                await start.over.wait()
        self._forget_failure(name)
        if running is not None:
            await self.stop(running)

    async def stop_all(self, timeout_s: float | None) -> None:
        """End every start and stop every application.

        Requests have `timeout_s` to end, by default their deployments' timeouts.
        """
        ends = [
            self.end_and_release(each)
            for each in self.starting.values()
            if self.take(each, SHUT_DOWN)
        ]
        stopping = set(self._stops)
        failing = [each for each in self.starting.values() if each.reason == FAILED]
        stops = [self.stop(each, timeout_s) for each in self.running.values()]
        await asyncio.gather(*ends, *stops, *(each.over.wait() for each in failing))
        if stopping:
            await asyncio.wait(stopping, timeout=timeout_s)
        for name in list(self.failed):
            self._forget_failure(name)

    def snapshots(self) -> dict[str, ApplicationSnapshot]:
        """Return the state of each application. Thread-safe."""
        # In this order an application that becomes ready in between is in both, not in neither.
        starting, failed = list(self.starting.items()), list(self.failed.items())
        running = dict(self.running)
        process = self._http.command_line.process
        found = {name: application_snapshot(each, None, process) for name, each in running.items()}
        for name, failure in failed:
            found[name] = failure.snapshot(running.get(name), process)
        for name, start in starting:
            if (serving := running.get(name)) is not start.application:
                found[name] = application_snapshot(start.application, serving, process)
        return found

    def free_name(self) -> str:
        """Return a free name for an application that is served without one.

        Runs on the control loop. The caller awaits nothing before `reserve` takes the name.
        """
        names = chain(["default"], (f"default_{number}" for number in count(1)))
        taken = {*self.running, *self.starting, *self.failed}
        return next(each for each in names if each not in taken)

    def _owned(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Return a task that goes on even if its caller is cancelled."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        return task

    def _present(self) -> list[RunningApplication]:
        """Return the applications that serve or start."""
        starting = [each.application for each in self.starting.values() if not each.reason]
        return [*(each for each in self.running.values() if each.stopping is None), *starting]

    def _update_routes(self) -> None:
        proxy = self._http.proxy
        present = [each for each in self._present() if each.proxy is proxy]
        serving = [each for each in present if each.status is ApplicationStatus.RUNNING]
        starting = [each for each in present if each not in serving]
        proxy.table = RouteTable(
            {prefix: each.ingress.router for prefix, each in _by_prefix(serving)},
            dict(_by_prefix(starting)),
            dict(_by_prefix(self.failed.values())),
        )

    def _refuse_clash(self, new: RunningApplication) -> None:
        proxy = self._http.proxy
        for other in self._present():
            if other.name == new.name and other.proxy is not new.proxy:
                raise RayServeException(
                    f'Application name "{new.name}" is being used by an application that is served '
                    "as an ASGI app. Give this application another name."
                )
            if other.name != new.name and other.proxy is proxy and new.proxy is proxy:
                _refuse_prefix(new, other)
        for failed in self.failed.values():
            if failed.name != new.name and new.proxy is proxy:
                _refuse_prefix(new, failed)


def _by_prefix(applications: Iterable[A]) -> list[tuple[str, A]]:
    """Return the applications that are served over HTTP, each with its prefix."""
    return [(each.route_prefix, each) for each in applications if each.route_prefix is not None]


def _refuse_prefix(new: RunningApplication, other: RunningApplication | FailedStart) -> None:
    if new.route_prefix is not None and other.route_prefix == new.route_prefix:
        raise RayServeException(
            f'Prefix {new.route_prefix} is being used by application "{other.name}". '
            f'Failed to deploy application "{new.name}". Give it another route_prefix.'
        )


async def tell_while_starting(application: RunningApplication) -> None:
    """Log the unfinished constructors after `STILL_STARTING_S`, then each time that doubles."""
    passed_s, next_s = 0.0, STILL_STARTING_S
    while True:
        await asyncio.sleep(next_s - passed_s)
        passed_s, next_s = next_s, 2 * next_s
        logger.warning(
            "application '%s' is still starting after %.0f s: %s",
            application.name,
            passed_s,
            constructing(application),
        )


def constructing(application: RunningApplication) -> str:
    """Return the replicas that have not started, and the current lines of their constructors."""
    replicas = [replica for each in application.deployments.values() for replica in each.starting]
    places = [(each.replica_id, place_of_start(each)) for each in replicas[:_NAMED]]
    texts = [f"{each}" if place is NOWHERE else f"{each} at {place}" for each, place in places]
    if len(replicas) > _NAMED:
        texts.append(f"and {len(replicas) - _NAMED} more")
    nothing = "none of its replicas has begun; an application that it replaces ends first"
    return ", ".join(texts) or nothing
