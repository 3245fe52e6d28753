"""The name under which another process finds the class or function of a deployment."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType, ModuleType

from ingress.app.declaration.declaration import Application, Deployment


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
