"""The detection of deadlocks: calls that can never go on, because they wait for each other.

    a node that waits in a queue    goes on when *one* of the nodes that hold a place ends
    any other node                  goes on when *all* nodes that it waits for have ended

The nodes of this graph are calls, models and turns. A queue is a deployment's router, where calls
wait for a slot; a model cache, where a model waits for room before it is loaded; or a lane, where
calls take turns on its threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from ingress.exceptions import RequestCycleError


class Node:
    """A node of the graph of waits: a call, or what calls wait for in a cache or a lane.

    waits_for   the nodes that it waits for, unless it is queued. A `set` belongs to user code,
                which may want only the first of several answers
    is_awaited  becomes true when the user code of a call waits for this node
    """

    __slots__ = ("is_awaited", "waits_for")  # a subclass sets them in its `__init__`

    is_awaited: bool
    waits_for: Set[Node]

    @property
    def deployment_name(self) -> str:
        """The deployment in which the node waits or runs, as error messages name it."""
        raise NotImplementedError

    def holders(self) -> frozenset[Node] | None:
        """Return the nodes that hold the places it is queued for; `None` if it is not queued."""
        raise NotImplementedError

    def break_deadlock(self, chain: str, stuck: Set[Node]) -> None:
        """Leave the queue, with a `RequestCycleError` that shows `chain`. Thread-safe.

        `stuck` are the nodes that can never go on. No effect if the node is not queued any more.
        """
        raise NotImplementedError


NO_NODES: frozenset[Node] = frozenset()

# For each node that matters: whether it is queued, and the nodes it depends on.
_Graph = dict[Node, tuple[bool, frozenset[Node]]]


def check_deadlock(node: Node) -> RequestCycleError | None:
    """Fail a node that can never go on. Thread-safe.

    Called when a call begins to wait for a node, or when a node is queued while a call waits for
    it: the last step into a deadlock is always one of these. A deadlock may go through several
    deployments. If no node of the deadlock is queued, none can be failed: returns the error for a
    call that is to wait for `node`.
    """
    holders = node.holders()
    for each in (node,) if holders is None else holders:
        if not each.waits_for:
            return None  # `each` goes on by itself: the common case
    while True:
        graph = _waits(node)
        stuck = _stuck(graph)
        if node not in stuck:
            return None
        # The queues are read one after the other, so the graph may show a cycle that never
        # existed. None of these waits can end and begin again: a cycle that is seen twice existed
        # all the time in between.
        if _waits(node) == graph:
            break
    for loser, (is_queued, _) in graph.items():
        if is_queued and loser in stuck:
            loser.break_deadlock(_chain(loser, graph, stuck), stuck)
            return None
    return RequestCycleError(
        f"This call of '{node.deployment_name}' can never be answered: it waits for its own "
        f"answer, in the cycle {_chain(node, graph, stuck)}. Break the cycle."
    )


def _waits(node: Node) -> _Graph:
    """Return the graph of the nodes that a node depends on, directly or not, itself first."""
    graph: _Graph = {}
    todo = deque([node])
    while todo:
        each = todo.popleft()
        if each not in graph:
            holders = each.holders()
            others = frozenset(each.waits_for) if holders is None else holders
            graph[each] = holders is not None, others
            todo.extend(others)
    return graph


def _stuck(graph: _Graph) -> set[Node]:
    """Return the nodes that can never go on: remove those that can, until no node can."""
    stuck = set(graph)
    while True:
        free = set()
        for node in stuck:
            is_queued, others = graph[node]
            blocking = others & stuck
            # User code may wait for the first of several answers; if it wants all of them, this is
            # checked again at each answer. A call that waits for its arguments needs all of them,
            # and has no user code that waits before it has begun.
            takes_any = is_queued or isinstance(node.waits_for, set)
            if not blocking or (takes_any and blocking != others):
                free.add(node)
        if not free:
            return stuck
        stuck -= free


def _chain(loser: Node, graph: _Graph, stuck: set[Node]) -> str:
    names = [loser.deployment_name]
    node = loser
    while True:
        is_queued, others = graph[node]
        node = next(iter(others & stuck))
        if not is_queued:
            names.append(node.deployment_name)
            if names[-1] in names[:-1]:
                return " -> ".join(names)
