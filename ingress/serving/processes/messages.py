"""The kinds of frames between a server and a child, their contents, and the window of a sender.

    down  START        first: a `ReplicaSpec`
          CALL         metadata, method, args, kwargs: one call by handle
          STREAM       the same, of a generator
          HTTP         metadata, scope, first part of the body, whether more follows
          INPUT        a message of the client: more body, a WebSocket's message, the disconnect
          CANCEL       the work of a call is not wanted any more; with the error of its caller
          ASK          a request to the replica itself: "check_health", "reconfigure",
                       "add_threads", "autoscaling_stats", or "look", with a function that is
                       called beside its loop
          STOP         run the user's shutdown code, and end
    both  CREDIT       messages and bytes that the receiver of INPUT, OUTPUT or ITEM has taken
          CLOSE        the receiver of OUTPUT or ITEM takes no more
    up    READY        the replica serves; without a call
          RESPONSE     a complete response: status, headers, body; the work goes on
          ANSWER       the same, and the work has ended
          OUTPUT       one message of a response, or of a WebSocket
          LISTEN       user code asks whether the client of its request has left
          HEARD        user code was told that its client has left
          CHUNK        the bytes of one chunk of a response's body
          ITEM         one item of a generator
          TRACE        the id of the trace that an HTTP request has in the child
          MODELS       the ids of the replica's models
          REPORT       the replica's counters, and new stalls: `ChildReport`; at most 4 a second
          DONE         the work has ended, with its value
          FAILED       the work has ended, with its error

A child that calls other deployments sends CALL and STREAM, too, with the deployment, the number of
the call that it works for, and the numbers of the calls that wait for the answer; the frames of
these calls go the other way round. WAIT says that a call begins or ceases to wait for an answer.

A call has exactly one ANSWER, DONE or FAILED, its last frame: then the slot is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from math import isfinite
from struct import Struct
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError
from starlette.types import Message, Scope

from ingress.core.base.counters import BatchCount, Latency, UserMetric
from ingress.core.base.types import DeploymentID, ReplicaID, ReplicaPlace, RequestMetadata
from ingress.core.calls.channel import MAX_BYTES, MAX_ITEMS
from ingress.core.calls.tracing import SpanHeaders
from ingress.exceptions import StreamClosedError
from ingress.serving.processes.code import Reference
from ingress.serving.processes.frames import (
    Buffers,
    Content,
    FrameError,
    Frames,
    encode,
    loads,
    outside,
)
from ingress.serving.replicas.host import HostCounts
from ingress.serving.replicas.replica import Replica
from ingress.telemetry.metrics import user_metrics
from ingress.telemetry.watchdog import Stall

UPWARD = 1 << 63  # numbers of calls from here on are those that a child makes


class Frame(IntEnum):
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
    REPORT = 25
    TRACE = 26
    HEARD = 27
    LISTEN = 28


OF_CALLS = frozenset(
    (Frame.CREDIT, Frame.RESPONSE, Frame.OUTPUT, Frame.CHUNK, Frame.ITEM, Frame.TRACE,
     Frame.HEARD, Frame.LISTEN, Frame.DONE, Frame.FAILED, Frame.ANSWER)
)  # fmt: skip
"""The kinds of the frames that answer a call."""

CREDIT = Struct("<IQ")  # messages and bytes


def unknown(kind: int) -> FrameError:
    """Return the error of a frame whose kind its receiver does not take."""
    return FrameError(f"a frame of the kind {kind}, which does not belong there")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The specification of a replica in a child.

    `code` refers to the user's class or function; `arguments` are its pickled constructor
    arguments. `make_replica` is `Replica`, or a class that records it.
    """

    replica_id: ReplicaID
    make_replica: type[Replica]
    code: Reference
    arguments: bytes
    max_ongoing: int
    num_cpus: float
    lanes: Mapping[str, int] = field(default_factory=dict)
    sync_in_threadpool: bool = False
    stall_threshold_s: float | None = None
    user_config: object = None
    place: ReplicaPlace | None = None
    log_levels: Mapping[str, int] = field(default_factory=dict)
    log_mark: str = ""


