"""The user's layers around an app of FastAPI's or Starlette's, copied around another app."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Host, Mount, Router
from starlette.types import ASGIApp

from ingress.app.asgi.compat import base_app
from ingress.app.asgi.guard import Guard, guard_below, guarded
from ingress.app.asgi.methods import contents_of
from ingress.core.base.foreign import dict_of, sharing, slots_of, stored

_LIBRARIES = ("fastapi.", "starlette.", "ingress.")
_NO_LAYERS = (BaseRoute, Router, Starlette, ModuleType, type)
_CONTAINERS = (list, tuple, dict, set)

Swap = Callable[[Any], Any]
"""A function from a value in a layer to its replacement, `None` to look into the value."""


def rebased(stack: Any, end: ASGIApp, new_end: ASGIApp) -> Any:
    """Return a copy of a chain of middlewares with another end and guards in between."""
    if _is(stack, end):
        return new_end
    if not hasattr(stack, "app"):  # not a chain
        kept = put_around(stack, lambda value: new_end if _is(value, end) else None)
        return stack if kept is None else kept
    inner = rebased(stack.app, end, new_end)
    if not isinstance(stack, Guard) and not isinstance(inner, Guard):
        inner = guard_below(type(stack))(inner)
    return sharing(stack, {"app": inner})


def take_methods(router: Router, clone: Router) -> None:
    """Give a copy of a router the layers that user code has put around the methods of the router.

    Raises `TypeError` for a layer in which the method is not found.
    """

    names = [name for name in vars(router) if callable(stored(type(router), name))]
    if router.middleware_stack != router.app:
        names.append("middleware_stack")
    kinds = (FunctionType, MethodType, partial)
    layers = [name for name in names if isinstance(getattr(router, name), kinds)]
    for name in take_layers(router, clone, layers):
        raise TypeError(
            f"`{name}` of {router!r} was replaced by {getattr(router, name)!r}, which hides the "
            "method of the router, so no replica can serve its own routes there. Use "
            "app.add_middleware(...), or keep the method in the layer's closure."
        )
    if "app" in vars(router) and router.middleware_stack is router.app:
        clone.middleware_stack = clone.app


def take_layers(
    owner: Any, clone: Any, names: Iterable[str], twin: Swap = lambda _: None
) -> list[str]:
    """Give a copy the layers that user code has put around methods of the owner and its app.

    `names` are the attributes that have layers; `twin` gives the copy's app for the app below them.
    Returns the names of those without such an app or method.
    """

    def swap(value: Any) -> Any:
        if type(value) is MethodType and value.__self__ is owner:
            return MethodType(value.__func__, clone)
        return twin(value)

    kept = {name: put_around(getattr(owner, name), swap) for name in names}
    hidden = [name for name in kept if kept[name] is None]
    vars(clone).update(kept, **{name: getattr(owner, name) for name in hidden})
    return hidden


def put_around(layer: Any, swap: Swap) -> Any:
    """Return a copy of a layer in which `swap` has replaced the app inside; `None` without one.

    The app may be in a closure, a default, an argument of a `partial`, an attribute of an object,
    a list or a mapping, or in such a place of the layer below.
    """
    return _copied(layer, swap, {})


def put_inside(owner: Any, swap: Swap) -> Any:
    """Return a copy of an object with what `swap` has replaced in its attributes."""
    return _with_new_parts(owner, swap, {id(owner): owner})


def found_inside(layer: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return the objects of some kinds in a layer, or the layer itself, in order."""
    found: dict[int, Any] = {}

    def note(value: Any) -> Any:
        if issubclass(type(value), kinds):
            found[id(value)] = value
        return None

    if note(layer) is None and not found:
        put_inside(layer, note)
    return list(found.values())


def guard_mounted(mount: Any) -> None:
    """Put guards between the middlewares of the apps in a `Mount` or `Host`, and of those below.

    In place: the replicas and the user's code share these apps.
    """
    if isinstance(mount, Mount):
        mount.app = rebased(mount.app, base_app(mount), base_app(mount))
    for app in found_inside(mount.app, (Starlette,)):
        own, router = vars(app), app.router
        if "build_middleware_stack" in own:  # also that of a user, who puts layers around
            continue
        own["build_middleware_stack"] = partial(_build_guarded, app)
        if own["middleware_stack"] is not None:
            own["middleware_stack"] = rebased(own["middleware_stack"], router, router)
        router.middleware_stack = rebased(router.middleware_stack, router.app, router.app)
        for route in router.routes:
            if isinstance(route, (Mount, Host)):
                guard_mounted(route)


_BUILDING = threading.RLock()


