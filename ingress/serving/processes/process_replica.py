"""A replica whose user code runs in a child process.

To the router and to calls it is a `Replica` like any other: slots, cancellations, deadlines and
counts are the same code, on the loop that requests arrive on. Only its user code is remote. The
control loop replaces it once its child has ended.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, ClassVar, TypeVar

from ingress.app.asgi import BoundApp
from ingress.app.declaration.build import BuiltDeployment
from ingress.context import ReplicaRuntime
from ingress.core.base.counters import Latency
from ingress.core.calls.call import Call
from ingress.core.calls.loops import mailbox_of, start_on
from ingress.core.calls.retries import NotBegunError
from ingress.core.calls.tracing import TRACING
from ingress.core.execution.execution import contained
from ingress.exceptions import ReplicaUnavailableError
from ingress.handle import Invocation
from ingress.serving.processes.code import (
    ByPath,
    ByValue,
    accept_main,
    pickled_arguments,
    reference_to,
)
from ingress.serving.processes.errands import MakeHandle
from ingress.serving.processes.errors import died
from ingress.serving.processes.frames import dumps, loads, pickle_by_value
from ingress.serving.processes.messages import News, ReplicaSpec
from ingress.serving.processes.output import levels
from ingress.serving.processes.remote_call import RemoteCall
from ingress.serving.processes.remote_code import RemoteCode
from ingress.serving.processes.resources import EnvironmentOf, environment_of, visible
from ingress.serving.replicas.replica import Replica, ReplicaState
from ingress.serving.replicas.replica_factories import ReplicaFactories
from ingress.telemetry.metrics import series
from ingress.telemetry.watchdog import WATCHDOG

T = TypeVar("T")
ANSWER_S = 1.0


class ProcessReplica(Replica):
    """A replica in a child process.

    `built` is its deployment; `make_handle` returns the handles for the calls that the child makes;
    `on_lost()` is called, on the loop of the frames, when the process has ended by itself.

    Its loop is that of its frames, at best the one that requests arrive on. User code has another.
    """

    __slots__ = ("_code", "_news", "_prepare")
    made_there: ClassVar[type[Replica]] = Replica
    """The class of the replica in the child."""

    def __init__(
        self,
        *args: Any,
        built: BuiltDeployment,
        make_handle: MakeHandle,
        on_lost: Callable[[], None],
        stall_threshold_s: float | None,
        factories: ReplicaFactories,
        **options: Any,
    ) -> None:
        def remote_code(
            target: object, app: BoundApp | None, context: ReplicaRuntime, plan: object
        ) -> Any:
            return RemoteCode(context.replica_id, app, make_handle)

        super().__init__(*args, **options, factories=replace(factories, user_code=remote_code))
        self._code: RemoteCode = self.user_code  # type: ignore[assignment]
        self._prepare = partial(
            _prepared,
            built,
            make_replica=self.made_there,
            replica_id=self.replica_id,
            max_ongoing=options["max_ongoing"],
            num_cpus=options["num_cpus"],
            lanes=options["lanes"],
            sync_in_threadpool=options["sync_in_threadpool"],
            stall_threshold_s=stall_threshold_s,
        )
        self._news: News | None = None
        self._code.link.on_news = self._take_news
        self._code.link.on_lost = on_lost
        self._code.link.module = built.deployment.func_or_class.__module__
        # For the names of its methods: there is no instance in this process.
        self.context.servable_object = built.deployment.func_or_class

    @property
    def model_ids(self) -> frozenset[str]:
        return self._code.link.model_ids

    @property
    def model_gets(self) -> int:
        return 0 if self._news is None else self._news.model_gets

    @property
    def model_times(self) -> dict[str, Latency]:
        return {} if self._news is None else self._news.model_times

    @property
    def batch_queues(self) -> dict[str, int]:
        return {} if self._news is None else self._news.batch_queues

    @property
    def pid(self) -> int:
        """The id of its process; 0 before it has one."""
        return self._code.link.pid

    @property
    def is_lost(self) -> bool:
        """Return whether its process has ended, so that no call can run. Thread-safe."""
        return bool(self._code.link.end)

    @property
    def is_ending(self) -> bool:
        """Return whether it begins no more calls: it stops, or its process has ended."""
        return self.is_lost or super().is_ending

    @property
    def borrows_loop(self) -> bool:
        """Return false: the loop of its user code is its own, and ends with its process."""
        return False

    @property
    def last_words(self) -> str:
        """The last lines of its process's standard error, for the status."""
        return self._code.link.last_words

    @property
    def is_killable(self) -> bool:
        """Return true: a stop ends its process, whatever its user code does."""
        return True

    @property
    def stood_s(self) -> float:
        """The seconds for which its user loop has not turned. Thread-safe."""
        return self._code.link.stood_s

    async def start(
        self, args: Sequence[object], kwargs: Mapping[str, object], user_config: object = None
    ) -> None:
        """Start the child and wait until it serves. Raises the errors of user code."""
        # In a thread: this looks for the module of the user's class, and counts GPUs.
        self._code.specification, self._code.environment_of = await asyncio.to_thread(
            self._prepare,
            user_config=user_config,
            place=self.context.place,
            log_levels=levels(),
            log_mark=self._code.link.mark,
        )
        await super().start(args, kwargs, user_config)

    def _take_news(self, news: News) -> None:
        """Take the counters of the child."""
        self.stalls.update(news.stalls)
        self.context.batch_counts.update(news.batches)
        self._news = news
        self.pools.told = news.lanes, news.thread_waits
        series.take(series.source_of(self.context, self.pid), news.metrics)
        WATCHDOG.note(news.new_stalls)

    def look(
        self, look: Callable[..., T], *arguments: object, timeout_s: float
    ) -> Callable[..., T]:
        """Begin to call `look(replica, *arguments)` in the child, in a thread beside its loop.

        `look` is a function of a module. Returns a function that waits for the result, and raises
        `TimeoutError` if there is none in `timeout_s`, or the error that `look` raised. It takes a
        shorter time to wait, if there is one. Both are thread-safe, and not for the loop of the
        frames.
        """
        answer = start_on(self.loop, self._code.look(look, arguments, timeout_s))
        # Longer, because that loop may stand still itself.
        return lambda wait_s=timeout_s + ANSWER_S: loads(answer.result(wait_s))

    def add_threads(self, max_ongoing: int) -> None:
        """Have the child allow worker threads for `max_ongoing` calls. Thread-safe."""
        mailbox_of(self.loop).post(self._code.add_threads, max_ongoing)

    def hand_over(self) -> int:
        """Send the calls that the child has not begun elsewhere. Thread-safe.

        Returns the number of those that were not sent to it. The link logs that of the others.
        """
        mailbox_of(self.loop).post(self._code.link.hand_over)
        return super().hand_over()

    def _held_up(self) -> set[Call]:
        return set()  # its process is killed

    def _begin(self, call: Call) -> None:
        # Without a task where the child's answer is all there is to wait for. A call that cannot
        # begin has a task nevertheless: it frees a slot, and the next one would begin in recursion.
        work, deadline = call.work, call.metadata.deadline
        if (
            isinstance(work, Invocation)
            and work.channel is None
            and TRACING.tracer is None  # else the waits get spans, in the task
            and not (call.settled or self.is_ending)
            and (deadline is None or monotonic() < deadline)
        ):
            self._send(call, work)
        else:
            super()._begin(call)

    def _send(self, call: Call, invocation: Invocation) -> None:
        """Begin a call without a task."""
        work = RemoteCall(loop=self.loop)
        if not self._takes(call) or not self.admit(call, work):
            return
        work.begin(call, self._end_call)
        try:
            # A copy: the call's context is entered if a replica that has ended turned it away.
            call.context.copy().run(self._code.send, work, invocation)
        except BaseException as error:  # of user code, which pickling may call
            # Later, for the reason above.
            self.loop.call_soon(work.end, None, error)

    def _end_call(self, work: RemoteCall) -> None:
        """End a call without a task, as `serve` and `_run` end the others."""
        call, error = work.call, work.error
        if error is None:
            self.end(call, None)
            call.settle(work.value)
        elif isinstance(error, asyncio.CancelledError):
            self.end(call, error)
            self.settle_cancelled(call, error)
        else:
            error = contained(error, str(self.replica_id), is_task=False)
            self.end(call, error)
            assert isinstance(error, Exception)
            self.fail(call, error)

    def admit(self, call: Call, task: asyncio.Future[None] | None = None) -> bool:
        if self._code.link.end and not call.settled:
            self._turn_away(call)  # the router has yet to be told
            return False
        return super().admit(call, task)

    def end(self, call: Call, failure: BaseException | None) -> None:
        if isinstance(failure, NotBegunError):
            # Another replica may serve it: it keeps its work, and is no failure of the route.
            del self._calls[call]
            self.release(call)
        else:
            super().end(call, failure)

    def fail(self, call: Call, error: Exception) -> None:
        if isinstance(error, NotBegunError) and self._reassign is not None and not call.settled:
            call.began_at = 0.0
            self._reassign(call, error)
        else:
            super().fail(call, error)

    def gone_error(self) -> ReplicaUnavailableError:
        """Return the error of a call that is not answered because the replica ends."""
        end = self._code.link.end
        if end and self.state is ReplicaState.RUNNING:
            return died(self.replica_id, end, ReplicaUnavailableError)
        return super().gone_error()

    def _join(self, deadline: float) -> None:
        self._code.link.kill()
        self._code.link.join()


def _prepared(built: BuiltDeployment, **options: Any) -> tuple[bytes, EnvironmentOf]:
    """Return the specification of a child, and the function that makes its environment.

    Raises `TypeError` for what cannot be sent to it.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            f'deployment {built.name!r} has isolation="process", which Windows does not support; '
            "leave it out"
        )
    code = reference_to(built)
    if isinstance(code, ByPath) and code.main:
        accept_main()
    if isinstance(code, ByValue):
        pickle_by_value()
    specification = dumps(ReplicaSpec(code=code, arguments=pickled_arguments(built), **options))
    config = built.deployment.config
    gpus = visible() if config.num_gpus else []
    return specification, partial(environment_of, config, built.name, gpus)
