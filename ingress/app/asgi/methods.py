"""The functions of an app that belong to a class, and the signatures that FastAPI reads of them.

A function is *bound*: it gets the replica's instance as Python's own method call passes it, if it
was written in the body of the class or of a base, and its first parameter is positional, has the
name `self`, `this` or that of the first parameter of `__init__`, and neither default nor marker.

    the function is                                          on a replica
    bound, a `classmethod`, or an object of the body with    it is bound to the replica's instance
      `__get__` whose first parameter is the instance
      and a subclass of its definer redefines the name       the redefinition runs instead, with its
                                                             dependencies and types
    an endpoint of the body without `self`                   the start is refused
    a dependency of the body without `self`, whose first     the start is refused
      parameter FastAPI would ask the client for
    a bound function of another class: an endpoint           it is absent from this deployment
      a dependency, or an override                           refused, because the client would be
                                                             asked for `self`
    any other function, a `staticmethod`, an object, a       it runs as it is
      `partial`

A marker is `Depends`, `Query` and the like, or a type that FastAPI fills in itself. The names of
the class are known in the annotations of its functions. No other module reads signatures for
FastAPI.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial, partialmethod
from itertools import chain, takewhile
from types import CodeType, FunctionType, MethodType
from typing import Any, ClassVar, cast, get_origin

from fastapi import params
from fastapi.security import SecurityScopes
from pydantic.fields import FieldInfo
from starlette.applications import Starlette
from starlette.background import BackgroundTasks
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.routing import Router

from ingress.app.asgi.compat import (
    get_typed_return_annotation,
    get_typed_signature,
)
from ingress.core.base.foreign import dict_of, has_code_for, unwrapped
from ingress.core.base.signatures import annotations_of, signature_of
from ingress.core.execution.execution import Kind, code_of, name_of, without_partials
from ingress.exceptions import RayServeException
from ingress.telemetry.logs import logger

GENERATORS = (Kind.GENERATOR, Kind.ASYNC_GENERATOR)

_INSTANCE = ("self", "this")
_FILLED_IN = (HTTPConnection, Response, BackgroundTasks, SecurityScopes)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CONNECTIONS = frozenset(("request", "websocket"))
_NOTHING = inspect.Parameter.empty
_READ_BY_FASTAPI = (params.Depends, params.Param, params.Body)
_GUARDS = ("Depends", "Security")
_PLAINLY_CALLED = (partial, staticmethod, type)
"""Callables that Python passes no instance."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The function that runs for one that was given to FastAPI. A plan has it as its key.

    `signature` is for FastAPI, without the parameter of the instance. `descriptor` binds `func` to
    an instance; `None` if it runs as it is.
    """

    func: Callable[..., object]
    signature: inspect.Signature
    descriptor: Any = None

    def bound_to(self, instance: object) -> Callable[..., Any]:
        if self.descriptor is None:
            return self.func
        if _takes_instance_by_name(self.descriptor):
            name = next(iter(signature_of(self.descriptor).parameters))
            return partial(self.func, **{name: instance})
        return cast(Callable[..., Any], self.descriptor.__get__(instance, type(instance)))


class Methods:
    """The class of a deployment, as the owner of functions in an app.

    `others` are classes of the same app, whose functions may have the same names.
    """

    __slots__ = ("_own", "_theirs", "cls")

    def __init__(self, cls: type, others: Sequence[type] = ()) -> None:
        self.cls = cls
        self._own = {base: list(_functions(base)) for base in cls.__mro__ if base is not object}
        strangers = {base for each in others for base in each.__mro__} - set(cls.__mro__)
        self._theirs = [each for base in strangers for each in _functions(base)]

    def owns(self, func: Any) -> bool:
        return self._owner(plain(func)) is not None

    def takes_self(self, func: Any) -> bool:
        """Return whether a replica passes its instance, or class, to `func`."""
        func = plain(func)
        owner = self._owner(func)
        return owner is not None and _is_bound(func, owner)

    def target(self, func: Callable[..., object], *, is_endpoint: bool = False) -> Target:
        """Return the target of `func`.

        Not `getattr(instance, name)`: two routes whose methods share a name would both run the
        second method, a decorator above `@app.get` would run here although FastAPI does not run it,
        and a `__private` name would not be found. Raises `TypeError` or `RayServeException` if the
        client would be asked for `self`, and for an override with other parameters.
        """
        func = plain(func)
        owner = self._owner(func)
        if owner is None:
            if asks_for_self(func):
                raise TypeError(_told_of_self(func))
            return Target(func, _read(func))
        descriptor = _descriptor(owner, func)
        bound = _is_bound(func, owner)
        if not bound and not isinstance(descriptor, staticmethod):
            _refuse_in_doubt(func, owner, is_endpoint=is_endpoint)
            return Target(func, _read(func, owner))
        signature = _read(func, owner, skip_first=bound)
        name = _attribute_of(owner, func)
        for cls in takewhile(lambda cls: cls is not owner, self._own):
            if name in vars(cls) and owner in cls.__mro__:  # not a mixin beside it
                return self._override(cls, name, func, signature, skip_first=bound)
        # A function that the class has as a `staticmethod` runs as it is.
        return Target(func, signature, descriptor if bound else None)

    def check(self, func: Callable[..., object]) -> None:
        """Raise `TypeError` or `RayServeException` for a method that FastAPI cannot call."""
        func = plain(func)
        owner = self._owner(func)
        if owner is None:
            return
        is_bound = _is_bound(func, owner)
        if not is_bound and not isinstance(_descriptor(owner, func), staticmethod):
            _refuse_in_doubt(func, owner, is_endpoint=True)
        for each in list(signature_of(func).parameters.values())[is_bound:]:
            if each.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise TypeError(
                    f"{_written_at(func)}: FastAPI passes parameters by name, and '{each.name}' is "
                    "positional-only. Remove the '/'."
                )

    def check_fields(self) -> None:
        """Raise `TypeError` for an attribute of the class that is declared as a dependency.

        FastAPI reads parameters only, so a guard in `user: str = Depends(guard)` would never run.
        """
        functions = chain.from_iterable(self._own.values())
        called = (each.__code__ for each in functions if each.__name__ != "__init__")
        read = {name for code in called for name in code.co_names}
        for cls in self._own:
            own, annotations = vars(cls), annotations_of(cls)
            for name in {**annotations, **own}:
                annotation = _read_if_possible(annotations.get(name, _NOTHING), None, cls)
                if _is_shared(annotation) or (annotation is _NOTHING and name not in read):
                    continue  # an alias, as in `def method(self, user=auth)`
                default = own.get(name, _NOTHING)
                kind = inspect.Parameter.KEYWORD_ONLY
                field = inspect.Parameter("_", kind, default=default, annotation=annotation)
                if _is_for_fastapi(field):
                    raise TypeError(
                        f"{cls.__module__}.{cls.__qualname__}.{name} is declared as a dependency or"
                        " a parameter of the request, but FastAPI reads parameters of functions"
                        " only: it would never run. Declare it as a parameter of each method that"
                        f" needs it, `def method(self, {name}: Annotated[...])`, or for all routes"
                        " with APIRouter(dependencies=[...])."
                    )

    def _override(
        self, cls: type, name: str, func: Any, signature: inspect.Signature, *, skip_first: bool
    ) -> Target:
        override = vars(cls)[name]
        impl: Any = getattr(override, "__func__", override)
        is_static = isinstance(override, staticmethod)
        is_like = callable(impl) and (is_static or _is_bound(impl, cls))
        expected = list(signature_of(func).parameters)[skip_first:]
        if not is_like or list(signature_of(impl).parameters)[not is_static :] != expected:
            given = signature_of(impl) if callable(impl) else f" = {impl!r}"
            raise TypeError(
                f"{cls.__qualname__}.{name}{given} overrides the route "
                f"{func.__qualname__}{signature_of(func)} and must take the same parameters. "
                "Give it those, or another name and a route of its own."
            )
        # A dependency of either is kept: the redefinition's, else that of the route. Where there is
        # none, the redefinition's types count.
        own = _read(impl, cls, skip_first=not is_static).parameters
        merged = [
            own[each.name] if _counts(own[each.name], each) else each
            for each in signature.parameters.values()
        ]
        by_name = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in merged]
        signature = signature.replace(parameters=by_name)
        return Target(impl, signature, None if is_static else override)

    def _owner(self, func: object) -> type | None:
        """Return the class of the deployment's MRO that a function belongs to.

        A function is written in the body that its code names, or its `__qualname__` if a decorator
        has compiled it. The class may have been renamed, so one that the class has is its own as
        well, but not a function of the module: that has another caller.
        """
        inner = _innermost(func)
        if inner is None:  # an object with `__get__` that Python would bind
            holders = (cls for cls in self._own if any(each is func for each in vars(cls).values()))
            can_bind = has_code_for(func, "__get__") and not isinstance(func, _PLAINLY_CALLED)
            return next((cls for cls in holders if can_bind and _is_bound(func, cls)), None)
        written = inner.__code__.co_qualname
        scope = (written if "." in written else inner.__qualname__).rpartition(".")[0]
        module = inner.__globals__.get("__name__") or inner.__module__
        named = [cls for cls in self._own if (scope, module) == (cls.__qualname__, cls.__module__)]
        # Two classes that one function made have the same names, and the same code.
        alike = {cls: inner.__code__ in [each.__code__ for each in self._own[cls]] for cls in named}
        if named and not any(each is inner for each in self._theirs):
            return max(named, key=lambda cls: (inner in self._own[cls], alike[cls]))
        aliases = (cls for cls, own in self._own.items() if inner in own and _is_bound(func, cls))
        return next(aliases, None) if scope else None


def plain(func: Any) -> Any:
    """Return the function of a `staticmethod`, as which the body of a class knows it."""
    return func.__func__ if isinstance(func, staticmethod) else func


def is_read_by_fastapi(parameter: inspect.Parameter, func: Any) -> bool:
    """Return whether a parameter of `func` is a dependency, a header or the like, by its marker."""
    annotation = _read_if_possible(parameter.annotation, _innermost(func), None)
    return _is_for_fastapi(parameter.replace(annotation=annotation))


def _is_for_fastapi(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    # The text of an annotation that cannot be read counts: it may be a guard.
    is_named = isinstance(annotation, str) and any(f"{each}(" in annotation for each in _GUARDS)
    return is_named or _has_marker(parameter, _READ_BY_FASTAPI)


def _read_if_possible(annotation: Any, func: FunctionType | None, owner: type | None) -> Any:
    """Return the value of an annotation, or its text if it names what only a type checker knows."""
    with suppress(Exception):
        annotation = _evaluated(annotation, func, owner)
    return annotation


def refuse_self_from_client(func: Any, where: str) -> None:
    """Raise `TypeError` for a function for whose `self` FastAPI would ask the client."""
    if asks_for_self(func):
        raise TypeError(f"{where}: {_told_of_self(func)}")


def asks_for_self(func: Any) -> bool:
    """Return whether FastAPI would ask the client for the instance that a function takes."""
    first, called = _first(func), without_partials(func)
    inner = _innermost(called) or _innermost(getattr(called, "__wrapped__", None))
    names = _INSTANCE[:1] if inner is None else _names_of_instance(inner)
    return first is not None and first.name in names and not _is_given(first, inner)


def _names_of_instance(func: FunctionType) -> Collection[str]:
    """Return the names that the instance may have in a function; its class may be unknown."""
    scope = func.__code__.co_qualname.rpartition(".")[0]
    if not scope or scope.endswith("<locals>"):
        return _INSTANCE[:1]
    owner = _class_named(func, scope)
    return _INSTANCE if owner is None else _instance_names(owner)


def _class_named(func: FunctionType, scope: str) -> type | None:
    """Return the class in whose body a function was written, if its module still has it."""
    found: Any = func.__globals__
    try:
        for name in scope.split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
            found = getattr(found, "func_or_class", found)  # a deployment has taken the name
        return found if isinstance(found, type) else None
    except Exception:  # of an object of the user's that has the name now
        logger.debug("the search for the class %s ended early", scope, exc_info=True)
        return None


def _is_bound(func: Any, owner: type) -> bool:
    descriptor = _descriptor(owner, func)
    if isinstance(descriptor, (staticmethod, classmethod)):
        return isinstance(descriptor, classmethod)
    first = _first(func)
    return (
        first is not None
        and first.name in _instance_names(owner)
        and not _is_given(first, _innermost(func), owner)
    )


def _instance_names(cls: type) -> set[str]:
    init = _innermost(inspect.getattr_static(cls, "__init__"))
    first = init.__code__.co_varnames[:1] if init and init.__code__.co_argcount else ()
    return {*_INSTANCE, *first}


def _first(func: Any) -> inspect.Parameter | None:
    """Return the first parameter if it is positional."""
    try:
        parameters = signature_of(func).parameters.values()
    except ValueError:  # written in C, without a signature
        return None
    first = next(iter(parameters), None)
    return first if first is not None and first.kind in _POSITIONAL else None


def _is_given(
    first: inspect.Parameter, func: FunctionType | None, owner: type | None = None
) -> bool:
    """Return whether a parameter has a default, or a marker."""
    if first.default is not _NOTHING:
        return True
    try:
        annotation = _evaluated(first.annotation, func, owner)
    except Exception:  # it runs code of the user's module
        logger.debug("the annotation of %r cannot be read", first.name, exc_info=True)
        return False
    annotation = getattr(annotation, "__value__", annotation)  # of a `type` statement
    is_filled_in = isinstance(annotation, type) and issubclass(annotation, _FILLED_IN)
    return is_filled_in or _has_marker(first.replace(annotation=annotation))


def _has_marker(
    parameter: inspect.Parameter, markers: tuple[type, ...] = (FieldInfo, params.Depends)
) -> bool:
    annotation = getattr(parameter.annotation, "__value__", parameter.annotation)
    metadata = getattr(annotation, "__metadata__", ())
    return any(isinstance(each, markers) for each in (parameter.default, *metadata))


def _is_shared(annotation: Any) -> bool:
    """Return whether an attribute is said to be the marker itself, or no field of an instance."""
    is_marker = isinstance(annotation, type) and issubclass(annotation, _READ_BY_FASTAPI)
    return is_marker or get_origin(annotation) is ClassVar or annotation is ClassVar


def _counts(own: inspect.Parameter, routes: inspect.Parameter) -> bool:
    """Return whether the parameter of a redefinition counts, and not that of the route."""
    return _has_marker(own) or (own.annotation is not _NOTHING and not _has_marker(routes))


def _innermost(func: Any) -> FunctionType | None:
    """Return the function inside of the wrappers of one that Python binds; `None` for others."""
    if issubclass(type(func), (partial, staticmethod, classmethod, MethodType, type)):
        return None
    inner = unwrapped(func) if has_code_for(func, "__get__") else None
    return inner if type(inner) is FunctionType else None


def _functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions that a class has, without their wrappers."""
    for value in vars(cls).values():
        if issubclass(type(value), property):
            value = value.fget
        elif issubclass(type(value), (staticmethod, classmethod)):
            value = value.__func__
        elif issubclass(type(value), (cached_property, partialmethod)):
            value = value.func
        if (inner := _innermost(value)) is not None:
            yield inner


