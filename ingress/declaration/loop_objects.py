"""The objects of user code that belong to one event loop, such as `httpx.AsyncClient`.

    lock = asyncio.Lock()                           a global, a class attribute, a variable of a
                                                    closure, a constructor argument, a part of one
    async def startup(): global pool; pool = ...    a global, or a part of one, that code sets
    @lru_cache def client(): return AsyncClient()   the cached result of a function

Such an object works on the first loop that uses it, and fails on the loop of another replica. The
walk begins at a deployment, and follows what its functions name: the functions, classes and globals
of the user's modules, and the routes, dependencies, middleware and lifespan of its app. It runs no
user code, and looks into third-party code only where that holds the user's.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from ingress.declaration.assignments import place_of
from ingress.declaration.build import BuiltDeployment

T = TypeVar("T")

_DEPTH = 4  # attributes of attributes of a global
_ITEMS = 100  # of a container
_OBJECTS = 50_000  # in one walk

# Classes by their name, with the packages that define one. Subclasses count.
_CLASSES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Lock", "Event", "Condition", "Semaphore", "Barrier"), ("asyncio",)),
    **dict.fromkeys(("Queue", "Future"), ("asyncio", "_asyncio")),
    **dict.fromkeys(
        ("LockAdapter", "EventAdapter", "SemaphoreAdapter", "CapacityLimiterAdapter"), ("anyio",)
    ),
    "AsyncClient": ("httpx", "qdrant_client", "weaviate"),
    "AsyncConnectionPool": ("httpcore", "psycopg_pool"),
    "AsyncConnection": ("psycopg", "sqlalchemy"),
    "AsyncEngine": ("sqlalchemy",),
    "ClientSession": ("aiohttp",),
    "BaseConnector": ("aiohttp",),
    **dict.fromkeys(("Redis", "RedisCluster", "ConnectionPool", "Sentinel"), ("redis.asyncio",)),
    "Pool": ("asyncpg", "aiomysql", "aiopg"),
    "Connection": ("asyncpg", "aiosqlite", "aiomysql"),
    "AsyncMongoClient": ("pymongo",),
    **dict.fromkeys(("AsyncIOMotorClient", "AgnosticClient"), ("motor",)),
    "AsyncElasticsearch": ("elasticsearch",),
    "Database": ("databases",),
    **dict.fromkeys(("AIOKafkaProducer", "AIOKafkaConsumer"), ("aiokafka",)),
    **dict.fromkeys(("RobustConnection", "RobustChannel"), ("aio_pika",)),
    "Channel": ("grpc.aio",),
    "_LRUCacheWrapper": ("async_lru",),
    "AsyncLimiter": ("aiolimiter",),
    "AsyncServer": ("socketio", "engineio"),  # each session has a queue
}

# Functions that make such an object, by name.
_FACTORIES: Mapping[str, tuple[str, ...]] = {
    "create_async_engine": ("sqlalchemy",),
    "from_url": ("redis.asyncio",),
    "create_pool": ("asyncpg", "aiomysql", "aiopg", "arq", "asyncio_redis"),
    "connect": ("asyncpg", "aiosqlite", "aiomysql", "aio_pika", "nats"),
    "connect_robust": ("aio_pika",),
    "insecure_channel": ("grpc.aio",),
    "secure_channel": ("grpc.aio",),
}

_LIBRARIES = tuple(
    str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib")
)
_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), BuiltinFunctionType)
_SEQUENCES = (list, tuple, set, frozenset)
_CACHED = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class LoopObject:
    """An object that belongs to one event loop, as user code names it: `db.engine`.

    `kind` is its type, or the function that makes it. `place` is its file and line, "" if unknown.
    """

    name: str
    kind: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.place})" if self.file else self.name


def loop_objects(built: BuiltDeployment) -> Iterator[LoopObject]:
    """Yield the objects that belong to one event loop and that the deployment's code reaches."""
    target: Any = built.deployment.func_or_class
    yield from _Walk(target).found(built)


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of an object in user code: `module` is that of the name's first part."""

    module: str
    text: str

    def part(self, name: str) -> _Name:
        return _Name(self.module, f"{self.text}.{name}")


