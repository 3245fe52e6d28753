"""The makers of objects that belong to one event loop, and the places where user code keeps them.

Bytecode tells which names a function stores in globals and in attributes, its source the containers
that it fills, which are empty at start-up. No user code runs.

    listeners = set()                                   at module level, in a class or a closure
    async def listen(): listeners.add(asyncio.Queue())  a request fills it
"""

from __future__ import annotations

import ast
import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ingress.app.declaration.names import targets_of
from ingress.core.base.foreign import mro_of, stored, undisguised
from ingress.core.base.libraries import is_library
from ingress.core.execution.execution import Kind, kind

Makes = Callable[[object], bool]
"""Returns whether a class or function makes an object of one loop."""

_FILLERS = frozenset(
    ("add", "append", "appendleft", "extend", "insert", "put", "put_nowait", "setdefault", "update")
)
_KEYS = frozenset(
    ("get_running_loop", "get_event_loop", "get_replica_context", "get_ident", "current_thread")
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def is_async_generator(value: object) -> bool:
    """Return whether a value is an `async def` function with `yield`."""
    return type(value) is FunctionType and kind(value) is Kind.ASYNC_GENERATOR


@dataclass(frozen=True, slots=True)
class Filled:
    """A container that a function fills: `path` is `("rooms",)` or `("self", "rooms")`."""

    path: tuple[str, ...]
    kind: str


def filled_by(function: FunctionType, makes: Makes) -> Iterator[Filled]:
    """Yield the containers that a function puts such objects into, and that outlive a call."""
    node = _node_of(function.__code__)
    if node is not None:
        yield from _Scope(function, node, makes).filled()


@functools.lru_cache(maxsize=1000)
def _functions(file: str, changed_at: float) -> dict[int, list[_Function]]:
    """Return the functions of a file by their first line, that of the first decorator."""
    found: dict[int, list[_Function]] = {}
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, _Function):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            found.setdefault(min(each.lineno for each in (node, *decorators)), []).append(node)
    return found


def _node_of(code: CodeType) -> _Function | None:
    try:
        found = _functions(code.co_filename, Path(code.co_filename).stat().st_mtime)
    except (OSError, SyntaxError, ValueError):  # without source the log at run time is left
        return None
    nodes = found.get(code.co_firstlineno, [])
    return next((each for each in nodes if getattr(each, "name", "<lambda>") == code.co_name), None)


