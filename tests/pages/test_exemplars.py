"""Exemplars of `/metrics`: the traces of requests, in OpenMetrics, while tracing is on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_open
from pydantic import TypeAdapter

from ingress.core.base.counters import Exemplar, Latency
from ingress.observe.admin.exposition import exposition
from ingress.observe.admin.listener import as_json
from ingress.state.deployments import HTTPCount
from ingress.state.server import Snapshot, merged
from tests.fakes import together
from tests.observe.test_admin import admin_port, serving
from tests.observe.test_page import event, viewing
from tests.servers import get, wait_until, write_module

pytest.importorskip("opentelemetry.trace")

APP = """
import random
from fastapi import FastAPI
from opentelemetry import trace
import ingress as serve

class Span(trace.NonRecordingSpan):
    def is_recording(self):
        return True

class Tracer(trace.NoOpTracer):
    def start_span(self, name, context=None, *args, **kwargs):
        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id or random.getrandbits(128)
        flags = trace.TraceFlags(parent.trace_flags if parent.is_valid else 1)
        return Span(trace.SpanContext(trace_id, random.getrandbits(64), False, flags))

    def start_as_current_span(self, name, context=None, *args, **kwargs):
        return trace.use_span(self.start_span(name, context))

class Provider(trace.TracerProvider):
    def get_tracer(self, *args, **kwargs):
        return Tracer()

trace.set_tracer_provider(Provider())
app = FastAPI()

@app.get("/trace")
async def trace_id():
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"

@app.get("/fail")
async def fail():
    raise ValueError("failed")

@serve.ingress(app)
class Api:
    pass

class Plain:
    async def __call__(self, request):
        return "plain"

here = serve.deployment(name="Api")(Api).bind()
far = serve.deployment(name="Api", isolation="process")(Api).bind()
plain = serve.deployment(Plain).bind()
"""

OPEN = "Accept: application/openmetrics-text\r\n"
HTTP, PROCESSING = "ray_serve_http_request_latency_ms", "ray_serve_deployment_processing_latency_ms"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


def traced(trace_id: str, *, is_sampled: bool = True) -> str:
    return f"traceparent: 00-{trace_id}-b7ad6b7169203331-{int(is_sampled):02}\r\n"


def exemplars(port: int, name: str) -> list[Any]:
    """Return the exemplars of a histogram, with the labels and the bounds of their buckets."""
    families = read_open(get(port, "/metrics", OPEN).body.decode())
    samples = [sample for family in families for sample in family.samples]
    return [each for each in samples if each.name == f"{name}_bucket" and each.exemplar]


def trace_ids(port: int, name: str) -> set[str]:
    return {each.exemplar.labels["trace_id"] for each in exemplars(port, name)}


WORKERS = pytest.param("here", ["--workers", "2"], marks=pytest.mark.thorough)


@pytest.mark.parametrize(("app", "options"), [("here", []), ("far", []), WORKERS])
def test_a_request_of_a_trace_is_an_exemplar(folder: Path, app: str, options: list[str]) -> None:
    options = ["--admin", "127.0.0.1:0", "--tracing", *options]
    with serving(folder, *options, app=app) as server:
        port = admin_port(server)
        assert get(server.port, "/trace", traced(TRACE_ID)).body == f'"{TRACE_ID}"'.encode()
        assert get(server.port, "/fail", traced(TRACE_ID[::-1])).status == 500
        wait_until(lambda: trace_ids(port, HTTP) >= {TRACE_ID, TRACE_ID[::-1]})
        wait_until(lambda: trace_ids(port, PROCESSING) >= {TRACE_ID, TRACE_ID[::-1]})

        # The last request of a bucket, and a trace that begins here.
        last = {json.loads(get(server.port, "/trace").body) for _ in range(20)}
        assert TRACE_ID not in last
        wait_until(lambda: trace_ids(port, HTTP) & last)
        wait_until(lambda: trace_ids(port, PROCESSING) & last)
        found = exemplars(port, HTTP)
        text = get(port, "/metrics").body.decode()

    assert {each.labels["route"] for each in found} == {"/trace", "/fail"}
    for each in found:
        assert 0 < each.exemplar.value <= float(each.labels["le"])
        assert float(each.exemplar.timestamp) > 1e9
    buckets = [tuple(sorted(each.labels.items())) for each in found]
    assert len({*buckets}) == len(buckets)
    assert "trace_id" not in text  # Prometheus' own format has no exemplars


def test_a_deployment_without_fastapi_has_the_trace_of_its_client(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0", "--tracing", app="plain") as server:
        port = admin_port(server)
        for headers in ("", traced(TRACE_ID[::-1], is_sampled=False), "traceparent: x\r\n"):
            assert get(server.port, "/", headers).status == 200
        assert get(server.port, "/", traced(TRACE_ID)).status == 200
        wait_until(lambda: trace_ids(port, HTTP))
        assert trace_ids(port, HTTP) == trace_ids(port, PROCESSING) == {TRACE_ID}


def test_there_are_none_without_tracing(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0", app="here") as server:
        assert get(server.port, "/trace", traced(TRACE_ID)).status == 200
        text = get(admin_port(server), "/metrics", OPEN).body.decode()

    assert HTTP in text
    assert "trace_id" not in text


# The page.


@pytest.mark.parametrize("app", ["here", "far"])
def test_a_request_that_failed_or_was_slow_is_kept_with_its_trace(folder: Path, app: str) -> None:
    with serving(folder, "--admin", "127.0.0.1:0", "--tracing", app=app) as server:
        assert get(server.port, "/fail", f"{traced(TRACE_ID)}X-Request-ID: mine\r\n").status == 500
        mine = json.loads(get(server.port, "/trace").body)
        with viewing(admin_port(server)) as viewer:
            view = event(viewer)
            while not {TRACE_ID, mine} <= {each["trace_id"] for each in view["slowest"]}:
                view = event(viewer)
        log = server.output

    (failed,) = view["failed"]
    assert (failed["request_id"], failed["trace_id"]) == ("mine", TRACE_ID)
    assert re.search(r"^ERROR: .*\bmine\b", log, re.MULTILINE)


# Sums.


def test_a_sum_is_made_while_a_loop_keeps_exemplars(switch_interval: None) -> None:
    one, rounds, done = [Latency()], 300, []
    last = len(one[0].buckets) - 1

    def count() -> None:
        for number in range(rounds):
            one[0] = Latency()
            for bucket in (last, number % last):
                one[0].keep(bucket, Exemplar(TRACE_ID, 1.0, float(number)))

    def read() -> None:
        for _ in range(rounds):
            total = Latency()
            total.merge(one[0].copy())
            total.merge(one[0])
            assert total.exemplars is None or len(total.exemplars) == last + 1
        done.append(read)

    together(count, read, read)
    assert done == [read, read]


def test_the_latest_exemplar_of_a_bucket_stays_in_a_sum() -> None:
    ones = [Latency(), Latency(), Latency()]
    for at_s, each in zip((2.0, 3.0, 1.0), ones, strict=True):
        each.add(1.5)
        each.keep(1, Exemplar(f"{at_s:032.0f}", 1.5, at_s))
    parts = [
        TypeAdapter(Snapshot).validate_json(
            as_json(Snapshot(1.0, 1, unrouted=[HTTPCount("", "GET", 404, each)]))
        )
        for each in ones
    ]

    (line,) = re.findall(r".*# \{.*", exposition(merged(parts), is_open_metrics=True).decode())
    assert line.endswith(f'le="2.0"}} 3 # {{trace_id="{3:032}"}} 1.5 3.000')
