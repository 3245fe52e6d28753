"""The calls that a route makes for a request, and the parameters that each call takes.

A `Step` is a dependency, or the endpoint. Steps run in FastAPI's order, and each reads its
parameters just before its call: the user's validators run at the same point, and as often, as under
FastAPI. A parameter with a single value is looked up and validated here, by FastAPI's own field.
FastAPI's own function reads all other parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from operator import attrgetter, methodcaller
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin
from urllib.parse import parse_qsl
from uuid import UUID

from fastapi import BackgroundTasks
from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ingress.app.asgi.compat import (
    REQUEST_STACK,
    Dependant,
    get_cache_key,
    get_dependant,
    request_body_to_args,
    solve_dependencies,
)
from ingress.app.asgi.compat import endpoint_context as extract_endpoint_context
from ingress.app.asgi.dependencies import nodes_of
from ingress.app.asgi.received_headers import as_received, request_params_to_args
from ingress.core.execution.execution import Kind, kind_for_fastapi

JSON_SCALARS = frozenset((str, int, float, bool, NoneType))
"""The types of JSON values that are immutable, and so can be shared."""

_SCALARS = (
    str, int, float, bool, NoneType, Decimal, UUID, Enum, date, datetime, time, timedelta,
)  # fmt: skip
_NO_CONSTANT = object()
_NO_STEP = -1
_CALLS = attrgetter("call", "dependencies")


class Unfit(Exception):
    """The route cannot be compiled; FastAPI must answer it."""


def require(condition: object) -> None:
    if not condition:
        raise Unfit


@dataclass(eq=False, slots=True)
class Shared:
    """The objects that FastAPI passes to the calls of one request; made on demand."""

    request: Request | None
    background: Any = None
    response: Response | None = None


class _Value(NamedTuple):
    """A parameter with a single value. All requests may share `default`."""

    name: str
    key: str
    loc: tuple[str, str]
    default: Any
    field: Any


Received = Callable[[Scope], Any]


class _Source(NamedTuple):
    """Parameters of one kind. `values` is empty if FastAPI has to find them."""

    received: Received
    fields: list[Any]
    values: list[_Value]


@dataclass(slots=True)
class Step:
    """One dependency, or the endpoint: the function, and its parameters.

    `parent` is the index of the step that takes the result, as `name`. `cache_key` is equal for
    steps that share one call, `None` for a step without such others; `full_key` is FastAPI's.
    `single` is the field of a body that is one parameter.
    """

    func: Callable[..., Awaitable[Any]]
    sources: list[_Source]
    body_fields: list[Any]
    single: Any
    shared: list[tuple[str, Callable[[Shared], Any]]]
    name: str | None = None
    parent: int = _NO_STEP
    cache_key: Any = None
    full_key: Any = None
    use_cache: bool = True


class Progress(NamedTuple):
    """The work that the steps of one request have done; `next_step` is an index.

    `given` has the values for each step, `unnamed` the results that no step takes, `errors` the
    refusals, `failed` the steps that are left out because of them.
    """

    next_step: int
    given: dict[int, dict[str, Any]]
    unnamed: dict[int, Any]
    results: dict[Any, Any]
    errors: list[Any]
    failed: set[int]


class Overridden(Exception):
    """A dependency has set an override, so that FastAPI must solve others, in its layers."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress


