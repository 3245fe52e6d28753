"""Spans of FastAPI, of handle calls and of batches are one tree for each request."""

from __future__ import annotations

import asyncio
import contextvars
import gzip
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, WebSocket
from websockets.sync.client import connect

import ingress as serve
from ingress.schema import SQLiteAdapterConfig, TaskProcessorConfig
from ingress.task_consumer import instantiate_adapter_from_config, task_consumer, task_handler
from ingress.testing import Latch
from tests.documents import ROOT, blocks
from tests.ecosystem.document import version_of
from tests.programs import INGRESS, environment, process
from tests.servers import bind, served, set_flags, wait_until

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(version_of("opentelemetry-sdk") == "", reason="make test-ecosystem"),
]


@pytest.fixture(scope="module")
def exporter() -> Any:
    """The spans of this process, which has one global provider."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    found = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


@pytest.fixture
def spans(exporter: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("INGRESS_TRACING", "1")
    exporter.clear()
    yield exporter
    serve.shutdown()


def span(name: str) -> Any:
    from opentelemetry import trace

    return trace.get_tracer("mine").start_as_current_span(name)


@serve.deployment(num_replicas=2)
class Model:
    async def predict(self, number: int) -> int:
        with span("inner"):
            return number + 1

    def items(self) -> Iterator[int]:
        with span("inner"):
            yield 1


app = FastAPI()


def of_call(handle: Any) -> int:
    value: int = handle.predict.remote(1).result()
    return value


@serve.deployment(num_replicas=2, lanes={"slow": 1})
@serve.ingress(app)
class Api:
    def __init__(self, model: Any) -> None:
        self.model = model

    async def of_dependency(self) -> int:
        value: int = await self.model.predict.remote(1)
        return value

    @app.get("/async")
    async def of_async(self) -> int:
        value: int = await self.model.predict.remote(1)
        return value

    @app.get("/def")
    def of_def(self) -> int:
        return of_call(self.model)

    @app.get("/serial")
    @serve.method(execution="serial")
    def of_serial(self) -> int:
        return of_call(self.model)

    @app.get("/lane")
    @serve.method(lane="slow")
    def of_lane(self) -> int:
        return of_call(self.model)

    @app.get("/dependency")
    async def with_dependency(self, value: int = Depends(of_dependency)) -> int:
        return value

    @app.get("/to_thread")
    async def in_thread(self) -> int:
        return await asyncio.to_thread(of_call, self.model)

    @app.get("/own_loop")
    def on_own_loop(self) -> int:
        async def main() -> int:
            value: int = await self.model.predict.remote(1)
            return value

        return asyncio.run(main())

    @app.get("/own_thread")
    def in_own_thread(self) -> int:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(of_call, self.model))
        thread.start()
        thread.join()
        return 2

    @app.get("/items")
    async def with_stream(self) -> list[int]:
        stream = self.model.options(stream=True).items.remote()
        return [each async for each in stream]

    @app.get("/lines")
    async def as_lines(self) -> AsyncIterator[int]:
        yield await self.model.predict.remote(1)

    @app.get("/lines_def")
    def as_lines_def(self) -> Iterator[int]:
        yield of_call(self.model)

    @app.get("/background")
    async def later(self, tasks: BackgroundTasks) -> int:
        tasks.add_task(of_call, self.model)
        return 2

    @app.websocket("/socket")
    async def talk(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_json(await self.model.predict.remote(1))
        await socket.close()


PATHS = [
    "/async", "/def", "/serial", "/lane", "/dependency", "/to_thread", "/own_loop", "/own_thread",
    "/items", "/lines", "/lines_def", "/background",
]  # fmt: skip


def ancestors(found: dict[int, Any], name: str) -> list[str]:
    """Return the names from the one span of this name up to the root."""
    (at,) = [each for each in found.values() if each.name == name]
    names = [at.name]
    while at.parent is not None and not at.parent.is_remote:
        at = found[at.parent.span_id]
        names.append(at.name)
    return names


def ended(exporter: Any, *names: str) -> dict[int, Any]:
    """Wait for spans of these names and for their parents, and return all spans by their ids."""

    def found() -> dict[int, Any]:
        return {each.context.span_id: each for each in exporter.get_finished_spans()}

    def is_complete() -> bool:
        known = found()
        parents = [each.parent for each in known.values() if each.parent is not None]
        return {*names} <= {each.name for each in known.values()} and all(
            each.is_remote or each.span_id in known for each in parents
        )

    wait_until(is_complete)
    return found()


@pytest.fixture(params=["sync0-user1", "sync1-user1", "sync0-user0", "sync1-user0"])
def placed(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, user = request.param.split("-")
    set_flags(monkeypatch, user[-1], sync[-1])


@pytest.fixture(autouse=True)
def blocking_call_check() -> None:
    """Not here: ddtrace's plugin for pytest blocks wherever a thread starts."""


