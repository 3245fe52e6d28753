"""The factories of a replica's parts: the classes themselves, unless the replica is observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ingress.core.calls.loops import NewLoop, new_event_loop
from ingress.core.execution import execution
from ingress.core.execution.execution import ExecutionPlan
from ingress.core.execution.threads import MakeThreads, WorkerThreads


@dataclass(frozen=True, slots=True)
class ReplicaFactories:
    """The factories of a replica's parts. Each takes the arguments of its default.

    new_loop   the user loop, if it is the replica's own
    threads    the threads of its pools, lanes and executor
    plan       the plan of each callable
    """

    new_loop: NewLoop = new_event_loop
    threads: MakeThreads = WorkerThreads
    plan: Callable[..., ExecutionPlan] = execution.plan


UNOBSERVED = ReplicaFactories()
"""The defaults, for a replica without observers."""
