"""How a server leaves the clients that are connected to it: none is cut while it asks.

    close_after_answers   each answer that has yet to begin says `connection: close`
    refuse_handshakes     no connection more, and none of those that have been made is lost
    close_idle            close the connections on which nothing has arrived

Of uvicorn's server and connections these use what they have for their own shutdown: the headers of
every answer, a connection's `cycle`, which is its current or last request, and its `shutdown`.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from typing import Any

from ingress.http.uvicorn_connection import has_unread

_CLOSE = (b"connection", b"close")

# For the listening socket, in the words of the kernel's packet filter: drop what only has the flag
# SYN of SYN and ACK, which is what asks for a connection.
_FLAGS_OF_TCP, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12
_NO_SYN = (
    (0x30, 0, 0, _FLAGS_OF_TCP),  # load that byte
    (0x54, 0, 0, _SYN_OR_ACK),  # and
    (0x15, 0, 1, _SYN),  # go on if equal, else skip one
    (0x06, 0, 0, 0),  # keep nothing of it
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all
)
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h; Python has no name for it


def close_after_answers(server: Any) -> None:
    """Have each answer that has yet to begin close its connection. On the server's loop.

    An answer that has begun has not told its client: that connection stays for one request more.
    """
    headers = server.config.encoded_headers  # uvicorn makes `default_headers` of it each second
    if _CLOSE not in headers:
        server.config.encoded_headers = [*headers, _CLOSE]
        server.server_state.default_headers = [*server.server_state.default_headers, _CLOSE]
    for connection in list(server.server_state.connections):
        cycle = getattr(connection, "cycle", None)  # a WebSocket has none
        if cycle is not None and not cycle.response_started and _CLOSE not in cycle.default_headers:
            cycle.default_headers = [*cycle.default_headers, _CLOSE]


def is_listening(server: Any) -> bool:
    return any(each.is_serving() for each in getattr(server, "servers", ()))


def refuse_handshakes(client_reader: socket.socket) -> None:
    """Have the kernel ignore whoever asks for a connection, as if the packet were lost.

    To close a socket that listens resets the connections that wait there to be accepted, with the
    requests that are on them. Ignored, a client asks again after a second, and is refused then, or
    accepted by whoever listens in our place. The socket must be nobody else's. Linux only.
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("HBBI", *line) for line in _NO_SYN)
    code = ctypes.create_string_buffer(program)
    try:
        client_reader.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HP", len(_NO_SYN), ctypes.addressof(code)),
        )
    except OSError:
        pass  # a sandbox that has no filters: it is as on other systems


def close_idle(server: Any) -> bool:
    """Close the connections that nothing has arrived on. On the server's loop.

    Returns False if there is one on which something has, which the loop has yet to read.
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


def _is_idle(connection: Any) -> bool:
    if not hasattr(connection, "cycle"):  # a WebSocket
        return False
    return connection.cycle is None or connection.cycle.response_complete
