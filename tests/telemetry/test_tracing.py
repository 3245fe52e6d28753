"""Spans of handle calls, without OpenTelemetry's SDK: `make test-ecosystem` has the whole of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.programs import run_python

# In a process of its own: a process has one global tracer provider, and cannot unset it.
SCRIPT = """
import json, logging, sys, time
from opentelemetry import trace
import ingress as serve
from ingress.telemetry.logs.formats import JSONFormatter, TextFormatter
from ingress.core.calls.tracing import TRACING

names, ended, events = [], [], []

class Span(trace.NonRecordingSpan):
    def is_recording(self):
        return True

    def add_event(self, name, attributes=None, timestamp=None):
        events.append([self.name, name, attributes["ingress.stall_reason"]])

    def end(self, end_time=None):
        ended.append(self.name)

class Tracer(trace.NoOpTracer):
    def start_span(self, name, context=None, *args, **kwargs):
        parent = trace.get_current_span(context)
        span = Span(trace.SpanContext(1, len(names) + 1, is_remote=False))
        span.name = name
        names.append([name, getattr(parent, "name", None)])
        return span

class Provider(trace.TracerProvider):
    def get_tracer(self, *args, **kwargs):
        return Tracer()

kept = []

class Keeping(logging.Handler):
    def emit(self, record):
        made = json.loads(JSONFormatter().format(record))
        kept[:] = [made.get("trace_id"), made.get("span_id"), TextFormatter().format(record)]

logging.getLogger("mine").addHandler(Keeping())

@serve.deployment
class Inner:
    def __call__(self):
        logging.getLogger("mine").warning("here")
        return getattr(trace.get_current_span(), "name", None)

@serve.deployment
class Outer:
    def __init__(self, inner):
        self.inner = inner

    async def __call__(self):
        return await self.inner.remote()

    def name(self):
        return getattr(trace.get_current_span(), "name", None)

    async def stall(self):
        time.sleep(0.3)

how = sys.argv[1]
if how == "code":
    serve.start({"host": None}, tracing=True)
handle = serve.run(Outer.bind(Inner.bind()), route_prefix=None)
found = [handle.name.remote().result(), list(names)]
trace.set_tracer_provider(Provider())
until = time.monotonic() + (20 if how != "off" else 0)
while TRACING.tracer is None and time.monotonic() < until:
    handle.name.remote().result()
    time.sleep(0.01)
names.clear(), ended.clear()
found += [handle.remote().result(), names, ended]
if how == "logs":
    handle.stall.remote().result()
    found += [kept, events]
serve.shutdown()
print(json.dumps(found))
"""


def printed(how: str, **variables: str) -> Any:
    pytest.importorskip("opentelemetry.trace")
    done = run_python("-c", SCRIPT, how, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_tracer_provider_alone_makes_no_spans_of_handle_calls() -> None:
    assert printed("off") == [None, [], None, [], []]


def test_log_records_and_stalls_are_of_their_trace_and_span() -> None:
    *_, names, _, (trace_id, span_id, text), events = printed("logs", INGRESS_TRACING="1")

    span = next(n for n, (name, _) in enumerate(names, 1) if name == "Inner.__call__")
    assert (trace_id, span_id) == (f"{1:032x}", f"{span:016x}")
    assert text.startswith("WARNING:  here [Inner#0 ")
    assert text.endswith(f" trace {trace_id} span {span_id}]")
    assert events == [["Outer.stall", "stall", "blocked"]]


@pytest.mark.parametrize(
    ("how", "variables"), [("variable", {"INGRESS_TRACING": "1"}), ("code", {})]
)
def test_a_tracer_provider_that_is_set_later_gets_the_spans_of_handle_calls(
    how: str, variables: dict[str, str]
) -> None:
    assert printed(how, **variables) == [
        None,
        [],
        "Inner.__call__",
        [
            ["Outer.__call__", None],
            ["queue", "Outer.__call__"],
            ["dispatch", "Outer.__call__"],
            ["Inner.__call__", "Outer.__call__"],
            ["queue", "Inner.__call__"],
            ["dispatch", "Inner.__call__"],
        ],
        ["queue", "dispatch", "queue", "dispatch", "Inner.__call__", "Outer.__call__"],
    ]
