"""The application of `test_process_memory`: its children import it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

import ingress as serve

app = FastAPI()


def holdings() -> tuple[int, int]:
    """Return the numbers of this process's descriptors and of its mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:ingress")


class Unreadable:
    """An object that can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("x",)


@serve.deployment(isolation="process", max_ongoing_requests=64)
class Large:
    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.made = 0

    async def same(self, value: Any) -> Any:
        return value

    async def is_writable(self, array: Any) -> bool:
        return bool(array.flags.writeable)

    @serve.method(execution="threadpool")
    def tripled(self, array: Any) -> Any:
        return array * 3

    async def keep(self, array: Any) -> None:
        self.kept.append(array)

    async def give(self) -> list[Any]:
        kept, self.kept = self.kept, []
        return kept

    async def sums(self) -> list[int]:
        return [int(each.sum()) for each in self.kept]

    async def stay(self, array: Any) -> None:
        self.kept.append(array)
        await asyncio.Event().wait()

    async def rows(self, size: int) -> AsyncIterator[Any]:
        while True:
            self.made += 1
            yield np.full(size, self.made, np.uint8)

    async def number_made(self) -> int:
        return self.made

    async def odd_items(self) -> AsyncIterator[Any]:
        yield 1
        yield Unreadable()

    async def holdings(self) -> tuple[int, int]:
        return holdings()

    async def pid(self) -> int:
        return os.getpid()


@serve.deployment(isolation="process")
@serve.ingress(app)
class Reader:
    """A deployment that takes a few items of a stream of another one, from its own process."""

    def __init__(self, large: Any) -> None:
        self.large = large
        self.stream: Any = None

    @app.post("/upper")
    async def upper(self, request: Request) -> Response:
        return Response((await request.body()).upper())

    async def first(self, size: int) -> int:
        self.stream = self.large.options(stream=True).rows.remote(size)
        return int((await anext(self.stream))[0])

    async def close(self) -> None:
        stream, self.stream = self.stream, None
        stream.cancel()


large = Large.bind()
api = Reader.bind(large)
