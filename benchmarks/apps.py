"""The same endpoints for both sides; each name below is served by `uvicorn benchmarks.apps:name`.

    fastapi_app     functions on plain FastAPI   ingress_app         methods, on one replica
    starlette_app   one function on Starlette    ingress_plain_app   an `async def __call__`
    unbatched_app   a NumPy model on `ingress`   batched_app         the same behind `@batch`

Every app with routes has ten of them, and what is measured stands in the middle.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

import ingress as serve

ROUTES = 10
CHUNKS = 1_000
CHUNK = "x" * 1024


async def chunks() -> AsyncIterator[str]:
    for _ in range(CHUNKS):
        yield CHUNK


def sync_chunks() -> Iterator[str]:
    for _ in range(CHUNKS):
        yield CHUNK


async def other() -> str:
    return "never asked"


def add_others(app: FastAPI, first: int, count: int) -> None:
    for number in range(first, first + count):
        app.get(f"/other/{number}", response_model=None)(other)


class Item(BaseModel):
    name: str
    price: float
    tags: list[str] = []


def named(name: str = "you") -> str:
    return f"hello {name}"


# `response_model=None`: a return annotation, which types want, would otherwise be a model.

fastapi_app = FastAPI()
add_others(fastapi_app, 0, 4)


@fastapi_app.get("/async", response_model=None)
async def async_endpoint() -> str:
    return "hello"


@fastapi_app.get("/async/{item_id}", response_model=None)
async def async_query_endpoint(item_id: int, name: str = "you") -> dict[str, Any]:
    return {"item_id": item_id, "name": name}


@fastapi_app.get("/def", response_model=None)
def def_endpoint() -> str:
    return "hello"


@fastapi_app.post("/model", response_model=Item)
async def model_endpoint(item: Item) -> Item:
    return item


@fastapi_app.get("/def-depends", response_model=None)
def def_depends_endpoint(text: Annotated[str, Depends(named)]) -> str:
    return text


@fastapi_app.get("/stream", response_model=None)
async def stream() -> StreamingResponse:
    return StreamingResponse(chunks())


@fastapi_app.get("/stream-def", response_model=None)
def sync_stream() -> StreamingResponse:
    return StreamingResponse(sync_chunks())


@fastapi_app.get("/lines")
def lines() -> Iterator[str]:
    yield from sync_chunks()


@fastapi_app.get("/events", response_class=EventSourceResponse)
def events() -> Iterator[str]:
    yield from sync_chunks()


add_others(fastapi_app, 4, 1)

methods_app = FastAPI()
add_others(methods_app, 0, 4)


@serve.ingress(methods_app)
class Methods:
    @methods_app.get("/async", response_model=None)
    async def async_endpoint(self) -> str:
        return "hello"

    @methods_app.get("/async/{item_id}", response_model=None)
    async def async_query_endpoint(self, item_id: int, name: str = "you") -> dict[str, Any]:
        return {"item_id": item_id, "name": name}

    @methods_app.get("/def", response_model=None)
    def def_endpoint(self) -> str:
        return "hello"

    @methods_app.get("/stream", response_model=None)
    async def stream(self) -> StreamingResponse:
        return StreamingResponse(chunks())

    @methods_app.get("/stream-def", response_model=None)
    def sync_stream(self) -> StreamingResponse:
        return StreamingResponse(sync_chunks())

    @methods_app.get("/lines")
    def lines(self) -> Iterator[str]:
        yield from sync_chunks()

    @methods_app.get("/events", response_class=EventSourceResponse)
    def events(self) -> Iterator[str]:
        yield from sync_chunks()

    @methods_app.post("/model", response_model=Item)
    async def model_endpoint(self, item: Item) -> Item:
        return item

    @methods_app.get("/def-depends", response_model=None)
    def def_depends_endpoint(self, text: Annotated[str, Depends(named)]) -> str:
        return text


add_others(methods_app, 4, 1)
ingress_app = serve.deployment(Methods).bind()


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


starlette_app = Starlette(
    routes=[Route("/" if number == 5 else f"/other/{number}", hello) for number in range(ROUTES)]
)


class Plain:
    async def __call__(self, request: Request) -> str:
        return "hello"


ingress_plain_app = serve.deployment(Plain).bind()


class Model:
    """A recurrent network: 1,000 steps of three NumPy calls, for one sample as for 32."""

    def __init__(self) -> None:
        # Before NumPy is there: as many threads as cores would fight with wrk and the server.
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        import numpy as np

        random = np.random.default_rng(seed=0)
        self.inputs = random.standard_normal((8, 64), dtype=np.float32)
        self.weights = random.standard_normal((64, 64), dtype=np.float32) / 8
        self.activate = np.tanh

    def predict(self, requests: list[Request]) -> list[int]:
        samples = self.inputs[[int(request.query_params["sample"]) for request in requests]]
        state = samples
        for _ in range(1000):
            state = self.activate(state @ self.weights + samples)
        return state.argmax(axis=1).tolist()


class Unbatched(Model):
    async def __call__(self, request: Request) -> int:
        return self.predict([request])[0]


class Batched(Model):
    @serve.batch(max_batch_size=32)
    async def __call__(self, requests: list[Request]) -> list[int]:
        return self.predict(requests)


unbatched_app = serve.deployment(Unbatched).bind()
batched_app = serve.deployment(Batched).bind()
