"""The detection of deadlocks: calls that can never go on, because they wait for each other.

    a call that waits in a queue    goes on when *one* of the calls that hold a place ends
    any other call                  goes on when *all* calls that it waits for are answered

A queue is a deployment's router, where calls wait for a slot, or a model cache, where the load of a
model waits for room.
"""

from __future__ import annotations

from collections import deque

from ingress.calls.call import Call
from ingress.exceptions import RequestCycleError

# For each call that matters: whether it is queued, and the calls it depends on.
_Graph = dict[Call, tuple[bool, frozenset[Call]]]


def check_deadlock(call: Call) -> None:
    """Fail a call that can never go on. Thread-safe.

    Called when a call begins to wait for another call, or is queued while another call waits for
    it: the last step into a deadlock is always one of these. A deadlock may go through several
    deployments.
    """
    holders = None if call.queue is None else call.queue.holders(call)
    for each in (call,) if holders is None else holders:
        if not each.waits_for:
            return  # `each` goes on by itself: the common case
    while True:
        graph = _waits(call)
        stuck = _stuck(graph)
        if call not in stuck:
            return
        # The queues are read one after the other, so the graph may show a cycle that never
        # existed. None of these waits can end and begin again: a cycle that is seen twice existed
        # all the time in between.
        if _waits(call) == graph:
            break
    loser = next(each for each, (is_queued, _) in graph.items() if is_queued and each in stuck)
    assert loser.queue is not None
    if loser.queue.withdraw(loser):
        chain = _chain(loser, graph, stuck)
        loser.settle(error=RequestCycleError(loser.queue.describe_deadlock(loser, chain)))


def _waits(call: Call) -> _Graph:
    """Return the graph of the calls that a call depends on, directly or not, itself first."""
    graph: _Graph = {}
    todo = deque([call])
    while todo:
        each = todo.popleft()
        if each not in graph:
            holders = None if each.queue is None else each.queue.holders(each)
            others = frozenset(each.waits_for) if holders is None else holders
            graph[each] = holders is not None, others
            todo.extend(others)
    return graph


def _stuck(graph: _Graph) -> set[Call]:
    """Return the calls that can never go on: remove those that can, until no call can."""
    stuck = set(graph)
    while True:
        free = set()
        for call in stuck:
            is_queued, others = graph[call]
            blocking = others & stuck
            # A running call may wait for the first of several answers; if it wants all of them,
            # this is checked again at each answer. The same goes for a batch and a load, which no
            # replica runs as a call. A call that waits for its arguments needs all of them; no
            # other call waits before it has begun.
            takes_any = is_queued or isinstance(call.waits_for, set)
            if not blocking or (takes_any and blocking != others):
                free.add(call)
        if not free:
            return stuck
        stuck -= free


def _chain(loser: Call, graph: _Graph, stuck: set[Call]) -> str:
    names = [loser.metadata.deployment.name]
    call = loser
    while True:
        is_queued, others = graph[call]
        call = next(iter(others & stuck))
        if not is_queued:
            names.append(call.metadata.deployment.name)
            if names[-1] in names[:-1]:
                return " -> ".join(names)
