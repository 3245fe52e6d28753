"""Errors of a module while it is imported or its classes are constructed, for its author.

Only the frames of the author's own files are shown, each with its line, and one last line. The
frames of the command line, of importlib and of libraries say nothing about the mistake.
"""

from __future__ import annotations

import sysconfig
import traceback
from os.path import dirname
from traceback import FrameSummary, StackSummary

from ingress.execution.unreadable import readable

_PACKAGE = dirname(dirname(__file__))
_LIBRARIES = tuple({path for name, path in sysconfig.get_paths().items() if "lib" in name})
_CAUSE = "which caused:\n"
NEEDS_MULTIPART = 'Form data requires "python-multipart"'  # FastAPI's text


def format_mistake(error: BaseException) -> str:
    """Return the frames of the user's files and the error in one line, its cause first."""
    parts: list[str] = []
    seen: set[int] = set()
    each: BaseException | None = readable(error)
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        parts.append(users_frames(each) + last_line(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return f"\n{_CAUSE}".join(reversed(parts))


def format_failed_start(error: BaseException) -> str:
    """Return the user's frames of the error that made a start fail, and the failure in one line."""
    cause = error.__cause__
    return ("" if cause is None else users_frames(readable(cause))) + last_line(error)


def described(error: BaseException) -> str:
    """Return the type and text of an error of user code, even if its `__str__` raises too."""
    return "".join(traceback.format_exception_only(error)).strip()


def users_frames(error: BaseException) -> str:
    """Return the frames of the user's files, two lines each; the last frame if there are none."""
    frames = [
        FrameSummary(each.filename, each.lineno, each.name)  # without columns, hence carets
        for each in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = FrameSummary(error.filename, error.lineno, "<module>", line=error.text)
        return "".join(StackSummary.from_list([*filter(_is_users, frames), place]).format())
    users = [each for each in frames if _is_users(each)]
    return "".join(StackSummary.from_list(users or frames[-1:]).format())


def place_of(error: BaseException) -> str:
    """Return file and line of the user's last frame, as `file:line`; empty if there is none."""
    users = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each)]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""


def last_line(error: BaseException) -> str:
    """Return the error's type and text in one line."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return " ".join("".join(traceback.format_exception_only(error)).split())


def _is_users(frame: FrameSummary) -> bool:
    file = frame.filename
    return not (file.startswith((_PACKAGE, "<")) or file.startswith(_LIBRARIES))
