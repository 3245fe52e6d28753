"""Changed code in a process that keeps its objects: `ingress run --reload --keep MODULE`.

supervisor   sees that files have changed, and asks the process; restarts it if it says why
the process  imports the changed modules again, with the modules that need them, and updates the
             applications by what they are then, as `serve.run` does

A module needs the modules that it imports, anywhere but under TYPE_CHECKING; its packages, whose
`__init__` runs first; and the modules of the objects that it holds: a route that another module has
added to its app, say. If a kept module needs a changed one, or it is not certain that the new code
takes the place of the old, the process restarts.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import cache_from_source, resolve_name
from itertools import islice
from math import inf
from pathlib import Path
from time import monotonic, time
from traceback import walk_stack, walk_tb
from types import FunctionType, ModuleType
from typing import Any

from fastapi import APIRouter
from starlette.applications import Starlette
from uvicorn.supervisors import ChangeReload

from ingress.api import RunTarget
from ingress.app.config_file.loading import stamp_of, target_of
from ingress.app.config_file.reading import ConfigFileError
from ingress.app.declaration.build import BuiltDeployment, build
from ingress.app.declaration.module_app import NotAnApplication
from ingress.cli.control_socket import SUFFIX, CommandError, RunningServer
from ingress.cli.target import refusal
from ingress.cli.terminal import say
from ingress.cli.worker import Served
from ingress.core.base.libraries import is_library
from ingress.core.base.settings import runtime_folder, start_method
from ingress.engines import local_engine
from ingress.engines.applications import StartEnded
from ingress.serving.processes.code import imported
from ingress.serving.processes.process_host import ProcessHost
from ingress.telemetry.mistakes import format_failed_start, format_mistake
from ingress.telemetry.watchdog.stacks import current_frames

DELAY_S = 0.05  # of uvicorn's supervisor, between two looks at the files
IMPORT_S = 60.0  # for the process's answer
CHILD_S = 5.0  # for the answer of a replica in a process
_LOOK_S = 0.05
_MOST_HELD = 1_000  # items of a container of a module
_NAMED = 8  # modules, in an error
_REGISTERED = re.compile("already|duplicate", re.IGNORECASE)
"""Words of libraries for names that a module registers a second time."""


def users_modules() -> dict[str, ModuleType]:
    """Return the imported modules of the user's files, by name."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str)
        and file.endswith(".py")
        and not is_library(file)
        and name not in ("__main__", "__mp_main__")
    }


def check_keep(names: Sequence[str], served: Served, *, reload: bool) -> None:
    """Refuse modules of `--keep` that are not kept. The application has been imported."""
    if not names:
        return
    if not reload:
        raise refusal(
            f"--keep {names[0]} is for a server that reloads its code: add --reload, or leave it "
            "out"
        )
    known, targets = users_modules(), targets_of(served)
    for name in names:
        kept = [each for each in known if _is_in(each, [name])]
        if not kept:
            raise refusal(f"--keep {name}: {_unknown(name, known)}")
        if named := [each for each in targets if each in kept]:
            raise refusal(
                f"--keep {name}: {named[0]} has the application, so its code is the code to "
                "reload; put the objects to keep into a module that it imports, and keep that"
            )


def _unknown(name: str, known: Iterable[str]) -> str:
    """Return why a module cannot be kept."""
    names = sorted(known)
    if getattr(sys.modules.get(name), "__file__", None):
        return "it is no module of your files, and stays anyway; leave it out"
    text = "the application imports no module of this name"
    if close := get_close_matches(name.removesuffix(".py"), names, 3):
        return f"{text}; did you mean {' or '.join(close)}?"
    return f"{text}; it imports {', '.join(names[:_NAMED])}{', ...' * (len(names) > _NAMED)}"


def _is_in(module: str, names: Iterable[str]) -> bool:
    """Return whether a module is one of these, or in one that is a package."""
    return any(module == each or module.startswith(f"{each}.") for each in names)