class _Walk:
    """One walk over everything that a deployment's code names."""

    def __init__(self, target: Any) -> None:
        self._package = str(getattr(target, "__module__", "")).partition(".")[0]
        # By id, with the object itself: another one may not get the same id meanwhile.
        self._seen: dict[int, Any] = {}
        self._told: set[str] = set()

    def found(self, built: BuiltDeployment) -> Iterator[LoopObject]:
        target: Any = built.deployment.func_or_class
        name = _Name(target.__module__, target.__qualname__)
        waiting: deque[tuple[Any, _Name, int]] = deque([(target, name, 0)])
        given: dict[Any, Any] = {**dict(enumerate(built.init_args)), **built.init_kwargs}
        call = _Name(target.__module__, f"{built.name}.bind")
        waiting += [
            (value, _Name(call.module, f"{call.text}({key})"), 0) for key, value in given.items()
        ]
        spec = getattr(target, "__ingress_spec__", None)
        if spec is not None:
            self._seen[id(spec.app)] = spec.app  # its parts have names of their own
            app = _global_name(spec.app, name) or _Name(name.module, "app")
            waiting += [(part, app.part(key), 0) for key, part in _parts_of_app(spec.app)]
        while waiting and len(self._seen) < _OBJECTS:
            value, name, depth = waiting.popleft()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            kind = _kind_of(value)
            if kind:
                yield from self._tell(_global_name(value, name) or name, kind)
                continue
            function = _function_of(value)
            if function is not None and self._is_users(function.__module__):
                for made, maker in _made_in(function, cached=isinstance(value, _CACHED)):
                    yield from self._tell(_Name(function.__module__, made), maker)
            waiting += self._parts(value, name, depth)

    def _tell(self, name: _Name, kind: str) -> Iterator[LoopObject]:
        file, line = place_of(name.module, name.text)
        found = LoopObject(name.text, kind, file, line)
        if str(found) not in self._told:
            self._told.add(str(found))
            yield found

    def _is_users(self, module: str | None) -> bool:
        """Return whether a module is the user's: of the deployment's package, or no library."""
        if module is None:  # of a function that was made by `exec`
            return False
        top = module.partition(".")[0]
        if top == "ingress":
            return False
        if top == self._package or top == "__main__":
            return True
        file = getattr(sys.modules.get(module), "__file__", None)
        return file is not None and not _is_in_library(file)

    def _parts(self, value: Any, name: _Name, depth: int) -> Iterator[tuple[Any, _Name, int]]:
        """Yield what `value` names, contains or consists of."""
        if isinstance(value, FunctionType):
            yield from self._parts_of_function(value, depth)
        elif isinstance(value, MethodType):
            yield value.__func__, name, depth
            yield value.__self__, name, depth
        elif isinstance(value, functools.partial):
            yield from ((each, name, depth) for each in (value.func, *value.args))
            yield from ((each, name, depth) for each in value.keywords.values())
        elif isinstance(value, staticmethod | classmethod):
            yield value.__func__, name, depth
        elif isinstance(value, property):
            yield from ((each, name, depth) for each in (value.fget, value.fset))
        elif isinstance(value, type):
            if self._is_users(value.__module__):
                own = _Name(value.__module__, value.__qualname__)
                yield from ((each, own.part(key), depth) for key, each in vars(value).items())
                yield from ((each, name, depth) for each in value.__bases__)
        elif isinstance(value, dict):
            for key, each in _some(dict.items(value)):
                yield each, _Name(name.module, f"{name.text}[{key!r}]"), depth
        elif isinstance(value, _SEQUENCES):
            iterate: Any = next(each.__iter__ for each in _SEQUENCES if isinstance(value, each))
            yield from ((each, name, depth) for each in _some(iterate(value)))
        elif depth < _DEPTH and not isinstance(value, ModuleType) and not _is_ours(value):
            if self._is_users(type(value).__module__):
                yield type(value), name, depth
            for key, each in _attributes(value):
                yield each, name.part(key), depth + 1

    def _parts_of_function(
        self, function: FunctionType, depth: int
    ) -> Iterator[tuple[Any, _Name, int]]:
        own = _Name(function.__module__, function.__qualname__)
        cells = function.__closure__ or ()
        for key, cell in zip(function.__code__.co_freevars, cells, strict=True):
            try:
                yield cell.cell_contents, own.part(key), depth
            except ValueError:
                continue  # a variable that was never assigned to
        for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield _dependency(each), own, depth
        for each in vars(function).values():
            yield each, own, depth
        if not self._is_users(function.__module__):
            return
        for annotation in function.__annotations__.values():
            for each in getattr(annotation, "__metadata__", ()):
                yield _dependency(each), own, depth
        names = _names(function.__code__)
        for key in sorted(names & function.__globals__.keys()):
            value = function.__globals__[key]
            if not isinstance(value, ModuleType):
                yield value, _Name(function.__module__, key), 0
            elif self._is_users(value.__name__):
                for attribute in sorted(names & vars(value).keys()):
                    yield vars(value)[attribute], _Name(value.__name__, attribute), 0


