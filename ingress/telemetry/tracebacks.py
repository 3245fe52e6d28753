"""Tracebacks of user code: as Python prints them, without the frames between it and the server.

Between an endpoint and the server, an error passes through some thirty frames of this package,
FastAPI, Starlette, AnyIO and uvicorn. A traceback leaves them out, except those below the user's
last frame, because user code called them. If no frame is the user's, it shows all. The frames of an
error that came from another process follow those of this one.

A text has at most 36 lines: with the lines of its record and of its request, a failure has less
than 40 in the log. The causes and the members of a group share them. Frames of libraries are left
out first, then those in the middle.

For each error, Python looks up the line of each frame, asks the file system whether the file has
changed, and parses the line to underline a part of it. Here the text of a frame is made once.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from os.path import dirname
from textwrap import indent
from types import CodeType

import anyio
import fastapi
import starlette

from ingress.core.base.foreign import attempt
from ingress.core.execution.errors import readable

_BETWEEN = (
    dirname(dirname(__file__)),
    *(dirname(each.__file__ or "-") for each in (anyio, asyncio, fastapi, starlette)),
    contextlib.__file__ or "-",
    dirname(getattr(find_spec("uvicorn"), "origin", None) or "-"),  # a child does not import it
    "<frozen ",
)
_HEAD = "Traceback (most recent call last):\n"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_EDGE = "  "
_CORNER = "+------------------------------------\n"
_MEMBERS = 15  # number of a group's members, and of repeats of a line, that Python shows
_REPEATS = 3
_MOST = 36  # lines of a text
_LONGEST = 2_000  # characters of a line
_LONGEST_OF_FRAME = 300
_LAST_LINES = 12  # of one error: its text and its notes
_JOINT = 3  # lines of `_CAUSE`
_FEW = 7  # lines: the head, one frame, a gap, two last lines
_GAP = "  [other frames are left out]\n"
_REMOTE = "\nThe traceback in the replica's process:\n"


class ExplainingNote(str):
    """A note on an error whose traceback has no line of the user's: it is shown in its place."""


def explanation_of(error: BaseException) -> ExplainingNote | None:
    """Return the explanation among the notes of an error, `None` if it has none."""
    return next((each for each in _notes(error) if isinstance(each, ExplainingNote)), None)


def _notes(error: BaseException) -> Sequence[object]:
    notes = getattr(error, "__notes__", None)  # user code may set anything
    return notes if isinstance(notes, list | tuple) else ()


class RemoteTraceback(str):
    """A note with an error's frames in the processes that it came through, and its last lines."""

    frames: Sequence[str]
    last_lines: str

    def __new__(cls, frames: Sequence[str], last_lines: str) -> RemoteTraceback:
        text = f"{_REMOTE}{_HEAD if frames else ''}{''.join(frames)}{last_lines}"
        made = super().__new__(cls, text.rstrip("\n"))
        made.frames, made.last_lines = frames, last_lines
        return made

    def __reduce__(self) -> tuple[object, ...]:  # user code may pickle it for another program
        return str, (str(self),)


def notes_of(error: BaseException) -> Sequence[object]:
    """Return the notes of an error that are not `RemoteTraceback`."""
    return [each for each in _notes(error) if not isinstance(each, RemoteTraceback)]


def remote_of(error: BaseException) -> RemoteTraceback | None:
    """Return the note with the frames of other processes, `None` if there is none."""
    return next((each for each in _notes(error) if isinstance(each, RemoteTraceback)), None)


def format_error(error: BaseException) -> str:
    """Return an error with its causes, its group's members and the frames that matter. Never fails.

    The text has no line break at the end, as `logging.LogRecord.exc_text`.
    """

    def text() -> str:
        explanation = explanation_of(readable(error))
        found = explanation or _format(readable(error), set(), _MOST).rstrip("\n")
        return shortened(str(found), _MOST)

    # A `RecursionError`, say, in groups of groups.
    return attempt(
        text, lambda _: f"{type(readable(error)).__name__}: its traceback cannot be shown"
    )


