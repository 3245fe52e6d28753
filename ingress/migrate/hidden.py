"""Uses of an imported name that are not the name: in texts, and through the namespace it is in.

They may mean something else. An import that would be removed stays while there are any.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ingress.migrate import advice
from ingress.migrate.bindings import Bindings, chain

_NAMESPACES = {"dir", "eval", "exec", "globals", "locals", "vars"}
_FRAMES = {"__globals__", "f_globals", "f_locals"}
_BY_NAME = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}
_IMPORTING = {"__import__", "import_module"}
_OF_MODULES = {*_IMPORTING, "find_spec", "getLogger", "importorskip", "patch"}
"""Functions of a path that begins at a module, not at a name of the file."""
_TYPE_COMMENT = re.compile(r"#[ \t]*type:(?![ \t]*ignore\b).*")
_NEWLINE = re.compile(r"\r\n|\r|\n")


def uses(bindings: Bindings, name: str, *, is_global: bool) -> Iterator[advice.Found]:
    """Yield the places that may use a name, which stands for the module `ray`.

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
    for number, line in enumerate(_NEWLINE.split(bindings.text), 1):
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
