"""Detection of writes to an instance's attributes that overwrite another thread's write.

    thread 1   reads version 1             writes: it has read 1, and there is 2: an update is lost
    thread 2                reads, writes version 2

A switch to another thread follows every read of a watched attribute, or of a key of a watched dict,
so that races show within a few calls.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

SWITCHES_PER_CALL = 1000
"""Largest number of switches in a call, so that a loop over an attribute ends."""

_WHOLE = object()
"""The key of accesses to a whole container."""

_READ_KEY = ("__contains__", "__getitem__", "get", "index", "count")
_READ_ALL = ("__iter__", "__len__", "copy", "items", "keys", "values")
_WRITE_KEY = ("__delitem__", "__setitem__", "add", "discard", "pop", "remove", "setdefault")
_WRITE_ALL = (
    *("append", "appendleft", "clear", "extend", "insert", "move_to_end", "popitem", "popleft"),
    "update",
)
CONTAINERS = (dict, OrderedDict, Counter, defaultdict, list, set, deque)

Line = tuple[str, int, str]
"""File, line and attribute."""


@dataclass(slots=True)
class Writes:
    """The writes of one line: their count, their threads, and the number that lost an update."""

    count: int = 0
    lost: int = 0
    threads: set[int] = field(default_factory=set)


T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Trace:
    """The reads and writes of watched attributes. Thread-safe.

    A thread that has not begun a call is not recorded.
    """

    attributes: frozenset[str]
    writes: dict[Line, Writes] = field(default_factory=dict)
    _versions: Counter[Hashable] = field(default_factory=Counter)
    _thread: threading.local = field(default_factory=threading.local)
    # Held for a few lines, so that a value and its version belong together. Reentrant: the
    # `__setattr__` of the user's class may set another attribute.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def begin_call(self) -> None:
        """Forget the reads of this thread's last call."""
        self._thread.reads = {}
        self._thread.switches = SWITCHES_PER_CALL

    def read(self, slot: Hashable, get: Callable[[], T]) -> T:
        """Return the result of `get`, and switch to another thread."""
        reads = getattr(self._thread, "reads", None)
        if reads is None:
            return get()
        try:
            with self._lock:
                reads[slot] = self._versions[slot]  # also for a missing value
                return get()
        finally:
            if self._thread.switches > 0:
                self._thread.switches -= 1
                time.sleep(0)

    def write(
        self, slots: tuple[Hashable, ...], attribute: str, frame: FrameType, put: Callable[[], T]
    ) -> T:
        """Run `put`. Its write is lost if a slot has changed since this call read it."""
        reads = getattr(self._thread, "reads", None)
        if reads is None:
            return put()
        line = (frame.f_code.co_filename, frame.f_lineno, attribute)
        with self._lock:
            writes = self.writes.setdefault(line, Writes())
            writes.count += 1
            writes.threads.add(threading.get_ident())
            writes.lost += any(
                slot in reads and reads[slot] != self._versions[slot] for slot in slots
            )
            for slot in slots:
                self._versions[slot] += 1
                reads[slot] = self._versions[slot]
            return put()


def traced_class(cls: type, trace: Trace) -> type:
    """Return a subclass whose instances record accesses to the watched attributes."""
    watched = frozenset(
        name for name in trace.attributes if not isinstance(getattr(cls, name, None), property)
    )

    def __getattribute__(self: object, name: str) -> object:
        if name not in watched:
            return super(traced, self).__getattribute__(name)
        return trace.read(name, lambda: super(traced, self).__getattribute__(name))

    def __setattr__(self: object, name: str, value: object) -> None:
        put = super(traced, self).__setattr__
        if name in watched:
            trace.write((name,), name, sys._getframe(1), lambda: put(name, value))
        else:
            put(name, value)

    def __delattr__(self: object, name: str) -> None:
        put = super(traced, self).__delattr__
        if name in watched:
            trace.write((name,), name, sys._getframe(1), lambda: put(name))
        else:
            put(name)

    own = (__getattribute__, __setattr__, __delattr__)
    names: dict[str, object] = {"__slots__": (), "__module__": cls.__module__}
    traced: Any = type(cls.__name__, (cls,), names | {each.__name__: each for each in own})
    made: type = traced
    return made


def traced_state(state: Mapping[str, object], trace: Trace) -> dict[str, Any]:
    """Return attributes in which the watched containers are recording copies."""
    return {
        name: _traced_container(name, value, trace) if name in trace.attributes else value
        for name, value in state.items()
    }


def _traced_container(attribute: str, value: Any, trace: Trace) -> object:
    base: Any = type(value)
    if base not in CONTAINERS:
        return value
    names = {
        name: _telling(getattr(base, name), name, attribute, trace)
        for name in (*_READ_KEY, *_READ_ALL, *_WRITE_KEY, *_WRITE_ALL)
        if hasattr(base, name)
    }
    traced: Any = type(base.__name__, (base,), names)
    if base is defaultdict:
        return traced(value.default_factory, value)
    return traced(value, value.maxlen) if base is deque else traced(value)


def _telling(method: Callable[..., T], name: str, attribute: str, trace: Trace) -> Callable[..., T]:
    is_of_key = name in _READ_KEY or name in _WRITE_KEY

    @wraps(method)
    def call(self: object, *args: object, **kwargs: object) -> T:
        def step() -> T:
            return method(self, *args, **kwargs)

        whole = (attribute, _WHOLE)
        slot: Hashable = whole
        if is_of_key and args:
            try:
                slot = (attribute, hash(args[0]))  # not the key, whose `__eq__` is the user's
            except TypeError:
                pass  # no key
        if name in _READ_KEY or name in _READ_ALL:
            return trace.read(slot, step)
        return trace.write(tuple({slot, whole}), attribute, sys._getframe(1), step)

    return call
