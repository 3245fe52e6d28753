"""IG101 and IG102: shared state that is read and then written, while other threads may do the same.

    self.n += 1              self.n = self.n + 1         n = self.n; ...; self.n = n + 1     IG101
    if self.model is None:   if key not in self.cache:   if self.queue: self.queue.pop()     IG102

Shared state is an attribute of the instance or the class, or a global that the module assigns to.
A `threading.local()` is not shared, and accesses under a lock are safe.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from ingress.app.declaration.assignments import targets_of
from ingress.check.sources import AnyDef, Function, Sources, names_in, parameters
from ingress.check.state import State, state_around

MUTATORS = {
    *("add", "append", "appendleft", "clear", "extend", "insert", "move_to_end", "pop"),
    *("popitem", "popleft", "remove", "update"),
}
"""Methods that change a container. `setdefault` and `discard` are atomic, so they are left out."""

_LOOKUP_ERRORS = {"AttributeError", "IndexError", "KeyError", "LookupError"}


@dataclass(frozen=True, slots=True)
class Unsafe:
    """An unsafe access. `place` is the shared state: `self.cache` for `self.cache[key]`."""

    rule_id: str
    node: ast.stmt | ast.expr
    place: str


def accesses(function: Function, sources: Sources) -> Iterator[Unsafe]:
    """Yield the unsafe accesses in a function that several threads run at once, in its order."""
    if _is_synchronized(function, sources):
        return
    found = list(_Walk(function, sources).unsafe(function.node.body))
    rewritten = {(each.node.lineno, each.place) for each in found if each.rule_id == "IG101"}
    seen = set()
    for each in found:
        line = (each.node.lineno, each.place)
        if line not in seen and (each.rule_id == "IG101" or line not in rewritten):
            seen.add(line)
            yield each


def locked_nodes(function: Function, sources: Sources) -> set[ast.AST]:
    """Return the nodes of a function that run under a lock, or in an inner function."""
    nodes = set(ast.walk(function.node))
    if _is_synchronized(function, sources):
        return nodes
    state = state_around(function.file, function.cls, sources)
    return nodes - {node for each in function.node.body for node in _unlocked(each, state)}


def _is_synchronized(function: Function, sources: Sources) -> bool:
    """Return whether a decorator in the user's files calls the function under a lock."""
    state = state_around(function.file, function.cls, sources)  # the wrapper gets the instance
    for decorator in sources.decorators_of(function):
        # `@synchronized` gets the function, and of `@synchronized(lock)` the function inside it.
        makers = (decorator, *decorator.children.values())
        given = {name for maker in makers for name in parameters(maker)}
        for block in filter(state.is_locked, ast.walk(decorator.node)):
            calls = (node.func for node in ast.walk(block) if isinstance(node, ast.Call))
            if any(isinstance(called, ast.Name) and called.id in given for called in calls):
                return True
    return False


