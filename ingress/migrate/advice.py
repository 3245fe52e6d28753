"""The counterparts of Ray Serve's names, and the sentences for names and options without one."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

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

_BESIDE = "Ray works beside ingress where it is installed; keep the import, or move this code"
_ENVIRONMENT = "install it in the environment of the server; there is one environment"
_WITH_IMPORT = "and `import ray`, if no other use of it is left"

FUNCTION = (
    'write a deployment with isolation="process" and call its handle, or use '
    "concurrent.futures.ProcessPoolExecutor; asyncio.to_thread if it waits"
)
ACTOR = (
    "write a deployment, bind it into its callers, and call its handle; max_ongoing_requests=1 "
    "for one call at a time"
)

CORE: Mapping[str, str] = {
    "remote": FUNCTION,
    "get": (
        "of a handle's response: await response, or response.result() in a thread; of a task: call "
        "the function; in an async def, await asyncio.to_thread(function, ...)"
    ),
    "put": "pass the object itself to the handle",
    "wait": "of handles' responses: asyncio.wait([asyncio.ensure_future(each) for each in ...])",
    "cancel": "of a handle's response: response.cancel()",
    "kill": "a deployment ends with its application: serve.delete(name)",
    "get_actor": "serve.get_deployment_handle(deployment_name, app_name)",
    "method": "the options of one method are those of @serve.method",
    "init": f"remove it: serve.run starts everything in this process; {_WITH_IMPORT}",
    "shutdown": f"serve.shutdown() ends what serve.run started; remove it; {_WITH_IMPORT}",
    "is_initialized": f"remove it: there is no cluster to connect to; {_WITH_IMPORT}",
    "get_gpu_ids": 'isolation="process" with num_gpus sets CUDA_VISIBLE_DEVICES of each replica',
    "get_runtime_context": "serve.get_replica_context() has the names of replica and deployment",
    "ObjectRef": "a handle's response is a serve.DeploymentResponse",
    "ObjectRefGenerator": "a handle's stream is a serve.DeploymentResponseGenerator",
    "exceptions": (
        "a handle raises the exception of user code itself, result(timeout_s=...) TimeoutError; "
        "ingress.exceptions has the others"
    ),
    "util.metrics": "ingress.metrics has Counter, Gauge and Histogram",
    "util.ActorPool": "a deployment with num_replicas, whose handle chooses the replica",
    "util.queue": "asyncio.Queue or queue.Queue, in an attribute of one replica",
    "util": f"there is no counterpart. {_BESIDE}",
    "data": f"ingress only serves. {_BESIDE}",
    "train": f"ingress only serves. {_BESIDE}",
    "tune": f"ingress only serves. {_BESIDE}",
    "rllib": f"ingress only serves. {_BESIDE}",
    "air": f"ingress only serves. {_BESIDE}",
}
OTHERS = f"there is no counterpart. {_BESIDE}"

MODULE = "remove the use of the module `ray`; its import stays until then"
PROBED = "the import is the whole `try`, and no other use of Ray is left: remove the `try`"
EXPORTED = "`__all__` exports it; remove it there, and the import with it"
MIXED = (
    "it has other bindings than its imports (an assignment, `del`, `global`, `nonlocal`), or is an "
    "attribute of a class, so its imports stay; import it once at the top, under a name of its own"
)
HIDDEN = "it may use the import of `ray`, which stays; remove the import if it does not"
SHARED = "another file may import it from here, so it stays; remove it if none does"
UNUSED = "nothing here uses it, nor Ray Serve, so the file stays as it is; remove the import"
NESTED = "a function around it imports Ray too; import it in one place, and run this command again"
STAR = "name the imports instead of `*`, and run this command again"
BY_HAND = "write it on a line of its own, and run this command again"
A_STRING = "write the path of ingress into this text"

PRIVATE = "it is Ray's own; use the public names of ingress"

RUNTIME_ENV: Mapping[str, str] = {
    "pip": _ENVIRONMENT,
    "uv": _ENVIRONMENT,
    "conda": _ENVIRONMENT,
    "container": "run the server itself in the container",
    "image_uri": "run the server itself in the container",
    "working_dir": "start the server there, or use ingress run --app-dir",
    "py_modules": "install the modules, or put them below ingress run --app-dir",
}
RENAMED: Mapping[str, str] = {**DeploymentConfig.renamed, **AutoscalingConfig.renamed}
NEEDS_A_PROCESS = 'it has an effect with isolation="process" only; add that, or leave it out'
NO_RESOURCES = "one process has what its machine has; leave it out"
IN_A_CLUSTERS_FILE = "leave it out, or give it in the cluster's file"

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


def for_core(path: tuple[str, ...]) -> str:
    """Return the sentence for `ray.<path>`: that of its longest known beginning."""
    for end in range(len(path), 0, -1):
        if found := CORE.get(".".join(path[:end])):
            return found
    return OTHERS


MODULES = (
    *("api", "autoscaling_policy", "batching", "config", "context", "exceptions"),
    *("handle", "metrics", "request_router", "schema", "task_consumer"),
)
"""The modules that Ray Serve and ingress both have."""


def target(module: Sequence[str], name: str) -> str | None:
    """Return the module of ingress to import a name of `ray.serve.<module>` from."""
    if not module:
        return "ingress" if name in MODULES or name in ingress.__all__ else None
    if len(module) == 1 and module[0] in MODULES and _is_in(module[0], name):
        return f"ingress.{module[0]}"
    is_public = not any(part.startswith("_") for part in module)
    return "ingress" if is_public and name in ingress.__all__ else None


def is_module(path: Sequence[str]) -> bool:
    """Return whether ingress has the module `ray.serve.<path>`."""
    return not path or (len(path) == 1 and path[0] in MODULES)


def lack(path: Sequence[str]) -> str:
    """Return the sentence for `ray.serve.<path>`, "" if ingress has that name at the same place."""
    if not path:
        return ""
    first, *rest = path
    if first in MODULES:
        return "" if not rest or _is_in(first, rest[0]) else remedy(path[:2])
    return "" if first in ingress.__all__ else remedy(path)


def remedy(path: Sequence[str]) -> str:
    """Return the sentence for a name of `ray.serve` that ingress does not have."""
    first, last = path[0], path[-1]
    known = (
        _unsupported.MEMBERS.get(first, {}).get(last)
        or _unsupported.OLDER.get(last)
        or _unsupported.NAMES.get(last)
        or _unsupported.NAMES.get(first)
    )
    if known:
        return known
    if last in ingress.__all__:
        return f"use serve.{last}"
    if _is_in("request_router", last):
        return f"use {last} of ingress.request_router"
    if any(part.startswith("_") for part in path):
        return PRIVATE
    return "ingress has no such name; docs/compatibility.md lists all"


_AS_IN_RAY = {("context", "_get_internal_replica_context"), ("schema", "ReplicaRank")}
"""Names that a module has only because Ray's has them."""


