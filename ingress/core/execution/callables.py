"""The kind of a callable, from which `execution` decides where the callable runs.

All functions here look through `partial`, bound methods and callable objects, not through
`__wrapped__`: a sync wrapper around an `async def` is a `def`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import AsyncGeneratorType, CodeType, GeneratorType
from typing import Any

_GENERATORS = (GeneratorType, AsyncGeneratorType)  # a union takes a third more time to check


class Kind(Enum):
    """The kind of a callable, as it is written in the source."""

    FUNCTION = "def"
    COROUTINE = "async def"
    GENERATOR = "def generator"
    ASYNC_GENERATOR = "async def generator"

    @property
    def is_async(self) -> bool:
        return self in (Kind.COROUTINE, Kind.ASYNC_GENERATOR)


def mark_stream(func: Any) -> None:
    """Mark a `def` that returns an async generator as an `async def` generator.

    The mark is the function itself, so that it does not hold for a wrapper that copies attributes.
    """
    func.__ingress_stream__ = func


def kind(func: Callable[..., object]) -> Kind:
    """Return the kind of `func`."""
    func = underlying(func)
    if getattr(func, "__ingress_stream__", None) is func:
        return Kind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(func) or _is_marked(func):
        return Kind.COROUTINE
    if inspect.isasyncgenfunction(func):
        return Kind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(func):
        return Kind.GENERATOR
    return Kind.FUNCTION


def _is_marked(func: Callable[..., object]) -> bool:
    """Return whether a `def` is marked as one that returns a coroutine, in the way of Python 3.11.

    From 3.12 on the mark is `inspect.markcoroutinefunction`, which `inspect` reads itself.
    """
    mark = getattr(asyncio.coroutines, "_is_coroutine", None)
    return mark is not None and getattr(func, "_is_coroutine", None) is mark


def is_generator(value: object) -> bool:
    """Return whether `value` is a generator, sync or async."""
    return isinstance(value, _GENERATORS)


def name_of(func: Callable[..., object]) -> str:
    """Return `Class.method` or the function's name, without the scope it was defined in."""
    func = underlying(func)
    name = getattr(func, "__qualname__", None) or type(func).__qualname__
    return str(name).rpartition("<locals>.")[2]


def code_of(func: Callable[..., object]) -> CodeType | None:
    """Return the code object of `func`, `None` if it is not written in Python."""
    code = getattr(underlying(func), "__code__", None)
    return code if isinstance(code, CodeType) else None


def underlying(func: Callable[..., object]) -> Callable[..., object]:
    """Return the function, builtin or class that a call of `func` runs."""
    while True:
        if isinstance(func, partial):
            func = func.func
        elif inspect.ismethod(func):
            func = func.__func__
        elif inspect.isroutine(func) or inspect.isclass(func):
            return func
        else:
            func = type(func).__call__
