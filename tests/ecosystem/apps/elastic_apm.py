from elasticapm.contrib.starlette import ElasticAPM, make_apm_client
from fastapi import FastAPI

PACKAGE = "elastic-apm"
apm = make_apm_client(
    {
        "SERVICE_NAME": "mine", "SERVER_URL": "http://127.0.0.1:9", "DISABLE_SEND": True,
        "CENTRAL_CONFIG": False, "CLOUD_PROVIDER": "none", "METRICS_INTERVAL": "0s",
    }
)  # fmt: skip
seen = []
apm.tracer.queue_func = lambda kind, data, flush=False: seen.append(
    [kind, data.get("name"), data.get("result")]
)
app = FastAPI()
app.add_middleware(ElasticAPM, client=apm)


@app.get("/async/{n}")
async def of_async(n: int):
    return n


@app.get("/sync")
def of_sync():
    raise ValueError("broken")


def talk(client):
    return [each for each in seen if each[0] in ("transaction", "span")]


REQUESTS = ["GET /async/1", "GET /sync"]
