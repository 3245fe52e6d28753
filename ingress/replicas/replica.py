"""One replica: the user's instance, its loop, its worker threads and the calls it runs.

    submit -> _begin -> a task that runs `call.work(user_code)` -> slot released, call settled

Two threads meet here: whoever submits, and the user loop. They meet in the mailbox only.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from time import monotonic
from typing import Any

from anyio.to_thread import current_default_thread_limiter

from ingress.asgi import BoundApp
from ingress.base.counters import Latency
from ingress.base.types import ReplicaID
from ingress.calls.call import CURRENT_CALL, Call
from ingress.calls.cancel_scopes import cancel_once
from ingress.calls.loops import BorrowedLoop, EventLoopThread, OnDead, run_on, running_loop
from ingress.context import REPLICA, ReplicaContext
from ingress.exceptions import ReplicaUnavailableError, UserCodeExit, is_cancellation
from ingress.execution import execution
from ingress.execution.lane_pools import ReplicaPools
from ingress.execution.lanes import lanes_of
from ingress.execution.loop_executor import LoopExecutor
from ingress.replicas.models import Models
from ingress.replicas.user_code import MakePlan, UserCode
from ingress.watchdog import WATCHDOG

LATE_S = 0.01  # between the assignment of a slot and the first line of user code
CALLS_IN_TIME = 16  # one after another, until a replica is not late any more
HELD = -3  # `position` of a replica that gets its next call when it has begun the last
ANYIO_RESERVE = 8  # threads of AnyIO's, beyond one a request

logger = logging.getLogger("ingress")


class ReplicaState(Enum):
    """The words of Ray Serve's status."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


_ENDING = (ReplicaState.STOPPING, ReplicaState.STOPPED)
_ABSENT = object()


