"""The head of a request: the few headers that decide how it is served, and whether it is local."""

from __future__ import annotations

import re
from dataclasses import dataclass
from time import monotonic
from urllib.parse import urlsplit

from starlette.types import Receive, Scope

from ingress.app.asgi.received_headers import AddedHeader, Pair, with_replaced
from ingress.app.asgi.template import RouteTemplates
from ingress.core.base.settings import SESSION_HEADER
from ingress.core.base.types import PRIORITIES, DeploymentID, RequestMetadata, new_request_id
from ingress.core.calls.deadlines import TIMEOUT_HEADER, earlier
from ingress.serving.http.admin_address import is_loopback
from ingress.serving.http.uvicorn_connection import is_incomplete

REQUEST_ID_HEADER = b"x-request-id"
IN_PROCESS = "testserver"
"""The server's name and address for `TestClient` in this process; no socket has it."""

_MODEL_ID = (b"serve-multiplexed-model-id", b"serve_multiplexed_model_id")
_READ = frozenset((*_MODEL_ID, TIMEOUT_HEADER, REQUEST_ID_HEADER))
_PRIORITIES = {name.encode(): level for name, level in PRIORITIES.items()}
_FORWARDED = frozenset((b"forwarded", b"via", b"x-real-ip"))
_DIGITS = 18  # read of a content-length, which may have thousands
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id_of(scope: Scope) -> str:
    """Return the first valid id that the client sent, or a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return new_request_id()


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
    scope: Scope,
    deployment: DeploymentID,
    route: str,
    timeout_s: float | None,
    headers: RoutingHeaders = USUAL_HEADERS,
    request_id: str = "",
) -> tuple[RequestMetadata, list[Pair], float]:
    """Return the metadata of a request, and its headers, with its id; they are read in one pass.

    The id is `request_id`, or the client's own if that is valid, or a new one. `timeout_s` is the
    server's own limit; the deadline is that of the shorter of it and the client's. The third value
    is the time of `monotonic` that it counts from; 0 without a deadline.
    """
    has_id = False
    model_id = session_id = ""
    priority = 0
    read = headers.read
    given: list[Pair] = scope["headers"]
    for name, value in given:
        if name in read:
            if name == REQUEST_ID_HEADER:
                has_id = True
            elif name == TIMEOUT_HEADER:
                timeout_s = earlier(timeout_s, value)
            elif name in _MODEL_ID:
                model_id = value.decode("latin-1")
            elif name == headers.priority:
                priority = _PRIORITIES.get(value.lower(), 0)
            else:
                session_id = value.decode("latin-1")
    if not request_id:
        request_id = request_id_of(scope) if has_id else new_request_id()
        pair = REQUEST_ID_HEADER, request_id.encode()
        given = with_replaced(given, pair) if has_id else [*given, AddedHeader(pair)]
    now = 0.0 if timeout_s is None else monotonic()
    deadline = None if timeout_s is None else now + timeout_s
    # Not by `RequestMetadata` itself, nor with keywords: 0.2 and 0.3 us more, at every request.
    values = (
        request_id, deployment, "__call__", route, model_id, True, False, "", deadline, session_id,
        priority, "",
    )  # fmt: skip
    return tuple.__new__(RequestMetadata, values), given, now


def body_of(
    scope: Scope, receive: Receive, templates: RouteTemplates, buffer_bytes: int
) -> tuple[bool | None, bool]:
    """Return whether a request has a body, and whether that is read only if user code asks.

    The first is `None` for a method that has none as a rule, over HTTP/2, where a body needs no
    length: a server may not say that it has ended. The second is true if the client waits until it
    is asked, or if the route may not need it. Source: RFC 9110, 9.3 and 10.1.1.
    """
    has_length = waits = is_large = False
    for name, value in scope["headers"]:
        if name == b"content-length" or name == b"transfer-encoding":
            has_length = True
            is_large = _size(value) > buffer_bytes
        elif name == b"expect":
            waits = value.lower() == b"100-continue"
    if has_length:
        return True, waits or (
            is_incomplete(receive) and templates.may_leave_body(scope, is_large=is_large)
        )
    if scope.get("http_version", "1.1") < "2" or scope["method"] not in _BODILESS:
        return True, waits
    return None, False


_BODILESS = frozenset(("GET", "HEAD", "OPTIONS", "DELETE"))


def content_length(scope: Scope) -> int:
    """Return the bytes of a request's body by its content-length; 0 for none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return _size(value)
    return 0


def _size(value: bytes) -> int:
    return int(value[:_DIGITS]) if value.isdigit() else 0


def is_local(scope: Scope, target: bytes | None) -> bool:
    """Return whether a request was sent from this machine to itself, by a local name.

    `target` is what its client asks for: a path or a URL, b"" or `None` as `target_of` says.

    The Host header is checked too: a web page whose own name resolves to 127.0.0.1 reaches the
    loopback address through its reader's browser, but cannot send another Host. A proxy on this
    machine says in other headers that it forwards the request of another client.
    """
    host = b""
    for name, value in scope["headers"]:
        if name == b"host":
            host = host or value
        elif name in _FORWARDED or name.startswith(b"x-forwarded-"):
            return False
    if target is None or not _is_of_this_machine(target):
        return False
    server = scope.get("server")
    address = server[0] if server else ""
    text = host.decode("latin-1").lower()
    text = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    if text == IN_PROCESS:
        return bool(address == IN_PROCESS)
    over_socket_file = server is None or server[1] is None
    return (over_socket_file or address == IN_PROCESS or is_loopback(address)) and is_loopback(text)


def _is_of_this_machine(target: bytes) -> bool:
    """Return whether the target of a request names no other machine. A URL precedes the Host."""
    try:
        url = urlsplit(target)
        return not url.scheme or is_loopback((url.hostname or b"").decode("latin-1"))
    except ValueError:
        return False
