"""A chat: each listener has a queue in a set of the module, and a request puts into all."""

import asyncio

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

app = FastAPI()
listeners: set[asyncio.Queue] = set()
WORDS = 5


@app.get("/listen")
async def listen():
    async def words():
        queue = asyncio.Queue()
        listeners.add(queue)
        try:
            yield "ready\n"
            while (word := await queue.get()) != "end":
                yield f"{word}\n"
        finally:
            listeners.discard(queue)

    return StreamingResponse(words())


@app.post("/say/{word}")
async def say(word: str):
    for queue in [*listeners]:
        queue.put_nowait(word)


async def load(client, count):
    ready = asyncio.Semaphore(0)

    async def hear():
        async with client.stream("GET", "/listen") as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "ready"
            ready.release()
            return [line async for line in lines]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(hear()) for _ in range(count)]
        for _ in range(count):
            await ready.acquire()
        for word in [*range(WORDS), "end"]:
            (await client.post(f"/say/{word}")).raise_for_status()
    for task in tasks:
        assert task.result() == [str(number) for number in range(WORDS)]
