"""What a server does not tell of a client, and has no word for: uvicorn's connection itself.

    has_left   whether a client has gone whose last words nobody has read: a server stops reading
               while the body it has read waits for user code, and the end stands behind that data
    has_unread whether the kernel has something of the client's, or its end, that nobody has read
    cut        end a response half way: to a server that is an error of the application's
    called_app the application that the server itself calls: if it is ours, nobody but the server
               hears of what we raise
    has_answer whether the whole response has been given to the server

None of it is part of ASGI: uvicorn's `receive` is a method of what holds the transport. For any
other, or one that is wrapped, the answer is no.
"""

from __future__ import annotations

import asyncio
import select
import sys
from typing import Any

_GONE = getattr(select, "POLLRDHUP", 0)  # Linux; POLLHUP and POLLERR need not be asked for
FLUSH_S = 0.1  # for what is on its way when a connection is cut


def has_left(receive: Any) -> bool:
    """Whether the other end of the connection has closed or reset it; the kernel knows.

    If the answer is no, the end is seen once the data was read.
    """
    return _polled(transport_of(receive), _GONE)


def has_unread(transport: Any) -> bool:
    """Whether something has arrived on a connection that its protocol has not been given yet."""
    return _polled(transport, getattr(select, "POLLIN", 0))


async def cut(receive: Any) -> bool:
    """Close the connection, and wait until the server has seen it. Returns whether it can."""
    transport = transport_of(receive)
    if transport is None:
        return False
    transport.close()
    try:
        async with asyncio.timeout(FLUSH_S):
            while (await receive())["type"] != "http.disconnect":
                pass
    except TimeoutError:
        pass  # what the client does not read is in the way; the server has a line to say of that
    return True


def _polled(transport: Any, events: int) -> bool:
    socket = None if transport is None else transport.get_extra_info("socket")
    if socket is None or not hasattr(select, "poll"):  # Windows
        return False
    descriptor = socket.fileno()
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(0))


def called_app(receive: Any) -> Any:
    """Return the application that uvicorn calls with this `receive` over HTTP/1.1, else `None`.

    Of uvicorn's own wrappers only the one it uses by default is seen through; the others give
    another `receive`.
    """
    cycle = getattr(receive, "__self__", None)
    if not hasattr(cycle, "keep_alive"):  # of HTTP/2, whose streams share a connection
        return None
    protocol = getattr(getattr(cycle, "on_response", None), "__self__", None)
    app: Any = getattr(protocol, "app", None)
    module = sys.modules.get("uvicorn.middleware.proxy_headers")
    if module is not None and type(app) is getattr(module, "ProxyHeadersMiddleware", None):
        return app.app
    return app


def is_answer_complete(receive: Any) -> bool:
    """Whether the server has been given the whole of the response."""
    return bool(getattr(getattr(receive, "__self__", None), "response_complete", False))


def transport_of(receive: Any) -> Any:
    """Return the connection that a server's `receive` reads from, or `None`."""
    return getattr(getattr(receive, "__self__", None), "transport", None)
