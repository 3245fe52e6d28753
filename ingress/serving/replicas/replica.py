"""One replica: the calls that it runs, from their slot to their end.

    submit -> _begin -> a task that runs `call.work(user_code)` -> slot released, call settled

Its `Host` has the user's instance, the loop and the threads. Other threads submit and cancel calls
by the mailbox of the loop. The watchdog writes `stalls`, and `stop` the state: comments name those
races. The router keeps its record of the replica in `slots`.

From `submit` to the first step of its task a call is in `_arriving`. The thread that removes it
from there decides what becomes of it: the task begins it, `hand_over` sends it to another replica.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from time import monotonic
from typing import Any, cast

from ingress.context import REPLICA
from ingress.core.base.counters import LATENCY_BUCKETS_MS, Latency, ReplicaCounts, copied
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL, NO_WORK, Call
from ingress.core.calls.compat import cancel_once
from ingress.core.calls.loops import run_on, running_loop
from ingress.core.calls.retries import NotBegunError
from ingress.core.calls.tracing import TRACING, note_exemplar, trace_begin
from ingress.core.execution import execution
from ingress.core.execution.errors import note_other_loop
from ingress.exceptions import (
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    UserCodeExit,
    needs_no_record,
)
from ingress.serving.replicas.admission import HELD, LATE_S, Admission
from ingress.serving.replicas.host import Host, HostCounts, OwnPart, gone_error
from ingress.telemetry.logs import logger
from ingress.telemetry.logs.identity import name_records
from ingress.telemetry.notable import NOTABLE, note_end
from ingress.telemetry.watchdog import WATCHDOG

MAX_ERROR_TYPES = 200  # pairs of route and type; user code may make types while it runs


class ReplicaState(Enum):
    """The state of a replica, in the words of Ray Serve's status."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


_STOPS = (DeploymentUnavailableError, ReplicaUnavailableError)
_ENDING = (ReplicaState.STOPPING, ReplicaState.STOPPED)
_ABSENT = object()


