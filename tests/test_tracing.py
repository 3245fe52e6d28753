"""Spans of handle calls, without OpenTelemetry's SDK: `make test-ecosystem` has the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.servers import ROOT

# In a process of its own: a process has one global tracer provider, and cannot unset it.
SCRIPT = """
import json, time
from opentelemetry import trace
import ingress as serve
from ingress.calls.tracing import TRACING

names, ended = [], []

class Span(trace.NonRecordingSpan):
    def is_recording(self):
        return True

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

@serve.deployment
class Inner:
    def __call__(self):
        return trace.get_current_span().name

@serve.deployment
class Outer:
    def __init__(self, inner):
        self.inner = inner

    async def __call__(self):
        return await self.inner.remote()

    def name(self):
        return getattr(trace.get_current_span(), "name", None)

handle = serve.run(Outer.bind(Inner.bind()), route_prefix=None)
found = [handle.name.remote().result(), list(names)]
trace.set_tracer_provider(Provider())
until = time.monotonic() + 20
while TRACING.tracer is None and time.monotonic() < until:
    handle.name.remote().result()
    time.sleep(0.01)
names.clear(), ended.clear()
found += [handle.remote().result(), names, ended]
serve.shutdown()
print(json.dumps(found))
"""


def test_a_tracer_provider_that_is_set_later_gets_the_spans_of_handle_calls() -> None:
    pytest.importorskip("opentelemetry.trace")

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )

    assert json.loads(done.stdout) == [
        None,
        [],
        "Inner.__call__",
        [["Outer.__call__", None], ["Inner.__call__", "Outer.__call__"]],
        ["Inner.__call__", "Outer.__call__"],
    ]
