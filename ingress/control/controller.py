"""Make the running replicas match the deployed application.

    deploy   children first: each deployment's replicas side by side
    health   each replica is asked once a period; the answer is in `status`
    stop     callers first: drain, then shut down

Lives on the control loop, where no user code runs while user code has loops of its own.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ingress.asgi import BoundApp
from ingress.base.settings import Settings
from ingress.base.types import DeploymentID, ReplicaID
from ingress.batching.batching import warn_of_capacity
from ingress.calls.loops import NewLoop, mailbox_of, reserve_descriptors
from ingress.control.factories import Factories
from ingress.declaration.build import BuiltApplication, BuiltDeployment, fill
from ingress.declaration.loop_objects import LoopObject, loop_objects
from ingress.handle import DeploymentHandle
from ingress.http.proxy import HTTPProxy
from ingress.logs import logger
from ingress.replicas.replica import Replica, ReplicaState
from ingress.replicas.router import Router
from ingress.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ReplicaDetails,
)

LAST_WORDS_S = 0.5  # for the user's shutdown code and the joining of threads, after the drain

MakeHandle = Callable[[DeploymentID], DeploymentHandle]


@dataclass(eq=False, slots=True)
class RunningDeployment:
    """One deployment's router and replicas. Owned by the control loop."""

    built: BuiltDeployment
    router: Router
    bound_app: BoundApp | None
    replicas: list[Replica] = field(default_factory=list)
    health: asyncio.Task[None] | None = None

    @property
    def starting(self) -> list[Replica]:
        """The replicas whose constructors have not returned."""
        return [each for each in list(self.replicas) if each.state is ReplicaState.STARTING]

    def status(self, serving: RunningDeployment | None = None) -> DeploymentStatusOverview:
        """Return the status. `serving` is the deployment to be replaced, whose router is in use."""
        replicas = [*(serving.replicas if serving is not None else ()), *self.replicas]
        unhealthy = [replica for replica in replicas if replica.unhealthy_reason]
        starting = not self.replicas or bool(self.starting)  # no replicas: not started yet
        status = DeploymentStatus.UPDATING if starting else DeploymentStatus.HEALTHY
        message = ""
        if unhealthy:
            status = DeploymentStatus.UNHEALTHY
            message = "; ".join(f"{each.replica_id}: {each.unhealthy_reason}" for each in unhealthy)
        router = self.router if serving is None else serving.router
        return DeploymentStatusOverview(
            status=status,
            status_trigger="CONFIG_UPDATE_STARTED" if starting else "CONFIG_UPDATE_COMPLETED",
            replica_states=dict(Counter(replica.state.value for replica in replicas)),
            message=message,
            requests=router.num_requests,
            queued=router.num_queued,
            replicas=[
                ReplicaDetails(
                    replica.replica_id.unique_id,
                    replica.state.value,
                    replica.ongoing,
                    replica.unhealthy_reason,
                    dict(replica.latencies),
                    replica.orphans,
                    dict(replica.stalls),
                    replica.pools.loads(),
                )
                for replica in replicas
            ],
        )


@dataclass(eq=False, slots=True)
class RunningApplication:
    """One application, its deployments in build order: the last one receives the requests."""

    name: str
    route_prefix: str | None
    proxy: HTTPProxy
    deployments: dict[str, RunningDeployment] = field(default_factory=dict)
    status: ApplicationStatus = ApplicationStatus.DEPLOYING
    message: str = ""
    deployed_at_s: float = field(default_factory=lambda: datetime.now(UTC).timestamp())
    stopping: asyncio.Task[None] | None = None

    @property
    def ingress(self) -> RunningDeployment:
        return list(self.deployments.values())[-1]

    def overview(self, serving: RunningApplication | None = None) -> ApplicationStatusOverview:
        """Return the status. `serving` is the application that serves while this one starts."""
        older = {} if serving is None else serving.deployments
        deployments = {name: each.status() for name, each in list(older.items())}
        for name, each in list(self.deployments.items()):
            deployments[name] = each.status(older.get(name))
        unhealthy = any(each.status is DeploymentStatus.UNHEALTHY for each in deployments.values())
        status = self.status
        if status is ApplicationStatus.RUNNING and unhealthy:
            status = ApplicationStatus.UNHEALTHY
        return ApplicationStatusOverview(status, self.message, self.deployed_at_s, deployments)

    @property
    def graceful_shutdown_timeout_s(self) -> float:
        """The longest timeout of the application's deployments."""
        return max(
            each.built.deployment.config.graceful_shutdown_timeout_s
            for each in self.deployments.values()
        )


