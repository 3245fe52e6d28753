"""aiocache in memory, with a time to live and protection from a stampede."""

import asyncio

from aiocache import Cache, cached, cached_stampede
from fastapi import FastAPI

cache = Cache(Cache.MEMORY)
app = FastAPI()


@cached(ttl=0.05)
async def plain(n):
    await asyncio.sleep(0.001)
    return n


@cached_stampede(ttl=0.05, lease=2)
async def guarded(n):
    await asyncio.sleep(0.001)
    return n


@app.get("/items/{n}")
async def items(n: int):
    await cache.set(n, n, ttl=0.02)
    return [await plain(n), await guarded(n)]


async def load(client, count):
    for _ in range(5):
        answers = await asyncio.gather(*[client.get(f"/items/{n % 3}") for n in range(count)])
        assert [each.json() for each in answers] == [[n % 3, n % 3] for n in range(count)]
