"""async_lru: requests that come meanwhile wait for the first one's result."""

import asyncio

from async_lru import alru_cache
from fastapi import FastAPI

app = FastAPI()


@alru_cache(maxsize=8)
async def work(n):
    await asyncio.sleep(0.02)
    return n


@app.get("/items/{n}")
async def items(n: int):
    return await work(n)


async def load(client, count):
    for turn in range(5):
        answers = await asyncio.gather(
            *[client.get(f"/items/{10 * turn + n % 3}") for n in range(count)]
        )
        assert [each.text for each in answers] == [str(10 * turn + n % 3) for n in range(count)]