def test_a_handle_call_is_a_span_of_the_request_that_makes_it(spans: Any, placed: None) -> None:
    port = served(bind(Api, bind(Model)))
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}

    for path in PATHS:
        spans.clear()
        answer = httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, timeout=20)
        assert answer.status_code == 200, (path, answer.text)
        method = "Model.items" if path == "/items" else "Model.predict"
        found = ended(spans, f"GET {path}", method, "inner")
        names = ancestors(found, "inner")
        assert names[:2] == ["inner", method], path
        assert names[-1] == f"GET {path}", path
        assert {f"{each.context.trace_id:032x}" for each in found.values()} == {trace_id}, path


def test_without_tracing_the_spans_are_those_of_plain_fastapi(
    spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INGRESS_TRACING")
    port = served(bind(Api, bind(Model)))

    assert httpx.get(f"http://127.0.0.1:{port}/async", timeout=20).status_code == 200

    found = ended(spans, "GET /async", "inner")
    assert not [each.name for each in found.values() if each.name.startswith("Model")]
    assert ancestors(found, "inner")[-1] == "GET /async"


def test_a_handle_call_of_a_websocket_is_a_span_of_its_connection(spans: Any) -> None:
    port = served(bind(Api, bind(Model)))

    with connect(f"ws://127.0.0.1:{port}/socket") as socket:
        assert socket.recv() == "2"

    names = ancestors(ended(spans, "WS /socket", "Model.predict", "inner"), "inner")
    assert names[:2] == ["inner", "Model.predict"]
    assert names[-1] == "WS /socket"


def test_a_span_says_what_was_called_where_and_how_it_ended(spans: Any) -> None:
    @serve.deployment
    class Moody:
        def __init__(self) -> None:
            self.latch = Latch()

        async def fail(self) -> None:
            raise ValueError("broken")

        async def stay(self) -> None:
            await self.latch

    @serve.deployment
    class Outer:
        def __init__(self, moody: Any) -> None:
            self.moody = moody

        async def __call__(self) -> str:
            with pytest.raises(ValueError, match="broken"):
                await self.moody.fail.remote()
            response = self.moody.stay.remote()
            response.cancel()
            return "done"

    handle = serve.run(bind(Outer, bind(Moody)), name="moods", route_prefix=None)
    assert handle.remote().result() == "done"

    found = ended(spans, "Moody.fail", "Moody.stay", "Outer.__call__")
    by_name = {each.name: each for each in found.values()}
    outer, failed, left = (by_name[name] for name in ("Outer.__call__", "Moody.fail", "Moody.stay"))
    assert outer.parent is None
    assert outer.status.status_code.name == "UNSET"
    attributes = dict(outer.attributes)
    assert attributes.pop("ingress.request_id") == failed.attributes["ingress.request_id"]
    assert attributes == {
        "ingress.application": "moods",
        "ingress.deployment": "Outer",
        "ingress.method": "__call__",
        "ingress.replica": "0",
    }
    assert failed.parent.span_id == left.parent.span_id == outer.context.span_id
    assert (failed.status.status_code.name, failed.attributes["error.type"]) == (
        "ERROR",
        "ValueError",
    )
    assert left.attributes["error.type"] == "ingress.exceptions.RequestCancelledError"
    [event] = failed.events
    assert (event.name, event.attributes["exception.message"]) == ("exception", "broken")
    line = Path(__file__).read_text().splitlines()[event.attributes["code.lineno"] - 1]
    assert line.strip() == 'raise ValueError("broken")'


waits = FastAPI()


@serve.deployment
@serve.ingress(waits)
class Waits:
    def __init__(self, model: Any) -> None:
        self.model = model

    @serve.multiplexed(max_num_models_per_replica=1)
    async def load(self, model_id: str) -> str:
        with span("inside the load"):
            return model_id

    @waits.get("/def")
    def of_def(self) -> int:
        return of_call(self.model)

    @waits.get("/model")
    async def of_model(self) -> str:
        model: str = await self.load("small")
        return model

    @waits.get("/stall")
    async def stall(self) -> int:
        time.sleep(1)
        return 1


def test_the_waits_of_a_request_are_spans_of_it(spans: Any, placed: None) -> None:
    port = served(bind(Waits, bind(Model)))

    assert httpx.get(f"http://127.0.0.1:{port}/def", timeout=20).json() == 2

    found = ended(spans, "GET /def", "Model.predict", "thread run", "inner")
    (call,) = [each for each in found.values() if each.name == "Model.predict"]
    below: dict[str, Any] = {}
    named: dict[str, Any] = {}
    for each in found.values():
        is_below = each.parent is not None and each.parent.span_id == call.context.span_id
        (below if is_below else named)[each.name] = each
    assert {*below} == {"queue", "dispatch", "inner"}
    assert below["queue"].attributes["ingress.deployment"] == "Model"
    assert named["queue"].attributes["ingress.deployment"] == "Waits"
    order = [named[name] for name in ("queue", "dispatch", "thread wait", "thread run")]
    for earlier, later in itertools.pairwise(order):
        assert earlier.start_time <= earlier.end_time <= later.end_time
        assert earlier.start_time <= later.start_time
    assert ancestors(found, "thread run")[-1] == "GET /def"


def test_the_load_of_a_model_is_a_span(spans: Any) -> None:
    port = served(bind(Waits, bind(Model)))

    assert httpx.get(f"http://127.0.0.1:{port}/model", timeout=20).json() == "small"

    found = ended(spans, "GET /model", "load model", "inside the load")
    names = ancestors(found, "inside the load")
    assert names[:2] == ["inside the load", "load model"]
    assert names[-1] == "GET /model"


def test_a_stall_is_an_event_of_the_request_that_blocks_the_loop(spans: Any) -> None:
    port = served(bind(Waits, bind(Model)))

    assert httpx.get(f"http://127.0.0.1:{port}/stall", timeout=20).json() == 1

    found = ended(spans, "GET /stall")
    events = [event for each in found.values() for event in each.events if event.name == "stall"]
    assert events[0].attributes["code.filepath"] == __file__
    line = events[0].attributes["code.lineno"]
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == "time.sleep(1)"


pool = FastAPI()


@serve.deployment
@serve.ingress(pool)
class Pool:
    def __init__(self, model: Any) -> None:
        self.model = model

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=20)
    async def together(self, numbers: list[int]) -> list[int]:
        if 99 in numbers:
            raise KeyError("no such number")
        with span("in the batch"):
            offset = await self.model.predict.remote(0)
        return [each + offset for each in numbers]

    @pool.get("/one/{number}")
    async def one(self, number: int) -> int:
        with span(f"asks {number}"):
            value: int = await self.together(number)
        return value


