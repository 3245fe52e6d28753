import sentry_sdk
from fastapi import FastAPI, HTTPException

PACKAGE = "sentry-sdk"
events = []
sentry_sdk.init(
    dsn="http://key@127.0.0.1:9/1",
    traces_sample_rate=1.0,
    before_send=lambda event, hint: events.append(event),
    before_send_transaction=lambda event, hint: events.append(event),
)
app = FastAPI()


@app.get("/async/{n}")
async def of_async(n: int):
    return n


@app.get("/sync")
def of_sync():
    raise ValueError("broken")


@app.get("/refused")
def refused():
    raise HTTPException(503)


def talk(client):
    return sorted(
        [
            each.get("type", "error"),
            each["exception"]["values"][0]["type"] if "exception" in each else "",
            each["contexts"].get("trace", {}).get("status") or "",
        ]
        for each in list(events)
    )


REQUESTS = ["GET /async/1", "GET /sync", "GET /refused"]
