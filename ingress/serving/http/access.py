"""The access log: one record of the logger `ingress.access` for each request.

Health checks and the other paths of the server itself, `/-/...`, have none.

    method, route, status     the route is the path template; a request without one has a `path`
    latency_ms                until the last message of the response was given to the server
    queue_ms                  the part of it in which the request waited for a slot of a replica
    request_id, client, application, deployment, replica

A filter of uvicorn's access log holds for these records: it is given the one of uvicorn's form.
While it is off, a request pays one look at `HTTPProxy.logs_requests`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any
from urllib.parse import quote

from starlette.types import Message, Receive, Scope, Send

from ingress.app.asgi.template import RouteTemplates, route_template
from ingress.core.base.counters import CLIENT_LEFT
from ingress.core.calls.call import Call
from ingress.core.calls.tracing import trace_id_of
from ingress.telemetry.logs import logger
from ingress.telemetry.logs.identity import printable
from ingress.telemetry.logs.options import ACCESS, LOGS

_logger = logging.getLogger(ACCESS)
_uvicorns = logging.getLogger("uvicorn.access")
_MESSAGE = "%s %s %s %.1fms"  # Ray 2.60.0, logging_utils.py
SWITCHED = 101
DENIED = 403  # the answer of servers to a WebSocket that is closed before it is accepted


class AccessLine:
    """One request, as its line in the access log tells of it. Its `send` for the proxy.

    Owned by the HTTP loop. `note_call` sets `call`, `scope` and `templates` once the request has a
    deployment: a reply that was not sent to its end has dropped its call when the line is logged.
    """

    __slots__ = (
        "__self__", "_began", "_outer", "_send", "_status", "call", "is_logged", "queued_at",
        "request_id", "scope", "templates",
    )  # fmt: skip

    def __init__(self, scope: Scope, send: Send) -> None:
        self.__self__ = getattr(send, "__self__", None)  # see `uvicorn_connection`
        self._outer = scope
        self._send = send
        self._began = monotonic()
        self._status = 0
        self.call: Call | None = None
        self.scope: Scope | None = None
        self.templates: RouteTemplates | None = None
        self.request_id = ""
        self.queued_at = 0.0  # when it asked for a slot, if it had a body to read before
        self.is_logged = False

    def __call__(self, message: Message) -> Awaitable[None]:
        """Send a message of the response, and note the status and the end."""
        if message["type"] == "http.response.body":
            if not message.get("more_body"):
                self.log()
        else:
            self.note(message)
        return self._send(message)

    def note(self, message: Message) -> None:
        """Note the status in a message that is no part of a body."""
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            self._status = message["status"]
            if self.call is None:  # refused
                self.request_id = _id_in(message)
        elif kind == "websocket.accept":
            self._status = SWITCHED
        elif kind == "websocket.close":
            is_open = self._status == SWITCHED
            self._status = message.get("code", 1000) if is_open else DENIED

    async def follow(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], receive: Receive
    ) -> None:
        """Have `app` serve the request, and log it, if its answer has not been logged."""
        try:
            await app(self._outer, receive, self)
        except Exception:
            self._status = self._status or 500  # the server's answer
            raise
        finally:
            self.log()

    def log(self) -> None:
        if self.is_logged:
            return
        self.is_logged = True
        call = self.call
        application = deployment = replica = route = model_id = trace_id = ""
        queue_ms = 0.0
        now = monotonic()
        if call is not None:
            metadata = call.metadata
            application, deployment = metadata.deployment.app_name, metadata.deployment.name
            route = self._route(call)
            if metadata.multiplexed_model_id:
                model_id = printable(metadata.multiplexed_model_id)
            self.request_id = metadata.request_id
            trace_id = trace_id_of(call)
            queued_at = self.queued_at or self._began
            queue_ms = max(0.0, (call.assigned_at or now) - queued_at) * 1e3
            if call.runner is not None:
                replica = call.runner.replica_id.unique_id
            # They would outlive the request in the server's timers.
            self.call = self.scope = self.templates = None
        if not LOGS.logs_access(application, deployment) or not _logger.isEnabledFor(logging.INFO):
            return
        if _uvicorns.filters and self._is_filtered_out():
            return
        latency_ms = (now - self._began) * 1e3
        method = self._outer.get("method", "WS")
        path = "" if route else printable(self._outer["path"])
        status = self._status or CLIENT_LEFT
        # Made here: `Logger.info` looks for its caller in the stack, which takes half of the time.
        record = logging.LogRecord(
            ACCESS, logging.INFO, __file__, 0, _MESSAGE,
            (printable(method), route or path, status, latency_ms), None,
        )  # fmt: skip
        fields: dict[str, Any] = record.__dict__
        fields["request_id"] = self.request_id
        fields["route"] = route
        fields["application"] = application
        fields["deployment"] = deployment
        fields["replica"] = replica
        fields["multiplexed_model_id"] = model_id
        fields["method"] = printable(method)
        fields["status"] = status
        fields["latency_ms"] = round(latency_ms, 3)
        fields["queue_ms"] = round(queue_ms, 3)
        fields["client"] = _client_of(self._outer)
        fields["serve_access_log"] = True
        if trace_id:
            fields["trace_id"] = trace_id
        if path:
            fields["path"] = path
        try:
            _logger.handle(record)
        except Exception:  # of a filter of the user's: the log is no part of the answer
            logger.warning("a filter or handler of '%s' has failed", ACCESS, exc_info=True)

    def _is_filtered_out(self) -> bool:
        """Return whether a filter of uvicorn's access log, such as of health checks, refuses it."""
        scope = self._outer
        if scope["type"] != "http":
            return False  # uvicorn writes no such record for a WebSocket
        query = scope["query_string"].decode("latin-1")
        path = quote(scope["path"]) + (query and f"?{query}")
        status = self._status or CLIENT_LEFT
        record = logging.LogRecord(
            _uvicorns.name, logging.INFO, __file__, 0, '%s - "%s %s HTTP/%s" %d',
            (_client_of(scope), scope["method"], path, scope["http_version"], status), None,
        )  # fmt: skip
        try:
            return not _uvicorns.filter(record)
        except Exception:
            logger.warning("a filter of '%s' has failed", _uvicorns.name, exc_info=True)
            return False

    def _route(self, call: Call) -> str:
        """Return the route, also of a request that no endpoint has seen; "" for none."""
        if self.scope is None or self.templates is None:
            return ""
        template = route_template(self.scope) or self.templates.find(self.scope)
        return call.metadata.route.rstrip("/") + template if template else ""


def note_call(send: Send, call: Call, templates: RouteTemplates) -> None:
    """Tell the access line of a request, if it has one, its call, or its next attempt's."""
    if isinstance(send, AccessLine):
        send.call, send.scope, send.templates = call, call.work.scope, templates


def leave_out(send: Send) -> None:
    """Give a request for the server itself, such as a health check, no line, as in Ray Serve."""
    if isinstance(send, AccessLine):
        send.is_logged = True


def _id_in(start: Message) -> str:
    for name, value in start.get("headers", ()):
        if name == b"x-request-id":
            return str(value, "latin-1")
    return ""


def _client_of(scope: Scope) -> str:
    client = scope.get("client")
    if not client:
        return ""
    host, port = client[0], client[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
