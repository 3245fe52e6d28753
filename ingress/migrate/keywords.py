"""The options of a call that are refused, deprecated or without effect in one process."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import ingress
from ingress import _unsupported
from ingress.app.declaration.cluster_options import CLUSTER_ONLY
from ingress.config import (
    AutoscalingConfig,
    BackpressureConfig,
    DeploymentConfig,
    HTTPOptions,
    LoggingConfig,
    RequestRouterConfig,
)
from ingress.core.base.options import Options
from ingress.migrate import advice

Found = tuple[ast.AST, str, str]
"""A node, the name of the option, and the sentence."""

_FUNCTIONS = ("batch", "delete", "multiplexed", "run", "run_many", "start", "RunTarget")
_OPTIONS: dict[str, type[Options]] = {
    "autoscaling_config": AutoscalingConfig,
    "backpressure_config": BackpressureConfig,
    "http_options": HTTPOptions,
    "logging_config": LoggingConfig,
    "request_router_config": RequestRouterConfig,
}
_CLASSES = {each.__name__: each for each in _OPTIONS.values()}


def in_call(node: ast.Call, path: list[str], *, has_serve: bool) -> Iterator[Found]:
    """Yield the options of a call that need a hand. `path` is the function in `ray.serve`."""
    name = path[-1] if path else ""
    is_options = isinstance(node.func, ast.Attribute) and node.func.attr == "options"
    if name in _FUNCTIONS and path[:-1] in ([], ["api"]):
        yield from _of_function(node, name)
    elif name in _CLASSES:
        yield from _of_class(node.keywords, _CLASSES[name])
    elif name == "deployment" or (is_options and has_serve):
        yield from _of_deployment(node, is_whole=name == "deployment")
    for keyword in node.keywords:
        if path and keyword.arg in _OPTIONS and isinstance(keyword.value, ast.Dict):
            yield from _of_class(_pairs(keyword.value), _OPTIONS[keyword.arg])


def in_runtime_env(node: ast.expr) -> Iterator[Found]:
    """Yield the keys of a `runtime_env` that one process cannot have."""
    for key, _, place in _texts(node):
        if key in advice.RUNTIME_ENV:
            yield place, f"runtime_env[{key!r}]", advice.RUNTIME_ENV[key]


def _of_function(node: ast.Call, name: str) -> Iterator[Found]:
    signature = inspect.signature(getattr(ingress, name))
    known = _unsupported.PARAMETERS.get(f"serve.{name}", {})
    takes = [each for each in signature.parameters if each != "unsupported"]
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in takes:
            fix = known.get(keyword.arg) or known.get("kwargs") or f"it takes: {', '.join(takes)}"
            yield keyword, f"serve.{name}({keyword.arg}=...)", fix


def _of_class(given: list[ast.keyword], cls: type[Options]) -> Iterator[Found]:
    for keyword in given:
        name = keyword.arg
        if name is None or name in cls.model_fields:
            continue
        renamed = advice.RENAMED.get(name)
        known = f"use {renamed}" if renamed else cls.elsewhere.get(name)
        fix = known or f"it takes: {', '.join(cls.model_fields)}"
        yield keyword, f"{cls.__name__}({name}=...)", fix


def _of_deployment(node: ast.Call, *, is_whole: bool) -> Iterator[Found]:
    """Yield the options of `deployment` or, if not `is_whole`, of any `.options`."""
    isolation = next((each.value for each in node.keywords if each.arg == "isolation"), None)
    is_process = isinstance(isolation, ast.Constant) and isolation.value == "process"
    takes = {*DeploymentConfig.model_fields, "name", "func_or_class", "_func_or_class"}
    for keyword in node.keywords:
        name = keyword.arg or ""
        fix = ""
        if name in advice.RENAMED:
            fix = f"use {advice.RENAMED[name]}, the same option"
        elif name in CLUSTER_ONLY:
            fix = f"{CLUSTER_ONLY[name]}. {advice.IN_A_CLUSTERS_FILE}"
        elif name == "ray_actor_options":
            yield from _of_resources(keyword.value, is_process=is_process, is_known=is_whole)
        elif name in DeploymentConfig.elsewhere:
            fix = DeploymentConfig.elsewhere[name].removesuffix(".")
        elif not is_whole:
            fix = _unsupported.PARAMETERS["handle.options"].get(name, "")
        elif name and name not in takes:
            fix = "it is no option of a deployment; docs/reference.md lists all"
        if fix:
            yield keyword, name, fix


def _of_resources(node: ast.expr, *, is_process: bool, is_known: bool) -> Iterator[Found]:
    for key, value, place in _texts(node):
        if key == "num_cpus":
            continue
        if key == "runtime_env":
            has_env_vars = any(name == "env_vars" for name, *_ in _texts(value))
            if has_env_vars and not is_process and is_known:
                yield place, "runtime_env['env_vars']", advice.NEEDS_A_PROCESS
        elif key != "num_gpus":
            yield place, f"ray_actor_options[{key!r}]", advice.NO_RESOURCES
        elif not is_process and is_known:  # .options() may add to a deployment that has it
            yield place, "ray_actor_options['num_gpus']", advice.NEEDS_A_PROCESS


def _texts(node: ast.expr) -> list[tuple[str, ast.expr, ast.AST]]:
    """Return the keys of `{...}` or `dict(...)` that are texts, with their values and places."""
    return [(each.arg or "", each.value, each) for each in _pairs(node)]


def _pairs(node: ast.expr) -> list[ast.keyword]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return node.keywords
    if not isinstance(node, ast.Dict):
        return []
    found = []
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            made = ast.keyword(key.value, value)
            found.append(ast.copy_location(made, key))
    return found
