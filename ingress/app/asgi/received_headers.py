"""The headers that a request came with, beside the id that the proxy adds to them.

request.headers                        have the id, as on Ray
header parameters and header models    are read from the headers that came: the client did not
                                       send the id, and must not be told of it in a 422
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

from starlette.datastructures import Headers, QueryParams

from ingress.app.asgi.compat import read_parameters_by
from ingress.app.asgi.compat import request_params_to_args as read_parameters
from ingress.context import REPLICA

Pair = tuple[bytes, bytes]


class AddedHeader(tuple[bytes, bytes]):
    """A header that the proxy added to a request."""

    __slots__ = ()


class ReplacingHeader(AddedHeader):
    """One in the place of `replaced`, which the client sent. Few: a tuple has no slots for it."""

    replaced: Sequence[Pair] = ()


def with_replaced(headers: list[Pair], header: Pair) -> list[Pair]:
    """Return the headers with this one in the place of those of its name."""
    replaced = [pair for pair in headers if pair[0] == header[0]]
    if replaced == [header]:
        return headers
    added = ReplacingHeader(header)
    added.replaced = replaced
    return [*[pair for pair in headers if pair[0] != header[0]], added]


def as_received(headers: Headers) -> Headers:
    """Return the headers as the client sent them."""
    for added in headers.raw:
        if isinstance(added, AddedHeader):
            kept = [pair for pair in headers.raw if pair is not added]
            return Headers(raw=[*kept, *getattr(added, "replaced", ())])
    return headers


@wraps(read_parameters)
def request_params_to_args(
    fields: Sequence[Any],
    received_params: Mapping[str, object] | QueryParams | Headers,
    **options: Any,
) -> tuple[dict[str, object], list[object]]:
    """Read parameters as FastAPI does, headers from those that came. Options are of its version.

    Raises `TypeError` for the parameter `self` in a replica: of a method in a place where it could
    not be bound, and would run with a value of the client's.
    """
    first = fields[0] if fields and fields[0].name == "self" else None
    if first is not None and first.field_info.is_required() and REPLICA.get(None) is not None:
        raise TypeError(
            "A method that is not bound to an instance asks the client for `self`. Serve it from "
            "an APIRouter or the app of its class, not from a route or an app in another object."
        )
    if isinstance(received_params, Headers):
        received_params = as_received(received_params)
    return read_parameters(fields, received_params, **options)


# Requests that did not pass our proxy have no added header.
read_parameters_by(request_params_to_args)