class ChildReport(NamedTuple):
    """The counters of a child: those of its host, and the stalls since the last report."""

    counts: HostCounts
    stalls: dict[str, Latency]
    metrics: list[UserMetric]
    new_stalls: list[Stall]


def report_of(content: memoryview) -> ChildReport:
    """Return the counters that a child has sent. Raises `ValueError` if they are none.

    Each is checked: the status and `/metrics` add them to those of other replicas.
    """
    told = loads(content)
    try:
        _report_type().validate_python(told)  # only checked: an int may stand for a float
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(f"{error.error_count()} of its values are none, as {place!r}") from None
    counts, *others = told
    report = ChildReport(HostCounts(*counts), *others)
    for latencies in (report.stalls, report.counts.model_times, report.counts.thread_waits):
        for each in latencies.values():
            Latency().merge(each)
    for batch in report.counts.batches.values():
        BatchCount().merge(batch)
    for metric in report.metrics:
        user_metrics.check(metric)
    return report


@cache
def _report_type() -> TypeAdapter[ChildReport]:
    return TypeAdapter(ChildReport, config=ConfigDict(revalidate_instances="always", strict=True))


def model_ids_of(content: memoryview) -> frozenset[str]:
    """Return the ids of models that a child has sent. Raises `ValueError` if they are none."""
    ids = loads(content)
    if type(ids) is not frozenset or not all(isinstance(each, str) for each in ids):
        raise ValueError(f"the ids of its models are {ids!r:.100}")
    return ids


def trace_id_in(content: memoryview) -> str:
    """Return the id of a trace. Raises `ValueError` if it is none."""
    trace_id = str(content, "ascii")
    if not trace_id.isalnum():  # it is a part of log records and of `/metrics`
        raise ValueError(f"{trace_id!r:.100} is no trace id")
    return trace_id


Envelope: TypeAlias = tuple[str, str, str, str, str, float | None, str, int, str, SpanHeaders]
"""Request id, route, application, method, model id, seconds until the deadline, session id,
priority, fairness key, and the span."""


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
        metadata.fairness_key,
        span,
    )


def check(envelope: Sequence[object]) -> None:
    """Raise `TypeError` for an envelope that a child has not made as `envelope_of` does."""
    *texts, left_s, session_id, priority, key, span = envelope
    if (
        not all(isinstance(each, str) for each in (*texts, session_id, key))
        or not (left_s is None or (isinstance(left_s, float) and isfinite(left_s)))
        or not isinstance(priority, int)
        or not isinstance(span, dict | None)
    ):
        raise TypeError(f"a call's metadata are {envelope!r:.200}")


def metadata_of(
    envelope: Envelope, deployment: DeploymentID, *, is_http: bool, is_streaming: bool
) -> RequestMetadata:
    """Return the metadata of a call that has arrived, with the deadline on this process's clock."""
    request_id, route, app_name, method_name, model_id, left_s, session_id, priority, key, _ = (
        envelope
    )
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
        key,
    )


# Keys of a scope that cross. `state` is of the server's lifespan, a child has its own.
_HTTP = (
    "method", "path", "raw_path", "query_string", "headers", "client", "server", "scheme",
    "http_version", "root_path",
)  # fmt: skip
_WEBSOCKET = (*_HTTP[1:], "subprotocols")
_EXTENSIONS = frozenset(
    ("tls", "websocket.http.response", "http.response.early_hint", "http.response.push",
     "http.response.trailers")
)  # fmt: skip
"""The extensions that cross: facts, and messages to the server.

Not the others: a file may have changed when the server sends it (`http.response.pathsend`), a
descriptor (`zerocopysend`) and the objects of a test (`debug`) belong to one process.
"""


def scope_as_sent(scope: Scope) -> tuple[object, ...]:
    """Return the values of a scope that cross."""
    keys = _HTTP if scope["type"] == "http" else _WEBSOCKET
    extensions = scope.get("extensions")
    if extensions:
        extensions = {name: extensions[name] for name in extensions if name in _EXTENSIONS}
    return (scope["type"], extensions, *map(scope.get, keys))


