"""The names of a file that mean Ray or ingress, by scope, and the uses of them that are hidden.

A full name is that of Ray, `ray.serve.handle`, also where the file imports `ingress.handle`. Hidden
uses are in texts, and through the namespace that a name is in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ingress.migrate import advice

_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

_NAMESPACES = {"dir", "eval", "exec", "globals", "locals", "vars"}
_FRAMES = {"__globals__", "f_globals", "f_locals"}
_BY_NAME = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}
_IMPORTING = {"__import__", "import_module"}
_OF_MODULES = {*_IMPORTING, "find_spec", "getLogger", "importorskip", "patch"}
"""Functions of a path that begins at a module, not at a name of the file."""
_TYPE_COMMENT = re.compile(r"#[ \t]*type:(?![ \t]*ignore\b).*")
NEWLINE = re.compile(r"\r\n|\r|\n")


@dataclass(eq=False, slots=True)
class Scope:
    """The names that a module, class, function or comprehension binds, with full names of Ray's."""

    parent: Scope | None = None
    is_class: bool = False
    is_comprehension: bool = False
    names: dict[str, str] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    """The names with several meanings, those that another scope may bind, and attributes."""
    declared: dict[str, Scope] = field(default_factory=dict)
    """The scopes of names that are declared `global` or `nonlocal`."""

    def bind(self, name: str, full: str = "") -> None:
        """Note a name; "" is a value of the user. An import of Ray has precedence."""
        home = self.home(name)
        if home.names.setdefault(name, full) != full or home.is_class:
            home.mixed.add(name)
            home.names[name] = home.names[name] or full

    def declare(self, name: str, *, is_global: bool) -> None:
        """Note a `global` or `nonlocal` name. That may be of any function around: each is noted."""
        around = [self, *self.above()]
        homes = around[-1:] if is_global else [each for each in around[1:-1] if not each.is_class]
        for each in homes:
            each.mixed.add(name)
        self.declared[name] = homes[0]

    def home(self, name: str) -> Scope:
        """Return the scope that a binding of the name in this one belongs to."""
        return self.declared.get(name, self)

    def above(self) -> Iterator[Scope]:
        """Yield the scopes around this one, from the inside."""
        scope = self.parent
        while scope is not None:
            yield scope
            scope = scope.parent

    def find(self, name: str) -> tuple[Scope, str] | None:
        """Return the scope that binds a name, and its full name; `None` if that is not Ray's."""
        home = self.home(name)
        for scope in (home, *home.above()):
            if name in scope.names and (scope is self or not scope.is_class):
                full = scope.names[name]
                return (scope, full) if full else None
        return None