def _build_guarded(app: Starlette) -> ASGIApp:
    own = vars(app)
    with _BUILDING:  # two replicas may build it at the same time
        given = own["user_middleware"]
        own["user_middleware"] = guarded(given)
        try:
            return type(app).build_middleware_stack(app)
        finally:
            own["user_middleware"] = given


def _is(one: Any, other: Any) -> bool:
    """Return whether both are one object, or the same method of one."""
    if type(one) is MethodType and type(other) is MethodType:
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    return one is other


def _copied(layer: Any, swap: Swap, seen: dict[int, Any]) -> Any:
    # By type: an object that stands for another one answers `isinstance` for that.
    kind = type(layer)
    is_open = hasattr(kind, "__call__") or kind in _CONTAINERS  # noqa: B004
    if not is_open and not issubclass(kind, _NO_LAYERS):
        return None
    if (new := swap(layer)) is not None:
        return new
    if not is_open or issubclass(kind, _NO_LAYERS) or id(layer) in seen:
        return None
    seen[id(layer)] = layer
    if kind is MethodType:
        owner = _copied(layer.__self__, swap, seen)
        return None if owner is None else MethodType(layer.__func__, owner)
    made = _with_new_parts(layer, swap, seen)
    return None if made is layer else made


def _with_new_parts(layer: Any, swap: Swap, seen: dict[int, Any]) -> Any:
    """Return a copy with new parts, or the layer itself if no part is new."""
    parts = dict(_parts(layer))
    inner = {name: _copied(value, swap, seen) for name, value in parts.items()}
    inner = {name: value for name, value in inner.items() if value is not None}
    if not inner:
        return layer
    kind, values = type(layer), list((parts | inner).values())
    if kind in _CONTAINERS:
        return dict(zip(layer, values, strict=True)) if kind is dict else kind(values)
    if kind is partial:
        args, named = values[: len(layer.args)], values[len(layer.args) :]
        return partial(layer.func, *args, **dict(zip(layer.keywords, named, strict=True)))
    if kind is not FunctionType:
        return sharing(layer, inner)
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
    kind = type(layer)
    if kind in _CONTAINERS:
        values = layer.values() if kind is dict else layer
        yield from ((str(index), each) for index, each in enumerate(values))
    elif kind is partial:
        yield from ((str(index), each) for index, each in enumerate(layer.args))
        yield from layer.keywords.items()
    elif kind is FunctionType:
        for name, cell in zip(layer.__code__.co_freevars, layer.__closure__ or (), strict=True):
            if cell != CellType():
                yield name, cell.cell_contents
        yield from ((f"={n}", each) for n, each in enumerate(layer.__defaults__ or ()))
        yield from ((f"={name}", each) for name, each in (layer.__kwdefaults__ or {}).items())
    else:
        yield from dict_of(layer).items()
        yield from ((slot.__name__, each) for slot, each in slots_of(layer))


def is_fastapis(app: Any, dependant: object) -> bool:
    """Return whether FastAPI made an app for a dependant, and nothing has been put around it."""
    if type(app) is FunctionType:
        module, inner = app.__globals__.get("__name__", ""), contents_of(app)
    elif type(app) is partial:
        module, inner = getattr(app.func, "__module__", ""), iter(app.args)
    else:  # not a middleware of theirs that user code has put around it
        is_layer = type(app).__module__.startswith("fastapi._")
        return is_layer and is_fastapis(getattr(app, "app", None), dependant)
    is_theirs = module.startswith(_LIBRARIES)
    return is_theirs and any(each is dependant or is_fastapis(each, dependant) for each in inner)


def twin_of(app: Any, made: Any) -> Any:
    """Return the function in `made` that has the code of `app`: FastAPI's handler is in its app."""
    waiting, code = [made], getattr(app, "__code__", None)
    while waiting:
        each = waiting.pop()
        if type(each) is FunctionType:
            if each.__code__ is code:
                return each
            if each.__globals__.get("__name__", "").startswith(_LIBRARIES):
                waiting += contents_of(each)
    return made


def is_alike(one: Any, other: Any) -> bool:
    """Return whether the same code made two apps, so that neither is wrapped or replaced."""
    if type(one) is not type(other):
        return False
    if type(one) is partial:
        return all(map(is_alike, one.args, other.args))
    if type(one) is MethodType:
        return one.__func__ is other.__func__
    if type(one) is not FunctionType:
        return not hasattr(one, "app") or is_alike(one.app, other.app)
    pairs = zip(contents_of(one), contents_of(other), strict=False)
    functions = FunctionType, MethodType
    return one.__code__ is other.__code__ and all(
        is_alike(*pair) for pair in pairs if any(isinstance(each, functions) for each in pair)
    )
