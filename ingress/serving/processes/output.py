"""The output of a child: its standard output and error, and the log records between their lines.

    child    `LogLines`, the handler of its loggers, writes each record as a line of JSON on stderr
    server   `ChildOutput` passes lines on, and gives records to the server's own loggers

A record keeps its place between the other lines of its child, and is not lost if the process ends
in the next moment. A mark that the server makes for each child tells records from other lines: a
program that writes text of a client cannot forge one. No pickle crosses here.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from selectors import EVENT_READ, DefaultSelector
from typing import IO

from ingress.telemetry.logs import RequestFilter, logger
from ingress.telemetry.logs.streams import is_json_object, json_stream

LINES = 20
TAIL = 4096  # characters of a line that are kept
_SEPARATOR = "\x1e"  # RFC 7464: it begins a record of JSON in a text
_PIECE = 3500  # characters of ASCII: a pipe takes 4,096 bytes in one piece
_CHUNK = 65536
_LINE = 4096  # bytes: no line of a record is longer
_RECORD = 1 << 24  # bytes of a record that are kept; a program may never end one
_LOCAL = {"args", "exc_info", "msg", "relativeCreated", "levelname", "process"}


class LogLines(logging.Handler):
    """The handler of a child's loggers. `mark` is of its server, `name` the replica."""

    def __init__(self, mark: str, name: str) -> None:
        super().__init__()
        self.addFilter(RequestFilter())
        self._mark = _SEPARATOR + mark
        self._name = name
        self._texts = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = json.dumps(self._fields(record), default=str)
            while text:
                piece, text = text[:_PIECE], text[_PIECE:]
                line = f"{self._mark}{'+' if text else '.'}{piece}\n"
                os.write(2, line.encode("ascii"))
        except Exception:  # as each handler of `logging`
            self.handleError(record)

    def _fields(self, record: logging.LogRecord) -> dict[str, object]:
        fields = {name: value for name, value in vars(record).items() if name not in _LOCAL}
        if record.exc_info and not record.exc_text:
            fields["exc_text"] = self._texts.formatException(record.exc_info)
        return {**fields, "msg": record.getMessage(), "processName": self._name}


def levels() -> dict[str, int]:
    """Return the levels of this process's loggers, for a child."""
    return {"": logging.root.level} | {each.name: each.level for each in _loggers() if each.level}


def _loggers() -> list[logging.Logger]:
    """Return the loggers of this process, without the root's."""
    known = list(logging.root.manager.loggerDict.values())
    return [each for each in known if isinstance(each, logging.Logger)]


def take_over(handler: LogLines, levels: Mapping[str, int]) -> None:
    """Send all records to the server, at its levels.

    Handlers that the user's module added when it was imported are dropped: the server has imported
    it, too, and its handlers get the records.
    """
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    for each in (logging.root, *_loggers()):
        for old in list(each.handlers):
            if old is not handler:
                each.removeHandler(old)
        if each is logging.root or not each.propagate:
            each.addHandler(handler)


