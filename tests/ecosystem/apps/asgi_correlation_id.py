from asgi_correlation_id import CorrelationIdMiddleware, correlation_id
from fastapi import FastAPI

PACKAGE = "asgi-correlation-id"
ID = "5aa7d8b1f8a14d4c9a4c8ae4a7dd5f4e"
app = FastAPI()
app.add_middleware(CorrelationIdMiddleware, header_name="X-Correlation-ID")


@app.get("/async")
async def of_async():
    return correlation_id.get()


@app.get("/sync")
def of_sync():
    return correlation_id.get()


REQUESTS = [(f"GET /{kind}", {"headers": {"X-Correlation-ID": ID}}) for kind in ("async", "sync")]
HEADERS = ["x-correlation-id"]