def _attribute_of(cls: type, func: Any) -> str:
    """Return the name under which a class has a function: `user = lambda self: ...` has another."""
    name: str = getattr(func, "__name__", "")
    own = vars(cls)
    if plain(own.get(name)) is func:
        return name
    return next((each for each, value in own.items() if plain(value) is func), name)


def _descriptor(cls: type, func: object) -> Any:
    """Return the `staticmethod` or `classmethod` that holds `func` in the class, else `func`."""
    if vars(cls).get(getattr(func, "__name__", "")) is func:  # as most are
        return func
    bound = (each for each in vars(cls).values() if isinstance(each, (staticmethod, classmethod)))
    return next((each for each in bound if each.__func__ is func), func)


def _takes_instance_by_name(func: Any) -> bool:
    """Return whether a wrapper must get the instance as FastAPI passes arguments: by name.

    Python passes the instance first. A wrapper whose own first parameter FastAPI passes, as that of
    fasthx, would get that twice. One of any arguments that looks for `request` by its position, as
    that of slowapi if there are positional arguments, would not find it behind the instance.
    """
    code = (
        code_of(func) if isinstance(func, FunctionType) and hasattr(func, "__wrapped__") else None
    )
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    first, *others = signature_of(func).parameters.values()
    if first.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return False
    if code.co_argcount:
        return any(each.name == code.co_varnames[0] for each in others)
    helpers = [each for each in contents_of(func) if isinstance(each, FunctionType)]
    codes = [code, *(each.__code__ for each in helpers if each is not inspect.unwrap(func))]
    takes_all = code.co_flags & inspect.CO_VARARGS
    return bool(takes_all) and any(not _CONNECTIONS.isdisjoint(_constants(each)) for each in codes)


