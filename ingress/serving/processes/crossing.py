"""Exceptions as they cross between two processes, and errors of values that cannot cross.

An exception crosses with its causes, contexts, members, notes and the frames of its traceback, each
exception as a record of its own. Its constructor is not called there, which may want other
arguments than `args`: the class crosses by name, and `args`, the attributes and the slots are set.
A class with a `__reduce__` of its own is pickled by that. A part that cannot be pickled crosses as
its text. An exception whose class the other process does not find becomes a `RayServeException`.

A cause is often an attribute too, and has the exception as its context. So a record refers to other
exceptions by their numbers, also in its attributes.

All frames are one note, which grows by those of each process, up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple

from ingress.core.base.foreign import attempt
from ingress.core.execution.execution import contained
from ingress.exceptions import RayServeException, UserCodeExit
from ingress.serving.processes.code import culprit
from ingress.serving.processes.frames import Buffers, Content, Frames, dumps, encode, loads
from ingress.serving.processes.messages import Frame
from ingress.telemetry.mistakes import last_line as described
from ingress.telemetry.tracebacks import (
    ExplainingNote,
    RemoteTraceback,
    frames_of,
    headline,
    notes_of,
    shortened,
    text_of,
)

_LINKED = 100  # exceptions of one error, from which on a chain is shortened
_NOTES = 20  # of one exception
_KEPT = 8_000  # characters of a note, or of the text of a part

# Python's own descriptors; a subclass may override these names.
_ARGS: Any = BaseException.__dict__["args"]
_DICT: Any = BaseException.__dict__["__dict__"]
_CAUSE: Any = BaseException.__dict__["__cause__"]
_CONTEXT: Any = BaseException.__dict__["__context__"]
_SUPPRESSES: Any = BaseException.__dict__["__suppress_context__"]
_NOT_SENT = (
    AttributeError.__dict__["obj"],  # any object, which Python does not pickle either
    *(BaseExceptionGroup.__dict__[name] for name in ("message", "exceptions")),
)


class _Record(NamedTuple):
    """One exception. `cause`, `context` and the members of `group` are numbers of records.

    `content` is the pickle of `args`, attributes and slots, or, if `is_whole`, that of the
    exception. `kind` is the pickle of its class, empty if that cannot be sent.
    """

    told: str
    kind: bytes
    is_whole: bool
    content: bytes
    frames: Sequence[str]
    last_lines: str
    notes: Sequence[str]
    cause: int | None
    context: int | None
    suppresses: bool
    group: tuple[str, Sequence[int]] | None


def pickled_error(error: BaseException, at_most: int | None = None) -> bytes:
    """Return an error as a content. One with more than `at_most` bytes is described."""
    content = _Sending(error).content()
    if at_most is not None and len(content) > at_most:
        told = RayServeException(_told(error)[: _KEPT // 4])
        return _Sending(told.with_traceback(error.__traceback__)).content()
    return content


@contextmanager
def failing(frames: Frames, number: int) -> Iterator[None]:
    """Send an error to the other process, as the end of a call or the answer to a question."""
    try:
        yield
    except Exception as error:  # of user code, also of its arguments: the other process raises it
        frames.post(Frame.FAILED, number, pickled_error(error))


def unpickled_error(content: bytes | memoryview) -> BaseException:
    """Return the error that `pickled_error` was given, with its traceback as a note.

    Never fails: one that cannot be read, or that a loop would not survive, is described.
    """
    return attempt(
        lambda: _checked(_Arrival(loads(content)).error()),
        lambda problem: unreadable("the exception that user code raised", problem),
    )


def unreadable(what: str, problem: Exception) -> RayServeException:
    """Return the error of a value that arrived: as its class is known to the other process only."""
    return RayServeException(f"{what} cannot be read: {described(problem)}")


def read(what: str, content: memoryview, buffers: Buffers = ()) -> Any:
    """Return the value of a content. Raises as `unreadable`."""
    try:
        return loads(content, buffers)
    except Exception as problem:
        raise unreadable(what, problem) from None


def unsendable(deployment: str, problem: Exception, **values: object) -> RayServeException:
    """Return the error of values that cannot be pickled, which names the part at fault.

    `deployment` is the one that gets them or makes them; a value's name begins the path to a part.
    """
    paths = (culprit(value, name) for name, value in values.items())
    path = next(filter(None, paths), next(iter(values)))
    has_advice = (OSError, RayServeException)  # a response says how it can be passed on
    advice = (
        '; send plain data instead, make the object where it is needed, or use isolation="thread"'
    )
    return RayServeException(
        f"{path}, of a call of deployment {deployment!r}, cannot be sent to another process: "
        f"{described(problem)}{'' if isinstance(problem, has_advice) else advice}"
    )


def item_as_sent(deployment: str, item: object) -> Content:
    """Return an item of a stream as a content. Raises as `unsendable`."""
    try:
        return encode(as_sent(item))
    except Exception as problem:  # of the code of its class
        raise unsendable(deployment, problem, item=item) from problem


def as_sent(value: object) -> object:
    """Return a value, or, for an exception, an object that is unpickled as an equal exception."""
    kind = type(value)
    if issubclass(kind, Exception) and not (_has_reduce(kind) or issubclass(kind, StopIteration)):
        return _Sent(value)
    return value


@dataclass(eq=False, slots=True)
class _Sent:
    """The exception that a call returns. It is not raised, and arrives as a value."""

    _error: object

    def __reduce__(self) -> tuple[object, ...]:
        return unpickled_error, (pickled_error(self._error),)  # type: ignore[arg-type]


def _checked(error: BaseException) -> BaseException:
    """Return an error that arrived as it may leave user code. Raises an `Exception` for others."""
    if issubclass(type(error), StopIteration):  # no future takes it
        raise TypeError(f"its pickle has the {type(error).__name__} {error!r:.100}")
    if isinstance(error, UserCodeExit) and error.original is not error.__cause__:
        error.__cause__ = error.original  # one that its own code made has none
    return contained(error, "user code", is_task=False)


def _told(error: BaseException) -> str:
    return " ".join(headline(error)[:_KEPT].split())


def _has_reduce(kind: type) -> bool:
    names = {"__reduce__", "__reduce_ex__"}
    return any(names & vars(each).keys() for each in kind.__mro__ if each.__module__ != "builtins")


def _slots(kind: type) -> dict[str, Any]:
    """Return the attributes of a class that are not in the `__dict__` of an exception."""
    return {
        name: slot
        for each in reversed(kind.__mro__)  # a subclass may override the name of a slot
        if each is not BaseException
        for name, slot in vars(each).items()
        if isinstance(slot, MemberDescriptorType | GetSetDescriptorType)
        if not name.startswith("__") and slot not in _NOT_SENT
    }


class _Sending:
    """The exceptions of one error that is sent, by their numbers."""

    def __init__(self, error: BaseException) -> None:
        self._errors: list[BaseException] = []
        self._numbers: dict[int, int] = {}
        self._number(error)

    def content(self) -> bytes:
        records = []
        for error in self._errors:  # to which each record may add
            try:
                records.append(tuple(self._record(error)))
            except Exception as problem:  # of the code of its class: the text says it
                told = f"{type(error).__name__} (it cannot be sent: {described(problem)})"
                empty = _Record(told, b"", False, b"", (), "", (), None, None, False, None)
                records.append(tuple(empty))
        return dumps(records)

    def _number(self, error: BaseException) -> int:
        """Return the number of an exception, which gets one if it has none."""
        number = self._numbers.setdefault(id(error), len(self._errors))
        if number == len(self._errors):
            self._errors.append(error)
        return number

    def _link(self, error: BaseException | None) -> int | None:
        """Return the number of a cause or context; from a limit on, that of the first of all."""
        seen: set[int] = set()
        following = error
        while following is not None and id(following) not in seen:
            error = following
            if len(self._errors) < _LINKED or id(error) in self._numbers:
                break
            seen.add(id(error))
            cause = _CAUSE.__get__(error)
            following = _CONTEXT.__get__(error) if cause is None else cause  # which may be false
        return None if error is None else self._number(error)

    def _record(self, error: BaseException) -> _Record:
        told, kind, content, is_whole = _told(error), b"", b"", False
        group = None
        if isinstance(error, BaseExceptionGroup):
            group = error.message, [self._number(each) for each in error.exceptions]
        try:
            content, is_whole = self._content(error)
            kind = self._pickled(type(error))
        except Exception as problem:  # of the code of its class: the text says it
            told += f" (it cannot be sent to another process: {described(problem)})"
        notes = [
            (ExplainingNote if isinstance(each, ExplainingNote) else str)(text_of(each)[:_KEPT])
            for each in notes_of(error)
        ]
        if len(notes) > _NOTES:
            notes[_NOTES // 2 : -_NOTES // 2] = ["[other notes are left out]"]
        return _Record(
            told, kind, is_whole, content, frames_of(error), shortened(headline(error)), notes,
            self._link(_CAUSE.__get__(error)), self._link(_CONTEXT.__get__(error)),
            _SUPPRESSES.__get__(error), group,
        )  # fmt: skip

    def _content(self, error: BaseException) -> tuple[bytes, bool]:
        """Return the content of a record, and whether it is the whole exception."""
        kind = type(error)
        if _has_reduce(kind):
            with suppress(Exception):  # of its own `__reduce__`: its parts are sent below
                content = self._pickled(error, whole=error)
                if issubclass(type(self._read(content)), BaseException):
                    return content, True
        args = _ARGS.__get__(error)
        state = {name: each for name, each in _DICT.__get__(error).items() if name != "__notes__"}
        for name, slot in _slots(kind).items():
            with suppress(AttributeError):
                value = slot.__get__(error)
                # Of Python's own, `None` may be an empty one, which is not to be set.
                if value is not None or slot.__objclass__.__module__ != "builtins":
                    state[name] = value
        try:
            content = self._pickled((args, state))
            self._read(content)
        except Exception:  # of the code of a part: each part is looked at
            sent = {name: self._part(each) for name, each in state.items()}
            content = self._pickled((tuple(map(self._part, args)), sent))
        return content, False

    def _part(self, value: object) -> object:
        """Return a part of an exception, or its text if that cannot be sent."""
        try:
            self._read(self._pickled(value))
            return value
        except Exception:  # of the code of its class, which may raise any
            return text_of(value, repr, f"<{type(value).__name__}>")[:_KEPT]

    def _pickled(self, value: object, whole: BaseException | None = None) -> bytes:
        """Return the pickle of a part. Numbers stand for its exceptions, except for `whole`."""

        def number_of(obj: object) -> int | None:
            is_error = issubclass(type(obj), BaseException) and obj is not whole
            return self._number(obj) if is_error else None  # type: ignore[arg-type]

        return dumps(value, number_of)

    def _read(self, content: bytes) -> Any:
        return loads(content, find=self._errors.__getitem__)


class _Arrival:
    """The exceptions of one error that arrived, by their numbers."""

    def __init__(self, records: Sequence[Sequence[Any]]) -> None:
        self._records = [_Record(*each) for each in records]
        self._made: dict[int, BaseException] = {}
        self._empty: set[int] = set()

    def error(self) -> BaseException:
        for number, record in enumerate(self._records):
            self._find(number)
            if number in self._empty:
                self._attempt(partial(self._filled, number, record), number, record)
        for number, record in enumerate(self._records):
            self._finish(self._made[number], record)
        return self._made[0]

    def _find(self, number: int) -> BaseException:
        """Return an exception, which may be empty yet. One that cannot be made is described."""
        if number not in self._made:
            record = self._records[number]
            self._made[number] = RayServeException(record.told)  # for one that contains itself
            if record.kind:
                self._attempt(partial(self._new, number, record), number, record)
        return self._made[number]

    def _attempt(self, make: Callable[[], BaseException], number: int, record: _Record) -> None:
        """Make an exception; if the code of its class or of a part raises, the text says it."""
        self._made[number] = attempt(
            make,
            lambda problem: RayServeException(
                f"{record.told} (it cannot be read: {described(problem)})"
            ),
        )

    def _new(self, number: int, record: _Record) -> BaseException:
        kind = loads(record.kind, find=self._find)
        if not issubclass(kind, BaseException):
            raise TypeError(f"its class is {kind!r:.100}")
        if record.is_whole:
            made = loads(record.content, find=self._find)
            if not issubclass(type(made), BaseException):
                raise TypeError(f"its pickle has the {type(made).__name__} {made!r:.100}")
            return made  # type: ignore[no-any-return]
        self._empty.add(number)
        base = kind  # Python's own class, whose `__new__` is safe for a class of Python code
        while base.__module__ != "builtins":
            base = base.__base__
        group = record.group
        given = () if group is None else (group[0], [self._find(each) for each in group[1]])
        return base.__new__(kind, *given)  # type: ignore[no-any-return]

    def _filled(self, number: int, record: _Record) -> BaseException:
        error = self._made[number]
        args, state = loads(record.content, find=self._find)
        _ARGS.__set__(error, args)
        for name, slot in _slots(type(error)).items():
            if name in state:
                with suppress(AttributeError, TypeError):  # it may be read-only
                    slot.__set__(error, state.pop(name))
        _DICT.__get__(error).update(state)
        return error

    def _finish(self, error: BaseException, record: _Record) -> None:
        notes = list(record.notes)
        if record.frames:
            notes.append(RemoteTraceback(record.frames, record.last_lines))
        # Not `add_note`: a class may refuse new attributes, and one object may arrive twice.
        attributes = _DICT.__get__(error)
        attributes.pop("__notes__", None)
        if notes:
            attributes["__notes__"] = notes
        cause, context = record.cause, record.context
        _CAUSE.__set__(error, None if cause is None else self._made[cause])
        _CONTEXT.__set__(error, None if context is None else self._made[context])
        _SUPPRESSES.__set__(error, record.suppresses)