class Steps:
    """The steps of a route, its endpoint last. Thread-safe: immutable once made.

    `endpoint` is called in place of the route's own.
    """

    __slots__ = (
        "_begun",
        "_embeds_body",
        "_nodes",
        "_steps",
        "_tree",
        "bare",
        "dependant",
        "takes_request",
        "takes_shared",
    )

    def __init__(self, dependant: Dependant, *, embeds_body: bool, endpoint: Any = None) -> None:
        self.dependant = dependant
        self._embeds_body = embeds_body
        self._steps: list[Step] = []
        self._begun: dict[int, tuple[int, Dependant]] = {}
        self._add(dependant, endpoint or dependant.call)
        self._forget_unique_keys()
        self._nodes = [dependant, *nodes_of(dependant)]
        self._tree = [(call, list(below)) for call, below in map(_CALLS, self._nodes)]
        last = self._steps[-1]
        takes = {what for step in self._steps for _, what in step.shared}
        self.takes_request = _take_request in takes
        self.takes_shared = bool(takes)
        takes_nothing = not (last.sources or last.body_fields or takes)
        self.bare = last.func if len(self._steps) == 1 and takes_nothing else None
        """The endpoint, if it is the only step and has no parameters."""

    def are_current(self) -> bool:
        """Return whether the dependencies are those of the route still: user code may add some."""
        return list(map(_CALLS, self._nodes)) == self._tree

    def endpoint_context(self, scope: Scope) -> Any:
        """Return the context of the endpoint in FastAPI's validation errors."""
        context = extract_endpoint_context(self.dependant.call)
        if self.dependant.path:
            prefix = scope.get("root_path", "").rstrip("/")
            context["path"] = f"{scope['method']} {prefix}{self.dependant.path}"
        return context

    async def run(
        self,
        scope: Scope,
        body: Any,
        shared: Shared | None,
        provider: Any = None,
        progress: Progress | None = None,
    ) -> Any:
        """Return the endpoint's result. Raises errors of user code, and FastAPI's refusals.

        A dependency with invalid parameters is not called, nor is a step that takes its result. All
        other dependencies are called, because FastAPI reports all errors at once. Like FastAPI, it
        looks for overrides before each dependency: raises `Overridden` if an earlier one has set
        the first in `provider`. Called again with the `progress`, it has FastAPI solve the rest.
        """
        index, given, unnamed, results, errors, failed = progress or (0, {}, {}, {}, [], set())
        result: Any = None
        steps = iter(enumerate(self._steps[index:] if index else self._steps, index))
        for index, step in steps:
            if index in self._begun and provider is not None and provider.dependency_overrides:
                was = Progress(index, given, unnamed, results, errors, failed)
                if progress is None:
                    raise Overridden(was)
                last = await self._solve(scope, body, shared, provider, was)
                while index < last:
                    index, _ = next(steps)
                continue
            values, before = given.get(index) or {}, len(errors)
            if step.sources:
                _read(step.sources, scope, values, errors)
            if step.body_fields:
                await self._read_body(step, body, values, errors)
            if shared is not None:
                for name, take in step.shared:
                    values[name] = take(shared)
            if index in failed or len(errors) > before:
                failed.add(step.parent)
                continue
            key = step.cache_key
            if key is None:
                result = await step.func(**values)
            elif step.use_cache and key in results:
                result = results[key]
            else:
                result = await step.func(**values)
                results.setdefault(key, result)
            if step.name is not None:
                given.setdefault(step.parent, {})[step.name] = result
            else:
                unnamed[index] = result
        if errors:
            raise RequestValidationError(
                errors, body=body, endpoint_ctx=self.endpoint_context(scope)
            )
        return result

    async def _solve(
        self, scope: Scope, body: Any, shared: Shared | None, provider: Any, was: Progress
    ) -> int:
        """Have FastAPI solve the dependency that begins now; return the index of its step."""
        assert shared is not None  # within FastAPI's layers there is a request
        last, dependant = self._begun[was.next_step]
        cache = dict(was.results)
        for index, step in enumerate(self._steps[: was.next_step]):
            values = was.given.get(step.parent, {})
            if index in was.unnamed or step.name in values:
                value = was.unnamed[index] if step.name is None else values[step.name]
                cache.setdefault(step.full_key, value)
        solved = await solve_dependencies(
            request=shared.request,
            dependant=Dependant(dependencies=[dependant], path=dependant.path),
            body=body,
            background_tasks=shared.background,
            response=_take_response(shared),
            dependency_overrides_provider=provider,
            dependency_cache=cache,
            async_exit_stack=scope[REQUEST_STACK],
            embed_body_fields=self._embeds_body,
        )
        was.results.update(cache)
        shared.background = solved.background_tasks
        step = self._steps[last]
        was.errors.extend(solved.errors)
        if solved.errors:
            was.failed.add(step.parent)
        elif step.name is not None:
            was.given.setdefault(step.parent, {}).update(solved.values)
        return last

    async def _read_body(
        self, step: Step, body: Any, values: dict[str, Any], errors: list[Any]
    ) -> None:
        if step.single is not None and body is not None:
            value, problems = step.single.validate(body, {}, loc=("body",))
            found = {step.single.name: value}
        else:
            found, problems = await request_body_to_args(
                body_fields=step.body_fields,
                received_body=body,
                embed_body_fields=self._embeds_body,
            )
        values.update(found)
        errors += problems

    def _add(self, dependant: Dependant, func: Any) -> int:
        """Add a dependant's steps in FastAPI's order; return the index of the last one."""
        require(kind_for_fastapi(func) is Kind.COROUTINE)
        require(getattr(dependant, "concurrency", None) is None)
        require(not dependant.security_scopes_param_name and not dependant.websocket_param_name)
        children = []
        for each in dependant.dependencies:
            first = len(self._steps)
            children.append(self._add(each, each.call))
            if first:  # before the first one, the route looks itself
                self._begun[first] = (children[-1], each)
        fields: list[Any] = dependant.body_params
        is_single = len(fields) == 1 and not self._embeds_body and not fields[0].field_info.embed
        step = Step(
            func,
            list(_sources(dependant)),
            fields,
            fields[0] if is_single else None,
            _shared(dependant),
        )
        for child, each in zip(children, dependant.dependencies, strict=True):
            self._steps[child].name = each.name
            self._steps[child].parent = len(self._steps)
            self._steps[child].use_cache = each.use_cache
            self._steps[child].cache_key = self._steps[child].full_key = _cache_key(each)
        self._steps.append(step)
        return len(self._steps) - 1

    def _forget_unique_keys(self) -> None:
        try:
            count = Counter(step.cache_key for step in self._steps)
        except Exception as error:  # no dependency that has no hash can be in FastAPI's cache
            raise Unfit from error
        for step in self._steps:
            if count[step.cache_key] == 1:
                step.cache_key = None


