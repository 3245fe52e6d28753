"""The ASGI application that routes HTTP requests and WebSockets to deployments.

    path -> route (longest prefix) -> metadata -> Exchange -> Router -> ... -> response
    /-/healthz, /-/routes             answered here

Source of paths, texts and headers: Ray 2.60.0, proxy.py and proxy_router.py.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from ingress.asgi import ASGI
from ingress.asgi.responses import error_response, refusal, refusal_of, send_refusal
from ingress.base.types import RequestMetadata, new_request_id
from ingress.calls.call import CURRENT_CALL
from ingress.calls.deadlines import deadlines_of
from ingress.calls.retries import RetryBudget
from ingress.declaration.declaration import Application
from ingress.http import uvicorn_connection
from ingress.http.body import answer_and_close
from ingress.http.exchange import Exchange
from ingress.http.messages import (
    GOING_AWAY,
    NORMAL,
    SERVICE_RESTART,
    TRY_AGAIN_LATER,
    with_request_id,
)
from ingress.http.origin import is_local
from ingress.http.request_head import (
    REQUEST_ID_HEADER,
    read_head,
    request_id_of,
)
from ingress.http.retrying import Attempts, RequestLimits, client_deadline
from ingress.http.websocket import WebSocketExchange
from ingress.logs import log_failure, logger
from ingress.replicas.router import Router

HEALTHZ = "/-/healthz"
ROUTES = "/-/routes"

SWEEP_S = 0.025
STREAM_GRACE_S = 5.0  # for a stream to end, once its application is told to stop

_SOON = {"retry-after": "1"}  # while an application starts


@dataclass(frozen=True, slots=True)
class Route:
    """The route of one prefix, which is "/", or begins with "/" and does not end with it.

    `router` is `None` while the application starts.
    """

    prefix: str
    app_name: str
    router: Router | None


class RouteTable:
    """The routes, longest prefix first. Replaced as a whole, so any thread may read it.

    `starting` maps the prefixes of starting applications to their names.
    """

    __slots__ = ("_ordered", "is_ready", "routes")

    def __init__(
        self,
        routers: Mapping[str, Router] | None = None,
        starting: Mapping[str, str] | None = None,
    ) -> None:
        self.routes = {
            prefix: Route(prefix, name, None) for prefix, name in (starting or {}).items()
        }
        for prefix, router in (routers or {}).items():
            self.routes[prefix] = Route(prefix, router.deployment_id.app_name, router)
        self.is_ready = bool(routers)
        self._ordered = sorted(self.routes.values(), key=lambda route: -len(route.prefix))

    def match(self, path: str) -> Route | None:
        """Return the route of a path, where a slash or the end must follow the route's prefix."""
        for route in self._ordered:
            prefix = route.prefix
            if prefix == "/" or path == prefix or path.startswith(prefix + "/"):
                return route
        return None


