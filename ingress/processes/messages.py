"""The kinds of frames between a server and a child, and their contents.

    down  START        first: a `ReplicaSpec`
          CALL         metadata, method, args, kwargs: one call by handle
          STREAM       the same, of a generator
          HTTP         metadata, scope, first part of the body, whether more follows
          INPUT        a message of the client: more body, a WebSocket's message, the disconnect
          CANCEL       the work of a call is not wanted any more; with the error of its caller
          ASK          a request to the replica itself: "check_health", "reconfigure",
                       "add_threads", or "look", with a function that is called beside its loop
          STOP         run the user's shutdown code, and end
    both  CREDIT       messages and bytes that the receiver of INPUT, OUTPUT or ITEM has taken
          CLOSE        the receiver of OUTPUT or ITEM takes no more
    up    READY        the replica serves; without a call
          RESPONSE     a complete response: status, headers, body; the work goes on
          ANSWER       the same, and the work has ended
          OUTPUT       one message of a response, or of a WebSocket
          CHUNK        the bytes of one chunk of a response's body
          ITEM         one item of a generator
          TRACE        the id of the trace that an HTTP request has in the child
          MODELS       the ids of the replica's models
          NEWS         the replica's counters, and new stalls: `News`; at most 4 times a second
          DONE         the work has ended, with its value
          FAILED       the work has ended, with its error

A child that calls other deployments sends CALL and STREAM, too, with the deployment, the number of
the call that it works for, and the numbers of the calls that wait for the answer; the frames of
these calls go the other way round. WAIT says that a call begins or ceases to wait for an answer.

A call has exactly one ANSWER, DONE or FAILED, its last frame: then the slot is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from starlette.types import Message, Scope

from ingress.base.counters import BatchCount, LaneLoad, Latency
from ingress.base.snapshot import UserMetric
from ingress.base.types import DeploymentID, Place, ReplicaID, RequestMetadata
from ingress.calls.tracing import SpanHeaders
from ingress.processes.frames import Buffers, Content, decode, encode, outside
from ingress.watchdog import Stall

UPWARD = 1 << 63  # numbers of calls from here on are those that a child makes


class Kind(IntEnum):
    """The kind of a frame: its number in the frame's head."""

    START = 1
    CALL = 2
    STREAM = 3
    HTTP = 4
    INPUT = 5
    CANCEL = 6
    ASK = 7
    STOP = 8
    CREDIT = 9
    CLOSE = 10
    WAIT = 11
    READY = 16
    RESPONSE = 17
    OUTPUT = 18
    CHUNK = 19
    ITEM = 20
    MODELS = 21
    DONE = 22
    FAILED = 23
    ANSWER = 24
    NEWS = 25
    TRACE = 26


CREDIT = Struct("<IQ")  # messages and bytes


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The specification of a replica in a child.

    `code` refers to the user's class or function; `arguments` are its pickled constructor
    arguments. `make_replica` is `Replica`, or a class that records it.
    """

    replica_id: ReplicaID
    make_replica: Callable[..., Any]
    code: Any
    arguments: bytes
    max_ongoing: int
    num_cpus: float
    lanes: Mapping[str, int] = field(default_factory=dict)
    sync_in_threadpool: bool = False
    stall_threshold_s: float | None = None
    user_config: Any = None
    place: Place | None = None
    log_levels: Mapping[str, int] = field(default_factory=dict)
    log_mark: str = ""


class News(NamedTuple):
    """The counters of a replica in a child, and the stalls since the last news."""

    stalls: dict[str, Latency]
    batches: dict[str, BatchCount]
    batch_queues: dict[str, int]
    model_gets: int
    model_times: dict[str, Latency]
    lanes: dict[str, LaneLoad]
    thread_waits: dict[str, Latency]
    metrics: list[UserMetric]
    new_stalls: list[Stall]


Envelope: TypeAlias = tuple[str, str, str, str, str, float | None, str, int, SpanHeaders]
"""Request id, route, application, method, model id, seconds until the deadline, session id,
priority, and the span."""


def envelope_of(metadata: RequestMetadata, span: SpanHeaders) -> Envelope:
    """Return a call's metadata as it travels. The two processes may have different clocks."""
    deadline = metadata.deadline
    return (
        metadata.request_id,
        metadata.route,
        metadata.app_name,
        metadata.method_name,
        metadata.multiplexed_model_id,
        None if deadline is None else deadline - monotonic(),
        metadata.session_id,
        metadata.priority,
        span,
    )


def metadata_of(
    envelope: Envelope, deployment: DeploymentID, *, is_http: bool, is_streaming: bool
) -> RequestMetadata:
    """Return the metadata of a call that has arrived, with the deadline on this process's clock."""
    request_id, route, app_name, method_name, model_id, left_s, session_id, priority, _ = envelope
    deadline = None if left_s is None else monotonic() + left_s
    return RequestMetadata(
        request_id,
        deployment,
        method_name,
        route,
        model_id,
        is_http,
        is_streaming,
        app_name,
        deadline,
        session_id,
        priority,
    )


# Keys of a scope that cross. `state` is of the server's lifespan, a child has its own; `extensions`
# stay, because most are promises of the server that only its own process can keep.
_HTTP = (
    "method", "path", "raw_path", "query_string", "headers", "client", "server", "scheme",
    "http_version", "root_path",
)  # fmt: skip
_WEBSOCKET = (*_HTTP[1:], "subprotocols")


def scope_as_sent(scope: Scope) -> tuple[Any, ...]:
    """Return the values of a scope that cross."""
    keys = _HTTP if scope["type"] == "http" else _WEBSOCKET
    return (scope["type"], *[scope.get(key) for key in keys])


def scope_of(values: tuple[Any, ...]) -> Scope:
    """Return the scope that the values came from."""
    keys = _HTTP if values[0] == "http" else _WEBSOCKET
    return {"type": values[0], **dict(zip(keys, values[1:], strict=True))}


RESPONSE_START = "http.response.start"
RESPONSE_BODY = "http.response.body"


def message_as_sent(message: Message) -> Content:
    """Return an ASGI message as a content. Raises `TypeError` if it cannot be pickled."""
    body = message.get("body")
    if body is None:
        return encode(message)
    return encode({**message, "body": outside(bytes(body))})


def message_of(content: memoryview, buffers: Buffers) -> Message:
    """Return the message that `message_as_sent` was given."""
    message: Message = decode(content, buffers)
    if buffers and "body" in message:
        message["body"] = bytes(message["body"])
    return message


def response_as_sent(start: Message, body: bytes) -> Content:
    """Return a complete response as a content."""
    headers = list(start.get("headers", ()))
    try:
        return encode((start["status"], headers, outside(body)))
    except TypeError:  # views of bytes, which ASGI does not forbid
        return encode((start["status"], plain(headers), outside(body)))


def plain(headers: Iterable[Any]) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in headers]


def response_messages(content: memoryview, buffers: Buffers) -> tuple[Message, Message]:
    """Return the two messages of a complete response."""
    status, headers, body = decode(content, buffers)
    return (
        {"type": RESPONSE_START, "status": status, "headers": headers},
        {"type": RESPONSE_BODY, "body": bytes(body), "more_body": False},
    )
