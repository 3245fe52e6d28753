"""Applications in constructor arguments, and what is put into their places.

They are found in arguments, in containers, and in attributes of the user's own objects, at any
depth. An object that holds one is copied, so that the user's stays as it is; all other objects are
passed as they are. Objects whose Python code says how they are pickled (`__reduce__`), such as
loggers and enums, are not looked into: their attributes are not what a copy of them has. Source:
Ray 2.60.0, _private/build_app.py, which looks at pickled arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, TypeVar

from ingress.core.base.foreign import dict_of, slots_of, stored

T = TypeVar("T")
K = TypeVar("K")

CONTAINERS = (dict, list, tuple, set, frozenset)
_WHOLE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_ATOMS = frozenset(map(id, (type(None), bool, int, float, complex, str, bytes, bytearray)))


def replaced(value: T, kind: type[K], replace: Callable[[K], object]) -> T:
    """Return `value` with `replace(each)` in the place of each instance of `kind` in it.

    What holds none is returned as it is. Raises `ValueError` for a container that holds one and
    contains itself, `TypeError` for an object that holds one and cannot be copied.
    """
    whole: T = _Replacement(kind, replace, _holders(value, kind)).of(value)
    return whole


class _Replacement(Generic[K]):
    """One pass over arguments. Each object that holds an instance of `kind` is copied once."""

    def __init__(self, kind: type[K], replace: Callable[[K], object], holders: set[int]) -> None:
        self._kind, self._replace, self._holders = kind, replace, holders
        self._copies: dict[int, Any] = {}

    def of(self, value: Any, above: tuple[int, ...] = ()) -> Any:
        if issubclass(type(value), self._kind):
            return self._replace(value)
        if id(value) not in self._holders:
            return value
        if issubclass(type(value), CONTAINERS):
            return self._container(value, above)
        return self._object(value)

    def _container(self, value: Any, above: tuple[int, ...]) -> Any:
        if id(value) in above:
            raise ValueError(
                f"the arguments of an application contain themselves: {value!r} is inside itself; "
                "pass a container without a cycle"
            )
        parts = list(value.values() if isinstance(value, dict) else value)
        above = (*above, id(value))
        made = [self.of(part, above) for part in parts]
        if all(new is old for new, old in zip(made, parts, strict=True)):
            return value
        if isinstance(value, dict):
            return dict(zip(value, made, strict=True))
        if isinstance(value, tuple) and hasattr(value, "_make"):  # a namedtuple
            return type(value)._make(made)
        return next(kind for kind in CONTAINERS if isinstance(value, kind))(made)

    def _object(self, value: T) -> T:
        if id(value) in self._copies:
            known: T = self._copies[id(value)]
            return known
        made: T = _new_like(value)
        self._copies[id(value)] = made
        attributes = dict_of(value)
        if attributes:
            dict_of(made).update({name: self.of(each) for name, each in attributes.items()})
        for slot, each in slots_of(value):
            slot.__set__(made, self.of(each))
        return made


def _holders(root: object, kind: type) -> set[int]:
    """Return the ids of the objects and containers from which an instance of `kind` is reached."""
    parents: dict[int, list[int]] = {}
    seen: dict[int, object] = {id(root): root}
    holders: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        value = waiting.pop()
        for part in _parts(value):
            if id(type(part)) in _ATOMS:
                continue
            if issubclass(type(part), kind):
                holders.add(id(value))
                continue
            parents.setdefault(id(part), []).append(id(value))
            if id(part) not in seen:
                seen[id(part)] = part  # kept, so that no other object gets its id
                waiting.append(part)
    unfinished = list(holders)
    while unfinished:
        above = [each for each in parents.get(unfinished.pop(), ()) if each not in holders]
        holders.update(above)
        unfinished += above
    return holders


def _parts(value: Any) -> Iterator[object]:
    cls = type(value)
    if issubclass(cls, dict):
        yield from list(dict.values(value))
    elif issubclass(cls, CONTAINERS):
        kind: Any = next(kind for kind in CONTAINERS if issubclass(cls, kind))
        yield from list(kind.__iter__(value))
    elif _is_looked_into(cls):
        yield from list(dict_of(value).values())
        yield from (each for _, each in slots_of(value))


def _is_looked_into(cls: type) -> bool:
    if issubclass(cls, _WHOLE) or str(stored(cls, "__module__")).partition(".")[0] == "ingress":
        return False
    return not any(isinstance(each, FunctionType) for each in (cls.__reduce__, cls.__reduce_ex__))


def _new_like(value: T) -> T:
    cls = type(value)
    try:
        return object.__new__(cls)
    except TypeError:
        pass  # a class derived from one that is written in C
    try:
        return copy.copy(value)
    except Exception as error:
        raise TypeError(
            f"an argument of type {cls.__name__} holds an application and cannot be copied: "
            f"{error}; pass the application as an argument of its own"
        ) from error
