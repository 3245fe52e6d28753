"""Standard output and standard error of a server: a write that fails is lost, and changes nothing.

The disk is full, the reader of the pipe has gone, the terminal is closed: none of it is a reason to
end a server, to fail a request that prints, or to change the exit code.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

_STANDARD = (0, 1, 2)


class LossyFile(io.FileIO):
    """A file whose writes never fail. The next write is tried again: a disk may get room."""

    def write(self, data: object) -> int:
        try:
            written: int | None = super().write(data)  # type: ignore[arg-type]
        except OSError:
            written = None
        # None: a terminal or pipe that does not block is full.
        return memoryview(data).nbytes if written is None else written  # type: ignore[arg-type]


def make_lossy() -> None:
    """Have no write to standard output or standard error of this process fail.

    Before anything else keeps one of them. A stream that a program has put in their place stays.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:  # closed: the next file or socket would get its number, and what is printed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lossy(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lossy(sys.stderr, 2)


def _lossy(stream: TextIO | None, number: int) -> TextIO:
    raw = LossyFile(number, "w", closefd=False)
    is_unbuffered = False
    encoding = "utf-8"
    is_by_line = number == 2
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError, ValueError):
            stream.flush()
        encoding, is_by_line = stream.encoding, stream.line_buffering
        is_unbuffered = stream.write_through
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=encoding,
        errors="backslashreplace",  # a name that the encoding does not know ends no server either
        line_buffering=is_by_line,
        write_through=is_unbuffered,
    )