def _is_in(module: str, name: str) -> bool:
    """Return whether a name is public in a module; those that it only imports are not."""
    found: Any = import_module(f"ingress.{module}")
    if name in getattr(found, "__all__", ()) or (module, name) in _AS_IN_RAY:
        return True
    if name in getattr(found, "OF_JOBS", ()):  # loaded by those who use them
        return True
    value = vars(found).get(name)
    if value is None or name.startswith("_"):
        return False
    is_own = getattr(value, "__module__", "") == found.__name__
    return is_own or vars(ingress).get(name) is value


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
        if key in RUNTIME_ENV:
            yield place, f"runtime_env[{key!r}]", RUNTIME_ENV[key]


def _of_function(node: ast.Call, name: str) -> Iterator[Found]:
    signature = inspect.signature(getattr(ingress, name))
    function = f"serve.{name}"
    known = {
        **_unsupported.PARAMETERS.get(function, {}),
        **_unsupported.MISPLACED.get(function, {}),
    }
    takes = [each for each in signature.parameters if each != "unsupported"]
    for keyword in node.keywords:
        # What has advice is refused in one process, although the Ray engine may take it.
        if keyword.arg is not None and (keyword.arg in known or keyword.arg not in takes):
            fix = known.get(keyword.arg) or known.get("kwargs") or f"it takes: {', '.join(takes)}"
            yield keyword, f"{function}({keyword.arg}=...)", fix


def _of_class(given: list[ast.keyword], cls: type[Options]) -> Iterator[Found]:
    for keyword in given:
        name = keyword.arg
        if name is None or name in cls.model_fields:
            continue
        renamed = RENAMED.get(name)
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
        if name in RENAMED:
            fix = f"use {RENAMED[name]}, the same option"
        elif name in CLUSTER_ONLY:
            fix = f"{CLUSTER_ONLY[name]}. {IN_A_CLUSTERS_FILE}"
        elif name == "ray_actor_options":
            yield from _of_resources(keyword.value, is_process=is_process, is_known=is_whole)
        elif name in DeploymentConfig.elsewhere:
            fix = DeploymentConfig.elsewhere[name].removesuffix(".")
        elif not is_whole:
            of_handles = _unsupported.PARAMETERS["handle.options"]
            fix = of_handles.get(name) or _unsupported.MISPLACED["handle.options"].get(name, "")
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
                yield place, "runtime_env['env_vars']", NEEDS_A_PROCESS
        elif key == "num_gpus" and isinstance(value, ast.Constant) and not value.value:
            continue
        elif key != "num_gpus":
            yield place, f"ray_actor_options[{key!r}]", NO_RESOURCES
        elif not is_process and is_known:  # .options() may add to a deployment that has it
            yield place, "ray_actor_options['num_gpus']", NEEDS_A_PROCESS


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