@dataclass(slots=True)
class Bindings:
    """The nodes of a file with their scopes, and the blocks and parents of its statements."""

    text: str
    tree: ast.Module
    nodes: list[tuple[ast.AST, Scope]] = field(default_factory=list)
    blocks: dict[ast.stmt, tuple[ast.AST, list[ast.stmt]]] = field(default_factory=dict)
    decorated: dict[ast.expr, ast.stmt] = field(default_factory=dict)
    quoted: set[ast.AST] = field(default_factory=set)
    """The texts whose names are among the nodes: annotations."""
    has_serve: bool = False

    def __post_init__(self) -> None:
        # Not by recursion: a sum of a thousand strings is a thousand levels deep.
        module = Scope()
        waiting: list[tuple[ast.AST, Scope, bool]] = [(self.tree, module, False)]
        while waiting:
            node, scope, is_annotation = waiting.pop()
            self.nodes.append((node, scope))
            self._bind(node, scope)
            if isinstance(node, ast.Attribute) and chain(node):
                continue
            if is_annotation and isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = self._quoted(node, node.value)
                self.quoted.update([node] if parts else [])
                waiting += [(each, scope, True) for each in parts]
            waiting += reversed(list(self._children(node, scope, is_annotation)))

    def _children(
        self, node: ast.AST, scope: Scope, is_annotation: bool
    ) -> Iterator[tuple[ast.AST, Scope, bool]]:
        inner = scope
        if isinstance(node, _FUNCTIONS | _COMPREHENSIONS | ast.ClassDef):
            inner = Scope(
                scope,
                is_class=isinstance(node, ast.ClassDef),
                is_comprehension=isinstance(node, _COMPREHENSIONS),
            )
        for name, value in ast.iter_fields(node):
            for each in value if isinstance(value, list) else [value]:
                if not isinstance(each, ast.AST):
                    continue
                if isinstance(each, ast.stmt):
                    self.blocks[each] = (node, value)
                # All of a comprehension has its scope; a default or a decorator is outside.
                is_inside = isinstance(node, _COMPREHENSIONS) or name in ("body", "type_params")
                place = inner if is_inside else scope
                is_walrus = isinstance(node, ast.NamedExpr) and name == "target"
                while is_walrus and place.parent and place.is_comprehension:
                    place = place.parent  # it binds in the function around
                is_text = name in ("annotation", "returns") or (
                    is_annotation and not _is_literal(node)
                )
                if isinstance(each, ast.arguments):
                    for argument in _arguments(each):
                        inner.bind(argument.arg)
                    place = scope
                if name == "decorator_list" and isinstance(each, ast.expr):
                    assert isinstance(node, ast.stmt)
                    self.decorated[each] = node
                yield each, place, is_text

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.Import():
                for alias in node.names:
                    self._note(_as_rays(alias.name))
                    bound = alias.name if alias.asname else alias.name.partition(".")[0]
                    scope.bind(alias.asname or bound, _as_rays(bound))
            case ast.ImportFrom():
                full = "" if node.level else _as_rays(node.module or "")
                for alias in node.names:
                    name = f"{full}.{alias.name}" if full else ""
                    self._note(name)
                    scope.bind(alias.asname or alias.name, name)
            case (
                ast.Name(name, ast.Store() | ast.Del())
                | ast.FunctionDef(name)
                | ast.AsyncFunctionDef(name)
                | ast.ClassDef(name)
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.MatchMapping(rest=str(name))
            ):
                scope.bind(name)
            case ast.Global(names) | ast.Nonlocal(names):
                for name in names:
                    scope.declare(name, is_global=isinstance(node, ast.Global))

    def _note(self, full: str) -> None:
        self.has_serve |= full == "ray.serve" or full.startswith("ray.serve.")

    def _quoted(self, node: ast.Constant, value: str) -> list[ast.expr]:
        """Return the annotation in a plain text of one line, with the places of its parts."""
        segment = ast.get_source_segment(self.text, node) or ""
        if segment not in (f'"{value}"', f"'{value}'") or value != value.strip():
            return []
        try:
            parsed = ast.parse(value, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        for each in ast.walk(parsed):
            if isinstance(each, ast.expr | ast.keyword):
                each.lineno, each.end_lineno = node.lineno, node.lineno
                each.col_offset += node.col_offset + 1
                each.end_col_offset = (each.end_col_offset or 0) + node.col_offset + 1
        return [parsed]


def chain(node: ast.AST) -> tuple[ast.Name, list[ast.Attribute]] | None:
    """Return the name and the attributes of `a.b.c`, from the left; `None` for anything else."""
    attributes: list[ast.Attribute] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node)
        node = node.value
    return (node, attributes[::-1]) if isinstance(node, ast.Name) else None


def _as_rays(module: str) -> str:
    """Return the full name of a module of Ray or of ingress, "" for another module."""
    first, dot, rest = module.partition(".")
    if first == "ingress":
        return f"ray.serve{dot}{rest}"
    return module if first == "ray" else ""


def _is_literal(node: ast.AST) -> bool:
    if not isinstance(node, ast.Subscript):
        return False
    found = chain(node.value)
    return found is not None and (found[1][-1].attr if found[1] else found[0].id) == "Literal"


def _arguments(node: ast.arguments) -> list[ast.arg]:
    found = [*node.posonlyargs, *node.args, *node.kwonlyargs]
    return found + [each for each in (node.vararg, node.kwarg) if each is not None]


