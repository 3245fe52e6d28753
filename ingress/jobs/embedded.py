"""The adapter of the embedded store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn
from uuid import uuid4

from ingress.core.base.options import is_number
from ingress.core.base.task_models import (
    DEFAULT_CONCURRENCY,
    SQLiteAdapterConfig,
    TaskProcessorAdapter,
    TaskProcessorConfig,
    TaskResult,
)
from ingress.core.base.types import JobState as State
from ingress.core.base.types import short_key
from ingress.exceptions import TaskNotFoundError
from ingress.jobs import table
from ingress.jobs.calls import JobCalls, current_trace, dumped, loaded
from ingress.jobs.consumer import QueueConsumer
from ingress.jobs.store import Store, use_store
from ingress.jobs.table import Job, NewJob

OPTIONS = ("countdown", "eta", "task_id", "idempotency_key", "fairness_key")
STATUS = {
    State.RUNNING: "STARTED",
    State.DONE: "SUCCESS",
    State.DEAD: "FAILURE",
    State.UNREADABLE: "FAILURE",
    State.CANCELLED: "REVOKED",
}


class EmbeddedTaskProcessorAdapter(TaskProcessorAdapter):
    """Jobs in one SQLite file: the default. Its methods may be called in any thread.

    `enqueue_task_sync` and its asynchronous half take Celery's options `countdown` (seconds), `eta`
    (a `datetime`, or Unix time) and `task_id`, and `idempotency_key`: a second enqueue with the key
    of a job that the store still has returns that job. Jobs of one `fairness_key` take turns with
    those of other keys.
    """

    def __init__(self, config: TaskProcessorConfig) -> None:
        options = config.adapter_config
        if not isinstance(options, SQLiteAdapterConfig | None):
            raise TypeError(
                "adapter_config must be a SQLiteAdapterConfig for the embedded store, or a "
                f"CeleryAdapterConfig for Celery, got {options!r}; leave it out for the default"
            )
        self._config = config
        self._options = options or SQLiteAdapterConfig()
        self._store: Store | None = None

    def initialize(self, consumer_concurrency: int = DEFAULT_CONCURRENCY) -> None:
        if self._store is None:  # its jobs run in the slots of the replicas
            self._store = use_store(self._options.path)

    def consumer(
        self, calls: JobCalls, room: Callable[[], int], slots_of: Callable[[str], float]
    ) -> QueueConsumer:
        """Return the consumer of the queue, whose jobs become such calls."""
        return QueueConsumer(self._config, self._options, self._opened, calls, room, slots_of)

    def _no_consumer(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "the embedded store runs jobs as calls of a deployment; put "
            f"@task_consumer(task_processor_config={self._config!r}) on its class"
        )

    register_task_handle = start_consumer = stop_consumer = _no_consumer

    def enqueue_task_sync(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        return result_of(self._enqueue(task_name, args, kwargs, options).result())

    async def enqueue_task_async(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        # A client that goes does not undo the enqueue.
        return result_of(await asyncio.wrap_future(self._enqueue(task_name, args, kwargs, options)))

    def get_task_status_sync(self, task_id: str) -> TaskResult:
        return self._found(task_id, self._opened.read(table.get, task_id).result())

    async def get_task_status_async(self, task_id: str) -> TaskResult:
        found = self._opened.read(table.get, task_id)
        return self._found(task_id, await asyncio.wrap_future(found))

    def cancel_task_sync(self, task_id: str) -> None:
        self._found(task_id, self._cancel(task_id).result())

    async def cancel_task_async(self, task_id: str) -> None:
        self._found(task_id, await asyncio.wrap_future(self._cancel(task_id)))

    def get_metrics_sync(self) -> dict[str, Any]:
        return self._opened.read(table.counts, self._config.queue_name, tuple(State)).result()

    async def get_metrics_async(self) -> dict[str, Any]:
        found = self._opened.read(table.counts, self._config.queue_name, tuple(State))
        return await asyncio.wrap_future(found)

    def health_check_sync(self) -> list[dict[str, Any]]:
        self._opened.write(lambda db, now: None).result()
        return [{str(self._opened.path): {"ok": "pong"}}]

    @property
    def _opened(self) -> Store:
        if self._store is None:
            raise RuntimeError("initialize() comes first; instantiate_adapter_from_config calls it")
        return self._store

    def _enqueue(
        self, name: object, args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> Future[Job]:
        if not isinstance(name, str) or not name:
            raise ValueError(f"task_name must be the name of a task handler, got {name!r}")
        for option in options:
            if option not in OPTIONS:
                raise TypeError(
                    f"enqueue_task() got an unexpected option {option!r}; the embedded store has: "
                    f"{', '.join(OPTIONS)}"
                )
        args, kwargs = [] if args is None else args, {} if kwargs is None else kwargs
        if not isinstance(args, Sequence) or isinstance(args, str | bytes):
            raise TypeError(f"args must be a list or a tuple, got {args!r}; write args=[{args!r}]")
        if not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a dict, got {kwargs!r}")
        limit = self._options.max_payload_bytes
        payload = dumped([args, kwargs], limit, f"the arguments of {name!r}")
        new = NewJob(
            _text("task_id", options) or str(uuid4()),
            self._config.queue_name,
            name,
            payload,
            _delay_s(options),
            _text("idempotency_key", options),
            current_trace(),
            short_key(_text("fairness_key", options) or ""),
        )
        return self._opened.write(table.put, new, is_durable=True)

    def _cancel(self, task_id: str) -> Future[Job | None]:
        keep_s = self._options.keep_results_s
        return self._opened.write(table.cancel, task_id, keep_s, is_durable=True)

    def _found(self, task_id: str, job: Job | None) -> TaskResult:
        if job is None:
            raise TaskNotFoundError(
                f"there is no job {task_id!r}; results are kept for keep_results_s="
                f"{self._options.keep_results_s:g} seconds"
            )
        return result_of(job)


def result_of(job: Job) -> TaskResult:
    """Return a row of the table as users see it."""
    waits = "RETRY" if job.tries else "PENDING"
    return TaskResult(
        id=job.id,
        status=STATUS.get(State(job.state), waits),
        created_at=job.created,
        result=loaded(job.result),
        progress=loaded(job.progress),
        error=job.error,
        attempts=job.tries,
        is_cancelled=bool(job.cancelled),
    )


def _text(name: str, options: Mapping[str, Any]) -> str | None:
    value = options.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    raise TypeError(f"{name} must be a text that is not empty, got {value!r}; or leave it out")


def _delay_s(options: Mapping[str, Any]) -> float:
    """Return the seconds until a job may begin."""
    countdown, eta = options.get("countdown"), options.get("eta")
    if countdown is not None and eta is not None:
        raise TypeError("countdown and eta are both given, and say the same; leave one out")
    if eta is not None:
        at = eta if is_number(eta) else getattr(eta, "timestamp", lambda: None)()
        if at is None:
            raise TypeError(f"eta must be a datetime, or Unix time in seconds, got {eta!r}")
        return max(0.0, float(at) - time.time())
    if countdown is None:
        return 0.0
    if not is_number(countdown) or countdown < 0:
        raise TypeError(f"countdown must be a number of seconds, 0 or more, got {countdown!r}")
    return float(countdown)
