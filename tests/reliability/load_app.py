"""The application under load: the same handlers in a deployment, and in plain FastAPI.

Ten requests run at once. Plain FastAPI limits them with a semaphore, or with ten threads.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar

import anyio.to_thread
from fastapi import Depends, FastAPI
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, StreamingResponse

import ingress as serve
from tests.servers import bind

REPLICAS = int(os.environ.get("LOAD_REPLICAS", "2"))
SLOTS = int(os.environ.get("LOAD_SLOTS", "5"))
QUEUED = int(os.environ.get("LOAD_QUEUED", "20"))
SERVICE_S = 0.05
CPU_MS = 5.0
AT_ONCE = REPLICAS * SLOTS
CAPACITY = AT_ONCE / SERVICE_S


class Visit:
    """One request at work in a replica, counted."""

    lock = threading.Lock()
    started: ClassVar = Counter[str]()
    running: ClassVar = Counter[str]()
    most: ClassVar = Counter[str]()

    def __enter__(self) -> None:
        self.replica = str(serve.get_replica_context().replica_id)
        with self.lock:
            self.started[self.replica] += 1
            self.running[self.replica] += 1
            self.most[self.replica] = max(self.most[self.replica], self.running[self.replica])

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.running[self.replica] -= 1


def burn(milliseconds: float) -> int:
    """Compute in Python until this thread has used some processor time."""
    turns, ends = 0, time.thread_time() + milliseconds / 1000
    while time.thread_time() < ends:
        turns += 1
    return turns


@serve.deployment(max_ongoing_requests=10_000)
class Model:
    async def __call__(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "modelled"


api = FastAPI()
FILES = Path(tempfile.gettempdir(), f"load-{os.getpid()}")
CHUNK = bytes(16 * 1024)
CHUNKS = 128  # more than the sockets hold


def opened() -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as file:
        yield file


@serve.deployment(num_replicas=REPLICAS, max_ongoing_requests=SLOTS, max_queued_requests=QUEUED)
@serve.ingress(api)
class Service:
    def __init__(self, model: Any = None) -> None:
        self.model = model

    @api.get("/handle")
    async def call(self) -> Any:
        with Visit():
            return await self.model.remote(SERVICE_S)

    @api.get("/late")
    async def call_for_long(self) -> Any:
        with Visit():
            return await self.model.remote(60.0)

    @api.get("/async")
    async def sleep(self) -> str:
        with Visit():
            await asyncio.sleep(SERVICE_S)
        return "slept"

    @api.get("/def")
    def sleep_in_thread(self) -> str:
        with Visit():
            time.sleep(SERVICE_S)
        return "slept"

    @api.get("/cpu")
    def compute(self) -> str:
        with Visit():
            burn(CPU_MS)
        return "computed"

    @api.get("/stream")
    async def stream(self, file: Annotated[BinaryIO, Depends(opened)]) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            with Visit():
                for _ in range(CHUNKS):
                    file.write(CHUNK[:16])
                    yield CHUNK
                    await asyncio.sleep(SERVICE_S / CHUNKS)

        return StreamingResponse(chunks())

    @api.get("/file")
    async def file(self, file: Annotated[BinaryIO, Depends(opened)]) -> FileResponse:
        FILES.mkdir(exist_ok=True)
        number, path = tempfile.mkstemp(dir=FILES)
        os.truncate(path, len(CHUNK) * CHUNKS)
        os.close(number)
        return FileResponse(path, background=BackgroundTask(os.unlink, path))

    @api.get("/left")
    async def left(self) -> dict[str, int]:
        """Return what this process holds besides this request."""
        gc.collect()
        tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
        return {
            "held": self.held(),
            "files": len(os.listdir(FILES)) if FILES.exists() else 0,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "tasks": sum(not each.done() for each in tasks),
            "threads": threading.active_count(),
            "visits": sum(Visit.running.values()),
        }

    def held(self) -> int:
        deployments = serve.status().applications["default"].deployments.values()
        ongoing = sum(replica.ongoing for each in deployments for replica in each.replicas)
        return ongoing - 1 + sum(each.queued for each in deployments)

    @api.get("/seen")
    async def seen(self) -> dict[str, Any]:
        """Return the number of other requests held now, and counts of those that ran."""
        return {
            "held": self.held(),
            "started": [*Visit.started.values()],
            "most": max(Visit.most.values(), default=0),
            "threads": threading.active_count(),
        }


app = bind(Service)
with_model = bind(Service, bind(Model))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = AT_ONCE
    yield


plain = FastAPI(lifespan=lifespan)
semaphore = asyncio.Semaphore(AT_ONCE)


@plain.get("/async")
async def sleep() -> str:
    async with semaphore:
        await asyncio.sleep(SERVICE_S)
    return "slept"


@plain.get("/def")
def sleep_in_thread() -> str:
    time.sleep(SERVICE_S)
    return "slept"


@plain.get("/cpu")
def compute() -> str:
    burn(CPU_MS)
    return "computed"


@plain.get("/-/healthz")
async def healthz() -> str:
    return "success"
