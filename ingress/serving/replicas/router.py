"""The router of a deployment: its queue, and the slots of its replicas.

    assign    reserve a slot, queue the call at the end, or refuse it, in one critical section
    release   take a slot back and hand it to the first waiting call, in one critical section
    reassign  `assign` for a call whose replica was gone before the call began; it is queued first

A free slot goes to a waiting call at once, and calls are served in order of arrival. The exceptions
are overload, `replicas.overload`, which gives calls with a deadline another order, and fairness
keys, `replicas.fairness`, by which calls take turns. The lock is held for a few lines, in which the
default policy chooses; others rank the replicas before, without it. It is never held while another
lock is taken, and no callback of a call runs under it.

`Admission` says whether a replica may get a call now. One that begins calls late is held: the calls
that it cannot begin yet wait in the queue, where they can still go to another replica, be overtaken
or be shed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import chain
from random import random
from time import monotonic
from typing import Any

from ingress.app.asgi.spec import BoundApp
from ingress.app.asgi.template import RouteTemplates
from ingress.config import BackpressureConfig, RequestRouterConfig
from ingress.core.base.counters import HTTPCounts
from ingress.core.base.types import DeploymentID
from ingress.core.calls import retries
from ingress.core.calls.call import Call
from ingress.core.calls.deadlocks import check_deadlock
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ingress.handle import BoundInvocation
from ingress.serving.replicas.admission import (
    FULL,
    HELD,
    REMOVED,
    Admission,
    AdmittingRunner,
)
from ingress.serving.replicas.choosing import Chooser, RoutedCalls, TwoChoices, policy_of
from ingress.serving.replicas.fairness import FairCalls, Fairness
from ingress.serving.replicas.overload import Shed, UsualTimes, WaitingCalls


class Router:
    """The router of one deployment, for all its callers. Thread-safe.

    `max_queued_requests` is -1 for no limit; `backpressure` says how a call beyond it is refused.
    `key_of` returns the fairness key of a request, `None` if requests have none.
    `later(delay_s, callback)` calls `callback` after a delay, on one of the framework's loops.
    """

    __slots__ = (
        "_backpressure", "_bound", "_chooser", "_fairness", "_held", "_holders", "_idle", "_last",
        "_later", "_lock", "_max_retries", "_policy", "_refuses", "_resting", "_sent_on", "_usual",
        "_waiting", "available", "bound_app", "deployment_id", "graceful_shutdown_timeout_s",
        "http", "key_of", "max_queued_requests", "num_expired", "num_rejected", "num_requests",
        "num_retries", "num_shed", "replicas", "templates",
    )  # fmt: skip

    def __init__(
        self,
        deployment_id: DeploymentID,
        max_queued_requests: int = -1,
        *,
        backpressure: BackpressureConfig | None = None,
        max_retries: int = 10,
        later: Callable[[float, Callable[[], Any]], Any] = lambda delay_s, callback: callback(),
        bound_app: BoundApp | None = None,
        routing: RequestRouterConfig | None = None,
        fairness: Fairness | None = None,
        graceful_shutdown_timeout_s: float = 20.0,
    ) -> None:
        self.deployment_id = deployment_id
        self.bound_app = bound_app  # of `@serve.ingress`
        self.templates = RouteTemplates() if bound_app is None else bound_app.templates()
        self.graceful_shutdown_timeout_s = graceful_shutdown_timeout_s
        self._max_retries = max_retries
        self._later = later
        self.num_requests = 0  # accepted so far: `serve_num_router_requests`
        self.num_rejected = self.num_shed = self.num_retries = self.num_expired = 0
        self.http = HTTPCounts()
        self.replicas: list[AdmittingRunner] = []
        self._policy = TwoChoices()
        self._lock = threading.Lock()
        # Of the replicas with a free slot, in no order. The proxy looks whether there is one.
        self.available: list[Admission] = []
        # Of the replicas with all slots free; the last one is chosen next.
        self._idle: OrderedDict[Admission, None] = OrderedDict()
        self._last: Admission | None = None  # of the replica chosen last
        self._usual = UsualTimes()
        self._chooser: Chooser | None = None
        self._waiting = WaitingCalls(self._usual)
        policy = policy_of(routing, deployment_id)
        if policy is not None:
            self._waiting = waiting = RoutedCalls(self._usual)
            self._chooser = Chooser(
                policy,
                deployment_id.name,
                routing or RequestRouterConfig(),
                self.place,
                self._fail,
                partial(self._listed, waiting),
            )
        self.limit(max_queued_requests, backpressure, fairness)
        self._resting: set[Call] = set()  # the calls that go to another replica after a pause
        self._sent_on: dict[Call, int] = {}  # those not settled yet, with how often
        self._held: set[Admission] = set()  # of the replicas that are late
        self._holders: set[Call] = set()  # the calls that have a slot
        # The calls that wait for a slot of one replica. Its position is `HELD` meanwhile, so that
        # the end of each of its calls settles the position.
        self._bound: dict[Admission, dict[Call, None]] = {}
        self._refuses: str | None = None

    @property
    def num_queued(self) -> int:
        """The number of calls that wait for a slot: `serve_deployment_queued_queries`."""
        bound = sum(map(len, list(self._bound.values())))
        return len(self._waiting) + len(self._resting) + bound

    @property
    def app(self) -> Any:
        """The app of a replica here, else the user's; `None` without one. Thread-safe."""
        if self.bound_app is None:
            return None
        here = (each.context.asgi_app for each in self.replicas.copy())
        return next(filter(None, here), self.bound_app.app)

    def held_s(self) -> float:
        """Return for how many seconds the same calls have held all slots; 0.0 if one is free.

        A call that ends frees its slot, or gives it to the next: if all are held, none has ended
        since the last slot was given.
        """
        with self._lock:
            slots = [each.slots for each in self.replicas]
            if not (slots and self._holders):
                return 0.0
            if any(each.ongoing < each.max_ongoing for each in slots):
                return 0.0
            return monotonic() - max(each.assigned_at for each in self._holders)

    @property
    def num_ongoing(self) -> int:
        return sum(replica.slots.ongoing for replica in self.replicas)

    def assign(self, call: Call) -> None:
        """Start the call on a replica now, queue it, or settle it as refused."""
        refused: Exception | None = None
        replica: AdmittingRunner | None = None
        yielding: list[Call] = []
        call.queue = self
        with self._lock:
            if self._refuses is not None:
                refused = DeploymentUnavailableError(self._refuses)
            elif self.available and self._chooser is None:
                self.num_requests += 1
                replica = self._reserve(call)
            else:
                now = monotonic()
                deadline, key = call.metadata.deadline, call.metadata.fairness_key
                if key:
                    self._become_fair()
                if self._chooser is None or not self._may_find_a_slot():
                    refused = self._full(deadline, key, now, yielding)
                if refused is None:
                    self.num_requests += 1
                    self._waiting.add(call, now)
        if replica is not None:
            call.work.start(call, replica)
        elif refused is not None:
            call.settle(error=refused)
        else:
            self._on_queued(call)
        for each in yielding:
            each.settle(error=self._refusal(_YIELDED, self._retry_after_s()))
        # Replicas are held for calls with a deadline only: they may begin this call.
        if self._held and call.metadata.deadline is None:
            for slots in list(self._held):
                if not slots.is_computing:
                    self.resume(slots.replica)

    def broadcast(self, call: Call) -> None:
        """Make the call on each replica, and settle it with these calls. Thread-safe.

        On a replica without a free slot it waits, and is the first to get one.
        """
        replicas = self.replicas.copy()
        if not replicas:
            gone = self._refuses or f"{self.deployment_id} is unavailable: it has no replicas now."
            call.settle(error=DeploymentUnavailableError(gone))
            return
        parent, calls = call._parent, []
        for _ in replicas:
            work, context = BoundInvocation.of(call.work), call.context.copy()
            calls.append(Call(call.metadata, work, context))
            if parent is not None:
                parent.adopt(calls[-1])
        for each, replica in zip(calls, replicas, strict=True):
            self._assign_to(replica, each)
        call.settle(calls)

    def _assign_to(self, replica: AdmittingRunner, call: Call) -> None:
        """Start a call on this replica, now or before the calls that wait for any replica."""
        slots, starts = replica.slots, False
        call.queue = self
        with self._lock:
            if is_there := slots.position != REMOVED:
                self.num_requests += 1
                if starts := slots.ongoing < slots.max_ongoing:
                    self._give(slots, call)
                else:
                    self._bound.setdefault(slots, {})[call] = None
                    slots.position = HELD
        if starts:
            call.work.start(call, replica)
        elif not is_there:
            call.settle(error=_no_longer(replica))
        elif call.settled:  # cancelled while it was on its way into the queue
            self.withdraw(call)
        elif call.is_awaited:
            check_deadlock(call)

    def dispatch(self, reserved: Call, call: Call, runner: AdmittingRunner) -> None:
        """Run a call in the slot that another one holds, or settle it as refused. Thread-safe."""
        with self._lock:
            if is_there := runner.slots.position != REMOVED:
                self._holders.remove(reserved)
                self._holders.add(call)
                call.assigned_at = monotonic()
        if is_there:
            call.work.start(call, runner)
        else:
            self.release(runner, reserved)
            call.settle(error=_no_longer(runner))

    def _on_queued(self, call: Call) -> None:
        """Find a call in the queue its replica, or its end."""
        if call.settled:  # cancelled while it was on its way into the queue
            self.withdraw(call)
        elif self._chooser is not None:
            self._chooser.ask(call)
        elif call.is_awaited:
            check_deadlock(call)

    def turns_away(self, deadline: float | None, key: str = "") -> BackPressureError | None:
        """Return the error that a call would be refused with now, before it is made, or `None`.

        Under overload most calls are refused, so a refusal must cost little.
        """
        with self._lock:
            if self.available or self._refuses is not None:
                return None
            return self._full(deadline, key, monotonic())

    def _full(
        self, deadline: float | None, key: str, now: float, yielding: list[Call] | None = None
    ) -> BackPressureError | None:
        """Return the error that refuses a call, `None` if it may wait.

        Moves a call that gives its place to this one from the queue to `yielding`.
        """
        waiting = self._waiting
        fair = waiting if isinstance(waiting, FairCalls) else None
        refused: BackPressureError | None = None
        yields: Call | None = None
        most, here = (
            self._fairness.config.max_queued_per_key,
            0 if fair is None else fair.sizes[key],
        )
        if 0 <= most <= here - self._num_withheld():
            reason = (
                f"{here} requests with the fairness key {key!r} wait (max_queued_per_key={most})"
            )
            refused = self._refusal(reason, self._retry_after_s())
        elif 0 <= self.max_queued_requests <= len(waiting) - self._num_withheld() and (
            fair is None or (yields := fair.yielding(key)) is None
        ):
            refused = self._refusal("", self._backpressure.retry_after_s)
        elif deadline is not None and (reason := waiting.turns_away(deadline, now, key)):
            refused = self._refusal(reason, self._retry_after_s())
        elif yields is not None and yielding is not None:
            waiting.discard(yields)
            yielding.append(yields)
            self.num_shed += 1
        self.num_rejected += refused is not None
        return refused

    def reassign(self, call: Call, error: Exception) -> None:
        """Send a call to another replica, because its own was gone before any user code ran.

        The call keeps its turn. It goes at once the first time, and after a pause from then on.
        Settles it with `error` if there is no other replica, or it was sent on `max_retries` times.
        """
        times = self._sent_on[call] = self._sent_on.get(call, 0) + 1
        # Race with its settling, each time: it would stay here.
        call.when_settled(lambda settled: self._sent_on.pop(settled, None))
        pause_s = retries.pause_s(
            times,
            max_retries=self._max_retries,
            deadline=call.metadata.deadline,
            now=monotonic(),
            chance=random() if times > 1 else 0.0,
        )
        refused: Exception | None = None
        if call.runner is not None and call.runner.is_to_be_replaced:
            # The control plane, which may be later, tells the policy.
            for lost in [each for each in list(self.replicas) if each is call.runner]:
                self._take_out(lost)
        with self._lock:
            if self._refuses is not None:
                refused = DeploymentUnavailableError(self._refuses)
            elif (
                pause_s is None
                or call.work.is_bound
                # Without any replica the call waits: the deployment's next replica takes it.
                or (self.replicas and all(each is call.runner for each in self.replicas))
            ):
                refused = error
                if isinstance(error, retries.NotBegunError):
                    refused = error.for_caller()
            else:
                self._resting.add(call)
                self.num_retries += 1
        if refused is not None:
            call.settle(error=refused)
        elif pause_s:
            self._later(pause_s, partial(self._resume, call))
        else:
            self._resume(call)

    def _resume(self, call: Call) -> None:
        replica: AdmittingRunner | None = None
        with self._lock:
            if call not in self._resting:
                return  # cancelled or refused meanwhile
            self._resting.discard(call)
            if self.available and self._chooser is None:
                replica = self._reserve(call)
            else:
                if call.metadata.fairness_key:
                    self._become_fair()
                self._waiting.add_first(call, monotonic())
        if replica is not None:
            call.work.start(call, replica)
        else:
            self._on_queued(call)

    def release(self, replica: AdmittingRunner, call: Call) -> None:
        """Take back the slot of a call whose work has ended, and hand it to the next call."""
        slots = replica.slots
        started: list[Call] = []
        shed: list[Shed] = []
        with self._lock:
            self._holders.discard(call)
            if slots.requested and call.metadata.multiplexed_model_id:
                slots.count_model(call.metadata.multiplexed_model_id, -1)
            if not call.began_at:
                slots.given -= 1
            elif call.metadata.deadline is not None:
                self._usual.add(call, monotonic())
            slots.ongoing -= 1
            if self._waiting.size or slots.is_late or slots.position == HELD:
                self._settle_position(slots, started, shed)
            else:
                # A number of slots that was lowered may still be exceeded.
                if slots.position == FULL and slots.ongoing < slots.max_ongoing:
                    self._add_available(slots)
                if not slots.ongoing and slots.position != REMOVED:
                    self._add_idle(slots)
        if started or shed:
            self._start(replica, started, shed)

    def resume(self, replica: AdmittingRunner) -> None:
        """Hand a replica the waiting calls that it may have now. Thread-safe."""
        started: list[Call] = []
        shed: list[Shed] = []
        with self._lock:
            self._settle_position(replica.slots, started, shed)
        self._start(replica, started, shed)

    def _settle_position(self, slots: Admission, started: list[Call], shed: list[Shed]) -> None:
        """Give a replica the waiting calls that it can take, and update its position."""
        if slots.position == REMOVED:
            return
        if (bound := self._bound.get(slots)) is not None:
            while bound and slots.ongoing < slots.max_ongoing:
                call = next(iter(bound))
                del bound[call]
                self._give(slots, call)
                started.append(call)
            if bound:
                return  # its position stays `HELD`
            del self._bound[slots]
        while self._waiting and slots.may_take(is_patient=self._waiting.has_patient):
            following = self._next(slots, shed)
            if following is None:
                break
            started.append(following)
        has_room = slots.ongoing < slots.max_ongoing
        if has_room and slots.is_behind():
            if slots.position >= 0:
                self._remove_available(slots)
            slots.position = HELD
            self._held.add(slots)
            # Race with the user loop: it counts a call that begins and then reads `position`. This
            # sets `position` and then reads the count, so one of the two sees the other's change.
            if slots.is_behind():
                return
        self._held.discard(slots)
        if has_room and slots.position < 0:
            self._add_available(slots)
        elif not has_room:
            if slots.position >= 0:
                self._remove_available(slots)
            slots.position = FULL
        if not slots.ongoing and slots not in self._idle:
            self._add_idle(slots)

    def _num_withheld(self) -> int:
        """Return the number of free slots that get no call now: their replicas are held."""
        return sum(slots.max_ongoing - slots.ongoing for slots in self._held)

    def _start(self, replica: AdmittingRunner, started: list[Call], shed: list[Shed]) -> None:
        for call in started:
            call.work.start(call, replica)
        if shed:
            with self._lock:
                self.num_shed += len(shed)
        for each in shed:
            if each.left_s <= 0:  # its timer is late
                each.call.expire()
            else:
                each.call.settle(error=self._refusal(each.reason, self._retry_after_s()))

    def _retry_after_s(self) -> float:
        after_s = self._backpressure.retry_after_s
        return RETRY_AFTER_S if after_s is None else after_s

    def _refusal(self, reason: str, retry_after_s: float | None) -> BackPressureError:
        return BackPressureError(
            len(self._waiting),
            self.max_queued_requests,
            self.deployment_id.name,
            self._backpressure.status_code,
            retry_after_s,
            reason,
        )

    def note_retry(self) -> None:
        """Count a request that is tried again after user code may have seen it. Thread-safe."""
        with self._lock:
            self.num_retries += 1

    def note_expired(self) -> None:
        """Count a call whose deadline has passed. Thread-safe."""
        with self._lock:
            self.num_expired += 1

    def withdraw(self, call: Call) -> bool:
        """Remove a cancelled call from the queue. Returns False if it is not queued here."""
        with self._lock:
            if call in self._resting:
                self._resting.discard(call)
                return True
            for each in self._bound.values():
                if call in each:
                    del each[call]
                    return True
            return self._waiting.discard(call)

    def holders(self, call: Call) -> frozenset[Call] | None:
        """Return the calls with the slots that `call` waits for; `None` if it is not queued."""
        with self._lock:
            for slots, calls in self._bound.items():
                if call in calls:
                    return frozenset(
                        each for each in self._holders if each.runner in (None, slots.replica)
                    )
            waiting = self._waiting
            # Before the policy has chosen, the call does not wait for these.
            if isinstance(waiting, RoutedCalls) and not waiting.has_chosen(call):
                return None
            return frozenset(self._holders) if call in waiting else None

    def describe_deadlock(self, chain: str) -> str:
        name = self.deployment_id.name
        return (
            f"This call of '{name}' can never start: all slots of '{name}' are held by calls that "
            f"wait for such a slot, in the cycle {chain}. Raise max_ongoing_requests or "
            f"num_replicas of '{name}', or break the cycle."
        )

    def _listed(self, waiting: RoutedCalls) -> list[Call]:
        """Return the calls that wait. Not called under the lock."""
        with self._lock:  # other threads change what is walked through here
            return waiting.waiting()

    def add(self, replica: AdmittingRunner) -> None:
        """Begin to use a replica that is ready: waiting calls get its slots at once."""
        with self._lock:
            self.replicas.append(replica)
            replica.slots.position = FULL
        self.resume(replica)
        self._show_replicas()

    def remove(self, replica: AdmittingRunner) -> None:
        """Give a replica no more calls; the calls it runs go on. No effect the second time."""
        self._take_out(replica)
        self._show_replicas()

    def _take_out(self, replica: AdmittingRunner) -> None:
        slots = replica.slots
        with self._lock:
            if slots.position >= 0:
                self._remove_available(slots)
            self._idle.pop(slots, None)
            if self._last is slots:
                self._last = None
            slots.position = REMOVED
            self._held.discard(slots)
            if replica in self.replicas:
                self.replicas.remove(replica)
            bound = self._bound.pop(slots, {})
        for call in bound:
            call.settle(error=_no_longer(replica))

    def _show_replicas(self) -> None:
        """Show the policy the replicas that calls may go to. On the control loop only.

        Race of two threads that show them: the policy would keep the older of two lists.
        """
        if self._chooser is not None:
            self._chooser.update(list(self.replicas))

    def place(self, call: Call, ranks: list[list[Admission]]) -> bool:
        """Start a waiting call on the first chosen replica with a free slot. Thread-safe.

        Returns False if there is none: the call waits for the first of them that is free.
        """
        replica: AdmittingRunner | None = None
        with self._lock:
            assert isinstance(self._waiting, RoutedCalls)
            if call not in self._waiting:
                return True
            free = [[each for each in group if each.position >= 0] for group in ranks]
            chosen = next(filter(None, free), None)
            if chosen is None:
                self._waiting.want(call, frozenset(each for group in ranks for each in group))
            else:
                self._waiting.discard(call)
                slots = min(chosen, key=lambda each: each.ongoing)
                self._give(slots, call)
                replica = slots.replica
                if slots.is_late:
                    self._hold_if_late(slots, call)
        if replica is not None:
            call.work.start(call, replica)
        elif call.is_awaited:
            check_deadlock(call)
        return replica is not None

    def _may_find_a_slot(self) -> bool:
        """Return whether there is a free slot for a call beside those that are being placed."""
        free = sum(each.max_ongoing - each.ongoing for each in self.available)
        return len(self._waiting) < free + max(self.max_queued_requests, 0)

    def _fail(self, call: Call, error: Exception) -> None:
        """End a waiting call whose policy failed."""
        if self.withdraw(call):
            call.settle(error=error)

    def limit(
        self,
        max_queued_requests: int,
        backpressure: BackpressureConfig | None,
        fairness: Fairness | None = None,
    ) -> None:
        """Change the limits of the queue, for the calls that come from now on. Thread-safe."""
        with self._lock:
            self.max_queued_requests = max_queued_requests
            self._backpressure = backpressure or BackpressureConfig()
            self._fairness = fairness or Fairness()
            self.key_of = self._fairness.key_of
            if fairness is not None:
                self._become_fair()
            if isinstance(self._waiting, FairCalls):
                self._waiting.weigh(self._fairness.config)

    def _become_fair(self) -> None:
        """Have the calls of the queue take turns by their keys, unless a policy places them."""
        if type(self._waiting) is WaitingCalls:
            self._waiting = FairCalls(self._waiting, self._fairness.config)

    def queued_by_key(self, most: int) -> dict[str, int]:
        """Return `largest` of the waiting calls, nothing if none has had a key. Thread-safe."""
        with self._lock:
            return self._waiting.largest(most) if isinstance(self._waiting, FairCalls) else {}

    def resize(self, replica: AdmittingRunner, max_ongoing: int) -> None:
        """Change a replica's number of slots. Calls beyond a lower number keep their slots."""
        with self._lock:
            replica.slots.max_ongoing = max_ongoing
        self.resume(replica)

    def refuse(self, reason: str) -> None:
        """Settle all waiting calls and every new call as unavailable."""
        with self._lock:
            self._refuses = reason
            waiting = [*self._resting, *self._waiting.clear(), *chain(*self._bound.values())]
            self._resting.clear()
            self._bound.clear()
        for call in waiting:
            call.settle(error=DeploymentUnavailableError(reason))
        if self._chooser is not None:
            self._chooser.close()

    def _reserve(self, call: Call) -> AdmittingRunner:
        """Give the call a slot of an available replica, if possible not of its last replica."""
        available = self.available
        model_id = call.metadata.multiplexed_model_id
        if call.runner is not None:
            available = [each for each in available if each.replica is not call.runner] or available
        if model_id:
            slots = self._policy.choose_for_model(available, model_id)
        elif self._idle and len(self.replicas) >= _MANY and call.runner is None:
            slots = next(reversed(self._idle))  # no replica has fewer calls
        elif len(available) == 1:
            slots = self._last = available[0]
        else:
            awake = self._last
            if awake is not None and (not awake.ongoing or awake.position < 0 or call.runner):
                awake = None  # its thread sleeps, or it is not available
            slots = self._last = self._policy.choose(available, awake)
        self._give(slots, call)
        if slots.is_late:
            self._hold_if_late(slots, call)
        return slots.replica

    def _hold_if_late(self, slots: Admission, call: Call) -> None:
        """Hold a replica that begins calls late, and was given one that should not wait there."""
        if not slots.may_take(is_patient=call.metadata.deadline is None):
            self._settle_position(slots, [], [])

    def _next(self, slots: Admission, shed: list[Shed]) -> Call | None:
        """Give one of these slots to the next waiting call. Returns that call, or `None`."""
        waiting = self._waiting
        if isinstance(waiting, RoutedCalls):
            call = waiting.next_for(slots)
        else:
            call = waiting.next(monotonic(), shed)
        if call is not None:
            self._give(slots, call)
        return call

    def _give(self, slots: Admission, call: Call) -> None:
        """Give one of these slots to a call, whatever its model."""
        if not slots.ongoing:
            self._idle.pop(slots, None)
        slots.ongoing += 1
        if slots.ongoing >= slots.max_ongoing and slots.position >= 0:
            self._remove_available(slots)
        slots.given += 1
        call.assigned_at = monotonic()
        self._holders.add(call)
        if call.metadata.multiplexed_model_id:
            slots.count_model(call.metadata.multiplexed_model_id, 1)

    def _add_idle(self, slots: Admission) -> None:
        """Add a replica with all slots free to `_idle`, mostly as the next to be chosen.

        Many replicas take turns of several calls each: a thread that has just worked finds its
        memory in the caches. With 1,000 replicas and 32 calls in flight, a call costs 60 us of CPU
        this way, and 85 us if two replicas are drawn at random. At 64 calls it would be the other
        way round: some replicas are drawn twice, and woken once.
        """
        self._idle[slots] = None
        if len(self.replicas) >= _MANY and random() * _CALLS_A_TURN < 1:
            self._idle.move_to_end(slots, last=False)

    def _add_available(self, slots: Admission) -> None:
        slots.position = len(self.available)
        self.available.append(slots)

    def _remove_available(self, slots: Admission) -> None:
        """Remove a replica in constant time: the last in the list takes its place."""
        last = self.available.pop()
        if last is not slots:
            last.position = slots.position
            self.available[last.position] = last
        slots.position = FULL


def _no_longer(replica: AdmittingRunner) -> ReplicaUnavailableError:
    # Text: Ray 2.60.0, router.py.
    return ReplicaUnavailableError(f"Replica {replica.replica_id} is no longer available")


RETRY_AFTER_S = 1.0  # for a shed call, unless the deployment sets another
_YIELDED = "the queue is full, and most calls in it have the fairness key of this one"
_MANY = 128
# Of many replicas: enough that few calls meet a cold thread, few enough that each has its turn.
_CALLS_A_TURN = 16
