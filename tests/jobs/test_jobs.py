"""Jobs of a deployment, in one process: enqueued by an adapter, seen by their status."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel

import ingress as serve
from ingress.core.calls.call import CURRENT_CALL
from ingress.exceptions import TaskNotFoundError, TaskPayloadError
from ingress.jobs import store
from ingress.schema import (
    CeleryAdapterConfig,
    DeploymentStatusOverview,
    SQLiteAdapterConfig,
    TaskProcessorAdapter,
    TaskProcessorConfig,
    TaskResult,
)
from ingress.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler
from tests.fakes import Gate
from tests.servers import served, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")


class Page(BaseModel):
    name: str
    number: int


class Jobs:
    """The queue of a test, and the adapter that fills it."""

    def __init__(self, path: Path) -> None:
        self.options: dict[str, Any] = {"path": str(path / "jobs.db"), "retry_delay_s": 0.001}
        self.config = self.config_with()

    def config_with(self, queue: str = "q", **changes: Any) -> TaskProcessorConfig:
        names = TaskProcessorConfig.model_fields
        own = {name: value for name, value in changes.items() if name in names}
        options = {**self.options, **{k: v for k, v in changes.items() if k not in names}}
        return TaskProcessorConfig(
            queue_name=queue, adapter_config=SQLiteAdapterConfig(**options), **own
        )

    def deploy(self, cls: type, config: TaskProcessorConfig | None = None, **options: Any) -> None:
        consumer = task_consumer(task_processor_config=config or self.config)(cls)
        serve.run(serve.deployment(**options)(consumer).bind(), route_prefix=None)

    @property
    def adapter(self) -> TaskProcessorAdapter:
        return instantiate_adapter_from_config(self.config)

    def end(self, id: str, status: str = "SUCCESS") -> TaskResult:
        """Wait until a job has a status, and return it."""
        adapter = self.adapter
        wait_until(lambda: adapter.get_task_status_sync(id).status == status)
        return adapter.get_task_status_sync(id)

    def run(self, name: str, *args: Any, status: str = "SUCCESS", **options: Any) -> TaskResult:
        return self.end(self.adapter.enqueue_task_sync(name, args, **options).id, status)


@pytest.fixture
def jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Jobs]:
    yield Jobs(tmp_path)
    assert not [each for each in caplog.get_records("call") if "job store" in each.getMessage()]


def test_a_job_takes_the_place_that_its_handler_says(jobs: Jobs) -> None:
    class Places:
        @task_handler
        async def on_the_loop(self) -> str:
            return threading.current_thread().name

        @task_handler(name="thread")
        def in_a_thread(self) -> str:
            return threading.current_thread().name

        @task_handler
        @serve.method(execution="event_loop")
        def as_it_says(self) -> str:
            return threading.current_thread().name

    jobs.deploy(Places)
    assert jobs.run("on_the_loop").result == "Places#0"
    assert jobs.run("thread").result.startswith("Places#0-worker-")
    assert jobs.run("as_it_says").result == "Places#0"


def test_arguments_are_read_by_the_annotations_of_the_handler(jobs: Jobs) -> None:
    class Reads:
        @task_handler
        async def read(self, page: Page, *more: int, at: datetime, **rest: float) -> dict[str, Any]:
            kinds = [type(each).__name__ for each in (page, *more, at, *rest.values())]
            return {"kinds": kinds, "page": page, "at": at}

    jobs.deploy(Reads)
    at = datetime(2026, 1, 2, tzinfo=UTC)
    sent = jobs.adapter.enqueue_task_sync(
        "read", [Page(name="a", number=1), "2"], {"at": at, "x": 1}
    )
    assert jobs.end(sent.id).result == {
        "kinds": ["Page", "int", "datetime", "float"],
        "page": {"name": "a", "number": 1},
        "at": "2026-01-02T00:00:00Z",
    }


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("index", ["many"], "index: 0: Input should be a valid integer"),
        ("index", [], "index: pages: Missing required argument"),
        ("renamed", [1], "has no task handler 'renamed'; it has: index"),
    ],
)
def test_a_job_that_no_handler_can_read_goes_to_its_own_queue(
    jobs: Jobs, name: str, args: list[Any], error: str
) -> None:
    class Index:
        @task_handler
        async def index(self, pages: int) -> None: ...

    class Unreadable:
        seen: ClassVar[list[Any]] = []

        @task_handler(name="index")
        async def of_index(self, *about: Any) -> None:
            Unreadable.seen.append(about)

        @task_handler(name="renamed")
        async def of_renamed(self, *about: Any) -> None:
            Unreadable.seen.append(about)

    jobs.deploy(Index, jobs.config_with(unprocessable_task_queue_name="unreadable"))
    consumer = task_consumer(task_processor_config=jobs.config_with("unreadable"))(Unreadable)
    serve.run(serve.deployment(consumer).bind(), name="letters", route_prefix=None)
    job = jobs.run(name, *args, status="FAILURE")
    assert error in str(job.error)
    wait_until(lambda: Unreadable.seen)
    assert Unreadable.seen[0][:2] == (name, job.id)


def test_a_job_is_tried_again_and_then_given_up(jobs: Jobs) -> None:
    tries: list[int] = []
    letters: list[Any] = []

    class Fails:
        @task_handler
        def fail(self, until: int) -> int:
            tries.append(until)
            if len(tries) < until:
                raise ValueError(f"no {len(tries)}")
            return len(tries)

    class Letters:
        @task_handler(name="fail")
        def note(self, *about: Any) -> None:
            letters.append(about)

    jobs.deploy(Fails, jobs.config_with(max_retries=2, failed_task_queue_name="failed"))
    consumer = task_consumer(task_processor_config=jobs.config_with("failed"))(Letters)
    serve.run(serve.deployment(consumer).bind(), name="letters", route_prefix=None)
    job = jobs.run("fail", 3)
    assert (job.result, job.attempts) == (3, 3)
    tries.clear()
    job = jobs.run("fail", 9, status="FAILURE")
    assert (job.error, job.attempts, len(tries)) == ("ValueError: no 3", 3, 3)
    wait_until(lambda: letters)
    assert letters[0][:4] == (job.id, "ValueError: no 3", "[9]", "{}")


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "def"])
def test_a_generator_reports_progress(jobs: Jobs, gate: Gate, is_async: bool) -> None:
    class Steps:
        @task_handler(name="steps")
        async def asynchronously(self) -> Any:
            yield {"step": 1}
            await asyncio.to_thread(gate.go.wait)
            yield {"step": 2}

        @task_handler(name="def steps")
        def in_a_thread(self) -> Any:
            yield {"step": 1}
            gate.go.wait()
            yield {"step": 2}

    jobs.deploy(Steps)
    adapter = jobs.adapter
    id = adapter.enqueue_task_sync("steps" if is_async else "def steps").id
    wait_until(lambda: adapter.get_task_status_sync(id).progress == {"step": 1})
    assert adapter.get_task_status_sync(id).status == "STARTED"
    gate.go.count_down()
    assert jobs.end(id).result == {"step": 2}


def deployment_status() -> DeploymentStatusOverview:
    (found,) = serve.status().applications["default"].deployments.values()
    return found


class Waits:
    gate: Gate

    @task_handler
    async def asleep(self) -> None:
        self.gate.inside += 1
        await asyncio.Event().wait()

    @task_handler
    def stuck(self) -> None:
        self.gate.inside += 1
        self.gate.go.wait()

    @task_handler
    async def quick(self) -> str:
        return "done"


def test_cancelling_a_job_that_waits_takes_it_out(jobs: Jobs, gate: Gate) -> None:
    jobs.deploy(type("Waiting", (Waits,), {"gate": gate}), max_ongoing_requests=1)
    adapter = jobs.adapter
    first = adapter.enqueue_task_sync("stuck").id
    wait_until(lambda: gate.inside)
    later = [adapter.enqueue_task_sync("quick").id for _ in range(3)]
    adapter.cancel_task_sync(later[2])
    assert adapter.get_task_status_sync(later[2]).status == "REVOKED"
    gate.go.count_down()
    assert jobs.end(first).attempts == 1
    assert jobs.end(later[1]).result == "done"
    assert adapter.get_task_status_sync(later[2]).attempts == 0


def test_cancelling_a_job_that_runs_cancels_its_call(jobs: Jobs, gate: Gate) -> None:
    jobs.deploy(type("Cancels", (Waits,), {"gate": gate}))
    id = jobs.adapter.enqueue_task_sync("asleep").id
    wait_until(lambda: gate.inside)
    jobs.adapter.cancel_task_sync(id)
    assert jobs.end(id, "REVOKED").is_cancelled


def test_a_def_that_cannot_stop_holds_its_slot_and_its_status_says_so(
    jobs: Jobs, gate: Gate
) -> None:
    jobs.deploy(type("Stuck", (Waits,), {"gate": gate}), max_ongoing_requests=1)
    adapter = jobs.adapter
    id = adapter.enqueue_task_sync("stuck").id
    wait_until(lambda: gate.inside)
    next_id = adapter.enqueue_task_sync("quick").id
    adapter.cancel_task_sync(id)
    wait_until(lambda: deployment_status().replicas[0].orphans)  # the call has been cancelled
    job = adapter.get_task_status_sync(id)
    assert (job.status, job.is_cancelled) == ("STARTED", True)
    assert adapter.get_task_status_sync(next_id).status != "SUCCESS"
    gate.go.count_down()
    assert jobs.end(id, "REVOKED").is_cancelled
    assert jobs.end(next_id).result == "done"


def test_a_job_has_a_deadline_for_each_attempt(jobs: Jobs, gate: Gate) -> None:
    config = jobs.config_with(timeout_s=0.05, max_retries=1)
    jobs.deploy(type("Late", (Waits,), {"gate": gate}), config)
    job = jobs.run("asleep", status="FAILURE")
    assert job.attempts == 2
    assert "RequestTimeoutError" in str(job.error)


def test_a_key_makes_two_enqueues_one_job(jobs: Jobs) -> None:
    class Counts:
        @task_handler
        async def count(self) -> None: ...

    jobs.deploy(Counts)
    adapter = jobs.adapter
    ids = {adapter.enqueue_task_sync("count", idempotency_key="once").id for _ in range(3)}
    assert len(ids) == 1
    assert adapter.enqueue_task_sync("count", idempotency_key="twice").id not in ids
    assert adapter.enqueue_task_sync("count", task_id="mine").id == "mine"


def test_a_job_begins_when_it_is_due(jobs: Jobs) -> None:
    class Due:
        @task_handler
        async def due(self) -> None: ...

    jobs.deploy(Due)
    adapter = jobs.adapter
    soon = datetime.now(UTC) + timedelta(hours=1)
    waiting = [
        adapter.enqueue_task_sync("due", countdown=3600).id,
        adapter.enqueue_task_sync("due", eta=soon).id,
        adapter.enqueue_task_sync("due", eta=soon.timestamp()).id,
    ]
    assert jobs.run("due", countdown=0.01).status == "SUCCESS"
    assert {adapter.get_task_status_sync(each).status for each in waiting} == {"PENDING"}


def test_jobs_take_turns_by_their_keys_which_the_calls_they_make_have_too(
    jobs: Jobs, gate: Gate
) -> None:
    begun: list[str] = []

    class Turns(Waits):
        @task_handler
        async def note(self, name: str) -> str:
            begun.append(name)
            return CURRENT_CALL.get().metadata.fairness_key

    Turns.gate = gate
    weights = {"weights": {"b": 2}}
    jobs.deploy(Turns, max_ongoing_requests=1, fairness_config=weights)
    adapter = jobs.adapter
    adapter.enqueue_task_sync("stuck", fairness_key="z")
    wait_until(lambda: gate.inside)
    names = ("a1", "a2", "a3", "a4", "b1", "b2", "b3")
    ids = [adapter.enqueue_task_sync("note", [n], fairness_key=n[0]).id for n in names]
    gate.go.count_down()
    assert [jobs.end(each).result for each in ids] == [name[0] for name in names]
    # One more than there are slots waits as a call: the first.
    assert begun == ["a1", "b1", "b2", "a2", "b3", "a3", "a4"]


def test_jobs_take_slots_and_a_deployment_without_replicas_wakes_for_them(jobs: Jobs) -> None:
    at_once: list[int] = []
    running: list[int] = []

    class Slots:
        @task_handler
        async def work(self) -> None:
            running.append(1)
            at_once.append(len(running))
            await asyncio.to_thread(int)
            running.pop()

    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 0.0}
    jobs.deploy(Slots, max_ongoing_requests=2, autoscaling_config=scaling)
    adapter = jobs.adapter
    ids = [adapter.enqueue_task_sync("work").id for _ in range(20)]
    for each in ids:
        jobs.end(each)
    assert max(at_once) == 2


def test_a_job_can_be_cancelled_while_its_deployment_drains(jobs: Jobs, gate: Gate) -> None:
    jobs.deploy(type("Drains", (Waits,), {"gate": gate}), graceful_shutdown_timeout_s=60)
    id = jobs.adapter.enqueue_task_sync("asleep").id
    wait_until(lambda: gate.inside)
    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(serve.delete, "default")
        wait_until(lambda: serve.status().applications["default"].status == "DELETING")
        jobs.adapter.cancel_task_sync(id)
        assert jobs.end(id, "REVOKED").is_cancelled
        deleted.result()


def test_a_stop_hands_running_jobs_back(jobs: Jobs, gate: Gate) -> None:
    jobs.deploy(type("First", (Waits,), {"gate": gate}), graceful_shutdown_timeout_s=0.05)
    adapter = jobs.adapter
    id = adapter.enqueue_task_sync("asleep").id
    wait_until(lambda: gate.inside)
    serve.delete("default")
    job = adapter.get_task_status_sync(id)
    assert (job.status, job.attempts) == ("PENDING", 0)

    class Second:
        @task_handler
        async def asleep(self) -> str:
            return "the next one ran it"

    jobs.deploy(Second)
    assert jobs.end(id).result == "the next one ran it"


def test_an_update_runs_the_jobs_by_its_own_handlers(jobs: Jobs) -> None:
    def version(number: int) -> type:
        class Versions:
            @task_handler
            async def which(self) -> int:
                return number

        return Versions

    jobs.deploy(version(1))
    assert jobs.run("which").result == 1
    jobs.deploy(version(2))
    assert jobs.run("which").result == 2


def test_updates_and_stops_lose_no_job_that_is_just_taken(jobs: Jobs) -> None:
    class Quick:
        @task_handler
        async def quick(self) -> None:
            pass

    jobs.deploy(Quick)
    adapter, is_over, ids = jobs.adapter, threading.Event(), []

    def feed() -> None:
        while not is_over.is_set():
            ids.append(adapter.enqueue_task_sync("quick").id)

    with ThreadPoolExecutor(2) as pool:
        fed = [pool.submit(feed) for _ in range(2)]
        for number in range(20):
            if number % 2:
                serve.delete("default")
            jobs.deploy(type("Quick", (Quick,), {}))
        is_over.set()
        for each in fed:
            each.result()
    for id in ids:
        jobs.end(id)


def test_a_result_that_is_no_json_is_given_up_at_once(jobs: Jobs) -> None:
    class Objects:
        @task_handler
        async def make(self) -> object:
            return object()

    jobs.deploy(Objects)
    job = jobs.run("make", status="FAILURE")
    assert "the result of 'make' cannot be written as JSON" in str(job.error)
    assert job.attempts == 1


def test_a_front_answers_with_the_status_of_the_error(jobs: Jobs, app: FastAPI) -> None:
    @serve.deployment
    @serve.ingress(app)
    class Front:
        def __init__(self) -> None:
            self.adapter = instantiate_adapter_from_config(jobs.config_with(max_payload_bytes=100))

        @app.post("/jobs", status_code=202)
        async def enqueue(self, request: Request) -> TaskResult:
            return await self.adapter.enqueue_task_async("any", [(await request.body()).decode()])

        @app.get("/jobs/{id}")
        async def status(self, id: str) -> TaskResult:
            return await self.adapter.get_task_status_async(id)

        @app.delete("/jobs/{id}")
        async def cancel(self, id: str) -> None:
            await self.adapter.cancel_task_async(id)

    url = f"http://127.0.0.1:{served(Front.bind())}/jobs"
    sent = httpx.post(url, content="x")
    assert (sent.status_code, sent.json()["status"]) == (202, "PENDING")
    assert httpx.delete(f"{url}/{sent.json()['id']}").status_code == 200
    assert httpx.get(f"{url}/{sent.json()['id']}").json()["status"] == "REVOKED"
    assert httpx.get(f"{url}/none").status_code == 404
    large = httpx.post(url, content="x" * 200)
    assert large.status_code == 413
    assert "more than max_payload_bytes=100" in large.text


def test_an_adapter_of_the_users_own_runs_the_handlers_as_calls() -> None:
    class Own(TaskProcessorAdapter):
        ran: ClassVar[dict[str, Any]] = {}
        functions: ClassVar[dict[str, Callable[..., Any]]] = {}
        started = threading.Event()
        stopped = threading.Event()

        def __init__(self, config: TaskProcessorConfig) -> None:
            self.config = config

        def initialize(self, consumer_concurrency: int = 5) -> None:
            self.ran["concurrency"] = consumer_concurrency

        def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
            self.functions[name or func.__name__] = func

        def start_consumer(self, **kwargs: Any) -> None:
            self.started.set()

        def stop_consumer(self, timeout: float = 10.0) -> None:
            self.stopped.set()

        def enqueue_task_sync(
            self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
        ) -> TaskResult:
            value = self.functions[task_name](*(args or ()), **(kwargs or {}))
            return TaskResult(id="1", status="SUCCESS", result=value)

        def get_task_status_sync(self, task_id: str) -> TaskResult:
            return TaskResult(id=task_id, status="SUCCESS")

        def cancel_task_sync(self, task_id: str) -> None: ...

        def get_metrics_sync(self) -> dict[str, Any]:
            return {}

        def health_check_sync(self) -> list[dict[str, Any]]:
            return []

    class Handles:
        @task_handler
        async def add(self, a: int, b: int = 1) -> str:
            return f"{a + b} on {threading.current_thread().name}"

        @task_handler
        async def steps(self) -> Any:
            yield 1
            yield 2

    config = TaskProcessorConfig(queue_name="own", adapter=Own)
    consumer = task_consumer(task_processor_config=config)(Handles)
    deployment = serve.deployment(max_ongoing_requests=3, num_replicas=2)(consumer)
    serve.run(deployment.bind(), route_prefix=None)
    assert Own.started.is_set()
    assert Own.ran["concurrency"] == 6
    adapter = instantiate_adapter_from_config(config)
    assert adapter.enqueue_task_sync("add", [1], {"b": 2}).result.startswith("3 on Handles#")
    assert adapter.enqueue_task_sync("steps").result == 2
    assert asyncio.run(adapter.enqueue_task_async("add", [1])).result.startswith("2 on Handles#")
    serve.shutdown()
    assert Own.stopped.is_set()


def unknown_class(given: object) -> Any:
    class Bad:
        @task_handler
        async def work(self, request: Request) -> None: ...

    return Bad


def static_handler() -> Any:
    class Bad:
        @staticmethod
        @task_handler
        def work(number: int) -> None: ...

    return Bad


CONFIG: dict[str, Any] = {"queue_name": "q"}
NO_QUEUE: dict[str, Any] = {}


def consumer(cls: type, config: Any = None) -> type:
    decorate = task_consumer(task_processor_config=config or TaskProcessorConfig(**CONFIG))
    return decorate(cls)


def adapter(**changes: Any) -> TaskProcessorAdapter:
    return instantiate_adapter_from_config(TaskProcessorConfig(**CONFIG, **changes))


NO_FOLDER = SQLiteAdapterConfig(path="/no/such/jobs.db")


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda: TaskProcessorConfig(**NO_QUEUE), "queue_name"),
        (lambda: TaskProcessorConfig(**CONFIG | {"retries": 1}), "unexpected keyword argument"),
        (lambda: SQLiteAdapterConfig(max_payload_bytes=0), "max_payload_bytes must be"),
        (lambda: SQLiteAdapterConfig(path=":memory:"), "path must be that of a file, got ':mem"),
        (lambda: SQLiteAdapterConfig(path="file:jobs?mode=memory"), "that of a file"),
        (lambda: SQLiteAdapterConfig(path=" "), "path must be that of a file"),
        (lambda: task_handler(name=""), "Task name must be a non-empty string"),
        (lambda: task_handler(3), "@task_handler decorates a method"),  # type: ignore[call-overload]
        (lambda: consumer(dict, "q"), "must be a TaskProcessorConfig"),
        (lambda: consumer(dict), "no method with @task_handler"),
        (lambda: consumer(unknown_class(None)), "'request' of the task handler"),
        (lambda: consumer(static_handler()), "work is a staticmethod, which is no method"),
        (
            lambda: adapter(adapter_config={"broker_url": "x"}),
            "adapter_config must be a CeleryAdapterConfig or a SQLiteAdapterConfig",
        ),
        (lambda: adapter(adapter="no.such:Adapter"), "cannot be imported"),
        (lambda: adapter(adapter_config=NO_FOLDER), "there is no directory /no/such; make it"),
        (lambda: CeleryAdapterConfig(broker_url="", backend_url=""), "broker_url"),
    ],
)
def test_a_mistake_is_told_where_it_is_made(mistake: Callable[[], Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=error):
        mistake()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": 1}, "unexpected option 'priority'; the embedded store has: countdown"),
        ({"countdown": -1}, "countdown must be a number of seconds"),
        ({"countdown": 1, "eta": 1.0}, "both given"),
        ({"eta": "tomorrow"}, "eta must be a datetime"),
        ({"task_id": ""}, "task_id must be a text"),
        ({"idempotency_key": 3}, "idempotency_key must be a text"),
        ({"fairness_key": 3}, "fairness_key must be a text"),
        ({"args": "a.pdf"}, "args must be a list"),
        ({"kwargs": [1]}, "kwargs must be a dict"),
    ],
)
def test_a_bad_enqueue_names_the_option(jobs: Jobs, options: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        jobs.adapter.enqueue_task_sync("work", **options)


def test_what_is_no_json_and_what_is_not_there(jobs: Jobs) -> None:
    with pytest.raises(TaskPayloadError, match="the arguments of 'work' cannot be written as JSON"):
        jobs.adapter.enqueue_task_sync("work", [object()])
    with pytest.raises(TaskNotFoundError, match="there is no job 'none'"):
        jobs.adapter.get_task_status_sync("none")


@pytest.fixture(autouse=True)
def stores_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for the threads of stores that nobody uses any more."""
    monkeypatch.setattr(store, "IDLE_S", 0.02)
    yield
    serve.shutdown()
    wait_until(lambda: not any("jobs" in each.name for each in threading.enumerate()))
