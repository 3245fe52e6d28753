"""Chunks of a body that travel together and are sent apart."""

from __future__ import annotations

from collections.abc import Sequence


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
