import structlog
from fastapi import FastAPI, Request

PACKAGE = "structlog"
lines = []
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        lambda *event: lines.append(event[2]) or "",
    ],
    logger_factory=structlog.PrintLoggerFactory(open("/dev/null", "w")),
)
app = FastAPI()


@app.middleware("http")
async def bind(request: Request, call_next):
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(path=request.url.path)
    return await call_next(request)


@app.get("/async")
async def of_async():
    structlog.get_logger().info("async")


@app.get("/sync")
def of_sync():
    structlog.get_logger().info("sync")


def talk(client):
    return [[each["event"], each["path"]] for each in lines]


REQUESTS = ["GET /async", "GET /sync"]