def _global_name(value: Any, name: _Name) -> _Name | None:
    """Return the name of the global that is this very object, in the module of `name`."""
    variables = vars(sys.modules[name.module]) if name.module in sys.modules else {}
    key = next((key for key, each in [*variables.items()] if each is value), None)
    return None if key is None else _Name(name.module, key)


@functools.lru_cache(maxsize=10_000)
def _is_in_library(file: str) -> bool:
    return str(Path(file).resolve()).startswith(_LIBRARIES)


def _kind_of(value: Any) -> str:
    """Return the type of an object that belongs to a loop, as a user knows it, "" for others."""
    for cls in type(value).__mro__:
        if _is_listed(_CLASSES, cls.__name__, cls.__module__):
            return f"{cls.__module__.partition('.')[0].lstrip('_')}.{cls.__name__}"
    return ""


def _is_listed(table: Mapping[str, tuple[str, ...]], name: str, module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in table.get(name, ()))


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "ingress"


def _function_of(value: Any) -> FunctionType | None:
    """Return the function of a method, a cache or a decorator's object."""
    if isinstance(value, MethodType | staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, _CACHED):
        value = inspect.unwrap(value)
    return value if isinstance(value, FunctionType) else None


def _some(values: Iterable[T]) -> list[T]:
    """Return the first items of a container; none if another thread changes it meanwhile."""
    try:
        return [*islice(values, _ITEMS)]
    except RuntimeError:
        return []


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an instance has itself, without a line of its code."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    if isinstance(own, dict):
        yield from _some(own.items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            descriptor = cls.__dict__.get(slot)
            if inspect.ismemberdescriptor(descriptor):
                try:
                    yield slot, descriptor.__get__(value, cls)
                except AttributeError:
                    continue


def _dependency(value: Any) -> Any:
    """Return the callable of a `Depends(...)`, and any other value itself."""
    return getattr(value, "dependency", None) or value if hasattr(value, "use_cache") else value


def _parts_of_app(app: Any) -> Iterator[tuple[str, Any]]:
    """Yield the user's callables and objects in an app or router of Starlette or FastAPI."""
    for name in ("dependency_overrides", "exception_handlers"):
        yield name, getattr(app, name, None)
    for each in getattr(app, "user_middleware", ()):
        for part in (each.cls, getattr(each, "args", ()), getattr(each, "kwargs", {})):
            yield "user_middleware", part
    for key, value in getattr(getattr(app, "state", None), "_state", {}).items():
        yield f"state.{key}", value
    router = getattr(app, "router", app)
    for name in ("lifespan_context", "on_startup", "on_shutdown"):
        yield name, getattr(router, name, None)
    for each in getattr(router, "dependencies", ()):
        yield "dependencies", _dependency(each)
    for route in getattr(router, "routes", ()):
        yield "routes", getattr(route, "endpoint", None)
        waiting = [dependant] if (dependant := getattr(route, "dependant", None)) else []
        while waiting:
            each = waiting.pop()
            yield "routes", each.call
            waiting += each.dependencies
        # FastAPI's included router, Starlette's mounted app.
        for name in ("original_router", "app"):
            inner = getattr(route, name, None)
            if hasattr(inner, "routes"):
                yield from _parts_of_app(inner)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _names(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function names, those of its inner functions too."""
    return {name for each in _codes(code) for name in each.co_names}


def _made_in(function: FunctionType, *, cached: bool) -> Iterator[tuple[str, str]]:
    """Yield the loop's objects that a function makes and keeps in a global, with their maker.

    `cached` says that its result is kept.
    """
    makers = [*_makers(function)]
    if not makers:
        return
    if cached:
        yield f"{function.__qualname__}()", makers[0]
    for code in _codes(function.__code__):
        before = ""  # the global that the last instruction loaded
        for each in dis.get_instructions(code):
            if each.opname == "STORE_GLOBAL":
                yield str(each.argval), makers[0]
            elif each.opname == "STORE_ATTR" and before and before != "self":
                yield f"{before}.{each.argval}", makers[0]
            before = str(each.argval) if each.opname == "LOAD_GLOBAL" else ""


def _makers(function: FunctionType) -> Iterator[str]:
    """Yield the classes and functions of a loop's objects that a function names."""
    names = _names(function.__code__)
    for key in sorted(names & function.__globals__.keys()):
        value = function.__globals__[key]
        if isinstance(value, ModuleType):
            for attribute in sorted(names & vars(value).keys()):
                if _makes(vars(value)[attribute]):
                    yield f"{key}.{attribute}"
        elif _makes(value):
            yield key


def _makes(value: Any) -> bool:
    if isinstance(value, type):
        return any(_is_listed(_CLASSES, each.__name__, each.__module__) for each in value.__mro__)
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", "")
    return callable(value) and _is_listed(_FACTORIES, str(name), str(module))