def shortened(text: str, most: int = _LAST_LINES, longest: int = _LONGEST) -> str:
    """Return a text with at most so many lines, the last one among them, and none of them long."""
    has_end = text.endswith("\n")
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > most:
        gap = f"[{len(lines) - most + 1} lines are left out]"
        lines = [*lines[: most - 2], gap, lines[-1]] if most > 2 else lines[:most]
    lines = [
        each if len(each) <= longest else f"{each[:longest]}... [{len(each)} characters]"
        for each in lines
    ]
    return "\n".join(lines) + "\n" * has_end


def _format(error: BaseException, seen: set[int], most: int, depth: int = 0) -> str:
    chain = chain_of(error, seen)
    shown = chain[: max(1, (most + _JOINT) // (_FEW + _JOINT))]
    if 1 < len(shown) < len(chain):
        shown[-1] = chain[-1]  # the first of all, to which the others are due
    parts: list[str] = []
    for n, each in enumerate(shown, 1):
        rest = len(shown) - n
        share = (most - _JOINT * rest) // (rest + 1)
        is_group = isinstance(each, BaseExceptionGroup)
        text = _group(each, seen, share, depth) if is_group else _indented(_one(each, share), depth)
        most -= text.count("\n") + _JOINT
        parts.append(text)
        if rest:
            joint = _CONTEXT if each.__cause__ is None else _CAUSE
            if rest == 1 and len(shown) < len(chain):
                joint = f"\n[{len(chain) - len(shown)} exceptions between these are left out]\n\n"
            parts.append(_indented(joint, depth))
    return "".join(reversed(parts))


def chain_of(error: BaseException, seen: set[int] | None = None) -> list[BaseException]:
    """Return an error and those to which it is due, the first of all at the end."""
    seen = set() if seen is None else seen
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        chain.append(each)
        cause = each.__cause__  # which may be false
        each = cause if cause is not None or each.__suppress_context__ else each.__context__
    return chain


def _indented(text: str, depth: int) -> str:
    return indent(text, f"{_EDGE * depth}| ", lambda _: True) if depth else text


def _one(error: BaseException, most: int) -> str:
    """Return an error without its cause or context."""
    last_lines = _last_lines(error)
    frames = frames_of(error, most - 1)
    room = most - 1 - sum(each.count("\n") for each in frames)
    if frames and last_lines.count("\n") > room:
        room = max(most // 3, room)
        frames = frames_of(error, most - 1 - min(room, last_lines.count("\n")))
    if not frames or frames == [_GAP]:
        return shortened(last_lines, most)
    return f"{_HEAD}{''.join(frames)}{shortened(last_lines, room)}"


def _group(group: BaseException, seen: set[int], most: int, depth: int) -> str:
    """Return a group and its members, indented and drawn as Python does."""
    assert isinstance(group, BaseExceptionGroup)
    text = _one(group, max(_FEW, most // 3))
    has_head = text.startswith(_HEAD)
    text = _indented(f"Exception Group {text}" if has_head else text, depth or 1)
    if has_head and not depth:
        text = text.replace("|", "+", 1)
    depth = depth or 1
    parts = [text]
    most -= text.count("\n") + 1
    for number, member in enumerate(group.exceptions, 1):
        rest = len(group.exceptions) - number
        corner = "+-" if number == 1 else _EDGE
        is_shown = number <= _MEMBERS and most >= (_FEW if rest else 2)
        title = number if is_shown else "..."
        parts.append(f"{_EDGE * depth}{corner}+---------------- {title} ----------------\n")
        if not is_shown:
            more = f"and {rest + 1} more exception{'s' if rest else ''}\n"
            parts.append(_indented(more, depth + 1))
            break
        share = max(_FEW - 3, most // (rest + 1) - 1) if rest else most - 1
        parts.append(_format(member, seen, share, depth + 1))
        most -= parts[-1].count("\n") + 1
    if not parts[-1].endswith(_CORNER):  # a group that is the last member has drawn it
        parts.append(f"{_EDGE * (depth + 1)}{_CORNER}")
    return "".join(parts)


def frames_of(error: BaseException, most: int = _MOST) -> list[str]:
    """Return the texts of the frames that matter, the one that raised at the end.

    They have at most so many lines. There are none if the error has none of the user's, and is due
    to another one that has some: FastAPI's about an `HTTPException` in a response that has begun.
    """
    frames = _frames(error)
    remote = remote_of(error)
    beyond = [] if remote is None else [*remote.frames]
    users = [n for n, (code, *_) in enumerate(frames) if not _is_between(code.co_filename)]
    if users or beyond:
        below = [] if beyond else frames[users[-1] + 1 :]
        parts = _texts([frames[n] for n in users])
        beyond = beyond or _texts(below)
        if remote is None and _size(parts) + _size(beyond) > most:
            beyond = beyond[-1:]
    elif any(remote_of(each) or _has_users_frame(each) for each in chain_of(error)[1:]):
        return []
    else:
        parts = _texts(frames)
    return fitting(parts + beyond, most)


def _frames(error: BaseException) -> list[tuple[CodeType, int, int]]:
    frames: list[tuple[CodeType, int, int]] = []
    last = error.__traceback__
    while last is not None:
        frames.append((last.tb_frame.f_code, last.tb_lasti, last.tb_lineno))
        last = last.tb_next
    return frames


def _has_users_frame(error: BaseException) -> bool:
    return any(not _is_between(code.co_filename) for code, *_ in _frames(error))


def _size(parts: Sequence[str]) -> int:
    return sum(each.count("\n") for each in parts)


def _texts(frames: Sequence[tuple[CodeType, int, int]]) -> list[str]:
    parts: list[str] = []
    repeats = 0
    for n, frame in enumerate(frames):
        repeats = repeats + 1 if n and frame == frames[n - 1] else 0
        if repeats < _REPEATS:
            parts.append(_frame(*frame))
        elif n + 1 == len(frames) or frames[n + 1] != frame:
            parts.append(f"  [Previous line repeated {repeats - _REPEATS + 1} more times]\n")
    return parts


def fitting(parts: list[str], most: int) -> list[str]:
    """Return the parts, without some in the middle if they have more lines than that."""
    if _size(parts) <= most:
        return parts
    rest, first, last = deque(parts), list[str](), list[str]()
    most -= 1  # for the gap
    for n in range(len(parts)):
        each = rest[0] if n % 2 else rest[-1]
        most -= each.count("\n")
        if most < 0:
            break
        if n % 2:
            first.append(rest.popleft())
        else:
            last.insert(0, rest.pop())
    return [*first, _GAP, *last]


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
    text = "".join(traceback.StackSummary.from_list([summary]).format())
    return shortened(text, longest=_LONGEST_OF_FRAME)


def _last_lines(error: BaseException) -> str:
    """Return the last lines of a traceback: the type, the text and the notes."""
    return headline(error) + "".join(f"{text_of(note)}\n" for note in notes_of(error))


def headline(error: BaseException) -> str:
    """Return the type and the text as Python prints them, with its suggestion of another name."""
    kind, remote = type(error), remote_of(error)
    if issubclass(kind, SyntaxError | NameError | AttributeError | ImportError):
        # From 3.12 on, Python looks for suggestions in the frames, so it has to have them.
        shown = traceback.TracebackException(
            kind, error, error.__traceback__, limit=0, compact=True
        )
        shown.__notes__ = []
        lines = "".join(shown.format_exception_only())
    else:
        text = text_of(error)
        place = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
        lines = f"{place}{kind.__qualname__}: {text}\n" if text else f"{place}{kind.__qualname__}\n"
    if remote is not None and remote.last_lines.startswith(lines.rstrip("\n")):
        return remote.last_lines  # with a suggestion that only that process can make
    return lines


def without_frames(error: BaseException) -> str:
    """Return the last lines as Python prints them, with its suggestions and a syntax error's line.

    They are not many, also of a long text.
    """
    return shortened(_last_lines(error))


def text_of(
    value: object,
    written: Callable[[object], str] = str,
    instead: str = "<exception str() failed>",
) -> str:
    """Return the text of a value. Never fails."""
    try:
        return written(value)
    except BaseException:  # of user code, as Python's `traceback` does
        return instead
