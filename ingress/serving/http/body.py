"""The body of a request, as it is received.

    it fits `body_buffer_bytes`                   all of it is read before the request takes a slot
    it is larger                                  the buffer is filled, the rest read as it is taken
    the same, and only the user's code reads it   as it is taken, from its beginning
    it stalls for `body_idle_timeout_s`           408, and its slot is free
    it is slower than `min_body_rate`             the same, `GRACE_S` after its beginning
    it is or becomes larger than `max_body_size`  413; not read if its Content-Length says so

A body stalls while the server waits for the client, not while user code does not take it. Nor does
that time count for its rate, and once the response has begun it has no least rate: its client may
wait for parts of the response.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ingress.core.base.settings import HTTPLimits
from ingress.exceptions import (
    RequestBodyTimeoutError,
    RequestBodyTooLargeError,
    StreamClosedError,
)
from ingress.serving.http.uvicorn_connection import close_header, transport_of

NO_LIMITS = HTTPLimits(min_body_rate=None)  # but those that are on by default
NO_BODY: Message = {"type": "http.request", "body": b"", "more_body": False}
LINGER_S = 1.0  # for a client to read that its body is not wanted
GRACE_S = 5.0  # of waiting for a client, until its rate counts: as in Kestrel
LOOK_S = 0.1  # between two sweeps, at most: in a longer time the loop stalled, and did not wait


class Body:
    """The body of one request; its `receive` replaces the server's. Owned by the HTTP loop.

    `is_open` becomes false with its last message; it is false before the first one if there should
    be no body. `error` is set once the body is too large, maybe by its Content-Length alone: from
    then on its client counts as gone. `is_read_ahead`: read before the request takes a slot.
    """

    __slots__ = (
        "_awaited_s",
        "_idle_since",
        "_is_awaited",
        "_limits",
        "_looked_at",
        "_receive",
        "_size",
        "error",
        "is_open",
        "is_read_ahead",
    )

    def __init__(
        self,
        receive: Receive,
        limits: HTTPLimits,
        length: int = 0,
        *,
        is_open: bool = True,
        is_read_ahead: bool = True,
    ) -> None:
        self._receive = receive
        self._limits = limits
        self._size = 0
        self._is_awaited = False
        self._idle_since: float | None = None
        self._awaited_s = self._looked_at = 0.0
        self.is_open = is_open
        self.is_read_ahead = is_read_ahead
        self.error: RequestBodyTooLargeError | None = None
        limit = limits.max_body_size
        if limit is not None and length > limit:
            self.error = RequestBodyTooLargeError(limit)

    @property
    def may_be_too_large(self) -> bool:
        """Return whether a part that is yet to come may be refused."""
        return self._limits.max_body_size is not None

    def may_be_taken(self, size: int) -> bool:
        """Return whether a body of this size, which is here as a whole, may be read at once."""
        limit = self._limits.max_body_size
        return self.is_read_ahead and self.error is None and (limit is None or size <= limit)

    def waits_to_be_asked(self, scope: Scope) -> bool:
        """Return whether the client sends it once it is asked to: reading asks for it."""
        if self.is_read_ahead or not self.is_open:
            return False
        return any(name == b"expect" for name, _ in scope["headers"])

    @property
    def transport(self) -> Any:
        """Uvicorn's transport; `uvicorn_connection` looks for it on the owner of `receive`."""
        return transport_of(self._receive)

    async def receive(self) -> Message:
        """Return the server's next message."""
        self._idle_since = None
        self._is_awaited = self.is_open
        message = await self._receive()
        self._is_awaited = False
        if message["type"] == "http.request":
            self.is_open = message.get("more_body", False)
            self._size += len(message.get("body", b""))
            limit = self._limits.max_body_size
            if limit is not None and self._size > limit:
                self.error = RequestBodyTooLargeError(limit)
                return {"type": "http.disconnect"}
        return message

    async def read_ahead(self) -> Message:
        """Return the whole body as one message, or as much as fills the buffer.

        Raises `RequestBodyTooLargeError`, and `StreamClosedError` if the client leaves meanwhile.
        """
        if self.error is not None:
            raise self.error  # by its Content-Length: nothing of it is read
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return message  # the common case
        self._check(message)
        parts = [message.get("body", b"")]
        left = self._limits.body_buffer_bytes - len(parts[0])
        while left > 0 and message.get("more_body"):
            message = await self.receive()
            self._check(message)
            parts.append(message.get("body", b""))
            left -= len(parts[-1])
        return {**message, "body": b"".join(parts)}

    def _check(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            raise self.error or StreamClosedError("the client of this request has disconnected")

    def timeout(
        self, now: float, request_id: str, *, is_answered: bool
    ) -> RequestBodyTimeoutError | None:
        """Return an error once the body has stalled for too long, or is too slow.

        Called at every sweep. The first call notes the time, so that a part which arrives at once
        reads no clock. The time that the server has waited for the client is the sum of the times
        between two sweeps of which the second finds it waiting.
        """
        since_s, self._looked_at = min(now - self._looked_at, LOOK_S), now
        if not self._is_awaited:
            return None
        limit_s, rate = self._limits.body_idle_timeout_s, self._limits.min_body_rate
        if self._idle_since is None:
            self._idle_since = now
        if limit_s is not None and now - self._idle_since >= limit_s:
            return RequestBodyTimeoutError(request_id, limit_s)
        self._awaited_s += since_s
        if not rate or is_answered or self._awaited_s < GRACE_S:
            return None
        if self._size >= rate * self._awaited_s:
            return None
        return RequestBodyTimeoutError(request_id, self._awaited_s, rate)


async def answer_and_close(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request whose body is still on its way, and have the server close the connection.

    Not at once: the system would reset a connection with unread data, and the client would not see
    the answer. The client gets the whole answer, and may stop sending, before the response ends.
    """
    if scope.get("http_version", "1.1") < "2":
        response.headers.update(close_header(receive))

    async def send_and_linger(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await send({**message, "more_body": True})
            try:
                async with asyncio.timeout(LINGER_S):
                    while (await receive()).get("more_body"):
                        pass
            except TimeoutError:
                pass
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    await response(scope, receive, send_and_linger)
