"""The client of a request or a WebSocket: its messages and its disconnect.

Only a `Client` reads on from the server's `receive`: for user code, which takes the messages
from a channel, and to notice the disconnect, which is not reported in any other way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive

from ingress.app.asgi.messages import channel_for, size_of
from ingress.core.calls.channel import EndOfStream, WakeBy
from ingress.serving.http.uvicorn_connection import Shortcut, has_left, shorten


class Client:
    """One client, as its request sees it. Owned by the HTTP loop; `take` is for any loop.

    `passes_on` says whether user code wants the messages: after the whole body, only the disconnect
    is of interest. `on_gone()` is called when the client has left.
    `wake_by` is `put_nowait`'s, for user code on another loop that waits for a message.
    `stop_code` is that of the `end` of its messages by the application; else `None`. `timer` limits
    the time of user code that was told of the disconnect, to its end.
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
        "_shortcut",
        "_task",
        "_wake_by",
        "stop_code",
        "timer",
    )

    def __init__(
        self,
        receive: Receive,
        *,
        is_http: bool,
        passes_on: bool,
        on_gone: Callable[[], None],
        wake_by: WakeBy | None,
    ) -> None:
        self._receive = receive
        self._is_http = is_http
        self._passes_on = passes_on
        self._on_gone = on_gone
        self._wake_by = wake_by
        self._inbound = channel_for(is_http=is_http)
        self._task: asyncio.Task[None] | None = None
        self._shortcut: Shortcut | None = None
        self._is_blocked = False  # user code has not taken the messages that are there
        self._goodbye: Message | None = None  # a WebSocket's last message
        self._is_ended = False
        self.stop_code: int | None = None
        self.timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Check whether the client has left. Called at every sweep while the request runs."""
        if self._is_blocked and has_left(self._receive):
            self._on_gone()
        else:
            self.start()

    def start(self) -> None:
        """Begin to read from the server. Idempotent."""
        if self._task is None and not self._is_ended:
            self._task = asyncio.get_running_loop().create_task(self._listen())
            if not self._is_http:
                self._shortcut = shorten(self._receive, self._pass_on)

    async def _listen(self) -> None:
        """Pass on the client's messages, as fast as user code takes them."""
        while True:
            message = await self._receive()
            if message["type"].endswith(".disconnect"):
                break
            if self._passes_on and not self._pass_on(message):
                self._is_blocked = True
                await self._inbound.put(message, size_of(message))
                self._is_blocked = False
        self._goodbye = message
        # Race with user code in `take`, on another loop: it is told by its cancellation or by the
        # disconnect, not by both. So the cancellation is posted first, see `take`.
        self._on_gone()
        self._inbound.finish()

    def _pass_on(self, message: Message) -> bool:
        """Pass a message on. Returns False if user code has not taken those before it."""
        return not self._is_blocked and self._inbound.put_nowait(
            message, size_of(message), self._wake_by
        )

    async def take(self) -> Message:
        """Return the next message; after the last, always the disconnect."""
        try:
            return (await self._inbound.get_many(1))[0]  # as `get`, whose frame would cost
        except EndOfStream:
            if self._is_http:
                if self.stop_code is None:
                    # A cancellation that was posted before comes now, and not while user code
                    # cleans up because of this message. An application that stops posts none yet,
                    # and `Request.is_disconnected` sees only what comes at once.
                    await asyncio.sleep(0)
                return {"type": "http.disconnect"}
            assert self._goodbye is not None
            return self._goodbye

    def end(self, code: int) -> None:
        """Stop reading, and tell user code that its client is gone, a WebSocket with `code`.

        No effect the second time.
        """
        if self.stop_code is not None:
            return
        self.stop_code = code
        if self._goodbye is None:
            self._goodbye = {"type": "websocket.disconnect", "code": code, "reason": ""}
        self._cancel()
        self._inbound.finish()

    def stop(self) -> None:
        """Stop reading: the request is over."""
        self._cancel()
        if self.timer is not None:
            self.timer.cancel()
        if self._is_http:
            self._inbound.finish()  # user code that runs on may wait for a message
        # Break the cycle with the reply: a body must not wait for the garbage collector.
        self._on_gone = _ignore

    def _cancel(self) -> None:
        self._is_ended = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        shortcut, self._shortcut = self._shortcut, None
        if shortcut is not None:
            shortcut.end()


def _ignore() -> None:
    """Do nothing: the request is over."""
