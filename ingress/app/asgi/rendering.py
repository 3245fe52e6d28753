"""The rendering of an endpoint's result to a response, as FastAPI does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import repeat
from typing import Any

from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import ResponseValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ingress.app.asgi.compat import (
    DefaultPlaceholder,
    is_body_allowed_for_status_code,
    routing,
    serialize_response,
)
from ingress.app.asgi.steps import JSON_SCALARS, Shared, Steps

Encoder = Callable[[Scope, Any], bytes]


def encoder(route: Any, steps: Steps) -> Encoder | None:
    """Return a function from a result to the JSON of a 200; `None` if it needs `renderer`."""

    def by_encoder(scope: Scope, result: Any) -> bytes:
        return encode(result if is_json(result) else jsonable_encoder(result)).encode()

    if route.status_code not in (None, 200):
        return None
    if (field := route.response_field) is not None:
        is_default = isinstance(route.response_class, DefaultPlaceholder)
        return field_encoder(field, route, steps) if is_default else None
    return by_encoder if response_class_of(route) is JSONResponse else None


def field_encoder(field: Any, route: Any, steps: Steps) -> Encoder:
    """Return a function that validates a value with the field and makes its JSON."""
    validate, serialize, options = field.validate, field.serialize_json, _options(route)

    def by_field(scope: Scope, result: Any) -> bytes:
        value, errors = validate(result, {}, loc=("response",))
        if errors:
            context = steps.endpoint_context(scope)
            raise ResponseValidationError(errors=errors, body=result, endpoint_ctx=context)
        encoded: bytes = serialize(value, **options)
        return encoded

    return by_field


def renderer(route: Any, steps: Steps) -> Any:
    """Return a function from an endpoint's result to a response, as FastAPI makes it."""
    field, status_code, options = route.response_field, route.status_code, _options(route)
    response_class = response_class_of(route)
    dump_json = field is not None and isinstance(route.response_class, DefaultPlaceholder)

    async def render(scope: Scope, result: Any, shared: Shared | None) -> Response:
        if isinstance(result, Response):
            if result.background is None and shared is not None:
                result.background = shared.background
            return result
        given = response_arguments(shared, status_code)
        content = await serialize_response(
            field=field,
            response_content=result,
            endpoint_ctx=steps.endpoint_context(scope),
            dump_json=dump_json,
            **options,
        )
        response: Response = (
            Response(content=content, media_type="application/json", **given)
            if dump_json
            else response_class(content, **given)
        )
        if not is_body_allowed_for_status_code(response.status_code):
            response.body = b""
        add_written_headers(response, shared)
        return response

    return render


def response_arguments(shared: Shared | None, status_code: int | None) -> dict[str, Any]:
    """Return the arguments that FastAPI passes to a response class besides the content."""
    given: dict[str, Any] = {"background": shared and shared.background}
    status = shared and shared.response and shared.response.status_code
    if (status := status or status_code or status) is not None:
        given["status_code"] = status
    return given


def add_written_headers(response: Response, shared: Shared | None) -> None:
    """Add the headers that user code wrote into the response it was given."""
    if shared is not None and shared.response is not None:
        response.headers.raw.extend(shared.response.headers.raw)


def is_json(value: Any, depth: int = 0) -> bool:
    """Return whether `jsonable_encoder` would return an equal value."""
    kind = type(value)
    if kind in JSON_SCALARS:
        return True
    if depth > 16:  # the encoder decides on deeper values
        return False
    if kind is dict:
        for key, each in value.items():  # `all()` of a generator would enter a frame for each
            if type(key) is not str or key.startswith("_sa") or not is_json(each, depth + 1):
                return False
        return True
    return kind is list and all(map(is_json, value, repeat(depth + 1)))


# As in `JSONResponse`, which makes a new encoder for each response.
encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def response_class_of(route: Any) -> Any:
    given = route.response_class
    return given.value if isinstance(given, DefaultPlaceholder) else given


def makes_events(route: Any) -> bool:
    """Return whether FastAPI makes server-sent events of the result, generator or not."""
    events = getattr(routing, "EventSourceResponse", None)
    given = response_class_of(route)
    return events is not None and isinstance(given, type) and issubclass(given, events)


def _options(route: Any) -> dict[str, Any]:
    return {name: getattr(route, f"response_model_{name}") for name in _MODEL_OPTIONS}


_MODEL_OPTIONS = (
    "include", "exclude", "by_alias", "exclude_unset", "exclude_defaults", "exclude_none",
)  # fmt: skip
