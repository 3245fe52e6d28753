"""User code's side of a request: it runs user code, which calls its `receive` and `send`.

    the user loop                              the HTTP loop
    send()     one complete response           -> Exchange.complete, start and body together
               a stream, item by item          -> a Channel, which Exchange.open gets
    receive()  body, messages, disconnect      <- the channel that the ClientReader fills

`CrossLoopTransport` is for user code on a loop of its own, `SameLoopTransport` for user code on the
HTTP loop.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol

from starlette.types import Message, Scope

from ingress.calls.channel import YIELD_EVERY, Channel
from ingress.calls.loops import Mailbox
from ingress.exceptions import StreamClosedError
from ingress.http.client_reader import ClientReader
from ingress.http.messages import channel_for, size_of
from ingress.replicas.user_code import UserCode


class Client(Protocol):
    """The exchange, as a transport sees it.

    From another loop, all calls are posted but `drop_scope` and the reader's `take`. A transport
    sets `has_answer` once user code has sent the whole response: what still runs is a background
    task. It sets `is_heard` once user code was told that the client is gone.
    """

    is_http: bool
    has_answer: bool
    is_heard: bool
    scope: Scope

    @property
    def is_gone(self) -> bool: ...

    @property
    def client_reader(self) -> ClientReader: ...

    def complete(self, start: Message, body: Message) -> None: ...

    def open(self, outbound: Channel) -> None: ...

    def pump(self) -> None: ...

    async def pass_on(self, message: Message) -> None: ...

    async def send_response(self, start: Message, body: Message) -> None: ...

    def lose(self) -> None: ...

    def drop_scope(self, failure: BaseException | None) -> None: ...


class Transport:
    """User code's side of an exchange. Owned by the user loop."""

    __slots__ = ("_client", "_first", "_start")

    def __init__(self, client: Client, first: Message | None) -> None:
        self._client = client
        self._first = first
        self._start: Message | None = None

    async def serve(self, user_code: UserCode) -> None:
        """Serve the request with user code."""
        client = self._client
        try:
            await user_code.http(client.scope, self.receive, self.send)
        finally:
            client.drop_scope(sys.exception())
            self._finish()

    async def receive(self) -> Message:
        if self._first is not None:
            message, self._first = self._first, None
            return message
        self._pump()
        message = await self._client.client_reader.take()
        if message["type"].endswith(".disconnect"):
            self._client.is_heard = True
        return message

    async def send(self, message: Message) -> None:
        raise NotImplementedError

    def _pump(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Note that user code sends no more."""


class CrossLoopTransport(Transport):
    """The transport of user code on a loop of its own. Owned by the user loop."""

    __slots__ = ("_is_pumping", "_mailbox", "_outbound")

    def __init__(self, client: Client, first: Message | None, mailbox: Mailbox) -> None:
        self._client = client  # not by `super`, which costs every request 0.1 us
        self._first = first
        self._start = None
        self._mailbox = mailbox
        self._is_pumping = False
        self._outbound: Channel | None = None

    async def send(self, message: Message) -> None:
        if self._outbound is not None:
            await self._put(message)
            self._client.has_answer = not message.get("more_body")
        elif message["type"] == "http.response.start":
            self._start = message
            if not _has_length(message):
                await self._stream()  # the body may take a while, and the client wants the start
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            if self._start is None:
                raise RuntimeError("'http.response.body' was sent before 'http.response.start'")
            self._mailbox.post(self._client.complete, self._start, message)
            self._start = None
            self._client.has_answer = True
        else:
            await self._stream()
            await self._put(message)

    def _pump(self) -> None:
        if not self._is_pumping:
            self._is_pumping = True
            self._mailbox.post(self._client.pump)

    def _finish(self) -> None:
        if self._outbound is not None:
            self._outbound.finish()

    async def _stream(self) -> None:
        """Send the response message by message from now on."""
        self._outbound = channel_for(is_http=self._client.is_http)
        if self._start is not None:
            await self._outbound.put(self._start)
        self._mailbox.post(self._client.open, self._outbound)

    async def _put(self, message: Message) -> None:
        assert self._outbound is not None
        try:
            await self._outbound.put(message, size_of(message))
        except StreamClosedError:
            self._client.is_heard = True
            raise


class SameLoopTransport(Transport):
    """The transport of user code on the HTTP loop. Owned by that loop."""

    __slots__ = ("_sent",)

    def __init__(self, client: Client, first: Message | None) -> None:
        self._client = client
        self._first = first
        self._start = None
        self._sent = 0

    async def send(self, message: Message) -> None:
        if self._client.is_gone:
            self._client.is_heard = True
            raise StreamClosedError("the client of this request has disconnected")
        if message.get("more_body") or message["type"] == "websocket.send":
            self._client.pump()
            self._sent += 1
            # A server need not suspend it. uvicorn drops what is written to a connection that
            # failed, and the loop must turn before uvicorn hears of the failure.
            if self._sent % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        else:
            self._client.has_answer = message["type"] != "http.response.start"
        if message["type"] == "http.response.start" and _has_length(message):
            self._start = message  # kept: an error before the body can still be answered as one
        else:
            start, self._start = self._start, None
            try:
                if start is None:
                    await self._client.pass_on(message)
                else:
                    await self._client.send_response(start, message)
            except OSError:
                self._client.lose()
                raise

    def _pump(self) -> None:
        self._client.pump()


def _has_length(start: Message) -> bool:
    """Return whether the body follows the start at once, so that both can be sent together."""
    for name, _ in start.get("headers", ()):  # noqa: SIM110 - a generator costs 0.3 us
        if name == b"content-length":
            return True
    return False
