import fakeredis
from fastapi import FastAPI

PACKAGE = "fakeredis"
redis = fakeredis.FakeAsyncRedis()
app = FastAPI()


@app.get("/count")
async def count():
    return await redis.incr("count")


@app.get("/queue")
async def queue():
    await redis.lpush("queue", "item")
    return [(await redis.blpop("queue", timeout=1))[1].decode()]


REQUESTS = ["GET /count", "GET /queue"] * 4
