"""The ASGI application that routes HTTP requests and WebSockets to deployments.

    path -> route (longest prefix) -> metadata -> Reply -> `InFlight.serve` -> response
    /-/healthz                        Ray's health check, for load balancers
    /-/livez, /-/readyz               for supervisors: this loop turns; requests can be served
    /-/routes                         the running applications, for local clients

Source of paths, texts and headers: Ray 2.60.0, proxy.py and proxy_router.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ingress.app.asgi.cors import allowing_origin, has_origin
from ingress.app.asgi.messages import (
    GOING_AWAY,
    NORMAL,
    TRY_AGAIN_LATER,
    adding_request_id,
)
from ingress.app.asgi.replica_app import ASGI
from ingress.app.asgi.responses import refusal, send_refusal
from ingress.app.declaration.declaration import Application
from ingress.core.base.counters import HTTPCounts
from ingress.core.base.types import RequestMetadata
from ingress.core.calls.call import NO_WORK, Call
from ingress.core.calls.retries import RetryBudget
from ingress.exceptions import RayServeException
from ingress.serving.http.access import AccessLine, leave_out, note_call
from ingress.serving.http.in_flight import InFlight
from ingress.serving.http.reply import Reply
from ingress.serving.http.request_head import (
    body_of,
    is_local,
    read_head,
    request_id_of,
)
from ingress.serving.http.retrying import Attempts, RequestLimits, client_deadline
from ingress.serving.http.uvicorn_connection import close_header, has_no_body, target_of
from ingress.serving.http.websocket import WebSocketReply
from ingress.serving.replicas.router import Router
from ingress.telemetry.logs import log_failure
from ingress.telemetry.logs.options import LOGS

HEALTHZ = "/-/healthz"
LIVEZ = "/-/livez"
READYZ = "/-/readyz"
ROUTES = "/-/routes"

_SOON = {"retry-after": "1"}  # while an application starts


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one prefix, which is "/", or begins with "/" and does not end with it.

    `router` is `None` while the application starts, and after its start failed; then `app` is the
    user's.
    """

    prefix: str
    app_name: str
    router: Router | None
    app: Any = None
    has_failed: bool = False


class Unserved(Protocol):
    """An application that has a prefix and does not serve."""

    @property
    def name(self) -> str: ...

    @property
    def app(self) -> Any: ...


class RouteTable:
    """The routes, longest prefix first. Replaced as a whole, so any thread may read it.

    `starting` has the starting applications by prefix, `failed` those whose start failed.
    """

    __slots__ = ("_ordered", "is_ready", "is_starting", "routes")

    def __init__(
        self,
        routers: Mapping[str, Router] | None = None,
        starting: Mapping[str, Unserved] | None = None,
        failed: Mapping[str, Unserved] | None = None,
    ) -> None:
        self.routes = {
            prefix: Route(prefix, each.name, None, each.app, has_failed=True)
            for prefix, each in (failed or {}).items()
        }
        for prefix, each in (starting or {}).items():
            self.routes[prefix] = Route(prefix, each.name, None, each.app)
        for prefix, router in (routers or {}).items():
            self.routes[prefix] = Route(prefix, router.deployment_id.app_name, router)
        self.is_ready = bool(routers)
        self.is_starting = bool(starting)
        self._ordered = sorted(self.routes.values(), key=lambda route: -len(route.prefix))

    def match(self, path: str) -> Route | None:
        """Return the route of a path, where a slash or the end must follow the route's prefix."""
        for route in self._ordered:
            prefix = route.prefix
            if prefix == "/" or path == prefix or path.startswith(prefix + "/"):
                return route
        return None


def _allowing_origin(route: Route | None, scope: Scope, response: Response) -> Response:
    if route is None:
        return response
    app = route.app if route.router is None else route.router.app
    return allowing_origin(app, route.prefix, scope, response)


def _with_key(
    metadata: RequestMetadata, key_of: Callable[[Scope], str], scope: Scope
) -> tuple[RequestMetadata, RayServeException | None]:
    """Return the metadata with the request's fairness key, and the error if user code fails."""
    try:
        return metadata._replace(fairness_key=key_of(scope)), None
    except Exception as error:
        if scope["type"] != "http":
            raise  # the server refuses the WebSocket, and logs it
        log_failure(Call(metadata, NO_WORK, copy_context()), error)
        return metadata, RayServeException("Internal Server Error")


