"""One replica: the user's instance, its loop, its worker threads and the calls it runs.

    submit -> _begin -> a task that runs `call.work(user_code)` -> slot released, call settled

Other threads submit and cancel calls by the mailbox of the user loop. The watchdog writes `stalls`,
and `stop` the state: comments name those races. The router keeps its record of the replica in
`slots`.

From `submit` to the first step of its task a call is in `_arriving`. The thread that removes it
from there decides what becomes of it: the task begins it, `hand_over` sends it to another replica.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from time import monotonic
from typing import Any, cast

from anyio.to_thread import current_default_thread_limiter

from ingress.app.asgi import BoundApp
from ingress.context import REPLICA, ReplicaRuntime
from ingress.core.base.counters import LATENCY_BUCKETS_MS, Latency, copied
from ingress.core.base.snapshot import ReplicaCounts
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL, NO_WORK, Call
from ingress.core.calls.compat import cancel_once
from ingress.core.calls.loops import (
    BorrowedLoop,
    EventLoopThread,
    OnDead,
    run_on,
    running_loop,
)
from ingress.core.calls.notable import NOTABLE
from ingress.core.calls.tracing import TRACING, note_exemplar, trace_begin
from ingress.core.execution import execution
from ingress.core.execution.lane_pools import ReplicaPools
from ingress.core.execution.lanes import lanes_of
from ingress.core.execution.loop_executor import LoopExecutor
from ingress.core.execution.other_loop import note_other_loop
from ingress.core.execution.threads import RESERVED_THREADS
from ingress.exceptions import ReplicaUnavailableError, UserCodeExit, needs_no_record
from ingress.serving.replicas.admission import HELD, LATE_S, Admission
from ingress.serving.replicas.ended_calls import note_end
from ingress.serving.replicas.models import Models
from ingress.serving.replicas.replica_factories import UNOBSERVED, ReplicaFactories
from ingress.serving.replicas.user_code import MakePlan
from ingress.telemetry.logs.identity import name_records
from ingress.telemetry.watchdog import WATCHDOG
from ingress.telemetry.watchdog.stacks import context_of

MAX_ERROR_TYPES = 200  # pairs of route and type; user code may make types while it runs
ANYIO_RESERVE = 8  # AnyIO threads, beyond one for each request

logger = logging.getLogger("ingress")


class ReplicaState(Enum):
    """The state of a replica, in the words of Ray Serve's status."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


_ENDING = (ReplicaState.STOPPING, ReplicaState.STOPPED)
_ABSENT = object()