class ChildOutput:
    """The output of one child, read in the thread that calls `pass_on`.

    Any thread reads `last_lines`: of both streams and of the records, as they came. `owner` are the
    replica's fields of a log record, which each line gets that the child prints.
    """

    __slots__ = ("_mark", "_owner", "_process", "_record", "last_lines")

    def __init__(self, mark: str, owner: Mapping[str, str]) -> None:
        self._owner = owner
        self.last_lines: tuple[str, ...] = ()
        self._mark = (_SEPARATOR + mark).encode()
        self._record = bytearray()  # its first pieces
        self._process = 0

    def pass_on(self, process: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Pass on all that a process writes, until both streams have ended."""
        self._process = process
        fields = {**self._owner, "process": process}
        with stdout, stderr, DefaultSelector() as selector:
            for stream, to in ((stdout, 1), (stderr, 2)):
                selector.register(stream, EVENT_READ, _Stream(to, fields))
            while selector.get_map():
                for key, _ in selector.select():
                    chunk = os.read(key.fd, _CHUNK)
                    if chunk:
                        self._feed(key.data, chunk)
                    else:
                        selector.unregister(key.fileobj)
                        self._end(key.data)

    def _feed(self, stream: _Stream, chunk: bytes) -> None:
        data, stream.held = stream.held + chunk, b""
        while (start := data.find(self._mark)) >= 0:
            end = data.find(b"\n", start)
            if end < 0 and len(data) - start > _LINE:  # it is no record: pass on all of it
                start = -1
                break
            if end < 0:
                break
            self._keep(stream.pass_on(data[:start]))
            self._add_piece(data[start + len(self._mark) : end])
            data = data[end + 1 :]
        else:
            # The last bytes may be the first of a mark.
            start = data.rfind(self._mark[:1], 1 - len(self._mark))
        if start >= 0:
            data, stream.held = data[:start], data[start:]
        self._keep(stream.pass_on(data))

    def _end(self, stream: _Stream) -> None:
        """Take what a stream held at its end: a line that the process did not end."""
        held, stream.held = stream.held, b""
        self._keep(stream.pass_on(held))
        self._keep(stream.end())

    def _add_piece(self, piece: bytes) -> None:
        if len(self._record) < _RECORD:
            self._record += piece[1:]
        if piece[:1] == b".":
            text, self._record = self._record, bytearray()
            try:
                self._handle(json.loads(text))
            except Exception:  # of a handler
                logger.exception("a log record of a child could not be handled")

    def _handle(self, fields: dict[str, object]) -> None:
        record = logging.makeLogRecord({**fields, "process": self._process})
        record.levelname = logging.getLevelName(record.levelno)
        lines = record.getMessage().splitlines() + (record.exc_text or "").splitlines()
        self._keep([f"{record.levelname}:{record.name}:{line}" for line in lines[:1]] + lines[1:])
        receiver = logging.getLogger(record.name)
        if receiver.isEnabledFor(record.levelno):
            receiver.handle(record)

    def _keep(self, lines: list[str]) -> None:
        if lines:
            kept = (line[-TAIL:] for line in lines[-LINES:])
            self.last_lines = (*self.last_lines, *kept)[-LINES:]


class _Stream:
    """One stream of a child: `held` may be a part of a record, `_line` was passed on already.

    As text, a line ends with its replica and its process, as a log record does, unless it is a JSON
    object; the beginning of a line, such as a progress bar's, is passed on at once.
    """

    __slots__ = ("_fields", "_line", "_suffix", "_to", "held")

    def __init__(self, to: int, fields: Mapping[str, object]) -> None:
        self.held = b""
        self._to = to
        self._line = b""
        self._fields = fields
        name = f"{fields['deployment']}#{fields['replica']}"
        self._suffix = f" [{name} {fields['process']}]\n".encode()

    def pass_on(self, data: bytes) -> list[str]:
        """Write to the same stream of this process, and return the lines that are complete."""
        if not data:
            return []
        written = json_stream(self._to)
        if written is None:
            try:
                os.write(self._to, self._named(data))
            except OSError:
                pass  # it is closed: the child must not wait for that
        *lines, self._line = (self._line + data[-_CHUNK:]).split(b"\n")
        if written is not None:
            for each in lines:
                written.put(each.decode(errors="replace"), self._fields)
        self._line = self._line[-TAIL:]
        return [each.decode(errors="replace") for each in lines]

    def end(self) -> list[str]:
        """Return the line that has no end, if there is one, and write it if it was not."""
        if not self._line:
            return []
        text = self._line.decode(errors="replace")
        if (written := json_stream(self._to)) is not None:
            written.put(text, self._fields)
        return [text]

    def _named(self, data: bytes) -> bytes:
        """Return what is written with the replica at the end of each line that is not empty."""
        first, *others = data.split(b"\n")
        named, line = bytearray(first), self._line + first
        for each in others:
            is_named = line and not (line[:1] == b"{" and is_json_object(line))
            named += self._suffix if is_named else b"\n"
            named += each
            line = each
        return bytes(named)
