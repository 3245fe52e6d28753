"""The file and line where user code assigns a name."""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def place_of(module_name: str, name: str) -> tuple[str, int]:
    """Return the file and the line where a name is assigned, and line 0 if that is not found."""
    module = sys.modules.get(module_name)
    file = getattr(module, "__file__", None)
    if file is None:
        return "", 0
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return shown(file), 0
    first, _, rest = name.partition(".")
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.name == first.partition("(")[0]:
                    return shown(file), _line_in(node, rest)
            case ast.Assign() | ast.AnnAssign() if first in _targets(node):
                return shown(file), node.lineno
            case ast.ImportFrom():
                for alias in node.names:
                    if first == (alias.asname or alias.name):
                        origin = _origin(node, module_name)
                        if origin in sys.modules and origin != module_name:
                            return place_of(origin, ".".join(filter(None, [alias.name, rest])))
                        return shown(file), node.lineno
    return shown(file), 0


def _line_in(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, rest: str) -> int:
    """Return the line of an attribute of a class, or of the definition itself."""
    found = (each for each in ast.walk(node) if isinstance(each, ast.Assign | ast.AnnAssign))
    name = rest.partition(".")[0]
    return next((each.lineno for each in found if name in _targets(each)), node.lineno)


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Return what a statement, or a `:=`, assigns to or deletes; nothing for any other node."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) else []


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    nodes = (each for target in targets_of(node) for each in ast.walk(target))
    return {each.id for each in nodes if isinstance(each, ast.Name)}


def _origin(node: ast.ImportFrom, module: str) -> str:
    """Return the absolute name of the module that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    package = getattr(sys.modules.get(module), "__package__", None) or ""
    parts = package.split(".")[: None if node.level == 1 else 1 - node.level]
    return ".".join([*parts, *filter(None, [node.module])])


def shown(file: str | Path) -> str:
    """Return a path as it is shown: relative to the current folder, if it is below."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(file)
