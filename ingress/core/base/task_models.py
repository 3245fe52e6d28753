"""The options and results of durable jobs, and the interface of what carries them.

Names, fields and methods: Ray 2.60.0, serve/schema.py. `ingress.schema` has them for users. What
Ray lacks is marked "ours". Loaded when a program names one of them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ingress.core.base.options import NonNegativeInt, Options, PositiveFloat, PositiveInt

CELERY = "ray.serve.task_processor.CeleryTaskProcessorAdapter"
DEFAULT_CONCURRENCY = 5  # source: Ray 2.60.0, DEFAULT_MAX_ONGOING_REQUESTS


class CeleryAdapterConfig(Options):
    """The broker and the result backend of Celery, as in Ray Serve.

    `app_custom_config` is merged into the configuration of the Celery app, `task_custom_config`
    changes the retries: `max_retries`, `retry_backoff`, `retry_backoff_max`, `retry_jitter`.
    """

    app_custom_config: dict[str, Any] | None = None
    task_custom_config: dict[str, Any] | None = None
    broker_url: str = Field(min_length=1)
    backend_url: str = Field(min_length=1)
    broker_transport_options: dict[str, Any] | None = None


def _file(path: str) -> str:
    if path.startswith((":memory:", "file:")) or not path.strip() or "\0" in path:
        raise ValueError(
            f"path must be that of a file, got {path!r}: jobs in memory would not survive their "
            "process; leave it out for the default, 'jobs.db'"
        )
    return path


class SQLiteAdapterConfig(Options):
    """The embedded store: one SQLite file on a local disk, which all processes of a machine share.

    path               the file; by default in the working directory
    max_payload_bytes  the largest arguments, result or progress of one job, as JSON
    keep_results_s     seconds for which an ended job is kept: its result, error, idempotency key
    max_crashes        the death of a process that runs the job for this time is its last
    retry_delay_s      the pause before the first retry; it doubles each time, up to 60 times this
    timeout_s          the deadline of one attempt, `None` for none

    Ours.
    """

    path: Annotated[str, AfterValidator(_file)] = "jobs.db"
    max_payload_bytes: PositiveInt = 1024 * 1024
    keep_results_s: PositiveFloat = 7 * 86400.0
    max_crashes: PositiveInt = 3
    retry_delay_s: PositiveFloat = 1.0
    timeout_s: PositiveFloat | None = None


class TaskProcessorConfig(Options):
    """The queue of a consumer, and what carries it.

    Without `adapter` the type of `adapter_config` decides: `CeleryAdapterConfig` for Celery, and
    `SQLiteAdapterConfig` or nothing for the embedded store. An adapter of one's own is a subclass
    of `TaskProcessorAdapter`, or its import path.

    max_retries                  attempts after the first one; `None` for the default, 3
    failed_task_queue_name       queue that gets a message for each job that is given up
    unprocessable_task_queue_name  queue that gets one for each job that no handler can read
    """

    queue_name: str = Field(min_length=1)
    adapter: str | Callable[..., Any] | None = None
    adapter_config: Any = None
    max_retries: NonNegativeInt | None = 3
    failed_task_queue_name: str | None = None
    unprocessable_task_queue_name: str | None = None


class TaskResult(BaseModel):
    """One job as it is now.

    status        "PENDING", "STARTED", "RETRY", "SUCCESS", "FAILURE" or "REVOKED"
    created_at    Unix time of the enqueue
    result        what the handler returned; for a generator, the last item
    progress      the last item that a generator has yielded; ours, as all below
    error         the last error, as one line
    attempts      how often a handler has begun it
    is_cancelled  it was cancelled; with "STARTED", its handler cannot stop and holds its slot
    """

    model_config = ConfigDict(frozen=True)

    id: str
    status: str
    created_at: float | None = None
    result: Any = None
    progress: Any = None
    error: str | None = None
    attempts: int = 0
    is_cancelled: bool = False


class TaskProcessorAdapter(ABC):
    """A carrier of jobs, from `enqueue_task_sync` to the handlers of a deployment.

    `initialize` is called once. Of a deployment with `@task_consumer`, each handler is then
    registered as a function that blocks until its call has ended, and `start_consumer` begins.
    The asynchronous half runs the other in a thread, unless a subclass knows better.
    """

    @abstractmethod
    def initialize(self, consumer_concurrency: int = DEFAULT_CONCURRENCY) -> None:
        """Connect. `consumer_concurrency` is the number of jobs that may run at once."""

    @abstractmethod
    def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
        """Have the jobs of a name, by default that of the function, run by a function."""

    @abstractmethod
    def enqueue_task_sync(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        """Add a job, and return once it is stored. Blocks."""

    @abstractmethod
    def get_task_status_sync(self, task_id: str) -> TaskResult:
        """Return a job as it is now. Blocks."""

    @abstractmethod
    def start_consumer(self, **kwargs: Any) -> None:
        """Begin to run jobs."""

    @abstractmethod
    def stop_consumer(self, timeout: float = 10.0) -> None:
        """Take no more jobs, and wait for those that run for `timeout` seconds."""

    @abstractmethod
    def cancel_task_sync(self, task_id: str) -> None:
        """Take a job out of its queue, or cancel its call. Blocks."""

    @abstractmethod
    def get_metrics_sync(self) -> dict[str, Any]:
        """Return the numbers of the queue. Blocks."""

    @abstractmethod
    def health_check_sync(self) -> list[dict[str, Any]]:
        """Return one answer for each consumer that can be reached. Blocks."""

    def watch_slots(self, room: Callable[[], int]) -> None:
        """Learn which function returns the deployment's free slots, before the start. Ours."""
        del room

    def waiting(self) -> int:
        """Return the number of jobs that wait, for autoscaling: as last known, at once. Ours."""
        return 0

    async def enqueue_task_async(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        """Add a job, and return once it is stored."""
        return await asyncio.to_thread(self.enqueue_task_sync, task_name, args, kwargs, **options)

    async def get_task_status_async(self, task_id: str) -> TaskResult:
        """Return a job as it is now."""
        return await asyncio.to_thread(self.get_task_status_sync, task_id)

    async def cancel_task_async(self, task_id: str) -> None:
        """Take a job out of its queue, or cancel its call."""
        await asyncio.to_thread(self.cancel_task_sync, task_id)

    async def get_metrics_async(self) -> dict[str, Any]:
        """Return the numbers of the queue."""
        return await asyncio.to_thread(self.get_metrics_sync)

    async def health_check_async(self) -> list[dict[str, Any]]:
        """Return one answer for each consumer that can be reached."""
        return await asyncio.to_thread(self.health_check_sync)
