"""OpenTelemetry's spans of calls by handle and of batches.

    handle.remote()   a span, a child of the caller's; the parent of the spans of the code called
    a batch           a span of its own trace, with a link to the span of each of its requests

They are made only with `ingress run --tracing`, `INGRESS_TRACING=1` or `serve.start(tracing=True)`,
and go to the global tracer provider. Otherwise nothing is imported, and a call costs two
comparisons.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from ingress.base.settings import makes_spans
from ingress.calls.call import Call

logger = logging.getLogger("ingress")

CHECK_EVERY_S = 1.0


class Tracing:
    """The tracer of this process, looked up once a second. Thread-safe.

    `tracer` is `None` while tracing is off, or no tracer provider is set. A provider that is set
    later is found at the first call from `next_look` on, within a second, and at the start of a
    replica.
    """

    __slots__ = ("next_look", "tracer")

    def __init__(self) -> None:
        # Race of two threads that look: both store what they find, and the last one is no older
        # than a second.
        self.tracer: Any = None
        self.next_look = math.inf  # in `time.monotonic()` seconds; tracing is off

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


def _tracer_for(call: Call) -> Any:
    if call.started_at >= TRACING.next_look:
        TRACING.look(call.started_at)
    return TRACING.tracer


def current_span() -> Any:
    """Return the span that the running code belongs to. A tracer provider must be set."""
    return sys.modules["opentelemetry.trace"].get_current_span()


def trace_batch(batch: Call, spans: Iterable[Any]) -> None:
    """Start the span of a batch, with links to the spans of its requests and back.

    `spans` has the span in which each item was submitted, `None` for an item without one.
    """
    tracer = _tracer_for(batch)
    try:
        if tracer is not None:
            _follow(batch, _batch_span(tracer, batch, spans))
    except Exception:  # of a sampler or span processor of the user's: the batch must run
        logger.exception("the span of a batch could not be started")


def _batch_span(tracer: Any, batch: Call, spans: Iterable[Any]) -> Any:
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


def note_failure(error: BaseException) -> None:
    """Mark the span of the running batch as failed."""
    if TRACING.tracer is not None:
        _fail(current_span(), error)


def _attributes(call: Call) -> dict[str, Any]:
    metadata = call.metadata
    found = {
        "ingress.application": call.app_name,
        "ingress.deployment": metadata.deployment.name,
        "ingress.method": metadata.method_name,
        "ingress.request_id": metadata.request_id,
        "ingress.model_id": metadata.multiplexed_model_id,
    }
    return {name: value for name, value in found.items() if value}


def _follow(call: Call, span: Any) -> None:
    """Make the span the current one of the call's code, and end it with the call."""
    call.context.run(_make_current, span)
    if span.is_recording():
        call.when_settled(partial(_end, span))


def _make_current(span: Any) -> None:
    context = sys.modules["opentelemetry.trace"].set_span_in_context(span)
    sys.modules["opentelemetry.context"].attach(context)


def _end(span: Any, call: Call) -> None:
    try:
        if call.runner is not None:
            replica = call.runner.context.replica_id.unique_id
            span.set_attribute("ingress.replica", replica)
        if call.error is not None:
            _fail(span, call.error)
        span.end()
    except Exception:  # of a span processor of the user's: the other callbacks must run
        logger.exception("the span of a call could not be ended")


def _fail(span: Any, error: BaseException) -> None:
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    span.set_attribute("error.type", name)
    span.set_status(sys.modules["opentelemetry.trace"].StatusCode.ERROR)