class HTTPProxy:
    """An ASGI application. It runs on the loop that calls it, possibly on several at once."""

    __slots__ = (
        "_budget",
        "_in_flight",
        "_swept",
        "is_draining",
        "is_leaving",
        "limits",
        "table",
    )

    def __init__(self) -> None:
        self.table = RouteTable()
        self.limits = RequestLimits()
        self.is_leaving = False  # lame duck: it still serves, but its health check answers 503
        self.is_draining = False
        self._budget = RetryBudget()
        # Any HTTP loop adds to it and removes from it; `drain` reads it.
        self._in_flight: set[Exchange] = set()
        self._swept: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

    async def __call__(  # noqa: C901 - each call of a helper costs every request
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        path: str = scope["path"]
        root_path: str = scope.get("root_path", "")
        if root_path and (path + "/").startswith(root_path + "/"):
            path = path[len(root_path) :] or "/"
        if path.startswith("/-/") and scope["type"] == "http":
            response = self._builtin(path, scope)
            if response is not None:
                await response(scope, receive, _with_request_id(send, request_id_of(scope)))
                return
        route = self.table.match(path)
        if route is None or (router := route.router) is None or self.is_draining:
            await self._refuse(path, route, scope, receive, send)
            return

        limits = self.limits
        has_id, has_body, length, model_id, timeout_s = read_head(scope, limits.timeout_s)
        request_id = request_id_of(scope) if has_id else new_request_id()
        now = 0.0 if timeout_s is None else monotonic()
        deadline = None if timeout_s is None else now + timeout_s
        is_listed = limits.retried_methods and scope.get("method") in limits.retried_methods
        if is_listed:
            self._budget.deposit()
        if not has_body and scope["type"] == "http":
            refused = router.turns_away(deadline)
            if refused is not None:
                await send_refusal(refused, request_id, send)
                return
        metadata = RequestMetadata(
            request_id,
            router.deployment_id,
            route=route.prefix,
            multiplexed_model_id=model_id,
            is_http_request=True,
            deadline=deadline,
        )
        inner = _inner_scope(scope, request_id, has_id=has_id)
        if route.prefix != "/":
            inner["root_path"] = root_path + route.prefix
        attempts: Attempts | None = None
        if is_listed:
            last_deadline = client_deadline(inner, now)
            attempts = Attempts(
                inner,
                timeout_s=limits.timeout_s,
                budget=self._budget,
                last_deadline=last_deadline,
            )
            inner = attempts.scope()
        kind = Exchange if scope["type"] == "http" else WebSocketExchange
        exchange = kind(
            metadata,
            router,
            inner,
            receive,
            send,
            has_body=has_body,
            length=length,
            limits=limits.http,
        )
        exchange.attempts = attempts
        if has_body and exchange.body is not None and exchange.body.error is not None:
            send = _with_request_id(send, request_id)
            await answer_and_close(refusal(exchange.body.error), scope, receive, send)
            return
        if deadline is not None:
            exchange.started_at = now
        following: Exchange | None = exchange
        while following is not None:
            exchange, following = following, None
            self._in_flight.add(exchange)
            if exchange.loop not in self._swept:
                self._swept.add(exchange.loop)
                exchange.loop.call_later(SWEEP_S, self._sweep, exchange.loop)
            deadline = exchange.metadata.deadline
            if deadline is not None:
                deadlines_of(exchange.loop).add(exchange, deadline)
            try:
                await exchange.respond()
            except ClientDisconnect:
                pass
            except Exception as error:
                following = await exchange.again(error)
                if following is None and not await self._is_answered(
                    error, exchange, scope, receive, send
                ):
                    raise
            finally:
                self._in_flight.discard(exchange)
                if deadline is not None:
                    deadlines_of(exchange.loop).discard(exchange)

    async def _is_answered(
        self, error: Exception, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Answer for a request that failed. Returns False if the error must be raised.

        It is raised as by Starlette, for an application that wraps this one. A server would only
        log it, and close a connection that other requests may use.
        """
        if exchange.started:
            is_answered = await self._cut(error, exchange, receive)
        else:
            send = _with_request_id(send, exchange.metadata.request_id)
            is_answered = await send_error(error, exchange, scope, receive, send)
        return is_answered or await _is_logged(error, exchange, receive)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make the exchanges that are older than a sweep watch for their client's disconnect.

        Most requests end before their first sweep, and cost no task and no timer for this.
        """
        now = monotonic()
        before = now - SWEEP_S
        mine = [exchange for exchange in list(self._in_flight) if exchange.loop is loop]
        for exchange in mine:
            if exchange.started_at <= before:
                exchange.watch(now)
        if mine:
            loop.call_later(SWEEP_S, self._sweep, loop)
        else:
            self._swept.discard(loop)

    async def _cut(self, error: Exception, exchange: Exchange, receive: Receive) -> bool:
        """Cut a response that has begun. Returns False if the error must be logged or raised."""
        if not (
            exchange.is_http
            and exchange.was_ended_by(error)
            and await uvicorn_connection.cut(receive)
        ):
            return False
        token = CURRENT_CALL.set(exchange)  # for the log record
        logger.warning(
            "request %s to %s was cut: %s",
            exchange.metadata.request_id,
            exchange.current_route(),
            error,
        )
        CURRENT_CALL.reset(token)
        return True

    async def drain(self, router: Router, timeout_s: float, *, is_replaced: bool = False) -> None:
        """Wait for an application's requests, and cancel the rest at the timeout. On any loop.

        A stream may never end by itself: its user code is told that the client is gone, and is
        cancelled after `STREAM_GRACE_S`. `is_replaced` selects the close code of WebSockets.
        """
        code = SERVICE_RESTART if is_replaced else GOING_AWAY
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        grace = loop.time() + min(STREAM_GRACE_S, timeout_s)
        while in_flight := [each for each in list(self._in_flight) if each.router is router]:
            now = loop.time()
            for exchange in in_flight:
                if now >= deadline or (now >= grace and exchange.is_stream):
                    exchange.stop()
                elif exchange.is_stream:
                    exchange.disconnect(code)
            if now >= deadline:
                return
            await asyncio.sleep(0.01)

    def _builtin(self, path: str, scope: Scope) -> Response | None:
        if path == HEALTHZ:
            if self.is_leaving or self.is_draining:
                return PlainTextResponse("This node is being drained.", 503)
            if self.table.is_ready:
                return PlainTextResponse("success")
            if self.table.routes:
                return PlainTextResponse("starting", 503, _SOON)
            return PlainTextResponse("Route table is not populated yet.", 503)
        if path == ROUTES and is_local(scope):
            apps = {
                prefix: route.app_name
                for prefix, route in self.table.routes.items()
                if route.router is not None
            }
            return Response(json.dumps(apps), media_type="application/json")
        return None

    async def _refuse(
        self, path: str, route: Route | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Refuse a request: no route, the application is starting, or the server is draining."""
        is_denied = scope["type"] == "websocket"
        if self.is_draining:
            code, status, headers = GOING_AWAY, 503, {"connection": "close"}
            text = "This node is being drained."
        elif route is not None:
            code, status, headers = TRY_AGAIN_LATER, 503, _SOON
            text = f"Application '{route.app_name}' is starting."
            # A server answers `websocket.close` with 403, which no client tries again.
            is_denied = is_denied and "websocket.http.response" not in scope.get("extensions", {})
        else:
            code, status, headers = NORMAL, 404, {}
            text = f"Path '{path}' not found. Ping http://.../-/routes for available routes."
        if is_denied:
            await send({"type": "websocket.close", "code": code, "reason": text[:100]})
            return
        response = PlainTextResponse(text, status, headers)
        await response(scope, receive, _with_request_id(send, request_id_of(scope)))


async def _is_logged(error: Exception, exchange: Exchange, receive: Receive) -> bool:
    """Log an error that only the server would see, and cut a response that has begun.

    Returns False if uvicorn does not call this application directly: the error must be raised.
    """
    if not isinstance(uvicorn_connection.called_app(receive), HTTPProxy | Application):
        return False
    log_failure(exchange, error)
    if not uvicorn_connection.is_answer_complete(receive):
        await uvicorn_connection.cut(receive)
    return True


async def send_error(
    error: Exception, exchange: Exchange, scope: Scope, receive: Receive, send: Send
) -> bool:
    """Tell the client that its request failed. Returns False if the error must be logged too."""
    if not exchange.is_http:
        reason = refusal_of(error)
        if reason is not None:
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})
        return reason is not None
    response = error_response(error)
    if exchange.body is not None and exchange.body.is_open:
        await answer_and_close(response, scope, receive, send)
    else:
        await response(scope, receive, send)
    return response.status_code != 500


def _inner_scope(scope: Scope, request_id: str, *, has_id: bool) -> Scope:
    """Return the scope that user code gets: with the request's id, and without a mounting app."""
    headers = scope["headers"]
    if has_id:
        headers = [pair for pair in headers if pair[0] != REQUEST_ID_HEADER]
    headers = [*headers, (REQUEST_ID_HEADER, request_id.encode())]
    inner = {**scope, "asgi": ASGI, "headers": headers}
    if "router" in inner:  # of an app that mounts this one; links need the app's own router
        del inner["router"]
        inner.pop("app_root_path", None)
    return inner


def _with_request_id(send: Send, request_id: str) -> Send:
    async def send_with_request_id(message: Message) -> None:
        if message["type"].endswith("http.response.start"):  # also that of a refused WebSocket
            message = with_request_id(message, request_id)
        await send(message)

    return send_with_request_id
