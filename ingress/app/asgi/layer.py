"""Middleware that a user has put around a bound application, as a layer of its app.

    wrapped = CORSMiddleware(Api.bind(), allow_origins=["*"])       ingress run main:wrapped

Each replica has its own copies of the layers, which share the attributes of the user's objects, as
with `app.add_middleware`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.core.base.foreign import dict_of, sharing, slots_of

_DEPTH = 20
_OBJECTS = 10_000
_DISPATCH = "dispatch_func"  # of `BaseHTTPMiddleware`, which gives it what to call next


def attributes_of(found: object) -> dict[str, object]:
    """Return the attributes of an object, those in slots too."""
    return {**dict_of(found), **{slot.__name__: each for slot, each in slots_of(found)}}


class Layer:
    """One layer in front of an app: `attribute` of `around` is the app that it calls."""

    def __init__(self, app: ASGIApp, around: Any, attribute: str) -> None:
        self.app: ASGIApp = sharing(around, {attribute: app})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def layers_around(
    found: object, kind: type, around: tuple[object, ...] = ()
) -> list[tuple[object, str]]:
    """Return the objects around the one of a kind, the outermost first, with their attributes.

    The list is empty if there is none, or more than one, or one that keeps a method of itself: a
    copy would call the original by it. No code of the objects runs. `around` are the objects that
    led to `found`: references back to them are no ways to the one of that kind.
    """
    own, within = attributes_of(found), (*around, found)
    if any(
        isinstance(each, MethodType) and each.__self__ is found and name != _DISPATCH
        for name, each in own.items()
    ):
        return []
    ways = []
    for name, each in own.items():
        if isinstance(each, kind):
            ways.append([(found, name)])
        elif len(around) < _DEPTH and callable(each) and not isinstance(each, type):
            is_back = any(each is outer for outer in within)
            inner = [] if is_back else layers_around(each, kind, within)
            ways += [[(found, name), *inner]] if inner else []
    return ways[0] if len(ways) == 1 else []


def holds(found: object, kind: type) -> bool:
    """Return whether an object refers to one of a kind, by whatever way code may call it.

    That is by its attributes, as a partial or a closure, by a name in its code, or as a mount.
    """
    seen: dict[int, object] = {}
    waiting = [found]
    while waiting and len(seen) < _OBJECTS:
        each = waiting.pop()
        if issubclass(type(each), kind):
            return True
        if id(each) not in seen:
            seen[id(each)] = each
            waiting += _parts(each)
    return False


def _parts(found: object) -> Iterator[object]:
    match found:
        case FunctionType():
            code, names = found.__code__, found.__globals__
            yield from (names[each] for each in code.co_names if each in names)
            for cell in found.__closure__ or ():
                with suppress(ValueError):  # of a variable that was never assigned to
                    yield cell.cell_contents
        case MethodType():
            yield from (found.__self__, found.__func__)
        case partial():
            yield from (found.func, *found.args, *found.keywords.values())
        case list() | tuple():
            yield from found
        case dict():
            yield from dict.values(found)
        case type() | ModuleType():
            return
    yield from attributes_of(found).values()
