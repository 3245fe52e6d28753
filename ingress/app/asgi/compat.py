"""The private names of FastAPI and Starlette; no other module uses one.

    missing, and needed for a right answer   `UnsupportedVersionError`, at import
    a mount's own app, an unknown route      the same, when an app is bound
    missing, and needed by `compiled` only   no route is compiled, `CompiledRoutesOffWarning`
    a function that `compiled` stands in     the same, see `changed`
      for has changed

The functions that compiled routes stand in for are compared with the known ones. A version of
FastAPI or Starlette that was compared is known by its number. Of any other version the fingerprints
of these functions are compared with those of the newest known version: `known.json`, which
`make known-fastapi` writes. That takes 30 ms, once in a process.

Private are names with an underscore, keys of scopes, and all that FastAPI's documentation does not
name. Some names are there since a version of FastAPI: an older one does without.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
import warnings
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import AsyncGeneratorType, FunctionType, ModuleType
from typing import Any, Protocol, TypeGuard

import fastapi
import fastapi.dependencies.utils
import fastapi.routing
import starlette
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.core.base.foreign import copied
from ingress.core.base.private_names import (
    UnsupportedVersionError,
    find,
    require,
    unsupported,
)
from ingress.exceptions import CompiledRoutesOffWarning

STOOD_IN_FOR = (
    "fastapi._body_limit:AppBodyLimitMiddleware.__call__",
    "fastapi._body_limit:AppBodyLimitMiddleware.__init__",
    "fastapi._body_limit:wrap_app_with_body_limit",
    "fastapi.applications:FastAPI.__call__",
    "fastapi.dependencies.models:_is_async_gen_callable",
    "fastapi.dependencies.models:_is_coroutine_callable",
    "fastapi.dependencies.models:_is_gen_callable",
    "fastapi.dependencies.utils:_get_multidict_value",
    "fastapi.dependencies.utils:_validate_value_with_model_field",
    "fastapi.dependencies.utils:get_validation_alias",
    "fastapi.dependencies.utils:request_body_to_args",
    "fastapi.dependencies.utils:request_params_to_args",
    "fastapi.dependencies.utils:solve_dependencies",
    "fastapi.encoders:jsonable_encoder",
    "fastapi.middleware.asyncexitstack:AsyncExitStackMiddleware.__call__",
    "fastapi.routing:APIRoute.__init__",
    "fastapi.routing:APIRoute.get_route_handler",
    "fastapi.routing:APIRoute.handle",
    "fastapi.routing:APIRoute.matches",
    "fastapi.routing:APIRouter.app",
    "fastapi.routing:APIRouter.handle",
    "fastapi.routing:APIRouter.matches",
    "fastapi.routing:_EffectiveRouteContext.from_api_route",
    "fastapi.routing:_EffectiveRouteContext.matches",
    "fastapi.routing:_IncludedRouter._handle_selected",
    "fastapi.routing:_IncludedRouter._match",
    "fastapi.routing:_IncludedRouter.effective_candidates",
    "fastapi.routing:_IncludedRouter.handle",
    "fastapi.routing:_IncludedRouter.matches",
    "fastapi.routing:_build_response_args",
    "fastapi.routing:get_request_handler",
    "fastapi.routing:request_response",
    "fastapi.routing:run_endpoint_function",
    "fastapi.routing:serialize_response",
    "fastapi.telemetry._asgi:ExceptionTelemetryMiddleware.__call__",
    "starlette._exception_handler:wrap_app_handling_exceptions",
    "starlette.applications:Starlette.__call__",
    "starlette.datastructures:ImmutableMultiDict.__init__",
    "starlette.datastructures:QueryParams.__init__",
    "starlette.middleware.errors:ServerErrorMiddleware.__call__",
    "starlette.middleware.exceptions:ExceptionMiddleware.__call__",
    "starlette.requests:Request.body",
    "starlette.requests:Request.json",
    "starlette.requests:Request.stream",
    "starlette.responses:JSONResponse.__init__",
    "starlette.responses:JSONResponse.render",
    "starlette.responses:Response.__call__",
    "starlette.responses:Response.__init__",
    "starlette.responses:Response.init_headers",
    "starlette.responses:StreamingResponse.__call__",
    "starlette.routing:Route.handle",
    "starlette.routing:Route.matches",
    "starlette.routing:Router.__call__",
)
FILE = Path(__file__).with_name("known.json")

_KNOWN = json.loads(FILE.read_text())

# Without effect, or without effect on behaviour, or not in every version of Python.
_LEFT_OUT = {"annotation", "ctx", "kind", "returns", "type_comment", "type_params"}


@cache
def changed(fastapi: str, starlette: str) -> list[str]:
    """Return the functions of these installed versions that differ from those compared with."""
    installed = {"fastapi": fastapi, "starlette": starlette}
    return [
        path
        for path in STOOD_IN_FOR
        if installed[library := path.partition(".")[0]] not in _KNOWN["versions"][library]
        and fingerprint(path) != _KNOWN["functions"][path]
    ]


def fingerprint(path: str) -> str:
    """Return a hash of a function's code, the same for every Python; "" if it has no source.

    Formatting, comments, docstrings and annotations do not count.
    """
    try:
        source = textwrap.dedent(inspect.getsource(find(path)))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(_text(ast.parse(source)).encode()).hexdigest()[:16]


def _text(node: object) -> str:
    if isinstance(node, list):
        return f"[{','.join(_text(each) for each in node if not _is_docstring(each))}]"
    if isinstance(node, ast.AST):
        fields = [_text(value) for name, value in ast.iter_fields(node) if name not in _LEFT_OUT]
        return f"{type(node).__name__}({','.join(fields)})"
    return repr(node)


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


SUPPORTED = ">=0.133.0"
SUPPORTED_STARLETTE = ">=1.3.1,<2"

require(
    "starlette",
    SUPPORTED_STARLETTE,
    (
        "starlette._exception_handler:wrap_app_handling_exceptions",
        "starlette._utils:get_route_path",
    ),
)
require(
    "fastapi",
    SUPPORTED,
    (
        "fastapi.datastructures:Default",
        "fastapi.datastructures:DefaultPlaceholder",
        "fastapi.dependencies.models:Dependant.call",
        "fastapi.dependencies.models:Dependant.dependencies",
        "fastapi.dependencies.models:Dependant.name",
        "fastapi.dependencies.models:Dependant.query_params",
        "fastapi.dependencies.utils:get_dependant(get_dependant)",
        "fastapi.dependencies.utils:get_parameterless_sub_dependant(get_dependant)",
        "fastapi.dependencies.utils:get_typed_return_annotation",
        "fastapi.dependencies.utils:get_typed_signature",
        "fastapi.dependencies.utils:request_params_to_args",
        "fastapi.dependencies.utils:solve_dependencies(get_dependant)",
        "fastapi.dependencies.utils:solve_dependencies(request_params_to_args)",
    ),
)

from fastapi.datastructures import Default, DefaultPlaceholder  # noqa: E402 - after the check
from fastapi.dependencies.models import Dependant  # noqa: E402
from fastapi.dependencies.utils import (  # noqa: E402
    get_dependant,
    get_parameterless_sub_dependant,
    get_typed_return_annotation,
    get_typed_signature,
    request_params_to_args,
)
from starlette._exception_handler import wrap_app_handling_exceptions  # noqa: E402
from starlette._utils import get_route_path  # noqa: E402

__all__ = [
    "EXIT_STACK_LAYER",
    "FASTAPI_SCOPE",
    "FILE_STACK",
    "FUNCTION_STACK",
    "LAYERS",
    "MIDDLEWARE_RESPONSE",
    "REQUEST_STACK",
    "STACKS",
    "TELEMETRY",
    "Default",
    "DefaultPlaceholder",
    "Dependant",
    "IncludedRouter",
    "ServedRoute",
    "base_app",
    "built_candidates",
    "check_kind",
    "effective_context",
    "effective_route",
    "embeds_body",
    "endpoint_context",
    "endpoint_contexts",
    "fill_low_priority",
    "get_cache_key",
    "get_dependant",
    "get_parameterless_sub_dependant",
    "get_route_path",
    "get_typed_return_annotation",
    "get_typed_signature",
    "is_body_allowed_for_status_code",
    "is_included",
    "is_late_error",
    "is_original",
    "iter_route_contexts",
    "keeps_candidates",
    "native_telemetry",
    "normalize_non_finite_floats",
    "ping_interval_s",
    "read_dependants_by",
    "read_parameters_by",
    "reads_by",
    "request_body_to_args",
    "request_params_to_args",
    "request_stack",
    "request_with_body",
    "routing",
    "serialize_response",
    "solve_dependencies",
    "take_frontends",
    "waiting_for_threads",
    "warn_if_not_compiled",
    "why_not_compiled",
    "with_candidates",
    "wrap_app_handling_exceptions",
]


class ServedRoute(Protocol):
    """A route with the prefix of its include: a route itself, or FastAPI's context of one.

    Other attributes depend on the kind of the route.
    """

    path: str
    name: str
    endpoint: Callable[..., object]

    def matches(self, scope: Scope) -> tuple[Match, Scope]: ...


routing: ModuleType = fastapi.routing
"""FastAPI's module, without types: `compiled` calls functions in it that tracers may replace."""


