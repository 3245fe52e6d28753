"""Uploads in the arguments and results of calls by handle, to a child process."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import SpooledTemporaryFile
from typing import Any

import pytest
from fastapi import UploadFile
from starlette.datastructures import Headers

import ingress as serve
from tests.servers import bind, forking


@serve.deployment(isolation="process")
class Reader:
    async def read(self, upload: UploadFile) -> list[Any]:
        position, rest = upload.file.tell(), await upload.read()
        await upload.seek(0)
        first = await upload.read(5)
        facts = [upload.filename, upload.content_type, upload.size, upload.headers["x-note"]]
        return [position, len(rest), rest[-5:], first, *facts]

    async def back(self, uploads: dict[str, list[UploadFile]]) -> UploadFile:
        return uploads["some"][0]


@pytest.fixture(scope="module")
def handle() -> Iterator[Any]:
    with forking():
        yield serve.run(bind(Reader), route_prefix=None)


def upload_of(content: bytes, max_size: int) -> UploadFile:
    """Return an upload as Starlette makes it: on disk if it is larger than `max_size`."""
    file: Any = SpooledTemporaryFile(max_size=max_size)  # noqa: SIM115 - the upload's
    file.write(content)
    file.seek(3)
    headers = Headers({"content-type": "text/plain", "x-note": "kept"})
    return UploadFile(file, size=len(content), filename="a.txt", headers=headers)


@pytest.mark.parametrize("size", [0, 1_000, 3_000_000], ids=["empty", "in memory", "on disk"])
def test_an_upload_crosses_with_its_content_name_and_headers(handle: Any, size: int) -> None:
    content = b"first" + bytes(size) + b"final" if size else b""
    sent = upload_of(content, max_size=1024 * 1024 if size else 1)

    got = handle.read.remote(sent).result()

    facts = ["a.txt", "text/plain", len(content), "kept"]
    assert got == [3, max(0, len(content) - 3), content[-5:], content[:5], *facts]
    assert sent.file.tell() == 3
    back = handle.back.remote({"some": [sent]}).result()
    assert (back.filename, back.file.tell()) == ("a.txt", 3)
    back.file.seek(0)
    assert back.file.read() == content
    back.file.close()
    sent.file.close()
