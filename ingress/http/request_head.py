"""The head of a request, read once: the few headers that decide how the request is served."""

from __future__ import annotations

import re
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

from starlette.types import Scope

from ingress.base.settings import SESSION_HEADER
from ingress.base.types import PRIORITIES, DeploymentID, RequestMetadata, new_request_id
from ingress.calls.deadlines import TIMEOUT_HEADER, earlier

REQUEST_ID_HEADER = b"x-request-id"

_MODEL_ID = (b"serve-multiplexed-model-id", b"serve_multiplexed_model_id")
_READ = frozenset((*_MODEL_ID, b"content-length", TIMEOUT_HEADER, REQUEST_ID_HEADER))
_PRIORITIES = {name.encode(): level for name, level in PRIORITIES.items()}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id_of(scope: Scope) -> str:
    """Return the first valid id that the client sent, or a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return new_request_id()


RequestHead: TypeAlias = tuple[bool, bytes, str, float | None, float, str, int]
"""The flag "has a request id", which may be invalid or one of several; the value of content-length;
the model id; the deadline, and the time of `monotonic` that it counts from; the session id and the
priority."""


@dataclass(frozen=True, slots=True)
class RoutingHeaders:
    """The names of the headers with the session id and the priority; empty for none.

    `read` are all headers that a request's head is read for.
    """

    read: frozenset[bytes]
    priority: bytes

    @classmethod
    def named(cls, session_id: str, priority: str) -> RoutingHeaders:
        names = {name.lower().encode("latin-1") for name in (session_id, priority) if name}
        # Servers pass both spellings on; Ray 2.60.0, http_util.py, takes both too.
        sessions = {session_id.lower().replace(*pair) for pair in (("-", "_"), ("_", "-"))}
        names |= {name.encode("latin-1") for name in sessions if name}
        return cls(_READ | names, priority.lower().encode("latin-1"))


USUAL_HEADERS = RoutingHeaders.named(SESSION_HEADER, "")


def read_head(
    scope: Scope, timeout_s: float | None, headers: RoutingHeaders = USUAL_HEADERS
) -> RequestHead:
    """Read the headers of a request in one pass.

    `timeout_s` is the server's own limit; the deadline is that of the shorter of it and the
    client's.
    """
    has_id = False
    length = b""
    model_id = session_id = ""
    priority = 0
    read = headers.read
    for name, value in scope["headers"]:
        if name in read:
            if name == REQUEST_ID_HEADER:
                has_id = True
            elif name == b"content-length":
                length = value
            elif name == TIMEOUT_HEADER:
                timeout_s = earlier(timeout_s, value)
            elif name in _MODEL_ID:
                model_id = value.decode("latin-1")
            elif name == headers.priority:
                priority = _PRIORITIES.get(value.lower(), 0)
            else:
                session_id = value.decode("latin-1")
    if timeout_s is None:
        return has_id, length, model_id, None, 0.0, session_id, priority
    now = monotonic()
    return has_id, length, model_id, now + timeout_s, now, session_id, priority


def request_metadata(
    head: RequestHead, request_id: str, deployment: DeploymentID, route: str
) -> RequestMetadata:
    """Return the metadata of a request. Not for one that is refused, which must cost little."""
    _, _, model_id, deadline, _, session_id, priority = head
    # Not by `RequestMetadata` itself, nor with keywords: 0.2 and 0.3 us more, at every request.
    values = (
        request_id, deployment, "__call__", route, model_id, True, False, "", deadline, session_id,
        priority,
    )  # fmt: skip
    return tuple.__new__(RequestMetadata, values)