def _since(version: tuple[int, int], path: str) -> Any:
    """Return a private name of FastAPI, `None` if it is missing; noted if it should be there."""
    found = find(path, _missing)
    if found is not _missing:
        return found
    if version <= tuple(map(int, fastapi.__version__.split(".")[:2])):
        _missing.append(path)
    return None


_missing: list[str] = []


def _look_up(*rows: tuple[tuple[int, int], str, Sequence[str]]) -> None:
    for version, pattern, names in rows:
        for name in names:
            _since(version, pattern.format(name))


# A router in the route tree. An older FastAPI copies its routes into the tree.
IncludedRouter: Any = _since((0, 137), "fastapi.routing:_IncludedRouter")
iter_route_contexts: Callable[..., Iterator[ServedRoute]] = (
    _since((0, 138), "fastapi.routing:iter_route_contexts") or iter
)
_look_up(
    ((0, 137), "fastapi.routing:_IncludedRouter.{}", ("include_context", "original_router")),
    ((0, 137), "fastapi.routing:_RouterIncludeContext.{}", ("included_router",)),
    ((0, 137), "fastapi.routing:_EffectiveRouteContext.{}", ("original_route", "starlette_route")),
    # An endpoint that is a generator. An older FastAPI does not stream it.
    ((0, 134), "fastapi.routing:APIRoute.get_route_handler({})", ("is_json_stream",)),
)
if _missing:  # without them endpoints and dependencies would stay unbound, and streams be values
    raise unsupported("fastapi", SUPPORTED, _missing)

