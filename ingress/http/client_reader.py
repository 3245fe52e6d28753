"""What a client sends, and when it has gone.

A server's `receive` is read on from here only: for user code, which takes from a channel, and to
see the client leave, because nobody else would look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive

from ingress.calls.channel import EndOfStream
from ingress.http.messages import channel_for, size_of
from ingress.http.uvicorn_connection import has_left


class ClientReader:
    """Owned by the server's loop; `take` is for user code, on whichever loop that is.

    `passes_on` says whether user code wants what comes: after the whole of a body, only the
    client's leaving is of interest. `on_gone()` is called when it has left.
    """

    __slots__ = (
        "_goodbye",
        "_inbound",
        "_is_blocked",
        "_is_ended",
        "_is_http",
        "_on_gone",
        "_passes_on",
        "_receive",
        "_task",
    )

    def __init__(
        self,
        receive: Receive,
        *,
        is_http: bool,
        passes_on: bool,
        on_gone: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._is_http = is_http
        self._passes_on = passes_on
        self._on_gone = on_gone
        self._inbound = channel_for(is_http=is_http)
        self._task: asyncio.Task[None] | None = None
        self._is_blocked = False  # user code has not taken what is there
        self._goodbye: Message | None = None  # a WebSocket's last message
        self._is_ended = False

    def watch(self) -> None:
        """See whether the client has left. Called again and again while the request runs."""
        if self._is_blocked and has_left(self._receive):
            self._on_gone()
        else:
            self.start()

    def start(self) -> None:
        """Begin to read from the server. Idempotent."""
        if self._task is None and not self._is_ended:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        """Pass on what the server receives, as fast as user code takes it."""
        while True:
            message = await self._receive()
            if message["type"].endswith(".disconnect"):
                break
            if self._passes_on:
                self._is_blocked = True
                await self._inbound.put(message, size_of(message))
                self._is_blocked = False
        self._goodbye = message
        self._inbound.finish()
        self._on_gone()

    async def take(self) -> Message:
        """Return the next message; at the end, and then for ever, that the client is gone."""
        try:
            return await self._inbound.get()  # type: ignore[no-any-return]
        except EndOfStream:
            if self._is_http:
                return {"type": "http.disconnect"}
            assert self._goodbye is not None
            return self._goodbye

    def end(self, code: int) -> None:
        """Listen no more: user code is told that its client is gone, a WebSocket with `code`."""
        if self._goodbye is None:
            self._goodbye = {"type": "websocket.disconnect", "code": code, "reason": ""}
        self._cancel()
        self._inbound.finish()

    def stop(self) -> None:
        """Listen no more: the request is over."""
        self._cancel()
        # Who has us; the body of a request must not wait for the garbage collector.
        self._on_gone = _nobody

    def _cancel(self) -> None:
        self._is_ended = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()


def _nobody() -> None:
    """It is over."""
