"""The baselines of `ingress`: functions on plain FastAPI and on plain Starlette."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, WebSocket
from fastapi.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from benchmarks.apps import LEFT_S, Item, add_others, chunks, echo, named, pieces, sync_chunks
from benchmarks.work import compute

# `response_model=None`: otherwise the return annotation would be a response model.

fastapi_app = FastAPI()
add_others(fastapi_app, 0, 4)


@fastapi_app.get("/async", response_model=None)
async def async_endpoint() -> str:
    return "hello"


@fastapi_app.get("/async/{item_id}", response_model=None)
async def async_query_endpoint(item_id: int, name: str = "you") -> dict[str, Any]:
    return {"item_id": item_id, "name": name}


@fastapi_app.post("/model", response_model=Item)
async def model_endpoint(item: Item) -> Item:
    return item


@fastapi_app.get("/def", response_model=None)
def def_endpoint() -> str:
    return "hello"


@fastapi_app.get("/def-depends", response_model=None)
def def_depends_endpoint(text: Annotated[str, Depends(named)]) -> str:
    return text


add_others(fastapi_app, 4, 1)

computing_app = FastAPI()


@computing_app.post("/inference")
def inference(value: Annotated[int, Body(embed=True)]) -> int:
    compute()
    return value


streams_app = FastAPI()
add_others(streams_app, 0, 3)


@streams_app.get("/stream", response_model=None)
async def stream() -> StreamingResponse:
    return StreamingResponse(chunks())


@streams_app.get("/download", response_model=None)
async def download() -> StreamingResponse:
    return StreamingResponse(pieces())


@streams_app.get("/stream-def", response_model=None)
def sync_stream() -> StreamingResponse:
    return StreamingResponse(sync_chunks())


@streams_app.get("/lines")
def lines() -> Iterator[str]:
    yield from sync_chunks()


@streams_app.get("/events", response_class=EventSourceResponse)
def events() -> Iterator[str]:
    yield from sync_chunks()


add_others(streams_app, 3, 3)

clients_app = FastAPI()
add_others(clients_app, 0, 4)


@clients_app.get("/stay", response_model=None)
async def stay() -> str:
    return "hello"


@clients_app.get("/leave", response_model=None)
async def leave() -> str:
    await asyncio.sleep(LEFT_S)
    return "unread"


@clients_app.websocket("/echo")
async def echo_endpoint(websocket: WebSocket) -> None:
    await echo(websocket)


add_others(clients_app, 4, 3)


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


def hello_def(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


starlette_app = Starlette(
    routes=[
        *(Route(f"/other/{number}", hello) for number in range(4)),
        Route("/", hello),
        Route("/def", hello_def),
        *(Route(f"/other/{number}", hello) for number in range(4, 8)),
    ]
)
