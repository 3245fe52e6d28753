"""Errors of user code that raise another error when their attributes are read.

Python, Starlette, AnyIO, uvicorn and `logging` read an error's attributes: in `isinstance`, to
print the error, to find its cause. If that raises, it raises in their code, not in user code: a
future is never set, a connection never closed, an event loop ends. So an unreadable error is
replaced before any of them reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, TypeVar
from weakref import WeakSet

from ingress.exceptions import UnreadableError

T = TypeVar("T")
_READ_BY_OTHERS = (
    "__class__",
    "__cause__",
    "__context__",
    "__suppress_context__",
    "__traceback__",
    "__notes__",
)

_Known = dict[int, tuple[BaseException, BaseException]]
"""By `id`, an error, kept alive so that the id stays valid, and its readable replacement."""

_OVERRIDES = frozenset((*_READ_BY_OTHERS, "__getattribute__", "__getattr__", "__bool__", "__len__"))
_PLAIN: WeakSet[type[BaseException]] = WeakSet()


class Attribute(Protocol[T]):
    """A descriptor of Python's own."""

    def __get__(self, error: BaseException, owner: type | None = None, /) -> T: ...

    def __set__(self, error: BaseException, value: T, /) -> None: ...


# Python's own descriptors, for reading and setting; a subclass may override these names.
_LINKS: tuple[Attribute[BaseException | None], ...] = (
    BaseException.__dict__["__cause__"],
    BaseException.__dict__["__context__"],
)
_TRACEBACK: Attribute[TracebackType | None] = BaseException.__dict__["__traceback__"]
_SUPPRESSES: Attribute[bool] = BaseException.__dict__["__suppress_context__"]
_MEMBERS: Attribute[Sequence[BaseException]] = BaseExceptionGroup.__dict__["exceptions"]


def readable(error: BaseException) -> BaseException:
    """Return an error that is safe to read: `error` itself, or its replacement.

    Its causes and contexts are then readable, too.
    """
    return _readable(error, {})


def _readable(error: BaseException, known: _Known) -> BaseException:
    """Return the readable form of an error; `known` has those of the errors already seen."""
    first = _look_at(error, known)
    open_ends = [first]
    while open_ends:
        each = open_ends.pop()
        for link in _LINKS:
            following = link.__get__(each)
            if following is None:
                continue
            is_new = id(following) not in known
            standing = _look_at(following, known)
            if standing is not following:
                suppresses = _SUPPRESSES.__get__(each)  # setting the cause sets it
                link.__set__(each, standing)
                _SUPPRESSES.__set__(each, suppresses)
            if is_new:
                open_ends.append(standing)
    return first


def _look_at(error: BaseException, known: _Known) -> BaseException:
    if id(error) not in known:
        known[id(error)] = error, error  # before its members, whose context may be the group
        standing = error if _is_readable(error, known) else _stand_in(error)
        known[id(error)] = error, standing
    return known[id(error)][1]


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return an error's traceback, even if its class overrides the attribute."""
    return _TRACEBACK.__get__(error)


def _is_readable(error: BaseException, known: _Known) -> bool:
    kind = type(error)
    if kind not in _PLAIN:
        try:
            if _is_plain(kind):
                _PLAIN.add(kind)
            else:
                for name in _READ_BY_OTHERS:
                    getattr(error, name, None)
                bool(error)
        except BaseException:
            return False
    return not issubclass(kind, BaseExceptionGroup) or _has_readable_members(error, known)


def _has_readable_members(group: BaseException, known: _Known) -> bool:
    """Return whether all members of a group are readable; members cannot be replaced."""
    try:
        return all(
            id(member) in known or _readable(member, known) is member
            for member in _MEMBERS.__get__(group)
        )
    except RecursionError:  # deeply nested groups
        return False


def _is_plain(kind: type[BaseException]) -> bool:
    """Return whether the class overrides none of the attributes that others read."""
    bases = (base for base in kind.__mro__ if base not in (BaseException, object))
    return all(_OVERRIDES.isdisjoint(vars(base)) for base in bases)


def _stand_in(error: BaseException) -> UnreadableError:
    kind = type(error)
    try:
        name = f"{kind.__module__}.{kind.__qualname__}"
    except BaseException:  # raised by its metaclass
        name = "an exception"
    made = UnreadableError(name)
    for link in _LINKS:
        link.__set__(made, link.__get__(error))
    _SUPPRESSES.__set__(made, _SUPPRESSES.__get__(error))
    return made.with_traceback(traceback_of(error))