class _Walk:
    """A walk through the statements of a function in order."""

    def __init__(self, function: Function, sources: Sources) -> None:
        self._function = function
        self._sources = sources
        self._state = state_around(function.file, function.cls, sources)
        self._locals = local_names(function)
        self._copies: dict[str, set[str]] = {}

    def unsafe(self, statements: list[ast.stmt]) -> Iterator[Unsafe]:
        """Yield the unsafe accesses in a block. After a `lock.acquire()` its rest is safe."""
        checked: set[str] = set()
        for statement in statements:
            if self._state.acquires(statement):
                return
            # After `if key in cache: return cache[key]`, the next statements fill the cache.
            for place in checked:
                yield from self._acts([statement], place)
            yield from self._statement(statement)
            if isinstance(statement, ast.If) and _leaves(statement.body):
                checked |= self._tested(statement.test)
            elif isinstance(statement, ast.Try):
                checked |= self._looked_up(statement)

    def _statement(self, statement: ast.stmt) -> Iterator[Unsafe]:
        if isinstance(statement, AnyDef | ast.ClassDef) or self._state.is_locked(statement):
            return
        if isinstance(statement, ast.If | ast.While):
            for place in self._tested(statement.test):
                yield from self._acts([*statement.body, *statement.orelse], place)
        elif isinstance(statement, ast.Try):
            handlers = [each for handler in statement.handlers for each in handler.body]
            for place in self._looked_up(statement):
                yield from self._acts(handlers, place)
        yield from self._rewrites(statement)
        for block in _blocks(statement):
            yield from self.unsafe(block)

    def _rewrites(self, statement: ast.stmt) -> Iterator[Unsafe]:
        """Yield the statement if it writes a place that it, or a local variable in it, has read."""
        if isinstance(statement, ast.AugAssign):
            if place := self._place(statement.target):
                yield Unsafe("IG101", statement, place)
            return
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            return
        read = self._tested(statement.value)
        for target in _flat(targets_of(statement)):
            if isinstance(target, ast.Name) and target.id in self._locals:
                self._copies[target.id] = read  # a local variable is a copy of these places
            elif (place := self._place(target)) and place in read:
                yield Unsafe("IG101", statement, place)

    def _tested(self, expression: ast.expr) -> set[str]:
        """Return the shared places that an expression reads, itself or by local variables."""
        found = {place for each in ast.walk(expression) if (place := self._place(each))}
        for name in names_in([expression]) & self._copies.keys():
            found |= self._copies[name]
        return found

    def _looked_up(self, statement: ast.Try) -> set[str]:
        """Return the places in which a `try` looks up keys or attributes that may be missing."""
        caught = {
            name for each in statement.handlers if each.type for name in names_in([each.type])
        }
        if not caught & _LOOKUP_ERRORS:
            return set()
        nodes = (node for each in statement.body for node in ast.walk(each))
        return {
            place
            for node in nodes
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Load)
            if (place := self._place(node))
        }

    def _acts(self, statements: Iterable[ast.stmt], place: str) -> Iterator[Unsafe]:
        """Yield the first act of the statements on a place that is not under a lock."""
        for statement in statements:
            for node in _unlocked(statement, self._state):
                if self._is_act(node) and self._place(_target(node)) == place:
                    assert isinstance(node, ast.expr)  # for types
                    yield Unsafe("IG102", node, place)
                    return

    def _is_act(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Name):
            return not isinstance(node.ctx, ast.Load)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        # `pop(key, None)` is one atomic step, and works even if another thread was first.
        is_step = node.func.attr == "pop" and len(node.args) == 2
        is_container = self._place(node.func.value) in self._state.containers
        return node.func.attr in MUTATORS and not is_step and is_container

    def _place(self, expression: ast.AST) -> str:
        """Return the shared place that an expression names, "" if it names none."""
        root, rest = _chain(expression)
        file = self._function.file
        if root == self._function.receiver != "":
            place = f"self.{rest}" if rest else ""
        elif not root or root in self._locals:
            place = ""
        elif self._sources.is_class(root, file) or self._sources.is_module(root, file):
            place = f"{root}.{rest}" if rest else ""
        elif self._sources.is_global(root, file):
            place = f"{root}.{rest}" if rest else root
        else:
            place = ""
        return "" if any(f"{place}.".startswith(f"{own}.") for own in self._state.own) else place


def _chain(expression: ast.AST) -> tuple[str, str]:
    """Return the first name of an expression, and its attributes up to the first index."""
    names: list[str] = []
    while isinstance(expression, ast.Subscript | ast.Attribute):
        if isinstance(expression, ast.Attribute):
            names.insert(0, expression.attr)
        else:
            names.clear()
        expression = expression.value
    match expression:
        case ast.Name(id=root):
            return root, ".".join(names)
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr"),
            args=[ast.Name(id=root), ast.Constant(value=str(name)), *_],
        ):
            return root, ".".join([name, *names])
    return "", ""


def _target(node: ast.AST) -> ast.AST:
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Attribute)  # for types
        return node.func.value
    return node


def local_names(function: Function) -> set[str]:
    """Return the local names of a function and of its enclosing functions."""
    found: set[str] = set()
    scope: Function | None = function
    while scope is not None:
        nodes = list(ast.walk(scope.node))
        stored = {
            each.id
            for each in nodes
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
        }
        shared = {name for each in nodes if isinstance(each, ast.Global) for name in each.names}
        found |= (stored | parameters(scope)) - shared
        scope = scope.parent
    return found


def _unlocked(statement: ast.AST, state: State) -> Iterator[ast.AST]:
    """Yield the nodes of a statement that run without a lock."""
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, AnyDef | ast.ClassDef | ast.Lambda) or state.is_locked(node):
            continue
        yield node
        # Statements after `lock.acquire()` hold the lock.
        children = takewhile(
            lambda child: not (isinstance(child, ast.stmt) and state.acquires(child)),
            ast.iter_child_nodes(node),
        )
        waiting += reversed([*children])


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    inner = (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))
    return [*filter(None, blocks), *(each.body for each in inner)]


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from _flat(target.elts)
        elif isinstance(target, ast.Starred):
            yield target.value
        else:
            yield target
