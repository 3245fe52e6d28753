"""The innermost layer of a route, without the exit stacks it does not need.

FastAPI opens three `AsyncExitStack`s for a request: one in its middleware, and two in the route for
dependencies with `yield`. A route that has none of those gets on with the first, which saves a
twentieth of a simple request. What it answers is the same to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette._exception_handler import wrap_app_handling_exceptions
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.asgi.methods import GENERATORS, kind_for_fastapi

MIDDLEWARE_STACK = "fastapi_middleware_astack"
ROUTE_STACKS = ("fastapi_inner_astack", "fastapi_function_astack")


def lean_app(route: APIRoute) -> ASGIApp:
    """Return what stands in for `route.app`; that itself if the route needs its stacks."""
    full = route.app
    if type(route).__init__ is not APIRoute.__init__:
        return full  # a class of the user's, which may have put something before it
    if any(kind_for_fastapi(call) in GENERATORS for call in _calls(route.dependant)):
        return full
    handler = route.get_route_handler()
    provider: Any = route.dependency_overrides_provider

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        stack = scope.get(MIDDLEWARE_STACK)
        if stack is None or (provider is not None and provider.dependency_overrides):
            await full(scope, receive, send)  # an override may be one with `yield`
            return
        for key in ROUTE_STACKS:
            scope[key] = stack
        request = Request(scope, receive, send)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            response = await handler(request)
            await response(scope, receive, send)

        await wrap_app_handling_exceptions(respond, request)(scope, receive, send)

    return app


def _calls(dependant: Dependant) -> Iterator[Any]:
    """Yield what a route calls: its endpoint, and its dependencies at any depth."""
    if dependant.call is not None:
        yield dependant.call
    for each in dependant.dependencies:
        yield from _calls(each)
