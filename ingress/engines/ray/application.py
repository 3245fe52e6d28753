"""An application as Ray Serve deployments, each of class `RayReplica`, pickled for the workers.

    a class or function        by import path, if its module has it: the worker imports the module
                               by value, if not: of `__main__`, or made inside a function
    constructor arguments      by value, with slots for handles

A path is not only cheaper. By value Ray pickles a decorated class with everything that its module's
functions use, so the worker would have two copies of the module's objects.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType

from ray import cloudpickle
from ray import serve as ray_serve

from ingress.app.batching.batching import warn_of_capacity
from ingress.app.declaration.build import BuiltApplication, BuiltDeployment, fill
from ingress.app.declaration.names import PublicMethods, names_of
from ingress.core.base.signatures import signature_of
from ingress.engines.ray.lowering import options_for_ray
from ingress.engines.ray.messages import ActorSpec, by_module
from ingress.engines.ray.replica import HTTPReplica, RayReplica
from ingress.serving.processes.code import Reference, pickled_code
from ingress.serving.processes.frames import loads


@dataclass(frozen=True, slots=True)
class Lowering:
    """Settings that are not part of an application. `environment` is for the replicas' processes.

    A replica without `num_cpus` reserves `default_cpus`. `constructor_tries` is the number of
    attempts at a failing constructor. `None` means Ray's default.
    """

    environment: dict[str, str]
    default_cpus: float | None = None
    request_timeout_s: float | None = None
    constructor_tries: int | None = None


def application_for_ray(built: BuiltApplication, lowering: Lowering) -> ray_serve.Application:
    """Return the application for Ray's `serve.run`.

    Raises `TypeError` for code or arguments that cannot be sent to a worker, `ValueError` for
    options that Ray cannot apply, and the errors of invalid routes.
    """
    methods = methods_of(built)
    nodes: dict[str, ray_serve.Application] = {}
    for each in built.deployments:
        config = each.deployment.config
        spec = ActorSpec(
            code=reference_to(each),
            arguments=pickled_arguments(each),
            num_cpus=config.num_cpus,
            lanes=dict(config.lanes),
            methods=methods,
            request_timeout_s=lowering.request_timeout_s,
            stop_timeout_s=config.graceful_shutdown_timeout_s,
        )
        # Here, where the user sees the warning: a worker would log it once per replica.
        warn_of_capacity(each.name, each.deployment.func_or_class, config.max_ongoing_requests)
        _ = each.bound_app
        options = options_for_ray(each, lowering.environment, default_cpus=lowering.default_cpus)
        if lowering.constructor_tries is not None:
            options.setdefault("max_constructor_retry_count", lowering.constructor_tries)
        kind = HTTPReplica if each is built.ingress else RayReplica
        children = {name: nodes[name] for name in _children(each)}
        nodes[each.name] = ray_serve.deployment(kind, **options).bind(spec, children)
    return nodes[built.ingress.name]


def methods_of(built: BuiltApplication) -> dict[str, list[str] | None]:
    """Return the methods that the handle of each deployment may call; `None` for any name."""
    return {each.name: _callable_names(each.deployment.func_or_class) for each in built.deployments}


def _callable_names(target: type | FunctionType) -> list[str] | None:
    """Return the methods of a class and the names its constructor uses; `None` for a function.

    There is no instance here, and a constructor may set callable attributes: their names are among
    the names that it uses.
    """
    if not inspect.isclass(target):
        return None
    names = {*PublicMethods(target)}
    for cls in target.__mro__:
        if (code := getattr(vars(cls).get("__init__"), "__code__", None)) is not None:
            names.update(name for name in code.co_names if not name.startswith("_"))
    return sorted(names)


def _children(built: BuiltDeployment) -> Iterator[str]:
    """Return the deployments whose handles are in the constructor arguments."""
    found: dict[str, None] = {}
    fill(built.init_args, built.init_kwargs, lambda name: found.setdefault(name))
    return iter(found)


def reference_to(built: BuiltDeployment) -> Reference:
    """Return the reference to the deployment's class or function for a worker.

    Raises `TypeError` if it can be neither imported nor pickled.
    """
    target = built.deployment.func_or_class
    if (module := sys.modules.get(target.__module__)) is not None and module.__name__ != "__main__":
        for name in names_of(module, target):
            return partial(by_module, module.__name__, name)
    try:
        return partial(loads, pickled_code(target, cloudpickle))
    except Exception as error:
        raise TypeError(
            f"deployment {built.name!r}: {target.__qualname__} cannot be sent to a worker: "
            f"{error}; put it into a module of its own, which workers can import"
        ) from error


def pickled_arguments(built: BuiltDeployment) -> bytes:
    """Return the pickled constructor arguments. Raises `TypeError` that names the faulty one."""
    try:
        return _dumps((built.init_args, built.init_kwargs))
    except Exception as error:
        for name, value in _named_arguments(built):
            try:
                _dumps(value)
            except Exception as problem:
                raise TypeError(
                    f"deployment {built.name!r}: constructor argument {name!r} cannot be sent to a "
                    f"worker: {problem}; make it in the constructor"
                ) from problem
        raise TypeError(
            f"deployment {built.name!r}: its constructor arguments cannot be sent to a worker: "
            f"{error}"
        ) from error


def _named_arguments(built: BuiltDeployment) -> Iterator[tuple[str, object]]:
    args, kwargs = built.init_args, built.init_kwargs
    try:
        bound = signature_of(built.deployment.func_or_class).bind(*args, **kwargs)
        yield from bound.arguments.items()
    except (TypeError, ValueError):  # some classes written in C have no signature
        yield from ((str(number), value) for number, value in enumerate(args))
        yield from kwargs.items()


def _dumps(value: object) -> bytes:
    pickled: bytes = cloudpickle.dumps(value)
    return pickled
