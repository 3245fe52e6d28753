from brotli_asgi import BrotliMiddleware
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

PACKAGE = "brotli-asgi"
app = FastAPI()
app.add_middleware(BrotliMiddleware, minimum_size=100)


@app.get("/large")
async def large():
    return "x" * 1000


@app.get("/stream")
def stream():
    return StreamingResponse("x" * 500 for _ in range(3))


BR = {"headers": {"Accept-Encoding": "br"}}
REQUESTS = [("GET /large", BR), ("GET /stream", BR), "GET /large"]
HEADERS = ["content-encoding", "vary"]
