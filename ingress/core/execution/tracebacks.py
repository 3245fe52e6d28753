"""Tracebacks of user code: as Python prints them, without the frames between it and the server.

Between an endpoint and the server, an error passes through some thirty frames of this package,
FastAPI, Starlette and AnyIO. A traceback leaves them out, except those below the user's last frame,
because user code called them. If no frame is the user's, it shows all.

For each error, Python looks up the line of each frame, asks the file system whether the file has
changed, and parses the line to underline a part of it. Here the text of a frame is made once.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from functools import lru_cache
from itertools import islice
from os.path import dirname
from textwrap import indent
from types import CodeType, TracebackType

import anyio
import fastapi
import starlette

from ingress.core.execution.unreadable import readable

_BETWEEN = (
    dirname(dirname(dirname(__file__))),
    *(dirname(each.__file__ or "-") for each in (anyio, asyncio, fastapi, starlette)),
    contextlib.__file__ or "-",
    "<frozen ",
)
_HEAD = "Traceback (most recent call last):\n"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_EDGE = "  "
_CORNER = "+------------------------------------\n"
_MEMBERS = 15  # number of a group's members, and of repeats of a line, that Python shows
_REPEATS = 3


class Explanation(str):
    """A note on an error whose traceback has no line of the user's: it is shown in its place."""

    __slots__ = ()


def explanation_of(error: BaseException) -> Explanation | None:
    """Return the explanation among the notes of an error, `None` if it has none."""
    notes = getattr(error, "__notes__", ())
    return next((each for each in notes if isinstance(each, Explanation)), None)


def format_error(error: BaseException) -> str:
    """Return an error with its causes, its group's members and the frames that matter. Never fails.

    The text has no line break at the end, as `logging.LogRecord.exc_text`.
    """
    try:
        if explanation := explanation_of(readable(error)):
            return str(explanation)
        return _format(readable(error), set()).rstrip("\n")
    except Exception:  # a `RecursionError`, say, in groups of groups
        return f"{type(readable(error)).__name__}: its traceback cannot be shown"


def _format(error: BaseException, seen: set[int], depth: int = 0) -> str:
    parts: list[str] = []
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        is_group = isinstance(each, BaseExceptionGroup)
        parts.append(_group(each, seen, depth) if is_group else _indented(_one(each), depth))
        if each.__cause__ is not None:
            joint, each = _CAUSE, each.__cause__
        else:
            joint, each = _CONTEXT, None if each.__suppress_context__ else each.__context__
        parts.append(_indented(joint, depth))
    return "".join(reversed(parts[:-1]))


def _indented(text: str, depth: int) -> str:
    return indent(text, f"{_EDGE * depth}| ", lambda _: True) if depth else text


def _one(error: BaseException) -> str:
    """Return an error without its cause or context."""
    frames = _frames(error.__traceback__)
    return f"{_HEAD}{frames}{_last_lines(error)}" if frames else _last_lines(error)


def _group(group: BaseException, seen: set[int], depth: int) -> str:
    """Return a group and its members, indented and drawn as Python does."""
    assert isinstance(group, BaseExceptionGroup)
    text = _one(group)
    has_head = text.startswith(_HEAD)
    text = _indented(f"Exception Group {text}" if has_head else text, depth or 1)
    if has_head and not depth:
        text = text.replace("|", "+", 1)
    depth = depth or 1
    parts = [text]
    for number, member in enumerate(group.exceptions[: _MEMBERS + 1], 1):
        corner = "+-" if number == 1 else _EDGE
        title = number if number <= _MEMBERS else "..."
        parts.append(f"{_EDGE * depth}{corner}+---------------- {title} ----------------\n")
        if number > _MEMBERS:
            count = len(group.exceptions) - _MEMBERS
            more = f"and {count} more exception{'s' if count > 1 else ''}\n"
            parts.append(_indented(more, depth + 1))
        else:
            parts.append(_format(member, seen, depth + 1))
    if not parts[-1].endswith(_CORNER):  # a group that is the last member has drawn it
        parts.append(f"{_EDGE * (depth + 1)}{_CORNER}")
    return "".join(parts)


def _frames(last: TracebackType | None) -> str:
    """Return the text of the frames that matter, the one that raised at the end."""
    frames: list[tuple[CodeType, int, int]] = []
    while last is not None:
        frames.append((last.tb_frame.f_code, last.tb_lasti, last.tb_lineno))
        last = last.tb_next
    users = [n for n, (code, *_) in enumerate(frames) if not _is_between(code.co_filename)]
    if users:
        frames = [frames[n] for n in users] + frames[users[-1] + 1 :]
    parts: list[str] = []
    repeats = 0
    for n, frame in enumerate(frames):
        repeats = repeats + 1 if n and frame == frames[n - 1] else 0
        if repeats < _REPEATS:
            parts.append(_frame(*frame))
        elif n + 1 == len(frames) or frames[n + 1] != frame:
            parts.append(f"  [Previous line repeated {repeats - _REPEATS + 1} more times]\n")
    return "".join(parts)


@lru_cache(maxsize=1024)
def _is_between(file: str) -> bool:
    return file.startswith(_BETWEEN)


@lru_cache(maxsize=1024)
def _frame(code: CodeType, instruction: int, line: int) -> str:
    found = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    _, end_line, column, end_column = found
    summary = traceback.FrameSummary(
        code.co_filename,
        line,
        code.co_name,
        end_lineno=end_line,
        colno=column,
        end_colno=end_column,
    )
    return "".join(traceback.StackSummary.from_list([summary]).format())


def _last_lines(error: BaseException) -> str:
    """Return the last lines of a traceback: the type, the text and the notes."""
    if isinstance(error, SyntaxError | NameError | AttributeError | ImportError):
        return without_frames(error)  # has suggestions, source lines
    kind = type(error)
    text = _text(error)
    place = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    lines = f"{place}{kind.__qualname__}: {text}\n" if text else f"{place}{kind.__qualname__}\n"
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list | tuple):
        lines += "".join(f"{_text(note)}\n" for note in notes)
    return lines


def without_frames(error: BaseException) -> str:
    """Return the last lines as Python prints them, with its suggestions and a syntax error's line.

    From 3.12 on, Python looks for suggestions in the frames, so it has to have them.
    """
    shown = traceback.TracebackException(
        type(error), error, error.__traceback__, limit=0, compact=True
    )
    return "".join(shown.format_exception_only())


def _text(value: object) -> str:
    try:
        return str(value)
    except BaseException:
        return "<exception str() failed>"
