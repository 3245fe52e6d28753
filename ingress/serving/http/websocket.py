"""A WebSocket between the HTTP loop and the user loop: a reply without an end of its own.

    ends because                 user code gets                    the client gets
    its handler returned                                           1000, if it has not closed
    its handler raised                                             1011
    the client left, or answers  websocket.disconnect; cancelled
    no ping of the server        if it does not listen
    the application stops        websocket.disconnect              1001; 1012 if it is replaced

An accepted WebSocket has no deadline, as in Ray. Source: Ray 2.60.0, proxy.py; RFC 6455, 7.4.1.
"""

from __future__ import annotations

from typing import Any

import anyio
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect

from ingress.app.asgi.messages import INTERNAL_ERROR, NORMAL
from ingress.core.calls.channel import Channel, EndOfStream
from ingress.exceptions import is_cancellation
from ingress.serving.http.access import DENIED, SWITCHED
from ingress.serving.http.asgi_driver import work_ended
from ingress.serving.http.reply import CLEANUP_S, HEARING_S, Reply
from ingress.serving.http.reply_state import (
    ACCEPT,
    BEGIN,
    CLOSE,
    COMPLETE,
    EXCUSE,
    FINISH,
    GO,
    GONE,
    OVER,
    WEBSOCKET,
    Action,
)
from ingress.serving.http.uvicorn_connection import (
    may_send,
    send_messages,
    transport_of,
    websocket_of,
)

FLUSHING_S = 1.0  # for data that is being sent when the server closes the connection


class WebSocketReply(Reply):
    """The HTTP loop's side of one WebSocket. Owned by that loop."""

    is_http = False
    table = WEBSOCKET
    __slots__ = ("_flushes_until", "_is_direct", "_unsent", "_websocket")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flushes_until: float | None = None
        self._websocket = websocket_of(self.send)
        self._is_direct = False  # messages are sent without the server's task
        self._unsent: list[Message] = []

    async def ends_by_itself(self) -> bool:
        """Wait until the handler has ended, and return whether it has.

        A test client cancels the server's task as it leaves, maybe before its disconnect was read.
        The handler's clean-up and error belong to that test. The cancellation of a server comes a
        little later.
        """
        runner = self.call.runner
        if not self.status or runner is None or runner.loop is self.loop:
            return False  # in the last case, the cancellation has ended the handler
        with anyio.move_on_after(HEARING_S, shield=True):
            await self._end_of_call()
        if self.state is COMPLETE or self.state is GONE:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await self._end_of_call()
        if self.state not in OVER:
            return False
        await work_ended(self)  # a call that is cancelled is over before its clean-up
        return True

    async def _end_of_call(self) -> None:
        while self.state not in OVER:
            self.event = event = self.loop.create_future()
            await event

    async def conclude(self, action: Action) -> None:
        failure = self.call.error
        stop_code = None if self._client is None else self._client.stop_code
        is_excused = action is EXCUSE or stop_code is not None
        if failure is not None and is_excused and self._is_a_reaction(failure):
            failure = None
        if action is CLOSE:
            code = stop_code or (NORMAL if failure is None else INTERNAL_ERROR)
            try:
                await self.send({"type": "websocket.close", "code": code})
            except OSError:
                pass  # the client has left first
        if failure is self.call.error:
            await super().conclude(action)

    def _is_a_reaction(self, failure: BaseException) -> bool:
        """Return whether a handler's error follows from the disconnect of its client, or a stop."""
        if failure is not self.ended_by and not is_cancellation(failure):
            return False
        # A server would only log what `receive` has raised; a test expects it.
        is_received = isinstance(failure, WebSocketDisconnect) and failure.__context__ is None
        return not is_received or self._websocket is not None or bool(transport_of(self.receive))

    async def pass_on(self, message: Message) -> None:
        kind = message["type"]
        if kind == "websocket.accept":
            self.on(ACCEPT)
            self.status = self.status or SWITCHED
        else:
            self.on(BEGIN)
            self.status = self.status or message.get("status", DENIED)
        if kind == "websocket.close":
            self.on(FINISH)
        await self.send(message)

    async def forward(self, outbound: Channel[Message]) -> None:
        """Send the messages of user code: without this task, while the server takes them at once.

        Otherwise each would have to wake this task.
        """
        while True:
            if self._websocket is not None and not self._send_directly():
                self._is_direct = True
                self.event = event = self.loop.create_future()
                try:
                    await event
                finally:
                    self._is_direct = False
            messages, self._unsent = self._unsent, []
            try:
                await self._deliver(messages or await outbound.get_many())
            except EndOfStream:
                return

    async def _deliver(self, messages: list[Message]) -> None:
        try:
            for each in messages:
                await self.pass_on(each)
        except OSError:
            self.on(GO)  # its handler notices when it sends or receives

    def _news_of_user_code(self) -> None:
        self.mailbox.post(self._send_what_came)

    def _send_what_came(self) -> None:
        # Posted, and meanwhile the server's task may have begun to send what came before.
        if self._is_direct and self._send_directly():
            self._is_direct = False
            self.wake()

    def _send_directly(self) -> bool:
        """Send the messages that are there. Returns whether the server's task must go on.

        If not, this is done again when there are more.
        """
        assert self._outbound is not None
        if not may_send(self._websocket):  # until the client reads, they stay in their channel
            return True
        try:
            messages = self._outbound.get_nowait(self._news_of_user_code)
        except Exception:  # the end, which the task will get too
            return True
        if messages:
            self._unsent = send_messages(self._websocket, messages)
        return bool(self._unsent)

    def watch(self, now: float) -> None:
        super().watch(now)
        transport = transport_of(self.receive)
        if transport is None or not transport.is_closing():
            return
        # uvicorn closes a connection whose client answers no ping. Until its last byte is sent,
        # the connection is not lost: never, if that client does not read.
        if self._flushes_until is None:
            self._flushes_until = now + FLUSHING_S
        elif now >= self._flushes_until:
            transport.abort()

    def tell(self) -> None:
        self.close()
        self.cancel_if_deaf()