endpoint_contexts: dict[int, dict[str, object]] | None = _since(
    (0, 133), "fastapi.routing:_endpoint_context_cache"
)
endpoint_context: Any = _since((0, 133), "fastapi.routing:_extract_endpoint_context")
get_cache_key: Callable[..., Hashable] | None = _since(
    (0, 140), "fastapi.dependencies.models:_get_cache_key"
)
normalize_non_finite_floats: Callable[[object], object] | None = _since(
    (0, 145), "fastapi.routing:_normalize_non_finite_floats"
)
serialize_response: Callable[..., Awaitable[object]] = _since(
    (0, 133), "fastapi.routing:serialize_response"
)
is_body_allowed_for_status_code: Callable[[int | str | None], bool] = _since(
    (0, 133), "fastapi.utils:is_body_allowed_for_status_code"
)
request_body_to_args: Callable[..., Awaitable[tuple[dict[str, object], list[object]]]] = _since(
    (0, 133), "fastapi.dependencies.utils:request_body_to_args"
)
solve_dependencies: Callable[..., Awaitable[Any]] = _since(
    (0, 133), "fastapi.dependencies.utils:solve_dependencies"
)
_context_of: Callable[[Scope], object] | None = _since(
    (0, 137), "fastapi.routing:_get_scope_effective_route_context"
)
_scope_key: str | None = _since((0, 137), "fastapi.routing:_FASTAPI_SCOPE_KEY")