class _Scope:
    """The names of one function and of its inner functions."""

    def __init__(self, function: FunctionType, node: _Function, makes: Makes) -> None:
        self._function, self._node, self._makes = function, node, makes
        self._nodes = [*ast.walk(node)]
        shared = {
            name
            for each in self._nodes
            if isinstance(each, ast.Global | ast.Nonlocal)
            for name in each.names
        }
        self._locals = {
            each.id if isinstance(each, ast.Name) else each.arg
            for each in self._nodes
            if isinstance(each, ast.arg)
            or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        } - shared
        arguments = node.args.posonlyargs + node.args.args
        self._first = arguments[0].arg if arguments else ""
        self._made: dict[str, str] = {}  # local variables, with their maker
        self._keys: frozenset[str] = _KEYS

    def filled(self) -> Iterator[Filled]:
        assigned = [found for each in self._nodes for found in _assigned(each)]
        self._keys = _KEYS | {
            target.id
            for target, value in assigned
            if isinstance(target, ast.Name) and self._tells_loops_apart(value)
        }
        for _ in range(2):  # `mine = queue = asyncio.Queue()`, in any order
            for target, value in assigned:
                maker = self._maker(value)
                if maker and isinstance(target, ast.Name):
                    self._made[target.id] = maker
        for container, values in self._fills(assigned):
            maker = next(filter(None, map(self._maker, values)), "")
            path = _path(container)
            if maker and path and self._outlives_a_call(path):
                yield Filled(path, f"container of {maker}")

    def _fills(
        self, assigned: list[tuple[ast.expr, ast.expr]]
    ) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
        for target, value in assigned:
            if isinstance(target, ast.Subscript) and not self._tells_loops_apart(target.slice):
                yield target.value, [value]
        for each in self._nodes:
            if isinstance(each, ast.AugAssign):
                yield each.target, [each.value]
            elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                values = [*each.args, *(one.value for one in each.keywords)]
                if each.func.attr in _FILLERS and not any(map(self._tells_loops_apart, values)):
                    yield each.func.value, values

    def _tells_loops_apart(self, key: ast.expr) -> bool:
        """Return whether a key of a container differs between loops, or between replicas."""
        return any(
            getattr(each, "attr", getattr(each, "id", "")) in self._keys for each in ast.walk(key)
        )

    def _outlives_a_call(self, path: tuple[str, ...]) -> bool:
        first = path[0]
        if first == self._first or path[-3:-1] == ("app", "state"):
            return len(path) > 1
        function = self._function
        shared = first in function.__globals__ or first in function.__code__.co_freevars
        return shared and first not in self._locals

    def _maker(self, value: ast.expr) -> str:
        """Return the maker of the object that an expression is, or that it holds, else ""."""
        match value:
            case ast.Name():
                return self._made.get(value.id, "")
            case ast.Call():
                return self._called(value)
            case ast.Await(part) | ast.NamedExpr(_, part) | ast.Starred(part):
                parts = [part]
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                pass
            case ast.Dict(values=parts) | ast.BoolOp(values=parts):
                pass
            case ast.IfExp(_, body, other):
                parts = [body, other]
            case _:
                return ""
        return next(filter(None, map(self._maker, parts)), "")

    def _called(self, call: ast.Call) -> str:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "create_future":
            return "asyncio.Future"
        path = _path(call.func)
        name, made = ".".join(path), self._value(path)
        if is_async_generator(made):
            return f"{name}()"
        if made is not None and self._makes(made):
            return name
        if isinstance(made, type):  # `Client(queue)` holds the queue
            values = [*call.args, *(each.value for each in call.keywords)]
            return next(filter(None, map(self._maker, values)), "")
        return ""

    def _value(self, path: tuple[str, ...]) -> object:
        """Return the class or function that a global, or an attribute of a module, is."""
        if not path or path[0] in self._locals:
            return None
        value: object = self._function.__globals__.get(path[0])
        for name in path[1:]:
            value = vars(value).get(name) if isinstance(value, ModuleType | type) else None
        return value


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield from ((target, node.value) for target in targets_of(node))


def _path(value: ast.expr) -> tuple[str, ...]:
    """Return the names of `a.b`, also of `a.b[key]` and of `a.b.get(key)`; () for other roots."""
    names: list[str] = []
    while not isinstance(value, ast.Name):
        match value:
            case ast.Attribute(inner, name):
                names.append(name)
            case ast.Subscript(inner) | ast.Call(ast.Attribute(inner)):
                names.clear()
            case _:
                return ()
        value = inner
    return (value.id, *reversed(names))


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
    "BaseCache": ("aiocache",),  # in memory it has timers, else connections
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


@functools.lru_cache(maxsize=10_000)
def is_in_library(file: str) -> bool:
    return is_library(file) or is_library(str(Path(file).resolve()))


def kind_of(value: object) -> str:
    """Return the type of an object that belongs to a loop, as a user knows it, "" for others."""
    for cls in mro_of(type(value)):
        name, module = str(stored(cls, "__name__")), str(stored(cls, "__module__"))
        if _is_listed(_CLASSES, name, module):
            return f"{module.partition('.')[0].lstrip('_')}.{name}"
    return ""


def _is_listed(table: Mapping[str, tuple[str, ...]], name: str, module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in table.get(name, ()))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def names_of(code: CodeType) -> set[str]:
    """Return the globals and attributes that a function names, those of its inner functions too."""
    return {name for each in _codes(code) for name in each.co_names}


Known = dict[int, bool]
"""Classes by their id, with whether they make such an object: of one walk."""


def made_in(function: FunctionType, known: Known, *, cached: bool) -> Iterator[tuple[str, str]]:
    """Yield the loop's objects that a function makes and keeps in a global, with their maker.

    `cached` says that its result is kept.
    """
    makers = [*_makers(function, known)]
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


