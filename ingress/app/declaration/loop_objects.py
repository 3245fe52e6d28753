"""The objects of user code that belong to one event loop, such as `httpx.AsyncClient`.

    lock = asyncio.Lock()                           a global, a class attribute, a variable of a
                                                    closure, a constructor argument, a part of one
    async def startup(): global pool; pool = ...    a global, or a part of one, that code sets
    @lru_cache def client(): return AsyncClient()   the cached result of a function
    class Database: self.pool = await create_pool() a part of a global, that its methods set
    locks.setdefault(user, asyncio.Lock())          a container that outlives the call
    app.mount("/ws", socketio.ASGIApp(server))      a library's app, whose parts are not known

Such an object works on the first loop that uses it, and fails on the loop of another replica. The
walk begins at a deployment, and follows what its functions name: the functions, classes and globals
of the user's modules, and the routes, dependencies, middleware and lifespan of its app. It runs no
user code, and looks into third-party code only where that holds the user's.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from fastapi import params
from starlette.datastructures import State
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.loop_makers import (
    Known,
    is_in_library,
    kept_by,
    kept_in,
    kind_of,
    made_in,
    maker_in,
    name_of,
    names_of,
    put_in,
    stored_by,
)
from ingress.app.declaration.names import place_of, shown
from ingress.core.base.foreign import advisory, dict_of, slots_of, stored, undisguised, unwrapped
from ingress.core.base.signatures import annotations_of

T = TypeVar("T")

_DEPTH = 4  # attributes of attributes of a global
_ITEMS = 100  # of a container
_OBJECTS = 50_000  # in one walk

MOUNT = "mount"
# Packages whose apps have no object of one loop.
_LOOPLESS = frozenset(
    ("a2wsgi", "asgiref", "fastapi", "functools", "ingress", "prometheus_client", "starlette")
)

_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), BuiltinFunctionType)
_SEQUENCES = (list, tuple, set, frozenset)
_CACHED = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class LoopObject:
    """An object that belongs to one event loop, as user code names it: `db.engine`.

    `kind` is its type, or the function that makes it. `place` is its file and line, "" if unknown.
    `named_in` is the function of user code that names it, "" if no function does.
    """

    name: str
    kind: str
    file: str
    line: int
    named_in: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.place})" if self.file else self.name


def loop_objects(built: BuiltDeployment) -> Iterator[LoopObject]:
    """Yield the objects that belong to one event loop and that the deployment's code reaches."""
    with advisory("the search for objects of one event loop"):
        yield from _Search(built.deployment.func_or_class).found(built)


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of an object in user code: `module` is that of the name's first part.

    `function` is the one that has the name in its code, with its place.
    """

    module: str
    text: str
    function: str = ""

    def part(self, name: str) -> _Name:
        return _Name(self.module, f"{self.text}.{name}", self.function)


class _Search:
    """One walk over everything that a deployment's code names."""

    def __init__(self, target: type | FunctionType) -> None:
        self._package = str(getattr(target, "__module__", "")).partition(".")[0]
        # By id, with the object itself: another one may not get the same id meanwhile.
        self._seen: dict[int, object] = {}
        self._told: set[tuple[str, str]] = set()
        self._kept: dict[int, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {}
        self._known: Known = {}
        self._state: dict[str, object] = {}  # of the app, as all its replicas have it
        self._app = _Name("", "app")

    def found(self, built: BuiltDeployment) -> Iterator[LoopObject]:
        target = built.deployment.func_or_class
        name = _Name(target.__module__, target.__qualname__)
        waiting: deque[tuple[object, _Name, int]] = deque([(target, name, 0)])
        given: list[tuple[int | str, object]] = [
            *enumerate(built.init_args),
            *built.init_kwargs.items(),
        ]
        waiting += [
            (each, _Name(target.__module__, f"{built.name}.bind({key})"), 0) for key, each in given
        ]
        spec = getattr(target, "__ingress_spec__", None)
        if spec is not None and spec.app is not None:  # no builder, which makes it later
            self._seen[id(spec.app)] = spec.app  # its parts have names of their own
            self._app = app = _global_name(spec.app, name) or _Name(name.module, "app")
            self._state = getattr(getattr(spec.app, "state", None), "_state", {})
            for key, part in _parts_of_app(spec.app):
                own = app if part is spec.app else app.part(key)
                if key.startswith(MOUNT) and self._is_opaque(part):
                    yield from self._tell(own, name_of(part))
                else:
                    if part is spec.app:  # an ASGI app of the user's, which is a part of its own
                        del self._seen[id(part)]
                    waiting.append((part, own, 0))
        while waiting and len(self._seen) < _OBJECTS:
            value, name, depth = waiting.popleft()
            value = undisguised(value)
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            kind = kind_of(value)
            if kind:
                yield from self._tell(_global_name(value, name) or name, kind)
                continue
            for found, maker in self._made(value, name):
                yield from self._tell(found, maker)
            waiting += self._parts(value, name, depth)

    def _made(self, value: object, name: _Name) -> Iterator[tuple[_Name, str]]:
        """Yield the objects and containers that code will set or fill, with their makers."""
        function = _function_of(value)
        if function is not None:
            if self._is_users(function.__module__):
                yield from self._made_in(function, cached=isinstance(value, _CACHED))
        elif isinstance(value, type):
            if self._is_users(value.__module__):
                yield from self._kept_in_class(value)
        else:
            if isinstance(value, defaultdict):
                maker = maker_in(value.default_factory, self._known)
                if maker:
                    yield name, f"container of {maker}"
            yield from ((name.part(each), maker) for each, maker in self._kept_by(value))

    def _made_in(self, function: FunctionType, *, cached: bool) -> Iterator[tuple[_Name, str]]:
        module, label = function.__module__, _label(function)
        found = made_in(function, self._known, cached=cached)
        yield from ((_Name(module, made, label), maker) for made, maker in found)
        for each in put_in(function, self._known):
            first, *rest = each.path
            if first in function.__code__.co_freevars:
                text = ".".join([function.__qualname__, *each.path])
                yield _Name(module, text, label), each.kind
            elif first in function.__globals__ and first not in function.__code__.co_varnames:
                holder = function.__globals__[first]
                if isinstance(holder, ModuleType) and rest:
                    yield _Name(holder.__name__, ".".join(rest), label), each.kind
                else:
                    yield _Name(module, ".".join(each.path), label), each.kind
            elif each.path[-3:-1] == ("app", "state") and each.path[-1] in self._state:
                yield (
                    _Name(self._app.module, f"{self._app.text}.state.{each.path[-1]}", label),
                    each.kind,
                )

    def _kept_in_class(self, cls: type) -> Iterator[tuple[_Name, str]]:
        """Yield the containers, attributes of a class, that its methods fill by `self`."""
        for attribute, kind in kept_in(cls, self._known):
            owner = next((each for each in cls.__mro__ if attribute in vars(each)), None)
            if owner is not None and attribute not in stored_by(vars(owner).get("__init__")):
                yield _Name(owner.__module__, f"{owner.__qualname__}.{attribute}"), kind

    def _tell(self, name: _Name, kind: str) -> Iterator[LoopObject]:
        file, line = place_of(name.module, name.text)
        found = LoopObject(name.text, kind, file, line, name.function)
        if (found.name, found.place) not in self._told:
            self._told.add((found.name, found.place))
            yield found

    def _kept_by(self, value: object) -> list[tuple[str, str]]:
        """Return the attributes that methods of the object will set, with the makers."""
        cls = id(type(value))
        if cls not in self._kept:  # a list may have thousands of instances of one class
            self._kept[cls] = (
                [*kept_by(type(value), self._known)],
                [*kept_in(type(value), self._known)],
            )
        kept, filled = self._kept[cls]
        if kept:
            there = dict(_attributes(value))  # the walk comes to these by itself
            kept = [each for each in kept if there.get(each[0]) is None]
        return [*kept, *filled]

    def _is_opaque(self, app: object) -> bool:
        """Return whether an app that is mounted is a library's, whose state is not known."""
        package = name_of(app).partition(".")[0]
        maker: FunctionType | type = _function_of(app) or type(app)
        return package not in _LOOPLESS and not self._is_users(maker.__module__)

    def _is_users(self, module: str | None) -> bool:
        """Return whether a module is the user's: of the deployment's package, or no library."""
        if not isinstance(module, str):  # of a function that was made by `exec`
            return False
        top = module.partition(".")[0]
        if top == "ingress":
            return False
        if top == self._package or top == "__main__":
            return True
        file = stored(sys.modules.get(module), "__file__")
        return isinstance(file, str) and not is_in_library(file)

    def _parts(self, value: object, name: _Name, depth: int) -> Iterator[tuple[object, _Name, int]]:
        """Yield what `value` names, contains or consists of."""
        match value:
            case FunctionType():
                yield from self._parts_of_function(value, depth)
            case MethodType():
                yield value.__func__, name, depth
                yield value.__self__, name, depth
            case functools.partial():
                parts = (value.func, *value.args, *value.keywords.values())
                yield from ((each, name, depth) for each in parts)
            case staticmethod() | classmethod():
                yield value.__func__, name, depth
            case property():
                yield from ((each, name, depth) for each in (value.fget, value.fset))
            case type():
                if self._is_users(value.__module__):
                    own = _Name(value.__module__, value.__qualname__)
                    yield from ((each, own.part(key), depth) for key, each in vars(value).items())
                    yield from ((each, name, depth) for each in value.__bases__)
            case dict():
                for key, each in _some(dict.items(value)):
                    part = _Name(name.module, f"{name.text}[{key!r}]", name.function)
                    yield each, part, depth
            case list() | tuple() | set() | frozenset():
                kind: Any = next(kind for kind in _SEQUENCES if isinstance(value, kind))
                yield from ((each, name, depth) for each in _some(kind.__iter__(value)))
            case _ if depth < _DEPTH and not isinstance(value, ModuleType) and not _is_ours(value):
                if self._is_users(type(value).__module__):
                    yield type(value), name, depth
                attributes = _attributes(value)
                yield from ((each, name.part(key), depth + 1) for key, each in attributes)

    def _parts_of_function(
        self, function: FunctionType, depth: int
    ) -> Iterator[tuple[object, _Name, int]]:
        label = _label(function)
        own = _Name(function.__module__, function.__qualname__, label)
        cells = function.__closure__ or ()
        for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                yield cell.cell_contents, own.part(key), depth
            except ValueError:
                continue  # a variable that was never assigned to
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        parts = (*map(_dependency, defaults), *vars(function).values())
        yield from ((each, own, depth) for each in parts)
        if not self._is_users(function.__module__):
            return
        for annotation in annotations_of(function).values():
            metadata = map(_dependency, stored(annotation, "__metadata__", ()))
            yield from ((each, own, depth) for each in metadata)
        names = names_of(function.__code__)
        for key in sorted(names & function.__globals__.keys()):
            value = undisguised(function.__globals__[key])
            if not isinstance(value, ModuleType):
                yield value, _Name(function.__module__, key, label), 0
            elif self._is_users(value.__name__):
                for attribute in sorted(names & vars(value).keys()):
                    yield vars(value)[attribute], _Name(value.__name__, attribute, label), 0


def _global_name(value: object, name: _Name) -> _Name | None:
    """Return the name of the global that is this very object, in the module of `name`."""
    variables = dict_of(sys.modules.get(name.module))
    key = next((key for key, each in [*variables.items()] if each is value), None)
    return None if key is None else _Name(name.module, key, name.function)


def _label(function: FunctionType) -> str:
    """Return a function as a message names it: `Shop.get (shop.py:12)`."""
    code = function.__code__
    return f"{function.__qualname__} ({shown(code.co_filename)}:{code.co_firstlineno})"


def _is_ours(value: object) -> bool:
    return str(type(value).__module__).partition(".")[0] == "ingress"


def _function_of(value: object) -> FunctionType | None:
    """Return the function of a method, a cache or a decorator's object."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, _CACHED):
        value = unwrapped(value)
    return value if isinstance(value, FunctionType) else None


def _some(values: Iterable[T]) -> list[T]:
    """Return the first items of a container; none if another thread changes it meanwhile."""
    try:
        return [*islice(values, _ITEMS)]
    except RuntimeError:
        return []


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes that an instance has itself, without a line of its code."""
    yield from _some(dict_of(value).items())
    yield from ((slot.__name__, each) for slot, each in slots_of(value))


def _dependency(value: Any) -> object:
    """Return the callable of a `Depends(...)`, and any other value itself."""
    return value.dependency if issubclass(type(value), params.Depends) else value


def _parts_of_app(app: Any, mount: str = "") -> Iterator[tuple[str, object]]:
    """Yield the user's callables and objects in an app or router of Starlette or FastAPI.

    An app of another kind, as `mount` may be, is yielded itself.
    """
    starlettes = ("fastapi.", "starlette.")
    while (
        not hasattr(app, "routes") and name_of(app).startswith(starlettes) and hasattr(app, "app")
    ):
        app = app.app  # in a middleware
    if not hasattr(app, "routes"):
        yield f"{MOUNT}({mount!r})", app
        return
    for each in getattr(app, "user_middleware", ()):
        parts = (each.cls, getattr(each, "args", ()), getattr(each, "kwargs", {}))
        yield from (("user_middleware", part) for part in parts)
    if isinstance(state := getattr(app, "state", None), State):
        yield from ((f"state.{key}", state[key]) for key in state)
    router = getattr(app, "router", app)
    for owner, names in (
        (app, ("dependency_overrides", "exception_handlers")),
        (router, ("lifespan_context", "on_startup", "on_shutdown")),
    ):
        yield from ((name, getattr(owner, name, None)) for name in names)
    dependencies = map(_dependency, getattr(router, "dependencies", ()))
    yield from (("dependencies", each) for each in dependencies)
    for route in getattr(router, "routes", ()):
        yield "routes", getattr(route, "endpoint", None)
        waiting = [dependant] if (dependant := getattr(route, "dependant", None)) else []
        while waiting:
            each = waiting.pop()
            yield "routes", each.call
            waiting += each.dependencies
        # FastAPI's included router, Starlette's mounted app.
        for inner in (getattr(route, "original_router", None), _mounted(route)):
            if inner is not None:
                yield from _parts_of_app(inner, getattr(route, "path", ""))


def _mounted(route: BaseRoute) -> ASGIApp | None:
    """Return the app of a `Mount` or `Host`; a route of an endpoint has none."""
    return None if hasattr(route, "endpoint") else getattr(route, "app", None)
