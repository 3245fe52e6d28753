"""Durable jobs with Ray Serve's names: a deployment that runs the jobs of a queue.

    from ingress.schema import TaskProcessorConfig
    from ingress.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler

    config = TaskProcessorConfig(queue_name="documents")

    @serve.deployment
    @task_consumer(task_processor_config=config)
    class Pages:
        @task_handler(name="index")
        async def index(self, document: str) -> int: ...

    adapter = instantiate_adapter_from_config(config)     in the constructor of a front
    job = await adapter.enqueue_task_async("index", args=["a.pdf"])
    await adapter.get_task_status_async(job.id)

A job runs at least once. It is a call by handle: it takes a slot, and `async def` runs on the loop.
A `def` handler runs in a thread, as on Ray, unless `@serve.method` says otherwise. A generator
reports progress: each item is the job's progress, and the last one is its result, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from threading import Thread
from typing import Any, TypeVar, overload

from ingress._unsupported import teller
from ingress.app.declaration.names import TASK
from ingress.core.base.task_models import (
    CELERY,
    DEFAULT_CONCURRENCY,
    CeleryAdapterConfig,
    SQLiteAdapterConfig,
    TaskProcessorAdapter,
    TaskProcessorConfig,
)
from ingress.core.execution.execution import OVERRIDE, ExecutionMode, Override, kind
from ingress.handle import DeploymentHandle
from ingress.jobs.calls import Handler, JobCalls, JobFunction, handlers_of
from ingress.jobs.embedded import EmbeddedTaskProcessorAdapter
from ingress.serving.control.consumers import CONSUMER, Consumer

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


def instantiate_adapter_from_config(
    task_processor_config: TaskProcessorConfig,
) -> TaskProcessorAdapter:
    """Return the adapter of a config, connected: it enqueues jobs and tells of them.

    Raises `TypeError` for what is no adapter, and `RuntimeError` if it cannot connect.
    """
    return _connected(task_processor_config, DEFAULT_CONCURRENCY)


def task_consumer(*, task_processor_config: TaskProcessorConfig) -> Callable[[C], C]:
    """Have a deployment run the jobs of a queue. Stands below `@serve.deployment`.

    Raises `TypeError` or `ValueError` for a class without handlers, two handlers of one name, and a
    parameter of a handler that JSON cannot fill.
    """
    given: object = task_processor_config
    if not isinstance(given, TaskProcessorConfig):
        raise TypeError(
            "task_processor_config must be a TaskProcessorConfig(queue_name=...), got "
            f"{task_processor_config!r}"
        )

    def decorate(cls: C) -> C:
        if not inspect.isclass(cls):
            place = "below @serve.deployment" if hasattr(cls, "func_or_class") else "on a class"
            raise TypeError(f"@task_consumer decorates a class, got {cls!r}; put it {place}")
        setattr(cls, CONSUMER, TaskConsumer(task_processor_config, handlers_of(cls)))
        return cls

    return decorate


@overload
def task_handler(_func: F) -> F: ...
@overload
def task_handler(_func: None = None, *, name: str | None = None) -> Callable[[F], F]: ...
def task_handler(_func: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Have a method handle the jobs of a name, by default its own."""
    given: object = name
    if given is not None and not (isinstance(given, str) and given.strip()):
        raise ValueError(f"Task name must be a non-empty string, got {name}")

    def decorate(func: F) -> F:
        if not inspect.isfunction(func):
            raise TypeError(
                f"@task_handler decorates a method, got {func!r}; put it next to the `def`"
            )
        setattr(func, TASK, name or func.__name__)
        if not kind(func).is_async and not hasattr(func, OVERRIDE):
            setattr(func, OVERRIDE, Override(ExecutionMode.THREADPOOL, by="@task_handler"))
        return func

    return decorate if _func is None else decorate(_func)


