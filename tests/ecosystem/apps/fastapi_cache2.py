from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_cache import FastAPICache
from fastapi_cache.backends.inmemory import InMemoryBackend
from fastapi_cache.decorator import cache

PACKAGE = "fastapi-cache2"
calls = []


@asynccontextmanager
async def lifespan(app):
    if not calls:
        FastAPICache.init(InMemoryBackend(), prefix="cache")
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/items/{n}")
@cache(expire=60)
async def items(n: int):
    calls.append(n)
    return len(calls)


REQUESTS = ["GET /items/1", "GET /items/2"] * 8
HEADERS = ["x-fastapi-cache"]
