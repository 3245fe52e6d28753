from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from starlette_compress import CompressMiddleware

PACKAGE = "starlette-compress"
app = FastAPI()
app.add_middleware(CompressMiddleware)


@app.get("/large")
async def large():
    return "x" * 1000


@app.get("/stream")
def stream():
    return StreamingResponse(("x" * 500 for _ in range(3)), media_type="text/plain")


GZIP = {"headers": {"Accept-Encoding": "gzip"}}
REQUESTS = [("GET /large", GZIP), ("GET /stream", GZIP)]
HEADERS = ["content-encoding", "vary"]
