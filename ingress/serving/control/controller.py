"""Start and stop applications; the reconciler does the same with each replica.

    deploy   children first: each deployment's replicas side by side
    change   options of deployments that run, in place
    stop     callers first: drain, then shut down

Lives on the control loop, where no user code runs while user code has loops of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from ingress.app.batching.batching import warn_of_capacity
from ingress.app.declaration.build import BuiltApplication, BuiltDeployment
from ingress.app.declaration.loop_objects import LoopObject, loop_objects
from ingress.config import DeploymentConfig
from ingress.core.base.foreign import advisory
from ingress.core.base.settings import Settings
from ingress.core.base.types import DeploymentID
from ingress.core.calls.loops import NewLoop, mailbox_of, reserve_descriptors
from ingress.core.execution.execution import name_of
from ingress.exceptions import DeploymentUnavailableError
from ingress.schema import ApplicationStatus
from ingress.serving.control.changes import Change, apply, checked, count_for
from ingress.serving.control.consumers import Consumer, consumer_of
from ingress.serving.control.factories import Factories
from ingress.serving.control.reconciler import LAST_WORDS_S, MakeHandle, Reconciler
from ingress.serving.control.running import RunningApplication, RunningDeployment, Version
from ingress.serving.control.scaling import scaler_of
from ingress.serving.http.proxy import HTTPProxy
from ingress.serving.replicas.fairness import fairness_of
from ingress.serving.replicas.router import Router
from ingress.telemetry.logs import logger
from ingress.telemetry.mistakes import described


class Controller:
    """The starter and stopper of replicas. Owned by the control loop; any thread reads `routers`.

    `factories` returns those of an application that starts now.
    """

    __slots__ = (
        "_factories", "_make_handle", "_reconciler", "_routers", "_settings", "_shared_loop",
    )  # fmt: skip

    def __init__(
        self,
        settings: Settings,
        routers: dict[DeploymentID, Router],
        make_handle: MakeHandle,
        shared_loop: Callable[[NewLoop], asyncio.AbstractEventLoop],
        factories: Callable[[], Factories],
    ) -> None:
        self._settings = settings
        self._routers = routers
        self._make_handle = make_handle
        self._reconciler = Reconciler(settings, make_handle)
        self._shared_loop = shared_loop
        self._factories = factories

    async def deploy(
        self,
        running: RunningApplication,
        application: BuiltApplication,
        serving_loop: asyncio.AbstractEventLoop,
        serving: RunningApplication | None = None,
    ) -> None:
        """Start every replica of an application and return once all are ready.

        Deployments that `serving`, the application of the same name that runs, has too are updated
        replica by replica: a new one starts, an old one leaves. Raises `RuntimeError` with the
        deployment's name, from the error of the user's code. The caller ends the update: with
        `RunningApplication.keep`, or with `roll_back` and `stop` after an error or a cancellation.
        With `running.keeps_same`, those that are the same keep their replicas. Replicas live on
        `running.callers_loop` if there is one, else on `serving_loop` when user
        code has no thread of its own.
        """
        older = {} if serving is None else serving.deployments
        if self._settings.run_user_code_in_separate_thread:
            new = [each for each in application.deployments if each.name not in older]
            counts = (each.deployment.config.first_count for each in new)
            reserve_descriptors(sum(counts), may_raise=self._settings.raise_file_limit)
        factories = self._factories()
        changed = []
        for built in application.deployments:  # all at once, so that the status shows all
            deployment = older.get(built.name)
            if running.keeps_same and deployment is not None and deployment.built.is_same_as(built):
                running.deployments[built.name] = deployment
                continue
            changed.append(built)
            # With other instruments its router has to be of another class, and with another policy
            # it has to be another router.
            if (
                deployment is None
                or deployment.using.factories != factories
                or deployment.config.request_router_config
                != built.deployment.config.request_router_config
            ):
                deployment = self._declared(built, running.name, running.proxy, factories)
            else:
                deployment.previous = deployment.version()
            running.deployments[built.name] = deployment
        for built in changed:
            deployment = running.deployments[built.name]
            try:
                await self._roll_out(deployment, built, serving_loop, running.callers_loop)
            except Exception as error:
                raise RuntimeError(
                    f"Deploying application '{running.name}' failed: deployment "
                    f"'{deployment.built.name}' failed to start: {described(error)}"
                ) from error
            # From here on handles find the deployment: the constructors of its parents, which run
            # next, may call it.
            self._routers[deployment.router.deployment_id] = deployment.router
        for name in running.deployments:
            await self._open_consumer(running, name)

    async def _open_consumer(self, running: RunningApplication, name: str) -> None:
        """Connect the consumer of a deployment, if it has one. It begins with the application."""
        deployment = running.deployments[name]
        if (found := consumer_of(deployment.built.deployment.func_or_class)) is None:
            return
        slots = deployment.config.max_ongoing_requests * max(1, deployment.desired.count)
        handle = self._make_handle(deployment.router.deployment_id)
        try:
            consumer = await asyncio.to_thread(
                found.open, handle, deployment.room, slots, deployment.slots_of
            )
        except Exception as error:
            raise RuntimeError(
                f"Deploying application '{running.name}' failed: the task consumer of deployment "
                f"'{name}' failed to start: {described(error)}"
            ) from error
        running.consumers[name] = consumer

    def begin_consumers(self, running: RunningApplication) -> None:
        """Have the jobs of an application that serves run, by its consumers and no others."""
        for name, deployment in running.deployments.items():
            before, deployment.consumer = deployment.consumer, running.consumers.get(name)
            if before is not None:  # of the version before: its jobs that run go on
                before.pause(deployment.config.graceful_shutdown_timeout_s)
                self._reconciler.spawn(_closed(before, deployment.config))
            if deployment.consumer is not None:
                deployment.consumer.begin()

    async def _roll_out(
        self,
        deployment: RunningDeployment,
        built: BuiltDeployment,
        serving_loop: asyncio.AbstractEventLoop,
        callers_loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """Start a deployment's replicas, or replace them by those of a new version.

        Raises the error of the first that does not start: at once, because another constructor may
        hang.
        """
        config, factories = built.deployment.config, deployment.using.factories
        if callers_loop is not None and config.isolation == "process":
            callers_loop = None
        borrowed = callers_loop or await self._loop_for(built, serving_loop, factories.new_loop)
        warn_of_capacity(built.name, built.deployment.func_or_class, config.max_ongoing_requests)
        if (borrowed is None or config.isolation == "process") and config.replica_count > 1:
            _tell_of_limits(built)
        is_update = deployment.previous is not None
        if is_update:
            deployment.next_version += 1
            deployment.next_config += 1
        version = Version(
            built,
            config,
            factories,
            deployment.next_version,
            deployment.next_config,
            borrowed,
            scaler_of(config),
            count_for(config, deployment.desired.count) if is_update else config.first_count,
            is_watched=callers_loop is None,
        )
        if is_update:  # with the changes since the start of the update
            deployment.previous = deployment.version()
        deployment.begin_rollout()
        deployment.use(version)
        if is_update:
            self._reconciler.look(deployment)
        else:
            # On one loop the first one may create what all share, such as a table: the others would
            # find none, and create it at the same moment.
            is_shared = borrowed is not None and config.isolation == "thread"
            deployment.desire(one_first=is_shared)
            self._reconciler.add(deployment)
        await self._reconciler.settled(deployment)
        deployment.end_rollout()

    async def roll_back(
        self,
        running: RunningApplication,
        serving: RunningApplication | None,
        *,
        is_ending: bool = False,
    ) -> None:
        """Return to the version before, where an update that failed had begun to replace it.

        Waits for replicas that end at once, not for calls, nor for constructors that run again. If
        `serving` stops next, `is_ending`, those that serve stay, and no constructor runs again.
        """
        kept = [] if serving is None else list(serving.deployments.values())
        begun = [each for each in running.deployments.values() if each in kept]
        for deployment in begun:
            deployment.is_ending = deployment.is_ending or is_ending
            deployment.roll_back()
            self._reconciler.look(deployment)
        if is_ending:
            return
        try:
            async with asyncio.timeout(2 * LAST_WORDS_S):
                for deployment in begun:
                    await self._reconciler.settled(deployment)
        except (TimeoutError, DeploymentUnavailableError):  # or they are being stopped, too
            pass

    def _declared(
        self, built: BuiltDeployment, app_name: str, proxy: HTTPProxy, factories: Factories
    ) -> RunningDeployment:
        """Return a deployment without replicas."""
        config, loop = built.deployment.config, asyncio.get_running_loop()
        router = factories.router(
            DeploymentID(built.name, app_name),
            config.max_queued_requests,
            backpressure=config.backpressure_config,
            max_retries=self._settings.max_retries,
            later=partial(mailbox_of(loop).post, loop.call_later),  # in any thread
            bound_app=built.bound_app,
            routing=config.request_router_config,
            fairness=fairness_of(config),
            graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s,
        )
        return RunningDeployment(router, proxy, Version(built, config, factories))

    async def _loop_for(
        self,
        built: BuiltDeployment,
        serving_loop: asyncio.AbstractEventLoop,
        new_loop: NewLoop,
    ) -> asyncio.AbstractEventLoop | None:
        """Return the loop that a deployment's replicas run on, `None` if each has its own."""
        is_process = built.deployment.config.isolation == "process"
        if is_process or not self._settings.run_user_code_in_separate_thread:
            return serving_loop
        choice = built.deployment.config.loop
        found: LoopObject | None = None
        if choice is None:
            found = await asyncio.to_thread(next, loop_objects(built), None)  # it reads files
        if found is not None:
            logger.info(
                "%s belongs to one event loop%s, so the replicas of %s run on the shared loop; "
                'declare this with @serve.deployment(loop="shared"), or give each replica its own '
                'loop with loop="own"',
                found,
                f" and is named in {found.named_in}" if found.named_in else "",
                built.name,
            )
        return self._shared_loop(new_loop) if choice == "shared" or found is not None else None

    def change(
        self,
        running: RunningApplication,
        options: Mapping[str, Mapping[str, object] | DeploymentConfig],
        origin: str,
    ) -> list[Change]:
        """Change options of an application's deployments in place. See `LocalEngine.change`."""
        configs = checked(running, options, origin)
        return [each for name, config in configs.items()
                for each in apply(self._reconciler, running.deployments[name], config)]  # fmt: skip

    async def stop(
        self,
        running: RunningApplication,
        timeout_s: float | None = None,
        *,
        kept: RunningApplication | None = None,
        is_replaced: bool = False,
    ) -> None:
        """Drain the requests, then stop every replica, also those whose constructors still run.

        `timeout_s` limits the drain; its default is the longest timeout of the deployments. The
        stop takes at most `LAST_WORDS_S` more. The deployments that `kept` has too go on.
        `is_replaced` says that another application serves on.
        """
        running.status = ApplicationStatus.DELETING
        others = [] if kept is None else list(kept.deployments.values())
        deployments = [each for each in running.deployments.values() if each not in others]
        if not deployments:  # an update, or there were too few descriptors
            return
        for deployment in deployments:
            deployment.is_ending = True
            deployment.desire()
        if timeout_s is None:
            timeout_s = running.graceful_shutdown_timeout_s
        for deployment in deployments:
            if deployment.consumer is not None:
                deployment.consumer.pause(timeout_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if running.ingress in deployments:
            router = running.ingress.router
            await running.proxy.in_flight.drain(router, timeout_s, is_replaced=is_replaced)
        # Callers before their children, so that requests in flight can still reach the children.
        for deployment in reversed(deployments):
            await _drained(deployment, deadline)
            self._reconciler.discard(deployment)
            deployment.router.refuse(deployment.stopped)
            left_s = max(0.3, deadline + LAST_WORDS_S - loop.time())
            await self._reconciler.stop(deployment, left_s)
            if deployment.consumer is not None:
                await asyncio.to_thread(deployment.consumer.close, LAST_WORDS_S)
            if self._routers.get(deployment.router.deployment_id) is deployment.router:
                del self._routers[deployment.router.deployment_id]


def _tell_of_limits(built: BuiltDeployment) -> None:
    """Log the limits of FastAPI's dependencies, which count for one event loop.

    Source: the documentation of `Depends(max_concurrency=...)`.
    """
    with advisory("the search for limits of dependencies"):
        for part in [] if built.bound_app is None else built.bound_app.parts():
            if part.what == "dependency" and part.at_once is not None:
                logger.info(
                    "max_concurrency=%d of the dependency %s counts for each event loop, so for "
                    "each of the %d replicas of %s; for one limit of all, choose "
                    'num_replicas=1, or loop="shared"',
                    *(part.at_once, name_of(part.func), built.deployment.config.replica_count),
                    built.name,
                )


async def _closed(consumer: Consumer, config: DeploymentConfig) -> None:
    await asyncio.to_thread(consumer.close, config.graceful_shutdown_timeout_s)


async def _drained(deployment: RunningDeployment, deadline: float) -> None:
    """Wait until no call is queued or runs, or until the deadline."""
    loop, router = asyncio.get_running_loop(), deployment.router

    def is_busy() -> bool:
        return router.num_queued > 0 or any(each.ongoing for each in deployment.replicas)

    # Polled, so that no request pays for an event that is used once.
    while is_busy() and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
