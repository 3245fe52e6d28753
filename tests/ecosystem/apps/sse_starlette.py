import asyncio

from fastapi import FastAPI
from sse_starlette.sse import EventSourceResponse

PACKAGE = "sse-starlette"
app = FastAPI()


@app.get("/events")
async def events():
    async def each():
        for n in range(3):
            yield {"event": "count", "data": n}
            await asyncio.sleep(0)

    return EventSourceResponse(each())


REQUESTS = ["GET /events", "GET /events", "GET /events"]