class TaskConsumer:
    """The mark of a class with `@task_consumer`, which the engine finds."""

    __slots__ = ("config", "handlers")

    def __init__(self, config: TaskProcessorConfig, handlers: dict[str, Handler]) -> None:
        self.config, self.handlers = config, handlers

    @property
    def is_of_one_machine(self) -> bool:
        config = self.config
        return config.adapter is None and not isinstance(config.adapter_config, CeleryAdapterConfig)

    def open(
        self,
        handle: DeploymentHandle,
        room: Callable[[], int],
        slots: int,
        slots_of: Callable[[str], float],
    ) -> Consumer:
        """Connect, for a deployment that has so many slots. Blocks.

        Raises as `instantiate_adapter_from_config`.
        """
        adapter = _connected(self.config, slots)
        calls = JobCalls(handle, self.handlers)
        if isinstance(adapter, EmbeddedTaskProcessorAdapter):
            return adapter.consumer(calls, room, slots_of)
        adapter.watch_slots(room)
        for handler in self.handlers.values():
            adapter.register_task_handle(JobFunction(calls, handler), handler.name)
        return AdapterConsumer(self.config.queue_name, adapter)


class AdapterConsumer:
    """A consumer that an adapter of a broker, or of the user's own, runs in its own threads."""

    __slots__ = ("_adapter", "_has_begun", "_stopping", "ended", "queue")

    def __init__(self, queue: str, adapter: TaskProcessorAdapter) -> None:
        self.queue, self._adapter = queue, adapter
        self._has_begun = False
        self._stopping: Thread | None = None
        self.ended: dict[str, int] = {}

    def begin(self) -> None:
        self._has_begun = True
        self._adapter.start_consumer()

    @property
    def counts(self) -> dict[str, float]:
        return {"waiting": self.waiting()}

    def waiting(self) -> int:
        return self._adapter.waiting()

    def pause(self, timeout_s: float) -> None:
        if self._has_begun and self._stopping is None:  # it stops and waits at once
            stop = partial(self._adapter.stop_consumer, timeout_s)
            self._stopping = Thread(target=stop, name="ingress-jobs-stop")
            self._stopping.start()

    def ask(self, action: str, **arguments: Any) -> Any:
        raise ValueError(
            f"the jobs of the queue {self.queue!r} are kept by {type(self._adapter).__name__}; use "
            "the tools of its broker, such as `celery inspect`"
        )

    def close(self, timeout_s: float) -> None:
        self.pause(timeout_s)
        if self._stopping is not None:
            self._stopping.join(timeout_s)


def _connected(config: TaskProcessorConfig, concurrency: int) -> TaskProcessorAdapter:
    make: Any = config.adapter
    if make is None:
        make = _by_options(config.adapter_config)
    if isinstance(make, str):
        make = _imported(make)
    if not callable(make):
        raise TypeError(
            f"Adapter must be either a string path or a callable class, got {type(make).__name__}"
        )
    name = getattr(make, "__name__", repr(make))
    try:
        adapter = make(config)
    except Exception as error:
        raise RuntimeError(f"Failed to instantiate {name}: {error}") from error
    if not isinstance(adapter, TaskProcessorAdapter):
        raise TypeError(f"{name} must inherit from TaskProcessorAdapter, got {type(adapter)}")
    try:
        adapter.initialize(concurrency)
    except Exception as error:
        raise RuntimeError(f"Failed to initialize {name}: {error}") from error
    return adapter


def _by_options(options: object) -> str | type[TaskProcessorAdapter]:
    if options is None or isinstance(options, SQLiteAdapterConfig):
        return EmbeddedTaskProcessorAdapter
    if isinstance(options, CeleryAdapterConfig):
        return CELERY
    raise TypeError(
        f"adapter_config must be a CeleryAdapterConfig or a SQLiteAdapterConfig, got {options!r}; "
        "for an adapter of your own give adapter=, too"
    )


def _imported(path: str) -> Any:
    # The adapters that Ray Serve has are here under the same names.
    path = path.replace("ray.serve.", "ingress.", 1)
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TypeError(
            f"adapter={path!r} cannot be imported: {error}; give a class, or its path"
        ) from error


__all__ = ["instantiate_adapter_from_config", "task_consumer", "task_handler"]
__getattr__ = teller(__name__)
