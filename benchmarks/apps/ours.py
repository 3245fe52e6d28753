"""The same endpoints as methods of deployments, and deployments without FastAPI."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, WebSocket
from fastapi.sse import EventSourceResponse
from starlette.requests import Request
from starlette.responses import StreamingResponse

import ingress as serve
from benchmarks.apps import LEFT_S, Item, add_others, chunks, echo, named, pieces, sync_chunks
from benchmarks.work import compute

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

    @methods_app.post("/model", response_model=Item)
    async def model_endpoint(self, item: Item) -> Item:
        return item

    @methods_app.get("/def", response_model=None)
    def def_endpoint(self) -> str:
        return "hello"

    @methods_app.get("/def-depends", response_model=None)
    def def_depends_endpoint(self, text: Annotated[str, Depends(named)]) -> str:
        return text


add_others(methods_app, 4, 1)
methods, methods_2, methods_8 = (
    serve.deployment(num_replicas=replicas)(Methods).bind() for replicas in (1, 2, 8)
)
process_methods = serve.deployment(isolation="process")(Methods).bind()

streams_app = FastAPI()
add_others(streams_app, 0, 3)


@serve.ingress(streams_app)
class Streams:
    @streams_app.get("/stream", response_model=None)
    async def stream(self) -> StreamingResponse:
        return StreamingResponse(chunks())

    @streams_app.get("/download", response_model=None)
    async def download(self) -> StreamingResponse:
        return StreamingResponse(pieces())

    @streams_app.get("/stream-def", response_model=None)
    def sync_stream(self) -> StreamingResponse:
        return StreamingResponse(sync_chunks())

    @streams_app.get("/lines")
    def lines(self) -> Iterator[str]:
        yield from sync_chunks()

    @streams_app.get("/events", response_class=EventSourceResponse)
    def events(self) -> Iterator[str]:
        yield from sync_chunks()


add_others(streams_app, 3, 3)
streams = serve.deployment(Streams).bind()
process_streams = serve.deployment(isolation="process")(Streams).bind()

clients_app = FastAPI()
add_others(clients_app, 0, 4)


@serve.ingress(clients_app)
class Clients:
    @clients_app.get("/stay", response_model=None)
    async def stay(self) -> str:
        return "hello"

    @clients_app.get("/leave", response_model=None)
    async def leave(self) -> str:
        await asyncio.sleep(LEFT_S)
        return "unread"

    @clients_app.websocket("/echo")
    async def echo_endpoint(self, websocket: WebSocket) -> None:
        await echo(websocket)


add_others(clients_app, 4, 3)
clients = serve.deployment(Clients).bind()


class Call:
    async def __call__(self, request: Request) -> str:
        return "hello"


class CallDef:
    def __call__(self, request: Request) -> str:
        return "hello"


call = serve.deployment(Call).bind()
call_def = serve.deployment(CallDef).bind()
process_call = serve.deployment(isolation="process")(Call).bind()
process_call_2 = serve.deployment(isolation="process", num_replicas=2)(Call).bind()


compute_app = FastAPI()
add_others(compute_app, 0, 5)


@serve.ingress(compute_app)
class Computing:
    @compute_app.get("/compute", response_model=None)
    def compute_endpoint(self) -> str:
        compute()
        return "hello"


add_others(compute_app, 5, 4)
computing = serve.deployment(Computing).bind()
process_computing_2 = serve.deployment(isolation="process", num_replicas=2)(Computing).bind()


class Last:
    async def __call__(self, request: Request | None = None) -> str:
        return "hello"


class Link:
    def __init__(self, following: serve.DeploymentHandle) -> None:
        self.following = following

    async def __call__(self, request: Request | None = None) -> str:
        answer: str = await self.following.remote()
        return answer


def chain(length: int) -> Any:
    """Return a chain of deployments: the first gets the HTTP request, each calls the next."""
    node: serve.Application = serve.deployment(Last).bind()
    for number in range(length - 1):
        node = serve.deployment(name=f"Link{number}")(Link).bind(node)
    return node


chain_1, chain_2, chain_5 = (chain(length) for length in (1, 2, 5))


class Model:
    """A recurrent network: 1,000 steps of three NumPy calls, for one sample or for 32."""

    def __init__(self) -> None:
        # Set before the import of NumPy: one thread per core would compete with wrk and the server.
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
        found: list[int] = state.argmax(axis=1).tolist()
        return found


class Unbatched(Model):
    async def __call__(self, request: Request) -> int:
        return self.predict([request])[0]


class Batched(Model):
    @serve.batch(max_batch_size=32)
    async def __call__(self, requests: list[Request]) -> list[int]:
        return self.predict(requests)


unbatched = serve.deployment(Unbatched).bind()
batched = serve.deployment(Batched).bind()

predict_app = FastAPI()


@serve.ingress(predict_app)
class Predict:
    """The no-op of each peer, at the peer's path and in its format."""

    @predict_app.post("/predict")
    async def litserve(self, value: Annotated[int, Body(embed=True)]) -> dict[str, int]:
        return {"output": value}

    @predict_app.post("/noop")
    async def bentoml(self, value: Annotated[int, Body(embed=True)]) -> int:
        return value


predict = serve.deployment(Predict).bind()
process_predict_2 = serve.deployment(isolation="process", num_replicas=2)(Predict).bind()

predict_computing_app = FastAPI()


@serve.ingress(predict_computing_app)
class PredictComputing:
    """The same, after computing."""

    @predict_computing_app.post("/predict")
    def litserve(self, value: Annotated[int, Body(embed=True)]) -> dict[str, int]:
        compute()
        return {"output": value}

    @predict_computing_app.post("/inference")
    def mosec(self, value: Annotated[int, Body(embed=True)]) -> int:
        compute()
        return value

    @predict_computing_app.post("/noop")
    def bentoml(self, value: Annotated[int, Body(embed=True)]) -> int:
        compute()
        return value


predict_computing = serve.deployment(PredictComputing).bind()
predict_computing_2 = serve.deployment(isolation="process", num_replicas=2)(PredictComputing).bind()


class Inference:
    """The no-op of mosec: no routes and no validation."""

    async def __call__(self, request: Request) -> int:
        found: int = (await request.json())["value"]
        return found


inference = serve.deployment(Inference).bind()
process_inference = serve.deployment(isolation="process")(Inference).bind()
