"""A Socket.IO server at module level, which a route names."""

import asyncio
import json

import socketio
from fastapi import FastAPI

server = socketio.AsyncServer(async_mode="asgi")
app = FastAPI()
app.mount("/ws", socketio.ASGIApp(server, socketio_path="/ws/socket.io"))


@app.post("/say/{word}")
async def say(word: str):
    await server.emit("said", word)


async def load(client, count):
    url = "/ws/socket.io/?EIO=4&transport=polling"

    async def connect():
        sid = json.loads((await client.get(url)).text[1:])["sid"]
        mine = f"{url}&sid={sid}"
        assert (await client.post(mine, content="40")).text == "OK"
        assert (await client.get(mine)).text.startswith("40")
        return mine

    urls = await asyncio.gather(*[connect() for _ in range(count)])
    waits = [asyncio.ensure_future(client.get(url)) for url in urls]
    await asyncio.sleep(0.2)  # most of them wait by now
    (await client.post("/say/hello")).raise_for_status()
    heard = await asyncio.gather(*waits)
    assert [each.text for each in heard] == ['42["said","hello"]'] * count
