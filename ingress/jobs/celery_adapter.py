"""The adapter for Celery: jobs in Redis or RabbitMQ, which consumers on many machines share.

    enqueue -> send_task -> the broker -> CeleryConsumer: as many messages as there are free slots
    a message -> Celery's tracer -> JobFunction: a call of the replica -> result, retry, dead letter
              -> acknowledged after its end

Celery's worker is not used: one process has one of it (its event loop, its hub, its set of revoked
tasks are global), and it takes more messages than it runs. What it does with one task is: the
tracer stores states and results, and sends retries, links and chords.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from queue import Empty
from threading import Event, Thread
from time import monotonic
from typing import Any

from ingress.core.base.task_models import (
    DEFAULT_CONCURRENCY,
    CeleryAdapterConfig,
    TaskProcessorAdapter,
    TaskProcessorConfig,
    TaskResult,
)
from ingress.core.execution.execution import kind
from ingress.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
    TaskPayloadError,
    TaskQueueError,
)
from ingress.jobs.calls import (
    JobFunction,
    UnreadableArgumentsError,
    code_end,
    current_trace,
    dumped,
    has_begun,
    is_handed_back,
)
from ingress.jobs.consumer import BACKOFF, BUSY_S, DEFAULT_RETRIES, REFUSED_S, TICK_S
from ingress.telemetry.logs import logger

try:
    from celery import Celery
    from celery.app.trace import trace_task
    from celery.exceptions import Ignore
    from celery.utils.collections import LimitedSet
    from kombu.exceptions import SerializationError
    from kombu.utils.json import loads
    from kombu.utils.url import maybe_sanitize_url
except ImportError as error:
    raise ImportError(
        f"Celery is not installed ({error}): pip install 'fastapi-ingress[jobs]'"
    ) from error

OURS = frozenset({
    "task_acks_late", "task_ignore_result", "task_reject_on_worker_lost", "worker_concurrency",
    "worker_pool",
})  # fmt: skip
CONNECT_S = 4.0
IDLE_S = 0.1  # between two looks into the queue if there was no message for a second
TRACE = "ingress_trace"  # the header with the trace that a job was enqueued in
ENDS = frozenset({"SUCCESS", "FAILURE", "REVOKED"})
PROGRESS = "PROGRESS"
LAST_S = 2.0  # for cancelled jobs to end, once the time of a stop is over
NUMBERS = itertools.count()

# Takes a message and notes that it is taken, in one step. Kombu 5.7 takes two: a process that is
# killed between them loses the job (a test of 200 jobs and 4 kills did).
TAKE = """
local message = redis.call('RPOP', KEYS[1])
if message then
    local kept = cjson.decode(message).properties
    local to = cjson.encode({kept.delivery_info.exchange, kept.delivery_info.routing_key})
    redis.call('ZADD', KEYS[2], ARGV[1], kept.delivery_tag)
    redis.call('HSET', KEYS[3], kept.delivery_tag, '[' .. message .. ',' .. string.sub(to, 2))
