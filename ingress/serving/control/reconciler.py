"""The loop that makes replicas those that are desired: it looks, decides, and acts.

    look -> health.observe: facts -> plan.decide: actions -> start, drop, park, return, reconfigure

One loop for all deployments of a process. It looks at each five times a second, and at once where
something has changed. Owned by the control loop, where no user code runs while user code has loops
of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ingress.app.declaration.build import fill
from ingress.core.base.counters import keep
from ingress.core.base.settings import Settings
from ingress.core.base.types import DeploymentID, ReplicaID, ReplicaPlace, ReplicaRank
from ingress.core.calls.loops import mailbox_of, reserve_descriptors
from ingress.exceptions import DeploymentUnavailableError
from ingress.handle import DeploymentHandle
from ingress.serving.control.health import observe
from ingress.serving.control.plan import ActionKind, Observed, Phase, decide, is_blocked, num_stuck
from ingress.serving.control.running import BROKEN, FAILED_CHECKS, Member, RunningDeployment
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.logs import logger
from ingress.telemetry.metrics.series import replica_ended, source_of
from ingress.telemetry.mistakes import described

LOOK_S = 0.2
SCALE_S = 0.1  # where there is autoscaling: the first request to no replica waits for this
LATE_S = 1.0  # a look that comes later says nothing about loops: the process was stopped
DRAIN_LOOK_S = 0.005  # the first pause between two looks at a replica that drains
FEW = 64  # replicas that are looked at after each start
SHARED_LOOK_S = 0.02  # from the first start of more replicas until they are looked at
COMPARE_S = 0.5  # for the other replicas that start, before the error of one is final
LAST_WORDS_S = 0.5  # for the user's shutdown code and the joining of threads, after the drain

_OPENS_ONCE = (
    "Another replica of this deployment has started. Constructors and lifespans run for each "
    "replica. If they open or register what can be there only once, such as a port, a lock or a "
    "collector of metrics: do it once, at the top of the module; make one for each replica, such "
    "as in `__serve_build_asgi_app__(self)`, which returns its app; or set num_replicas=1"
)

MakeHandle = Callable[[DeploymentID], DeploymentHandle]


@dataclass(eq=False, slots=True)
class Reconciler:
    """The one place that starts, replaces, drains and stops the replicas of running deployments.

    Owned by the control loop.
    """

    _settings: Settings
    _make_handle: MakeHandle
    _deployments: list[RunningDeployment] = field(default_factory=list)
    _looking: asyncio.Task[None] | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def add(self, deployment: RunningDeployment) -> None:
        """Begin to make a deployment's replicas those that it desires."""
        self._deployments.append(deployment)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look_on())
        self.look(deployment)

    def discard(self, deployment: RunningDeployment) -> None:
        """Leave a deployment's replicas as they are."""
        deployment.is_stopping = True
        if deployment in self._deployments:
            self._deployments.remove(deployment)
        deployment.note_change()  # for `settled`

    async def settled(self, deployment: RunningDeployment) -> None:
        """Wait until the replicas are those that are desired.

        Raises the error of a start, and `DeploymentUnavailableError` once the deployment stops.
        """
        while deployment.setbacks.failed is None and not deployment.is_settled():
            if deployment.is_stopping:
                raise DeploymentUnavailableError(deployment.stopped)
            await deployment.changed.wait()
        if deployment.setbacks.failed is not None:
            raise deployment.setbacks.failed

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        due = observe_at = loop.time()
        while self._deployments:
            now = loop.time()
            is_late, is_time = now - due > LATE_S, now >= observe_at
            if is_time:
                observe_at = now + LOOK_S
            for deployment in list(self._deployments):
                try:
                    if is_time and not is_late:
                        observe(deployment, now, self._settings.wedged_after_s)
                    if self._scale(deployment, now) or is_time:
                        self.look(deployment)
                except Exception:  # one deployment must not end the look at all others
                    logger.exception("the control plane failed at %s", deployment.built.name)
            pause_s = SCALE_S if any(each.using.scaler for each in self._deployments) else LOOK_S
            due = loop.time() + pause_s
            await asyncio.sleep(pause_s)
        self._looking = None

    def _scale(self, deployment: RunningDeployment, now: float) -> bool:
        """Have a deployment desire as many replicas as its load needs. Returns False if it does."""
        scaler = deployment.using.scaler
        if scaler is None or not deployment.has_started or deployment.is_stopping:
            return False
        live = [each for each in deployment.members if each.phase in (Phase.SERVING, Phase.AWAY)]
        queued = deployment.waiting()
        scaler.note(now, queued + sum(each.replica.ongoing for each in live), queued)
        if hasattr(deployment.built.deployment.func_or_class, "record_autoscaling_stats"):
            scaler.record(now, [each.replica for each in live])
        target = deployment.desired.count
        running = [each.replica.replica_id for each in live]
        count = scaler.decide(now, deployment.router.deployment_id, running, target)
        if count == target:
            return False
        logger.info("%s: %d replicas -> %d", deployment.router.deployment_id, target, count)
        deployment.desire(count=count)
        deployment.note_change()
        return True

    def look(self, deployment: RunningDeployment) -> None:
        """Decide about a deployment, and act."""
        has_failed = deployment.setbacks.failed is not None
        if deployment.is_stopping or has_failed or deployment.is_quiet():
            return
        now = asyncio.get_running_loop().time()
        observed = self._observed(deployment, now)
        if observed is None:
            return
        actions = decide(deployment.desired, observed, now)
        members = {each.number: each for each in deployment.members}
        for action in actions:
            if action.number is None:
                self._start(deployment, now)
                continue
            member = members[action.number]
            match action.kind:
                case ActionKind.DROP:
                    self._drop(deployment, member)
                case ActionKind.PARK:
                    deployment.router.remove(member.replica)
                    member.phase, member.parked_at = Phase.PARKED, now
                case ActionKind.RETURN if member.task is not None and not member.task.done():
                    member.phase = Phase.AWAY  # its reconfiguration has yet to end
                case ActionKind.RETURN:
                    deployment.router.add(member.replica)
                    member.phase = Phase.SERVING
                case ActionKind.RECONFIGURE if member.phase is Phase.SERVING:
                    self._take_away(deployment, member)
        for member in deployment.members:
            if member.phase is Phase.PARKED:
                self._relieve(deployment, member, now)
        if deployment.resized and deployment.is_settled():
            deployment.resized = 0
        if actions:
            deployment.note_change()

    def _relieve(self, deployment: RunningDeployment, member: Member, now: float) -> None:
        """Send the calls that a stuck replica has not begun elsewhere; end the others in the end.

        Those get the time that a drain would give them, and until another replica serves.
        """
        replica = member.replica
        if handed := replica.hand_over():
            logger.warning(
                "%s: the requests that it has not begun go to other replicas: %d",
                replica.replica_id,
                handed,
            )
        grace_s = deployment.config.graceful_shutdown_timeout_s
        if now - member.parked_at < grace_s or not deployment.has_replacements():
            return
        if ended := replica.give_up(member.stuck):
            logger.error(
                "%s has been stuck for graceful_shutdown_timeout_s=%g; the requests that it has "
                "begun end with an error: %d",
                *(replica.replica_id, grace_s, ended),
            )

    def _observed(self, deployment: RunningDeployment, now: float) -> Observed | None:
        """Return the replicas as they are, `None` if a start or an update is given up."""
        # Race with the end of a loop: asked twice, it might be dropped without having been noted.
        facts = [each.fact() for each in deployment.members]
        for member, fact in zip(deployment.members, facts, strict=True):
            if fact.is_lost and member.replica.is_lost:
                self._note_loss(deployment, member, now)
        observed = deployment.observed(facts)
        # An update would wait for ever for replicas that are not started.
        if deployment.setbacks.attempts is not None and is_blocked(deployment.desired, observed):
            cap = deployment.cap(num_stuck(observed))
            deployment.setbacks.give_up(RuntimeError(f"{cap}; restart the process"))
            deployment.note_change()
        return observed if deployment.setbacks.failed is None else None

    def _note_loss(self, deployment: RunningDeployment, member: Member, now: float) -> None:
        """Count a replica whose loop has ended; `decide` drops it."""
        replica = member.replica
        if member.phase is Phase.STARTING:
            self._on_failed_start(deployment, RuntimeError(replica.host.end))
            if deployment.setbacks.failed is not None:  # there is no decision
                self._drop(deployment, member)
            return
        if member.phase is Phase.AWAY and replica.is_reconfiguring:
            self._on_failed_reconfigure(deployment, member, "ended its replica")
        text = f"{replica.gone_error()}{replica.host.last_output}"
        deployment.setbacks.note_loss(now - member.started_at, text, now)

    def spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task of its own."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # A start.

    def _start(self, deployment: RunningDeployment, now: float) -> None:
        try:
            member = self._new_member(deployment, now)
        except Exception as error:  # no descriptors, or an app that has no copy: logged
            self._on_failed_start(deployment, error)
            return
        deployment.members.append(member)
        member.task = self.spawn(self._run_start(deployment, member))

    def _new_member(self, deployment: RunningDeployment, now: float) -> Member:
        if deployment.using.borrowed is None and deployment.has_started:
            reserve_descriptors(1, may_raise=self._settings.raise_file_limit)
        config, router = deployment.config, deployment.router
        is_watched = deployment.using.is_watched
        number = deployment.next_number
        deployment.next_number += 1
        make_host = deployment.using.factories.thread_host
        if config.isolation == "process":
            control = mailbox_of(asyncio.get_running_loop())
            make_host = partial(
                deployment.using.factories.process_host,
                built=deployment.built,
                make_handle=self._make_handle,
                on_lost=partial(control.post, self.look, deployment),
            )
        replica = deployment.using.factories.replica(
            ReplicaID(str(number), router.deployment_id),
            partial(
                make_host,
                func_or_class=deployment.built.deployment.func_or_class,
                bound_app=deployment.built.bound_app,
                num_cpus=config.num_cpus,
                lanes=config.lanes,
                sync_in_threadpool=self._settings.run_sync_in_threadpool,
                borrowed=deployment.using.borrowed,
                stall_threshold_s=self._settings.stall_threshold_s if is_watched else None,
                factories=deployment.using.factories,
            ),
            max_ongoing=config.max_ongoing_requests,
            release=router.release,
            reassign=router.reassign,
            resume=router.resume,
        )
        desired = deployment.desired
        taken = {each.rank for each in deployment.members if each.phase is not Phase.LEAVING}
        rank = next(each for each in range(len(taken) + 1) if each not in taken)
        place = ReplicaPlace(ReplicaRank(rank, 0, rank), desired.count, str(desired.version))
        replica.context.place = place
        return Member(
            replica,
            number,
            desired.version,
            desired.config,
            rank,
            started_at=now,
        )

    async def _run_start(self, deployment: RunningDeployment, member: Member) -> None:
        replica, built = member.replica, deployment.built
        app_name = replica.replica_id.deployment_id.app_name
        try:
            args, kwargs = fill(
                built.init_args,
                built.init_kwargs,
                lambda name: self._make_handle(DeploymentID(name, app_name)),
            )
            await replica.start(args, kwargs, deployment.config.user_config)
        except Exception as error:  # of user code; `_on_failed_start` logs it
            if member.phase is Phase.STARTING:
                await self._compare(deployment, member, error)
            if member.phase is Phase.STARTING:
                # Without a replica that could refuse it: those before have failed to reconfigure.
                if deployment.is_untried and member.config == deployment.desired.config:
                    deployment.reject_user_config(f"a replica failed to start: {described(error)}")
                self._on_failed_start(deployment, error)
                self._drop(deployment, member)
            return
        # Race with a stop or a drop, which happened while the constructor ran its last lines: they
        # cancel this task, but the replica's loop may have ended the start already.
        if member.phase is not Phase.STARTING or deployment.is_stopping:
            return
        member.served_at = asyncio.get_running_loop().time()
        is_watched, period_s = deployment.using.is_watched, deployment.config.health_check_period_s
        member.looks.check_at = member.served_at + period_s if is_watched else math.inf
        member.phase = Phase.SERVING
        self._fit(deployment, member)
        deployment.router.add(replica)
        deployment.note_config(member)
        deployment.setbacks.note_start()
        # A look takes as long as there are replicas: many that start together share one.
        if len(deployment.members) <= FEW:
            self._look_and_tell(deployment)
        elif not deployment.is_look_due:
            deployment.is_look_due = True
            asyncio.get_running_loop().call_later(SHARED_LOOK_S, self._look_and_tell, deployment)

    async def _compare(
        self, deployment: RunningDeployment, member: Member, error: Exception
    ) -> None:
        """Note on the error of a start that another replica has started.

        Replicas start together, and the first one that ends may be the one that fails: others get a
        moment to end too. An error that all of them have gets no note.
        """
        member.has_failed = True
        deployment.note_change()  # others may wait for it
        if len(deployment.members) > FEW:  # each would look at all others after each failure
            return
        others = [each for each in deployment.members if each.version == member.version]
        with suppress(TimeoutError):
            async with asyncio.timeout(COMPARE_S):
                while not any(each.phase is Phase.SERVING for each in others):
                    if not any(each.may_start for each in others):
                        return
                    await deployment.changed.wait()
                error.add_note(_OPENS_ONCE)

    def _look_and_tell(self, deployment: RunningDeployment) -> None:
        deployment.is_look_due = False
        self.look(deployment)
        deployment.note_change()

    def _on_failed_start(self, deployment: RunningDeployment, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        deployment.setbacks.note_failed_start(error, described(error), now)
        if deployment.setbacks.failed is None:
            logger.error(
                "a replica of %s failed to start; the next attempt is in %.1f s",
                deployment.router.deployment_id,
                deployment.setbacks.retry_at - now,
                exc_info=error,
            )
        deployment.note_change()

    def _fit(self, deployment: RunningDeployment, member: Member) -> None:
        """Give a replica the limits that were changed while it started or was away."""
        max_ongoing = deployment.config.max_ongoing_requests
        if member.replica.slots.max_ongoing != max_ongoing:
            member.replica.host.add_threads(max_ongoing)
            deployment.router.resize(member.replica, max_ongoing)

    def resize(self, deployment: RunningDeployment) -> None:
        """Give all replicas the number of slots that the options say now."""
        for member in deployment.members:
            self._fit(deployment, member)

    # An end.

    def _drop(self, deployment: RunningDeployment, member: Member) -> None:
        """Take a replica out of routing; it ends once its calls have ended."""
        task, phase = member.task, member.phase
        member.phase = Phase.LEAVING
        if phase is Phase.SERVING:
            deployment.router.remove(member.replica)
        elif task is not None and task is not asyncio.current_task():  # it starts, or it is away
            task.cancel()
        if member.stuck:
            member.replica.hand_over()  # at once; `observe` does so again for those on their way
        member.task = self.spawn(self._run_end(deployment, member))

    async def _run_end(self, deployment: RunningDeployment, member: Member) -> None:
        replica, loop = member.replica, asyncio.get_running_loop()
        deadline = loop.time() + deployment.config.graceful_shutdown_timeout_s
        if not replica.is_lost:
            await self._drain(deployment, member, deadline)
        left_s = 0.0 if deployment.rushed.is_set() else deadline - loop.time()
        await self._end(replica, max(0.0, left_s) + LAST_WORDS_S)
        if replica.is_left_behind:
            deployment.left.append(replica)
        keep(deployment.ended, replica.replica_id.unique_id, replica.counts())
        deployment.members.remove(member)
        self._look_and_tell(deployment)

    async def _drain(self, deployment: RunningDeployment, member: Member, deadline: float) -> None:
        """Wait for the calls of a replica that gets no more, and cancel the rest at the deadline.

        Race with `Router.assign` in another thread: it counts a slot under the router's lock before
        it starts the call, so a call that was assigned before the replica was removed is counted.
        """
        replica = member.replica
        in_flight, loop = deployment.proxy.in_flight, asyncio.get_running_loop()
        longest_s = max(DRAIN_LOOK_S, deployment.config.graceful_shutdown_wait_loop_s)
        pause_s = DRAIN_LOOK_S
        while replica.ongoing and not deployment.rushed.is_set() and loop.time() < deadline:
            in_flight.restart_websockets(replica)
            # Polled, so that no request pays for an event that is used once.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, deadline - loop.time())):
                    await deployment.rushed.wait()
            pause_s = min(2 * pause_s, longest_s)
        if member.stuck:
            replica.give_up(member.stuck)
        elif replica.ongoing:
            in_flight.stop_on(replica)

    # A change of `user_config`.

    def _take_away(self, deployment: RunningDeployment, member: Member) -> None:
        user_config = deployment.config.user_config
        if user_config is None:  # there is no call that takes a configuration away
            member.version = BROKEN
            return
        deployment.router.remove(member.replica)
        member.phase = Phase.AWAY
        member.away_at = asyncio.get_running_loop().time()
        member.config = deployment.desired.config
        member.task = self.spawn(self._run_reconfigure(deployment, member, user_config))

    async def _run_reconfigure(
        self, deployment: RunningDeployment, member: Member, user_config: object
    ) -> None:
        replica, loop = member.replica, asyncio.get_running_loop()
        deadline = loop.time() + deployment.config.graceful_shutdown_timeout_s
        while replica.ongoing and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        if replica.is_lost:  # before it was asked
            self.look(deployment)
            return
        try:
            await replica.reconfigure(user_config)
        except Exception as error:
            logger.error("reconfigure failed in %s", replica.replica_id, exc_info=error)
            self._on_failed_reconfigure(deployment, member, f"raised {described(error)}")
        else:
            deployment.note_config(member)
        if member.phase is Phase.AWAY and not deployment.is_stopping and not replica.is_lost:
            member.phase = Phase.SERVING
            self._fit(deployment, member)
            deployment.router.add(replica)
        self._look_and_tell(deployment)

    def _on_failed_reconfigure(
        self, deployment: RunningDeployment, member: Member, text: str
    ) -> None:
        """Return to the `user_config` before; the replica, whose state is unknown, is replaced."""
        desired = deployment.desired
        # Race with another change and with an update: then this is not the config in use any more.
        if (member.version, member.config) == (desired.version, desired.config):
            deployment.reject_user_config(f"reconfigure {text}")
        # Race with a health check, which would make it healthy again: it is of no version.
        member.version = BROKEN
        member.failures = FAILED_CHECKS
        member.replica.unhealthy_reason = f"reconfigure {text}"

    async def stop(self, deployment: RunningDeployment, timeout_s: float) -> None:
        """Stop all replicas of a discarded deployment, also those that start or drain, at once."""
        deployment.rushed.set()
        for replica in list(deployment.router.replicas):
            deployment.router.remove(replica)
        ends: list[Awaitable[None]] = []
        for member in list(deployment.members):
            if member.looks.check is not None:
                member.looks.check.cancel()
            if member.phase is Phase.LEAVING and member.task is not None:
                ends.append(self._hurry(member, member.task, timeout_s))
                continue
            # A constructor has no requests to end, and may hang.
            is_starting = member.phase is Phase.STARTING
            member.phase = Phase.LEAVING
            if member.task is not None:
                member.task.cancel()
            left_s = min(timeout_s, LAST_WORDS_S) if is_starting else timeout_s
            ends.append(self._end(member.replica, left_s))
        await asyncio.gather(*ends)

    async def _hurry(self, member: Member, end: asyncio.Task[None], timeout_s: float) -> None:
        """Wait for the end of a replica that leaves already, which may have more time."""
        await asyncio.wait([end], timeout=timeout_s)
        if not end.done():
            logger.error(
                "%s did not stop within %.1f s; ingress waits no longer",
                member.replica.replica_id,
                timeout_s,
            )
            end.cancel()
            await asyncio.wait([end])
            await self._end(member.replica, 0.0)

    async def _end(self, replica: Replica, timeout_s: float) -> None:
        await replica.stop(timeout_s)
        replica_ended(source_of(replica.context, replica.host.pid))
