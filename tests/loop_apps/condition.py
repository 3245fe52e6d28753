"""A condition that the first request of a room makes."""

import asyncio

from fastapi import FastAPI

app = FastAPI()
rooms: dict[str, asyncio.Condition] = {}
waiting: dict[str, int] = {}


@app.get("/wait/{room}")
async def wait(room: str):
    if room not in rooms:
        rooms[room] = asyncio.Condition()
    async with rooms[room]:
        waiting[room] = waiting.get(room, 0) + 1
        await rooms[room].wait()
        waiting[room] -= 1
    return room


@app.get("/waiting/{room}")
async def count(room: str):
    return waiting.get(room, 0)


@app.post("/notify/{room}")
async def notify(room: str):
    async with rooms[room]:
        rooms[room].notify_all()


async def load(client, count):
    for number in range(3):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.get(f"/wait/{number}")) for _ in range(count)]
            while (await client.get(f"/waiting/{number}")).text != str(count):
                assert not [each for each in tasks if each.done()], "one of them did not wait"
                await asyncio.sleep(0.01)
            (await client.post(f"/notify/{number}")).raise_for_status()
        assert [task.result().json() for task in tasks] == [str(number)] * count
