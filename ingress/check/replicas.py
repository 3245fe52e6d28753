"""IG111 to IG113: objects that several replicas share, or only seem to share.

lock = asyncio.Lock()  an object of one event loop, reached by several replicas     IG111
COUNTS[key] = 1        a global of the module: each process has one of its own      IG112
Model.bind(lock)       an argument that no process can be sent                      IG113
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.loop_objects import LoopObject, loop_objects
from ingress.app.declaration.names import targets_of
from ingress.check.races import MUTATORS, local_names
from ingress.check.rules import RULES, Finding
from ingress.check.sources import Function, Sources, dotted, own_nodes
from ingress.check.state import State, state_around
from ingress.check.subjects import subjects_of
from ingress.core.base.settings import Settings
from ingress.serving.processes.code import pickled_arguments


def shared_objects(deployments: Iterable[BuiltDeployment], sources: Sources) -> Iterator[Finding]:
    """Yield the objects of one loop that would be used on several.

    A deployment whose `loop` is written has decided. Replicas in processes share no object.
    """
    found: defaultdict[LoopObject, list[BuiltDeployment]] = defaultdict(list)
    for built in deployments:
        config = built.deployment.config
        if config.loop is None and config.isolation == "thread":
            for each in loop_objects(built):
                found[each].append(built)
    for each, users in found.items():
        if sum(built.deployment.config.replica_count for built in users) == 1 or not each.line:
            continue
        names = " and ".join(built.name for built in users)
        path = Path(each.file).resolve()
        if (file := sources.files.get(path)) is not None and file.allows("IG111", each.line):
            continue
        named = f" and is named in {each.named_in}" if each.named_in else ""
        message = (
            f"{each.name} ({each.kind}) belongs to one event loop{named}, so the replicas of "
            f"{names} share a loop"
        )
        yield Finding(RULES["IG111"], path, each.line, 1, message, tuple(b.name for b in users))


def findings_of_processes(
    deployments: Iterable[BuiltDeployment], sources: Sources, settings: Settings
) -> Iterator[Finding]:
    for built in deployments:
        if built.deployment.config.isolation == "process":
            yield from _arguments(built, sources)
            for subject in subjects_of([built], sources, settings):
                yield from _globals(subject.function, built.name, sources)


def _arguments(built: BuiltDeployment, sources: Sources) -> Iterator[Finding]:
    target = built.deployment.func_or_class
    try:
        pickled_arguments(built)
    except TypeError as error:
        path = Path(inspect.getsourcefile(target) or "").resolve()
        line = inspect.getsourcelines(target)[1]
        if (file := sources.files.get(path)) is not None and not file.allows("IG113", line):
            yield Finding(RULES["IG113"], path, line, 1, str(error), (built.name,))


def _globals(function: Function, deployment: str, sources: Sources) -> Iterator[Finding]:
    file, state = function.file, state_around(function.file, function.cls, sources)
    local = local_names(function)
    for each in own_nodes(function.node):
        node: Any = each
        for name in _written(node, state):
            is_shared = name not in local and sources.is_global(name, file)
            if is_shared and not file.allows("IG112", node.lineno):
                message = (
                    f"{name} is a global, and each replica of {deployment} is a process with a "
                    f"{name} of its own: the others do not see this"
                )
                names = (f"{function.cls}.{function.name}" if function.cls else function.name,)
                column = node.col_offset + 1
                yield Finding(RULES["IG112"], file.path, node.lineno, column, message, names)


def _written(node: ast.AST, state: State) -> Iterator[str]:
    """Yield the names that a statement or an expression assigns to, or whose value it changes."""
    for target in targets_of(node):
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            inner = each.value if isinstance(each, ast.Subscript) else each
            if isinstance(inner, ast.Name):
                yield inner.id
    if isinstance(node, ast.Call):
        owner, _, method = dotted(node.func).rpartition(".")
        if method in MUTATORS and owner in state.containers:
            yield owner