class Controller:
    """The starter and stopper of replicas. Owned by the control loop; any thread reads `routers`.

    `factories` returns those of an application that starts now.
    """

    __slots__ = ("_factories", "_make_handle", "_routers", "_settings", "_shared_loop")

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
        self._shared_loop = shared_loop
        self._factories = factories

    async def deploy(
        self,
        running: RunningApplication,
        application: BuiltApplication,
        serving_loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start every replica of an application and return once all are ready.

        Raises `RuntimeError` with the deployment's name, from the error of the user's code. After
        an error or a cancellation, the caller's `stop` ends the replicas that exist. Replicas live
        on `serving_loop` when user code has no thread of its own.
        """
        if self._settings.run_user_code_in_separate_thread:
            counts = (each.deployment.config.replica_count for each in application.deployments)
            reserve_descriptors(sum(counts), may_raise=self._settings.raise_file_limit)
        factories = self._factories()
        for built in application.deployments:  # all at once, so that the status shows all
            running.deployments[built.name] = self._declared(built, running.name, factories)
        for deployment in running.deployments.values():
            try:
                await self._start(deployment, serving_loop, factories)
            except Exception as error:
                raise RuntimeError(
                    f"Deploying application '{running.name}' failed: deployment "
                    f"'{deployment.built.name}' failed to start: {described(error)}"
                ) from error
            # From here on handles find the deployment: the constructors of its parents, which run
            # next, may call it.
            self._routers[deployment.router.deployment_id] = deployment.router
            deployment.health = asyncio.get_running_loop().create_task(self._watch(deployment))

    def _declared(
        self, built: BuiltDeployment, app_name: str, factories: Factories
    ) -> RunningDeployment:
        """Return a deployment without replicas."""
        config = built.deployment.config
        router = factories.router(
            DeploymentID(built.name, app_name),
            config.max_queued_requests,
            backpressure=config.backpressure_config,
            max_retries=self._settings.max_retries,
            later=_later_on(asyncio.get_running_loop()),
            templates=None if built.bound_app is None else built.bound_app.templates(),
        )
        return RunningDeployment(built, router, built.bound_app)

    async def _start(
        self,
        deployment: RunningDeployment,
        serving_loop: asyncio.AbstractEventLoop,
        factories: Factories,
    ) -> None:
        config = deployment.built.deployment.config
        cls = deployment.built.deployment.func_or_class
        router = deployment.router
        borrowed = await self._loop_for(deployment.built, serving_loop, factories.new_loop)
        warn_of_capacity(deployment.built.name, cls, config.max_ongoing_requests)
        for number in range(config.replica_count):
            deployment.replicas.append(
                factories.replica(
                    ReplicaID(str(number), router.deployment_id),
                    cls,
                    deployment.bound_app,
                    max_ongoing=config.max_ongoing_requests,
                    num_cpus=config.num_cpus,
                    lanes=config.lanes,
                    sync_in_threadpool=self._settings.run_sync_in_threadpool,
                    release=router.release,
                    reassign=router.reassign,
                    resume=router.resume,
                    borrowed=borrowed,
                    stall_threshold_s=self._settings.stall_threshold_s,
                    factories=factories,
                )
            )
        create_task = asyncio.get_running_loop().create_task
        starts: list[asyncio.Task[None]] = []
        try:
            for each in deployment.replicas:
                starts.append(create_task(self._start_replica(deployment, each)))
                if borrowed is not None and len(starts) == 1:
                    # The first one may create what all share, such as a table: the others would
                    # find none, and create it at the same moment.
                    await starts[0]
            await asyncio.gather(*starts)
        finally:
            # A failure is raised at once, because another constructor may hang. And no replica may
            # start after the application was asked to stop.
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)

    async def _loop_for(
        self,
        built: BuiltDeployment,
        serving_loop: asyncio.AbstractEventLoop,
        new_loop: NewLoop,
    ) -> asyncio.AbstractEventLoop | None:
        """Return the loop that a deployment's replicas run on, `None` if each has its own."""
        if not self._settings.run_user_code_in_separate_thread:
            return serving_loop
        choice = built.deployment.config.loop
        found: LoopObject | None = None
        if choice is None:
            found = await asyncio.to_thread(next, loop_objects(built), None)  # it reads files
        if found is not None:
            logger.info(
                "%s belongs to one event loop, so the replicas of %s run on the shared loop; "
                'declare this with @serve.deployment(loop="shared"), or give each replica its own '
                'loop with loop="own"',
                found,
                built.name,
            )
        return self._shared_loop(new_loop) if choice == "shared" or found is not None else None

    async def _start_replica(self, deployment: RunningDeployment, replica: Replica) -> None:
        args, kwargs = fill(
            deployment.built.init_args,
            deployment.built.init_kwargs,
            lambda name: self._make_handle(
                DeploymentID(name, replica.replica_id.deployment_id.app_name)
            ),
        )
        await replica.start(args, kwargs, deployment.built.deployment.config.user_config)
        deployment.router.add(replica)

    async def _watch(self, deployment: RunningDeployment) -> None:
        """Check each replica's health once a period. A replica has one check at a time."""
        config = deployment.built.deployment.config
        while True:
            await asyncio.sleep(config.health_check_period_s)
            await asyncio.gather(
                *(_ask(replica, config.health_check_timeout_s) for replica in deployment.replicas)
            )

    async def stop(
        self,
        running: RunningApplication,
        timeout_s: float | None = None,
        *,
        is_replaced: bool = False,
    ) -> None:
        """Drain the requests, then stop every replica, also those whose constructors still run.

        `timeout_s` limits the drain; its default is the longest timeout of the deployments. The
        stop takes at most `LAST_WORDS_S` more. `is_replaced` says that another application serves
        on.
        """
        running.status = ApplicationStatus.DELETING
        if timeout_s is None:
            timeout_s = running.graceful_shutdown_timeout_s
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if running.deployments:  # none, if there were too few descriptors
            router = running.ingress.router
            await running.proxy.in_flight.drain(router, timeout_s, is_replaced=is_replaced)
        # Callers before their children, so that requests in flight can still reach the children.
        for deployment in reversed(list(running.deployments.values())):
            if deployment.health is not None:
                deployment.health.cancel()
            await _drained(deployment.router, deadline)
            deployment.router.refuse(
                f"{deployment.router.deployment_id} is unavailable because it was stopped."
            )
            for replica in list(deployment.router.replicas):
                deployment.router.remove(replica)
            left_s = max(0.3, deadline + LAST_WORDS_S - loop.time())
            await asyncio.gather(*(each.stop(left_s) for each in deployment.replicas))
            if self._routers.get(deployment.router.deployment_id) is deployment.router:
                del self._routers[deployment.router.deployment_id]


def described(error: BaseException) -> str:
    """Return the type and text of an error of user code, even if its `__str__` raises too."""
    return "".join(traceback.format_exception_only(error)).strip()


def _later_on(loop: asyncio.AbstractEventLoop) -> Callable[[float, Callable[[], Any]], None]:
    """Return a thread-safe function that schedules a callback on this loop after a delay."""
    mailbox = mailbox_of(loop)
    return lambda delay_s, callback: mailbox.post(loop.call_later, delay_s, callback)


async def _ask(replica: Replica, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await replica.check_health()
    except Exception as error:
        replica.unhealthy_reason = (
            f"check_health did not answer within {timeout_s} s"
            if limit.expired()
            else f"check_health raised {described(error)}"
        )
        logger.warning("%s: %s", replica.replica_id, replica.unhealthy_reason)
    else:
        replica.unhealthy_reason = ""


async def _drained(router: Router, deadline: float) -> None:
    """Wait until no call is queued or runs, or until the deadline."""
    loop = asyncio.get_running_loop()
    # Polled, so that no request pays for an event that is used once.
    while (router.num_queued or router.num_ongoing) and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