def hidden_uses(bindings: Bindings, name: str, *, is_global: bool) -> Iterator[advice.Found]:
    """Yield the uses of a name, which stands for the module `ray`, that are not the name.

    They may mean something else. An import that would be removed stays while there are any.
    `is_global` is for a name of the module, which `__all__` may export.
    """
    word = re.compile(rf"(?<![\w.]){name}\b")
    understood: set[ast.AST | None] = set()
    for node, _ in bindings.nodes:  # parents come before their children
        understood.add(_understood(node, name, word))
        if node in understood or node in bindings.quoted:
            continue
        match node:
            case ast.Call(func, [_, *_]) if _is_by_name(_last(func), node.args, name):
                yield node, f"{_last(func)}(...)", advice.HIDDEN
            case ast.Name(id, ast.Load()) if id in _NAMESPACES:
                yield node, id, advice.HIDDEN
            case ast.Attribute() if (found := _namespace(node)) is not None:
                yield node, found, advice.HIDDEN
            case ast.Import() if any(each.name == "__main__" for each in node.names):
                yield node, "__main__", advice.HIDDEN
            case ast.Constant(str(text)) if _is_code(text, name):
                yield node, repr(text), advice.HIDDEN
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.Expr() if is_global:
                yield from _exported(node, word)
    for number, line in enumerate(NEWLINE.split(bindings.text), 1):
        if (comment := _TYPE_COMMENT.search(line)) and word.search(comment.group()):
            place = ast.Pass(lineno=number, col_offset=0)
            yield place, comment.group(), advice.HIDDEN


def _understood(node: ast.AST, name: str, word: re.Pattern[str]) -> ast.AST | None:
    """Return the part of an expression that does not use the name, although it might."""
    match node:
        case ast.Call(ast.Name("eval" | "exec") as func, [ast.Constant(str(code)), *_]):
            return None if word.search(code) else func
        case ast.Call(ast.Name("dir" | "vars") as func, [_, *_]):
            return func
        case ast.Call(func, [ast.Constant() as path, *_]) if _last(func) in _OF_MODULES:
            return path
        case ast.Call(
            ast.Attribute(holder, "get" | "pop" | "setdefault") as func, [ast.Constant(key), *_]
        ):
            holder = func if chain(func) else holder  # `sys.modules.get` is one node
        case ast.Subscript(holder, ast.Constant(key)):
            pass
        case ast.Compare(ast.Constant(key), [_], [holder]):
            pass
        case _:
            return None
    if key in (name, "ray", "__main__"):
        return None
    match holder:
        case ast.Call(ast.Name("globals" | "locals" | "vars") as func):
            return func
    return holder


def _is_by_name(called: str, given: list[ast.expr], name: str) -> bool:
    """Return whether a call gets an attribute of that name, or this module."""
    if called in _IMPORTING:
        return _last(given[0]) == "__name__"
    texts = [each.value for each in given if isinstance(each, ast.Constant)]
    return called in _BY_NAME and any(
        isinstance(each, str) and each.partition(".")[0] == name for each in texts
    )


def _namespace(node: ast.Attribute) -> str | None:
    """Return the namespace that an attribute is, `None` for another one."""
    name, attributes = chain(node) or (None, [node])
    found = [each.attr for each in attributes]
    if name is not None and name.id == "sys" and found[0] == "modules":
        return "sys.modules"
    return next((each for each in found if each in _FRAMES), None)


def _is_code(text: str, name: str) -> bool:
    """Return whether a text is code, or has an example, that begins at the name: `ray.get`."""
    path = rf"(?<![\w.]){name}\.\w"
    if not re.search(path, text):
        return False
    if re.search(rf"^[ \t]*(>>>|\.\.\.) .*{path}", text, re.MULTILINE):
        return True
    try:
        parts = list(ast.walk(ast.parse(text.strip())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(each, ast.Name) and each.id == name for each in parts)


def _exported(node: ast.stmt, word: re.Pattern[str]) -> Iterator[advice.Found]:
    parts = list(ast.walk(node))
    if any(isinstance(each, ast.Name) and each.id == "__all__" for each in parts):
        for each in parts:
            match each:
                case ast.Constant(str(text)) if word.search(text):
                    yield each, "ray", advice.EXPORTED


def _last(node: ast.expr) -> str:
    """Return the last name of `a.b().c`, "" for another expression."""
    match node:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
    return ""