FILE_STACK = "fastapi_middleware_astack"
REQUEST_STACK = "fastapi_inner_astack"
FUNCTION_STACK = "fastapi_function_astack"
_knows_includes = IncludedRouter is None or (_context_of is not None and _scope_key is not None)
FASTAPI_SCOPE: str = _scope_key or "fastapi" if _knows_includes else "type"
"""The key of a scope with an included route; "type", which all have, where only a match tells."""

STACKS = (FILE_STACK, REQUEST_STACK, FUNCTION_STACK)
"""The keys of a scope for FastAPI's exit stacks."""

TELEMETRY = "fastapi.telemetry"
"""The key of a scope under which FastAPI finds its telemetry, `None` for off."""

EXIT_STACK_LAYER: Any = find("fastapi.middleware.asyncexitstack:AsyncExitStackMiddleware")
LAYERS = frozenset(
    (
        find("starlette.middleware.errors:ServerErrorMiddleware"),
        find("fastapi.telemetry._asgi:ExceptionTelemetryMiddleware", EXIT_STACK_LAYER),
        find("fastapi._body_limit:AppBodyLimitMiddleware", EXIT_STACK_LAYER),
        find("starlette.middleware.exceptions:ExceptionMiddleware"),
        EXIT_STACK_LAYER,
    )
)
"""The classes of FastAPI's own layers around its routes, the innermost one last."""

_look_up(
    ((0, 135), "fastapi.routing:{}", ("_PING_INTERVAL",)),
    ((0, 138), "fastapi.routing:RouteContext.{}", ("_route_context",)),
    ((0, 137), "fastapi.routing:_IncludedRouter.{}", (
        "_effective_candidates", "effective_candidates",
    )),
    ((0, 138), "fastapi.routing:_IncludedRouter.{}", ("effective_low_priority_routes",)),
    ((0, 133), "fastapi._compat:ModelField.{}", (
        "alias", "field_info", "name", "serialize_json", "validate", "validation_alias",
    )),
    ((0, 133), "fastapi.dependencies.models:Dependant.{}", (
        "background_tasks_param_name", "body_params", "cookie_params", "header_params",
        "http_connection_param_name", "name", "path", "path_params", "request_param_name",
        "response_param_name", "security_scopes_param_name", "use_cache", "websocket_param_name",
    )),
    ((0, 163), "fastapi.dependencies.models:Dependant.{}", ("concurrency",)),
    ((0, 133), "fastapi.routing:get_request_handler({})", (FILE_STACK, REQUEST_STACK)),
    ((0, 133), "fastapi.routing:request_response({})", (REQUEST_STACK, FUNCTION_STACK)),
    ((0, 142), "fastapi.applications:FastAPI.__call__({})", ("_native_telemetry", TELEMETRY)),
    ((0, 133), "starlette.requests:Request.body({})", ("_body",)),
    ((0, 133), "starlette.requests:Request.json({})", ("_json",)),
    ((0, 164), "fastapi.routing:APIRoute.__init__({})", ("max_body_size",)),
    ((0, 165), "fastapi.routing:APIRouter.app({})", ("form_limits",)),
    ((0, 134), "fastapi.routing:APIRoute.get_route_handler({})", ("stream_item_field",)),
    ((0, 133), "fastapi.routing:APIRoute.get_route_handler({})", (
        "_embed_body_fields", "body_field", "dependant", "dependency_overrides_provider",
        "response_class", "response_field", "response_model_by_alias", "response_model_exclude",
        "response_model_exclude_defaults", "response_model_exclude_none",
        "response_model_exclude_unset", "response_model_include", "status_code",
    )),
)  # fmt: skip


