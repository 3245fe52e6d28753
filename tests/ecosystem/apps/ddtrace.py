import os

os.environ |= {"DD_TRACE_ENABLED": "true", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false"}
from ddtrace import patch
from ddtrace.trace import TraceFilter, tracer

patch(fastapi=True)
from fastapi import FastAPI

PACKAGE = "ddtrace"
seen = []


class Keep(TraceFilter):
    def process_trace(self, trace):
        seen.append(sorted([each.name, each.resource, each.error] for each in trace))


tracer.configure(trace_processors=[Keep()])
app = FastAPI()


@app.get("/async/{n}")
async def of_async(n: int):
    return n


@app.get("/sync")
def of_sync():
    raise ValueError("broken")


def talk(client):
    return list(seen)


REQUESTS = ["GET /async/1", "GET /sync"]