@pytest.mark.parametrize("placed", ["sync0-user1", "sync0-user0"], indirect=True)
def test_a_batch_is_a_trace_that_links_its_requests(spans: Any, placed: None) -> None:
    url = f"http://127.0.0.1:{served(bind(Pool, bind(Model)))}/one/"

    def ask(*numbers: int) -> list[int]:
        with ThreadPoolExecutor() as threads:
            return list(threads.map(lambda n: httpx.get(f"{url}{n}").status_code, numbers))

    assert ask(1, 2, 3) == [200, 200, 200]

    found = ended(spans, "Pool.together batch", "asks 1", "asks 2", "asks 3")
    named = {each.name: each for each in found.values()}
    batch = named["Pool.together batch"]
    askers = [named[f"asks {n}"] for n in (1, 2, 3)]
    assert {each.context.span_id for each in batch.links} == {
        each.context.span_id for each in askers
    }
    assert [[link.context.span_id for link in each.links] for each in askers] == [
        [batch.context.span_id]
    ] * 3
    assert batch.parent is None
    assert batch.context.trace_id not in {each.context.trace_id for each in askers}
    assert batch.attributes["ingress.batch_size"] == 3
    assert ancestors(found, "inner") == [
        "inner", "Model.predict", "in the batch", "Pool.together batch",
    ]  # fmt: skip

    spans.clear()
    assert ask(1, 2, 99) == [500, 500, 500]

    (batch,) = [
        each for each in ended(spans, "Pool.together batch").values() if "batch" in each.name
    ]
    assert batch.status.status_code.name == "ERROR"
    assert batch.attributes["error.type"] == "KeyError"


