"""The containers that user code fills with objects that belong to one event loop.

    listeners = set()                                   at module level, in a class or a closure
    async def listen(): listeners.add(asyncio.Queue())  a request fills it

Such a container is empty at start-up. The source of a function tells that it is filled, without a
line of it being run.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from ingress.app.declaration.assignments import targets_of
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
