"""The router of a deployment: its queue, and the slots of its replicas.

    assign    reserve a slot, queue the call at the end, or refuse it, in one critical section
    release   take a slot back and hand it to the first waiting call, in one critical section
    reassign  `assign` for a call whose replica was gone before the call began; it is queued first

A free slot goes to a waiting call at once, and calls are served in order of arrival. The exception
is overload: `replicas.overload` gives calls with a deadline another order. The lock is held for a
few lines, in which the routing policy chooses; never while another lock is taken. No callback of a
call runs under it.

A replica that begins calls late, because its event loop is busy or does not get the GIL, is held:
it gets one call with a deadline at a time, the next when that one begins. The calls it cannot begin
yet wait in the queue, where they can still go to another replica, be overtaken or be shed. While
threads queue for the GIL, this goes for all calls: more computing threads would only wait for each
other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from random import random
from time import monotonic
from typing import Any

from ingress.asgi import RouteTemplates
from ingress.base.types import DeploymentID
from ingress.calls import retries
from ingress.calls.call import Call
from ingress.calls.deadlocks import check_deadlock
from ingress.config import BackpressureConfig
from ingress.exceptions import BackPressureError, DeploymentUnavailableError
from ingress.replicas.overload import Shed, UsualTimes, WaitingCalls
from ingress.replicas.replica import HELD, Replica
from ingress.replicas.request_router import PowerOfTwoChoicesRequestRouter
from ingress.watchdog.pressure import GIL_PRESSURE


class Router:
    """The router of one deployment, for all its callers. Thread-safe.

    `max_queued_requests` is -1 for no limit; `backpressure` says how a call beyond it is refused.
    `later(delay_s, callback)` calls `callback` after a delay, on one of the framework's loops.
    """

    __slots__ = (
        "_available", "_backpressure", "_held", "_holders", "_idle", "_last", "_later", "_lock",
        "_max_retries", "_policy", "_refuses", "_resting", "_usual", "_waiting", "deployment_id",
        "max_queued_requests", "num_requests", "replicas", "templates",
    )  # fmt: skip

    def __init__(
        self,
        deployment_id: DeploymentID,
        max_queued_requests: int = -1,
        *,
        backpressure: BackpressureConfig | None = None,
        max_retries: int = 10,
        later: Callable[[float, Callable[[], Any]], Any] = lambda delay_s, callback: callback(),
        templates: RouteTemplates | None = None,
    ) -> None:
        self.deployment_id = deployment_id
        self.templates = templates or RouteTemplates()
        self.max_queued_requests = max_queued_requests
        self._backpressure = backpressure or BackpressureConfig()
        self._max_retries = max_retries
        self._later = later
        self.num_requests = 0  # accepted so far: `serve_num_router_requests`
        self.replicas: list[Replica] = []
        self._policy = PowerOfTwoChoicesRequestRouter()
        self._lock = threading.Lock()
        self._available: list[Replica] = []  # the replicas with a free slot, in no order
        # The replicas with all slots free; the last one is chosen next.
        self._idle: OrderedDict[Replica, None] = OrderedDict()
        self._last: Replica | None = None  # the replica chosen last
        self._usual = UsualTimes()
        self._waiting = WaitingCalls(self._usual)
        self._resting: set[Call] = set()  # the calls that go to another replica after a pause
        self._held: set[Replica] = set()  # the replicas that are late
        self._holders: set[Call] = set()  # the calls that have a slot
        self._refuses: str | None = None

    @property
    def num_queued(self) -> int:
        """The number of calls that wait for a slot: `serve_deployment_queued_queries`."""
        return len(self._waiting) + len(self._resting)

    @property
    def num_ongoing(self) -> int:
        return sum(replica.ongoing for replica in self.replicas)

    def assign(self, call: Call) -> None:
        """Start the call on a replica now, queue it, or settle it as refused."""
        refused: Exception | None = None
        replica: Replica | None = None
        call.queue = self
        with self._lock:
            if self._refuses is not None:
                refused = DeploymentUnavailableError(self._refuses)
            elif self._available:
                self.num_requests += 1
                replica = self._reserve(call)
            else:
                now = monotonic()
                refused = self._full(call.metadata.deadline, now)
                if refused is None:
                    self.num_requests += 1
                    self._waiting.add(call, now)
        if replica is not None:
            call.start(replica)
        elif refused is not None:
            call.settle(error=refused)
        elif call.settled:  # cancelled while it was on its way into the queue
            self.withdraw(call)
        elif call.is_awaited:
            check_deadlock(call)
        # Replicas are held for calls with a deadline only: they may begin this call.
        if self._held and call.metadata.deadline is None and not GIL_PRESSURE.is_high:
            for replica in list(self._held):
                self.resume(replica)

    def turns_away(self, deadline: float | None) -> BackPressureError | None:
        """Return the error that a call would be refused with now, before it is made, or `None`.

        Under overload most calls are refused, so a refusal must cost little.
        """
        if self._available:
            return None
        with self._lock:
            if self._available or self._refuses is not None:
                return None
            return self._full(deadline, monotonic())

    def _full(self, deadline: float | None, now: float) -> BackPressureError | None:
        """Return the error that refuses a call with this deadline, `None` if it may wait."""
        if 0 <= self.max_queued_requests <= len(self._waiting) - self._num_withheld():
            return self._refusal("", self._backpressure.retry_after_s)
        if deadline is None or not (reason := self._waiting.turns_away(deadline, now)):
            return None
        return self._refusal(reason, self._retry_after_s())

    def reassign(self, call: Call, error: Exception) -> None:
        """Send a call to another replica, because its own was gone before any user code ran.

        The call keeps its turn. It goes at once the first time, and after a pause from then on.
        Settles it with `error` if there is no other replica, or it was sent on `max_retries` times.
        """
        call.retries += 1
        pause_s = retries.pause_s(
            retries.Failure(call.retries, may_have_started=False),
            max_retries=self._max_retries,
            deadline=call.metadata.deadline,
            now=monotonic(),
            chance=random(),
        )
        refused: Exception | None = None
        with self._lock:
            if self._refuses is not None:
                refused = DeploymentUnavailableError(self._refuses)
            elif pause_s is None or all(each is call.runner for each in self.replicas):
                refused = error
            else:
                self._resting.add(call)
        if refused is not None:
            call.settle(error=refused)
        elif pause_s:
            self._later(pause_s, partial(self._resume, call))
        else:
            self._resume(call)

    def _resume(self, call: Call) -> None:
        replica: Replica | None = None
        with self._lock:
            if call not in self._resting:
                return  # cancelled or refused meanwhile
            self._resting.discard(call)
            if self._available:
                replica = self._reserve(call)
            else:
                self._waiting.add_first(call, monotonic())
        if replica is not None:
            call.start(replica)
        elif call.settled:  # cancelled while it was on its way into the queue
            self.withdraw(call)
        elif call.is_awaited:
            check_deadlock(call)

    def release(self, replica: Replica, call: Call) -> None:
        """Take back the slot of a call whose work has ended, and hand it to the next call."""
        started: list[Call] = []
        shed: list[Shed] = []
        with self._lock:
            self._holders.discard(call)
            if replica.requested and call.metadata.multiplexed_model_id:
                _count_model(replica, call.metadata.multiplexed_model_id, -1)
            if not call.has_begun:
                replica.given -= 1
            elif call.metadata.deadline is not None:
                self._usual.add(call, monotonic())
            replica.ongoing -= 1
            if self._waiting or replica.is_late or replica.position == HELD:
                self._settle_position(replica, started, shed)
            else:
                if replica.position == _FULL:
                    self._add_available(replica)
                if not replica.ongoing and replica.position != _REMOVED:
                    self._add_idle(replica)
        if started or shed:
            self._start(replica, started, shed)

    def resume(self, replica: Replica) -> None:
        """Hand a held replica the waiting calls it may have now. Thread-safe."""
        started: list[Call] = []
        shed: list[Shed] = []
        with self._lock:
            self._settle_position(replica, started, shed)
        self._start(replica, started, shed)

    def _settle_position(self, replica: Replica, started: list[Call], shed: list[Shed]) -> None:
        """Give a replica the waiting calls that it can take, and update its position."""
        if replica.position == _REMOVED:
            return
        while (
            self._waiting
            and replica.ongoing < replica.max_ongoing
            and (not _is_held(replica) or (self._waiting.has_patient and not GIL_PRESSURE.is_high))
        ):
            following = self._next(replica, shed)
            if following is not None:
                started.append(following)
        has_room = replica.ongoing < replica.max_ongoing
        if has_room and _is_held(replica):
            if replica.position >= 0:
                self._remove_available(replica)
            replica.position = HELD
            self._held.add(replica)
            # Race with the user loop: it counts a call that begins and then reads `position`. This
            # sets `position` and then reads the count, so one of the two sees the other's change.
            if _is_held(replica):
                return
        self._held.discard(replica)
        if has_room and replica.position < 0:
            self._add_available(replica)
        elif not has_room:
            if replica.position >= 0:
                self._remove_available(replica)
            replica.position = _FULL
        if not replica.ongoing and replica not in self._idle:
            self._add_idle(replica)

    def _num_withheld(self) -> int:
        """Return the number of free slots that get no call now: their replicas are held."""
        return sum(replica.max_ongoing - replica.ongoing for replica in self._held)

    def _start(self, replica: Replica, started: list[Call], shed: list[Shed]) -> None:
        for call in started:
            call.start(replica)
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

    def withdraw(self, call: Call) -> bool:
        """Remove a cancelled call from the queue. Returns False if it is not queued here."""
        with self._lock:
            if call in self._resting:
                self._resting.discard(call)
                return True
            return self._waiting.discard(call)

    def holders(self, call: Call) -> frozenset[Call] | None:
        """Return the calls with the slots that `call` waits for; `None` if it is not queued."""
        with self._lock:
            return frozenset(self._holders) if call in self._waiting else None

    def describe_deadlock(self, chain: str) -> str:
        name = self.deployment_id.name
        return (
            f"This call of '{name}' can never start: all slots of '{name}' are held by calls that "
            f"wait for one, in the cycle {chain}. Raise max_ongoing_requests or num_replicas "
            f"of '{name}', or break the cycle."
        )

    def add(self, replica: Replica) -> None:
        """Begin to use a replica that is ready: waiting calls get its slots at once."""
        started: list[Call] = []
        shed: list[Shed] = []
        with self._lock:
            self.replicas.append(replica)
            replica.position = _FULL
            self._settle_position(replica, started, shed)
        self._start(replica, started, shed)

    def remove(self, replica: Replica) -> None:
        """Give a replica no more calls; the calls it runs go on."""
        with self._lock:
            if replica.position >= 0:
                self._remove_available(replica)
            self._idle.pop(replica, None)
            if self._last is replica:
                self._last = None
            replica.position = _REMOVED
            self._held.discard(replica)
            self.replicas.remove(replica)

    def refuse(self, reason: str) -> None:
        """Settle all waiting calls and every new call as unavailable."""
        with self._lock:
            self._refuses = reason
            waiting = [*self._resting, *self._waiting.clear()]
            self._resting.clear()
        for call in waiting:
            call.settle(error=DeploymentUnavailableError(reason))

    def _reserve(self, call: Call) -> Replica:
        """Give the call a slot of an available replica, if possible not of its last replica."""
        available = self._available
        model_id = call.metadata.multiplexed_model_id
        if call.runner is not None:
            available = [each for each in available if each is not call.runner] or available
        if model_id:
            replica = self._policy.choose_for_model(available, model_id)
        elif self._idle and len(self.replicas) >= _MANY and call.runner is None:
            replica = next(reversed(self._idle))  # no replica has fewer calls
        else:
            awake = self._last
            if awake is not None and (not awake.ongoing or awake.position < 0 or call.runner):
                awake = None  # its thread sleeps, or it is not available
            replica = self._last = self._policy.choose(available, awake)
        if not replica.ongoing:
            del self._idle[replica]
        self._give(replica, call)
        if replica.ongoing == replica.max_ongoing:
            self._remove_available(replica)
        elif replica.is_late and (call.metadata.deadline is not None or GIL_PRESSURE.is_high):
            self._settle_position(replica, [], [])
        return replica

    def _next(self, replica: Replica, shed: list[Shed]) -> Call | None:
        """Give a slot of the replica to the next waiting call. Returns that call, or `None`."""
        call = self._waiting.next(monotonic(), shed)
        if call is not None:
            self._idle.pop(replica, None)
            self._give(replica, call)
        return call

    def _give(self, replica: Replica, call: Call) -> None:
        """Give a slot of the replica to a call, whatever its model."""
        replica.ongoing += 1
        replica.given += 1
        call.has_begun = False
        call.assigned_at = monotonic()
        self._holders.add(call)
        if call.metadata.multiplexed_model_id:
            _count_model(replica, call.metadata.multiplexed_model_id, 1)

    def _add_idle(self, replica: Replica) -> None:
        """Add a replica with all slots free to `_idle`, mostly as the next to be chosen.

        Many replicas take turns of several calls each: a thread that has just worked finds its
        memory in the caches. With 1,000 replicas and 32 calls in flight, a call costs 60 us of CPU
        this way, and 85 us if two replicas are drawn at random. At 64 calls it would be the other
        way round: some replicas are drawn twice, and woken once.
        """
        self._idle[replica] = None
        if random() * _CALLS_A_TURN < 1:
            self._idle.move_to_end(replica, last=False)

    def _add_available(self, replica: Replica) -> None:
        replica.position = len(self._available)
        self._available.append(replica)

    def _remove_available(self, replica: Replica) -> None:
        """Remove a replica in constant time: the last in the list takes its place."""
        last = self._available.pop()
        if last is not replica:
            last.position = replica.position
            self._available[last.position] = last
        replica.position = _FULL


def _is_held(replica: Replica) -> bool:
    """Return whether a late replica has yet to begin a call that it was given."""
    return replica.is_late and replica.given > replica.begun


def _count_model(replica: Replica, model_id: str, change: int) -> None:
    """Count the calls on a replica that name a model. A model without calls is dropped."""
    count = replica.requested.get(model_id, 0) + change
    if count:
        replica.requested[model_id] = count
    else:
        del replica.requested[model_id]


# Values of `Replica.position` other than an index into `_available`.
_FULL = -1
_REMOVED = -2
RETRY_AFTER_S = 1.0  # for a shed call, unless the deployment sets another
_MANY = 128
# Of many replicas: enough that few calls meet a cold thread, few enough that each has its turn.
_CALLS_A_TURN = 16
