"""Errors of user code: those that cannot be read, and those of objects of another event loop.

Python, Starlette, AnyIO, uvicorn and `logging` read an error's attributes: in `isinstance`, to
print the error, to find its cause. If that raises, it raises in their code, not in user code: a
future is never set, a connection never closed, an event loop ends. So an unreadable error is
replaced before any of them reads it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ingress.core.base.foreign import title_of
from ingress.exceptions import UnreadableError

_READ_BY_OTHERS = (
    "__class__",
    "__cause__",
    "__context__",
    "__suppress_context__",
    "__traceback__",
    "__notes__",
)

# Python's own descriptors, for reading and setting; a subclass may override these names.
_LINKS: tuple[Any, ...] = (
    BaseException.__dict__["__cause__"],
    BaseException.__dict__["__context__"],
)
_TRACEBACK: Any = BaseException.__dict__["__traceback__"]
_SUPPRESSES: Any = BaseException.__dict__["__suppress_context__"]
_MEMBERS: Any = BaseExceptionGroup.__dict__["exceptions"]


def readable(error: BaseException) -> BaseException:
    """Return an error that is safe to read: `error` itself, or its replacement.

    Its causes and contexts are then readable, too, and those of a group's members.
    """
    # By `id`, an error, kept alive so that the id stays valid, and its readable form.
    known: dict[int, tuple[BaseException, BaseException]] = {}
    seen: set[int] = set()

    def standing_for(each: BaseException) -> BaseException:
        if id(each) not in known:
            known[id(each)] = each, each if _is_readable(each) else _stand_in(each)
        return known[id(each)][1]

    first = standing_for(error)
    waiting = [first]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if issubclass(type(each), BaseExceptionGroup):
            waiting += _MEMBERS.__get__(each)  # readable, as the group is
        for link in _LINKS:
            if (following := link.__get__(each)) is None:
                continue
            standing = standing_for(following)
            if standing is not following:
                suppresses = _SUPPRESSES.__get__(each)  # setting the cause sets it
                link.__set__(each, standing)
                _SUPPRESSES.__set__(each, suppresses)
            waiting.append(standing)
    return first


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return an error's traceback, even if its class overrides the attribute."""
    found: TracebackType | None = _TRACEBACK.__get__(error)
    return found


def _is_readable(error: BaseException) -> bool:
    """Return whether an error is readable, with all members of a group: none can be replaced."""
    try:
        for name in _READ_BY_OTHERS:
            getattr(error, name, None)
        bool(error)
        is_group = issubclass(type(error), BaseExceptionGroup)
        return not is_group or all(map(_is_readable, _MEMBERS.__get__(error)))
    except BaseException:  # of the code of the error's class, or of groups that are nested deeply
        return False


def _stand_in(error: BaseException) -> UnreadableError:
    made = UnreadableError(title_of(type(error)))
    for link in _LINKS:
        link.__set__(made, link.__get__(error))
    _SUPPRESSES.__set__(made, _SUPPRESSES.__get__(error))
    return made.with_traceback(traceback_of(error))


OTHER_LOOP = (
    "An object that belongs to another event loop was used: each replica has a loop of its own. "
    "Create it in __init__ or in the lifespan, or let the replicas share one loop: "
    '@serve.deployment(loop="shared"). See docs/async-objects.md.'
)
_CAUSES = 8  # looked at: causes may form a cycle
_TEXTS = ("different event loop", "different loop")


def note_other_loop(error: BaseException) -> None:
    """Add the note to an error that asyncio raised for an object of another loop, or its cause."""
    each: BaseException | None = error
    for _ in range(_CAUSES):
        if each is None:
            return
        text = each.args[0] if isinstance(each, RuntimeError) and each.args else ""
        if isinstance(text, str) and any(part in text for part in _TEXTS):
            if not is_noted(error):
                error.add_note(OTHER_LOOP)
            return
        each = each.__cause__ or each.__context__


def is_noted(error: BaseException) -> bool:
    return OTHER_LOOP in getattr(error, "__notes__", ())
