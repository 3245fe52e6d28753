import json

import socketio
from fastapi import FastAPI

PACKAGE = "python-socketio"
server = socketio.AsyncServer(async_mode="asgi")
app = FastAPI()
app.mount("/ws", socketio.ASGIApp(server, socketio_path="/ws/socket.io"))


@server.event
async def add(sid, a, b):
    return a + b


@app.get("/say/{word}")
async def say(word: str):
    await server.emit("said", word)


def talk(client):
    url = "/ws/socket.io/?EIO=4&transport=polling"
    url += "&sid=" + json.loads(client.get(url).text[1:])["sid"]
    found = [client.post(url, content="40").text, client.get(url).text[:2]]
    found.append(client.post(url, content='420["add",1,2]').text)
    found.append(client.get(url).text)
    client.get("/say/hello")
    return [*found, client.get(url).text]


REQUESTS = []