def put_in(function: FunctionType, known: Known) -> Iterator[Filled]:
    """Yield the containers that a function puts the loop's objects into."""
    names = names_of(function.__code__)
    if (
        "create_future" in names
        or any(is_async_generator(function.__globals__.get(each)) for each in names)
        or any(True for _ in _makers(function, known))
    ):
        yield from filled_by(function, lambda value: is_maker(value, known))


def kept_by(cls: type, known: Known) -> Iterator[tuple[str, str]]:
    """Yield the attributes that methods of a user's class set to such objects, with the maker."""
    for function in _methods(cls):
        makers = [*_makers(function, known)]
        if makers:
            yield from ((each, makers[0]) for each in _set_on_self(function.__code__, makers))


def kept_in(cls: type, known: Known) -> Iterator[tuple[str, str]]:
    """Yield the attributes, containers, that methods of a user's class put such objects into."""
    for function in _methods(cls):
        first, filled = function.__code__.co_varnames[0], put_in(function, known)
        yield from ((each.path[1], each.kind) for each in filled if each.path[0] == first)


def stored_by(function: object) -> set[str]:
    """Return the attributes that a function sets, of any object."""
    code = getattr(function, "__code__", None)
    instructions = dis.get_instructions(code) if code is not None else ()
    return {str(each.argval) for each in instructions if each.opname == "STORE_ATTR"}


def _methods(cls: type) -> Iterator[FunctionType]:
    for base in mro_of(cls):
        module = str(stored(base, "__module__"))
        file = stored(sys.modules.get(module), "__file__")
        is_ours = module.partition(".")[0] == "ingress"
        if not isinstance(file, str) or is_ours or is_in_library(file):
            continue
        functions = [each for each in [*vars(base).values()] if type(each) is FunctionType]
        yield from (each for each in functions if each.__code__.co_argcount)


def _set_on_self(code: CodeType, makers: list[str]) -> Iterator[str]:
    """Yield the attributes of the first parameter that statements with a maker set."""
    words = {maker.rpartition(".")[2] for maker in makers}
    is_made = is_self = False
    for each in dis.get_instructions(code):
        if each.opname == "STORE_ATTR" and is_made and is_self:
            yield str(each.argval)
        if each.opname.startswith(("STORE_", "POP_TOP", "RETURN_")):
            is_made = False
        elif each.opname.startswith("LOAD_") and each.opname != "LOAD_CONST":
            is_made = is_made or each.argval in words
        loaded = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
        is_self = each.opname.startswith("LOAD_FAST") and loaded == code.co_varnames[0]


def _makers(function: FunctionType, known: Known) -> Iterator[str]:
    """Yield the classes and functions of a loop's objects that a function names."""
    names = names_of(function.__code__)
    for key in sorted(names & function.__globals__.keys()):
        value = undisguised(function.__globals__[key])
        if isinstance(value, ModuleType):
            found = sorted(names & vars(value).keys())
            yield from (f"{key}.{each}" for each in found if is_maker(vars(value)[each], known))
        elif is_maker(value, known):
            yield key


def maker_in(factory: object, known: Known) -> str:
    """Return the maker that a factory is, or that a function names; "" if there is none."""
    if isinstance(factory, FunctionType):
        return next(_makers(factory, known), "")
    return name_of(factory) if factory is not None and is_maker(factory, known) else ""


def name_of(value: Any) -> str:
    """Return the name of a class or function, or of an object's type, with its package."""
    name, module = stored(value, "__qualname__"), stored(value, "__module__")
    if not isinstance(name, str):
        name, module = type(value).__qualname__, type(value).__module__
    return f"{str(module).partition('.')[0]}.{name.partition('.')[0]}"


def is_maker(value: object, known: Known) -> bool:
    """Return whether a class or function makes an object of one loop."""
    value = undisguised(value)
    if not isinstance(value, type):
        name, module = stored(value, "__name__"), stored(value, "__module__")
        is_named = isinstance(name, str) and isinstance(module, str)
        return callable(value) and is_named and _is_listed(_FACTORIES, name, module)
    if id(value) not in known:
        known[id(value)] = False  # while it is looked at: a method may make its own class
        known[id(value)] = any(
            _is_listed(_CLASSES, each.__name__, each.__module__) for each in value.__mro__
        ) or any(True for _ in chain(kept_by(value, known), kept_in(value, known)))
    return known[id(value)]
