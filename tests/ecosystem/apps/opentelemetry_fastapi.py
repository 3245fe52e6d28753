from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PACKAGE = "opentelemetry-instrumentation-fastapi"
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
app = FastAPI()
FastAPIInstrumentor.instrument_app(app)


@app.get("/async/{n}")
async def of_async(n: int):
    with trace.get_tracer("mine").start_as_current_span("inner"):
        return n


@app.get("/sync")
def of_sync():
    with trace.get_tracer("mine").start_as_current_span("inner"):
        raise ValueError("broken")


def talk(client):
    spans = exporter.get_finished_spans()
    names = {each.context.span_id: each.name for each in spans}
    return [
        [each.name, each.kind.name, each.parent and names[each.parent.span_id], each.status.status_code.name,
         [event.name for event in each.events], each.attributes.get("http.route")]
        for each in spans
    ]  # fmt: skip


REQUESTS = ["GET /async/1", "GET /async/x", "GET /sync", "GET /none"]
