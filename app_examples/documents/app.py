"""A document pipeline: an upload is answered at once, and its pages are counted by a durable job.

Run it, upload a text with form feeds between its pages, and follow the job:

    ingress run app_examples.documents.app:app
    curl -i -F file=@report.txt http://127.0.0.1:8000/documents
    curl -N http://127.0.0.1:8000/jobs/ID/events

Kill the server in the middle and start it again: the job runs again, from its beginning.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Header, Response, UploadFile
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel

import ingress as serve
from ingress.schema import SQLiteAdapterConfig, TaskProcessorConfig, TaskResult
from ingress.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler

FOLDER = Path("documents")
PAGE_S = float(os.environ.get("PAGE_S", "0.5"))  # the work that one page is
ENDED = ("SUCCESS", "FAILURE", "REVOKED")

config = TaskProcessorConfig(
    queue_name="documents", adapter_config=SQLiteAdapterConfig(path="documents.db")
)
api = FastAPI()


class Progress(BaseModel):
    """The pages that have been read; for the last one, the words of the whole document."""

    page: int
    pages: int
    words: int


@serve.deployment(max_ongoing_requests=2, graceful_shutdown_timeout_s=10)
@task_consumer(task_processor_config=config)
class Reader:
    """Reads two documents at once. The last progress of a job is its result."""

    @task_handler(name="read")
    async def read(self, path: Path) -> AsyncIterator[Progress]:
        pages = (await asyncio.to_thread(path.read_text)).split("\f")
        words = 0
        for number, page in enumerate(pages, start=1):
            await asyncio.sleep(PAGE_S)
            words += len(page.split())
            yield Progress(page=number, pages=len(pages), words=words)


@serve.deployment
@serve.ingress(api)
class Documents:
    def __init__(self, reader: serve.DeploymentHandle) -> None:
        self.reader = reader  # in this application, so that it starts with it
        self.jobs = instantiate_adapter_from_config(config)
        FOLDER.mkdir(exist_ok=True)

    @api.post("/documents", status_code=202)
    async def upload(
        self,
        file: UploadFile,
        response: Response,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> TaskResult:
        path = FOLDER / f"{os.urandom(8).hex()}.txt"
        await asyncio.to_thread(path.write_bytes, await file.read())
        job = await self.jobs.enqueue_task_async(
            "read", [path], idempotency_key=idempotency_key
        )  # on the disk from here on
        response.headers["location"] = f"/jobs/{job.id}"
        return job

    @api.get("/jobs/{id}")
    async def job(self, id: str) -> TaskResult:
        return await self.jobs.get_task_status_async(id)

    @api.delete("/jobs/{id}", status_code=204)
    async def cancel(self, id: str) -> None:
        await self.jobs.cancel_task_async(id)

    @api.get("/jobs/{id}/events", response_class=EventSourceResponse)
    async def events(self, id: str) -> AsyncIterator[TaskResult]:
        """Send the job whenever it has changed, until it has ended."""
        seen: TaskResult | None = None
        while seen is None or seen.status not in ENDED:
            job = await self.jobs.get_task_status_async(id)
            if job != seen:
                yield job
            seen = job
            await asyncio.sleep(0.05)


app = Documents.bind(Reader.bind())
