"""The functions that compiled routes stand in for, and whether they have changed.

A version of FastAPI or Starlette that was compared with them is known by its number. Of any other
version the fingerprints of these functions are compared with those of the newest known version:
`known.json`, which `make known-fastapi` writes. That takes 30 ms, once in a process.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from functools import cache
from pathlib import Path

from ingress.core.base.private_names import find

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
