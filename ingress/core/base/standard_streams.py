"""Standard output and standard error of a server: a failed write is dropped and has no effect.

A full disk, a closed pipe or a closed terminal must not end a server, fail a request that prints,
or change the exit code.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

_STANDARD = (0, 1, 2)


class LossyFile(io.FileIO):
    """A file whose writes never fail. Each write is tried, because a disk may have room again."""

    def write(self, data: object) -> int:
        try:
            written: int | None = super().write(data)  # type: ignore[arg-type]
        except OSError:
            written = None
        # None: a non-blocking terminal or pipe is full.
        return memoryview(data).nbytes if written is None else written  # type: ignore[arg-type]


def make_lossy() -> None:
    """Make writes to standard output and standard error of this process never fail.

    Call this before other code keeps one of the streams. A stream that a program has replaced
    stays.
    """
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:  # closed: the next file or socket would get its number, and the output
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
        errors="backslashreplace",  # a character outside of the encoding must not fail either
        line_buffering=is_by_line,
        write_through=is_unbuffered,
    )
