"""The functions that a deployment or a FastAPI app calls, read from the source without an import.

    below `@app.get(...)`, in `Depends(...)`      ENDPOINT
    in a class below `@serve.deployment`          METHOD, BATCH or LIFECYCLE
    anything else                                 not called from outside

`execution.plan` decides where each runs, by a stand-in function of the same kind.
"""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType

from ingress.check.sources import Function, Sources, dotted, last_name
from ingress.check.subjects import HOOKS, Subject, handed_on, planned
from ingress.core.base.settings import Settings
from ingress.core.execution.execution import Lanes, Role
from ingress.core.execution.lanes import method

_ROUTES = {
    *("api_route", "delete", "get", "head", "options", "patch", "post", "put", "route"),
    *("trace", "websocket", "websocket_route"),
}


def sources_in(paths: Iterable[Path]) -> Sources:
    """Return the given Python files and those in folders, except hidden ones and environments."""
    sources = Sources()
    for root in paths:
        found = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for path in found:
            below = path.relative_to(root).parts if root.is_dir() else ()
            if not any(part.startswith(".") or part == "site-packages" for part in below):
                sources.add(path, _module_name(path.resolve()))
    return sources


def subjects_in(sources: Sources, settings: Settings) -> list[Subject]:
    """Return the functions that a deployment or a FastAPI app seems to call."""
    roles = {function: _role(function, sources) for function in sources.functions()}
    roles |= dict.fromkeys(_dependencies(sources), Role.ENDPOINT)
    return [_subject(function, role, sources, settings) for function, role in roles.items() if role]


def dependencies_in(sources: Sources, settings: Settings) -> list[Subject]:
    """Return the functions in `Depends(...)`."""
    found = dict.fromkeys(_dependencies(sources))
    return [_subject(function, Role.ENDPOINT, sources, settings) for function in found]


def _subject(function: Function, role: Role, sources: Sources, settings: Settings) -> Subject:
    override = _override(function)
    func = _STAND_INS[function.is_async, function.is_generator]
    return planned(
        function,
        func if override is None else override(_like(func)),
        role,
        settings,
        lanes=Lanes(1, {}, _has_serial(function)),
        one_at_a_time=_one_at_a_time(function),
        sync_wrapper=_sync_decorator(function, sources) if role is Role.METHOD else "",
    )


def _dependencies(sources: Sources) -> Iterator[Function]:
    """Yield the functions that parameters and decorators name in `Depends(...)`."""
    for function in sources.functions():
        for node in ast.walk(function.node.args):
            yield from _depended_on(node, function, sources)
        for decorator in function.node.decorator_list:
            for node in ast.walk(decorator):
                yield from _depended_on(node, function, sources)


def _depended_on(node: ast.AST, user: Function, sources: Sources) -> Iterator[Function]:
    if not isinstance(node, ast.Call) or last_name(node) not in ("Depends", "Security"):
        return
    for argument in node.args[:1]:
        # A method of the class is named without the class.
        in_class = f"{user.file.module}.{user.cls}.{dotted(argument)}"
        full_name = sources.full_name(argument, user.file)
        found = sources.function(in_class) or sources.function(full_name)
        if found is not None:
            yield found


def _role(function: Function, sources: Sources) -> Role | None:
    """Return the role of a function, by its decorators or those of its class."""
    if any(map(_is_route, function.node.decorator_list)):
        return Role.ENDPOINT
    name = function.node.name
    if function.parent is not None:
        return None
    if not function.cls:
        return Role.METHOD if "deployment" in function.decorators else None
    if "deployment" not in map(last_name, function.file.classes[function.cls].decorator_list):
        return None
    if name in ("__init__", "__del__"):
        return Role.LIFECYCLE
    if "batch" in function.decorators:
        return Role.BATCH
    is_entry = name in HOOKS or not (name.startswith("_") or name in handed_on(sources))
    return Role.METHOD if is_entry else None


def _is_route(decorator: ast.expr) -> bool:
    """Return whether a decorator is `@app.get(...)` or similar, with any name for the app."""
    func = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr in _ROUTES


def _sync_decorator(function: Function, sources: Sources) -> str:
    """Return the wrapper of a user decorator that makes an `async def` a `def`, or ""."""
    for decorator in sources.decorators_of(function) if function.is_async else ():
        inner = list(decorator.children.values())
        if inner and not any(each.is_async for each in inner):
            return inner[0].name
    return ""


def _one_at_a_time(function: Function) -> bool:
    """Return whether a function's deployment has `max_ongoing_requests=1`."""
    cls = function.file.classes.get(function.cls)
    decorators = [] if cls is None else cls.decorator_list
    return any(
        keyword.arg == "max_ongoing_requests" and ast.unparse(keyword.value) == "1"
        for call in decorators
        if isinstance(call, ast.Call)
        for keyword in call.keywords
    )


def _override(function: Function) -> Callable[[FunctionType], FunctionType] | None:
    """Return the `@serve.method(...)` of a function, to apply to its stand-in."""
    for each in function.node.decorator_list:
        if isinstance(each, ast.Call) and last_name(each) == "method":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in each.keywords}
            if given.get("execution", "").strip("'\"") in ("event_loop", "serial"):
                return method(execution=given["execution"].strip("'\""))  # type: ignore[arg-type]
            return method(execution="threadpool")  # a lane's threads are threads
    return None


def _like(func: Callable[..., object]) -> FunctionType:
    """Return a copy of a function, so that a decorator does not change the shared one."""
    assert isinstance(func, FunctionType)  # for types
    return FunctionType(func.__code__, func.__globals__)


def _has_serial(function: Function) -> bool:
    """Return whether a function's class has a serial method, so its constructor is serial, too."""
    return any(
        "execution='serial'" in ast.unparse(decorator)
        for each in function.file.functions
        if each.cls == function.cls
        for decorator in each.node.decorator_list
    )


def _module_name(path: Path) -> str:
    names = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(names)) or path.parent.name


def _function() -> None: ...
async def _coroutine() -> None: ...
def _generator() -> Iterator[None]:
    yield


async def _async_generator() -> AsyncIterator[None]:
    yield


_STAND_INS: dict[tuple[bool, bool], Callable[..., object]] = {
    (False, False): _function,
    (True, False): _coroutine,
    (False, True): _generator,
    (True, True): _async_generator,
}
"""Functions, by whether they are async and whether they are generators."""
