"""The replica that the running code belongs to.

The replica is in a context variable, so it is known in the request's task, in tasks started there,
in the worker threads of the replica, in `asyncio.to_thread` and in `run_in_executor`. Only a thread
that the user starts by hand does not know it, because Python gives that thread an empty context;
free-threaded Python gives it a copy of the context of the thread that starts it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from ingress._unsupported import absent_member, teller
from ingress.core.base.counters import BatchCount
from ingress.core.base.types import ReplicaID, ReplicaPlace, ReplicaRank
from ingress.core.calls.call import Call
from ingress.core.calls.loops import running_loop
from ingress.core.execution.execution import ExecutionPlan, Role
from ingress.exceptions import RayServeException


class AppLifespan(Protocol):
    """The lifespan of a replica's ASGI app, as the server of the application sees it."""

    shutdown_error: Exception | None

    def share(self, state: dict[str, object]) -> None:
        """Put the yielded state into `state`, until the shutdown."""

    def leave_shared(self) -> None:
        """Let the caller keep the state after the shutdown."""


@dataclass(eq=False, repr=False, slots=True)
class ReplicaContext:
    """The replica that runs the current code, as user code sees it.

    `servable_object` is the user's instance, `None` while its constructor runs.
    """

    _replica: ReplicaRuntime

    def __getattr__(self, name: str) -> Any:
        raise absent_member(self, name)

    def __repr__(self) -> str:
        return f"ReplicaContext({self.replica_id})"

    @property
    def replica_id(self) -> ReplicaID:
        return self._replica.replica_id

    @property
    def servable_object(self) -> Any:
        return self._replica.servable_object

    @property
    def rank(self) -> ReplicaRank:
        """The least number, from 0, that no other replica of the deployment had at its start."""
        return self._place("rank").rank

    @property
    def world_size(self) -> int:
        """The number of replicas that the deployment should have, when this one started."""
        return self._place("world_size").world_size

    @property
    def code_version(self) -> str:
        """The number of the version of the deployment: each `serve.run` makes a new one."""
        return self._place("code_version").code_version

    def _place(self, name: str) -> ReplicaPlace:
        if self._replica.place is None:
            raise absent_member(self, name)
        return self._replica.place

    @property
    def app_name(self) -> str:
        return self._replica.app_name

    @property
    def deployment(self) -> str:
        return self._replica.deployment

    @property
    def replica_tag(self) -> str:
        return self._replica.replica_tag


@dataclass(eq=False, slots=True)
class ReplicaRuntime:
    """The parts of a replica that the code running in it needs. `public` is what user code gets.

    The fields: the user's instance, the replica's ASGI app and its lifespan, the plan of each
    callable of that app, its dependencies, the user loop, the function that makes plans, the
    running batches, the limits that `set_max_batch_size` and similar methods set on this replica,
    the number of batches of each function, the queues of batches, what was learned for
    `target_latency_ms`, the models that `@multiplexed` methods loaded, and its place in the
    deployment, `None` on Ray.
    """

    replica_id: ReplicaID
    servable_object: Any = None
    asgi_app: Any = None
    lifespan: AppLifespan | None = None
    plans: dict[Any, ExecutionPlan] = field(default_factory=dict)
    dependencies: Any = None
    loop: asyncio.AbstractEventLoop | None = None
    make_plan: Callable[[Callable[..., object], Role], ExecutionPlan] | None = None
    batches: dict[asyncio.Task[None], Call] = field(default_factory=dict)
    batch_limits: dict[object, Any] = field(default_factory=dict)
    batch_counts: dict[str, BatchCount] = field(default_factory=dict)
    batch_queues: dict[Any, None] = field(default_factory=dict)
    batch_choosers: dict[Any, Any] = field(default_factory=dict)
    models: Any = None
    place: ReplicaPlace | None = None
    public: ReplicaContext = field(init=False)

    def __post_init__(self) -> None:
        self.public = ReplicaContext(self)

    @property
    def app_name(self) -> str:
        return self.replica_id.deployment_id.app_name

    @property
    def deployment(self) -> str:
        return self.replica_id.deployment_id.name

    @property
    def replica_tag(self) -> str:
        return self.replica_id.unique_id


REPLICA: ContextVar[ReplicaRuntime] = ContextVar("ingress_replica")


def get_replica_context() -> ReplicaContext:
    """Return the replica the caller runs in. Raises `RayServeException` outside of a replica."""
    replica = REPLICA.get(None)
    if replica is not None:
        return replica.public
    message = (
        "`serve.get_replica_context()` may only be called from within a deployment: in its "
        "constructor, in its methods and endpoints, and in functions that they call."
    )
    if threading.current_thread() is not threading.main_thread() and running_loop() is None:
        message += (
            f" This is the thread {threading.current_thread().name!r}; a thread you start yourself "
            "begins with an empty context. Start it with "
            "`Thread(target=contextvars.copy_context().run, args=(function,))`, or use "
            "`asyncio.to_thread`, which copies the context."
        )
    raise RayServeException(message)


def _get_internal_replica_context() -> ReplicaContext | None:
    """Return the replica the caller runs in, `None` outside of one.

    The example of Ray's guide on request routers imports it.
    """
    replica = REPLICA.get(None)
    return None if replica is None else replica.public


__getattr__ = teller(__name__)
