"""The admin listener: a small server in a thread and on a loop of its own.

    GET /metrics         Prometheus' text format, or OpenMetrics
    GET /api/snapshot    the snapshot as JSON

A route is added to `routes`. The guard answers 403 for a wrong Host or Origin, 401 without the
token, 429 to an address that has sent too many wrong ones, and 405 for a method that could change
something, before any route is looked up.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from pydantic import TypeAdapter
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.core.base.settings import HTTPLimits
from ingress.core.calls.loops import EventLoopThread, run_blocking, start_on
from ingress.observe.admin.exposition import OPEN_METRICS, TEXT, RouteLimit, exposition
from ingress.serving.http.address import url_of
from ingress.serving.http.admin_address import AdminOptions, is_loopback
from ingress.state.server import Snapshot

if TYPE_CHECKING:
    from ingress.serving.http.uvicorn_server import HostedServer

FRESH_S = 0.2

_JSON = TypeAdapter(Snapshot)


@dataclass(eq=False, slots=True)
class Source:
    """The latest snapshot. Thread-safe: `make` makes it, in one thread at a time.

    A snapshot that is younger than `FRESH_S` serves all that ask meanwhile, so that any number of
    viewers costs the server as much as one.
    """

    _make: Callable[[], Snapshot]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _latest: Snapshot | None = None
    _json: bytes | None = None
    _made_at: float = 0.0

    def latest(self) -> Snapshot:
        """Return a snapshot that is at most `FRESH_S` old. It blocks; do not change it."""
        with self._lock:
            return self._fresh()

    def latest_json(self) -> bytes:
        """Return the snapshot as JSON, in UTF-8. It blocks."""
        with self._lock:
            latest = self._fresh()
            if self._json is None:
                self._json = as_json(latest)
            return self._json

    def _fresh(self) -> Snapshot:
        # Waiting for the lock is waiting for the snapshot that another viewer asks for.
        if self._latest is None or monotonic() - self._made_at > FRESH_S:
            self._latest, self._json = self._make(), None
            self._made_at = monotonic()
        return self._latest


def as_json(snapshot: Snapshot) -> bytes:
    """Return a snapshot as JSON, in UTF-8."""
    try:
        return _JSON.dump_json(snapshot)
    except ValueError:  # a text of user code or of a client has half a surrogate pair
        text = json.dumps(_JSON.dump_python(snapshot), ensure_ascii=False)
        return to_json(json.loads(text.encode(errors="replace")))  # an infinity becomes null


MOST_WRONG = 10  # tokens of one address in a period
PERIOD_S = 60.0
MOST_ADDRESSES = 10_000  # that are remembered

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def routes(source: Source, most_routes: int | None = None) -> Sequence[BaseRoute]:
    """Return the routes. Endpoints that block are `def`: they run in threads of the listener."""
    limit = RouteLimit(most_routes)

    def metrics(request: Request) -> Response:
        is_open = "application/openmetrics-text" in request.headers.get("accept", "")
        text = exposition(limit.limited(source.latest()), is_open_metrics=is_open)
        return Response(text, media_type=OPEN_METRICS if is_open else TEXT)

    def snapshot(request: Request) -> Response:
        return Response(source.latest_json(), media_type="application/json")

    return [Route("/metrics", metrics), Route("/api/snapshot", snapshot)]


@dataclass(eq=False, slots=True)
class WrongTokens:
    """The addresses that have sent wrong tokens lately. Used by the listener's loop only.

    An address with `MOST_WRONG` of them has to wait for the end of its period, also with the right
    one: it could be a guess.
    """

    # The end of the period, and the number in it; the oldest first.
    _periods: dict[str, tuple[float, int]] = field(default_factory=dict)

    def wait_s(self, address: str) -> float:
        """Return the time for which this address gets no answer; 0 for one that gets it."""
        end, number = self._periods.get(address, (0.0, 0))
        return max(0.0, end - monotonic()) if number >= MOST_WRONG else 0.0

    def note(self, address: str) -> None:
        now = monotonic()
        end, number = self._periods.get(address, (0.0, 0))
        if end <= now:
            self._periods.pop(address, None)
            end, number = now + PERIOD_S, 0
        self._periods[address] = end, number + 1
        if len(self._periods) > MOST_ADDRESSES:
            del self._periods[next(iter(self._periods))]


class AccessGuard:
    """The guard of the admin listener: it refuses clients, and adds the security headers.

    A page of another site reaches 127.0.0.1 through its reader's browser, with that site's name as
    Host or Origin. A listener that other machines reach has a token, which no browser adds by
    itself: its Host may be any name.
    """

    __slots__ = ("_app", "_checks_host", "_token", "_wrong")

    def __init__(self, app: ASGIApp, options: AdminOptions) -> None:
        self._app = app
        self._token = options.token
        self._wrong = WrongTokens()
        self._checks_host = options.path is None and is_loopback(options.host_and_port[0])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no WebSockets here: the server answers 403 or 500

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app: ASGIApp = self._refusal(scope) or self._app
        await app(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._checks_host and not is_loopback(_name_of(f"//{host}")):
            return PlainTextResponse("This Host is not allowed here; use 127.0.0.1.", 403)
        if (origin := headers.get("origin")) is not None and _place_of(origin) != host:
            return PlainTextResponse("Requests from other sites are not allowed.", 403)
        # The page itself has no data: it asks its reader for the token, and sends it.
        token = None if scope["path"] == "/" else self._token
        if token is not None and (refusal := self._refusal_of_token(scope, headers, token)):
            return refusal
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("The admin listener is read only.", 405, {"allow": "GET"})
        return None

    def _refusal_of_token(self, scope: Scope, headers: Headers, token: str) -> Response | None:
        address = (scope.get("client") or ("",))[0]
        if (wait_s := self._wrong.wait_s(address)) and "authorization" in headers:
            return PlainTextResponse(
                "This address has sent too many wrong tokens.",
                429,
                {"retry-after": str(ceil(wait_s))},
            )
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_same = secrets.compare_digest(given.strip().encode(), token.encode())
        if scheme.lower() == "bearer" and is_same:
            return None
        if "authorization" in headers:
            self._wrong.note(address)
        return PlainTextResponse(
            "A token is required: Authorization: Bearer TOKEN.",
            401,
            {"www-authenticate": "Bearer"},
        )


def _place_of(url: str) -> str | None:
    """Return the host and the port of an Origin; `None` if it is no URL."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return None


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


