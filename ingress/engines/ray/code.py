"""The user's classes and arguments, pickled for a worker.

    a class or function        by import path, if its module has it: the worker imports the module
                               by value, if not: of `__main__`, or made inside a function
    constructor arguments      by value, with slots for handles

A path is not only cheaper. By value Ray pickles a decorated class with everything that its module's
functions use, so the worker would have two copies of the module's objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Protocol

from ray import cloudpickle

from ingress.app.declaration.build import BuiltDeployment
from ingress.app.declaration.references import found_in, names_of
from ingress.core.base.signatures import signature_of
from ingress.serving.processes.code import ByValue, pickled_code

NOT_ON_THE_WORKERS = "cannot be imported on the workers"


class Reference(Protocol):
    """The source of a class or function for a worker."""

    def resolve(self) -> type | FunctionType: ...


@dataclass(frozen=True, slots=True)
class ByPath:
    """A class or function in a module, under its own name or its deployment's."""

    module: str
    name: str

    def resolve(self) -> type | FunctionType:
        """Import the class or function. Raises `ImportError` if this process cannot."""
        try:
            module = import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is None or not (self.module + ".").startswith(error.name + "."):
                raise
            raise ModuleNotFoundError(
                f"module {self.module!r} {NOT_ON_THE_WORKERS}; send the folder it is "
                "in with ingress run --working-dir, or install it there",
                name=error.name,
            ) from None
        if (target := found_in(module, self.name)) is None:
            raise ImportError(
                f"module {self.module!r} of the workers has no {self.name!r}; give the "
                "workers the same version of the module"
            )
        return target


def reference_to(built: BuiltDeployment) -> Reference:
    """Return the reference to the deployment's class or function for a worker.

    Raises `TypeError` if it can be neither imported nor pickled.
    """
    target = built.deployment.func_or_class
    if (module := sys.modules.get(target.__module__)) is not None and module.__name__ != "__main__":
        for name in names_of(module, target):
            return ByPath(module.__name__, name)
    try:
        return ByValue(pickled_code(target, cloudpickle))
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
