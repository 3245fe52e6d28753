"""The page of the admin listener, and the data that it asks for.

GET /                    the page: one file, which asks nothing of any other host
GET /api/events          the view, at most twice a second, as server-sent events
GET /api/series          the last 15 minutes of a deployment or route
GET /api/configuration   options with their origins, and what the flag would move
GET /api/lines           the last log lines of a replica, or of one request
GET /api/record          a recording of some seconds, for Perfetto
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from ingress.observe.live.observer import Observer
from ingress.observe.live.viewers import Viewers

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
