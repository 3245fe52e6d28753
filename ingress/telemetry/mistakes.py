"""Errors of a module while it is imported or its classes are constructed, for its author.

Only the frames of the author's own files are shown, each with its line, and one last line. The
frames of the command line, of importlib and of libraries say nothing about the mistake.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterable
from traceback import FrameSummary, StackSummary
from types import CodeType

from ingress.core.base.libraries import is_library
from ingress.core.execution.errors import readable
from ingress.telemetry.tracebacks import (
    chain_of,
    fitting,
    format_error,
    remote_of,
    without_frames,
)

_CAUSE = "which caused:\n"
_FRAME = re.compile(r'  File "(.*)", line (\d+)')
_MOST = 24  # lines of frames
NEEDS_MULTIPART = 'Form data requires "python-multipart"'  # FastAPI's text


def format_mistake(error: BaseException) -> str:
    """Return the frames of the user's files and the error in one line, its cause first."""
    chain = chain_of(readable(error))
    return f"\n{_CAUSE}".join(users_frames(each) + last_line(each) for each in reversed(chain))


def format_failed_start(error: BaseException) -> str:
    """Return the error that made a start fail, as `format_mistake`, and the whole failure."""
    cause = error.__cause__
    failure = without_frames(error).rstrip("\n")
    if cause is None:
        return failure
    chain = chain_of(readable(cause))
    if any(isinstance(each, BaseExceptionGroup) for each in chain):
        return f"{format_error(cause)}\n\n{failure}"
    before = [users_frames(each) + last_line(each) for each in reversed(chain[1:])]
    return f"\n{_CAUSE}".join([*before, users_frames(chain[0]) + failure])


def described(error: BaseException) -> str:
    """Return the type and text of an error of user code, even if its `__str__` raises too."""
    return without_frames(error).strip()


def users_frames(error: BaseException) -> str:
    """Return the frames of the user's files, two lines each; the last frame if there are none.

    A frame that only begins a class is left out: its body is the next frame, and is named by it.
    Of many frames, those in the middle are left out.
    """
    linecache.checkcache()  # a file may have changed since its last mistake
    walked = [*traceback.walk_tb(error.__traceback__)]
    frames = [
        FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)  # no columns: no carets
        for n, (frame, line) in enumerate(walked)
        if n + 1 == len(walked) or not _is_class_body(walked[n + 1][0].f_code)
    ]
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = FrameSummary(error.filename, error.lineno, "<module>", line=error.text)
        return "".join(StackSummary.from_list([*filter(_is_users, frames), place]).format())
    users = [each for each in frames if _is_users(each)]
    remote = _remote_frames(error)
    if not remote:
        users = users or frames[-1:]
    return "".join(fitting(StackSummary.from_list(users).format() + remote, _MOST))


def place_of(error: BaseException) -> str:
    """Return file and line of the user's last frame, as `file:line`; empty if there is none."""
    if remote := _remote_frames(error):
        found = _FRAME.match(remote[-1])
        return f"{found[1]}:{found[2]}" if found else ""
    users = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def _remote_frames(error: BaseException) -> list[str]:
    """Return the frames of the user's files in the processes that an error came from."""
    note = remote_of(error)
    frames = [] if note is None else note.frames
    return [
        "".join(each.splitlines(keepends=True)[:2])  # without the carets
        for each in frames
        if (found := _FRAME.match(each)) and is_users(found[1])
    ]


def last_line(error: BaseException) -> str:
    """Return the error's type and text in one line."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    line = " ".join(without_frames(error).split())
    return line if "Did you" in line else line + _hint(error)


def _hint(error: BaseException) -> str:
    """Return the nearest name to one that does not exist; from 3.12 on, Python mostly adds it."""
    name: object = None
    with contextlib.suppress(Exception):  # a property of the user's may fail
        name = getattr(error, "name", None)
    if not isinstance(name, str):
        return ""
    names: Iterable[str] = ()
    if isinstance(error, AttributeError):
        with contextlib.suppress(Exception):  # a `__dir__` of the user's may fail
            names = dir(error.obj)
    elif isinstance(error, NameError):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        last = frames[-1] if frames else sys._getframe()
        names = [*last.f_locals, *last.f_globals, *last.f_builtins]
    by_letters = {str(each).lower(): each for each in names}
    nearest = difflib.get_close_matches(name.lower(), by_letters, n=1)
    return f". Did you mean: {by_letters[nearest[0]]!r}?" if nearest else ""


def _is_class_body(code: CodeType) -> bool:
    return code.co_name != "<module>" and not code.co_flags & inspect.CO_NEWLOCALS


def _is_users(frame: FrameSummary) -> bool:
    return is_users(frame.filename)


def is_users(file: str) -> bool:
    """Return whether a file is the author's own, by its name."""
    return not (file.startswith("<") or is_library(file))
