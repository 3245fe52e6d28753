"""IG101 and IG102: shared state that is read and then written, where several threads do so.

    self.n += 1              self.n = self.n + 1         n = self.n; ...; self.n = n + 1     IG101
    if self.model is None:   if key not in self.cache:   if self.queue: self.queue.pop()     IG102

Shared state is an attribute of the instance or the class, or a global that the module assigns to.
A `threading.local()` is not shared, and accesses under a lock are safe.

Each request of a `def` may run in another thread: state of the instance counts, and all that is
shared by instances. An `async def` runs in one thread for each replica: of that the replicas of a
deployment share a global, or an attribute of a class.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.names import targets_of
from ingress.check.rules import RULES, Finding
from ingress.check.sources import AnyDef, Function, Sources, calls_of, names_in, parameters
from ingress.check.state import State, state_around
from ingress.check.subjects import Subject, subjects_of
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.core.execution.execution import ExecutionMode

_RACES = {
    "IG101": "`{place}` is read and written without a lock",
    "IG102": "`{place}` is checked, then changed, without a lock",
}

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


@dataclass(frozen=True, slots=True)
class _Change:
    """An unsafe access in a function that a deployment runs."""

    access: Unsafe
    function: Function
    caller: str
    built: BuiltDeployment


def races_of(subject: Subject, sources: Sources) -> Iterator[Finding]:
    """Yield the findings of a `def` that threads run, and of the `def`s that it calls."""
    names = (subject.function.name,)
    for each in with_callees(subject.function, sources):
        for access in accesses(each, sources):
            if subject.one_at_a_time and access.place.startswith("self."):
                continue
            race = _RACES[access.rule_id].format(place=access.place)
            yield from found(access, each, names, f"{race} {inside(each, subject)}")


def races_now(
    deployments: Iterable[BuiltDeployment],
    subjects: Iterable[Subject],
    sources: Sources,
    settings: Settings,
) -> list[Finding]:
    """Return the findings of what runs in several threads at the flags' values."""
    threaded = [
        finding
        for subject in subjects
        if subject.is_threaded_at_1 and subject.mode is ExecutionMode.THREADPOOL
        for finding in races_of(subject, sources)
    ]
    if not settings.run_user_code_in_separate_thread:  # all replicas are on the server's loop
        return merged(threaded)
    return merged([*threaded, *_between_replicas(deployments, sources, settings)])


def _between_replicas(
    deployments: Iterable[BuiltDeployment], sources: Sources, settings: Settings
) -> Iterator[Finding]:
    """Yield the findings of globals and class attributes that several replicas change."""
    changes: defaultdict[tuple[Path, str], list[_Change]] = defaultdict(list)
    for built in deployments:
        config = built.deployment.config
        if config.isolation == "thread" and config.loop is None:
            for subject in subjects_of([built], sources, settings):
                for each in with_callees(subject.function, sources):
                    for access in accesses(each, sources):
                        if not access.place.startswith("self."):
                            change = _Change(access, each, subject.function.name, built)
                            changes[each.file.path, access.place].append(change)
    for same in changes.values():
        users = {change.built.name: change.built.deployment.config for change in same}
        scaled = any(config.autoscaling is not None for config in users.values())
        if scaled or sum(config.replica_count for config in users.values()) > 1:
            for change in same:
                race = _RACES[change.access.rule_id].format(place=change.access.place)
                message = (
                    f"{race} in {change.function.name}; the replicas of {' and '.join(users)} run "
                    "it, each in a thread"
                )
                yield from found(change.access, change.function, (change.caller,), message)


def with_callees(function: Function, sources: Sources) -> list[Function]:
    """Return a function and the `def`s that it calls without a lock."""
    locked = locked_nodes(function, sources)
    calls = calls_of(function, sources, returned=True)
    called = (call.callee for call in calls if call.node not in locked)
    return list(dict.fromkeys([function, *called]))


def inside(function: Function, subject: Subject) -> str:
    """Return the words for a function, which a subject is or calls."""
    via = "" if function is subject.function else f", called by {subject.function.name}"
    return f"in {function.name}{via}{where(subject)}"


def where(subject: Subject) -> str:
    """Return the words for where a `def` runs."""
    return ", which runs in threads" + f" at {SYNC_IN_THREADPOOL}=1" * subject.moves


def found(
    access: Unsafe, function: Function, names: tuple[str, ...], message: str
) -> Iterator[Finding]:
    """Yield the finding unless a `# noqa` on its line or its statement's last suppresses it."""
    node = access.node
    lines = (node.lineno, node.lineno if isinstance(node, AnyDef) else node.end_lineno or 0)
    if not function.file.allows(access.rule_id, *lines):
        yield Finding(
            RULES[access.rule_id],
            function.file.path,
            node.lineno,
            node.col_offset + 1,
            message,
            names,
        )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each line and rule, with all functions that reach it."""
    known: dict[tuple[str, int, int, str], Finding] = {}
    for each in findings:
        first = known.setdefault(each.key, each)
        functions = tuple(dict.fromkeys([*first.functions, *each.functions]))
        known[each.key] = replace(first, functions=functions)
    return list(known.values())
