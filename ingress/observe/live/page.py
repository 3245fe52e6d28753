"""The page of the admin listener, and the data that it asks for.

GET /                    the page: one file, which asks nothing of any other host
GET /api/events          the view, at most twice a second, as server-sent events
GET /api/series          the last 15 minutes of a deployment or route
GET /api/configuration   options with their origins, and what the flag would move
GET /api/lines           the last log lines of a replica, or of one request
GET /api/record          a recording of some seconds, for Perfetto

A view is made while there is a viewer, at most twice a second. A viewer that reads slowly gets the
latest view when it is ready for one, and delays no other. Making a view costs the server; the pause
after it grows with this cost, which is at most `SHARE` of a core, as long as it may be.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic, thread_time

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from ingress.observe.live.observer import Observer
from ingress.observe.live.view import View
from ingress.serving.http import uvicorn_connection

logger = logging.getLogger("ingress")

PAUSE_S = 0.5
LONGEST_S = 2.0
SHARE = 0.003
MOST = 100
SEND_S = 20.0  # for a viewer that does not read

MOST_RECORD_S = 60.0
REPLICA = ("process", "application", "deployment", "replica")
MISSING = "ingress-missing"
"""The header that names the processes which are missing in a recording."""


def routes(observer: Observer) -> Sequence[BaseRoute]:
    """Return the routes of the page. Those that block are `def`: they run in threads."""
    viewers = Viewers(observer.view)

    def page(request: Request) -> Response:
        text, policy = _page()
        headers = {"content-security-policy": policy}
        return Response(text, headers=headers, media_type="text/html; charset=utf-8")

    async def events(request: Request) -> Response:
        return await viewers.response()

    def series(request: Request) -> Response:
        given = request.query_params
        name = given.get("application", ""), given.get("deployment", ""), given.get("route", "")
        return _json(observer.series(*name))

    def configuration(request: Request) -> Response:
        return _json(observer.configuration())

    def lines(request: Request) -> Response:
        process, *names = (request.query_params.get(name, "") for name in REPLICA)
        if not process.isdecimal():
            return PlainTextResponse("process must be the id of a process of the server.", 400)
        wanted = request.query_params.get("request_id", "")
        return _json(observer.lines(int(process), names[0], names[1], names[2], wanted))

    def record(request: Request) -> Response:
        try:
            seconds = float(request.query_params.get("seconds", "10"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= MOST_RECORD_S:
            return PlainTextResponse(f"seconds must be a number up to {MOST_RECORD_S:g}.", 400)
        try:
            recording, missing = observer.record(seconds)
        except TimeoutError as error:
            return PlainTextResponse(f"There is no recording, because {error}.", 504)
        if recording is None:
            return PlainTextResponse("A recording is made already; try again later.", 409)
        headers = {MISSING: ascii(", ".join(missing))[1:-1]} if missing else None
        return Response(recording, headers=headers, media_type="application/json")

    return [
        Route("/", page),
        Route("/api/events", events),
        Route("/api/series", series),
        Route("/api/configuration", configuration),
        Route("/api/lines", lines),
        Route("/api/record", record),
    ]


def _json(value: object) -> Response:
    """Return JSON in ASCII, which may have half a surrogate pair, as a route's template may."""
    return Response(json.dumps(value), media_type="application/json")


@lru_cache(1)
def _page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy: no code and no style but the page's own."""
    text = Path(__file__).with_name("page.html").read_bytes()
    hashes = {
        tag: " ".join(
            f"'sha256-{b64encode(hashlib.sha256(found).digest()).decode()}'"
            for found in re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), text, re.DOTALL)
        )
        for tag in (b"script", b"style")
    }
    return text, (
        f"default-src 'none'; script-src {hashes[b'script']}; style-src {hashes[b'style']}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


@dataclass(eq=False, slots=True)
class Viewers:
    """The viewers of one server. Owned by the loop of the admin listener."""

    _look: Callable[[], View]
    count: int = 0
    _task: asyncio.Task[None] | None = None
    _latest: bytes = b""
    _number: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # of the next view

    async def response(self) -> Response:
        """Return the stream for one more viewer, or a refusal."""
        if self.count >= MOST:
            text = f"{MOST} viewers are connected already; close one, or try again."
            return PlainTextResponse(text, 503, {"retry-after": "5"})
        return _ViewerStream(self)

    def join(self) -> None:
        """Count a viewer; with the first one the views begin."""
        self.count += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._make_views())

    def leave(self) -> None:
        """Count a viewer less; with the last one the views end."""
        self.count -= 1
        if not self.count and self._task is not None:
            self._task.cancel()
            self._task, self._latest = None, b""

    async def _make_views(self) -> None:
        while True:
            begin = monotonic()
            try:
                self._latest, cost_s = await asyncio.to_thread(self._made)
            except Exception as error:  # the server starts or stops
                logger.debug("a view of the server cannot be made", exc_info=True)
                self._latest, cost_s = _event({"error": f"{type(error).__name__}: {error}"}), 0.0
            self._number += 1
            self._news.set()
            self._news = asyncio.Event()
            pause_s = min(LONGEST_S, max(PAUSE_S, cost_s / SHARE))
            await asyncio.sleep(max(0.0, begin + pause_s - monotonic()))

    def _made(self) -> tuple[bytes, float]:
        """Return a view as an event, and the processor time that it took."""
        begin = thread_time()
        return _event(self._look()), thread_time() - begin

    async def next(self, seen: int) -> tuple[int, bytes]:
        """Return the number and the event of a view that is later than the one `seen`."""
        while self._number <= seen or not self._latest:
            await self._news.wait()
        return self._number, self._latest


class _ViewerStream(Response):
    """The stream of one viewer."""

    media_type = "text/event-stream"

    def __init__(self, viewers: Viewers) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._viewers = viewers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        viewers = self._viewers
        viewers.join()
        sending = asyncio.ensure_future(self._send_views(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not leaving.done():
                await uvicorn_connection.cut(receive)  # it does not read
        except asyncio.CancelledError:
            # The listener's loop ends, with all of its tasks. uvicorn would log this as an error of
            # the app, and an answer without an end too, unless the connection is closed.
            await uvicorn_connection.cut(receive)
        finally:
            viewers.leave()
            for each in (sending, leaving):
                each.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_views(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        seen = 0
        while True:
            seen, event = await self._viewers.next(seen)
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": event, "more_body": True})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: Mapping[str, object]) -> bytes:
    """Return a server-sent event. JSON has no line break."""
    return b"data: %b\n\n" % json.dumps(value, separators=(",", ":")).encode()
