"""The makers of objects that belong to one event loop, and the places where user code keeps them.

Bytecode tells which names a function stores in globals and in attributes, `loop_containers` what it
puts into containers. No user code runs.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ingress.app.declaration.loop_containers import Filled, filled_by, is_async_generator
from ingress.core.base.foreign import mro_of, stored, undisguised
from ingress.core.base.libraries import is_library

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
