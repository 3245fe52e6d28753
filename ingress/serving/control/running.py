"""Running applications: their deployments, the replicas that each desires, and those that it has.

Owned by the control loop; `ingress.state` reads them in any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from random import random
from typing import Any

from ingress.app.declaration.build import BuiltDeployment
from ingress.config import DeploymentConfig, FairnessConfig
from ingress.core.base.counters import ReplicaCounts
from ingress.schema import ApplicationStatus, DeploymentStatus
from ingress.serving.control.consumers import Consumer
from ingress.serving.control.factories import Factories
from ingress.serving.control.plan import (
    Desired,
    Fact,
    Observed,
    Phase,
    allowed,
    replaced_at_once,
    retry_after_s,
)
from ingress.serving.control.scaling import Scaler
from ingress.serving.http.proxy import Condition, HTTPProxy
from ingress.serving.replicas.fairness import fairness_of
from ingress.serving.replicas.host import OwnPart
from ingress.serving.replicas.replica import Replica, ReplicaState
from ingress.serving.replicas.router import Router

SHORT_LIFE_S = 10.0  # of a replica whose loss counts as one of a series
BROKEN = -1  # version of a replica that is replaced whatever its health checks say
FAILED_CHECKS = 3  # in a row; source: Ray 2.60.0, REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD


@dataclass(eq=False, slots=True)
class Looks:
    """The notes of `health` on one replica, between two looks. The reconciler sets only `check_at`.

    check        the health check that runs, or the last one; the next one begins at `check_at`
    stands       heartbeats of its loop when it was last seen to stand, and since when it does
    suspected    looks in a row at which it seemed to be stuck
    orphaned_at  since when orphans hold all its slots; they are counted again at `orphans_at`
    extra        its part of the requests by which replicas retire at different times, 0 to 1
    measuring    the measurement of its memory
    tell_at      time before which no log record tells that it is still starting
    """

    check: asyncio.Task[None] | None = None
    check_at: float = 0.0
    stands: tuple[float, float] | None = None
    suspected: int = 0
    orphaned_at: float | None = None
    orphans_at: float = 0.0
    extra: float = field(default_factory=random)
    measuring: asyncio.Task[None] | None = None
    tell_at: float = 0.0


@dataclass(eq=False, slots=True)
class Member:
    """One replica of a deployment, and what the controller knows of it. Owned by the control loop.

    Written by the reconciler:

    version, config  numbers of the code and of the `user_config` that it has
    away_at          when it was last taken out of routing, to be reconfigured
    parked_at        when it was last taken out of routing, because it is stuck
    task             its start, its reconfiguration, or its end
    has_failed       becomes true when its start fails

    Written by `health`, for the reconciler and the status:

    failures         health checks that failed, one after another
    failed_checks    health checks that failed in all
    stuck            the reason why it gets no calls although it runs, "" if it is not stuck
    worn             the limit of its life that it has reached, "" before that
    excess           the reason why it had too much memory soon after its start, "" if it had not
    looks            its own notes
    """

    replica: Replica
    number: int
    version: int
    config: int
    rank: int = 0
    phase: Phase = Phase.STARTING
    started_at: float = 0.0
    served_at: float = 0.0
    away_at: float = 0.0
    parked_at: float = 0.0
    task: asyncio.Task[None] | None = None
    has_failed: bool = False
    failures: int = 0
    failed_checks: int = 0
    stuck: str = ""
    worn: str = ""
    excess: str = ""
    looks: Looks = field(default_factory=Looks)

    @property
    def may_start(self) -> bool:
        """Return whether its start has not ended yet."""
        return self.phase is Phase.STARTING and not self.has_failed

    @property
    def is_ill(self) -> bool:
        return self.failures >= FAILED_CHECKS

    @property
    def is_stale(self) -> bool:
        """Return whether it serves until another has taken its place."""
        return self.is_ill or bool(self.worn)

    def fact(self) -> Fact:
        # A loop that other replicas share, or the server's, cannot be replaced with its replica. A
        # process is ended: it does not come back.
        isolation = self.replica.host.isolation
        killable = isolation is OwnPart.PROCESS
        is_stuck = bool(self.stuck) and isolation is OwnPart.THREAD
        # The start of a lost process fails and is counted: dropped before that, it would be tried
        # again without a pause.
        fails = killable and self.phase is Phase.STARTING
        is_lost = (self.replica.is_lost and not fails) or (killable and bool(self.stuck))
        is_lost = self.phase is not Phase.LEAVING and is_lost
        return Fact(
            self.number, self.phase, self.version, self.config, self.is_stale, is_stuck, is_lost
        )


@dataclass(frozen=True, eq=False, slots=True)
class Version:
    """The code of a deployment with its options, and the parts that its replicas are made with.

    number, config_number, count  those of `Desired`
    config     the options in use, which may have been changed since it was built
    borrowed   the loop that its replicas run on, `None` if each has its own
    scaler     decides how many replicas are desired, `None` for a fixed number
    before     the last config whose `user_config` all replicas have taken, `None` if not known
    is_watched whether its replicas are checked: the loop of a test stops at a breakpoint, and
               between two tests
    """

    built: BuiltDeployment
    config: DeploymentConfig
    factories: Factories
    number: int = 0
    config_number: int = 0
    borrowed: asyncio.AbstractEventLoop | None = None
    scaler: Scaler | None = None
    count: int = 0
    before: DeploymentConfig | None = None
    is_watched: bool = True


@dataclass(eq=False, slots=True)
class Setbacks:
    """The starts that failed and the replicas that were lost. Owned by the control loop.

    Written by the reconciler; `outgrown` and `retire_at` by `health`, `attempts` with an update.

    attempts        failed starts, one after another, before a start or an update is given up;
                    `None` for replacements and added replicas, which are tried for ever
    failed          the error of the start or update that was given up
    in_a_row        starts that failed, one after another; `failed_starts`: in all
    retry_at        time before which no replica starts
    problem         the error of the last start, "" once a start succeeds
    loss            the end of the last replica that was lost, until another one has started
    losses          replicas that ended by themselves
    crashes         replicas that were lost soon after their start, one after another
    outgrown        replicas that had too much memory soon after their start, one after another
    retire_at       time before which none is replaced for its memory
    """

    attempts: int | None = None
    failed: Exception | None = None
    in_a_row: int = 0
    failed_starts: int = 0
    retry_at: float = 0.0
    problem: str = ""
    loss: str = ""
    losses: int = 0
    crashes: int = 0
    outgrown: int = 0
    retire_at: float = 0.0

    def begin(self, attempts: int) -> None:
        """Have the replicas that start from now on given up after so many failures."""
        self.attempts, self.failed = attempts, None
        self.note_start()

    def note_start(self) -> None:
        self.in_a_row, self.retry_at, self.problem, self.loss = 0, 0.0, "", ""

    def note_failed_start(self, error: Exception, text: str, now: float) -> None:
        """Count a start that failed; the next one has to wait."""
        self.in_a_row += 1
        self.failed_starts += 1
        self.retry_at = now + retry_after_s(self.in_a_row)
        self.problem = f"a replica failed to start: {text}"
        if self.attempts is not None and self.in_a_row >= self.attempts:
            self.failed = error

    def give_up(self, error: Exception) -> None:
        """End a start or an update."""
        self.failed, self.problem = error, str(error)

    def note_loss(self, lived_s: float, text: str, now: float) -> None:
        """Count a replica that was lost; from the second in a row on, the next has to wait."""
        self.losses += 1
        self.loss = text
        self.crashes = self.crashes + 1 if lived_s < SHORT_LIFE_S else 0
        if self.crashes > 1:
            self.retry_at = now + retry_after_s(self.crashes - 1)
            self.problem = text

    def note_outgrown(self, served_s: float, now: float) -> float:
        """Count a replica with too much memory. Returns the pause until the next may retire.

        It is 0 for one that has served long: otherwise the next would have as much, and the
        deployment would do nothing but start replicas.
        """
        self.outgrown = self.outgrown + 1 if served_s < SHORT_LIFE_S else 0
        pause_s = retry_after_s(self.outgrown) if self.outgrown else 0.0
        self.retire_at = now + pause_s
        return pause_s


@dataclass(eq=False, slots=True)
class RunningDeployment:
    """One deployment's router and replicas. Owned by the control loop; any thread may read.

    Written by the controller and by `changes`: the replicas that it should have.

    using          the version in use: replaced as a whole
    desired        the replicas that it should have
    previous       the version before the update that is going on, `None` if none is
    next_config    number of the last `user_config`
    next_version   number of the last version
    resized        the last change of the number of replicas
    is_ending      becomes true before it stops: none starts in the place of one that serves
    has_started    becomes true when the replicas of the first start serve
    is_untried     true after a change of `user_config` until a replica has taken it
    rejected       why the last change was given up, "" if it was not; the reconciler gives up
    consumer       runs the jobs of its queue, `None` if it has none

    Written by the reconciler: the replicas that it has.

    left           replicas that have stopped, but whose threads still run user code
    rushed         is set when replicas that drain are to stop at once
    is_look_due    replicas have started that are looked at soon, together
    ended          the counters of replicas that have ended, by their ids
    changed        is set, and replaced, at each change
    """

    router: Router
    proxy: HTTPProxy
    using: Version
    desired: Desired = field(default_factory=lambda: Desired(0))
    previous: Version | None = None
    next_config: int = 0
    next_version: int = 0
    resized: int = 0
    is_ending: bool = False
    has_started: bool = False
    is_untried: bool = False
    rejected: str = ""
    consumer: Consumer | None = None
    members: list[Member] = field(default_factory=list)
    left: list[Replica] = field(default_factory=list)
    next_number: int = 0
    is_stopping: bool = False
    rushed: asyncio.Event = field(default_factory=asyncio.Event)
    is_look_due: bool = False
    setbacks: Setbacks = field(default_factory=Setbacks)
    ended: dict[str, ReplicaCounts] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def built(self) -> BuiltDeployment:
        return self.using.built

    @property
    def config(self) -> DeploymentConfig:
        """The options in use."""
        return self.using.config

    @property
    def replicas(self) -> list[Replica]:
        return [each.replica for each in list(self.members)]

    @property
    def starting(self) -> list[Replica]:
        """The replicas whose constructors have not returned."""
        return [each for each in self.replicas if each.state is ReplicaState.STARTING]

    @property
    def stuck(self) -> list[Member]:
        return [each for each in list(self.members) if each.stuck]

    def desire(self, *, count: int | None = None, **changes: int | bool) -> None:
        """Change the desired replicas."""
        count = self.desired.count if count is None else count
        if count != self.desired.count:
            self.resized = count - self.desired.count
        config = self.config
        at_once = replaced_at_once(
            count, config.rolling_update_percentage, config.max_surge_percent
        )
        self.desired = replace(
            self.desired,
            count=count,
            at_once=0 if self.is_ending else at_once,
            **changes,  # type: ignore[arg-type]
        )

    def observed(self, facts: Sequence[Fact]) -> Observed:
        return Observed(facts, len(self.left), self.setbacks.retry_at)

    def cap(self, stuck: int) -> str:
        """Return why too many replicas are stuck for others to start, "" if others may."""
        if not stuck > self.desired.count > 0:
            return ""
        texts = [f"{each.replica.replica_id}: {each.stuck}" for each in self.stuck]
        texts += [f"{each.replica_id} has stopped, and its code runs on" for each in self.left]
        return (
            f"{stuck} replicas are stuck, and no more are started until one goes on: "
            f"{'; '.join(texts)}. Give what their code waits for a timeout; a stuck replica with "
            'isolation="process" is ended and replaced'
        )

    @property
    def stopped(self) -> str:
        """The reason why it serves no calls once it has stopped."""
        return f"{self.router.deployment_id} is unavailable because it was stopped."

    def serving(self) -> int:
        """Return the number of replicas that get calls."""
        return sum(each.phase is Phase.SERVING for each in list(self.members))

    def room(self) -> int:
        """Return the number of free slots of the replicas that get calls."""
        serving = [each.replica.slots for each in list(self.members) if each.phase is Phase.SERVING]
        return sum(max(0, each.max_ongoing - each.ongoing) for each in serving)

    def slots_of(self, key: str) -> float:
        """Return the number of jobs of a fairness key's turn."""
        return (self.config.fairness_config or FairnessConfig()).slots_of(key)

    def waiting(self) -> int:
        """Return the number of calls and jobs that wait for a slot."""
        jobs = 0 if self.consumer is None else self.consumer.waiting()
        return self.router.num_queued + jobs

    def has_replacements(self) -> bool:
        """Return whether as many replicas serve as may, beside those that are stuck."""
        count = self.desired.count
        return self.serving() >= max(
            allowed(count, len(self.stuck) + len(self.left)), min(count, 1)
        )

    def is_ready(self) -> bool:
        """Return whether it has a replica for its calls, or should have none."""
        if not self.desired.count:
            return True
        phases = {each.phase for each in list(self.members)}
        return Phase.SERVING in phases or Phase.AWAY in phases

    def is_quiet(self) -> bool:
        """Return whether there is nothing to decide: a short answer for most looks."""
        desired = self.desired
        if len(self.members) != desired.count or self.left or self.resized:
            return False
        return not any(
            each.phase is not Phase.SERVING
            or each.version != desired.version
            or each.config != desired.config
            or each.stuck
            or each.is_stale
            or each.replica.is_lost
            for each in self.members
        )

    def is_settled(self) -> bool:
        """Return whether the replicas are those that are desired, and all others have ended."""
        desired = self.desired
        live = [each for each in self.members if each.phase is not Phase.PARKED]
        # Replicas that are stuck limit the starts only: there may be more that serve.
        least = allowed(desired.count, len(self.members) - len(live) + len(self.left))
        return least <= len(live) <= desired.count and all(
            each.phase is Phase.SERVING
            and each.version == desired.version
            and each.config == desired.config
            and not each.is_ill
            for each in live
        )

    def change_user_config(self, config: DeploymentConfig) -> None:
        """Use a config with another `user_config`; the replicas get it one after another."""
        # Race with the change before, which may fail yet: the deployment never returns to that.
        before = self.using.before
        if before is None or self._has_taken_config():
            before = self.config
        self.using = replace(self.using, config=config, before=before)
        self.next_config += 1
        self.is_untried, self.rejected = True, ""
        self.desire(config=self.next_config)

    def _has_taken_config(self) -> bool:
        """Return whether a replica has the `user_config`, and none has another one."""
        members = [each for each in self.members if each.phase is not Phase.LEAVING]
        return any(each.phase is Phase.SERVING for each in members) and all(
            each.phase is not Phase.AWAY and each.config == self.desired.config for each in members
        )

    def note_config(self, member: Member) -> None:
        """Note that a replica has taken its `user_config`."""
        if member.config == self.desired.config:
            self.is_untried = False

    def reject_user_config(self, problem: str) -> None:
        """Return to the `user_config` before the last change, which failed."""
        self.rejected = f"{problem}; the user_config before is in use"
        self.is_untried = False
        before = self.using.before
        if before is None or before.user_config == self.config.user_config:
            return  # the return itself failed: the replica is replaced
        config = self.config.with_options(user_config=before.user_config)
        self.using = replace(self.using, config=config)
        self.next_config += 1
        self.desire(config=self.next_config)

    def note_change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def begin_rollout(self) -> None:
        """Have the replicas that start from now on given up after too many failures.

        `max_constructor_retry_count` counts only if it was given: by default the first failure is
        reported at once.
        """
        is_given = "max_constructor_retry_count" in self.config.model_fields_set
        self.setbacks.begin(1 + self.config.max_constructor_retry_count if is_given else 1)

    def version(self) -> Version:
        """Return the version that is desired."""
        desired = self.desired
        return replace(
            self.using, number=desired.version, config_number=desired.config, count=desired.count
        )

    def use(self, version: Version) -> None:
        """Desire replicas of a version. Those of another one are replaced."""
        config, fairness = version.config, fairness_of(version.config)
        self.using, self.is_untried, self.rejected = version, False, ""
        bound_app = version.built.bound_app
        self.router.limit(config.max_queued_requests, config.backpressure_config, fairness)
        self.router.graceful_shutdown_timeout_s = config.graceful_shutdown_timeout_s
        self.router.bound_app = bound_app
        if bound_app is not None:
            self.router.templates = bound_app.templates()
        self.desire(count=version.count, version=version.number, config=version.config_number)

    def is_updating(self) -> bool:
        """Return whether an update of the application has yet to replace all its replicas."""
        if self.previous is None:
            return False
        return self.setbacks.attempts is not None or self.desired.version == self.previous.number

    def roll_back(self) -> None:
        """Desire the version before an update that was given up, as if it had not begun."""
        version, self.previous = self.previous, None
        self.setbacks.failed = self.setbacks.attempts = None
        self.setbacks.note_start()
        if version is not None and version.number != self.desired.version:
            self.use(version)

    def end_rollout(self) -> None:
        """Have the replicas that start from now on tried for ever: they replace others."""
        self.has_started = True
        self.setbacks.attempts = None
        self.resized = 0

    def trouble(self) -> str:
        """Return why the deployment is unhealthy, "" if it is healthy."""
        members = list(self.members)
        ill = [f"{each.replica.replica_id}: {each.replica.unhealthy_reason}" for each in members
               if each.is_ill and each.phase is not Phase.LEAVING]  # fmt: skip
        if ill:
            return "; ".join(ill)
        stuck = [each for each in members if each.stuck]
        if cap := self.cap(len(stuck) + len(self.left)):
            return cap
        if stuck and (self.using.borrowed is not None or not self.serving()):
            return "; ".join(f"{each.replica.replica_id}: {each.stuck}" for each in stuck)
        if self.has_started and self.setbacks.problem and self.serving() < self.desired.count:
            return self.setbacks.problem
        return ""

    def _size(self) -> DeploymentStatus:
        """Return the status of a healthy deployment that has started."""
        if not self.resized or self.is_settled():
            return DeploymentStatus.HEALTHY
        return DeploymentStatus.UPSCALING if self.resized > 0 else DeploymentStatus.DOWNSCALING

    def status(self, serving: RunningDeployment | None = None) -> tuple[DeploymentStatus, str, str]:
        """Return the status, its trigger and a message.

        `serving` is the deployment to be replaced, whose router is in use.
        """
        if serving is self:  # its replicas are replaced one after another
            serving = None
        members = [*(list(serving.members) if serving is not None else ()), *list(self.members)]
        starting = not self.has_started or self.is_updating()
        status = DeploymentStatus.UPDATING if starting else self._size()
        stuck = [f"{each.replica.replica_id}: {each.stuck}" for each in members if each.stuck]
        excess = [f"{each.replica.replica_id}: {each.excess}" for each in members if each.excess]
        loss = self.setbacks.loss if self.serving() < self.desired.count else ""
        message = self.rejected or self.setbacks.problem or loss or "; ".join(stuck or excess)
        trouble = self.trouble() or ("" if serving is None else serving.trouble())
        if trouble:
            status, message = DeploymentStatus.UNHEALTHY, trouble
        if self.setbacks.failed is not None:
            status, message = DeploymentStatus.DEPLOY_FAILED, self.setbacks.problem
        trigger = "CONFIG_UPDATE_STARTED" if starting else "CONFIG_UPDATE_COMPLETED"
        return status, trigger, message