class Replica:
    """One replica of a deployment. `submit` and `cancel` are thread-safe.

        make_host   makes the place where its user code runs, for so many calls at a time
        release     gives the slot of a call back to the router
        reassign    gives the router a call back that no user code has seen
        resume      asks the router for the next call
        running     the calls that have begun here, each with its task

    It fulfils the `Runner` protocol of `calls.call`.
    """

    __slots__ = (
        "_arriving", "_moved", "_reassign", "_release", "_resume", "asked", "context", "errors",
        "host", "is_ending", "is_left_behind", "is_reconfiguring", "latencies", "loop",
        "replica_id", "running", "slots", "stalls", "state", "unhealthy_reason", "user_code",
    )  # fmt: skip

    def __init__(
        self,
        replica_id: ReplicaID,
        make_host: Callable[[Replica, int], Host],
        *,
        max_ongoing: int,
        release: Callable[[Replica, Call], None],
        reassign: Callable[[Call, Exception], Any] | None = None,
        resume: Callable[[Replica], Any] = lambda replica: None,
    ) -> None:
        self.replica_id = replica_id
        self.state = ReplicaState.STARTING
        self.is_ending = False  # it begins no more calls; those that run may be cut short
        self.latencies: dict[str, Latency] = {}
        self.errors: dict[tuple[str, str], int] = {}  # by route and type of the exception
        self.stalls: dict[str, Latency] = {}  # by method; written by the watchdog
        self.unhealthy_reason = ""
        self.is_left_behind = False  # its stop left threads behind that user code blocks
        self.is_reconfiguring = False
        self.asked: set[str] = set()  # methods of the user that run for the control loop
        self._release = release
        self._resume = resume
        self._reassign = reassign
        self._arriving: dict[Call, None] = {}
        self._moved: set[Call] = set()  # calls here that run on another replica
        self.running: dict[Call, asyncio.Future[Any] | None] = {}
        self.host = host = make_host(self, max_ongoing)
        self.loop, self.context, self.user_code = host.loop, host.context, host.user_code
        self.slots = Admission(self, max_ongoing, host.have_computed)

    def make_current(self) -> None:
        REPLICA.set(self.context)

    @property
    def ongoing(self) -> int:
        """The number of calls that have a slot here. Thread-safe."""
        return self.slots.ongoing

    @property
    def calls(self) -> dict[Call, asyncio.Future[Any] | None]:
        """A copy of the calls here, each with its task once that has begun. Thread-safe."""
        return {**self._arriving.copy(), **self.running.copy()}

    @property
    def num_calls(self) -> int:
        """The number of calls here, also in a child process, which holds no slots. Thread-safe."""
        return len(self._arriving) + len(self.running)

    @property
    def model_ids(self) -> frozenset[str]:
        """The ids of the models that it has or is loading. Thread-safe."""
        return self.host.model_ids

    async def start(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], user_config: Any = None
    ) -> None:
        """Make the replica ready. Raises the errors of user code."""
        name_records()
        await self.host.start(args, kwargs, user_config)
        TRACING.begin(monotonic())  # after user code, which may have set a tracer provider
        self.state = ReplicaState.RUNNING

    def submit(self, call: Call) -> None:
        """Run a call that holds a slot of this replica. Thread-safe."""
        self._arriving[call] = None
        # While the replica ends, by way of the mailbox, or calls would recurse: each one that
        # `_begin` turns away frees the slot of the next.
        if running_loop() is self.loop and not self.is_ending:
            self._begin(call)
        else:
            self.host.mailbox.post(self._begin, call)

    async def reconfigure(self, user_config: Any) -> None:
        """Give user code a new `user_config`, on the user loop. Raises the errors of user code."""
        await run_on(self.loop, self._reconfigure, user_config)

    async def _reconfigure(self, user_config: Any) -> None:
        self.is_reconfiguring = True
        try:
            await self.user_code.reconfigure(user_config)
        finally:
            # Race of the control loop with the collection of a closed loop's tasks, which runs
            # this: `reconfigure` has not ended.
            self.is_reconfiguring = self.loop.is_closed()

    def lose(self) -> None:
        """Begin no more calls: the host has ended by itself. Thread-safe."""
        self.is_ending = True

    @property
    def is_lost(self) -> bool:
        """Return whether its host has ended, so that no call can run. Thread-safe."""
        return bool(self.host.end)

    @property
    def is_to_be_replaced(self) -> bool:
        """Return whether it ended by itself, so that another takes its place. Thread-safe."""
        return self.state is ReplicaState.RUNNING and self.is_lost

    @property
    def orphans(self) -> int:
        """The number of calls that hold a slot although they have been answered. Thread-safe.

        Their caller left, or their deadline passed, and their code has not ended.
        """
        return sum(call.settled for call in list(self.running))

    def cancel(self, call: Call) -> None:
        """Cancel the work of a call, if it still runs. Thread-safe."""
        if running_loop() is self.loop:
            self._cancel(call)
        else:
            self.host.mailbox.post(self._cancel, call)

    def _begin(self, call: Call) -> None:
        # Race with `hand_over`, which takes the call and then gives it another context. This reads
        # the context and then looks whether the call is still here: two threads never share one.
        context = call.context
        if call not in self._arriving:
            return
        if call.settled or self.is_ending:  # while the call was on its way here
            if self.takes(call):
                self._turn_away(call)
            return
        if (direct := self.host.direct) is not None and direct(call):
            return
        # The mailbox runs this in an empty context; the task gets the request's own.
        # Race with a cancellation before the task's first step, which would end the task with no
        # line run and its slot lost: there is no task to cancel until `admit` puts it in `running`.
        self.loop.create_task(self._run(call), context=context)

    def takes(self, call: Call) -> bool:
        """Return whether this thread is the one that decides about a call on its way here.

        Race of the loop, which may turn again at this moment, with `hand_over` and `stop` in other
        threads: removing a key is one step, so exactly one of them gets the call.
        """
        return self._arriving.pop(call, _ABSENT) is None

    def hand_over(self) -> int:
        """Send the calls that have not begun to other replicas, and return their number.

        For a replica that gets no more calls: its loop does not turn. Thread-safe. A call that the
        router was just giving it may arrive later, so this is called again and again. A process
        hands its own over meanwhile: the link logs their number.
        """
        self.host.hand_over()
        taken = [call for call in list(self._arriving) if self.takes(call)]
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
            and not (call.settled or call.metadata.is_http_request or call.work.is_bound)
            and call in self.running
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
            self.host.mailbox.post(item.settle)

        self._moved.add(call)
        call.when_settled(self._moved.discard)
        call.when_settled(lambda _: other.cancel())
        other.when_settled(answer)
        self._reassign(other, self.gone_error())

    def give_up(self, reason: str) -> int:
        """End the calls that have begun, and return their number. Thread-safe.

        The call that the loop works for at this moment goes on, and those that need its answer.
        """
        holder = self.host.holder()
        spared = self._moved.copy() | (set() if holder is None else holder.family())
        given_up = [call for call in list(self.running) if call not in spared and not call.settled]
        for call in given_up:
            call.give_up(
                ReplicaUnavailableError(
                    f"Replica {self.replica_id} of {self.replica_id.deployment_id} is stuck, and "
                    f"another takes its place: {reason}. The request had begun and was not "
                    "answered; send it again if that is safe."
                )
            )
        return len(given_up)

    def _cancel(self, call: Call) -> None:
        task = self.running.get(call)
        # Race with the user loop, which has sent the last of the answer just before the client
        # left: only a stop ends a background task.
        if task is not None and (not call.work.has_answer or isinstance(call.error, _STOPS)):
            cancel_once(cast(asyncio.Task[Any], task))
        call.interrupt()

    def when_ended(self, call: Call, callback: Callable[[], Any]) -> None:
        """Call `callback()` on the user loop once no code of the call runs here. Thread-safe."""
        self.host.mailbox.post(self._when_ended, call, callback)

    def _when_ended(self, call: Call, callback: Callable[[], Any]) -> None:
        task = self.running.get(call)
        if task is None:
            callback()
        else:
            task.add_done_callback(lambda _: callback())

    def admit(self, call: Call, task: asyncio.Future[Any] | None = None) -> bool:
        """Return whether a call that holds a slot is to run now, by default in the current task.

        If not, its slot is given back, and it goes to another replica or has its answer.
        """
        # Checked here first: most calls have no deadline, and this is on the path of each.
        if not call.settled and (call.metadata.deadline is None or not call.is_over()):
            # Race with `stop` in another thread: it sets `is_ending` and then reads the calls.
            # This adds the call and then reads the flag, so one of the two sees the other.
            self.running[call] = task or asyncio.current_task(self.loop)
            if not self.is_ending:
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
            del self.running[call]
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
        # As `takes`, whose call would cost every request.
        if self._arriving.pop(call, _ABSENT) is _ABSENT or not self.admit(call):
            return
        try:
            value = await self.serve(call)
        except asyncio.CancelledError as error:
            self.settle_cancelled(call, error)
        except Exception as error:  # of user code: the caller gets it
            self.fail(call, error)
        else:
            call.settle(value)

    def settle_cancelled(self, call: Call, error: asyncio.CancelledError) -> None:
        """Settle a call whose work was cancelled."""
        # If the caller has cancelled the call, it is settled. Otherwise the replica is being
        # stopped, or user code cancelled its own task.
        call.settle(
            error=self.gone_error() if self.is_ending else UserCodeExit(error, str(self.replica_id))
        )

    def fail(self, call: Call, error: Exception) -> None:
        """Settle a call with the error of its work, or log the error if the call is settled."""
        if isinstance(error, NotBegunError) and self._reassign is not None and not call.settled:
            call.began_at = 0.0
            self._reassign(call, error)
            return
        if self.host.isolation is not OwnPart.NONE:
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
            try:
                CURRENT_CALL.reset(call_token)
                REPLICA.reset(replica_token)
            except ValueError:
                pass  # finalized in another context: user code has ended the loop of this task
            self.end(call, failure)
            failure = None  # else it would be in a cycle with this frame, by its traceback

    def end(self, call: Call, failure: BaseException | None) -> None:
        """Count a call whose work has ended, and give its slot back."""
        if failure is not None and isinstance(failure, NotBegunError):
            # Another replica may serve it: it keeps its work, and is no failure of the route.
            del self.running[call]
            self._release(self, call)
            return
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
        if (failure is not None or call.settled) and call.was_cancelled(failure):
            latency.cancelled += 1
        elif failure is not None:
            latency.errors += 1
            self._count_error(route, type(failure).__name__)
        if failure is not None:
            note_end(call, self.replica_id, ended, failure)
        elif ended - call.started_at >= NOTABLE.least_s:
            note_end(call, self.replica_id, ended, None)
        del self.running[call]
        models = self.host.models
        if models is not None and models.in_use:
            models.end(call)
        self._release(self, call)

    def _count_error(self, route: str, kind: str) -> None:
        counts = self.errors
        if (route, kind) not in counts and len(counts) >= MAX_ERROR_TYPES:
            kind = "other"
        counts[route, kind] = counts.get((route, kind), 0) + 1

    def counts(self, inside: HostCounts | None = None) -> ReplicaCounts:
        """Return a copy of the counters, with those of the host if they are known. Thread-safe."""
        inside = inside or self.host.counts()
        counts = ReplicaCounts(
            routes=copied(self.latencies),
            stalls=copied(self.stalls),
            thread_waits=inside.thread_waits,
            batches=inside.batches,
            model_gets=inside.model_gets,
            model_times=inside.model_times,
        )
        for key in list(self.errors):
            counts.errors.setdefault(key[0], {})[key[1]] = self.errors[key]
        return counts

    def release(self, call: Call) -> None:
        """Give a call's slot back: its work has ended, or will never begin."""
        self._release(self, call)

    async def check_health(self) -> None:
        """Run the user's health check, on the user loop. Raises what it raises."""
        await run_on(self.loop, self._alone, "check_health", self.user_code.check_health)

    async def autoscaling_stats(self) -> Any:
        """Return the result of `record_autoscaling_stats`, which runs on the user loop.

        Raises its errors, and `TimeoutError` while the last one runs, as for `check_health`.
        """
        ask = self.user_code.autoscaling_stats
        return await run_on(self.loop, self._alone, "record_autoscaling_stats", ask)

    async def _alone(self, name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        # One at a time: a `check_health` that is stuck in a thread would otherwise take another
        # thread every period, until none is left for requests.
        if name in self.asked:
            raise TimeoutError(f"the previous {name} has not returned yet")
        self.asked.add(name)
        try:
            return await ask()
        finally:
            self.asked.discard(name)

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
        self.state, self.is_ending = ReplicaState.STOPPING, True
        WATCHDOG.unwatch(self.loop, self)
        try:
            # The owner of a borrowed loop may have stopped or closed it without notice.
            can_run = self.loop.is_running() or self.host.isolation is not OwnPart.NONE
            if winds_down and can_run and not self.loop.is_closed():
                async with asyncio.timeout(timeout_s):
                    await run_on(self.loop, self._wind_down)
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
        # In a thread: joining blocks, and the control loop has other replicas to look after.
        self._note_left_behind(await asyncio.to_thread(self.host.join, deadline))
        for call in list(self.running):  # a loop that was left behind may change it
            call.give_up(self.gone_error())  # a stream too, whose loop may never end it
            call.settle(error=self.gone_error())
            call.interrupt()
        self.hand_over()  # the loop ended or hangs before the first step of these calls
        self.state = ReplicaState.STOPPED

    async def _wind_down(self) -> None:
        running = [(call, task) for call, task in self.running.items() if task is not None]
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
        await self.host.stop()

    def _note_left_behind(self, stuck: list[str]) -> None:
        was_left_behind, self.is_left_behind = self.is_left_behind, bool(stuck)
        if stuck and not was_left_behind:
            logger.error(
                "user code of %s still blocks its %s; they are left behind",
                self.replica_id,
                " and ".join(stuck),
            )

    def on_dead(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Turn away or interrupt a call that can no longer reach the user loop."""
        for call in args:
            if isinstance(call, Call) and callback == self._begin:
                if self.takes(call):
                    self._turn_away(call)
            elif isinstance(call, Call):
                call.interrupt()

    def gone_error(self) -> ReplicaUnavailableError:
        """Return the error of a call that is not answered because the replica ends."""
        ended_itself = self.state is ReplicaState.RUNNING
        return gone_error(self.replica_id, self.host.end if ended_itself else "")