# Of the listener; viewers that are more get 503, and the rest is served.
LIMITS = HTTPLimits(limit_connections=1024, header_timeout_s=10.0, body_buffer_bytes=1024)
STOP_S = 0.5
JOIN_S = 1.0


class AdminListener:
    """A listener that serves the snapshots that `make` makes, until `stop`.

    Raises `RuntimeError` if its address is busy. `url` is its URL, or `unix:PATH`. It answers in
    the loop `ingress-admin`, and makes snapshots in worker threads of that loop.
    """

    __slots__ = (
        "_address",
        "_home",
        "_is_stopped",
        "_server",
        "_serving",
        "_socket",
        "options",
        "url",
    )

    def __init__(
        self,
        make: Callable[[], Snapshot],
        options: AdminOptions,
        more: Sequence[BaseRoute] = (),
    ) -> None:
        self.options = options
        self._is_stopped = False
        self._address, self._socket = options.listen()
        self.url = url_of(self._socket, is_tls=False)
        self._home = EventLoopThread("ingress-admin")
        self._server = _uvicorn(Source(make), options, more)
        self._serving = start_on(self._home.loop, self._server.serve(sockets=[self._socket]))

    def stop(self) -> None:
        """Close the connections and end the thread, within two seconds. Once is enough."""
        if self._is_stopped:
            return
        self._is_stopped = True
        run_blocking(self._home.loop, self._end())
        self._socket.close()
        self._address.clean_up()
        self._home.stop(JOIN_S)

    async def _end(self) -> None:
        """Wait for the answers that are on their way, and no longer for streams."""
        self._server.stop()
        serving = asyncio.wrap_future(self._serving)
        done, _ = await asyncio.wait([serving], timeout=STOP_S)
        if not done:
            self._server.force_exit = True
            await asyncio.wait([serving], timeout=STOP_S)


def _uvicorn(source: Source, options: AdminOptions, more: Sequence[BaseRoute]) -> HostedServer:
    import uvicorn

    from ingress.serving.http.connections import Connections  # imports uvicorn
    from ingress.serving.http.uvicorn_server import HostedServer

    class Unlogged(Connections):
        def __call__(self, **given: Any) -> asyncio.Protocol:
            protocol: Any = super().__call__(**given)
            protocol.access_log = False
            return cast("asyncio.Protocol", protocol)

    return HostedServer(
        # No log option: `Config` sets the loggers of the whole process, which has other servers.
        uvicorn.Config(
            AccessGuard(
                Starlette(routes=[*routes(source, options.metrics_routes), *more]), options
            ),
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,  # Prometheus asks every 15 to 60 s
            **Unlogged(LIMITS).options(),
        )
    )
