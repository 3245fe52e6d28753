from fastapi import FastAPI
from starlette_exporter import PrometheusMiddleware, handle_metrics

PACKAGE = "starlette-exporter"
app = FastAPI()
app.add_middleware(PrometheusMiddleware, app_name="mine")
app.add_route("/metrics", handle_metrics)


@app.get("/items/{n}")
async def items(n: int):
    return n


def talk(client):
    lines = client.get("/metrics").text.splitlines()
    return [each for each in lines if each.startswith("starlette_requests_total")]


REQUESTS = [f"GET /items/{n}" for n in range(20)]
