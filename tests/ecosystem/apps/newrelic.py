import os

import newrelic.agent
from newrelic.core.config import global_settings

PACKAGE = "newrelic"
os.environ |= {"NEW_RELIC_LICENSE_KEY": "0" * 40, "NEW_RELIC_STARTUP_TIMEOUT": "0"}
newrelic.agent.initialize()
global_settings().monitor_mode = False

from fastapi import Depends, FastAPI, HTTPException  # after the agent, which instruments them

app = FastAPI()


def factor(n: int = 3):
    return n


@app.get("/async/{k}")
async def of_async(k: int, n: int = Depends(factor)):
    return [k * n, newrelic.agent.current_transaction() is None]


@app.get("/sync/{k}")
def of_sync(k: int, n: int = Depends(factor)):
    return [k * n, newrelic.agent.current_transaction() is None]


@app.get("/refused")
def refused():
    raise HTTPException(418)


REQUESTS = ["GET /async/1", "GET /sync/3?n=5", "GET /sync/x", "GET /refused"]