class Replica:
    """One replica of a deployment, on its user loop. `submit` and `cancel` are thread-safe.

        lanes              number of threads of each lane
        borrowed           the loop to run on, if user code has no thread of its own
        stall_threshold_s  stall duration of the loop after which it is reported; `None` disables
        release            gives the slot of a call back to the router
        reassign           gives the router a call back that no user code has seen
        resume             asks the router for the next call
        factories          make its parts

    It fulfils the `Runner` protocol of `calls.call`.
    """

    __slots__ = (
        "_anyio_threads", "_arriving", "_borrows", "_calls", "_executor", "_home",
        "_models", "_moved", "_reassign", "_release", "_resume",
        "_stall_threshold_s",
        "context", "errors", "is_checking", "is_left_behind",
        "is_reconfiguring", "latencies",
        "loop", "pools", "replica_id", "slots", "stalls", "state", "thread", "unhealthy_reason",
        "user_code",
    )  # fmt: skip

    def __init__(
        self,
        replica_id: ReplicaID,
        func_or_class: Callable[..., Any],
        bound_app: BoundApp | None,
        *,
        max_ongoing: int,
        num_cpus: float,
        lanes: Mapping[str, int] | None = None,
        sync_in_threadpool: bool,
        release: Callable[[Replica, Call], None],
        reassign: Callable[[Call, Exception], Any] | None = None,
        resume: Callable[[Replica], Any] = lambda replica: None,
        borrowed: asyncio.AbstractEventLoop | None = None,
        stall_threshold_s: float | None = None,
        factories: ReplicaFactories = UNOBSERVED,
    ) -> None:
        self.replica_id = replica_id
        self.state = ReplicaState.STARTING
        self.latencies: dict[str, Latency] = {}
        self.errors: dict[tuple[str, str], int] = {}  # by route and type of the exception
        self.stalls: dict[str, Latency] = {}  # by method; written by the watchdog
        self.unhealthy_reason = ""
        self.is_left_behind = False  # its stop left threads behind that user code blocks
        self.is_reconfiguring = False
        self._release = release
        self._resume = resume
        self._reassign = reassign
        self._borrows = borrowed is not None
        self._stall_threshold_s, self._anyio_threads = stall_threshold_s, 0
        name = str(replica_id)
        on_dead: OnDead = self._on_dead
        self._home = (
            EventLoopThread(name, on_dead, factories.new_loop)
            if borrowed is None
            else BorrowedLoop(name, borrowed, on_dead)
        )
        self.loop = self._home.loop
        self.thread = self._home.ident  # `None` if the loop is borrowed
        declared = lanes_of(func_or_class, max_ongoing, lanes or {})
        self.pools = ReplicaPools(self._home, declared, factories.threads)
        self.slots = Admission(self, max_ongoing, self.pools.have_computed)
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
            self._home.mailbox.post(self.loop.set_default_executor, self._executor)
        self._arriving: dict[Call, None] = {}
        self._moved: set[Call] = set()  # calls here that run on another replica
        # The calls that have begun here, each with its task.
        self._calls: dict[Call, asyncio.Future[Any] | None] = {}
        self.context = ReplicaRuntime(replica_id, loop=self.loop, make_plan=make_plan)
        self._models = Models(self.loop, self.context, make_plan, self._calls)
        try:
            self.user_code = factories.user_code(func_or_class, bound_app, self.context, make_plan)
        except BaseException:  # of cloning the user's app: the caller has no replica to stop
            self._home.stop(1.0)
            raise
        self.is_checking = False

    def __repr__(self) -> str:
        return f"Replica({self.replica_id}, {self.state.value}, ongoing={self.ongoing})"

    @property
    def ongoing(self) -> int:
        """The number of calls that have a slot here. Thread-safe."""
        return self.slots.ongoing

    @property
    def pid(self) -> int:
        """The id of the process that its user code runs in; 0 before there is one. Thread-safe."""
        return os.getpid()

    @property
    def calls(self) -> dict[Call, asyncio.Future[Any] | None]:
        """A copy of the calls here, each with its task once that has begun. Thread-safe."""
        return {**self._arriving.copy(), **self._calls.copy()}

    @property
    def model_ids(self) -> frozenset[str]:
        """The ids of the models that it has or is loading. Thread-safe."""
        return self._models.ids

    @property
    def model_gets(self) -> int:
        """The number of times that its code asked for a model. Thread-safe."""
        return self._models.gets

    @property
    def model_times(self) -> dict[str, Latency]:
        """The times of loads and unloads of models. Thread-safe."""
        return copied(self._models.times)

    @property
    def batch_queues(self) -> dict[str, int]:
        """The numbers of calls that wait for their batch, by function. Thread-safe."""
        found: dict[str, int] = {}
        for each in list(self.context.batch_queues):
            found[each.name] = found.get(each.name, 0) + each.num_waiting
        return found

    async def start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any = None
    ) -> None:
        """Make the replica ready, on its user loop. Raises the errors of user code."""
        name_records()
        await run_on(self.loop, self._start(args, kwargs, user_config))
        self.state = ReplicaState.RUNNING

    async def _start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any
    ) -> None:
        # AnyIO's threads run what Starlette and FastAPI send there: `yield` dependencies,
        # background tasks, files. A request uses one at a time, so no request waits for long.
        limiter = current_default_thread_limiter()
        self._anyio_threads = self.slots.max_ongoing + ANYIO_RESERVE
        limiter.total_tokens = self._anyio_threads + (limiter.total_tokens if self._borrows else 0)
        await self.user_code.start(args, kwargs, user_config)
        TRACING.begin(monotonic())  # after user code, which may have set a tracer provider
        # Not earlier: a constructor may take long.
        if self._stall_threshold_s is not None:
            WATCHDOG.watch(self.loop, self, self._stall_threshold_s)
            # Race with `stop`, which waits for no constructor: it changes the state and then
            # unwatches; this watches and then reads the state, so one of the two unwatches.
            if self.is_ending:
                WATCHDOG.unwatch(self.loop, self)

    def submit(self, call: Call) -> None:
        """Run a call that holds a slot of this replica. Thread-safe."""
        self._arriving[call] = None
        # While the replica ends, by way of the mailbox, or calls would recurse: each one that
        # `_begin` turns away frees the slot of the next.
        if running_loop() is self.loop and self.state not in _ENDING:
            self._begin(call)
        else:
            self._home.mailbox.post(self._begin, call)

    async def reconfigure(self, user_config: Any) -> None:
        """Give user code a new `user_config`, on the user loop. Raises the errors of user code."""
        await run_on(self.loop, self._reconfigure(user_config))

    async def _reconfigure(self, user_config: Any) -> None:
        self.is_reconfiguring = True
        try:
            await self.user_code.reconfigure(user_config)
        finally:
            # Race of the control loop with the collection of a closed loop's tasks, which runs
            # this: `reconfigure` has not ended.
            self.is_reconfiguring = self.loop.is_closed()

    def add_threads(self, max_ongoing: int) -> None:
        """Allow worker threads for `max_ongoing` calls, before it gets that many. Thread-safe.

        No thread ends: the idle ones do by themselves.
        """
        self.pools.default.threads.limit = max_ongoing + RESERVED_THREADS
        self._home.mailbox.post(self._add_anyio_threads, max_ongoing)

    def _add_anyio_threads(self, max_ongoing: int) -> None:
        before, self._anyio_threads = self._anyio_threads, max_ongoing + ANYIO_RESERVE
        limiter = current_default_thread_limiter()
        limiter.total_tokens = max(1, limiter.total_tokens + self._anyio_threads - before)

    @property
    def is_ending(self) -> bool:
        """Return whether it begins no more calls. Running calls may be cut short."""
        return self.state in _ENDING

    @property
    def is_lost(self) -> bool:
        """Return whether its own event loop has ended, so that no call can run. Thread-safe."""
        return isinstance(self._home, EventLoopThread) and self._home.has_ended

    @property
    def last_words(self) -> str:
        """The last lines that the replica wrote, if it has a process of its own."""
        return ""

    @property
    def is_killable(self) -> bool:
        """Return whether a stop ends its user code whatever that does, which no thread allows."""
        return False

    @property
    def stood_s(self) -> float:
        """The seconds for which the user loop of another process has not turned. Thread-safe."""
        return 0.0

    @property
    def is_to_be_replaced(self) -> bool:
        """Return whether it ended by itself, so that another takes its place. Thread-safe."""
        return self.state is ReplicaState.RUNNING and self.is_lost

    @property
    def borrows_loop(self) -> bool:
        """Return whether its event loop is another owner's, or that of other replicas too."""
        return self._borrows

    @property
    def may_stand(self) -> bool:
        """Return whether user code runs that may block the loop for any time. Thread-safe.

        A model is being loaded or unloaded, or `reconfigure` runs.
        """
        return self._models.is_busy or self.is_reconfiguring

    @property
    def orphans(self) -> int:
        """The number of calls that hold a slot although they have been answered. Thread-safe.

        Their caller left, or their deadline passed, and their code has not ended.
        """
        return sum(call.settled for call in list(self._calls))

    def cancel(self, call: Call) -> None:
        """Cancel the work of a call, if it still runs. Thread-safe."""
        if running_loop() is self.loop:
            self._cancel(call)
        else:
            self._home.mailbox.post(self._cancel, call)

    def _begin(self, call: Call) -> None:
        # Race with `hand_over`, which takes the call and then gives it another context. This reads
        # the context and then looks whether the call is still here: two threads never share one.
        context = call.context
        if call not in self._arriving:
            return
        if call.settled or self.state in _ENDING:  # while the call was on its way here
            if self._takes(call):
                self._turn_away(call)
            return
        # The mailbox runs this in an empty context; the task gets the request's own.
        # Race with a cancellation before the task's first step, which would end the task with no
        # line run and its slot lost: there is no task to cancel until `admit` puts it in `_calls`.
        self.loop.create_task(self._run(call), context=context)

    def _takes(self, call: Call) -> bool:
        """Return whether this thread is the one that decides about a call on its way here.

        Race of the loop, which may turn again at this moment, with `hand_over` and `stop` in other
        threads: removing a key is one step, so exactly one of them gets the call.
        """
        return self._arriving.pop(call, _ABSENT) is None

    def hand_over(self) -> int:
        """Send the calls that have not begun to other replicas, and return their number.

        For a replica that gets no more calls: its loop does not turn. Thread-safe. A call that the
        router was just giving it may arrive later, so this is called again and again.
        """
        taken = [call for call in list(self._arriving) if self._takes(call)]
        for call in taken:
            # The call may have a task here, whose first step enters the context only to find that
            # the call is gone, maybe while another replica runs the call.
            call.context = call.context.copy()
            self._turn_away(call)
        items = [
            item for queue in list(self.context.batch_queues) for item in queue.take(self._can_move)
        ]
        for item in items:
            self._run_elsewhere(item)
        return len(taken) + len(items)

    def _can_move(self, call: Call, handler: Any) -> bool:
        """Return whether a call with an item in a batch queue is nothing but that item."""
        return (
            self._reassign is not None
            and not (call.settled or call.metadata.is_http_request)
            and call in self._calls
            and self.user_code.is_batched(call.metadata.method_name, handler.func)
        )

    def _run_elsewhere(self, item: Any) -> None:
        """Run the call of an item that no batch has on another replica, as another call.

        The call keeps its task and its slot here until the loop turns.
        """
        call, work = item.call, item.call.work
        if work is NO_WORK or self._reassign is None:  # it was cancelled, and has ended
            return
        other = Call(call.metadata, work, call.context.copy())
        other.queue, other.runner = call.queue, self

        def answer(_: Call) -> None:
            call.settle(other.value, other.error)
            self._home.mailbox.post(item.settle)

        self._moved.add(call)
        call.when_settled(self._moved.discard)
        call.when_settled(lambda _: other.cancel())
        other.when_settled(answer)
        self._reassign(other, self.gone_error())

    def give_up(self, reason: str) -> int:
        """End the calls that have begun, and return their number. Thread-safe.

        The call that the loop works for at this moment goes on, and those that need its answer.
        """
        spared = self._held_up()
        spared |= self._moved.copy()
        given_up = [call for call in list(self._calls) if call not in spared and not call.settled]
        for call in given_up:
            call.give_up(
                ReplicaUnavailableError(
                    f"Replica {self.replica_id} of {self.replica_id.deployment_id} is stuck, and "
                    f"another takes its place: {reason}. The request had begun and was not "
                    "answered; send it again if that is safe."
                )
            )
        return len(given_up)

    def _held_up(self) -> set[Call]:
        """Return the call that the loop works for now, and those that need its answer."""
        task = asyncio.current_task(self.loop)
        context = None if task is None else context_of(task)
        holder = None if context is None else context.get(CURRENT_CALL)
        return set() if holder is None else holder.family()

    def _cancel(self, call: Call) -> None:
        task = self._calls.get(call)
        if task is not None:
            cancel_once(cast(asyncio.Task[Any], task))
        call.interrupt()

    def admit(self, call: Call, task: asyncio.Future[Any] | None = None) -> bool:
        """Return whether a call that holds a slot is to run now, by default in the current task.

        If not, its slot is given back, and it goes to another replica or has its answer.
        """
        # Checked here first: most calls have no deadline, and this is on the path of each.
        if not call.settled and (call.metadata.deadline is None or not call.is_over()):
            # Race with `stop` in another thread: it changes the state and then reads the calls.
            # This adds the call and then reads the state, so one of the two sees the other.
            self._calls[call] = task or asyncio.current_task(self.loop)
            if self.state not in _ENDING:
                call.began_at = now = monotonic()
                slots = self.slots
                slots.begun += 1
                is_late = now - call.assigned_at > LATE_S
                if is_late or slots.is_late:
                    slots.note_begin(is_late=is_late)
                # After the call was counted: see `Router._settle_position`.
                if slots.position == HELD:
                    self._resume(self)
                return True
            del self._calls[call]
        self._turn_away(call)
        return False

    @property
    def is_computing(self) -> bool:
        """True while its worker threads compute, and the GIL is under pressure. Thread-safe."""
        return self.slots.is_computing

    def _turn_away(self, call: Call) -> None:
        """Give back the slot of a call that will not run here, and send the call elsewhere.

        None of its user code has run.
        """
        self.release(call)
        if not call.settled:
            if self._reassign is None:
                call.settle(error=self.gone_error())
            else:
                self._reassign(call, self.gone_error())

    async def _run(self, call: Call) -> None:
        # As `_takes`, whose call would cost every request.
        if self._arriving.pop(call, _ABSENT) is _ABSENT or not self.admit(call):
            return
        try:
            value = await self.serve(call)
        except asyncio.CancelledError as error:
            self.settle_cancelled(call, error)
        except Exception as error:
            self.fail(call, error)
        else:
            call.settle(value)

    def settle_cancelled(self, call: Call, error: asyncio.CancelledError) -> None:
        """Settle a call whose work was cancelled."""
        # If the caller has cancelled the call, it is settled. Otherwise the replica is being
        # stopped, or user code cancelled its own task.
        ending = self.state in _ENDING
        call.settle(
            error=self.gone_error() if ending else UserCodeExit(error, str(self.replica_id))
        )

    def fail(self, call: Call, error: Exception) -> None:
        """Settle a call with the error of its work, or log the error if the call is settled."""
        if not self._borrows:
            note_other_loop(error)
        # A `CancelledError` comes from the call's cancellation, even where the guard took it for
        # user code's own: AnyIO's groups may take that off their task's count, see
        # `OnceScope.__exit__`.
        is_ours = needs_no_record(error) or isinstance(error.__cause__, asyncio.CancelledError)
        # Race with the timer of the deadline, on another loop, which may stand still: the answer
        # to an error after the deadline is that of the deadline.
        if call.deadline is not None:
            call.is_over()
        if not call.settle(error=error) and not is_ours:
            logger.warning(
                "%s: request %s failed after it was cancelled",
                self.replica_id,
                call.metadata.request_id,
                exc_info=error,
            )

    async def serve(self, call: Call) -> Any:
        """Run an admitted call in the current task, then give its slot back."""
        replica_token = REPLICA.set(self.context)
        call_token = CURRENT_CALL.set(call)
        failure: BaseException | None = None
        if TRACING.tracer is not None:
            trace_begin(call)
        try:
            return await call.work(self.user_code)
        except BaseException as error:
            failure = error
            execution.contain(error, str(self.replica_id))
            raise
        finally:
            CURRENT_CALL.reset(call_token)
            REPLICA.reset(replica_token)
            self.end(call, failure)
            failure = None  # else it would be in a cycle with this frame, by its traceback

    def end(self, call: Call, failure: BaseException | None) -> None:
        """Count a call whose work has ended, and give its slot back."""
        route = call.work.end(call, failure)
        latency = self.latencies.get(route)
        if latency is None:
            latency = self.latencies[route] = Latency()
        ended = monotonic()
        latency_ms = (ended - call.began_at) * 1e3
        latency.total_ms += latency_ms  # as `Latency.add`, whose call would cost every request
        bucket = 0 if latency_ms <= 1.0 else bisect_left(LATENCY_BUCKETS_MS, latency_ms)
        latency.buckets[bucket] += 1
        if TRACING.tracer is not None:
            note_exemplar(call, latency, bucket, latency_ms)
        if failure is not None:
            latency.errors += 1
            self._count_error(route, type(failure).__name__)
            note_end(call, self.replica_id, ended, failure)
        elif ended - call.started_at >= NOTABLE.least_s:
            note_end(call, self.replica_id, ended, None)
        del self._calls[call]
        if self._models.in_use:
            self._models.end(call)
        self._release(self, call)

    def _count_error(self, route: str, kind: str) -> None:
        counts = self.errors
        if (route, kind) not in counts and len(counts) >= MAX_ERROR_TYPES:
            kind = "other"
        counts[route, kind] = counts.get((route, kind), 0) + 1

    def counts(self) -> ReplicaCounts:
        """Return a copy of the counters. Thread-safe."""
        counts = ReplicaCounts(
            routes=copied(self.latencies),
            stalls=copied(self.stalls),
            thread_waits=self.pools.waits(),
            batches={
                each: self.context.batch_counts[each].copy()
                for each in list(self.context.batch_counts)
            },
            model_gets=self.model_gets,
            model_times=self.model_times,
        )
        for key in list(self.errors):
            counts.errors.setdefault(key[0], {})[key[1]] = self.errors[key]
        return counts

    def release(self, call: Call) -> None:
        """Give a call's slot back: its work has ended, or will never begin."""
        self._release(self, call)

    async def check_health(self) -> None:
        """Run the user's health check, on the user loop. Raises what it raises."""
        await run_on(self.loop, self._check_health())

    async def _check_health(self) -> None:
        # One check at a time: a `check_health` that is stuck in a thread would otherwise take
        # another thread every period, until none is left for requests.
        if self.is_checking:
            raise TimeoutError("the previous check_health has not returned yet")
        self.is_checking = True
        try:
            await self.user_code.check_health()
        finally:
            self.is_checking = False

    async def stop(self, timeout_s: float) -> None:
        """Cancel calls, run the user's shutdown code, end loop and threads; all in `timeout_s`.

        Daemon threads that have not ended by then are left behind and logged. A second call only
        waits for them.
        """
        deadline = monotonic() + timeout_s
        # Race of a second call with the loop that the first call left behind: it closes once user
        # code returns, and would drop or cancel anything that is posted to it now. The first call
        # may also have been cancelled: the user's shutdown code runs once.
        winds_down = self.state not in _ENDING
        self.state = ReplicaState.STOPPING
        WATCHDOG.unwatch(self.loop, self)
        try:
            # The owner of a borrowed loop may have closed it without notice.
            if winds_down and not self.loop.is_closed():
                async with asyncio.timeout(timeout_s):
                    await run_on(self.loop, self._wind_down())
        except TimeoutError:
            logger.error(
                "%s did not stop within %.1f s; ingress waits no longer", self.replica_id, timeout_s
            )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():
                raise
            # `_wind_down` was cancelled, not this task: the owner of the loop ends all its tasks.
            logger.error("%s did not stop before its event loop stopped", self.replica_id)
        except Exception:
            logger.exception("Exception during graceful shutdown of replica: %s", self.replica_id)
        self.pools.shutdown()
        if self._executor is not None:
            self._executor.shutdown()
        # In a thread: joining blocks, and the control loop has other replicas to look after.
        await asyncio.to_thread(self._join, deadline)
        for call in list(self._calls):  # a loop that was left behind may change it
            call.give_up(self.gone_error())  # a stream too, whose loop may never end it
            call.settle(error=self.gone_error())
            call.interrupt()
        self.hand_over()  # the loop ended or hangs before the first step of these calls
        self.state = ReplicaState.STOPPED

    async def _wind_down(self) -> None:
        running = [(call, task) for call, task in self._calls.items() if task is not None]
        tasks: list[asyncio.Future[Any]] = [task for _, task in running]
        for call, task in running:
            task.cancel()
            call.interrupt()
        for task in list(self.context.batches):
            if task.get_loop() is self.loop:  # a batch on a loop of the user's ends with that loop
                task.cancel()
                tasks.append(task)
            if (batch := self.context.batches.get(task)) is not None:
                batch.interrupt()
        if tasks:
            await asyncio.wait(tasks)
        try:
            await self.user_code.stop()
        finally:
            await self._models.stop()
        if self._borrows:
            limiter = current_default_thread_limiter()
            # The loop's owner may have set a limit of its own meanwhile, as Ray does.
            limiter.total_tokens = max(1, limiter.total_tokens - self._anyio_threads)

    def _join(self, deadline: float) -> None:
        joins = [("worker threads", self.pools.join), ("event loop", self._home.stop)]
        if self._executor is not None:
            joins.append(("executor threads", self._executor.join))
        stuck = [what for what, join in joins if not join(max(0.1, deadline - monotonic()))]
        was_left_behind, self.is_left_behind = self.is_left_behind, bool(stuck)
        if stuck and not was_left_behind:
            logger.error(
                "user code of %s still blocks its %s; they are left behind",
                self.replica_id,
                " and ".join(stuck),
            )

    def has_left(self) -> bool:
        """Return whether the threads that a stop left behind have ended meanwhile. Thread-safe."""
        is_alive = isinstance(self._home, EventLoopThread) and not self._home.has_ended
        executor = self._executor
        return not (
            is_alive or self.pools.are_alive or (executor is not None and executor.is_alive)
        )

    def _on_dead(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Turn away or interrupt a call that can no longer reach the user loop."""
        for call in args:
            if isinstance(call, Call) and callback == self._begin:
                if self._takes(call):
                    self._turn_away(call)
            elif isinstance(call, Call):
                call.interrupt()

    def gone_error(self) -> ReplicaUnavailableError:
        """Return the error of a call that is not answered because the replica ends."""
        return ReplicaUnavailableError(
            f"Replica {self.replica_id} of {self.replica_id.deployment_id} was stopped before it "
            "answered; send the request again if that is safe."
        )
