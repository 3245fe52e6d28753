"""Jobs of Celery whose broker is in this process; test_brokers.py has Redis and RabbitMQ."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

import pytest

import ingress as serve
from ingress.exceptions import TaskPayloadError
from ingress.schema import (
    CeleryAdapterConfig,
    TaskProcessorAdapter,
    TaskProcessorConfig,
    TaskResult,
)
from ingress.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler
from ingress.task_processor import CeleryTaskProcessorAdapter
from tests.servers import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")


def config_of(**options: Any) -> TaskProcessorConfig:
    adapter = {"broker_url": "memory://", "backend_url": "cache+memory://", **options}
    queue = f"q-{uuid4()}"
    return TaskProcessorConfig(
        queue_name=queue,
        adapter_config=CeleryAdapterConfig(**adapter),
        max_retries=1,
        failed_task_queue_name=f"{queue}-failed",
        unprocessable_task_queue_name=f"{queue}-unreadable",
    )


class Jobs:
    """The queue of a test, and the adapter that fills it."""

    def __init__(self) -> None:
        self.config = config_of(task_custom_config={"retry_backoff_max": 0})
        self.adapter: TaskProcessorAdapter = instantiate_adapter_from_config(self.config)

    def deploy(self, cls: type, **options: Any) -> None:
        consumer = task_consumer(task_processor_config=self.config)(cls)
        serve.run(serve.deployment(**options)(consumer).bind(), route_prefix=None)

    def end(self, id: str, status: str = "SUCCESS") -> TaskResult:
        wait_until(lambda: self.adapter.get_task_status_sync(id).status == status)
        return self.adapter.get_task_status_sync(id)

    def run(self, name: str, *args: Any, status: str = "SUCCESS") -> TaskResult:
        return self.end(self.adapter.enqueue_task_sync(name, args).id, status)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    yield Jobs()
    serve.shutdown()


def test_a_job_is_a_call_of_the_replica(jobs: Jobs) -> None:
    class Places:
        @task_handler
        def in_a_thread(self) -> str:
            return threading.current_thread().name

        @task_handler
        async def on_the_loop(self) -> str:
            return threading.current_thread().name

    jobs.deploy(Places, name="places")
    assert "places" in jobs.run("in_a_thread").result
    assert "worker" not in jobs.run("on_the_loop").result


def test_progress_is_seen_and_a_running_job_is_cancelled(jobs: Jobs) -> None:
    class Pages:
        @task_handler
        async def index(self, pages: int) -> AsyncIterator[int]:
            for page in range(pages):
                yield page
            await asyncio.Event().wait()

    jobs.deploy(Pages)
    id = jobs.adapter.enqueue_task_sync("index", kwargs={"pages": 3}).id
    wait_until(lambda: jobs.adapter.get_task_status_sync(id).progress == 2)
    assert jobs.adapter.get_task_status_sync(id).status == "STARTED"
    jobs.adapter.cancel_task_sync(id)
    assert jobs.end(id, "REVOKED").is_cancelled


def test_a_job_can_be_cancelled_while_its_deployment_drains(jobs: Jobs) -> None:
    began = threading.Event()

    class Drains:
        @task_handler
        async def wait(self) -> None:
            began.set()
            await asyncio.Event().wait()

    jobs.deploy(Drains, graceful_shutdown_timeout_s=60)
    id = jobs.adapter.enqueue_task_sync("wait").id
    assert began.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(serve.delete, "default")
        wait_until(lambda: serve.status().applications["default"].status == "DELETING")
        jobs.adapter.cancel_task_sync(id)
        assert jobs.end(id, "REVOKED").is_cancelled
        deleted.result()


def test_a_def_that_does_not_stop_says_so(jobs: Jobs) -> None:
    began, gate = threading.Event(), threading.Event()

    class Stuck:
        @task_handler
        def wait(self) -> None:
            began.set()
            gate.wait(PATIENCE_S)

    jobs.deploy(Stuck)
    id = jobs.adapter.enqueue_task_sync("wait").id
    assert began.wait(PATIENCE_S)
    jobs.adapter.cancel_task_sync(id)
    wait_until(lambda: jobs.adapter.get_task_status_sync(id).is_cancelled)
    assert jobs.adapter.get_task_status_sync(id).status == "STARTED"
    gate.set()
    assert jobs.end(id, "REVOKED").is_cancelled


def test_failures_and_what_no_handler_can_read_go_to_their_queues(jobs: Jobs) -> None:
    class Fails:
        @task_handler
        async def fail(self, number: int) -> None:
            raise ValueError(f"no {number}")

    class Letters:
        found: ClassVar[list[list[Any]]] = []

        @task_handler
        def fail(self, *args: Any) -> None:
            self.found.append(list(args))

        @task_handler
        def gone(self, *args: Any) -> None:
            self.found.append(list(args))

    def is_found(id: str) -> bool:
        return any(id in each for each in Letters.found)

    jobs.deploy(Fails)
    failed = jobs.run("fail", 7, status="FAILURE")
    assert (failed.error, failed.attempts) == ("ValueError: no 7", 2)
    unreadable = jobs.run("fail", "seven", status="FAILURE")
    unknown = jobs.run("gone", status="FAILURE")
    for kind, ids in (("failed", [failed.id]), ("unreadable", [unreadable.id, unknown.id])):
        config = jobs.config.model_copy(update={"queue_name": f"{jobs.config.queue_name}-{kind}"})
        consumer = task_consumer(task_processor_config=config)(Letters)
        serve.run(serve.deployment(name=kind)(consumer).bind(), name=kind, route_prefix=None)
        for id in ids:
            wait_until(partial(is_found, id))
    letter = next(each for each in Letters.found if failed.id in each)
    assert letter[:4] == [failed.id, "no 7", "[7]", "{}"]
    letter = next(each for each in Letters.found if unknown.id in each)
    assert letter[:2] == ["gone", unknown.id]


def test_what_cannot_be_is_refused_with_the_fix(jobs: Jobs) -> None:
    with pytest.raises(TypeError, match="an option of the embedded store"):
        jobs.adapter.enqueue_task_sync("index", idempotency_key="a")
    with pytest.raises(TypeError, match="a broker orders its jobs itself"):
        jobs.adapter.enqueue_task_sync("index", fairness_key="a")
    with pytest.raises(TaskPayloadError, match="cannot be written as JSON"):
        jobs.adapter.enqueue_task_sync("index", [object()])
    config = config_of(app_custom_config={"worker_pool": "solo", "task_acks_late": False})
    with pytest.raises(ValueError, match=r"\['task_acks_late', 'worker_pool'\]"):
        CeleryTaskProcessorAdapter(config)
    with pytest.raises(TypeError, match="must be an instance of CeleryAdapterConfig"):
        CeleryTaskProcessorAdapter(TaskProcessorConfig(queue_name="q"))


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("broker_url", "redis://:secret@127.0.0.1:1/0"),
        ("broker_url", "amqp://guest:secret@127.0.0.1:1//"),
        ("backend_url", "redis://:secret@127.0.0.1:1/0"),
    ],
)
def test_a_server_that_cannot_be_reached_is_named_without_its_password(name: str, url: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}=.*cannot be reached.*correct {name}") as info:
        instantiate_adapter_from_config(config_of(**{name: url}))
    assert "secret" not in str(info.value)
    del info  # with the connections of its frames
    gc.collect()
