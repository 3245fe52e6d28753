"""Contents of ASGI messages: chunks that travel together, and buffers of user code."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Message


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