class Replica:
    """Lives on its user loop; `submit` and `cancel` are thread-safe.

    `lanes` says how many threads each lane has. `borrowed` is the loop to live on when user code
    has no thread of its own; `stall_threshold_s` how long that may stand still until somebody hears
    of it, `None` for ever. `release` gives a slot back to the router, `reassign` a call that none
    of our user code has seen, and `resume` asks the router for the next call. `ongoing`,
    `max_ongoing`, `position`, `given`, which counts the calls that got a slot, and `requested`,
    which counts them by the model they name, are the router's, under its lock. `begun` counts the
    calls that began, and `is_late` says that they begin late: both are written on the user loop.
    """

    __slots__ = (
        "_anyio_threads", "_borrows", "_calls", "_executor", "_home", "_in_time", "_is_checking",
        "_models", "_reassign", "_release", "_resume", "_stall_threshold_s", "begun", "context",
        "given", "is_late", "latencies", "loop", "max_ongoing", "ongoing", "pools", "position",
        "replica_id", "requested", "stalls", "state", "thread", "unhealthy_reason",
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
    ) -> None:
        self.replica_id = replica_id
        self.state = ReplicaState.STARTING
        self.latencies: dict[str, Latency] = {}
        self.stalls: dict[str, Latency] = {}  # by method; the watchdog's
        self.unhealthy_reason = ""
        self.max_ongoing, self.ongoing, self.position = max_ongoing, 0, -1
        self.requested: dict[str, int] = {}
        self.given = 0
        self.begun = 0
        self.is_late = False
        self._in_time = 0
        self._release = release
        self._resume = resume
        self._reassign = reassign
        self._borrows = borrowed is not None
        self._stall_threshold_s, self._anyio_threads = stall_threshold_s, 0
        name = str(replica_id)
        on_dead: OnDead = self._on_dead
        self._home = (
            EventLoopThread(name, on_dead)
            if borrowed is None
            else BorrowedLoop(name, borrowed, on_dead)
        )
        self.loop = self._home.loop
        self.thread = self._home.ident  # `None` if the loop is borrowed
        self.pools = ReplicaPools(self._home, lanes_of(func_or_class, max_ongoing, lanes or {}))
        make_plan: MakePlan = partial(
            execution.plan,
            sync_in_threadpool=sync_in_threadpool,
            pool=self.pools.default,
            lanes=self.pools.lanes,
        )
        self._executor: LoopExecutor | None = None
        if borrowed is None:  # a borrowed loop's executor is its lender's, see `LocalEngine`
            # Source: Ray 2.60.0, replica.py: 5 threads for the default of one CPU.
            workers = min(32, max(1, math.ceil(num_cpus)) + 4)
            self._executor = LoopExecutor(f"{name}-executor", workers, self.loop)
            self._home.mailbox.post(self.loop.set_default_executor, self._executor)
        # What runs here, and its task once that has begun.
        self._calls: dict[Call, asyncio.Task[Any] | None] = {}
        self.context = ReplicaContext(replica_id, _loop=self.loop, _make_plan=make_plan)
        self._models = Models(self.loop, self.context, make_plan, self._calls)
        try:
            self.user_code = UserCode(func_or_class, bound_app, self.context, make_plan)
        except BaseException:  # the user's app, when it was cloned; nobody would ever stop us
            self._home.stop(1.0)
            raise
        self._is_checking = False

    def __repr__(self) -> str:
        return f"Replica({self.replica_id}, {self.state.value}, ongoing={self.ongoing})"

    @property
    def model_ids(self) -> frozenset[str]:
        """The models it has or is loading. Thread-safe."""
        return self._models.ids

    async def start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any = None
    ) -> None:
        """Make the replica ready, on its own loop. Raises what the user's code raises."""
        await run_on(self.loop, self._start(args, kwargs, user_config))
        self.state = ReplicaState.RUNNING

    async def _start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any
    ) -> None:
        # AnyIO's threads are for what Starlette and FastAPI run themselves: `yield` dependencies,
        # background tasks, files. A request is in one of them at a time, so none waits for long.
        limiter = current_default_thread_limiter()
        self._anyio_threads = self.max_ongoing + ANYIO_RESERVE
        limiter.total_tokens = self._anyio_threads + (limiter.total_tokens if self._borrows else 0)
        await self.user_code.start(args, kwargs, user_config)
        # Not before: a constructor may take its time.
        if self._stall_threshold_s is not None:
            WATCHDOG.watch(self.loop, self, self._stall_threshold_s)
            # Race with `stop`, which waits for no constructor: it changes the state, then has us
            # let go of; this is the other way round.
            if self.is_ending:
                WATCHDOG.unwatch(self.loop, self)

    def submit(self, call: Call) -> None:
        """Run a call that holds one of our slots. Thread-safe."""
        # While we end, one after the other: what `_begin` turns away frees the slot of the next.
        if running_loop() is self.loop and self.state not in _ENDING:
            self._begin(call)
        else:
            self._home.mailbox.post(self._begin, call)

    @property
    def is_ending(self) -> bool:
        """Whether it begins no more calls. What runs may be cut short."""
        return self.state in _ENDING

    @property
    def orphans(self) -> int:
        """How many calls hold a slot although they have been answered.

        Their caller left, or their deadline passed, and the code has not ended. From any thread.
        """
        return sum(call.settled for call in list(self._calls))

    def cancel(self, call: Call) -> None:
        """Cancel what a call runs, if it still does. Thread-safe."""
        if running_loop() is self.loop:
            self._cancel(call)
        else:
            self._home.mailbox.post(self._cancel, call)

    def _begin(self, call: Call) -> None:
        if call.settled or self.state in _ENDING:  # on its way here; the router let us go
            self._turn_away(call)
            return
        # A drain runs in an empty context; the task gets the request's own.
        self.loop.create_task(self._run(call), context=call.context)
        # Race with a cancellation before the task's first step, which would end it with not one
        # line run, slot and all: there is no task to cancel until `serve` puts it here.
        self._calls[call] = None

    def _cancel(self, call: Call) -> None:
        task = self._calls.get(call)
        if task is not None:
            cancel_once(task)
        call.interrupt()

    def admit(self, call: Call) -> bool:
        """Whether a call that holds one of our slots is to run now, in the current task.

        If not, its slot is given back, and it goes to another replica or has its answer.
        """
        # Asked here first, because most have no deadline and this is on everybody's way.
        if not call.settled and (call.metadata.deadline is None or not call.is_over()):
            # Race with `stop` in another thread: it changes the state and then looks at the calls,
            # this puts the call there and then looks at the state. One sees the other.
            self._calls[call] = asyncio.current_task(self.loop)
            if self.state not in _ENDING:
                self._note_begin(call)
                return True
            del self._calls[call]
        self._turn_away(call)
        return False

    def _note_begin(self, call: Call) -> None:
        """Count a call that begins, and notice whether calls begin late."""
        call.has_begun = True
        self.begun += 1
        if monotonic() - call.assigned_at > LATE_S:
            self.is_late, self._in_time = True, 0
        elif self.is_late:
            self._in_time += 1
            self.is_late = self._in_time < CALLS_IN_TIME
        if self.position == HELD:  # after it was counted: see `Router`
            self._resume(self)

    def _turn_away(self, call: Call) -> None:
        """Give back the slot of a call that will not run here; none of its user code has."""
        self.release(call)
        if not call.settled:
            if self._reassign is None:
                call.settle(error=self.gone_error())
            else:
                self._reassign(call, self.gone_error())

    async def _run(self, call: Call) -> None:
        # Race with `stop`, which does not wait for us for ever: whoever takes the call out of here
        # gives its slot back.
        if self._calls.pop(call, _ABSENT) is _ABSENT or not self.admit(call):
            return
        try:
            value = await self.serve(call)
        except asyncio.CancelledError as error:
            # Settled already if the caller asked for it; otherwise the replica is being stopped,
            # or user code cancelled its own task.
            ending = self.state in _ENDING
            call.settle(
                error=self.gone_error() if ending else UserCodeExit(error, str(self.replica_id))
            )
        except Exception as error:
            self.fail(call, error)
        else:
            call.settle(value)

    def fail(self, call: Call, error: Exception) -> None:
        """Settle a call with what its work raised, or log that if it has its answer."""
        # A `CancelledError` is what we caused even where the guard took it for user code's own:
        # AnyIO's groups may take our cancellation off their task's count, see `OnceScope.__exit__`.
        is_ours = is_cancellation(error) or isinstance(error.__cause__, asyncio.CancelledError)
        if not call.settle(error=error) and not is_ours:
            logger.warning(
                "%s: request %s failed after it was cancelled",
                self.replica_id,
                call.metadata.request_id,
                exc_info=error,
            )

    async def serve(self, call: Call) -> Any:
        """Run a call that was admitted in the current task, then give its slot back."""
        replica_token = REPLICA.set(self.context)
        call_token = CURRENT_CALL.set(call)
        begin = monotonic()
        failed = True
        try:
            assert call.work is not None
            value = await call.work(self.user_code)
            failed = False
            return value
        except BaseException as error:
            execution.contain(error, str(self.replica_id))
            raise
        finally:
            CURRENT_CALL.reset(call_token)
            REPLICA.reset(replica_token)
            latency = self.latencies.get(call.route)
            if latency is None:
                latency = self.latencies[call.route] = Latency()
            latency.add((monotonic() - begin) * 1e3, is_error=failed)
            del self._calls[call]
            if self._models.in_use:
                self._models.end(call)
            self.release(call)
            call.release_references()

    def release(self, call: Call) -> None:
        """Give a call's slot back: its work has really ended, or will never begin."""
        self._release(self, call)

    async def check_health(self) -> None:
        """Ask the user's code, on the user loop. Raises what it raises."""
        await run_on(self.loop, self._check_health())

    async def _check_health(self) -> None:
        # One question at a time: a `check_health` that is stuck in a thread would otherwise take
        # another thread every period, until none is left for requests.
        if self._is_checking:
            raise TimeoutError("the previous check_health has not returned yet")
        self._is_checking = True
        try:
            await self.user_code.check_health()
        finally:
            self._is_checking = False

    async def stop(self, timeout_s: float) -> None:
        """Cancel what runs, run the user's shutdown code, end loop and threads, within a time.

        What does not end by then is left behind in its daemon thread, and said so; a second call
        only waits for that.
        """
        deadline = monotonic() + timeout_s
        # Race of a second call with the loop that the first left behind: it closes once user code
        # returns, and would take with it, or cancel, what is posted to it now.
        winds_down = self.state is not ReplicaState.STOPPED
        self.state = ReplicaState.STOPPING
        WATCHDOG.unwatch(self.loop, self)
        try:
            # A lender may have closed it without a word.
            if winds_down and not self.loop.is_closed():
                async with asyncio.timeout(timeout_s):
                    await run_on(self.loop, self._wind_down())
        except TimeoutError:
            logger.error("%s did not stop within %.1f s; left behind", self.replica_id, timeout_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            if task.cancelling():
                raise
            # Not us, but what winds down: its lender ends the loop, with all tasks there are.
            logger.error("%s did not stop before its event loop did", self.replica_id)
        except Exception:
            logger.exception("Exception during graceful shutdown of replica: %s", self.replica_id)
        self.pools.shutdown()
        if self._executor is not None:
            self._executor.shutdown()
        # In a thread, because these wait, and the control loop has other replicas to look after.
        await asyncio.to_thread(self._join, deadline)
        for call in list(self._calls):  # a loop that was left behind changes it
            if (task := self._calls.get(call)) is not None:
                call.settle(error=self.gone_error())
                call.interrupt()
            elif self._calls.pop(call, _ABSENT) is None:
                self._turn_away(call)  # the loop ended or hangs before the call's first step
        self.state = ReplicaState.STOPPED

    async def _wind_down(self) -> None:
        running = [(call, task) for call, task in self._calls.items() if task is not None]
        tasks = [task for _, task in running]
        for call, task in running:
            task.cancel()
            call.interrupt()
        for task in list(self.context._batches):
            if task.get_loop() is self.loop:  # one on a loop of the user's ends with that
                task.cancel()
                tasks.append(task)
            if (batch := self.context._batches.get(task)) is not None:
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
        if stuck:
            logger.error("%s left its %s behind, stuck", self.replica_id, " and ".join(stuck))

    def _on_dead(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Fail a call that can no longer reach our loop."""
        for call in args:
            if isinstance(call, Call) and callback == self._begin:
                self._turn_away(call)
            elif isinstance(call, Call):
                call.interrupt()

    def gone_error(self) -> ReplicaUnavailableError:
        """Return what a call is told that we do not answer because we end."""
        return ReplicaUnavailableError(
            f"Replica {self.replica_id} of {self.replica_id.deployment_id} was stopped before it "
            "answered; send the request again if that is safe."
        )
