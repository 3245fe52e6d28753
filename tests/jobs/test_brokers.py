"""Jobs in Redis and RabbitMQ, whose servers are killed. `make test-jobs-brokers` runs them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kombu import pools

from ingress.core.base.task_models import TaskProcessorAdapter, TaskResult
from ingress.task_consumer import instantiate_adapter_from_config
from tests.jobs.broker_app import config_of
from tests.jobs.brokers import BROKERS
from tests.jobs.test_kills import Log
from tests.programs import ROOT, ServerProcess, environment, ingress_run
from tests.servers import wait_until

APP = "tests.jobs.broker_app:main"
MANY = 200

pytestmark = [
    pytest.mark.skipif("INGRESS_BROKERS" not in os.environ, reason="make test-jobs-brokers"),
    pytest.mark.filterwarnings(
        "ignore:Call to deprecated:DeprecationWarning"
    ),  # Celery's, of redis
]


class Broker:
    """A broker, an adapter that fills its queue, and what its jobs have noted."""

    def __init__(self, folder: Path, broker: str, results: str) -> None:
        self.folder, self.log = folder, Log(folder / "log")
        self.environ = environment(ROOT) | {
            "JOBS_QUEUE": folder.name,
            "JOBS_BROKER": broker,
            "JOBS_RESULTS": results,
            "JOBS_LOG": str(folder / "log"),
        }
        self.config = config_of(self.environ)
        self.adapter: TaskProcessorAdapter = instantiate_adapter_from_config(self.config)

    def serve(self) -> Any:
        return ingress_run(self.folder, APP, environ=self.environ)

    def put(self, name: str, *args: Any, **options: Any) -> str:
        return self.adapter.enqueue_task_sync(name, args, **options).id

    def until(self, id: str, condition: Callable[[TaskResult], object]) -> TaskResult:
        wait_until(lambda: condition(self.adapter.get_task_status_sync(id)))
        return self.adapter.get_task_status_sync(id)

    def end(self, id: str, status: str = "SUCCESS") -> TaskResult:
        return self.until(id, lambda job: job.status == status)

    def taken(self, kind: str) -> list[Any]:
        """Take a dead letter out of its queue, once it is there, and return its arguments."""
        app: Any = self.adapter._app  # type: ignore[attr-defined]
        found: list[Any] = []
        with app.connection_for_read() as connection:
            bound = app.amqp.queues[f"{self.folder.name}-{kind}"](connection.default_channel)
            bound.declare()

            def take() -> bool:
                if (message := bound.get(no_ack=True, accept=["json"])) is not None:
                    found.extend(message.decode()[0])
                return bool(found)

            wait_until(take)
        return found


@pytest.fixture(scope="module", params=BROKERS)
def urls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with BROKERS[request.param](tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
def broker(urls: tuple[str, str], tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path, *urls)
    yield broker
    pools.reset()
    del broker.adapter
    gc.collect()


def kill(server: ServerProcess) -> None:
    server.process.kill()
    server.process.wait()


def has_ended(log: Log, least: int) -> bool:
    return sum(log.seen("end").values()) >= least


def test_all_jobs_end_though_their_servers_are_killed(broker: Broker) -> None:
    ids = [broker.put("work", number, 0.2) for number in range(MANY)]
    log = broker.log
    for killed in range(1, 5):
        with broker.serve() as server:
            wait_until(partial(has_ended, log, 20 * killed))
            kill(server)
    with broker.serve():
        wait_until(lambda: len(log.seen("end")) == MANY)
        for number, id in enumerate(ids):
            assert broker.end(id).result == number
    begun, ended = log.seen("begin"), log.seen("end")
    print(f"begun twice: {sum(begun.values()) - MANY}, ended twice: {sum(ended.values()) - MANY}")


def test_a_job_that_fails_is_tried_again_and_goes_to_the_failed_queue(broker: Broker) -> None:
    with broker.serve():
        id = broker.put("fail", 7)
        job = broker.end(id, "FAILURE")
        assert (job.attempts, job.error, broker.log.seen("begin")[7]) == (3, "ValueError: no 7", 3)
        arguments = broker.taken("failed")
        assert arguments[:4] == [id, "no 7", "[7]", "{}"]
        assert "ValueError" in arguments[4]


@pytest.mark.parametrize(("name", "given"), [("gone", [1]), ("work", ["one"])])
def test_a_job_without_a_fitting_handler_goes_to_the_unprocessable_queue(
    broker: Broker, name: str, given: list[Any]
) -> None:
    with broker.serve():
        id = broker.put(name, *given)
        broker.end(id, "FAILURE")
        assert broker.taken("unreadable")[:2] == [name, id]


def test_a_retry_that_waits_survives_its_server(broker: Broker) -> None:
    with broker.serve() as server:
        id = broker.put("work", 1, countdown=3)
        broker.end(broker.put("work", 2))  # it has taken both
        kill(server)
    with broker.serve():
        assert broker.end(id).result == 1


def test_a_cancelled_job_does_not_run(broker: Broker) -> None:
    waiting = broker.put("work", 1)
    broker.adapter.cancel_task_sync(waiting)
    with broker.serve():
        running = broker.put("work", 2, 3600)
        wait_until(lambda: broker.log.seen("begin")[2])
        broker.adapter.cancel_task_sync(running)
        broker.end(running, "REVOKED")
        broker.end(broker.put("work", 3))
        assert broker.adapter.get_task_status_sync(waiting).status == "REVOKED"
        assert not broker.log.seen("begin")[1]
        assert not broker.log.seen("end")[2]


def test_handlers_run_where_their_deployment_says_and_report_progress(broker: Broker) -> None:
    with broker.serve():
        assert broker.end(broker.put("work", 1)).result == 1
        assert "worker" in broker.end(broker.put("work_in_a_thread", 2)).result
        pages = broker.put("pages", 3)
        job = broker.until(pages, lambda job: job.progress == 2)
        assert (job.status, job.attempts) == ("STARTED", 1)
        assert broker.adapter.health_check_sync()
        (stats,) = broker.adapter.get_metrics_sync().values()
        assert (stats["total"]["work"], stats["pool"]["running"]) == (1, 1)


def test_a_drain_hands_running_jobs_back(broker: Broker) -> None:
    with broker.serve() as server:
        id = broker.put("work", 1, 3600)
        wait_until(lambda: broker.log.seen("begin")[1])
        server.signal()
        assert server.wait() == 0
        assert broker.adapter.get_task_status_sync(id).status == "PENDING"
    with broker.serve():
        wait_until(lambda: broker.log.seen("begin")[1] == 2)
        broker.adapter.cancel_task_sync(id)
        broker.end(id, "REVOKED")
