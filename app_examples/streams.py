"""Three ways to stream from a FastAPI app: JSON lines, server-sent events, and any text.

    ingress run app_examples.streams:app

    curl -N http://127.0.0.1:8000/lines     {"number":0}, {"number":1}, ... one a line, two a second
    curl -N http://127.0.0.1:8000/events    data: {"number":0}, ...
    curl -N http://127.0.0.1:8000/text      0, 1, ...

Each generator has one worker thread from its first line to its last, so it may block. It pauses
while its client does not read, and its `finally` runs as soon as the client has disconnected.
"""

import time
from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel

import ingress as serve

api = FastAPI()


class Item(BaseModel):
    number: int


def numbers():
    try:
        for number in range(10):
            yield number
            time.sleep(0.5)
    finally:
        print("closed")


@serve.deployment
@serve.ingress(api)
class Streams:
    @api.get("/lines")
    def lines(self) -> Iterator[Item]:
        for number in numbers():
            yield Item(number=number)

    @api.get("/events", response_class=EventSourceResponse)
    def events(self) -> Iterator[Item]:
        for number in numbers():
            yield Item(number=number)

    @api.get("/text")
    def text(self):
        return StreamingResponse(f"{number}\n" for number in numbers())


app = Streams.bind()
