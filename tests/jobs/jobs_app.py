"""A front and a consumer, served by the tests that kill servers.

JOBS_FILE is the store, JOBS_LOG gets one line at each begin and end of a job.
"""

from __future__ import annotations

import asyncio
import os
import signal

from fastapi import FastAPI

import ingress as serve
from ingress.schema import SQLiteAdapterConfig, TaskProcessorConfig, TaskResult
from ingress.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler

config = TaskProcessorConfig(
    queue_name="jobs",
    adapter_config=SQLiteAdapterConfig(
        path=os.environ["JOBS_FILE"], max_crashes=int(os.environ.get("JOBS_CRASHES", "3"))
    ),
)
app = FastAPI()


def note(what: str, number: int) -> None:
    log = os.open(os.environ["JOBS_LOG"], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(log, f"{what} {number} {os.getpid()}\n".encode())
    os.close(log)


IN_PROCESSES = os.environ.get("JOBS_ISOLATION") == "process"


@serve.deployment(max_ongoing_requests=20, isolation="process" if IN_PROCESSES else "thread")
@task_consumer(task_processor_config=config)
class Worker:
    @task_handler
    async def work(self, number: int, seconds: float) -> int:
        note("begin", number)
        await asyncio.sleep(seconds)
        note("end", number)
        return number

    @task_handler
    async def die(self, number: int) -> None:
        note("begin", number)
        os.kill(os.getpid(), signal.SIGKILL)


@serve.deployment
@serve.ingress(app)
class Front:
    def __init__(self, worker: serve.DeploymentHandle) -> None:
        del worker
        self.adapter = instantiate_adapter_from_config(config)

    @app.post("/jobs/{name}", status_code=202)
    async def enqueue(self, name: str, number: int, seconds: float | None = None) -> TaskResult:
        args = [number] if seconds is None else [number, seconds]
        key = f"{name}-{number}"
        return await self.adapter.enqueue_task_async(name, args, idempotency_key=key)

    @app.get("/jobs/{id}")
    async def status(self, id: str) -> TaskResult:
        return await self.adapter.get_task_status_async(id)


main = Front.bind(Worker.bind())