def targets_of(served: Served) -> set[str]:
    """Return the modules that have the applications."""
    if served.file is None:
        return {served.target.partition(":")[0]}
    return {target_of(each)[0].partition(":")[0] for each in served.file.config.applications}


def _imports(source: bytes, package: str) -> set[str]:
    """Return the modules that a source imports; some of the names are not those of modules."""
    found: set[str] = set()
    todo: list[ast.AST] = []
    with suppress(SyntaxError, ValueError):  # a file that has changed since its import
        todo.append(ast.parse(source))
    while todo:
        match node := todo.pop():
            case ast.Import():
                found.update(each.name for each in node.names)
            case ast.ImportFrom():
                base = "." * node.level + (node.module or "")
                with suppress(ImportError):  # beyond its package: the import raises it
                    base = resolve_name(base, package)
                found.update([base, *(f"{base}.{each.name}" for each in node.names)])
            case ast.If() if "TYPE_CHECKING" in ast.unparse(node.test):
                todo += node.orelse
            case _:
                todo += ast.iter_child_nodes(node)
    return found


def _held(module: ModuleType) -> Iterator[str]:
    """Yield the modules of the objects that a module holds, also in containers and in apps."""
    for value in list(vars(module).values()):
        items: list[Any] = [value]
        if issubclass(type(value), list | tuple | set | frozenset):
            items += islice(list(value), _MOST_HELD)
        elif issubclass(type(value), dict):
            items += [dict.get(value, key) for key in islice(list(value), _MOST_HELD)]
        for each in items:
            if issubclass(type(each), Starlette | APIRouter):
                items += [getattr(one, "endpoint", None) for one in each.routes]
            is_own = issubclass(type(each), type | FunctionType)  # else no code of it runs
            name = (each if is_own else type(each)).__module__
            yield str(each.__name__ if type(each) is ModuleType else name)


Needs = Mapping[str, Collection[str]]
"""The names of the modules that each module needs."""


def needing(changed: Iterable[str], needs: Needs) -> dict[str, str]:
    """Return the modules that need the changed ones, each with the one that it needs.

    A changed module is there with itself.
    """
    found = {each: each for each in changed}
    todo = list(found)
    for each in todo:
        more = {name: each for name in needs if name not in found and each in needs[name]}
        found |= more
        todo += more
    return found


def _source(module: ModuleType) -> bytes:
    """Return the source of a module now; nothing if its file is absent."""
    try:
        return Path(str(module.__file__)).read_bytes()
    except OSError:
        return b""


