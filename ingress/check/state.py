"""The values of a class's attributes and its module's globals: locks, containers, other objects.

They are read from assignments, such as `self._lock = threading.Lock()`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ingress.app.declaration.names import targets_of
from ingress.check.sources import Function, SourceFile, Sources, dotted

_LOCK_NAME = re.compile(r"(?<![bcf])lock|mutex|semaphore|condition", re.I)
_LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
_OWN = {"threading.local", "contextvars.ContextVar", "queue.Queue", "queue.SimpleQueue"}
_CONTAINERS = {
    *("dict", "list", "set", "bytearray", "Counter", "OrderedDict", "defaultdict", "deque"),
    *("WeakKeyDictionary", "WeakSet", "WeakValueDictionary"),
}


@dataclass(frozen=True, slots=True)
class Made:
    """An assignment `place = call` in a function."""

    place: str
    call: ast.Call
    full_name: str
    function: Function | None


@dataclass(slots=True)
class State:
    """The state around a method.

    Places in `own` are safe: each thread has its own value, or the value has its own lock.
    """

    locks: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    containers: set[str] = field(default_factory=set)
    made: list[Made] = field(default_factory=list)

    def is_locked(self, node: ast.AST) -> bool:
        """Return whether a statement is a `with` that holds a lock."""
        return isinstance(node, ast.With | ast.AsyncWith) and any(
            self._is_lock(item.context_expr) for item in node.items
        )

    def acquires(self, statement: ast.stmt) -> bool:
        """Return whether a statement acquires a lock without a `with`."""
        return isinstance(statement, ast.Expr | ast.Assign) and any(
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "acquire"
            and self._is_lock(each.func.value)
            for each in ast.walk(statement)
        )

    def _is_lock(self, expression: ast.expr) -> bool:
        text = ast.unparse(expression)
        return bool(_LOCK_NAME.search(text)) or text in self.locks

    def _add(
        self,
        place: str,
        value: ast.expr,
        file: SourceFile,
        maker: Function | None,
        sources: Sources,
    ) -> None:
        if isinstance(
            value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
        ):
            self.containers.add(place)
        if not isinstance(value, ast.Call):
            return
        func = value.func
        while isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call):
            func = func.value.func  # `connect` in `connect(...).cursor()`
        name = sources.full_name(func, file)
        last = name.rpartition(".")[2]
        if name.startswith("threading.") and last in _LOCKS:
            self.locks.add(place)
        if name in _OWN:
            self.own.add(place)
        if last in _CONTAINERS:
            self.containers.add(place)
        self.made.append(Made(place, value, name, maker))


@lru_cache(maxsize=256)
def state_around(file: SourceFile, cls: str, sources: Sources) -> State:
    """Return the state around a method: of its class, its bases, its module. It is read-only."""
    state = State()
    for place, value, where, maker in _assignments(file, cls, sources):
        state._add(place, value, where, maker, sources)
    return state


def _assignments(
    file: SourceFile, cls: str, sources: Sources
) -> Iterator[tuple[str, ast.expr, SourceFile, Function | None]]:
    """Yield the values that are assigned to the module's names and the instance's attributes."""
    at_top = (pair for node in file.tree.body for pair in _assigned(node))
    yield from ((name, value, file, None) for name, value in at_top)
    for full_name in sources.mro(file, cls) if cls else ():
        if (home := sources.class_called(full_name)) is None:
            continue
        owner, name_of_class = home
        of_class = owner.classes[name_of_class].body
        pairs = (pair for statement in of_class for pair in _assigned(statement))
        yield from ((f"self.{name}", value, owner, None) for name, value in pairs)
        for method in owner.functions:
            if method.cls == name_of_class and method.receiver:
                for inner in ast.walk(method.node):
                    for name, value in _assigned(inner):
                        head, _, rest = name.partition(".")
                        if head == method.receiver and rest:
                            yield f"self.{rest}", value, owner, method


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the plain names and attributes that a statement assigns to, with the value."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
        for target in targets_of(node):
            for each, value in _pairs(target, node.value):
                if name := dotted(each):
                    yield name, value


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the pairs of target and value: `a, b = 1, 2` has two."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [*zip(target.elts, value.elts, strict=False)]
    return [(target, value)]
