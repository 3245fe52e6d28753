"""The shutdown of a server's connections: no client is cut while it sends a request.

    close_after_answers   each response that has yet to begin says `connection: close`
    refuse_handshakes     no new connection is made, and no existing one is lost
    close_idle            the connections on which nothing has arrived are closed
    flush                 the clients take what was written for them, or lose their connections

These functions use what uvicorn has for its own shutdown: the headers of every response, a
connection's `cycle`, which is its current or last request, and its `shutdown`.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import sys
from time import monotonic
from typing import Any

from ingress.serving.http.uvicorn_connection import has_unread

STALLED_S = 2.0  # longer than a packet that was lost takes to be sent again
LOOK_S = 0.05

_CLOSE = (b"connection", b"close")

# A program for the kernel's packet filter, on the listening socket: drop packets with SYN and
# without ACK, which ask for a connection.
_FLAGS_OF_TCP, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12
_STATEMENT, _JUMP, _LINE_BYTES = "HxxI", "HxBI", 8  # only a jump has a number of lines to skip
_NO_SYN = b"".join(
    (
        struct.pack(_STATEMENT, 0x30, _FLAGS_OF_TCP),  # load the byte of flags
        struct.pack(_STATEMENT, 0x54, _SYN_OR_ACK),  # and
        struct.pack(_JUMP, 0x15, 1, _SYN),  # if equal go on, else skip one
        struct.pack(_STATEMENT, 0x06, 0),  # drop the packet
        struct.pack(_STATEMENT, 0x06, 0xFFFFFFFF),  # keep the packet
    )
)
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h; Python has no name for it


def close_after_answers(server: Any) -> None:
    """Make each response that has yet to begin close its connection. On the HTTP loop.

    A response that has begun cannot say so: its connection stays open for one request more.
    """
    headers = server.config.encoded_headers  # uvicorn makes `default_headers` of them each second
    if _CLOSE not in headers:
        server.config.encoded_headers = [*headers, _CLOSE]
        server.server_state.default_headers = [*server.server_state.default_headers, _CLOSE]
    for connection in list(server.server_state.connections):
        cycle = getattr(connection, "cycle", None)  # a WebSocket has none
        if cycle is not None and not cycle.response_started and _CLOSE not in cycle.default_headers:
            cycle.default_headers = [*cycle.default_headers, _CLOSE]


def is_listening(server: Any) -> bool:
    return any(each.is_serving() for each in getattr(server, "servers", ()))


def refuse_handshakes(listening: socket.socket) -> None:
    """Have the kernel ignore requests for a connection, as if their packets were lost.

    Closing a listening socket resets the connections that wait to be accepted, with the requests
    on them. A client that is ignored tries again after a second, and is then refused, or accepted
    by the process that listens instead. No other process may use the socket. Linux and TCP only.
    """
    if sys.platform != "linux" or listening.family == socket.AF_UNIX:
        return
    code = ctypes.create_string_buffer(_NO_SYN)
    try:
        listening.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(_NO_SYN) // _LINE_BYTES, ctypes.addressof(code)),
        )
    except OSError:
        pass  # a sandbox without filters: as on other systems


def close_idle(server: Any) -> bool:
    """Close the idle connections on which nothing has arrived. On the HTTP loop.

    Returns False if an idle connection has data that the loop has yet to read.
    """
    is_done = True
    for connection in list(server.server_state.connections):
        if not _is_idle(connection):
            continue
        if has_unread(connection.transport):
            is_done = False
        else:
            connection.shutdown()
    return is_done


async def flush(server: Any, timeout_s: float) -> None:
    """Wait until the clients have taken all that was written for them. On the HTTP loop.

    The buffer of a connection has any number of bytes of an answer that is complete. Once no client
    has taken anything for `STALLED_S`, the connections are dropped: a loop that ends would leave
    them open.
    """
    now = monotonic()
    until, last, since = now + timeout_s, -1, now
    connections = server.server_state.connections
    while (unsent := sum(map(_unsent_bytes, connections))) and now < until:
        now = monotonic()
        if unsent != last:
            last, since = unsent, now
        elif now - since >= STALLED_S:
            break
        await asyncio.sleep(LOOK_S)
    for each in list(connections):
        if _unsent_bytes(each):
            each.transport.abort()


def _unsent_bytes(connection: Any) -> int:
    transport = getattr(connection, "transport", None)
    return 0 if transport is None else int(transport.get_write_buffer_size())


def _is_idle(connection: Any) -> bool:
    if not hasattr(connection, "cycle"):  # a WebSocket
        return False
    return connection.cycle is None or connection.cycle.response_complete
