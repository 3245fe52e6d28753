"""The same endpoints twice; each app is served as `uvicorn benchmarks.apps.plain:name`.

`plain` has them without `ingress`, which it does not import; `ours` has them with it. Every app
with routes has ten of them, with the measured one in the middle. This module has the shared code.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from fastapi import FastAPI, WebSocket
from pydantic import BaseModel

CHUNKS = 100
CHUNK = "x" * 1024
PIECES = 1_600
PIECE = b"x" * 65_536
LEFT_S = 0.1
"""Duration of the answer that clients do not wait for."""


class Item(BaseModel):
    name: str
    price: float
    tags: list[str] = []


async def chunks() -> AsyncIterator[str]:
    for _ in range(CHUNKS):
        yield CHUNK


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(PIECES):
        yield PIECE


def sync_chunks() -> Iterator[str]:
    for _ in range(CHUNKS):
        yield CHUNK


def named(name: str = "you") -> str:
    return f"hello {name}"


async def echo(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)


async def other() -> str:
    return "never asked"


def add_others(app: FastAPI, first: int, count: int) -> None:
    for number in range(first, first + count):
        app.get(f"/other/{number}", response_model=None)(other)