def contents_of(func: Any) -> Iterator[Any]:
    """Yield the values in the closure of a function."""
    for cell in func.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _constants(code: CodeType) -> set[object]:
    nested = [_constants(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {each for each in code.co_consts if isinstance(each, str)}.union(*nested)


# The classes of an app.

_CLASSES = "_ingress_classes"


def note_class(app: object, cls: type) -> None:
    """Remember that `cls` serves the app or router."""
    if isinstance(app, (Starlette, Router)):
        vars(app).setdefault(_CLASSES, []).append(cls)


def classes_of(app: object) -> list[type]:
    """Return the classes that serve the app or router."""
    return list(vars(app).get(_CLASSES, ()))


# Signatures.


def _read(func: Any, owner: type | None = None, *, skip_first: bool = False) -> inspect.Signature:
    """Return a signature as FastAPI finds it, with the annotations resolved.

    Those of a function that was written in a class may name what the class has.
    """
    if owner is None:
        returned = get_typed_return_annotation(func)
        return get_typed_signature(func).replace(return_annotation=returned)
    signature, inner = signature_of(func), _innermost(func)
    parameters = []
    for each in list(signature.parameters.values())[skip_first:]:
        try:
            parameters.append(each.replace(annotation=_evaluated(each.annotation, inner, owner)))
        except Exception as error:
            if isinstance(each.default, params.Depends):  # FastAPI needs no more
                parameters.append(each.replace(annotation=Any))
                continue
            raise TypeError(
                f"{_written_at(func)}: the annotation {each.annotation!r} of '{each.name}' cannot "
                f"be read ({type(error).__name__}: {error}), so a Depends(...) in it would be "
                "lost. Define its names in the module or in the class, and import them outside "
                "of `if TYPE_CHECKING`."
            ) from error
    try:
        returned = _evaluated(signature.return_annotation, inner, owner)
    except Exception:  # it may name what only a type checker knows
        logger.debug("the annotation of a result cannot be read", exc_info=True)
        returned = get_typed_return_annotation(func)
    return inspect.Signature(parameters, return_annotation=returned)


def _evaluated(annotation: Any, func: FunctionType | None, owner: type | None) -> Any:
    """Return the value of an annotation.

    A method may have the name of a type, such as `list` or `date`, by chance: then the type is
    meant, but not in an annotation with a dependency.
    """
    while isinstance(annotation, str):  # twice, if it is quoted below the future import
        text, module = annotation, _module_of(func, owner)
        try:
            annotation = eval(text, module, _names(func, owner))
        except TypeError:
            if any(each in text for each in _GUARDS):
                raise
            annotation = eval(text, module)
        if isinstance(annotation, FunctionType):
            annotation = eval(text, module)
    return annotation


def _module_of(func: FunctionType | None, owner: type | None) -> dict[str, Any]:
    if func is not None:
        return func.__globals__
    return {} if owner is None else dict(dict_of(sys.modules.get(owner.__module__)))


def _names(func: FunctionType | None, owner: type | None) -> ChainMap[str, Any]:
    """Return the names that an annotation of a method may have, as if evaluated where it stands.

    Those of the class so far, of the module, of Python; then the class's later ones, and those of
    its bases.
    """
    module = _module_of(func, owner)
    if owner is None:
        return ChainMap(module, vars(builtins))
    own, at = dict(vars(owner)), getattr(func, "__name__", None)
    above = takewhile(lambda each: func is None or (own[each] is not func and each != at), own)
    private = f"_{owner.__name__.lstrip('_')}__"  # its names begin with `__` in the source
    hidden = {each[len(private) - 2 :]: own[each] for each in own if each.startswith(private)}
    so_far = {**{each: own[each] for each in above}, owner.__name__: owner, **hidden}
    bases: list[Any] = list(map(vars, owner.__mro__[1:]))
    return ChainMap(so_far, module, vars(builtins), own, *bases)


# Refusals.


def _refuse_in_doubt(func: Any, owner: type, *, is_endpoint: bool) -> None:
    """Raise an error for a function of the body whose first parameter may be the instance."""
    first = _first(func)
    if is_endpoint:
        raise RayServeException(
            "Methods in FastAPI class-based view must have ``self`` as their first argument. "
            f"{_written_at(func)} has none: write `self` as its first parameter, or make it a "
            "@staticmethod."
        )
    if first is not None and not _is_given(first, _innermost(func), owner):
        raise TypeError(
            f"{_written_at(func)} is a dependency in the body of {owner.__qualname__}, and its "
            f"first parameter '{first.name}' may be the instance or a value of the request. Write "
            "`self` as its first parameter to get the instance, or make it a @staticmethod."
        )


def _told_of_self(func: Any) -> str:
    return (
        f"{_written_at(func)} is not bound to an instance here, so FastAPI would ask the client "
        "for its first parameter. Use a method of the class that serves the app, a bound method "
        "(`instance.method`), or a function without it; a decorator needs `functools.wraps`."
    )


def _written_at(func: Any) -> str:
    """Return the name, the signature, the file and the line of a function."""
    code = code_of(_innermost(func) or func)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{name_of(_innermost(func) or func)}{signature_of(func)}{place}"
