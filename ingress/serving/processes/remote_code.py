"""User code in a child process, as the calls of the server's process use it.

start, stop, reconfigure, check_health    as of `UserCode`; `start` starts the child
call, stream, http                        one frame down, and the child's answers up
a cancellation                            the end of the work is awaited, as the slot follows it
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from starlette.types import Message, Receive, Scope, Send

from ingress.app.asgi import BoundApp
from ingress.app.asgi.chunks import Chunks
from ingress.app.asgi.template import TEMPLATES
from ingress.core.base.types import ReplicaID
from ingress.core.calls.call import CURRENT_CALL
from ingress.core.calls.tracing import span_headers
from ingress.exceptions import StreamClosedError
from ingress.handle import Invocation
from ingress.serving.processes.child_calls import MakeHandle
from ingress.serving.processes.crossing import unsendable
from ingress.serving.processes.frames import Content, dumps, encode, outside, size_of_content
from ingress.serving.processes.link import Link
from ingress.serving.processes.messages import (
    RESPONSE_BODY,
    Kind,
    envelope_of,
    message_as_sent,
    scope_as_sent,
)
from ingress.serving.processes.remote_calls import RemoteCall, RemoteWork
from ingress.serving.processes.resources import EnvironmentOf


class RemoteCode:
    """The user's class or function in a child, in the place of its `UserCode`.

    Owned by the loop of its frames. `specification` and `environment_of` are set before the start.
    """

    __slots__ = ("_templates", "environment_of", "link", "specification")

    def __init__(
        self,
        replica_id: ReplicaID,
        app: BoundApp | None,
        make_handle: MakeHandle,
    ) -> None:
        self.link = Link(replica_id, make_handle)
        self._templates = None if app is None else app.templates()
        self.environment_of: EnvironmentOf
        self.specification = b""

    async def start(
        self, args: Sequence[object], kwargs: Mapping[str, object], user_config: object = None
    ) -> None:
        """Start the child, which makes the instance. Raises the errors of user code.

        The arguments are in the specification: a child makes handles of its own.
        """
        await self.link.start(self.specification, self.environment_of)

    async def stop(self) -> None:
        """Have the child shut down, and wait for its end."""
        await self.link.stop()

    async def reconfigure(self, user_config: object) -> None:
        await self._ask("reconfigure", user_config)

    async def check_health(self) -> None:
        await self._ask("check_health")

    def add_threads(self, max_ongoing: int) -> None:
        """Have the child allow worker threads for more calls, without waiting for that."""
        self.link.send(Kind.ASK, dumps(("add_threads", max_ongoing)))

    async def look(
        self, look: Callable[..., object], arguments: Sequence[object], timeout_s: float
    ) -> bytes | memoryview:
        """Return the pickled result of `look(replica, *arguments)` in the child.

        Raises `TimeoutError` if the child has not answered by then.
        """
        async with asyncio.timeout(timeout_s):
            work = self.link.send(Kind.ASK, dumps(("look", (look, *arguments))))
            pickled: bytes | memoryview = await work.outcome()
            return pickled

    async def _ask(self, what: str, argument: object = None) -> None:
        await self.link.send(Kind.ASK, dumps((what, argument))).outcome()

    async def call(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Call a method and return its result."""
        work = self.link.send(Kind.CALL, _content(args, kwargs))
        try:
            return await work.outcome()
        finally:
            if not work.is_over:
                await work.leave(sys.exception())

    def send(self, work: RemoteCall, invocation: Invocation) -> None:
        """Send a call, in its context. Raises an error if that cannot be pickled."""
        CURRENT_CALL.set(work.call)
        self.link.send_call(work, _content(invocation.args, invocation.kwargs))

    async def stream(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> AsyncGenerator[object, None]:
        """Call a method that returns a generator and yield its items."""
        work = self.link.send(Kind.STREAM, _content(args, kwargs))
        try:
            while items := await work.take():
                for item in items:
                    yield item
                work.give()
        finally:
            if not work.is_over:
                await work.leave(sys.exception())

    async def http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request or WebSocket."""
        body, has_more, is_http = b"", False, scope["type"] == "http"
        if self._templates is not None:
            scope[TEMPLATES] = self._templates
        call = CURRENT_CALL.get()
        metadata = call.metadata
        if is_http and call.work.is_unread:
            has_more = True
        elif is_http:
            first = await receive()
            body, has_more = first.get("body", b""), first.get("more_body", False)
        head = envelope_of(metadata, span_headers()), scope_as_sent(scope)
        work = self.link.send(Kind.HTTP, encode((*head, outside(bytes(body)), has_more)))
        feeding: asyncio.Task[None] | None = None
        if has_more or not is_http:
            feeding = asyncio.get_running_loop().create_task(self._feed(work, receive))
        try:
            while messages := await work.take():  # at the client's pace
                for message in messages if len(messages) < 3 else _gathered(messages):
                    try:
                        await send(message)
                    except OSError:
                        if is_http:
                            raise
                        # As in a thread: its next `send` raises, and its end is its own.
                        self._close(work)
                work.give()
        finally:
            if not work.is_over:
                await work.leave(sys.exception())
            if feeding is not None:
                feeding.cancel()

    async def _feed(self, work: RemoteWork, receive: Receive) -> None:
        """Send the client's messages to user code, as fast as it takes them."""
        message: Message = {"type": ""}
        call = CURRENT_CALL.get()
        while not message["type"].endswith(".disconnect"):
            message = await receive()
            work.can_move = False
            content = message_as_sent(message)
            try:
                await work.window.take(size_of_content(content))
                work.frames.post(Kind.INPUT, work.number, content)
            except StreamClosedError:
                return  # the work has ended
            except OSError as problem:  # there is no memory or descriptor left for a large one
                name = call.metadata.deployment.name
                work.fail(unsendable(name, problem, message=message))
                return
        if call.is_interrupted:  # the client has left; else the application stops, and may send
            self._close(work)

    def _close(self, work: RemoteWork) -> None:
        """Tell user code that the client of its WebSocket has left. So far only `_feed` knows."""
        CURRENT_CALL.get().work.hear(is_heard=work.has_heard)
        work.frames.post(Kind.CLOSE, work.number)


def _content(args: Sequence[object], kwargs: Mapping[str, object]) -> Content:
    """Return the content of the current call's frame."""
    metadata = CURRENT_CALL.get().metadata
    try:
        return encode((envelope_of(metadata, span_headers()), args, kwargs))
    except Exception as problem:
        name = metadata.deployment.name
        raise unsendable(name, problem, args=args, kwargs=kwargs) from problem


def _gathered(messages: list[Message]) -> list[Message]:
    """Return the messages, with neighbouring chunks of a body as one message of several chunks."""
    gathered: list[Message] = []
    chunks: list[bytes] = []

    def close() -> None:
        if chunks:
            body = Chunks.of(list(chunks))
            gathered.append({"type": RESPONSE_BODY, "body": body, "more_body": True})
            chunks.clear()

    for message in messages:
        if message["type"] == RESPONSE_BODY and message["more_body"]:
            chunks.append(message["body"])
            continue
        close()
        gathered.append(message)
    close()
    return gathered
