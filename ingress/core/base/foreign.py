"""Looks at objects of user code and of libraries without running any of their code.

A proxy of Flask's or a lazy settings object of Django's raises, or begins to connect, if it is only
asked for its `__name__`, its `__class__` or its truth. So what only looks reads attributes as they
are stored, and goes by `type(value)`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType
from typing import Any, TypeVar

_WRITTEN_IN_C = (GetSetDescriptorType, MemberDescriptorType)
_DEPTH = 100
_mro = type.__dict__["__mro__"].__get__
_names = type.__dict__["__dict__"].__get__
_module = type.__dict__["__module__"].__get__
_qualname = type.__dict__["__qualname__"].__get__

logger = logging.getLogger("ingress")

T = TypeVar("T")


@contextmanager
def advisory(what: str) -> Iterator[None]:
    """Log the failure of what only advises: no start and no request may fail because of it."""
    try:
        yield
    except Warning:  # the user has made errors of warnings
        raise
    except Exception:
        logger.debug("%s ended early", what, exc_info=True)


def attempt(make: Callable[[], T], instead: Callable[[Exception], T]) -> T:
    """Return the result of `make`; if code of an object in it raises, that of `instead`."""
    try:
        return make()
    except Exception as error:  # any, of the object's own code: `instead` says what becomes of it
        return instead(error)


def mro_of(cls: type) -> tuple[type, ...]:
    """Return a class and its bases, in Python's order."""
    classes: tuple[type, ...] = _mro(cls)
    return classes


def title_of(cls: type) -> str:
    """Return the full name of a class, whatever its metaclass answers."""
    module: object = None
    with suppress(AttributeError):  # the body of the class has deleted it
        module = _module(cls)
    return f"{module}.{_qualname(cls)}" if type(module) is str else str(_qualname(cls))


def stored(value: object, name: str, default: Any = None) -> Any:
    """Return an attribute as it is stored: of a property, the property itself."""
    try:
        found = inspect.getattr_static(value, name, default)
        return found.__get__(value, type(value)) if type(found) in _WRITTEN_IN_C else found
    except Exception:  # of a slot that is not set, or of the code of a class or its metaclass
        return default


def undisguised(value: object) -> Any:
    """Return what a decorator's object stands for; `None` for another object in disguise.

    In disguise is an object if code of its class answers for its class or for all its attributes:
    `isinstance` and `getattr` would run that.
    """
    for _ in range(_DEPTH):
        if not any(map(_disguises, mro_of(type(value)))):
            return value
        value = stored(value, "__wrapped__")
    return None


def has_code_for(value: object, name: str) -> bool:
    """Return whether the class of an object has a special method, such as `__get__`."""
    return any(name in _names(cls) for cls in mro_of(type(value)))


def unwrapped(func: object) -> object:
    """Return the function inside of wrappers, by their `__wrapped__`; `None` for a circle."""
    for _ in range(_DEPTH):
        if (inner := stored(func, "__wrapped__")) is None:
            return func
        func = inner
    return None


def _disguises(cls: type) -> bool:
    own = _names(cls)
    if cls is object:
        return False
    reader = own.get("__getattribute__")
    return "__class__" in own or (reader is not None and type(reader) is not WrapperDescriptorType)


def copied(value: T) -> T:
    """Return a shallow copy; Python's `copy` asks the empty copy for attributes, by its class."""
    try:
        made: T = object.__new__(type(value))
    except TypeError:  # a class derived from one that is written in C
        return copy.copy(value)
    dict_of(made).update(dict_of(value))
    for slot, each in slots_of(value):
        slot.__set__(made, each)
    return made


def subclass(cls: type, own: dict[str, object]) -> Any:
    """Return a subclass with the class's name, of which user code is not told."""
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    bases = (cls,) if issubclass(cls, _Untold) else (_Untold, cls)
    return type(cls)(cls.__name__, bases, {**names, **own})


class _Untold:
    def __init_subclass__(cls, **options: object) -> None:
        """Keep a class of the user's from counting, or refusing, its subclasses."""


class _Instead:
    """An attribute in the place of one that an object shares with another."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self if instance is None else self.value

    def __set__(self, instance: object, value: object) -> None:
        self.value = value


def sharing(value: T, instead: dict[str, object]) -> T:
    """Return an object with other values of some attributes; all others it shares with `value`."""
    names: dict[str, object] = {name: _Instead(each) for name, each in instead.items()}
    try:
        made: T = object.__new__(subclass(type(value), names))
        object.__setattr__(made, "__dict__", dict_of(value))
    except TypeError:
        made = copied(value)
        for name, each in instead.items():
            object.__setattr__(made, name, each)
        return made
    for slot, each in slots_of(value):
        if slot.__name__ not in names:
            slot.__set__(made, each)
    return made


def dict_of(value: object) -> dict[str, object]:
    """Return the instance's own attributes; an empty dict if it has no place for any."""
    for cls in mro_of(type(value)):
        place = _names(cls).get("__dict__")
        if type(place) in _WRITTEN_IN_C:
            found = place.__get__(value, type(value))
            return found if isinstance(found, dict) else {}
        if place is not None:  # a property of that name, which is code of the class
            break
    return {}


def slots_of(value: object) -> Iterator[tuple[MemberDescriptorType, object]]:
    """Yield the slots of an object that are set, with their values."""
    for cls in mro_of(type(value)):
        own = _names(cls)
        if "__slots__" not in own:
            continue
        for slot in list(own.values()):
            if isinstance(slot, MemberDescriptorType):
                try:
                    found = slot.__get__(value, type(value))
                except AttributeError:  # not set
                    continue
                yield slot, found
