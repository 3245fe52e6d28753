import logfire
from fastapi import FastAPI
from logfire.testing import TestExporter
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

PACKAGE = "logfire[fastapi]"
exporter = TestExporter()
logfire.configure(
    send_to_logfire=False,
    console=False,
    metrics=False,
    additional_span_processors=[SimpleSpanProcessor(exporter)],
)
app = FastAPI()
logfire.instrument_fastapi(app)


@app.get("/async/{n}")
async def of_async(n: int):
    logfire.info("inner")
    return n


@app.get("/sync")
def of_sync():
    raise ValueError("broken")


def talk(client):
    return [each["name"] for each in exporter.exported_spans_as_dict()]


REQUESTS = ["GET /async/1", "GET /async/x", "GET /sync"]
