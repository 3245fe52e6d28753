"""An application with every kind of endpoint; each answer echoes the key of its request."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import ingress as serve

SLOTS = 8
LEAF_SLOTS = 3
QUEUED = 24
LONGEST_S = 0.012
ITEMS = 4

running = Counter[int]()
"""Number of running requests by instance."""
excesses: list[str] = []
"""Requests that ran beyond the slots, or with an unloaded model."""
lock = threading.Lock()


class Slot:
    """Counts the calls that run on an instance."""

    def __init__(self, instance: object, limit: int) -> None:
        self.key, self.limit = id(instance), limit

    def __enter__(self) -> None:
        with lock:
            running[self.key] += 1
            if running[self.key] > self.limit:
                excesses.append(f"{running[self.key]} run, {self.limit} may")

    def __exit__(self, *_: object) -> None:
        with lock:
            running[self.key] -= 1


async def work(parts: int = 1) -> None:
    """Take a random time, or the time of one part of the work."""
    await asyncio.sleep(random.uniform(0, LONGEST_S) / parts)


def work_in_thread(parts: int = 1) -> None:
    time.sleep(random.uniform(0, LONGEST_S) / parts)


class Model:
    is_here = True

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id

    def __del__(self) -> None:
        self.is_here = False

    def check(self, model_id: str) -> None:
        if not self.is_here or self.model_id != model_id:
            excesses.append(f"model {self.model_id}, {self.is_here}, for {model_id}")


@serve.deployment(max_ongoing_requests=LEAF_SLOTS, graceful_shutdown_timeout_s=1)
class Leaf:
    async def __call__(self, key: str) -> str:
        with Slot(self, LEAF_SLOTS):
            await work()
        return key

    def in_thread(self, key: str) -> str:
        with Slot(self, LEAF_SLOTS):
            work_in_thread()
        return key

    async def items(self, key: str) -> AsyncIterator[str]:
        with Slot(self, LEAF_SLOTS):
            for _ in range(ITEMS):
                yield key + ","
                await work(ITEMS)


def make_root(*, has_middleware: bool = False) -> Any:
    app = FastAPI()
    if has_middleware:

        @app.middleware("http")
        async def middleware(request: Request, call_next: Any) -> Any:
            return await call_next(request)

    @serve.deployment(
        max_ongoing_requests=SLOTS, max_queued_requests=QUEUED, graceful_shutdown_timeout_s=1
    )
    @serve.ingress(app)
    class Root:
        def __init__(self, leaf: Any) -> None:
            self.leaf = leaf

        @app.get("/sleep")
        async def sleep(self, key: str) -> str:
            with Slot(self, SLOTS):
                await work()
            return key

        @app.get("/thread")
        def thread(self, key: str) -> str:
            with Slot(self, SLOTS):
                work_in_thread()
                serve.cancellation().check()
            return key

        @app.post("/upload")
        async def upload(self, key: str, request: Request) -> Any:
            with Slot(self, SLOTS):
                size = len(await request.body())
                return key if size == 100_000 else "wrong"

        @app.get("/chain")
        async def chain(self, key: str) -> Any:
            with Slot(self, SLOTS):
                asked = [self.leaf.remote(key), self.leaf.in_thread.remote(key)]
                first, second = await asyncio.gather(*asked)
                return first if first == second else "wrong"

        @app.get("/def-chain")
        def def_chain(self, key: str) -> Any:
            with Slot(self, SLOTS):
                return self.leaf.remote(self.leaf.remote(key)).result()

        @app.get("/batched")
        async def batched(self, key: str) -> Any:
            with Slot(self, SLOTS):
                return await self._batched(key)

        @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.004, max_concurrent_batches=2)
        async def _batched(self, keys: list[str]) -> list[Any]:
            return list(await asyncio.gather(*(self.leaf.remote(key) for key in keys)))

        @app.get("/def-batched")
        async def def_batched(self, key: str) -> Any:
            with Slot(self, SLOTS):
                return await self._def_batched(key)

        @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.004)
        def _def_batched(self, keys: list[str]) -> list[str]:
            work_in_thread()
            return keys

        @app.get("/batched-items")
        async def batched_items(self, key: str) -> Response:
            return StreamingResponse(self._counted(self._batched_items(key)))

        async def _counted(self, items: Any) -> AsyncIterator[str]:
            with Slot(self, SLOTS):
                async for item in items:
                    yield item

        @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.004)
        async def _batched_items(self, keys: list[str]) -> AsyncIterator[list[str]]:
            for _ in range(ITEMS):
                yield [key + "," for key in keys]
                await work(ITEMS)

        @serve.multiplexed(max_num_models_per_replica=2)
        async def load(self, model_id: str) -> Model:
            await work()
            return Model(model_id)

        @app.get("/model")
        async def model(self, key: str) -> str:
            with Slot(self, SLOTS):
                model_id = serve.get_multiplexed_model_id()
                model = await self.load(model_id)
                await work()
                model.check(model_id)
            return key

        @app.get("/model-batched")
        async def model_batched(self, key: str) -> Any:
            with Slot(self, SLOTS):
                return await self._model_batched(key)

        @serve.batch(max_batch_size=3, batch_wait_timeout_s=0.004)
        async def _model_batched(self, keys: list[str]) -> list[str]:
            model_id = serve.get_multiplexed_model_id()
            model = await self.load(model_id)
            await work()
            model.check(model_id)
            return keys

        @app.get("/items")
        async def items(self, key: str) -> Response:
            return StreamingResponse(self._items(key))

        async def _items(self, key: str) -> AsyncIterator[str]:
            with Slot(self, SLOTS):
                async for item in self.leaf.items.options(stream=True).remote(key):
                    yield item

        @app.get("/def-items")
        async def def_items(self, key: str) -> Response:
            return StreamingResponse(self._def_items(key))

        def _def_items(self, key: str) -> Iterator[str]:
            with Slot(self, SLOTS):
                for _ in range(ITEMS):
                    yield key + ","
                    work_in_thread(ITEMS)

        @app.get("/background")
        async def background(self, key: str) -> Response:
            return JSONResponse(key, background=BackgroundTask(self._after))

        async def _after(self) -> None:
            with Slot(self, SLOTS):
                await work()

        @app.websocket("/echo")
        async def echo(self, websocket: WebSocket, key: str) -> None:
            with Slot(self, SLOTS):
                await work(4)
                await websocket.accept()
                try:
                    while True:
                        await websocket.receive_text()
                        await websocket.send_text(await self.leaf.remote(key))
                except WebSocketDisconnect:
                    pass

    return Root
