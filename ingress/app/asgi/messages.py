"""ASGI messages: their size, chunks that travel together, the request id, and close codes."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message, Send

from ingress.core.calls.channel import MAX_BYTES, Channel


class Chunks(bytes):
    """The bytes of several chunks. To middleware they are one chunk; the server sends `parts`."""

    parts: Sequence[bytes]

    @classmethod
    def of(cls, parts: Sequence[bytes]) -> bytes:
        """Return the chunks as one value, which is the chunk itself if there is only one."""
        if len(parts) == 1:
            return parts[0]
        chunks = cls(b"".join(parts))
        chunks.parts = parts
        return chunks


def parts_of(body: bytes) -> Sequence[bytes]:
    """Return the chunks of a body, one if it was made as one."""
    return body.parts if type(body) is Chunks else (body,)


def with_bytes(message: Message) -> Message:
    """Return a copy of a message, with its content copied to bytes unless that is bytes.

    User code may use the message and its buffer again before the server has sent the content.
    """
    copy = {**message}
    for name in ("body", "bytes"):
        content = message.get(name)
        if content is not None and type(content) is not bytes and type(content) is not Chunks:
            copy[name] = bytes(memoryview(content))  # `bytes` of a number makes zeros
    return copy


WEBSOCKET_MESSAGES = 32  # in each direction
WEBSOCKET_BYTES = 1024 * 1024

# Close codes of a WebSocket that user code has not closed itself: RFC 6455, 7.4.1, and its
# registry. Source of the first: Ray 2.60.0, proxy.py.
NORMAL = 1000  # its handler returned
GOING_AWAY = 1001  # its application stops
INTERNAL_ERROR = 1011  # its handler raised
SERVICE_RESTART = 1012  # its application is being replaced
TRY_AGAIN_LATER = 1013  # its application starts, or has no room


def channel_for(*, is_http: bool, max_bytes: int = MAX_BYTES) -> Channel[Message]:
    """Return the channel for one direction of a request or a WebSocket."""
    return Channel(max_bytes=max_bytes) if is_http else Channel(WEBSOCKET_MESSAGES, WEBSOCKET_BYTES)


def size_of(message: Message) -> int:
    return len(message.get("body") or message.get("bytes") or message.get("text") or b"")


def gathered(messages: list[Message]) -> list[Message | list[bytes]]:
    """Return the messages in order, and instead of neighbouring chunks of a body all their parts.

    So that the server writes to the socket once for all that are there. No chunk waits for another.
    """
    found: list[Message | list[bytes]] = []
    parts: list[bytes] | None = None
    for each in messages:
        if not each.get("more_body") or each["type"] != "http.response.body":
            found.append(each)
            parts = None
            continue
        if parts is None:
            parts = []
            found.append(parts)
        body = each.get("body", b"")
        if type(body) is bytes:  # as `parts_of`
            parts.append(body)
        else:
            parts += parts_of(body)
    return found


def with_request_id(start: Message, request_id: str) -> Message:
    """Return the start of a response with the header `x-request-id`, added if it has none."""
    headers = list(start.get("headers", ()))
    for name, _ in headers:
        if name == b"x-request-id":
            break
    else:
        headers.append((b"x-request-id", request_id.encode()))
    return {**start, "headers": headers}


def adding_request_id(send: Send, request_id: str) -> Send:
    """Return a `send` that adds the header `x-request-id` to a response without it."""

    async def send_with_request_id(message: Message) -> None:
        if message["type"].endswith("http.response.start"):  # also that of a refused WebSocket
            message = with_request_id(message, request_id)
        await send(message)

    return send_with_request_id
