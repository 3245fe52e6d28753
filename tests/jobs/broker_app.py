"""A consumer of a broker's jobs, served by the tests that kill its server.

JOBS_QUEUE is a name, JOBS_BROKER and JOBS_RESULTS are URLs. JOBS_LOG gets one line at each begin
and end of a job.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Mapping

import ingress as serve
from ingress.schema import CeleryAdapterConfig, TaskProcessorConfig
from ingress.task_consumer import task_consumer, task_handler

VISIBLE_S = 2
"""Time after which Redis sends a job again whose process has died."""


def config_of(environ: Mapping[str, str]) -> TaskProcessorConfig:
    queue = environ.get("JOBS_QUEUE", "jobs")
    broker_url = environ.get("JOBS_BROKER", "memory://")
    options = {"visibility_timeout": VISIBLE_S} if broker_url.startswith("redis") else None
    return TaskProcessorConfig(
        queue_name=queue,
        adapter_config=CeleryAdapterConfig(
            broker_url=broker_url,
            backend_url=environ.get("JOBS_RESULTS", "cache+memory://"),
            broker_transport_options=options,
            task_custom_config={"retry_backoff_max": 0},
        ),
        max_retries=2,
        failed_task_queue_name=f"{queue}-failed",
        unprocessable_task_queue_name=f"{queue}-unreadable",
    )


def note(what: str, number: int) -> None:
    log = os.open(os.environ["JOBS_LOG"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(log, f"{what} {number} {os.getpid()}\n".encode())
    os.close(log)


@serve.deployment(max_ongoing_requests=20, graceful_shutdown_timeout_s=1)
@task_consumer(task_processor_config=config_of(os.environ))
class Worker:
    @task_handler
    async def work(self, number: int, seconds: float = 0.0) -> int:
        note("begin", number)
        await asyncio.sleep(seconds)
        note("end", number)
        return number

    @task_handler
    def work_in_a_thread(self, number: int) -> str:
        note("end", number)
        return threading.current_thread().name

    @task_handler
    async def pages(self, number: int) -> AsyncIterator[int]:
        for page in range(number):
            yield page
        await asyncio.Event().wait()

    @task_handler
    async def fail(self, number: int) -> None:
        note("begin", number)
        raise ValueError(f"no {number}")


main = Worker.bind()