def _read(sources: list[_Source], scope: Scope, values: dict[str, Any], errors: list[Any]) -> None:
    """Add the parameters of a step to `values`, and their errors to `errors`."""
    for source in sources:
        received = source.received(scope)
        for name, key, loc, default, parameter in source.values:
            value = received.get(key)
            if value is not None:
                valid, problems = parameter.validate(value, {}, loc=loc)
                if problems:
                    errors += problems
                else:
                    values[name] = valid
            elif default is not _NO_CONSTANT:
                values[name] = default
            else:
                found, problems = request_params_to_args([parameter], _NOTHING)
                values.update(found)
                errors += problems
        if not source.values:
            found, problems = request_params_to_args(source.fields, received)
            values.update(found)
            errors += problems


# The parameters of a dependant.


def _sources(dependant: Dependant) -> Iterator[_Source]:
    """Yield the parameters that FastAPI reads, in its order."""
    for received, look_up, fields in (
        (_path, _path, dependant.path_params),
        (_query, _last_of_each, dependant.query_params),
        (_headers, _headers, dependant.header_params),
        (_cookies, _cookies, dependant.cookie_params),
    ):
        if fields and all(map(_is_one_value, fields)):
            yield _Source(look_up, fields, list(map(_value, fields)))
        elif fields:
            yield _Source(received, fields, [])


def _shared(dependant: Dependant) -> list[tuple[str, Callable[[Shared], Any]]]:
    """Return the names of the parameters for `Shared` objects, in FastAPI's order."""
    takers = (
        (dependant.http_connection_param_name, _take_request),
        (dependant.request_param_name, _take_request),
        (dependant.background_tasks_param_name, _take_background_tasks),
        (dependant.response_param_name, _take_response),
    )
    return [(name, take) for name, take in takers if name]


def _take_request(shared: Shared) -> Any:
    return shared.request


def _take_background_tasks(shared: Shared) -> Any:
    if shared.background is None:
        shared.background = BackgroundTasks()
    return shared.background


def _take_response(shared: Shared) -> Any:
    if shared.response is None:
        shared.response = Response()
        del shared.response.headers["content-length"]
        shared.response.status_code = None  # type: ignore[assignment]
    return shared.response


def _cache_key(dependant: Dependant) -> Any:
    known: Any = dependant
    return known.cache_key if get_cache_key is None else get_cache_key(dependant=dependant)


# Parameters.


def _is_one_value(field: Any) -> bool:
    info = field.field_info
    return _is_scalar(info.annotation) and isinstance(info.validation_alias, (str, NoneType))


def _value(field: Any) -> _Value:
    info = field.field_info
    key = field.validation_alias or field.alias
    # An older FastAPI validates every default except `None`.
    constants = (NoneType,) if _validates_defaults() else JSON_SCALARS
    is_constant = not info.validate_default and type(info.default) in constants
    default = info.default if is_constant and not info.is_required() else _NO_CONSTANT
    return _Value(field.name, key, (info.in_.value, key), default, field)


def _is_scalar(annotation: Any) -> bool:
    """Return whether a parameter has a single value; sequences and parameter models do not."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_scalar(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return all(map(_is_scalar, get_args(annotation)))
    is_class = isinstance(annotation, type) and origin is None
    return origin is Literal or (is_class and issubclass(annotation, _SCALARS))


@cache
def _validates_defaults() -> bool:
    """Return whether this FastAPI validates the default of a parameter that was not given."""

    def endpoint(value: int = "") -> None:  # type: ignore[assignment]
        pass

    params = get_dependant(path="", call=endpoint).query_params
    return bool(request_params_to_args(params, _NOTHING)[1])


_NOTHING: Mapping[str, Any] = {}


_path: Received = methodcaller("get", "path_params", _NOTHING)


def _query(scope: Scope) -> Any:
    return Request(scope).query_params


def _last_of_each(scope: Scope) -> Any:
    # As in `Request.query_params.get`.
    query = scope["query_string"]
    return dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True)) if query else _NOTHING


def _headers(scope: Scope) -> Any:
    return as_received(Request(scope).headers)


def _cookies(scope: Scope) -> Any:
    return Request(scope).cookies
