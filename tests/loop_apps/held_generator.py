"""An async generator for each client, which the requests of that client take items from."""

import asyncio
import uuid

from fastapi import FastAPI

app = FastAPI()
generators = {}
STEPS = 5


async def steps():
    changed = asyncio.Event()
    for number in range(STEPS):
        asyncio.get_running_loop().call_later(0.001, changed.set)
        await changed.wait()
        changed.clear()
        yield number


@app.get("/next/{client}")
async def take(client: str):
    if client not in generators:
        generators[client] = steps()
    return await anext(generators[client])


async def load(client, count):
    async def visit():
        mine = uuid.uuid4()
        found = [(await client.get(f"/next/{mine}")).text for _ in range(STEPS)]
        assert found == [str(each) for each in range(STEPS)]

    await asyncio.gather(*[visit() for _ in range(count)])
