"""The user functions that an application calls, and where they run, by `execution.plan`.

    endpoints of its FastAPI app      ENDPOINT
    `__call__`, public methods, hooks METHOD, unless they are only handed to threads
    functions under `@batch`          BATCH
    `__init__`, `__del__`             LIFECYCLE

Functions inside a decorator's wrapper count as called, too. Every user `async def` runs on an event
loop, with any caller.

For files that are not imported, the decorators in the source say the same:

    below `@app.get(...)`, in `Depends(...)`      ENDPOINT
    in a class below `@serve.deployment`          METHOD, BATCH or LIFECYCLE
    anything else                                 not called from outside

There `execution.plan` decides where each runs, by a stand-in function of the same kind.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.names import PublicMethods
from ingress.check.sources import OURS, Function, Sources, dotted, last_name
from ingress.core.base.foreign import stored, undisguised
from ingress.core.base.libraries import is_library
from ingress.core.base.settings import Settings
from ingress.core.execution.execution import (
    ExecutionMode,
    Kind,
    Lanes,
    Role,
    code_of,
    kind,
    name_of,
)
from ingress.core.execution.lanes import lanes_of, method
from ingress.observe.inspection.budget import plans_of

_HOOKS = ("__call__", "reconfigure", "check_health")
_OFFLOADS = {
    *("BackgroundTask", "add_task", "map", "run_in_executor", "run_in_threadpool", "run_sync"),
    *("submit", "to_thread"),
}
_ROUTES = {
    *("api_route", "delete", "get", "head", "options", "patch", "post", "put", "route"),
    *("trace", "websocket", "websocket_route"),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """One user function that is called from outside, and where it runs.

    `mode` is for the current flag, and `reason` explains it. `one_at_a_time` says that an instance
    has one request at a time. `sync_wrapper` names the `def` around an `async def`.
    """

    function: Function
    role: Role
    mode: ExecutionMode
    mode_at_0: ExecutionMode
    mode_at_1: ExecutionMode
    reason: str
    one_at_a_time: bool
    sync_wrapper: str

    @property
    def moves(self) -> bool:
        """True if the flag moves the function from the loop to a thread."""
        return (self.mode_at_0, self.mode_at_1) == (
            ExecutionMode.EVENT_LOOP,
            ExecutionMode.THREADPOOL,
        )

    @property
    def is_threaded_at_1(self) -> bool:
        """True if several threads may run the function at once, with the flag at 1."""
        is_threaded = self.mode_at_1 is ExecutionMode.THREADPOOL and not self.function.is_async
        return is_threaded and self.role in (Role.METHOD, Role.ENDPOINT)


def _planned(
    function: Function,
    func: Callable[..., object],
    role: Role,
    settings: Settings,
    *,
    lanes: Lanes,
    one_at_a_time: bool,
    sync_wrapper: str,
) -> Subject:
    """Return the subject of `function`, which runs where `func`, made of its source, runs."""
    at_0, at_1 = plans_of(func, role, lanes)
    now = at_1 if settings.run_sync_in_threadpool else at_0
    modes = (now.mode, at_0.mode, at_1.mode)
    return Subject(function, role, *modes, now.reason, one_at_a_time, sync_wrapper)


def sources_of(module_name: str, deployments: Iterable[BuiltDeployment], app_dir: Path) -> Sources:
    """Return the user's files: an application's modules, and the user modules that these import.

    A user module is below `app_dir` or in the package of the application's module.
    """
    package, root = module_name.partition(".")[0], app_dir.resolve()
    sources, seen = Sources(), set()
    waiting = [module_name, *(each.deployment.func_or_class.__module__ for each in deployments)]
    while waiting:
        name = waiting.pop()
        path = getattr(sys.modules.get(name), "__file__", None)
        if name in seen or not path or not path.endswith(".py"):
            continue
        seen.add(name)
        resolved = Path(path).resolve()
        is_package = name.partition(".")[0] == package and not resolved.is_relative_to(OURS)
        if not is_package and not (resolved.is_relative_to(root) and not is_library(str(resolved))):
            continue
        file = sources.add(resolved, name)
        # In `a.b.c` any prefix may be the module, and its packages are imported, too.
        for imported in [] if file is None else file.imports.values():
            parts = imported.split(".")
            waiting += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return sources


def subjects_of(
    deployments: Iterable[BuiltDeployment], sources: Sources, settings: Settings
) -> list[Subject]:
    """Return the user functions that the deployments call."""
    return [
        subject
        for built in deployments
        for func, role in _callables(built, sources)
        for subject in _subjects(func, role, built, sources, settings)
    ]


def _callables(
    built: BuiltDeployment, sources: Sources
) -> Iterator[tuple[Callable[..., object], Role]]:
    """Yield the functions that a deployment calls, with their roles."""
    target = built.deployment.func_or_class
    if not inspect.isclass(target):
        yield target, Role.METHOD
        return
    routes = set()
    if built.bound_app is not None:
        for route in built.bound_app.routes():
            routes.add(code_of(route.func))
            yield route.func, Role.ENDPOINT
    for name in ("__init__", "__del__"):
        yield getattr(target, name, object.__init__), Role.LIFECYCLE
    elsewhere = _handed_on(sources)
    for name in dict.fromkeys([*_HOOKS, *PublicMethods(target)]):
        value = inspect.getattr_static(target, name, None)
        value = undisguised(value)
        value = stored(value, "__func__", value)
        if not callable(value) or inspect.isclass(value) or code_of(value) in routes:
            continue
        if name in _HOOKS or name not in elsewhere:
            yield value, Role.METHOD


def _subjects(
    func: Callable[..., object] | None,
    role: Role,
    built: BuiltDeployment,
    sources: Sources,
    settings: Settings,
) -> Iterator[Subject]:
    """Yield a called function and the functions that its decorators wrap, the user's only."""
    config = built.deployment.config
    lanes = lanes_of(built.deployment.func_or_class, config.max_ongoing_requests, config.lanes)
    is_in_async, wrapper = False, ""
    seen: set[int] = set()  # decorators may make a circle
    while func is not None and id(func) not in seen:
        seen.add(id(func))
        is_batch = hasattr(func, "__ingress_batcher__")
        function = sources.of_code(code_of(func))
        # An `async def` wrapper may run its `def` in any thread.
        if function is not None and not (is_in_async and not function.is_async):
            yield _planned(
                function,
                func,
                role,
                settings,
                lanes=lanes,
                one_at_a_time=config.max_ongoing_requests == 1,
                sync_wrapper=wrapper if function.is_async and role is Role.METHOD else "",
            )
        is_in_async = kind(func).is_async and not is_batch
        wrapper = "" if kind(func).is_async else name_of(func)
        func = undisguised(stored(func, "__wrapped__")) or _closed_over(func)
        role = Role.BATCH if is_batch else role


def _closed_over(func: Callable[..., object]) -> FunctionType | None:
    """Return the `async def` that a wrapper without `functools.wraps` calls, if it has just one."""
    inner = []
    for cell in getattr(func, "__closure__", None) or ():
        try:
            value = undisguised(cell.cell_contents)
        except ValueError:  # a variable that was never assigned to
            continue
        if inspect.isfunction(value) and kind(value).is_async:
            inner.append(value)
    return inner[0] if len(inner) == 1 and kind(func) is Kind.FUNCTION else None


@lru_cache(maxsize=8)
def _handed_on(sources: Sources) -> frozenset[str]:
    """Return the names of methods that user code hands to threads and no handle calls."""
    given: set[str] = set()
    by_handle: set[str] = set()
    for file in sources.files.values():
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Call):
                continue
            owner, _, called = dotted(node.func).rpartition(".")
            if called in _OFFLOADS:
                names = (dotted(each).partition(".") for each in node.args)
                given |= {name for head, _, name in names if head == "self"}
            elif called in ("remote", "options"):
                by_handle.add(owner.rpartition(".")[2])
    return frozenset(given - by_handle)


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
    return _planned(
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
    is_entry = name in _HOOKS or not (name.startswith("_") or name in _handed_on(sources))
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