@dataclass(eq=False, slots=True)
class RunningApplication:
    """One application, its deployments in build order: the last one receives the requests.

    `callers_loop` is the loop that its replicas in threads run on if no server calls it, see
    `engines.hosting`. `consumers`, by deployment, begin with it. `keeps_same` says that an update
    keeps the replicas of deployments that are the same as before.
    """

    name: str
    route_prefix: str | None
    proxy: HTTPProxy
    app: Any = None  # of the user, for answers while it starts
    deployments: dict[str, RunningDeployment] = field(default_factory=dict)
    status: ApplicationStatus = ApplicationStatus.DEPLOYING
    message: str = ""
    deployed_at_s: float = field(default_factory=lambda: datetime.now(UTC).timestamp())
    stopping: asyncio.Task[None] | None = None
    callers_loop: asyncio.AbstractEventLoop | None = None
    consumers: dict[str, Consumer] = field(default_factory=dict)
    keeps_same: bool = False

    @property
    def ingress(self) -> RunningDeployment:
        return list(self.deployments.values())[-1]

    def keep(self) -> None:
        """End an update that has succeeded: from here on it cannot be rolled back."""
        for deployment in self.deployments.values():
            deployment.previous = None

    def condition(self, not_ready_after_s: float | None = None) -> Condition:
        """Return which deployments are unhealthy, or not ready. Thread-safe.

        One whose calls have held all slots for `not_ready_after_s` is not ready. Only names and
        states: any client may see them, and `trouble` quotes user code.
        """
        unhealthy, without = [], []
        for each in list(self.deployments.values()):
            name = f"{self.name}: {each.built.name}"
            if each.trouble():
                unhealthy.append(f"{name} is unhealthy")
            if not each.is_ready():
                without.append(f"{name} has no replica that serves")
            elif not_ready_after_s and (held_s := each.router.held_s()) >= not_ready_after_s:
                without.append(f"{name}: all slots are held, no call has ended for {held_s:.0f} s")
        return Condition("; ".join(unhealthy), "; ".join(without))

    @property
    def graceful_shutdown_timeout_s(self) -> float:
        """The longest timeout of the application's deployments."""
        return max(each.config.graceful_shutdown_timeout_s for each in self.deployments.values())