def why_not_compiled() -> str:
    """Return why no route is compiled, "" if routes are."""
    if _missing:
        return f"it lacks {', '.join(_missing)}"
    if names := changed(fastapi.__version__, starlette.__version__):
        return f"ingress was compared with others of its functions: {', '.join(names)}"
    return ""


why_not_compiled()  # here, because it may read files, and an app may be bound on an event loop


@cache
def warn_if_not_compiled(*, has_routes: bool) -> None:
    """Warn, once in a process, if an app with routes is bound and none is compiled."""
    why = why_not_compiled()
    if why and has_routes:
        warnings.warn(
            f"FastAPI {fastapi.__version__} with Starlette {starlette.__version__}: {why}. "
            "FastAPI's own handlers answer all routes, at plain FastAPI's speed. Upgrade "
            "fastapi-ingress, or install versions that it knows.",
            CompiledRoutesOffWarning,
            stacklevel=2,
        )


# Requests.


def read_parameters_by(func: Callable[..., tuple[dict[str, object], list[object]]]) -> None:
    """Have FastAPI call `func` in the place of `request_params_to_args`.

    In FastAPI's module, because its own handlers, WebSocket routes and mounted applications read
    their parameters with it too.
    """
    fastapi.dependencies.utils.request_params_to_args = func


def reads_by(parameters: Callable[..., object], body: Callable[..., object]) -> bool:
    """Return whether FastAPI still calls these to read parameters and bodies."""
    utils = fastapi.dependencies.utils
    return utils.request_params_to_args is parameters and utils.request_body_to_args is body


def read_dependants_by(
    func: Callable[..., Dependant], of_endpoint: Callable[..., Dependant]
) -> None:
    """Have FastAPI call these in the place of `get_dependant`, also from within it."""
    fastapi.dependencies.utils.get_dependant = func
    vars(routing)["get_dependant"] = of_endpoint


def ping_interval_s() -> float:
    """Return the seconds between two comments of an idle event stream; FastAPI reads it late."""
    return float(routing._PING_INTERVAL)


def request_with_body(
    scope: Scope, receive: Receive, send: Send, body: bytes, json: object
) -> Request:
    """Return a request that has read its body: with the attributes where it caches the body."""
    request = Request(scope, receive, send)
    request._body = body
    request._json = json
    return request


def request_stack(scope: Scope) -> AsyncExitStack | None:
    """Return the exit stack of a request that FastAPI's own handler answers, `None` if unknown."""
    return scope.get(REQUEST_STACK)


MIDDLEWARE_RESPONSE: Any = find("starlette.middleware.base:_StreamingResponse", Response)
"""The class of the response that `call_next` returns."""


def is_late_error(error: BaseException) -> bool:
    """Return whether this is Starlette's error for one that has a handler, and came too late."""
    if type(error) is not RuntimeError:
        return False
    places = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    return places[-1:] == [wrap_app_handling_exceptions.__module__]


def waiting_for_threads(body: object) -> Iterable[object] | None:
    """Return the iterable that Starlette would iterate in threads, unless that has begun.

    Also `None` for a Starlette that has renamed the variables that hold them: it then does.
    """
    code = iterate_in_threadpool.__code__
    is_known = {*_ITERATORS} <= {*code.co_varnames}
    if not is_known or not isinstance(body, AsyncGeneratorType) or body.ag_code is not code:
        return None
    names = {} if body.ag_frame is None else body.ag_frame.f_locals
    return None if _ITERATORS[1] in names else names.get(_ITERATORS[0])


_ITERATORS = ("iterator", "as_iterator")


# Routes.