def test_a_span_processor_that_fails_ends_no_call(
    spans: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SpanProcessor

    class Failing(SpanProcessor):  # type: ignore[misc]
        def on_end(self, span: Any) -> None:
            if span.name == "Model.predict":
                raise RuntimeError("no collector")

    failing = Failing()
    provider: Any = trace.get_tracer_provider()
    provider.add_span_processor(failing)
    try:
        handle = serve.run(bind(Model), route_prefix=None)
        assert handle.predict.remote(1).result() == 2
    finally:
        processors = provider._active_span_processor
        processors._span_processors = processors._span_processors[:-1]
    assert "the span of a call could not be ended" in caplog.text


MODULE = """
import ingress as serve
from opentelemetry import trace
from fastapi import FastAPI

@serve.deployment
class Model:
    async def predict(self, number):
        with trace.get_tracer("mine").start_as_current_span("inner"):
            return number + 1

app = FastAPI()

@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Api:
    def __init__(self, model):
        self.model = model

    @app.get("/{number}")
    async def get(self, number: int):
        return await self.model.predict.remote(number)

hello = Api.bind(Model.bind())
"""


PROVIDER = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
"""


PAGE = ROOT / "docs/opentelemetry.md"


def test_the_code_of_the_page_prints_the_spans() -> None:
    (code,) = [text for language, text in blocks(PAGE) if language == "python"]
    called = (
        "import ingress as serve\n"
        "serve.start({'host': None}, tracing=True)\n"
        "@serve.deployment\n"
        "class Model:\n"
        "    def predict(self): return 1\n"
        "serve.run(Model.bind(), route_prefix=None).predict.remote().result()\n"
        "serve.shutdown()\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code + called], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert '"name": "Model.predict"' in done.stdout


class Collector(BaseHTTPRequestHandler):
    """An OpenTelemetry collector, which keeps the spans that it gets."""

    spans: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as proto

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            keep(proto.ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def keep(message: Any) -> None:
    for resource in message.resource_spans:
        for scope in resource.scope_spans:
            Collector.spans.extend(scope.spans)


@contextmanager
def collecting(protocol: str) -> Iterator[str]:
    """Collect spans over HTTP or gRPC. Yields the endpoint for exporters."""
    Collector.spans.clear()
    if protocol == "http":
        server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()
        return
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as proto
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    class Service(service.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            keep(request)
            return proto.ExportTraceServiceResponse()

    with ThreadPoolExecutor(2) as pool:
        collector = grpc.server(pool)
        service.add_TraceServiceServicer_to_server(Service(), collector)
        port = collector.add_insecure_port("127.0.0.1:0")
        collector.start()
        yield f"http://127.0.0.1:{port}"
        collector.stop(None).wait()


@pytest.mark.parametrize(
    ("isolation", "protocol"), [("thread", ""), ("process", "http"), ("process", "grpc")]
)
def test_the_pages_commands_export_the_spans(tmp_path: Path, isolation: str, protocol: str) -> None:
    """Without a protocol, FastAPI's variables set the provider, in processes that have an app."""
    module = MODULE.replace("@serve.deployment\n", f"@serve.deployment(isolation={isolation!r})\n")
    if protocol:
        module = PROVIDER.format(protocol=protocol) + module
    (tmp_path / "hello.py").write_text(module)
    (session,) = [text for language, text in blocks(PAGE) if language == "console"]
    install, *exports, written = session.splitlines()
    assert install == '$ pip install "fastapi[opentelemetry]"'
    variables = dict(re.findall(r" (\w+)=(\S+)", " ".join(exports)))
    assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:4318"
    assert written == "$ ingress run hello:hello --tracing"
    variables |= {"OTEL_BSP_SCHEDULE_DELAY": "100", **environment(tmp_path)}
    if protocol:
        del variables["FASTAPI_OTEL_AUTO_CONFIGURE"]
    command = [*INGRESS, "run", "hello:hello", "--tracing", "--port", "0"]
    with collecting(protocol or "http") as endpoint:
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        with process(command, tmp_path, variables) as run:
            run.wait_for("ready")
            assert httpx.get(f"{run.url}/3").json() == 4
            names = {"GET /{number}", "Model.predict", "inner", "queue", "dispatch"}
            wait_until(lambda: names <= {each.name for each in Collector.spans})

    (called,) = [each for each in Collector.spans if each.name == "Model.predict"]
    (request,) = [each for each in Collector.spans if each.name == "GET /{number}"]
    (inner,) = [each for each in Collector.spans if each.name == "inner"]
    assert inner.parent_span_id == called.span_id
    assert {each.trace_id for each in Collector.spans} == {request.trace_id}


def test_a_job_continues_the_trace_of_its_enqueue(spans: Any, tmp_path: Path) -> None:
    adapter_config = SQLiteAdapterConfig(path=str(tmp_path / "jobs.db"))
    config = TaskProcessorConfig(queue_name="q", adapter_config=adapter_config)
    ids: list[str] = []

    class Worker:
        @task_handler
        async def work(self) -> None:
            with span("inner"):
                ids.append(serve.get_request_context().request_id)

    consumer = task_consumer(task_processor_config=config)(Worker)
    serve.run(serve.deployment(consumer).bind(), route_prefix=None)
    with span("request") as request:
        job = instantiate_adapter_from_config(config).enqueue_task_sync("work")
    wait_until(lambda: ids)
    assert ids == [job.id]
    wait_until(lambda: any(each.name == "Worker.work" for each in spans.get_finished_spans()))
    traces = {each.name: each.context.trace_id for each in spans.get_finished_spans()}
    assert traces["Worker.work"] == traces["inner"] == request.get_span_context().trace_id
