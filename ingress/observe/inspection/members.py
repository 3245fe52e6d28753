"""The user's code in a deployment, as its replicas call it.

    constructor, the parts of its app (`asgi.parts`), its public methods and its hooks
    the functions inside `@batch` and `@multiplexed`, which run in place of the visible ones
    `__del__`

A class is inspected, but no instance is created: attributes set in a constructor are not known
here. Methods inherited from a library are left out, though a handle can call them: most library
classes have dozens.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

from ingress.app.asgi import Part
from ingress.app.batching.batching import Batcher
from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.names import PublicMethods
from ingress.core.base.foreign import stored, undisguised, unwrapped
from ingress.core.base.libraries import is_library
from ingress.core.base.signatures import annotations_of
from ingress.core.execution.execution import Role

logger = logging.getLogger("ingress")

_BOUND = (staticmethod, classmethod)
_HOOKS = ("check_health", "reconfigure")


def parts_of(built: BuiltDeployment, *, is_ingress: bool) -> list[Part]:
    """Return the parts of a deployment; `is_ingress` says whether it receives HTTP requests.

    Raises the errors of invalid routes in its app.
    """
    target = built.deployment.func_or_class
    call = "any /" if is_ingress else "call"
    parts: list[Part] = []
    if not inspect.isclass(target):
        parts += _unwrapped(call, target)
        return [*parts, *_inner_parts(target, parts)]
    if built.bound_app is not None:
        parts += built.bound_app.parts()
    served = {id(part.func) for part in parts}
    if inspect.isfunction(target.__init__):
        parts.insert(0, Part("constructor", target.__init__, Role.LIFECYCLE))
    for name in [*_calls(target), *PublicMethods(target)]:
        member = undisguised(getattr(target, name))
        if member is None or id(stored(member, "__func__", member)) in served:
            continue
        if inspect.isclass(member):
            continue
        if name != "__call__" and name not in _HOOKS and _is_of_a_library(target, name):
            continue
        what = call if name == "__call__" else name if name in _HOOKS else "method"
        parts += _unwrapped(what, member)
    parts += list(_inner_parts(target, parts))
    if hasattr(target, "__del__"):
        parts.append(Part("__del__", target.__del__, Role.LIFECYCLE))
    return parts


def _calls(cls: type) -> list[str]:
    # Not `hasattr`: the class itself is callable.
    return ["__call__"] if any("__call__" in vars(base) for base in cls.__mro__) else []


def _is_of_a_library(cls: type, name: str) -> bool:
    definer = next((base for base in cls.__mro__ if name in vars(base)), cls)
    package = definer.__module__.partition(".")[0]
    if package == cls.__module__.partition(".")[0]:
        return False
    file = stored(sys.modules.get(definer.__module__), "__file__")
    return not isinstance(file, str) or is_library(file)


def _unwrapped(what: str, member: Callable[..., object]) -> Iterator[Part]:
    """Yield a method, or the function inside an ingress decorator, which runs in its place."""
    decorated = list(_decorated(what, member))
    yield from decorated or [Part(what, member, Role.METHOD)]


def _decorated(what: str, member: Callable[..., object]) -> Iterator[Part]:
    batcher = stored(member, "__ingress_batcher__")
    if type(batcher) is Batcher:
        handler = batcher.handler
        what_it_is = f"{what}, batch".removeprefix(", ")
        if handler.target_s is not None:  # its size and wait are chosen
            what_it_is += f" for {handler.target_s * 1e3:g} ms"
        yield Part(what_it_is, handler.func, Role.BATCH, handler.at_once)
    if (loader := stored(member, "__ingress_loader__")) is not None:
        yield Part("model loader", loader, Role.METHOD)
        model = _returned_class(loader)
        if hasattr(model, "__del__"):
            yield Part("model __del__", model.__del__, Role.UNLOAD)


def _returned_class(func: Callable[..., object]) -> Any:
    try:
        return inspect.get_annotations(func, eval_str=True).get("return")
    except Exception:  # an annotation may be any expression, also with undefined names
        logger.debug("not all annotations of %r can be read", func, exc_info=True)
        return annotations_of(func).get("return")


def _inner_parts(target: type | FunctionType, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the decorated functions that only user code calls, not a handle.

    They are private in the class, or a function that is known so far names them in its module.
    """
    members: dict[str, object] = {}
    for base in reversed(target.__mro__) if inspect.isclass(target) else ():
        members.update(vars(base))
    found = [each for name, each in members.items() if name.startswith("_") and name != "__call__"]
    for function in _functions([*members.values(), *(part.func for part in parts)]):
        inner = unwrapped(function)
        if isinstance(inner, FunctionType):
            known = inner.__globals__
            found += [known[name] for name in inner.__code__.co_names if name in known]
    for each in dict.fromkeys(_functions(found)):
        yield from _decorated("", each)


def _functions(values: Iterable[object]) -> Iterator[FunctionType]:
    for each in map(undisguised, values):
        func = each.__func__ if isinstance(each, _BOUND) else each
        if inspect.isfunction(func):
            yield func