class KeepingProcess:
    """The process of `--reload --keep`: it executes changed code, or says why it cannot.

    It is called in one thread at a time. `threads` are those that ran before the import.
    """

    def __init__(
        self, kept: Sequence[str], served: Served, threads: Collection[int | None]
    ) -> None:
        self._served = served
        self._kept = kept
        self._sources: dict[str, bytes] = {}  # of the modules as they were imported
        self._imports: dict[str, set[str]] = {}
        self._noted_at = 0.0
        self._note({})
        self._threads = {
            each.ident: each.name for each in threading.enumerate() if each.ident not in threads
        }
        self._latest: object = None

    def _note(self, imported: Mapping[str, bytes] | None) -> None:
        """Note modules after an import; `imported` are sources that were read before it.

        A file that has changed since then differs, and is the next change. Without `imported`,
        modules that calls have imported meanwhile are noted.
        """
        modules, before = users_modules(), imported or {}
        for name in before.keys() | (modules.keys() - self._sources.keys()):
            if (module := modules.get(name)) is None:  # no module imports it any more
                del self._sources[name], self._imports[name]
                continue
            source = before[name] if name in before else _source(module)
            if imported is None and self._noted_at < _time_of(module):
                source = b""  # which version was imported is not known
            self._sources[name] = source
            self._imports[name] = _imports(source or _source(module), module.__package__ or "")
        self._noted_at = time()

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Apply the changes: the command of the supervisor. Returns why it must restart, or ""."""
        began = monotonic()
        file = self._served.file
        names = (
            {self._served.name}
            if file is None
            else {each.name for each in file.config.applications}
        )
        if self._latest is None and not names <= local_engine().applications.keys():
            return "the applications were still starting"
        if file is not None and stamp_of(file.path) != file.stamp:
            return f"{file.path.name} changed"
        self._note(None)
        modules = users_modules()
        changed = [name for name, each in modules.items() if _source(each) != self._sources[name]]
        if not changed:
            return ""
        for name in changed:
            path = Path(str(modules[name].__file__))
            try:
                compile(path.read_bytes(), path, "exec", dont_inherit=True)
            except OSError as error:
                return _not_applied(f"cannot read {path}: {error.strerror}")
            except Exception as error:  # such as a `RecursionError`
                return _not_applied(format_mistake(error))
            # Its stamp has whole seconds: two changes in one second may have the same.
            Path(cache_from_source(path)).unlink(missing_ok=True)
        needs = {
            name: {*self._imports[name], *_held(each), *_packages(name)}
            for name, each in modules.items()
        }
        affected = needing(changed, needs)
        return self._reason(changed, affected, needs) or self._reload(affected, began)

    def _reason(self, changed: Iterable[str], affected: Mapping[str, str], needs: Needs) -> str:
        """Return why the process must restart, "" if the modules can be executed again."""
        for name in affected:
            if _is_in(name, self._kept):
                return _chain(name, affected)
        targets = targets_of(self._served)
        for name in changed:
            if not targets & needing([name], needs).keys():
                return f"{name} changed, and it is not known which module imports it"
        frames = current_frames()
        for ident, thread in self._threads.items():
            for frame, _ in walk_stack(frames.get(ident or 0)):
                if (name := str(frame.f_globals.get("__name__"))) in affected:
                    return f"{thread}, a thread that {name} has started, runs its old code"
        return _old_code_in_children(affected)

    def _reload(self, affected: Iterable[str], began: float) -> str:
        """Import modules again, and begin to update the applications."""
        modules = users_modules()
        before = {each: _source(modules[each]) for each in affected}
        old = {each: sys.modules.pop(each) for each in affected}
        collectors = _unregistered(map(vars, old.values()))
        importlib.invalidate_caches()
        try:
            targets = list(self._served.targets())
            built = [one for each in targets for one in _deployments(each)]
        except BaseException as error:  # `KeyboardInterrupt` too: no signal raises it in a thread
            found = users_modules().items()
            made = [sys.modules.pop(key) for key, each in found if each is not modules.get(key)]
            frames = [frame for frame, _ in walk_tb(error.__traceback__)]
            names = [each.f_globals for each in frames if each.f_globals["__name__"] in affected]
            _unregistered([*map(vars, made), *names])
            for each in collectors:
                sys.modules["prometheus_client"].REGISTRY.register(each)
            _put(old)
            if is_library(frames[-1].f_code.co_filename) and _REGISTERED.search(str(error)):
                return f"{type(error).__name__}: {error}"
            is_told = isinstance(error, ConfigFileError | NotAnApplication)
            return _not_applied(str(error) if is_told else format_mistake(error))
        self._note(before)
        for each in built:
            is_new = each.deployment.func_or_class.__module__ in affected
            in_process = each.deployment.config.isolation == "process"
            if is_new and in_process and start_method() == "forkserver":
                return f"the fork server of {each.name} has its old code"
        self._latest = targets
        args = targets, ", ".join(sorted(affected)), began
        threading.Thread(target=self._update, args=args, name="ingress-reload", daemon=True).start()
        return ""

    def _update(self, targets: Sequence[RunTarget], names: str, began: float) -> None:
        """Update the applications. The old code serves on if a constructor fails."""
        try:
            for each in targets:
                if self._latest is not targets:  # there is newer code
                    return
                local_engine().run(each.target, each.name, each.route_prefix, keeps_same=True)
        except StartEnded:  # by newer code
            return
        except Exception as error:
            has_cause = error.__cause__ is not None
            _not_applied(format_failed_start(error) if has_cause else str(error))
        else:
            _forget()
            say(f"reloaded {names} in {monotonic() - began:.2f} s")


def _old_code_in_children(affected: Collection[str]) -> str:
    """Return which replica in a process would stay with old modules, "" if none would.

    It has imported them for an object of a class of theirs, say, that a call has brought.
    """
    for application in list(local_engine().applications.values()):
        for deployment in list(application.deployments.values()):
            if deployment.using.built.deployment.func_or_class.__module__ in affected:
                continue  # its replicas are replaced
            for each in deployment.replicas:
                if isinstance(each.host, ProcessHost) and not each.is_ending:
                    try:
                        found = each.host.look(imported, tuple(affected), timeout_s=CHILD_S)()
                    except Exception as error:
                        return f"{each.replica_id} does not tell what it has imported: {error!r}"
                    if found:
                        return f"{each.replica_id}, a process, has imported {', '.join(found)}"
    return ""


def _forget() -> None:
    """Empty FastAPI's caches by callable, which keep the endpoints of old modules."""
    modules = [each for name, each in list(sys.modules.items()) if name.startswith("fastapi.")]
    for each in [value for module in modules for value in list(vars(module).values())]:
        if type(each) is type(is_library):  # `lru_cache`
            each.cache_clear()


