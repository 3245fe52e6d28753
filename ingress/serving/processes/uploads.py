"""Uploaded files in the arguments and results of calls, as they cross to another process."""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, UploadFile


def dumps_with_uploads(
    make: Any,
    value: object,
    protocol: int,
    buffer_callback: Callable[[pickle.PickleBuffer], object] | None,
) -> bytes:
    """Return the pickle of a value that may have uploads, which are on disk if they are large.

    `make` is the class of the pickler. A file is mapped, not read: its content goes from there into
    the shared memory of the frame.
    """

    class Pickler(make):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, UploadFile):
                return _reduced(obj)
            override = getattr(super(), "reducer_override", None)  # cloudpickle's
            return NotImplemented if override is None else override(obj)

    with io.BytesIO() as file:
        Pickler(file, protocol, buffer_callback=buffer_callback).dump(value)
        return file.getvalue()


def _reduced(upload: UploadFile) -> tuple[Callable[..., UploadFile], tuple[object, ...]]:
    file = upload.file
    position = file.tell()
    content: bytes | mmap.mmap
    try:
        file.flush()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, AttributeError):  # it has no descriptor, or is empty
        file.seek(0)
        content = file.read()
        file.seek(position)
    values = pickle.PickleBuffer(content), position, upload.size, upload.filename
    return _uploaded, (type(upload), *values, upload.headers.raw)


def _uploaded(
    kind: type[UploadFile],
    content: bytes | memoryview,
    position: int,
    size: int | None,
    filename: str | None,
    headers: list[tuple[bytes, bytes]],
) -> UploadFile:
    # In memory: the disk would block the loop.
    file = io.BytesIO(content)
    file.seek(position)
    return kind(file, size=size, filename=filename, headers=Headers(raw=headers))
