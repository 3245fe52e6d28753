from fastapi import FastAPI
from prometheus_client import Counter
from prometheus_fastapi_instrumentator import Instrumentator

PACKAGE = "prometheus-fastapi-instrumentator"
app = FastAPI()
Instrumentator(should_instrument_requests_inprogress=True).instrument(app).expose(app)
mine = Counter("mine", "A metric of the module.")


@app.get("/")
async def root():
    mine.inc()


def talk(client):
    lines = client.get("/metrics").text.splitlines()
    names = ("http_requests_total", "http_requests_inprogress", "mine_total")
    return [each for each in lines if each.startswith(names)]


REQUESTS = ["GET /"] * 40
