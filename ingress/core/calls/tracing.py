"""OpenTelemetry's spans of calls by handle, of batches, and of the waits of a request.

    handle.remote()   a span, a child of the caller's; the parent of the spans of the code called
    a batch           a span of its own trace, with a link to the span of each of its requests
    queue, dispatch   until the call had a slot; from there until its code began
    thread wait, run  until a thread took a `def`; from there until it returned
    load model        the load of a multiplexed model

The spans of waits are made when the wait is over, from times that are measured anyway. A call also
gets the id of its trace, for the exemplars of `/metrics` and for the page of the admin listener.

They are made only with `ingress run --tracing`, `INGRESS_TRACING=1` or `serve.start(tracing=True)`,
and go to the global tracer provider. Otherwise nothing is imported, and a call costs two
comparisons.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from time import monotonic, monotonic_ns, time, time_ns
from typing import TYPE_CHECKING

from ingress.core.base.counters import Exemplar, Latency
from ingress.core.base.settings import makes_spans
from ingress.core.calls.call import Call

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger("ingress")

CHECK_EVERY_S = 1.0


@dataclass(eq=False, slots=True)
class Tracing:
    """The tracer of this process, looked up once a second. Thread-safe.

    `tracer` is `None` while tracing is off, or no tracer provider is set. A provider that is set
    later is found at the first call from `next_look` on, within a second, and at the start of a
    replica.
    """

    # Race of two threads that look: both store what they find, and the last one is no older
    # than a second.
    tracer: Tracer | None = None
    next_look: float = math.inf  # in `time.monotonic()` seconds; tracing is off

    def begin(self, now: float) -> None:
        """Turn tracing on or off, as the environment says. Called at the start of a replica."""
        if makes_spans():
            self.look(now)
        else:
            self.tracer, self.next_look = None, math.inf

    def look(self, now: float) -> None:
        self.next_look = now + CHECK_EVERY_S
        api = sys.modules.get("opentelemetry.trace")
        if api is None:  # not imported, so no provider is set
            return
        provider = api.get_tracer_provider()
        is_set = not isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider)
        self.tracer = provider.get_tracer("ingress") if is_set else None


TRACING = Tracing()


def trace_call(call: Call) -> None:
    """Start the span of a call by handle, in the caller's context; it ends with the call."""
    tracer = _tracer_for(call)
    if tracer is not None:
        metadata = call.metadata
        name = f"{metadata.deployment.name}.{metadata.method_name}"
        _follow(call, tracer.start_span(name, attributes=_attributes(call)))


def _tracer_for(call: Call) -> Tracer | None:
    if call.started_at >= TRACING.next_look:
        TRACING.look(call.started_at)
    return TRACING.tracer


def current_span() -> Span:
    """Return the span that the running code belongs to. A tracer provider must be set."""
    return sys.modules["opentelemetry.trace"].get_current_span()


def trace_batch(batch: Call, spans: Iterable[Span | None]) -> None:
    """Start the span of a batch, with links to the spans of its requests and back.

    `spans` has the span in which each item was submitted, `None` for an item without one.
    """
    tracer = _tracer_for(batch)
    try:
        if tracer is not None:
            _follow(batch, _batch_span(tracer, batch, spans))
    except Exception:  # of a sampler or span processor of the user's: the batch must run
        logger.exception("the span of a batch could not be started")


def _batch_span(tracer: Tracer, batch: Call, spans: Iterable[Span | None]) -> Span:
    api = sys.modules["opentelemetry.trace"]
    contexts = [(each.get_span_context(), each) for each in spans if each is not None]
    known = {context.span_id: (context, each) for context, each in contexts if context.is_valid}
    span = tracer.start_span(
        f"{batch.metadata.method_name} batch",
        context=sys.modules["opentelemetry.context"].Context(),  # not that of the last request
        links=[api.Link(context) for context, _ in known.values()],
        attributes={**_attributes(batch), "ingress.batch_size": len(batch.members or ())},
    )
    if span.is_recording():
        for _, each in known.values():
            each.add_link(span.get_span_context())
    return span


def trace_begin(call: Call) -> None:
    """Note the trace of a call that begins, and make the spans of its waits.

    Both are of the running code's span. Code without one has the trace of its client, if any.
    """
    span = current_span()
    if not span.is_recording():
        _note_trace(call, _span_of_client(call))
        return
    _note_trace(call, span)
    if call.assigned_at:
        now = monotonic()
        attributes = {"ingress.deployment": call.deployment_name}
        if call.runner is not None:
            attributes["ingress.replica"] = call.runner.replica_id.unique_id
        _add_past("queue", call.started_at, call.assigned_at, attributes)
        _add_past("dispatch", call.assigned_at, now, attributes)


def _note_trace(call: Call, span: Span) -> None:
    context = span.get_span_context()
    if context.is_valid and context.trace_flags.sampled:
        call.trace_id = f"{context.trace_id:032x}"


