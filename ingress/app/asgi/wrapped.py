"""The user's layers around an app of FastAPI's or Starlette's, copied around another app."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp

from ingress.app.asgi.guard import Guard, guard_below
from ingress.app.asgi.methods import contents_of

_LIBRARIES = ("fastapi.", "starlette.", "ingress.")
_NO_LAYERS = (BaseRoute, Router, Starlette, ModuleType, type)

Swap = Callable[[Any], Any]
"""A function from a value in a layer to its replacement, `None` to look into the value."""


def rebased(stack: Any, end: ASGIApp, new_end: ASGIApp) -> Any:
    """Return a copy of a chain of middlewares with another end and guards in between."""
    if stack == end:
        return new_end
    if not hasattr(stack, "app"):  # not a chain
        kept = put_around(stack, lambda value: new_end if value == end else None)
        return stack if kept is None else kept
    layer, inner = copy.copy(stack), rebased(stack.app, end, new_end)
    if not isinstance(layer, Guard) and not isinstance(inner, Guard):
        inner = guard_below(type(layer))(inner)
    layer.app = inner
    return layer


def take_methods(router: Router, clone: Router) -> None:
    """Give a copy of a router the layers that user code has put around the methods of the router.

    Raises `TypeError` for a layer in which the method is not found.
    """

    def swap(value: Any) -> Any:
        is_own = isinstance(value, MethodType) and value.__self__ is router
        return MethodType(value.__func__, clone) if is_own else None

    names = [name for name in vars(router) if hasattr(type(router), name)]
    if router.middleware_stack != router.app:
        names.append("middleware_stack")
    for name in names:
        layer = getattr(router, name)
        if isinstance(layer, (FunctionType, MethodType, partial)):
            kept = put_around(layer, swap)
            if kept is None:
                raise TypeError(
                    f"`{name}` of {router!r} was replaced by {layer!r}, which hides the method of "
                    "the router, so no replica can serve its own routes there. Use "
                    "app.add_middleware(...), or keep the method in the layer's closure."
                )
            setattr(clone, name, kept)
    if "app" in vars(router) and router.middleware_stack is router.app:
        clone.middleware_stack = clone.app


def put_around(layer: Any, swap: Swap) -> Any:
    """Return a copy of a layer in which `swap` has replaced the app inside; `None` without one.

    The app may be in a closure, a default, an argument of a `partial`, an attribute of an object,
    or in such a place of the layer below.
    """
    return _copied(layer, swap, [])


def _copied(layer: Any, swap: Swap, seen: list[Any]) -> Any:
    if (new := swap(layer)) is not None:
        return new
    if not callable(layer) or isinstance(layer, _NO_LAYERS) or any(each is layer for each in seen):
        return None
    seen.append(layer)
    if isinstance(layer, MethodType):
        owner = _copied(layer.__self__, swap, seen)
        return None if owner is None else MethodType(layer.__func__, owner)
    parts = dict(_parts(layer))
    inner = {name: _copied(value, swap, seen) for name, value in parts.items()}
    inner = {name: value for name, value in inner.items() if value is not None}
    if not inner:
        return None
    if isinstance(layer, partial):
        args = [inner.get(str(index), value) for index, value in enumerate(layer.args)]
        return partial(layer.func, *args, **{k: inner.get(k, v) for k, v in layer.keywords.items()})
    if not isinstance(layer, FunctionType):
        made = copy.copy(layer)
        for name, value in inner.items():
            object.__setattr__(made, name, value)
        return made
    code = layer.__code__
    cells = zip(code.co_freevars, layer.__closure__ or (), strict=True)
    closure = tuple(CellType(inner[name]) if name in inner else cell for name, cell in cells)
    defaults = [inner.get(f"={n}", value) for n, value in enumerate(layer.__defaults__ or ())]
    made = FunctionType(code, layer.__globals__, layer.__name__, tuple(defaults) or None, closure)
    given = (layer.__kwdefaults__ or {}).items()
    made.__kwdefaults__ = {name: inner.get(f"={name}", each) for name, each in given} or None
    made.__dict__.update(layer.__dict__)
    made.__qualname__, made.__module__ = layer.__qualname__, layer.__module__
    return made


def _parts(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the places in a layer that may hold the app inside, with their values."""
    if isinstance(layer, partial):
        yield from ((str(index), each) for index, each in enumerate(layer.args))
        yield from layer.keywords.items()
    elif isinstance(layer, FunctionType):
        for name, cell in zip(layer.__code__.co_freevars, layer.__closure__ or (), strict=True):
            if cell != CellType():
                yield name, cell.cell_contents
        yield from ((f"={n}", each) for n, each in enumerate(layer.__defaults__ or ()))
        yield from ((f"={name}", each) for name, each in (layer.__kwdefaults__ or {}).items())
    else:
        yield from getattr(layer, "__dict__", {}).items()
        slots = [name for cls in type(layer).__mro__ for name in vars(cls).get("__slots__", ())]
        yield from ((name, getattr(layer, name)) for name in slots if hasattr(layer, name))


def is_fastapis(app: Any, dependant: object) -> bool:
    """Return whether FastAPI made an app for a dependant, and nothing has been put around it."""
    if isinstance(app, partial):
        is_own = getattr(app.func, "__module__", "").startswith(_LIBRARIES)
        return is_own and any(is_fastapis(each, dependant) for each in app.args)
    if not isinstance(app, FunctionType):
        # Not a middleware of theirs that user code has put around it.
        is_layer = type(app).__module__.startswith("fastapi._") and hasattr(app, "app")
        return is_layer and is_fastapis(app.app, dependant)
    if not app.__globals__.get("__name__", "").startswith(_LIBRARIES):
        return False
    inner = list(contents_of(app))
    return any(each is dependant for each in inner) or any(
        is_fastapis(each, dependant) for each in inner if isinstance(each, (FunctionType, partial))
    )


def is_alike(one: Any, other: Any) -> bool:
    """Return whether the same code made two apps, so that neither is wrapped or replaced."""
    if type(one) is not type(other):
        return False
    if isinstance(one, partial):
        return all(map(is_alike, one.args, other.args))
    if not isinstance(one, FunctionType):
        return not hasattr(one, "app") or is_alike(one.app, other.app)
    pairs = zip(contents_of(one), contents_of(other), strict=False)
    return one.__code__ is other.__code__ and all(
        is_alike(*pair) for pair in pairs if all(isinstance(each, FunctionType) for each in pair)
    )
