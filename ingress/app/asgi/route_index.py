"""An index of routes, which finds the route of a path without trying all routes before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from fastapi.routing import APIRoute, APIRouter
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ingress.app.asgi.compat import (
    TELEMETRY,
    get_route_path,
    is_included,
    is_original,
    keeps_candidates,
    why_not_compiled,
    with_candidates,
)
from ingress.app.asgi.routes import refuse_added
from ingress.core.base.foreign import copied

FOUND = "ingress.found"
"""The key of a scope for the app that was found before FastAPI's layers were entered."""

_MATCHES = (Route.matches, APIRoute.matches)
_OWN = frozenset(("matches", "handle"))
"""The methods of a route that it may have been given as attributes."""


class RouteList(list[BaseRoute]):
    """The routes of a clone, with a count of their changes.

    Two routes with the same path and function are equal, and may have other dependencies. A count
    is also faster than a comparison at each request.
    """

    __slots__ = ("changes",)

    def __init__(self, routes: Iterable[BaseRoute] = ()) -> None:
        super().__init__(routes)
        self.changes = 0


def _counted(name: str) -> Callable[..., Any]:
    change = getattr(list, name)

    @wraps(change)
    def changed(self: RouteList, *args: Any, **options: Any) -> Any:
        self.changes += 1
        return change(self, *args, **options)

    return changed


for _name in (
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
    "__delitem__", "__iadd__", "__imul__", "__setitem__",
):  # fmt: skip
    setattr(RouteList, _name, _counted(_name))


@dataclass(eq=False, slots=True)
class RouteIndex:
    """An index in front of a router's `app`. Owned by the user loop.

    A router tries its routes in turn, at 0.9 us each, and those of an included router at twice 2 us
    each. The index gives the request to a copy of the router, made once, that has, in order, only

        for the path of a route without parameters    the routes whose pattern matches that path
        for any other path                            routes with parameters and a matching prefix

    and every node with its own matching: mounts, routes with their own `matches`. The routes that
    are left out cannot match. There is one copy for each path of the first kind, and for each
    prefix before a parameter, so the number of copies does not depend on the clients' requests.

    If all of a copy's routes are FastAPI's own, the index also selects among them, as `Router.app`,
    `APIRoute.matches` and `APIRoute.handle` do together at 3 us a request. The copy still answers a
    request that none of them matches.

    Where no route is compiled there are no copies: FastAPI may match routes in another way.
    """

    router: Router
    _is_used: bool = field(default_factory=lambda: not why_not_compiled())
    _routes: list[BaseRoute] = field(default_factory=list)
    _list: Any = None
    _changes: int = 0
    _paths: set[str] = field(default_factory=set)
    _beginnings: set[str] = field(default_factory=set)
    _lengths: list[int] = field(default_factory=list)
    _narrowed: dict[tuple[str, bool], tuple[Router, Sequence[APIRoute]]] = field(
        default_factory=dict
    )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (scope.pop(FOUND, None) or self.find(scope))(scope, receive, send)

    def find(self, scope: Scope) -> ASGIApp:
        """Return the app that answers a request; if it is a route's, the scope has its match."""
        router = self.router
        routes = router.routes
        if routes is not self._list or routes.changes != self._changes:
            self._index()
        if not self._is_used or scope["type"] != "http":
            return router.app
        path = get_route_path(scope)
        key = (path, True) if path in self._paths else self._prefix(path)
        if key is None:
            return router.app
        scope.setdefault("router", router)
        router, own = self._narrowed.get(key) or self._narrow(*key)
        if scope.get(TELEMETRY) is not None:  # FastAPI's telemetry notes the selection
            return router.app
        for route in own:
            found = route.path_regex.match(path)
            if found is None or (route.methods and scope["method"] not in route.methods):
                continue
            if not _OWN.isdisjoint(vars(route)):  # since the last request
                return router.app
            params = dict(scope.get("path_params", ()))
            for name, text in found.groupdict().items():
                params[name] = route.param_convertors[name].convert(text)
            scope["path_params"] = params
            scope["endpoint"] = route.endpoint
            scope["route"] = route
            return route.app
        return router.app

    def _index(self) -> None:
        known = set(map(id, self._routes))
        if type(self.router.routes) is not RouteList:  # user code has made a list of its own
            self.router.routes = RouteList(self.router.routes)
        self._list = self.router.routes
        self._changes = self._list.changes
        self._routes = list(self._list)
        for route in self._routes if known else ():
            if id(route) not in known:
                refuse_added(route)
        self._narrowed = {}
        routes = list(_leaves(self._routes))
        self._paths = {route.path for route in routes if not route.param_convertors}
        self._beginnings = {_beginning(route) for route in routes if route.param_convertors}
        self._lengths = sorted({len(each) for each in self._beginnings}, reverse=True)

    def _prefix(self, path: str) -> tuple[str, bool] | None:
        """Return the longest known prefix of a path, and False; `None` if neither is known.

        A router without a match looks for the path with a slash more or less, to redirect.
        """
        # The `$` of a pattern matches before a newline, too.
        if path + "/" in self._paths or path.rstrip("/") in self._paths or path.endswith("\n"):
            return None
        slashed = path + "/"
        for length in self._lengths:
            if slashed[:length] in self._beginnings:
                return slashed[:length], False
        return "", False

    def _narrow(self, key: str, is_path: bool) -> tuple[Router, Sequence[APIRoute]]:
        """Return the router's copy for a key, and its routes if the index may select among them."""

        def may_match(route: Any) -> bool:
            if is_path:
                return bool(route.path_regex.match(key))
            return bool(route.param_convertors) and key.startswith(_beginning(route))

        narrowed = copied(self.router)
        narrowed.routes = routes = list(_narrowed(self._routes, may_match))
        own = routes if _selects_as_usual(narrowed) and all(map(_is_usual, routes)) else []
        self._narrowed[key, is_path] = narrowed, own
        return narrowed, own


