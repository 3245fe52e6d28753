"""The functions of an app that belong to a class, and the targets a replica runs for them.

    the function is                                          on a replica
    a method of the class or of a base class                 it is bound to the replica's instance
      and a subclass of its definer redefines the name       the redefinition runs instead
    a method of another class (its first parameter: `self`)  it is absent from this deployment
      and `self` is a `Depends`, as in a class-based view     it runs as it is
    any other function                                       it runs as it is

The class of a function is found by its qualified name, as tracebacks show it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import params

from ingress.core.base.signatures import signature_of
from ingress.core.execution.execution import Kind, code_of, kind
from ingress.exceptions import RayServeException

GENERATORS = (Kind.GENERATOR, Kind.ASYNC_GENERATOR)


@dataclass(frozen=True, slots=True)
class Target:
    """The function that runs for one that was given to FastAPI.

    `func` is the key of its plan. `descriptor` binds it to an instance: the function itself, a
    `staticmethod` or a `classmethod`; `None` if it belongs to no class. `takes_self` is true if the
    function *given to FastAPI* has a first parameter that is not the caller's.
    """

    func: Callable[..., object]
    descriptor: Any = None
    takes_self: bool = False

    def bound_to(self, instance: object) -> Callable[..., Any]:
        if self.descriptor is None:
            return self.func
        if (name := _name_if_keyword(self.descriptor)) is not None:
            return partial(self.func, **{name: instance})
        bound: Callable[..., Any] = self.descriptor.__get__(instance, type(instance))
        return bound


class Methods:
    """The class of a deployment, as the owner of functions in an app."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._classes = [base for base in cls.__mro__ if base is not object]

    def owns(self, func: object) -> bool:
        return self._definer(func) is not None

    def takes_self(self, func: object) -> bool:
        """Return whether `func` is a method of the class, with a first parameter for it."""
        definer = self._definer(func)
        return definer is not None and not isinstance(_descriptor(definer, func), staticmethod)

    def is_foreign(self, func: Callable[..., object]) -> bool:
        """Return whether `func` is a method of another class, which this deployment cannot run."""
        if _class_name(func) is None or self.owns(func):
            return False
        first = next(iter(signature_of(func).parameters.values()), None)
        return first is not None and first.name == "self" and not _is_injected(first)

    def target(self, func: Callable[..., object]) -> Target:
        """Return the target of `func`.

        Not `getattr(instance, name)`: two routes whose methods share a name would both run the
        second method, a decorator above `@app.get` would run here although FastAPI does not run it,
        and a `__private` name would not be found. Raises `TypeError` if an override takes other
        parameters.
        """
        definer = self._definer(func)
        if definer is None:
            return Target(func)
        takes_self = not isinstance(_descriptor(definer, func), staticmethod)
        for cls in self._classes:
            if cls is definer:
                return Target(func, _descriptor(cls, func), takes_self)
            if func.__name__ in vars(cls):
                return self._override(cls, func, takes_self)
        raise AssertionError("the definer is in the MRO")  # pragma: no cover

    def check(self, func: Callable[..., object]) -> None:
        """Raise `TypeError` or `RayServeException` for a method that FastAPI cannot call."""
        definer = self._definer(func)
        if definer is None or isinstance(_descriptor(definer, func), staticmethod):
            return
        parameters = list(signature_of(func).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise RayServeException(
                "Methods in FastAPI class-based view must have ``self`` as their first argument. "
                f"{func.__qualname__}{signature_of(func)} has none: add it, or make the "
                "method a @staticmethod."
            )
        for parameter in parameters[1:]:
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise TypeError(
                    f"{func.__qualname__}{signature_of(func)}: FastAPI passes parameters by "
                    f"name, and '{parameter.name}' is positional-only. Remove the '/'."
                )

    def _override(self, cls: type, func: Callable[..., object], takes_self: bool) -> Target:
        override = vars(cls)[func.__name__]
        impl = getattr(override, "__func__", override)
        expected = _parameters(func, skip_first=takes_self)
        if not callable(impl) or expected != _parameters(
            impl, skip_first=not isinstance(override, staticmethod)
        ):
            given = signature_of(impl) if callable(impl) else f" = {impl!r}"
            raise TypeError(
                f"{cls.__qualname__}.{func.__name__}{given} overrides the route "
                f"{func.__qualname__}{signature_of(func)} and must take the same parameters. "
                "Give it those, or another name and a route of its own."
            )
        return Target(impl, override, takes_self)

    def _definer(self, func: object) -> type | None:
        name = _class_name(func)
        if name is None:
            return None
        for cls in self._classes:
            # By name, also for a function that a decorator has replaced in the class.
            # By identity, also for a class that was renamed.
            if f"{cls.__module__}.{cls.__qualname__}" == name or _descriptor(cls, func) is not func:
                return cls
            if any(value is func for value in vars(cls).values()):
                return cls
        return None


def kind_for_fastapi(func: Callable[..., object]) -> Kind:
    """Return the kind of `func` in FastAPI's view, which looks through `__wrapped__`, too."""
    outer = kind(func)
    if outer is not Kind.FUNCTION:
        return outer
    while isinstance(func, partial):
        func = func.func
    if not (inspect.isroutine(func) or inspect.isclass(func)):
        func = type(func).__call__
    return kind(inspect.unwrap(func))


def _class_name(func: object) -> str | None:
    """Return the module and qualified name of the class in which a function was written."""
    if not inspect.isfunction(func):
        return None
    head = func.__qualname__.rpartition(".")[0]
    return None if not head or head.endswith("<locals>") else f"{func.__module__}.{head}"


def _descriptor(cls: type, func: object) -> object:
    """Return the `staticmethod` or `classmethod` that holds `func` in the class, else `func`."""
    bound = (each for each in vars(cls).values() if isinstance(each, (staticmethod, classmethod)))
    return next((each for each in bound if each.__func__ is func), func)


def _is_injected(parameter: inspect.Parameter) -> bool:
    """Return whether FastAPI gets the value from a `Depends`, as for the `self` of a `@cbv`."""
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(each, params.Depends) for each in (parameter.default, *metadata))


def _name_if_keyword(func: object) -> str | None:
    """Return the name of the first parameter if a wrapper is to get it by keyword, else `None`.

    FastAPI passes keywords only. A decorator that takes `(*args, **kwargs)` and looks for the
    request by its position, as that of slowapi does, would take `self` for an argument.
    """
    if not inspect.isfunction(func) or not hasattr(func, "__wrapped__"):
        return None
    code = code_of(func)
    takes_all = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if code is None or code.co_argcount or code.co_flags & takes_all != takes_all:
        return None
    first = next(iter(signature_of(func).parameters.values()))  # `check` has seen it
    return first.name if first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None


def _parameters(func: Callable[..., object], *, skip_first: bool) -> list[str]:
    parameters = list(signature_of(func).parameters.values())[1 if skip_first else 0 :]
    return [each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY]
