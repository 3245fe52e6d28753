"""What a route calls for a request, and which parameters of the request each call takes.

A `Step` is a dependency, or the endpoint. Parameters are found and validated as FastAPI finds them,
by its own fields; what takes more than a look-up in a mapping makes a route unfit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin
from urllib.parse import parse_qsl
from uuid import UUID

from fastapi.dependencies.models import Dependant
from pydantic import Json
from starlette.requests import Request
from starlette.types import Scope

from ingress.asgi.methods import kind_for_fastapi
from ingress.execution import Kind

JSON_SCALARS = frozenset((str, int, float, bool, NoneType))
"""What JSON has, and can be shared, because it does not change."""

_SCALARS = (
    str, int, float, bool, NoneType, Decimal, UUID, Enum, date, datetime, time, timedelta,
)  # fmt: skip
_REQUIRED = object()


class Unfit(Exception):
    """A route is FastAPI's to answer."""


def require(condition: bool) -> None:
    if not condition:
        raise Unfit


class _Parameter(NamedTuple):
    name: str
    key: str
    default: Any
    is_shared: bool  # whether every request may be given the same default
    validate: Callable[..., tuple[Any, Any]]


Read = Callable[[Scope], Mapping[str, Any]]


@dataclass(slots=True)
class Step:
    """One dependency, or the endpoint: what is called, and with what.

    `parent` is the index of the step that takes the result, as `name`.
    """

    func: Callable[..., Awaitable[Any]]
    sources: list[tuple[Read, list[_Parameter]]]
    request_names: list[str]
    name: str | None = None
    parent: int = -1


def read_parameters(scope: Scope, steps: list[Step]) -> list[dict[str, Any]] | None:
    """Return the parameters of each step, `None` if one is missing or does not validate."""
    given = []
    for step in steps:
        values: dict[str, Any] = {}
        for source, parameters in step.sources:
            received = source(scope)
            for name, key, default, is_shared, validate in parameters:
                value = received.get(key)
                if value is not None:
                    values[name], errors = validate(value, {}, loc=())
                    if errors:
                        return None
                elif default is _REQUIRED:
                    return None
                else:
                    values[name] = default if is_shared else deepcopy(default)
        given.append(values)
    return given


def add_steps(dependant: Dependant, steps: list[Step]) -> int:
    """Add the steps of a dependant in the order in which FastAPI solves it; return its index."""
    func: Any = dependant.call
    require(kind_for_fastapi(func) is Kind.COROUTINE)
    require(getattr(dependant, "concurrency", None) is None)
    require(not dependant.background_tasks_param_name and not dependant.response_param_name)
    require(not dependant.security_scopes_param_name and not dependant.websocket_param_name)
    children = [add_steps(each, steps) for each in dependant.dependencies]
    # What stands twice in a request FastAPI calls once, unless it is told otherwise.
    require(all(func != step.func for step in steps))
    fields = (
        (_path, dependant.path_params),
        (_query, dependant.query_params),
        (_headers, dependant.header_params),
        (_cookies, dependant.cookie_params),
    )
    sources: list[tuple[Read, list[_Parameter]]] = [
        (source, [_parameter(each) for each in some]) for source, some in fields if some
    ]
    names = (dependant.request_param_name, dependant.http_connection_param_name)
    for child, each in zip(children, dependant.dependencies, strict=True):
        steps[child].name, steps[child].parent = each.name, len(steps)
    steps.append(Step(func, sources, [name for name in names if name]))
    return len(steps) - 1


def _parameter(field: Any) -> _Parameter:
    info = field.field_info
    require(_is_scalar(info.annotation) and not any(type(each) is Json for each in info.metadata))
    require(isinstance(info.validation_alias, (str, NoneType)) and not field.config)
    require(info.default_factory is None and not info.validate_default)
    default = _REQUIRED if info.is_required() else field.default
    is_shared = default is _REQUIRED or type(default) in JSON_SCALARS
    key = field.validation_alias or field.alias
    return _Parameter(field.name, key, default, is_shared, field.validate)


def _is_scalar(annotation: Any) -> bool:
    """Whether it stands for one value: sequences, and models of parameters, are read otherwise."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_scalar(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return all(map(_is_scalar, get_args(annotation)))
    is_class = isinstance(annotation, type) and origin is None
    return origin is Literal or (is_class and issubclass(annotation, _SCALARS))


def _path(scope: Scope) -> Mapping[str, Any]:
    path_params: Mapping[str, Any] = scope.get("path_params", {})
    return path_params


def _query(scope: Scope) -> Mapping[str, Any]:
    # As `Request.query_params`: of several values the last.
    query = scope["query_string"]
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else {}


def _headers(scope: Scope) -> Mapping[str, Any]:
    return Request(scope).headers


def _cookies(scope: Scope) -> Mapping[str, Any]:
    return Request(scope).cookies
