"""The app of a file, its routes as functions or as the methods of one class."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ingress as serve

APPS = Path(__file__).parent / "apps"
_ROUTERS = ("app", "router")
_CLASS = "Deployment"
_DECORATOR = "_ingress"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def load(name: str, replicas: int) -> tuple[Any, ModuleType]:
    """Return the ASGI app of a file, and its module; with 0 `replicas`, plain FastAPI's."""
    path = APPS / f"{name}.py"
    tree = ast.parse(path.read_text())
    if replicas:
        _make_class(tree)
    module = ModuleType(f"app_of_{name}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    vars(module)[_DECORATOR] = serve.ingress
    exec(compile(tree, str(path), "exec"), vars(module))
    if not replicas:
        return getattr(module, "served", module.app), module
    return serve.deployment(num_replicas=replicas)(vars(module)[_CLASS]).bind(), module


def _make_class(tree: ast.Module) -> None:
    """Move the functions that are routes into a class, in place of the last one."""
    routes = [each for each in tree.body if isinstance(each, Function) and _is_route(each)]
    for route in routes:
        route.args.args.insert(0, ast.arg("self"))
    body: list[ast.stmt] = [*routes] or [ast.Pass()]
    decorator = ast.parse(f"{_DECORATOR}(app)", mode="eval").body
    cls = ast.ClassDef(_CLASS, bases=[], keywords=[], body=body, decorator_list=[decorator])
    place = tree.body.index(routes[-1]) if routes else len(tree.body)
    tree.body[place : place + 1] = [cls]
    tree.body = [each for each in tree.body if each not in routes]
    ast.fix_missing_locations(tree)


def _is_route(func: Function) -> bool:
    for decorator in func.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        owner = called.value if isinstance(called, ast.Attribute) else None
        is_event = isinstance(called, ast.Attribute) and called.attr in _NOT_ROUTES
        if isinstance(owner, ast.Name) and owner.id in _ROUTERS and not is_event:
            return True
    return False


_NOT_ROUTES = ("exception_handler", "middleware", "on_event")
