"""Whether a client has gone whose last words nobody has read.

A server stops reading a connection while the body it has read waits for user code, and so cannot
see the connection end: the end stands behind that data. The kernel knows.
"""

from __future__ import annotations

import select
from typing import Any

_GONE = getattr(select, "POLLRDHUP", 0)  # Linux; POLLHUP and POLLERR need not be asked for


def has_left(receive: Any) -> bool:
    """Whether the other end of the connection behind an ASGI `receive` has closed or reset it.

    Not part of ASGI: uvicorn's `receive` is a method of what holds the transport. For any other,
    or one that is wrapped, the answer is no, and the end is seen once the data was read.
    """
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    socket = None if transport is None else transport.get_extra_info("socket")
    if socket is None or not hasattr(select, "poll"):  # Windows
        return False
    descriptor = socket.fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, _GONE)
    return bool(poll.poll(0))
