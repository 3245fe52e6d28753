"""A lock for each user, made when the user first comes."""

import asyncio

from fastapi import FastAPI

app = FastAPI()
locks: dict[str, asyncio.Lock] = {}
inside: dict[str, int] = {}


@app.get("/users/{user}")
async def visit(user: str):
    async with locks.setdefault(user, asyncio.Lock()):
        inside[user] = inside.get(user, 0) + 1
        await asyncio.sleep(0.002)
        others = inside[user] - 1
        inside[user] -= 1
    return others


async def load(client, count):
    for _ in range(3):
        answers = await asyncio.gather(*[client.get(f"/users/{n % 5}") for n in range(count)])
        assert [each.text for each in answers] == ["0"] * count