def _turn_away(
    refused: RayServeException,
    router: Router,
    metadata: RequestMetadata,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> Coroutine[Any, Any, None]:
    """Count a request that gets no place in the queue; return the coroutine that answers it."""
    prefix, status, response = metadata.route, refused.status_code, None
    if has_origin(scope):
        response = allowing_origin(router.app, prefix, scope, refusal(refused))
        status = response.status_code
    root_path = scope.get("root_path", "") + prefix.rstrip("/")
    label = router.templates.label({"path": scope["path"], "root_path": root_path}, prefix)
    router.http.of(get_ident(), label, scope["method"], status).add(0.0)
    if response is None:
        return send_refusal(refused, metadata.request_id, send)
    return response(scope, receive, adding_request_id(send, metadata.request_id))


@dataclass(frozen=True, slots=True)
class Condition:
    """The deployments of an application that are unhealthy or not ready, each "" for none.

    The text is for any client: names and states, and nothing that user code has said.
    """

    unhealthy: str = ""
    not_ready: str = ""


class ProxyApp:
    """An ASGI app of ingress that a server calls in the place of its proxy."""

    __slots__ = ()

    @property
    def proxy(self) -> HTTPProxy:
        raise NotImplementedError


def proxy_behind(app: Any) -> HTTPProxy | None:
    """Return the proxy that an app is, or has if it is one of ingress's own, else `None`."""
    if isinstance(app, ProxyApp):
        return app.proxy
    return app if type(app) is HTTPProxy else None


class HTTPProxy:
    """An ASGI application. It runs on the loop that calls it, possibly on several at once."""

    __slots__ = (
        "_budget",
        "conditions",
        "in_flight",
        "is_draining",
        "is_leaving",
        "limits",
        "logs_requests",
        "table",
        "unrouted",
    )

    def __init__(self) -> None:
        self.table = RouteTable()
        # By application that runs. The control loop adds and removes them, one step each.
        self.conditions: dict[str, Callable[[], Condition]] = {}
        self.limits = RequestLimits()
        self.is_leaving = False  # lame duck: it still serves, but its health check answers 503
        self.is_draining = False
        self.logs_requests = LOGS.is_logged
        self._budget = RetryBudget()
        self.unrouted = HTTPCounts()  # without an application that serves them
        self.in_flight = InFlight(HTTPProxy, ProxyApp, Application, watches=True)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Return the coroutine that answers a request. It is not `async`: that takes 0.15 us."""
        if self.logs_requests and type(send) is not AccessLine:
            return AccessLine(scope, send).follow(self, receive)
        made = self.accept(scope, receive, send)
        return self.in_flight.serve(made, scope, receive, send) if isinstance(made, Reply) else made

    def accept(
        self, scope: Scope, receive: Receive, send: Send
    ) -> Reply | Coroutine[Any, Any, None]:
        """Return the reply to a request, or the coroutine that answers it without one."""
        path: str = scope["path"]
        root_path: str = scope.get("root_path", "")
        if root_path and (path + "/").startswith(root_path + "/"):
            path = path[len(root_path) :] or "/"
        if path.startswith("/-/") and scope["type"] == "http":
            response = self._builtin(path, scope, receive)
            if response is not None:
                leave_out(send)
                return response(scope, receive, adding_request_id(send, request_id_of(scope)))
        route = self.table.match(path)
        if route is None or (router := route.router) is None or self.is_draining:
            return self._refuse(path, route, scope, receive, send)

        limits, prefix = self.limits, route.prefix
        metadata, headers, now = read_head(
            scope, router.deployment_id, prefix, limits.timeout_s, limits.headers
        )
        refused: RayServeException | None = None
        if (key_of := router.key_of) is not None:
            metadata, refused = _with_key(metadata, key_of, scope)
        is_listed = limits.retried_methods and scope.get("method") in limits.retried_methods
        if is_listed:
            self._budget.deposit()
        is_bodiless = has_no_body(receive)
        if is_bodiless and not router.available and scope["type"] == "http" and refused is None:
            refused = router.turns_away(metadata.deadline, metadata.fairness_key)
        if refused is not None:
            return _turn_away(refused, router, metadata, scope, receive, send)
        # What user code gets: with the request's id, and without a mounting app.
        inner: Scope = {**scope, "asgi": ASGI, "headers": headers}
        if "router" in inner:  # of an app that mounts this one; links need the app's own router
            del inner["router"]
            inner.pop("app_root_path", None)
        if prefix != "/":
            inner["root_path"] = root_path + prefix
        attempts: Attempts | None = None
        if is_listed:
            last_deadline = client_deadline(inner, now)
            attempts = Attempts(inner, limits.timeout_s, self._budget, last_deadline)
            inner = attempts.scope()
        args = metadata, router, inner, receive, send
        reply: Reply
        if scope["type"] == "http":
            has_body, waits = (
                (False, False)
                if is_bodiless
                else body_of(inner, receive, router.templates, limits.http.body_buffer_bytes)
            )
            reply = Reply(*args, has_body=has_body, reads_ahead=not waits, limits=limits.http)
        else:
            reply = WebSocketReply(*args)
        reply.attempts = attempts
        if self.logs_requests:
            note_call(send, reply.call, router.templates)
        if now:
            reply.call.started_at = now
        return reply

    def allowing_origin(self, scope: Scope, response: Response) -> Response:
        """Return a refusal with the headers for CORS of the application that the path names."""
        path, root_path = scope["path"], scope.get("root_path", "")
        if root_path and (path + "/").startswith(root_path + "/"):
            path = path[len(root_path) :] or "/"
        return _allowing_origin(self.table.match(path), scope, response)

    def _builtin(self, path: str, scope: Scope, receive: Receive) -> Response | None:
        if path == HEALTHZ:
            return self._healthz()
        if path == LIVEZ:
            return PlainTextResponse("alive")
        if path == READYZ:
            return self._readyz()
        if path == ROUTES and is_local(scope, target_of(receive)):
            if scope["method"] not in ("GET", "HEAD"):
                return PlainTextResponse("Method Not Allowed", 405, {"allow": "GET, HEAD"})
            apps = {
                prefix: route.app_name
                for prefix, route in self.table.routes.items()
                if route.router is not None
            }
            return Response(json.dumps(apps), media_type="application/json")
        return None

    def _healthz(self) -> Response:
        if self.is_leaving or self.is_draining:
            return PlainTextResponse("This node is being drained.", 503)
        if self.table.is_ready:
            unhealthy = [each().unhealthy for each in list(self.conditions.values())]
            text = "; ".join(filter(None, unhealthy))
            return PlainTextResponse(text or "success", 503 if text else 200)
        if self.table.is_starting:
            return PlainTextResponse("starting", 503, _SOON)
        if self.table.routes:
            return PlainTextResponse("failed to deploy", 503)
        return PlainTextResponse("Route table is not populated yet.", 503)

    def _readyz(self) -> Response:
        """Answer whether every application can serve its requests, and which cannot."""
        if self.is_leaving or self.is_draining:
            return PlainTextResponse("This node is being drained.", 503)
        reasons = []
        for route in self.table.routes.values():
            if route.router is None:
                state = "failed to deploy" if route.has_failed else "is starting"
                reasons.append(f"Application '{route.app_name}' {state}.")
        for each in list(self.conditions.values()):
            condition = each()
            reasons.append(condition.unhealthy or condition.not_ready)
        if text := "; ".join(filter(None, reasons)):
            return PlainTextResponse(text, 503, _SOON)
        if not self.conditions:
            return PlainTextResponse("No application runs.", 503, _SOON)
        return PlainTextResponse("ready")

    async def _refuse(
        self, path: str, route: Route | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Refuse a request: no route, an application that starts or failed, or a drain."""
        is_denied = scope["type"] == "websocket"
        if self.is_draining:
            code, status, headers = GOING_AWAY, 503, close_header(receive)
            text = "This node is being drained."
        elif route is not None:
            code, status, headers = TRY_AGAIN_LATER, 503, {} if route.has_failed else _SOON
            text = f"Application '{route.app_name}' is starting."
            if route.has_failed:
                text = f"Application '{route.app_name}' is unavailable because it failed to deploy."
            # A server answers `websocket.close` with 403, which no client tries again.
            is_denied = is_denied and "websocket.http.response" not in scope.get("extensions", {})
        else:
            code, status, headers = NORMAL, 404, {}
            text = f"Path '{path}' not found. Ping http://.../-/routes for available routes."
        method, prefix = scope.get("method", "WS"), "" if route is None else route.prefix
        response: Response = PlainTextResponse(text, status, headers)
        response = _allowing_origin(route, scope, response)
        self.unrouted.of(get_ident(), prefix, method, response.status_code).add(0.0)
        if is_denied:
            await send({"type": "websocket.close", "code": code, "reason": text[:100]})
            return
        await response(scope, receive, adding_request_id(send, request_id_of(scope)))
