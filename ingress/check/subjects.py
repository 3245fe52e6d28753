"""What code there is to check, and where it runs: of an application, or of files alone.

    an application   its deployments are asked what they call, `execution.plan` where that runs
    files            what is decorated as a deployment or a route is taken for one; for each, a
                     function that is written the same way is planned in its place

Every `async def` of the user's runs on an event loop, whoever calls it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingress.build import BuiltDeployment
from ingress.check.sources import (
    OURS,
    Function,
    SourceFile,
    Sources,
    dotted,
    is_users,
    last_name,
    read,
)
from ingress.execution import ExecutionMode, Kind, Role, code_of, kind, plan
from ingress.settings import Settings
from ingress.user_code import public_methods

_ROUTES = {
    *("api_route", "delete", "get", "head", "options", "patch", "post", "put", "route"),
    *("trace", "websocket", "websocket_route"),
}
_HOOKS = ("__call__", "reconfigure", "check_health")
_OFFLOADS = {"to_thread", "run_in_executor", "run_in_threadpool", "run_sync", "submit", "map"}


@dataclass(frozen=True, slots=True)
class Subject:
    """One function of the user's that a deployment calls, and where.

    `mode` is where it runs now, `mode_at_1` where with the flag at 1. `func` is what is called, if
    that is known: a decorator's wrapper, maybe. `one_at_a_time` says that the deployment's
    instances have one request each.
    """

    function: Function
    role: Role
    mode: ExecutionMode
    mode_at_1: ExecutionMode
    reason: str
    func: Callable[..., Any] | None = None
    one_at_a_time: bool = False
    sync_wrapper: str = ""

    @property
    def is_lifecycle(self) -> bool:
        return self.role is Role.LIFECYCLE

    @property
    def blocks(self) -> bool:
        """Whether it is a `def` on the event loop."""
        return self.mode is ExecutionMode.EVENT_LOOP and not self.function.is_async

    @property
    def moves(self) -> bool:
        """Whether the flag takes it from the loop to a thread."""
        return self.mode_at_1 is not ExecutionMode.EVENT_LOOP and self.role is Role.METHOD

    @property
    def is_threaded_at_1(self) -> bool:
        return not self.function.is_async and self.mode_at_1 is ExecutionMode.THREADPOOL


def sources_of(module_name: str, deployments: Iterable[BuiltDeployment], app_dir: Path) -> Sources:
    """Return the user's files: an application's modules, and what of theirs these import.

    The user's is what lies below a folder or in the package of the application's module.
    """
    package, root = module_name.partition(".")[0], app_dir.resolve()
    found: dict[str, SourceFile | None] = {}
    waiting = [module_name, *(each.deployment.func_or_class.__module__ for each in deployments)]
    while waiting:
        name = waiting.pop()
        path = getattr(sys.modules.get(name), "__file__", None)
        if name in found or not path or not path.endswith(".py"):
            continue
        resolved = Path(path).resolve()
        is_package = name.partition(".")[0] == package and not resolved.is_relative_to(OURS)
        if not is_package and not (resolved.is_relative_to(root) and is_users(resolved)):
            continue
        file = found[name] = read(resolved, name)
        # Of `a.b.c` any part may be the module, and the packages it is in run, too.
        for imported in [] if file is None else file.imports.values():
            parts = imported.split(".")
            waiting += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return Sources(file for file in found.values() if file is not None)


def sources_in(paths: Iterable[Path]) -> Sources:
    """Return the Python files of folders, hidden ones and environments left out, and files."""
    files = []
    for root in paths:
        found = [root] if root.is_file() else sorted(root.rglob("*.py"))
        for path in found:
            below = path.relative_to(root).parts if root.is_dir() else ()
            if not any(part.startswith(".") or part == "site-packages" for part in below):
                files.append(read(path.resolve(), _module_name(path.resolve())))
    return Sources(file for file in files if file is not None)


def subjects_of(
    deployments: Iterable[BuiltDeployment], sources: Sources, settings: Settings
) -> list[Subject]:
    """Return what the deployments call of the user's."""
    return [
        subject
        for built in deployments
        for func, role in _callables(built, sources)
        for subject in _subjects(func, role, built, sources, settings)
    ]


def subjects_in(sources: Sources, settings: Settings) -> list[Subject]:
    """Return what looks like called by a deployment or a FastAPI app."""
    found = []
    for function in sources.functions():
        role = _role(function, sources)
        if role is None:
            continue
        stand_in = _STAND_INS[_kind(function)]
        now, at_1 = (
            _plan(stand_in, role, flag) for flag in (settings.run_sync_in_threadpool, True)
        )
        wrapper = _sync_decorator(function, sources) if role is Role.METHOD else ""
        found.append(Subject(function, role, now.mode, at_1.mode, now.reason, sync_wrapper=wrapper))
    return found


