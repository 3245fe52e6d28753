"""The methods of uvicorn that this package overrides, and the attributes that it then uses.

uvicorn promises none of them. A method that it renamed would be overridden without effect: a limit
would no longer hold. `uvicorn_connection` uses more attributes, and does without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from ingress.core.base.private_names import require

SUPPORTED = ">=0.51.0"

_H11 = "uvicorn.protocols.http.h11_impl"
_HTTPTOOLS = "uvicorn.protocols.http.httptools_impl"
_PROTOCOL = ("connection_made", "connection_lost", "data_received", "send_400_response", "shutdown")
_OF_HTTPTOOLS = ("_start_asgi_task", "on_body", "on_headers_complete")
_OF_H11 = ("_should_upgrade", "handle_events")
_SERVER = ("capture_signals", "handle_exit", "main_loop", "on_tick", "shutdown", "startup")
_ATTRIBUTES = {
    "uvicorn:Config.load": ("encoded_headers",),
    "uvicorn:Server.__init__": ("config", "force_exit", "server_state", "should_exit", "started"),
    "uvicorn.server:ServerState.__init__": ("connections", "default_headers"),
}
_CONNECTION = (
    "access_log", "access_logger", "app", "connections", "cycle", "flow", "headers", "loop",
    "scope", "transport",
)  # fmt: skip
_CYCLE = ("default_headers", "response_complete", "response_started")
_WHOLE = (
    "access_log", "body", "chunked_encoding", "disconnected", "flow", "keep_alive",
    "message_event", "more_body", "on_response", "scope", "transport", "waiting_for_100_continue",
)  # fmt: skip


def _attributes(module: str, protocol: str, own: str) -> Iterator[str]:
    yield from (f"{module}:{protocol}.__init__({name})" for name in (*_CONNECTION, own))
    yield from (f"{module}:RequestResponseCycle.__init__({name})" for name in _CYCLE)


require(
    "uvicorn",
    SUPPORTED,
    (
        *(f"uvicorn:Server.{name}" for name in _SERVER),
        *(f"{function}({name})" for function, names in _ATTRIBUTES.items() for name in names),
        *_attributes(_H11, "H11Protocol", "conn"),
        *(f"{_H11}:H11Protocol.{name}" for name in (*_PROTOCOL, *_OF_H11)),
    ),
)

HEADER_RE: Any
HEADER_VALUE_RE: Any
STATUS_LINE: dict[int, bytes]
if TYPE_CHECKING:
    HttpToolsProtocol: Any
else:
    try:
        from uvicorn.protocols.http.httptools_impl import (
            HEADER_RE,
            HEADER_VALUE_RE,
            STATUS_LINE,
            HttpToolsProtocol,
        )
    except ImportError:
        HttpToolsProtocol = None  # without httptools uvicorn takes h11, too
    else:
        require(
            "uvicorn",
            SUPPORTED,
            (
                *(
                    f"{_HTTPTOOLS}:HttpToolsProtocol.{name}"
                    for name in (*_PROTOCOL, *_OF_HTTPTOOLS)
                ),
                *(
                    f"{_HTTPTOOLS}:{name}"
                    for name in ("HEADER_RE", "HEADER_VALUE_RE", "STATUS_LINE")
                ),
                *(f"{_HTTPTOOLS}:RequestResponseCycle.__init__({name})" for name in _WHOLE),
                *_attributes(_HTTPTOOLS, "HttpToolsProtocol", "parser"),
            ),
        )

__all__ = [
    "HEADER_RE",
    "HEADER_VALUE_RE",
    "STATUS_LINE",
    "H11Protocol",
    "HttpToolsProtocol",
    "ProxyHeadersMiddleware",
]
