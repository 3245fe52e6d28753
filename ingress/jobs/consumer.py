"""The consumer of a deployment's queue in the embedded store.

    look: claim as many jobs as there are free slots, one more if none of its jobs waits for a slot
    run:  a call by handle; its end is the job's: done, retried, given up, or handed back

It lives on a loop of its own in the server's process, not in the replicas: a replica's process that
is killed is an error of its call here. If the server itself is killed, another process, or the next
start, finds the lock of its owner free, and has its jobs run again.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ingress.core.base.task_models import SQLiteAdapterConfig, TaskProcessorConfig
from ingress.core.base.types import JobState as State
from ingress.core.calls.loops import EventLoopThread, run_blocking
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
    TaskPayloadError,
    TaskQueueError,
)
from ingress.jobs import table
from ingress.jobs.calls import (
    JobCalls,
    UnreadableArgumentsError,
    code_has_ended,
    dumped,
    has_begun,
    is_handed_back,
)
from ingress.jobs.store import Store
from ingress.jobs.table import Job, Limits, Outcome, Turns
from ingress.telemetry.logs import logger

DEFAULT_RETRIES = 3
BACKOFF = 60  # the longest pause between two attempts, in `retry_delay_s`; source: Celery's 60 s
TICK_S = 1.0  # between two looks for owners that have died, and results to delete
BUSY_S = 0.01  # between two looks for a slot, while jobs wait
REFUSED_S = 0.1  # until a job is tried again whose call the router refused
HANDED_BACK = Outcome(State.WAITING, counts=False)


class QueueConsumer:
    """The jobs of one deployment that run. Owned by its loop, except where said otherwise.

    `room` returns the number of the deployment's free slots, `slots_of` that of jobs of a fairness
    key's turn; `counts` has the number of jobs in
    each state of `table.State`, at most a second old, and `ended` those that have ended here.
    """

    def __init__(
        self,
        config: TaskProcessorConfig,
        options: SQLiteAdapterConfig,
        store: Store,
        calls: JobCalls,
        room: Callable[[], int],
        slots_of: Callable[[str], float],
    ) -> None:
        self.queue = config.queue_name
        retries = config.max_retries
        self._max_retries = DEFAULT_RETRIES if retries is None else retries
        self._options = options
        self._limits = Limits(
            options.keep_results_s,
            options.max_crashes,
            config.failed_task_queue_name,
            config.unprocessable_task_queue_name,
        )
        self._store, self._calls, self._room = store, calls, room
        self._turns = Turns(slots_of)
        self._running: dict[int, Any] = {}  # responses by the `seq` of their jobs; None before
        self._cancelled: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._is_stopping = False
        self._home: EventLoopThread | None = None
        self._looking: asyncio.Task[None] | None = None
        self.counts: dict[str, float] = {}
        self.ended: dict[str, int] = {}

    # Any thread.

    def begin(self) -> None:
        """Begin to take jobs."""
        home = self._home = EventLoopThread(f"ingress-jobs-{self.queue}")
        home.mailbox.post(self._begin, home.loop)

    def waiting(self) -> int:
        """Return the number of jobs that wait for a slot, for autoscaling."""
        return int(self.counts.get("due", 0))

    def ask(self, action: str, **arguments: Any) -> Any:
        """Answer `ingress jobs`: "list", "cancel", "retry" or "purge"."""
        store, given = self._store, (self.queue, arguments.get("id"), arguments.get("state"))
        match action:
            case "list":
                limit = arguments.get("limit", 100)
                jobs = store.read(table.listed, *given, limit).result()
                return [each._asdict() for each in jobs]
            case "cancel":
                keep_s = self._options.keep_results_s
                job = store.write(table.cancel, given[1], keep_s, is_durable=True).result()
                return int(job is not None and job.queue == self.queue and bool(job.cancelled))
            case "retry":
                return store.write(table.retry, *given, is_durable=True).result()
            case "purge":
                return store.write(table.purge, *given).result()
        raise ValueError(f"action must be list, cancel, retry or purge, got {action!r}")

    def pause(self, timeout_s: float) -> None:
        """Take no more jobs: the deployment drains. Those that run go on until that has ended."""
        self._is_stopping = True
        self._wake()

    def close(self, timeout_s: float) -> None:
        """Hand the jobs back that have not ended, and end the thread. Blocks."""
        self.pause(timeout_s)
        if (home := self._home) is not None:
            with suppress(TimeoutError):
                run_blocking(home.loop, self._close(timeout_s), timeout_s + 1.0)
            self._store.unwatch(self)
            home.stop(1.0)

    def _wake(self) -> None:
        if (home := self._home) is not None:
            home.mailbox.post(self._woken.set)

    # Its loop.

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._store.watch(self, self._wake)
        self._looking = loop.create_task(self._look_on())

    async def _close(self, timeout_s: float) -> None:
        if (looking := self._looking) is None:
            return
        # It ends after the last job. It is not cancelled: it may be about to take jobs, which would
        # stay with this process and never run.
        await asyncio.wait([looking], timeout=timeout_s / 2)
        for task in list(self._tasks):  # code that does not stop: its job runs again elsewhere
            task.cancel()
        await asyncio.wait([looking], timeout=timeout_s / 2)

    async def _look_on(self) -> None:
        loop, tick_at, has_failed = asyncio.get_running_loop(), 0.0, False
        while self._tasks or not self._is_stopping:  # while it drains, jobs may be cancelled
            self._woken.clear()
            pause_s = TICK_S
            try:
                if not self._store.owner:
                    await asyncio.wrap_future(self._store.write(self._store.own))
                if loop.time() >= tick_at:
                    began = loop.time()
                    await self._tick()
                    # Counting a long queue takes time, which its jobs are to have.
                    tick_at = loop.time() + max(TICK_S, 20 * (loop.time() - began))
                pause_s = await self._look(loop)
                has_failed = False
            except TaskQueueError as error:
                if not has_failed:
                    logger.error("jobs of the queue %r wait: %s", self.queue, error)
                has_failed = True
            except Exception:  # one mistake must not end the queue
                logger.exception("the consumer of the queue %r failed", self.queue)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, TICK_S)):
                    await self._woken.wait()

    async def _tick(self) -> None:
        store = self._store
        for owner in await asyncio.wrap_future(store.read(table.owners, self.queue)):
            if not await asyncio.wrap_future(store.read(store.is_alive, owner)):
                found = await asyncio.wrap_future(
                    store.write(table.recover, self.queue, owner, self._limits)
                )
                logger.warning(
                    "jobs of the queue %r whose process died run again: %d", self.queue, found
                )
        await asyncio.wrap_future(store.write(table.expire))
        self.counts = await asyncio.wrap_future(store.read(table.counts, self.queue))

    async def _look(self, loop: asyncio.AbstractEventLoop) -> float:
        """Begin the jobs that there are slots for. Returns the seconds until the next look."""
        unbegun = sum(
            response is None or not has_begun(response) for response in self._running.values()
        )
        limit = 0 if self._is_stopping else max(self._room() - unbegun, 1 - unbegun, 0)
        store = self._store
        request = (store.write if limit else store.read)(
            table.look, self.queue, limit, store.owner, self._turns
        )
        jobs, due_s, cancelled = await asyncio.wrap_future(request)
        for job in jobs:
            self._running[job.seq] = None
            task = loop.create_task(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(self._has_ended)
        for seq in cancelled:
            if seq in self._running and seq not in self._cancelled:
                self._cancelled.add(seq)
                if (response := self._running[seq]) is not None:
                    response.cancel()
        if due_s is None or self._is_stopping:
            return TICK_S
        return max(due_s, BUSY_S)

    async def _run(self, job: Job) -> None:
        """Run a job and write its end."""
        try:
            outcome = await self._outcome(job)
        except asyncio.CancelledError:  # by `_close`
            outcome = HANDED_BACK
        except Exception as error:  # a mistake of this module: no job is lost
            logger.exception("the job %s of the queue %r failed", job.id, self.queue)
            outcome = Outcome(State.DEAD, error=_line(error))
        finally:
            self._running.pop(job.seq, None)
            self._cancelled.discard(job.seq)
        if outcome.state is not State.WAITING or outcome.counts:
            self.ended[outcome.state] = self.ended.get(outcome.state, 0) + 1
        tells = outcome.state in (State.DEAD, State.UNREADABLE)  # maybe another queue, to be woken
        while True:
            try:
                written = self._store.write(
                    table.finish, job, outcome, self._limits, is_durable=tells
                )
                if not await asyncio.wrap_future(written):
                    logger.warning("the end of the job %s came late: it runs again", job.id)
                break
            except TaskQueueError as error:
                logger.error("the end of the job %s is not written yet: %s", job.id, error)
                await asyncio.sleep(TICK_S)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._woken.set()

    async def _outcome(self, job: Job) -> Outcome:
        response: Any = None
        try:
            handler = self._calls.handler(job.name)
            args, kwargs = json.loads(job.payload)
            response = self._running[job.seq] = self._calls.begin(
                handler, args, kwargs,
                job_id=job.id, timeout_s=self._options.timeout_s, trace=job.trace,
                fairness_key=job.fairness_key,
            )  # fmt: skip
            if job.seq in self._cancelled:  # since the look that found both
                response.cancel()
            if handler.streams:
                value = None
                async for value in response:
                    await self._note_progress(job, value)
            else:
                value = await response
            return Outcome(State.DONE, self._dumped(value, f"the result of {job.name!r}"))
        except (UnreadableArgumentsError, ValueError) as error:
            if response is None:
                return Outcome(State.UNREADABLE, error=str(error))
            return self._failed(job, error)
        except Exception as error:
            return await self._ended(job, response, error)

    async def _ended(self, job: Job, response: Any, error: Exception) -> Outcome:
        """Return the outcome of a call that ended with an error."""
        if isinstance(error, RequestCancelledError):
            if not self._is_stopping:  # a second attempt beside the first would be two at once
                await code_has_ended(response)
            if job.seq in self._cancelled:
                return Outcome(State.CANCELLED)
        if is_handed_back(error, response, is_stopping=self._is_stopping):
            is_refused = isinstance(error, BackPressureError | DeploymentUnavailableError)
            return HANDED_BACK._replace(delay_s=REFUSED_S if is_refused else 0.0)
        if isinstance(error, ReplicaUnavailableError):
            is_last = job.crashes + 1 >= self._limits.max_crashes
            state = State.DEAD if is_last else State.WAITING
            return Outcome(state, error=_line(error), crashed=True)
        return self._failed(job, error)

    def _failed(self, job: Job, error: Exception) -> Outcome:
        is_last = job.tries - job.crashes > self._max_retries
        if is_last or isinstance(error, TaskPayloadError):
            logger.error(
                "the job %s of the queue %r is given up after %d attempts",
                *(job.id, self.queue, job.tries),
                exc_info=error,
            )
            return Outcome(State.DEAD, error=_line(error))
        factor = min(2 ** (job.tries - job.crashes - 1), BACKOFF)
        return Outcome(
            State.WAITING, error=_line(error), delay_s=factor * self._options.retry_delay_s
        )

    async def _note_progress(self, job: Job, value: object) -> None:
        progress = self._dumped(value, f"the progress of {job.name!r}")
        with suppress(TaskQueueError):  # the work goes on
            await asyncio.wrap_future(self._store.write(table.note_progress, job, progress))

    def _dumped(self, value: object, what: str) -> str:
        return dumped(value, self._options.max_payload_bytes, what)


def _line(error: BaseException) -> str:
    """Return an error as one line, without the notes on it."""
    return " ".join(traceback.format_exception_only(error)[0].split())[:2000]