end
return message
"""


class CeleryTaskProcessorAdapter(TaskProcessorAdapter):
    """Jobs of Celery, in the queue of a broker. Its methods may be called in any thread.

    The options of `enqueue_task_sync` are those of Celery's `send_task`: `countdown`, `eta`,
    `task_id`, `expires`, `priority`, `link`, ...
    """

    def __init__(self, config: TaskProcessorConfig) -> None:
        options = config.adapter_config
        if not isinstance(options, CeleryAdapterConfig):
            raise TypeError(
                "TaskProcessorConfig.adapter_config must be an instance of CeleryAdapterConfig, "
                f"got {options!r}; write CeleryAdapterConfig(broker_url=..., backend_url=...)"
            )
        if taken := sorted(OURS.intersection(options.app_custom_config or ())):
            raise ValueError(
                "The following configuration keys cannot be changed via app_custom_config: "
                f"{taken}. These are managed internally by the CeleryTaskProcessorAdapter; the "
                "slots of the deployment are max_ongoing_requests"
            )
        self._config, self._options = config, options
        self._consumer: CeleryConsumer | None = None

    def initialize(self, consumer_concurrency: int = DEFAULT_CONCURRENCY) -> None:
        """Connect. Raises `ConnectionError` if the broker or the result backend does not answer."""
        app = _app_of(self._config, self._options)
        for name in ("broker_url", "backend_url"):
            try:
                _try_to_reach(app, name)
            except Exception as error:
                url = maybe_sanitize_url(getattr(self._options, name))
                raise ConnectionError(
                    f"{name}={url!r} cannot be reached: {error}; start the server, or correct "
                    f"{name} in CeleryAdapterConfig"
                ) from None
        self._consumer = CeleryConsumer(app, self._config, consumer_concurrency)

    def watch_slots(self, room: Callable[[], int]) -> None:
        self._opened.room = room

    def waiting(self) -> int:
        return self._opened.waiting

    def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
        self._opened.register(func, name or func.__name__, self._options.task_custom_config or {})

    def start_consumer(self, **kwargs: Any) -> None:
        self._opened.begin()

    def stop_consumer(self, timeout: float = 10.0) -> None:
        self._opened.stop(timeout)

    def enqueue_task_sync(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        if "idempotency_key" in options:
            raise TypeError(
                "idempotency_key is an option of the embedded store: a broker keeps no keys; leave "
                "adapter_config out, or have the handler look whether its work is done"
            )
        if "fairness_key" in options:
            raise TypeError(
                "fairness_key is an option of the embedded store: a broker orders its jobs itself; "
                "leave adapter_config out, or give each key a queue of its own"
            )
        jsonable = self._opened.jsonable([args or [], kwargs or {}], f"arguments of {task_name!r}")
        args, kwargs = jsonable
        if (trace := current_trace()) is not None:
            options["headers"] = {**(options.get("headers") or {}), TRACE: trace}
        with _answers("the broker"):
            sent = self._app.send_task(
                task_name, args, kwargs, **{"queue": self._config.queue_name, **options}
            )
        return TaskResult(id=sent.id, status="PENDING", created_at=time.time())

    def get_task_status_sync(self, task_id: str) -> TaskResult:
        return _result_of(task_id, self._meta(task_id))

    def cancel_task_sync(self, task_id: str) -> None:
        if (status := self._meta(task_id)["status"]) in ENDS:
            return
        with _answers("the broker"):
            if status not in ("STARTED", PROGRESS):
                # For consumers that do not hear it now. The backend of rpc:// cannot store it.
                with suppress(RuntimeError):
                    self._app.backend.mark_as_revoked(task_id, "revoked")
            self._app.control.revoke(task_id)

    def get_metrics_sync(self) -> dict[str, Any]:
        with _answers("the broker"):
            return self._app.control.inspect().stats() or {}

    def health_check_sync(self) -> list[dict[str, Any]]:
        with _answers("the broker"):
            found: list[dict[str, Any]] = self._app.control.ping()
        return found

    @property
    def _opened(self) -> CeleryConsumer:
        if self._consumer is None:
            raise RuntimeError("initialize() comes first; instantiate_adapter_from_config calls it")
        return self._consumer

    @property
    def _app(self) -> Any:
        return self._opened.app

    def _meta(self, task_id: str) -> dict[str, Any]:
        with _answers("the result backend"):
            found: dict[str, Any] = self._app.backend.get_task_meta(task_id)
        return found


@dataclass(slots=True, eq=False)
class _Job:
    """A message, from its arrival to its acknowledgement.

    `messages` has more than one if it was sent again meanwhile. `error` is that of the handler. The
    thread that runs it writes `response`, `progress`, `error` and `is_handed_back`.
    """

    key: tuple[Any, int]
    task: Any
    request: dict[str, Any]
    messages: list[Any]
    is_running: bool = False
    response: Any = None
    progress: Any = None
    error: Exception | None = None
    is_cancelled: bool = False
    is_handed_back: bool = False

    @property
    def id(self) -> Any:
        return self.key[0]


class CeleryConsumer:
    """The jobs of one queue that run here. It has a thread, and each job that runs has one.

    `basic_get` takes a message at a time: a prefetched one would wait here for a slot while another
    machine is idle. A job whose time is yet to come is held, unacknowledged.
    """

    def __init__(self, app: Celery, config: TaskProcessorConfig, concurrency: int) -> None:
        self.app, self._config, self._concurrency = app, config, concurrency
        self.room: Callable[[], int] | None = None
        self.waiting = 0
        self._name = f"{config.queue_name}@{socket.gethostname()}-{os.getpid()}-{next(NUMBERS)}"
        self._jobs: dict[tuple[Any, int], _Job] = {}
        self._held: list[tuple[float, int, _Job]] = []
        self._ended: deque[tuple[_Job, bool]] = deque()
        self._revoked = LimitedSet(maxlen=50_000, expires=86_400)
        self._total: dict[str, int] = {}
        self._stopping = Event()
        self._stop_at = float("inf")
        self._pool = ThreadPoolExecutor(1000, f"ingress-jobs-{config.queue_name}")
        self._thread: Thread | None = None

    # Any thread.

    def register(self, func: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
        """Have a function run the jobs of a name."""
        if not isinstance(func, JobFunction) and kind(func).is_async:
            raise NotImplementedError(
                "Async task handlers are not supported yet. Please use synchronous functions for "
                "task handlers, or @task_handler in a deployment with @task_consumer."
            )
        retries = self._config.max_retries

        def run(task: Any, *args: Any, **kwargs: Any) -> Any:
            job = self._jobs[task.request.id, task.request.retries]
            return self._attempt(job, func, args, kwargs)

        defaults = {
            "autoretry_for": (Exception,),
            "dont_autoretry_for": (UnreadableArgumentsError, TaskPayloadError),
            "max_retries": DEFAULT_RETRIES if retries is None else retries,
            "retry_backoff": True,
            "retry_backoff_max": BACKOFF,
            "retry_jitter": False,
        }
        # Not shared: other apps of this process would have it, too.
        self.app.task(run, name=name, bind=True, shared=False, **{**defaults, **options})

    def begin(self) -> None:
        """Begin to take jobs."""
        if self._thread is None:
            self._thread = Thread(target=self._consume, name=f"ingress-{self._name}", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Take no more jobs, and hand those back that have not ended in time. Blocks."""
        self._stop_at = monotonic() + timeout_s
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s + LAST_S)

    # Its thread.

    def _consume(self) -> None:
        has_failed = False
        while not (self._stopping.is_set() and not self._jobs):
            try:
                with self.app.connection_for_read() as connection:
                    connection.connect()
                    has_failed = False
                    self._serve(connection)
            except Exception as error:  # the broker, or one mistake: neither ends the queue
                if not has_failed:
                    logger.error("jobs of the queue %r wait: %s", self._config.queue_name, error)
                has_failed = True
                self._settle()
                if self._stopping.wait(TICK_S) and monotonic() > self._stop_at:
                    break
        self._pool.shutdown(wait=False)

    def _serve(self, connection: Any) -> None:
        """Take messages until the connection breaks, or the consumer has stopped."""
        channel = connection.default_channel
        if is_redis := hasattr(channel, "unacked_index_key"):
            channel._get = partial(_get_safely, channel)
        queue = self.app.amqp.queues[self._config.queue_name](channel)
        queue.declare()
        accept = self.app.conf.accept_content
        handlers = {"ping": self._ping, "stats": self._stats, "revoke": self._revoke}
        node = self.app.control.mailbox.Node(self._name, handlers=handlers)
        node.channel = connection.channel()
        node.listen(callback=lambda body, message: node.handle_message(body, message))
        tick_at, busy_until = 0.0, 0.0
        while not self._stopping.is_set() or self._is_ending():
            now = monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                self.waiting = queue.queue_declare().message_count
                if is_redis:  # of consumers that have died
                    channel.qos.restore_visible(num=100, interval=1)
            self._begin_held(now)
            while self._slots() > 0 and (message := queue.get(accept=accept)) is not None:
                busy_until = now + TICK_S
                self._take(message)
            with suppress(TimeoutError):
                connection.heartbeat_check()
                connection.drain_events(
                    timeout=BUSY_S if now < busy_until or self._jobs else IDLE_S
                )
            self._settle()

    def _slots(self) -> int:
        """Return the number of jobs to take now: one more if none of its jobs waits for a slot."""
        if self._stopping.is_set():
            return 0
        running = [each for each in self._jobs.values() if each.is_running]
        if self.room is None:
            return self._concurrency - len(running)
        unbegun = sum(each.response is None or not has_begun(each.response) for each in running)
        return max(self.room() - unbegun, 1 - unbegun)

    def _take(self, message: Any) -> None:
        headers: dict[str, Any] = message.headers or {}
        key: tuple[Any, int] = (headers.get("id"), headers.get("retries") or 0)
        if (known := self._jobs.get(key)) is not None:  # it is here: not twice at once
            known.messages.append(message)
            return
        try:
            args, kwargs, embed = message.decode()
            task = self.app.tasks[headers["task"]]
            due = monotonic() + (_seconds_until(headers.get("eta")) or 0.0)
            _seconds_until(headers.get("expires"))  # can it be read?
        except Exception as error:
            self._pool.submit(self._run, _Job(key, None, headers, [message]), error)
            return
        request = {
            **headers,
            "args": args,
            "kwargs": kwargs,
            "delivery_info": {"exchange": "", "routing_key": self._config.queue_name},
            "headers": {TRACE: headers[TRACE]} if TRACE in headers else None,
            "hostname": self._name,
            "retries": key[1],
            **(embed or {}),
        }
        job = self._jobs[key] = _Job(key, task, request, [message])
        heapq.heappush(self._held, (due, next(NUMBERS), job))
        self._begin_held(monotonic())

    def _begin_held(self, now: float) -> None:
        while self._held and (self._held[0][0] <= now or self._stopping.is_set()):
            _, _, job = heapq.heappop(self._held)
            if self._stopping.is_set():
                self._ended.append((job, False))
                continue
            job.is_running = True
            self._pool.submit(self._run, job)

    def _is_ending(self) -> bool:
        """Return whether jobs are left, and cancel them once the time is over."""
        if monotonic() > self._stop_at:
            for job in self._jobs.values():
                if job.response is not None:
                    job.response.cancel()
        return bool(self._jobs) and monotonic() < self._stop_at + LAST_S

    def _settle(self) -> None:
        """Acknowledge the jobs that have ended, and send those back that are to run again."""
        while self._ended:
            job, is_done = self._ended.popleft()
            self._jobs.pop(job.key, None)
            for message in job.messages:
                try:
                    message.ack() if is_done else message.requeue()
                except Exception as error:  # its connection has broken: the broker sends it again
                    logger.warning("the job %s is not acknowledged: %s", job.id, error)

    def _ping(self, state: Any) -> dict[str, str]:
        return {"ok": "pong"}

    def _stats(self, state: Any) -> dict[str, Any]:
        running = sum(each.is_running for each in self._jobs.values())
        pool = {"max-concurrency": self._concurrency, "running": running}
        return {"total": dict(self._total), "pool": pool, "pid": os.getpid()}

    def _revoke(self, state: Any, task_id: str | list[str], **_: Any) -> dict[str, str]:
        ids = [task_id] if isinstance(task_id, str) else task_id
        self._revoked.update(ids)
        for job in self._jobs.values():
            if job.id in ids:
                job.is_cancelled = True
                if job.response is not None:
                    job.response.cancel()
        return {"ok": "revoked"}

    # The thread of a job.

    def _run(self, job: _Job, unreadable: Exception | None = None) -> None:
        is_done = False
        try:
            if unreadable is None:
                is_done = self._has_run(job)
            else:
                if job.id:
                    self.app.backend.mark_as_failure(job.id, unreadable)
                self._bury(job, unreadable, "", is_unreadable=True)
                is_done = True
        except Exception:  # the broker or the result backend: it runs again
            logger.exception(
                "the job %s of the queue %r runs again", job.id, self._config.queue_name
            )
            self._stopping.wait(TICK_S)
        finally:
            self._ended.append((job, is_done))

    def _has_run(self, job: _Job) -> bool:
        """Run a job once. Returns whether nothing is left to do for its message."""
        request, backend = job.request, self.app.backend
        status = backend.get_task_meta(job.id)["status"]
        left_s = _seconds_until(request.get("expires"))
        if status == "REVOKED" or job.id in self._revoked or (left_s is not None and left_s < 0.0):
            backend.mark_as_revoked(job.id, "expired" if left_s else "revoked", request=None)
            return True
        if status == "SUCCESS" and job.messages[0].delivery_info.get("redelivered"):
            return True  # its process died before it could acknowledge
        answer = trace_task(
            job.task, job.id, request["args"], request["kwargs"], request, app=self.app
        )
        info: Any = answer.info
        state = "SUCCESS" if info is None else info.state
        self._total[job.task.name] = self._total.get(job.task.name, 0) + 1
        if state == "FAILURE":
            error: Exception = info.retval
            if error is not job.error and not isinstance(error, SerializationError):
                raise error  # not of the handler: the outcome could not be stored
            is_unreadable = isinstance(error, UnreadableArgumentsError)
            self._bury(job, error, str(answer.retval), is_unreadable=is_unreadable)
        return not job.is_handed_back and state != "REJECTED"

    def _attempt(
        self, job: _Job, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the handler. Raises its error, or `Ignore` for a job that is cancelled, or back."""
        try:
            if not isinstance(func, JobFunction):
                return func(*args, **kwargs)
            value = func.run(
                args, kwargs, job_id=job.id, trace=job.request.get(TRACE),
                on_begin=lambda response: self._note_response(job, response),
                on_progress=lambda item: self._note_progress(job, item),
            )  # fmt: skip
            return self.jsonable(value, f"the result of {job.task.name!r}")
        except Exception as error:
            job.error = error
            if self._is_cancelled(job, error):
                self.app.backend.mark_as_revoked(job.id, "cancelled", request=job.task.request)
            elif is_handed_back(error, job.response, is_stopping=self._stopping.is_set()):
                if isinstance(error, BackPressureError | DeploymentUnavailableError):
                    self._stopping.wait(REFUSED_S)
                job.is_handed_back = True
                self.app.backend.store_result(job.id, None, "PENDING")
            else:
                raise
            raise Ignore from None

    def _note_response(self, job: _Job, response: Any) -> None:
        job.response = response
        if job.is_cancelled:  # before it was there
            response.cancel()

    def _note_progress(self, job: _Job, item: object) -> None:
        job.progress = self.jsonable(item, f"the progress of {job.task.name!r}")
        self._store_progress(job)

    def _store_progress(self, job: _Job) -> None:
        meta = {"progress": job.progress, "is_cancelled": job.is_cancelled}
        self.app.backend.store_result(job.id, meta, PROGRESS, request=job.task.request)

    def _is_cancelled(self, job: _Job, error: Exception) -> bool:
        """Return whether the job was cancelled, once its code has ended."""
        if not isinstance(error, RequestCancelledError):
            return False
        over = code_end(job.response)
        if job.is_cancelled and not over.wait(REFUSED_S):
            self._store_progress(job)  # a `def` that does not stop
        while not over.wait(REFUSED_S) and not self._stopping.is_set():
            pass  # a second attempt beside the first would be two at once
        return job.is_cancelled

    def jsonable(self, value: object, what: str) -> Any:
        """Return a value as JSON has it. Raises `TaskPayloadError`."""
        if {self.app.conf.task_serializer, self.app.conf.result_serializer} != {"json"}:
            return value
        return json.loads(dumped(value, sys.maxsize, what))

    def _bury(self, job: _Job, error: object, trace: str, *, is_unreadable: bool) -> None:
        """Send a job that has failed to its queue, with the arguments that Ray Serve gives."""
        name, request = job.request.get("task"), job.request
        if is_unreadable:
            queue = self._config.unprocessable_task_queue_name
            told = [name, job.id, str(job.messages[0]), str(error), str({})]
        else:
            queue = self._config.failed_task_queue_name
            told = [job.id, str(error), str(request["args"]), str(request["kwargs"]), trace]
        logger.error(
            "the job %s (%s) of the queue %r is given up: %s; it goes to %s",
            *(job.id, name, self._config.queue_name, error, queue or "no queue"),
        )
        if queue is not None:
            self.app.send_task(name or "unknown", told, queue=queue)


def _app_of(config: TaskProcessorConfig, options: CeleryAdapterConfig) -> Celery:
    # RabbitMQ: a job is enqueued once it is on the disk. Redis: no wait of minutes for a host.
    is_amqp = "amqp" in options.broker_url.partition("://")[0]
    transport = {"confirm_publish": True} if is_amqp else {"socket_connect_timeout": CONNECT_S}
    app = Celery(
        config.queue_name,
        broker=options.broker_url,
        backend=options.backend_url,
        set_as_current=False,
    )
    app.conf.update({
        "broker_connection_timeout": CONNECT_S,
        "broker_transport_options": {**transport, **(options.broker_transport_options or {})},
        "redis_socket_connect_timeout": CONNECT_S,
        "result_extended": True,
        "task_acks_late": True,
        "task_default_queue": config.queue_name,
        "task_publish_retry_policy": {"max_retries": 1, "interval_start": 0.1},
        "task_track_started": True,
        **(options.app_custom_config or {}),
    })  # fmt: skip
    return app


def _try_to_reach(app: Celery, name: str) -> None:
    if name == "backend_url":
        app.backend.get_task_meta("ingress")
        return
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=CONNECT_S)


def _get_safely(channel: Any, queue: str) -> Any:
    """Return a message of Redis. Raises `Empty`."""
    for priority in channel.priority_steps:
        keys = channel._q_for_pri(queue, priority), channel.unacked_index_key, channel.unacked_key
        prefixed = (f"{channel.global_keyprefix}{key}" for key in keys)
        if (found := channel.client.eval(TAKE, len(keys), *prefixed, time.time())) is not None:
            return loads(found)
    raise Empty


@contextmanager
def _answers(what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError):  # options that Celery does not take
        raise
    except Exception as error:
        raise TaskQueueError(
            f"{what} did not answer: {error}; try again once its server runs"
        ) from error


def _seconds_until(at: str | None) -> float | None:
    if at is None:
        return None
    moment = datetime.fromisoformat(at)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - time.time()


def _result_of(task_id: str, meta: Mapping[str, Any]) -> TaskResult:
    status, value = meta["status"], meta.get("result")
    told: Any = value if status == PROGRESS else {}
    has_failed = isinstance(value, BaseException) and status != "REVOKED"
    return TaskResult(
        id=task_id,
        status="STARTED" if status == PROGRESS else status,
        result=value if status == "SUCCESS" else None,
        progress=told.get("progress"),
        error=f"{type(value).__name__}: {value}" if has_failed else None,
        attempts=0 if status in ("PENDING", "REVOKED") else (meta.get("retries") or 0) + 1,
        is_cancelled=status == "REVOKED" or told.get("is_cancelled", False),
    )


__all__ = ["CeleryTaskProcessorAdapter"]