def scope_of(values: tuple[Any, ...]) -> Scope:
    """Return the scope that the values came from."""
    kind, extensions, *others = values
    keys = _HTTP if kind == "http" else _WEBSOCKET
    scope = {"type": kind, **dict(zip(keys, others, strict=True))}
    if extensions is not None:
        scope["extensions"] = extensions
    return scope


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
    message: Message = loads(content, buffers)
    if type(message) is not dict:
        raise ValueError(f"{message!r:.100} is no message")
    if buffers and "body" in message:
        message["body"] = _body(message["body"])
    return message


def _body(value: bytes | bytearray | memoryview) -> bytes:
    """Return a body that arrived. Raises `TypeError` for a number, of which `bytes` makes zeros."""
    return value if type(value) is bytes else bytes(memoryview(value))


def response_as_sent(start: Message, body: bytes) -> Content:
    headers = list(start.get("headers", ()))
    try:
        return encode((start["status"], headers, outside(body)))
    except TypeError:  # views of bytes, which ASGI does not forbid
        return encode((start["status"], plain(headers), outside(body)))


def plain(headers: Iterable[Sequence[bytes | bytearray | memoryview]]) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in headers]


def response_messages(content: memoryview, buffers: Buffers) -> tuple[Message, Message]:
    """Return the two messages of a complete response."""
    status, headers, body = loads(content, buffers)
    if not isinstance(status, int) or not isinstance(headers, list):
        raise ValueError(f"{status!r:.20} is no status, or {headers!r:.100} no headers")
    return (
        {"type": RESPONSE_START, "status": status, "headers": headers},
        {"type": RESPONSE_BODY, "body": _body(body), "more_body": False},
    )


# The window of a sender: how much may be on its way to a receiver that has not taken it. The size
# of a message is that of its frame's content, so that both processes count the same.

_GIVEN_MESSAGES = MAX_ITEMS // 2


class Waiters:
    """The tasks of one loop that wait for a change of what inherits this. Owned by that loop."""

    __slots__ = ("futures",)
    futures: tuple[asyncio.Future[None], ...]

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.futures += (future,)
        try:
            await future
        except asyncio.CancelledError:
            self.futures = tuple(each for each in self.futures if each is not future)
            raise

    def wake(self) -> None:
        """Wake all tasks that wait."""
        futures, self.futures = self.futures, ()
        for future in futures:
            if not future.done():
                future.set_result(None)


class SendWindow(Waiters):
    """The room that a receiver in the other process has. Owned by the sender's loop.

    The bounds are those of a `Channel`: at most `messages` messages or `size` bytes are on the way.
    """

    __slots__ = ("_bytes", "_messages", "is_closed")

    def __init__(self, messages: int = MAX_ITEMS, size: int = MAX_BYTES) -> None:
        self._messages = messages
        self._bytes = size
        self.futures = ()
        self.is_closed = False

    async def take(self, size: int) -> None:
        """Take room for a message, or wait for it. Raises `StreamClosedError` if it is closed."""
        while not self.is_closed and (self._messages <= 0 or self._bytes <= 0):
            await self.wait()
        if self.is_closed:
            raise StreamClosedError("the consumer has closed this stream")
        self._messages -= 1
        self._bytes -= size

    def give(self, credit: memoryview) -> None:
        """Give room back: the receiver has taken this much."""
        messages, size = CREDIT.unpack(credit)
        self._messages += messages
        self._bytes += size
        self.wake()

    def close(self) -> None:
        """Make every later `take` raise: the receiver takes no more."""
        self.is_closed = True
        self.wake()


class Taken:
    """The messages that a receiver has taken, and that its sender does not know of yet.

    They are at most half of a window of `size` bytes: the sender never waits for what is held back.
    """

    __slots__ = ("_bytes", "_given_bytes", "_messages")

    def __init__(self, size: int = MAX_BYTES) -> None:
        self._messages = self._bytes = 0
        self._given_bytes = size // 2

    def add(self, messages: int, size: int) -> None:
        self._messages += messages
        self._bytes += size

    def tell(self, frames: Frames, number: int) -> None:
        """Give the sender room, once it is worth a frame."""
        if self._messages >= _GIVEN_MESSAGES or self._bytes >= self._given_bytes:
            frames.post(Frame.CREDIT, number, CREDIT.pack(self._messages, self._bytes))
            self._messages = self._bytes = 0
