"""The host of a replica in this process: an event loop, its own or another owner's, and threads.

The owner of a borrowed loop is an application's server, Ray's actor, or the shared loop.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from anyio.to_thread import current_default_thread_limiter

from ingress.app.asgi.spec import BoundApp
from ingress.context import ReplicaRuntime
from ingress.core.base.counters import copied
from ingress.core.calls.call import CURRENT_CALL, Call
from ingress.core.calls.loops import BorrowedLoop, EventLoopThread, NewLoop, new_event_loop, run_on
from ingress.core.execution import execution
from ingress.core.execution.execution import ExecutionPlan
from ingress.core.execution.lane_pools import ReplicaPools
from ingress.core.execution.lanes import RESERVED_THREADS, lanes_of
from ingress.core.execution.threads import ANYIO_RESERVE, LoopExecutor, MakeThreads, WorkerThreads
from ingress.serving.replicas.host import HostCounts, OwnPart
from ingress.serving.replicas.models import Models
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.user_code import MakePlan, UserCode
from ingress.telemetry.watchdog import WATCHDOG
from ingress.telemetry.watchdog.stacks import Stack, context_of, value_in


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


class ThreadHost:
    """The user's instance in this process, its loop and its worker threads.

    lanes              number of threads of each lane
    borrowed           the loop to run on, if user code has no thread of its own
    stall_threshold_s  stall duration of the loop after which it is reported; `None` disables
    factories          make its parts

    It fulfils the `Host` protocol.
    """

    __slots__ = (
        "_anyio_threads", "_executor", "_home", "_replica", "_stall_threshold_s", "context",
        "isolation", "loop", "mailbox", "models", "pools", "thread", "user_code",
    )  # fmt: skip
    direct = None

    def __init__(
        self,
        replica: Replica,
        max_ongoing: int,
        func_or_class: Callable[..., Any],
        bound_app: BoundApp | None,
        *,
        num_cpus: float,
        lanes: Mapping[str, int] | None = None,
        sync_in_threadpool: bool,
        borrowed: asyncio.AbstractEventLoop | None = None,
        stall_threshold_s: float | None = None,
        factories: ReplicaFactories = UNOBSERVED,
    ) -> None:
        self._replica = replica
        self._stall_threshold_s, self._anyio_threads = stall_threshold_s, 0
        name = str(replica.replica_id)
        self.isolation = OwnPart.THREAD if borrowed is None else OwnPart.NONE
        self._home = (
            EventLoopThread(name, replica.on_dead, factories.new_loop)
            if borrowed is None
            else BorrowedLoop(name, borrowed, replica.on_dead)
        )
        self.loop, self.mailbox = self._home.loop, self._home.mailbox
        self.thread = self._home.ident
        declared = lanes_of(func_or_class, max_ongoing, lanes or {})
        self.pools = ReplicaPools(self._home, declared, factories.threads)
        make_plan: MakePlan = partial(
            factories.plan,
            sync_in_threadpool=sync_in_threadpool,
            pool=self.pools.default,
            lanes=self.pools.lanes,
        )
        self._executor: LoopExecutor | None = None
        if borrowed is None:  # a borrowed loop keeps its owner's executor, see `LocalEngine`
            # Source: Ray 2.60.0, replica.py: 5 threads for the default of one CPU.
            workers = min(32, max(1, math.ceil(num_cpus)) + 4)
            self._executor = LoopExecutor(f"{name}-executor", workers, self.loop, factories.threads)
            self.mailbox.post(self.loop.set_default_executor, self._executor)
        self.context = ReplicaRuntime(replica.replica_id, loop=self.loop, make_plan=make_plan)
        self.models = Models(self.loop, self.context, make_plan, replica.running)
        try:
            self.user_code = UserCode(func_or_class, bound_app, self.context, make_plan)
        except BaseException:  # of cloning the user's app: the caller has no replica to stop
            self._home.stop(1.0)
            raise

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def end(self) -> str:
        has_ended = isinstance(self._home, EventLoopThread) and self._home.has_ended
        return "user code closed the event loop of its replica" if has_ended else ""

    @property
    def last_output(self) -> str:
        return ""  # it is in the server's

    @property
    def model_ids(self) -> frozenset[str]:
        return self.models.ids

    def counts(self) -> HostCounts:
        queues: dict[str, int] = {}
        for each in list(self.context.batch_queues):
            queues[each.name] = queues.get(each.name, 0) + each.num_waiting
        batches = self.context.batch_counts  # worker threads write it
        return HostCounts(
            {each: batches[each].copy() for each in list(batches)},
            queues,
            self.models.gets,
            copied(self.models.times),
            self.pools.loads(),
            self.pools.waits(),
        )

    def standing(self) -> tuple[float, Stack] | None:
        return WATCHDOG.standing(self.loop)

    @property
    def may_stand(self) -> bool:
        return self.models.is_busy or self._replica.is_reconfiguring

    def holder(self) -> Call | None:
        task = asyncio.current_task(self.loop)
        return None if task is None else value_in(context_of(task), CURRENT_CALL)

    def have_computed(self, share: float) -> bool:
        return self.pools.have_computed(share)

    def hand_over(self) -> None:
        pass  # all that have not begun are in the replica, or in a batch queue

    def add_threads(self, max_ongoing: int) -> None:
        self.pools.default.threads.limit = max_ongoing + RESERVED_THREADS
        self.mailbox.post(self._set_anyio_threads, max_ongoing + ANYIO_RESERVE)

    def _set_anyio_threads(self, count: int) -> None:
        """Give AnyIO's limiter so many threads for this replica, beside those of others.

        AnyIO's threads run what Starlette and FastAPI send there: `yield` dependencies, background
        tasks, files. A request uses one at a time, so no request waits for long.
        """
        limiter, before = current_default_thread_limiter(), self._anyio_threads
        self._anyio_threads = count
        # The loop's owner may have set a limit of its own meanwhile, as Ray does.
        limiter.total_tokens = max(1, limiter.total_tokens + count - before)

    async def start(self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any) -> None:
        await run_on(self.loop, self._start, args, kwargs, user_config)

    async def _start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any
    ) -> None:
        replica = self._replica
        if self.isolation is OwnPart.THREAD:  # in the place of AnyIO's own limit
            self._anyio_threads = int(current_default_thread_limiter().total_tokens)
        self._set_anyio_threads(replica.slots.max_ongoing + ANYIO_RESERVE)
        await self.user_code.start(args, kwargs, user_config)
        # Not earlier: a constructor may take long.
        if self._stall_threshold_s is not None:
            WATCHDOG.watch(self.loop, replica, self._stall_threshold_s)
            # Race with `Replica.stop`, which waits for no constructor: it changes the state and
            # then unwatches; this watches and then reads the state, so one of the two unwatches.
            if replica.is_ending:
                WATCHDOG.unwatch(self.loop, replica)

    async def stop(self) -> None:
        try:
            await self.user_code.stop()
        finally:
            await self.models.stop()
        if self.isolation is OwnPart.NONE:
            self._set_anyio_threads(0)

    def join(self, deadline: float) -> list[str]:
        joins = [("worker threads", self.pools.join), ("event loop", self._home.stop)]
        self.pools.shutdown()
        if self._executor is not None:
            self._executor.shutdown()
            joins.append(("executor threads", self._executor.threads.join))
        return [what for what, join in joins if not join(max(0.1, deadline - monotonic()))]

    def has_left(self) -> bool:
        is_alive = isinstance(self._home, EventLoopThread) and not self._home.has_ended
        executor = self._executor
        return not (
            is_alive
            or self.pools.are_alive
            or (executor is not None and executor.threads.are_alive)
        )