def embeds_body(route: Any) -> bool:
    """Return whether FastAPI expects the parameters of a route's body under their names."""
    return bool(route._embed_body_fields)


def native_telemetry(app: ASGIApp) -> Callable[[], bool] | None:
    """Return the function that says if an app's own telemetry is on, `None` if it has none."""
    return getattr(getattr(app, "_native_telemetry", None), "enabled", None)


def effective_route(scope: Scope, route: object) -> Any:
    """Return the object with the full path of the route that was found: it knows its includes.

    Since FastAPI 0.137 an included route does not. `None` if it is not known.
    """
    if not _knows_includes:
        pattern = getattr(route, "path_regex", None)
        return route if pattern is not None and pattern.match(get_route_path(scope)) else None
    included = None if _context_of is None else _context_of(scope)
    return included if getattr(included, "original_route", None) is route else route


def effective_context(served: ServedRoute) -> Any:
    """Return what FastAPI keeps of an included route, `None` for another route.

    FastAPI 0.137 keeps no app in it: it makes that app anew for each request.
    """
    return getattr(served, "_route_context", None)


def is_included(route: object) -> TypeGuard[Any]:
    """Return whether a route is an included router, with the prefix of its include."""
    return IncludedRouter is not None and isinstance(route, IncludedRouter)


def with_candidates(node: Any, candidates: Sequence[object]) -> Any:
    """Return a copy of an included router with other routes to match."""
    clone = copied(node)
    clone._effective_candidates = candidates
    return clone


def take_frontends(router: Any, clone: Any, overrides: Callable[[Any], Any]) -> None:
    """Give the copy of a router copies of its frontends: files that no route stands before.

    `overrides` returns the provider of dependency overrides for that of the user.
    """
    if (group := getattr(router, "_frontend_routes", None)) is not None:
        new = clone._frontend_routes = copied(group)
        provider = overrides(group.dependency_overrides_provider)
        make = type(group).__init__
        make(new, dependencies=group.dependencies, dependency_overrides_provider=provider)
        new.routes = group.routes
        clone._low_priority_routes = [
            new if each is group else each for each in router._low_priority_routes
        ]


def built_candidates(node: Any) -> Sequence[Any]:
    """Return the routes of an included router that FastAPI has built, none if it has not yet."""
    return getattr(node, "_effective_candidates", ())


def fill_low_priority(node: Any) -> None:
    """Have FastAPI build the frontends of an included router now."""
    getattr(node, "effective_low_priority_routes", list)()


def keeps_candidates(node: Any) -> bool:
    """Return whether all routes of an included router are among its `effective_candidates()`."""
    low_priority: Any = getattr(node, "effective_low_priority_routes", list)()
    return not low_priority and hasattr(node, "_effective_candidates")


def base_app(mount: Mount) -> ASGIApp:
    """Return the mounted app, without the mount's middleware."""
    if not hasattr(mount, "_base_app"):
        raise unsupported("starlette", SUPPORTED_STARLETTE, ["starlette.routing:Mount._base_app"])
    return mount._base_app


def is_original(func: object) -> bool:
    """Return whether a function is FastAPI's or Starlette's, and not one that replaced theirs."""
    return type(func) is FunctionType and func.__globals__["__name__"].startswith(
        ("fastapi.", "starlette.")
    )


def check_kind(route: BaseRoute) -> None:
    """Raise `UnsupportedVersionError` for a route of a kind of FastAPI's that is not known here.

    Its endpoints would be called without their instance.
    """
    kind = type(route)
    known = (fastapi.routing.APIRoute, fastapi.routing.APIWebSocketRoute, IncludedRouter)
    if kind.__module__.startswith("fastapi.") and kind not in known:
        raise UnsupportedVersionError(
            f"FastAPI {fastapi.__version__} makes routes of a kind that ingress does not know, "
            f"{kind.__module__}.{kind.__name__}; install a supported version: "
            f'python -m pip install "fastapi{SUPPORTED}"'
        )
