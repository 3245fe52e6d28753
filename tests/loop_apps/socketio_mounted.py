"""A Socket.IO server that only its mount names."""

import asyncio
import json
from contextlib import asynccontextmanager

import socketio
from fastapi import FastAPI


def make():
    server = socketio.AsyncServer(async_mode="asgi")

    @server.event
    async def say(sid, word):
        await server.emit("said", word)

    return socketio.ASGIApp(server, socketio_path="/ws/socket.io")


@asynccontextmanager
async def lifespan(app):
    yield


app = FastAPI(lifespan=lifespan)
app.mount("/ws", make())


@app.get("/")
async def root():
    return "hello"


async def load(client, count):
    """Connect by polling; one client says a word, and all hear it."""
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
    assert (await client.post(urls[0], content='42["say","hello"]')).text == "OK"
    heard = await asyncio.gather(*waits)
    assert [each.text for each in heard] == ['42["said","hello"]'] * count
