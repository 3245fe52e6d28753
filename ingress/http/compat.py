"""The methods of uvicorn that this package overrides; uvicorn promises none of them.

A method that uvicorn renamed would be overridden without effect: a limit would no longer hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from ingress.base.private_names import require

SUPPORTED = ">=0.51.0"

_PROTOCOL = ("connection_made", "connection_lost", "data_received", "send_400_response", "shutdown")
_SERVER = ("capture_signals", "handle_exit", "shutdown", "startup")

require("uvicorn", SUPPORTED, [f"uvicorn:Server.{name}" for name in _SERVER])
require(
    "uvicorn",
    SUPPORTED,
    [
        f"uvicorn.protocols.http.h11_impl:H11Protocol.{name}"
        for name in (*_PROTOCOL, "_should_upgrade", "handle_events")
    ],
)

if TYPE_CHECKING:
    HttpToolsProtocol: Any
else:
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        HttpToolsProtocol = None  # without httptools uvicorn takes h11, too
    else:
        require(
            "uvicorn",
            SUPPORTED,
            [
                f"uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.{name}"
                for name in (*_PROTOCOL, "on_body", "on_headers_complete")
            ],
        )

__all__ = ["H11Protocol", "HttpToolsProtocol"]
