"""The names of applications, of the methods of a class, and of a deployment's class or function.

`place_of` finds the file and line where user code assigns a name.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ingress.app.declaration.declaration import Application, Deployment
from ingress.exceptions import RayServeException


def check_names(name: object, prefix: object) -> None:
    """Raise `RayServeException` or `ValueError`, with Ray's message, for invalid names."""
    if not isinstance(name, str) or not name:
        raise RayServeException(f"Application name must a non-empty string, got {name!r}.")
    check_prefix(prefix)


def check_prefix(prefix: object) -> str | None:
    """Return a route prefix. Raises `ValueError`, with Ray's message, for an invalid one."""
    if prefix is None:
        return None
    if not isinstance(prefix, str) or not prefix.startswith("/"):
        raise ValueError(f"Invalid route_prefix {prefix!r}, must start with a forward slash ('/').")
    if prefix != "/" and prefix.endswith("/"):
        raise ValueError(f"Invalid route_prefix {prefix!r}, may not end with a trailing '/'.")
    if "{" in prefix or "}" in prefix:
        raise ValueError(f"Invalid route_prefix {prefix!r}, may not contain wildcards.")
    return prefix


TASK = "__ingress_task_name__"
"""The attribute of a function with the name of the jobs that it handles: `@task_handler`."""


class PublicMethods:
    """The names of the callables of a class or instance that do not begin with `_`, in order."""

    __slots__ = ("_cls", "_own")

    def __init__(self, target: Any) -> None:
        self._cls = target if inspect.isclass(target) else type(target)
        self._own: Mapping[str, Any] = getattr(target, "__dict__", {})

    def __contains__(self, name: str) -> bool:
        if name.startswith("_"):
            return False
        for base in self._cls.__mro__:  # not on its metaclass
            if name in vars(base):
                # Looked up on the class, so that no property of the user's runs.
                return callable(getattr(self._cls, name, None)) or callable(self._own.get(name))
        return callable(self._own.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for name in {*dir(self._cls), *self._own} if name in self))


def names_of(module: ModuleType, target: type | FunctionType) -> Iterator[str]:
    """Yield the names under which a module has a class or function, its own first."""
    if found_in(module, target.__qualname__) is target:
        yield target.__qualname__
    yield from (name for name, each in list(vars(module).items()) if _behind(each) is target)


def found_in(module: ModuleType, name: str) -> type | FunctionType | None:
    """Return the class or function of that name; `None` if the module has none."""
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return _behind(found)


def _behind(found: object) -> type | FunctionType | None:
    """Return the class or function of a deployment or application, or the object if it is one."""
    if isinstance(found, Application):
        found = found.deployment
    if isinstance(found, Deployment):
        return found.func_or_class
    return found if inspect.isclass(found) or inspect.isfunction(found) else None


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
