"""Jobs of a broker that all processes of one machine reach: files, by Celery."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from tests.engines.api import COLUMN, serve
from tests.engines.client import Client, outcome
from tests.engines.probe import note, notes, wait_until
from tests.engines.suite import scenario

F = TypeVar("F", bound=Callable[..., Any])
PACKAGE = "ray.serve" if os.environ.get(COLUMN) == "native" else "ingress"
ENDS = ("SUCCESS", "FAILURE", "REVOKED")
QUEUE = "clerk"


def config() -> Any:
    """Return the config of the queue of this process: its folder is made at the first call."""
    if not _made:
        write_whole_files()
        schema = import_module(f"{PACKAGE}.schema")
        folder = tempfile.mkdtemp(prefix="ingress-jobs-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        paths = {
            name: os.path.join(folder, name)
            for name in ("data_folder_in", "processed_folder", "control_folder", "results")
        }
        for each in paths.values():
            os.mkdir(each)
        results = paths.pop("results")
        adapter = schema.CeleryAdapterConfig(
            broker_url="filesystem://",
            backend_url=f"file://{results}",
            broker_transport_options={**paths, "data_folder_out": paths["data_folder_in"]},
            task_custom_config={"retry_backoff_max": 0},
        )
        _made.append(
            schema.TaskProcessorConfig(
                queue_name=QUEUE,
                adapter_config=adapter,
                max_retries=1,
                failed_task_queue_name=f"{QUEUE}-failed",
                unprocessable_task_queue_name=f"{QUEUE}-unreadable",
            )
        )
    return _made[0]


_made: list[Any] = []


def write_whole_files() -> None:
    """Give messages their names when they are complete.

    Kombu creates the file of a message, then writes it: a consumer that looks between the two
    takes an empty message, and the job is lost.
    """
    channel = import_module("kombu.transport.filesystem").Channel
    put = channel._put

    def put_whole(self: Any, queue: str, payload: Any, **kwargs: Any) -> None:
        folder = self.data_folder_out
        with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as aside:
            self.data_folder_out = aside
            try:
                put(self, queue, payload, **kwargs)
            finally:
                self.data_folder_out = folder
            for name in os.listdir(aside):
                os.rename(os.path.join(aside, name), os.path.join(folder, name))

    channel._put = put_whole


def clerk() -> Any:
    consumer = import_module(f"{PACKAGE}.task_consumer")
    task_handler: Callable[..., Callable[[F], F]] = consumer.task_handler

    # Made here: a class of this module would have another folder in each process.
    class Clerk:
        def __init__(self) -> None:
            self.count = 0

        @task_handler(name="sum")
        def add(self, one: int, other: int = 0) -> int:
            return one + other

        @task_handler()
        def fails(self, key: str) -> None:
            note(key)
            raise ValueError("told so")

        @task_handler()
        def counts(self) -> int:
            self.count += 1
            return self.count

        @task_handler()
        def meets(self) -> None:
            note("job-meets")
            wait_until(lambda: len(notes("job-meets")) == 2, "the other job")

        def counted(self) -> int:
            return self.count

    marked = consumer.task_consumer(task_processor_config=config())(Clerk)
    return serve.deployment(max_ongoing_requests=2)(marked).bind()


def adapter() -> Any:
    consumer = import_module(f"{PACKAGE}.task_consumer")
    return consumer.instantiate_adapter_from_config(task_processor_config=config())


def run(queue: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Run a job and return its status and result."""
    id = queue.enqueue_task_sync(name, args=list(args), kwargs=kwargs).id
    wait_until(lambda: queue.get_task_status_sync(id).status in ENDS, name)
    found = queue.get_task_status_sync(id)
    return [found.status, found.result]


@scenario("Jobs", clerk)
def a_job_has_the_result_of_its_handler(it: Client) -> Any:
    queue = adapter()
    return [run(queue, "sum", 1), run(queue, "sum", 1, other=2), run(queue, "sum", one=3)]


@scenario("Jobs", clerk)
def a_job_that_fails_runs_again_and_then_has_failed(it: Client) -> Any:
    status, _ = run(adapter(), "fails", "job-fails")
    return [status, len(notes("job-fails"))]


@scenario("Jobs", clerk)
def jobs_and_calls_have_one_instance(it: Client) -> Any:
    queue = adapter()
    before = it.call("counted")
    found = [run(queue, "counts")[1] - before for _ in range(2)]
    return [found, it.call("counted") - before]


@scenario("Jobs", clerk)
def jobs_run_in_all_slots_at_once(it: Client) -> Any:
    queue = adapter()
    ids = [queue.enqueue_task_sync("meets").id for _ in range(2)]

    def states() -> list[str]:
        return [queue.get_task_status_sync(id).status for id in ids]

    wait_until(lambda: all(each in ENDS for each in states()), "meets")
    return states()


@scenario("Jobs", clerk)
def a_job_that_is_enqueued_has_a_status_with_its_id(it: Client) -> Any:
    queue = adapter()
    enqueued = queue.enqueue_task_sync("sum", args=[1, 1])
    wait_until(lambda: queue.get_task_status_sync(enqueued.id).status == "SUCCESS", "the job")
    return [enqueued.status, queue.get_task_status_sync(enqueued.id).id == enqueued.id]


@scenario("Jobs")
def a_consumer_without_a_config_is_refused(it: Client) -> Any:
    consumer = import_module(f"{PACKAGE}.task_consumer")
    return [
        outcome(lambda: consumer.task_consumer(Client)),
        outcome(lambda: consumer.task_handler(name="")(len)),
    ]
