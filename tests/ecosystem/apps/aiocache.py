from aiocache import Cache, cached
from fastapi import FastAPI

PACKAGE = "aiocache"
cache = Cache(Cache.MEMORY)
calls = []
app = FastAPI()


@cached()
async def work(n):
    calls.append(n)
    return len(calls)


@app.get("/items/{n}")
async def items(n: int):
    await cache.set("last", n)
    return [await work(n), await cache.get("last")]


REQUESTS = ["GET /items/1", "GET /items/1", "GET /items/2", "GET /items/1"]