def _span_of_client(call: Call) -> Span:
    """Return the span that the headers of an HTTP request name, as the propagator reads them."""
    from opentelemetry import propagate, trace

    headers = (call.work.scope or {}).get("headers", ())
    carrier = {str(name, "latin-1"): str(value, "latin-1") for name, value in headers}
    try:
        return trace.get_current_span(propagate.extract(carrier))
    except Exception:  # of a propagator of the user's
        logger.exception("the trace of a request could not be read")
        return trace.INVALID_SPAN


def trace_id_of(call: Call) -> str:
    """Return the id of a call's trace, "" if it has none or its spans are dropped."""
    # Not set in `Call`: that would cost each call, and few are traced. Race of the user loop, which
    # writes it, with the HTTP loop, which counts a request whose client has left: one store.
    return getattr(call, "trace_id", "")


def log_fields(call: Call | None) -> dict[str, str]:
    """Return the ids of the trace and the span that a log record is made in; none without them."""
    if TRACING.tracer is None:
        return {}
    found = current_span().get_span_context()
    if found.is_valid:
        return {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
    trace_id = "" if call is None else trace_id_of(call)
    return {"trace_id": trace_id} if trace_id else {}


def note_exemplar(call: Call, latency: Latency, bucket: int, value_ms: float) -> None:
    """Keep a call that has a trace as the exemplar of a bucket, which it was counted in."""
    trace_id = trace_id_of(call)
    if trace_id:
        latency.keep(bucket, Exemplar(trace_id, value_ms, time()))


def trace_thread(made_at: float, began_at: float) -> None:
    """Make the spans of a `def` that has just returned from a thread."""
    if current_span().is_recording():
        _add_past("thread wait", made_at, began_at, {})
        _add_past("thread run", began_at, monotonic(), {})


def _add_past(name: str, begin: float, end: float, attributes: Mapping[str, str]) -> None:
    """Make a span of a time that has passed, in seconds of `monotonic`, under the current one."""
    offset = time_ns() - monotonic_ns()
    tracer = TRACING.tracer
    try:
        if tracer is not None:  # it was turned off meanwhile
            began = int(begin * 1e9) + offset
            span = tracer.start_span(name, attributes=attributes, start_time=began)
            span.end(int(end * 1e9) + offset)
    except Exception:  # of a span processor of the user's
        logger.exception("the span of a wait could not be made")


def trace_load(model_id: str) -> AbstractContextManager[object]:
    """Return the context in which a model is loaded: a span, while tracing is on."""
    tracer = TRACING.tracer
    if tracer is None:
        return nullcontext()
    found: AbstractContextManager[object] = tracer.start_as_current_span(
        "load model", attributes={"ingress.model_id": model_id}
    )
    return found


def note_stall(file: str, line: int, reason: str) -> None:
    """Add an event to the span of the running code, which blocks its event loop."""
    span = current_span()
    if span.is_recording():
        place = {"code.filepath": file, "code.lineno": line}
        span.add_event("stall", {**place, "ingress.stall_reason": reason})


SpanHeaders = dict[str, str] | None
"""The W3C headers of a span, for code in another process; `None` without a span."""


def span_headers() -> SpanHeaders:
    """Return the current span as headers, `None` while tracing is off."""
    if TRACING.tracer is None:
        return None
    from opentelemetry import propagate

    found: dict[str, str] = {}
    propagate.inject(found)
    return found or None


def adopt(headers: SpanHeaders, context: Context) -> None:
    """Make a span of another process the parent of the spans that are made in a context."""
    if headers and TRACING.tracer is not None:
        from opentelemetry import propagate

        context.run(lambda: sys.modules["opentelemetry.context"].attach(propagate.extract(headers)))


def note_failure(error: BaseException) -> None:
    """Mark the span of the running batch as failed."""
    if TRACING.tracer is not None:
        _fail(current_span(), error)


def _attributes(call: Call) -> dict[str, str]:
    metadata = call.metadata
    found = {
        "ingress.application": call.app_name,
        "ingress.deployment": metadata.deployment.name,
        "ingress.method": metadata.method_name,
        "ingress.request_id": metadata.request_id,
        "ingress.model_id": metadata.multiplexed_model_id,
    }
    return {name: value for name, value in found.items() if value}


def _follow(call: Call, span: Span) -> None:
    """Make the span the current one of the call's code, and end it with the call."""
    call.context.run(_make_current, span)
    if span.is_recording():
        call.when_settled(partial(_end, span))


def _make_current(span: Span) -> None:
    context = sys.modules["opentelemetry.trace"].set_span_in_context(span)
    sys.modules["opentelemetry.context"].attach(context)


def _end(span: Span, call: Call) -> None:
    try:
        if call.runner is not None:
            replica = call.runner.replica_id.unique_id
            span.set_attribute("ingress.replica", replica)
        if call.error is not None:
            _fail(span, call.error)
        span.end()
    except Exception:  # of a span processor of the user's: the other callbacks must run
        logger.exception("the span of a call could not be ended")


def _fail(span: Span, error: BaseException) -> None:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    span.set_attribute("error.type", name)
    span.set_status(sys.modules["opentelemetry.trace"].StatusCode.ERROR)
    span.record_exception(error, _line_of(error))


def _line_of(error: BaseException) -> dict[str, str | int]:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return {}
    return {"code.filepath": last.tb_frame.f_code.co_filename, "code.lineno": last.tb_lineno}