def _deployments(target: RunTarget) -> tuple[BuiltDeployment, ...]:
    return build(target.target, target.name, acts_on_all=True).deployments


def _packages(name: str) -> Iterator[str]:
    return (name[: each.start()] for each in re.finditer(r"\.", name))


def _time_of(module: ModuleType) -> float:
    stamp = stamp_of(Path(str(module.__file__)))
    return inf if stamp is None else stamp[0] / 1e9


def _chain(name: str, needing: Mapping[str, str]) -> str:
    """Return how a kept module needs a changed one."""
    chain = [name]
    while needing[chain[-1]] != chain[-1]:
        chain.append(needing[chain[-1]])
    if len(chain) == 1:
        return f"{name}, which is kept, changed"
    needs = ", which needs ".join(chain[1:])
    return f"{chain[-1]} changed, and {name}, which is kept, needs {needs}"


def _put(modules: Mapping[str, ModuleType]) -> None:
    """Put modules back, also into their packages."""
    sys.modules.update(modules)
    for name, module in modules.items():
        package, _, last = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], last, module)


def _unregistered(namespaces: Iterable[Mapping[str, object]]) -> list[Any]:
    """Unregister the collectors of prometheus_client that these modules alone hold.

    The modules make them again when they are executed again.
    """
    found: list[Any] = []
    if (client := sys.modules.get("prometheus_client")) is not None:
        others = [vars(each) for each in list(sys.modules.values()) if type(each) is ModuleType]
        held = {id(value) for each in others for value in list(each.values())}
        for each in [value for names in namespaces for value in list(names.values())]:
            with suppress(KeyError, TypeError):  # it is of another registry, or of none
                if hasattr(type(each), "collect") and id(each) not in held:
                    client.REGISTRY.unregister(each)
                    found.append(each)
    return found


def _not_applied(text: str) -> str:
    say(f"{text}\nnot reloaded: the code before serves on")
    return ""


class KeepingReload(ChangeReload):  # type: ignore[valid-type,misc]
    """uvicorn's supervisor of `--reload`, which restarts the process if that says why."""

    def should_restart(self) -> list[Path] | None:
        paths: list[Path] | None = super().should_restart()
        if not paths or not self.process.is_alive():
            return paths
        server = RunningServer(os.getpid(), runtime_folder() / f"{os.getpid()}{SUFFIX}")
        pool = ThreadPoolExecutor(1, "ingress-ask")
        asked = pool.submit(server.ask, "changed", IMPORT_S)
        pool.shutdown(wait=False)
        while not wait_for([asked], _LOOK_S).done:
            if self.should_exit.is_set():
                return None
        try:
            reason = asked.result()
        except (CommandError, OSError) as error:
            reason = f"the process does not tell whether it can reload: {error}"
        if reason:
            say(f"restarts: {reason}")
        return paths if reason else None
