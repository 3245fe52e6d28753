"""A deployment's queue: who gets which replica's slot, and when.

    assign    reserve a slot, or stand at the end of the queue, or be refused: one critical section
    release   hand the slot to the first who waits, in the same section

A request that finds others waiting always stands behind them, and a free slot never meets a
waiting request, so the order of service is the order of arrival. The lock is held for a few lines
of plain arithmetic, never while another is taken, and no callback runs under it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from ingress.call import Call
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCycleError,
)
from ingress.replica import Replica
from ingress.request_router import PowerOfTwoChoicesRequestRouter
from ingress.types import DeploymentID


class Router:
    """Thread-safe; one per deployment, for all its callers.

    `max_queued_requests` is -1 for no limit.
    """

    def __init__(self, deployment_id: DeploymentID, max_queued_requests: int = -1) -> None:
        self.deployment_id = deployment_id
        self.max_queued_requests = max_queued_requests
        self.num_requests = 0  # accepted so far: `serve_num_router_requests`
        self.replicas: list[Replica] = []
        self._policy = PowerOfTwoChoicesRequestRouter()
        self._lock = threading.Lock()
        self._available: list[Replica] = []  # the replicas with a free slot, in no order
        self._waiting: OrderedDict[Call, None] = OrderedDict()
        self._holders: set[Call] = set()  # who has a slot
        self._refuses: str | None = None

    @property
    def num_queued(self) -> int:
        """How many wait for a slot: `serve_deployment_queued_queries`."""
        return len(self._waiting)

    @property
    def num_ongoing(self) -> int:
        return sum(replica.ongoing for replica in self.replicas)

    def assign(self, call: Call) -> None:
        """Start the call on a replica, now or when its turn comes, or settle it as refused."""
        refused: Exception | None = None
        replica: Replica | None = None
        call.queue = self
        with self._lock:
            if self._refuses is not None:
                refused = DeploymentUnavailableError(self._refuses)
            elif self._available:
                self.num_requests += 1
                replica = self._policy.choose(self._available)
                replica.ongoing += 1
                self._holders.add(call)
                if replica.ongoing == replica.max_ongoing:
                    self._remove_available(replica)
            elif 0 <= self.max_queued_requests <= len(self._waiting):
                refused = BackPressureError(
                    len(self._waiting), self.max_queued_requests, self.deployment_id.name
                )
            else:
                self.num_requests += 1
                self._waiting[call] = None
        if replica is not None:
            call.start(replica)
        elif refused is not None:
            call.settle(error=refused)
        elif call.settled:  # cancelled while it was on its way into the queue
            self.withdraw(call)
        elif call.is_awaited:
            self.check_cycle(call)

    def release(self, replica: Replica, call: Call) -> None:
        """Take back the slot of a call whose work has ended, and hand it to who waits first."""
        following: Call | None = None
        with self._lock:
            self._holders.discard(call)
            if self._waiting and replica.position != _REMOVED:
                following, _ = self._waiting.popitem(last=False)
                self._holders.add(following)
            else:
                replica.ongoing -= 1
                if replica.position == _FULL:
                    self._add_available(replica)
        if following is not None:
            following.start(replica)

    def withdraw(self, call: Call) -> bool:
        """Take a cancelled call out of the queue. Returns False if it does not wait here."""
        with self._lock:
            return self._waiting.pop(call, _ABSENT) is None

    def holders(self, call: Call) -> frozenset[Call] | None:
        """Return the calls that have the slots a call waits for here, `None` if it does not."""
        with self._lock:
            return frozenset(self._holders) if call in self._waiting else None

    def check_cycle(self, call: Call) -> None:
        """Fail a call that can never start, because whoever could make room waits for it.

        Called when a call begins to wait for another, or stands in a queue while one waits for it:
        the last step into a deadlock is always one of these. It may go through several deployments.
        """
        holders = self.holders(call)
        for each in (call,) if holders is None else holders:
            if not each.waits_for:
                return  # it goes on by itself: the common case
        while True:
            graph = _waits(call)
            stuck = _stuck(graph)
            if call not in stuck:
                return
            # Read from several queues, one after the other: a mixture of times may show a cycle
            # that never was. None of these waits can end and begin again, so what is seen twice
            # was there all the time between.
            if _waits(call) == graph:
                break
        loser = next(each for each, (is_queued, _) in graph.items() if is_queued and each in stuck)
        assert loser.queue is not None
        if loser.queue.withdraw(loser):
            loser.settle(error=RequestCycleError(_describe(loser, graph, stuck)))

    def add(self, replica: Replica) -> None:
        """Begin to use a replica that is ready; those who wait get its slots at once."""
        started: list[Call] = []
        with self._lock:
            self.replicas.append(replica)
            replica.position = _FULL
            while self._waiting and replica.ongoing < replica.max_ongoing:
                call, _ = self._waiting.popitem(last=False)
                self._holders.add(call)
                replica.ongoing += 1
                started.append(call)
            if replica.ongoing < replica.max_ongoing:
                self._add_available(replica)
        for call in started:
            call.start(replica)

    def remove(self, replica: Replica) -> None:
        """Give a replica nothing more; what it runs goes on."""
        with self._lock:
            if replica.position >= 0:
                self._remove_available(replica)
            replica.position = _REMOVED
            self.replicas.remove(replica)

    def refuse(self, reason: str) -> None:
        """Settle every new call and all who wait as unavailable."""
        with self._lock:
            self._refuses = reason
            waiting = list(self._waiting)
            self._waiting.clear()
        for call in waiting:
            call.settle(error=DeploymentUnavailableError(reason))

    def _add_available(self, replica: Replica) -> None:
        replica.position = len(self._available)
        self._available.append(replica)

    def _remove_available(self, replica: Replica) -> None:
        """Remove in constant time: the last takes the place of the one that goes."""
        last = self._available.pop()
        if last is not replica:
            last.position = replica.position
            self._available[last.position] = last
        replica.position = _FULL


# For each call that matters: whether it is queued, and the calls it depends on. A queued call goes
# on when *one* of those that hold the slots ends, any other when *all* it waits for are answered.
_Graph = dict[Call, tuple[bool, frozenset[Call]]]


def _waits(call: Call) -> _Graph:
    """Return what a call depends on, directly or not, beginning with itself."""
    graph: _Graph = {}
    todo = deque([call])
    while todo:
        each = todo.popleft()
        if each not in graph:
            holders = None if each.queue is None else each.queue.holders(each)
            others = each.waits_for if holders is None else holders
            graph[each] = holders is not None, others
            todo.extend(others)
    return graph


def _stuck(graph: _Graph) -> set[Call]:
    """Return the calls that can never go on: all, less those that can, until no more can."""
    stuck = set(graph)
    while True:
        free = set()
        for call in stuck:
            is_queued, others = graph[call]
            blocking = others & stuck
            if not blocking or (is_queued and blocking != others):
                free.add(call)
        if not free:
            return stuck
        stuck -= free


def _describe(loser: Call, graph: _Graph, stuck: set[Call]) -> str:
    name = loser.metadata.deployment.name
    chain = [name]
    call = loser
    while True:
        is_queued, others = graph[call]
        call = next(iter(others & stuck))
        if not is_queued:
            chain.append(call.metadata.deployment.name)
            if chain[-1] in chain[:-1]:
                break
    return (
        f"This call of '{name}' can never start: all slots of '{name}' are held by calls that wait "
        f"for one, in the cycle {' -> '.join(chain)}. Raise max_ongoing_requests or num_replicas "
        f"of '{name}', or break the cycle."
    )


# Values of `Replica.position` other than an index into `_available`.
_FULL = -1
_REMOVED = -2
_ABSENT = object()