def _selects_as_usual(router: Any) -> bool:
    """Return whether the router selects as FastAPI's does, with nothing to note in the scope."""
    return (
        type(router).app is APIRouter.app
        and is_original(APIRouter.app)
        and "app" not in vars(router)
        and not getattr(router, "form_limits", None)
    )


def _is_usual(route: Any) -> bool:
    """Return whether a route matches and handles requests as FastAPI's own, unpatched, do."""
    kind = type(route)
    return (
        isinstance(route, APIRoute)
        and kind.matches is APIRoute.matches
        and kind.handle is APIRoute.handle
        and all(map(is_original, (APIRoute.matches, APIRoute.handle, Route.matches, Route.handle)))
        and _OWN.isdisjoint(vars(route))
    )


def _narrowed(routes: Sequence[Any], may_match: Callable[[Any], bool]) -> Iterator[Any]:
    for route in routes:
        if _is_open(route):
            inner = list(_narrowed(route.effective_candidates(), may_match))
            if inner:
                yield with_candidates(route, inner)
        elif not _is_plain(route) or may_match(_effective(route)):
            yield route


def _leaves(routes: Sequence[Any]) -> Iterator[Any]:
    """Yield the routes, also of included routers, that match by their path alone."""
    for route in routes:
        if _is_open(route):
            yield from _leaves(route.effective_candidates())
        elif _is_plain(route):
            yield _effective(route)


def _is_open(route: Any) -> bool:
    """Return whether the route is an included router whose routes are known."""
    return is_included(route) and keeps_candidates(route)


def _is_plain(route: Any) -> bool:
    """Return whether a route matches by its path alone."""
    original = getattr(route, "original_route", route)
    if not isinstance(original, Route) or type(original).matches not in _MATCHES:
        return False
    route = _effective(route)
    pattern, text = route.path_regex, "^" + re.escape(_beginning(route))
    return (
        "matches" not in vars(original)
        and pattern.flags == re.UNICODE  # else it has been replaced, as for any case of letters
        and pattern.pattern.startswith(text if route.param_convertors else text + "$")
    )


def _effective(route: Any) -> Any:
    """Return the object that has the route's full path, with the prefix of its include."""
    return getattr(route, "starlette_route", None) or route


def _beginning(route: Any) -> str:
    """Return the prefix of all matching paths: the route's path up to its first parameter."""
    path: str = route.path
    return path.partition("{")[0]
