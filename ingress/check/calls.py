"""The calls that run other user functions in place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ingress.check.sources import Function, Sources, consumes, dotted, own_nodes


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call in the body of `caller` that runs the body of `callee`."""

    caller: Function
    callee: Function
    node: ast.Call


def callee(call: ast.Call, caller: Function, sources: Sources) -> Function | None:
    """Return the user function that is called, `None` if it is unknown."""
    target = call.func
    if isinstance(target, ast.Name):
        scope: Function | None = caller
        while scope is not None:
            if target.id in scope.children:
                return scope.children[target.id]
            if target.id in parameters(scope):
                return None
            scope = scope.parent
    elif isinstance(target, ast.Attribute) and dotted(target.value) == (caller.receiver or None):
        return sources.method(caller.file, caller.cls, target.attr)
    return sources.function(sources.full_name(target, caller.file))


def calls_of(caller: Function, sources: Sources, *, returned: bool = False) -> Iterator[CallSite]:
    """Yield the calls of `def`s whose bodies run as part of the caller's.

    A generator's call counts only if it is iterated here, or with `returned` if the caller's caller
    iterates it. Awaited calls of decorated functions are left out: a decorator may have moved them
    to a thread.
    """
    nodes = list(own_nodes(caller.node))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        if (found := callee(node, caller, sources)) is None or found.is_async or found is caller:
            continue
        parent = parents.get(node, caller.node)
        if isinstance(parent, ast.Await) and found.node.decorator_list:
            continue
        is_iterated = consumes(parent, node) or (returned and isinstance(parent, ast.Return))
        if not found.is_generator or is_iterated:
            yield CallSite(caller, found, node)


def parameters(function: Function) -> set[str]:
    arguments = function.node.args
    named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {each.arg for each in (*named, arguments.vararg, arguments.kwarg) if each is not None}