def _callables(
    built: BuiltDeployment, sources: Sources
) -> Iterator[tuple[Callable[..., Any], Role]]:
    """Yield what one deployment calls, and as what."""
    target: Any = built.deployment.func_or_class
    if not inspect.isclass(target):
        yield target, Role.METHOD
        return
    routes = set()
    if built.is_asgi:
        for route in target.__ingress_spec__.bind(target).routes():  # type: ignore[attr-defined]
            routes.add(code_of(route.func))
            yield route.func, Role.ENDPOINT
    for name in ("__init__", "__del__"):
        yield getattr(target, name, object.__init__), Role.LIFECYCLE
    handed_on = _handed_on(sources)
    for name in dict.fromkeys([*_HOOKS, *public_methods(target)]):
        value = inspect.getattr_static(target, name, None)
        value = getattr(value, "__func__", value)
        if not inspect.isroutine(value) or code_of(value) in routes:
            continue
        if name in _HOOKS or name not in handed_on:
            yield value, Role.METHOD


def _subjects(
    func: Any, role: Role, built: BuiltDeployment, sources: Sources, settings: Settings
) -> Iterator[Subject]:
    """Yield what is called, and what decorators have wrapped in it, as far as it is the user's."""
    one_at_a_time = built.deployment.config.max_ongoing_requests == 1
    outer_is_async, sync_wrapper = False, ""
    while func is not None:
        is_batch = hasattr(func, "__ingress_batcher__")
        now = _plan(func, role, settings.run_sync_in_threadpool)
        at_1 = _plan(func, role, True)
        function = sources.of_code(code_of(func))
        # An `async def` wrapper is written to move a `def` somewhere, who knows where.
        if function is not None and not (outer_is_async and not function.is_async):
            wrapper = sync_wrapper if function.is_async and role is Role.METHOD else ""
            yield Subject(
                function, role, now.mode, at_1.mode, now.reason, func, one_at_a_time, wrapper
            )
        outer_is_async = kind(func).is_async and not is_batch
        sync_wrapper = "" if kind(func).is_async else at_1.name
        func = getattr(func, "__wrapped__", None) or _closed_over(func)
        role = Role.BATCH if is_batch else role


def _closed_over(func: Any) -> Any:
    """Return the one `async def` that a wrapper without `functools.wraps` calls, if it has one."""
    inner = []
    for cell in getattr(func, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that was never assigned to
            continue
        if inspect.isfunction(value) and kind(value).is_async:
            inner.append(value)
    return inner[0] if len(inner) == 1 and kind(func) is Kind.FUNCTION else None


def _handed_on(sources: Sources) -> set[str]:
    """Return the names of methods that the user's code gives to something that runs in threads.

    Unless a handle calls them, too.
    """
    given: set[str] = set()
    by_handle: set[str] = set()
    for file in sources.files.values():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in _OFFLOADS:
                    given |= {each.attr for each in node.args if isinstance(each, ast.Attribute)}
                elif node.func.attr in ("remote", "options"):
                    by_handle.add(dotted(node.func.value).rpartition(".")[2])
            elif isinstance(node, ast.Call) and dotted(node.func) in _OFFLOADS:
                given |= {each.attr for each in node.args if isinstance(each, ast.Attribute)}
    return given - by_handle


def _role(function: Function, sources: Sources) -> Role | None:
    """Return what a function is from how it, or its class, is decorated."""
    if function.parent is None and any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in _ROUTES
        for each in function.node.decorator_list
    ):
        return Role.ENDPOINT
    name = function.node.name
    if function.parent is not None:
        return None
    if not function.cls:
        return Role.METHOD if "deployment" in function.decorators else None
    if not _is_deployment(function.file, function.cls):
        return None
    if name in ("__init__", "__del__"):
        return Role.LIFECYCLE
    if "batch" in function.decorators:
        return Role.BATCH
    is_entry = name in _HOOKS or not (name.startswith("_") or name in _handed_on(sources))
    return Role.METHOD if is_entry else None


def _sync_decorator(function: Function, sources: Sources) -> str:
    """Return which decorator of the user's makes an `async def` a `def`, "" if none does."""
    for each in function.node.decorator_list if function.is_async else ():
        func = each.func if isinstance(each, ast.Call) else each
        decorator = sources.function(sources.full_name(func, function.file))
        inner = [] if decorator is None else list(decorator.children.values())
        if inner and not any(each.is_async for each in inner):
            return inner[0].name
    return ""


def _is_deployment(file: SourceFile, cls: str) -> bool:
    return "deployment" in map(last_name, file.classes[cls].decorator_list)


def _kind(function: Function) -> Kind:
    if function.is_generator:
        return Kind.ASYNC_GENERATOR if function.is_async else Kind.GENERATOR
    return Kind.COROUTINE if function.is_async else Kind.FUNCTION


def _plan(func: Callable[..., Any], role: Role, sync_in_threadpool: bool) -> Any:
    # Nothing is run, so there are no threads.
    return plan(func, role, sync_in_threadpool=sync_in_threadpool, pool=None)  # type: ignore[arg-type]


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


_STAND_INS: dict[Kind, Callable[..., Any]] = {
    Kind.FUNCTION: _function,
    Kind.COROUTINE: _coroutine,
    Kind.GENERATOR: _generator,
    Kind.ASYNC_GENERATOR: _async_generator,
}
