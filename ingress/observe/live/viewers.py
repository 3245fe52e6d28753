"""The viewers of the page: one stream of server-sent events for each, of views that all share.

A view is made while there is a viewer, at most twice a second. A viewer that reads slowly gets the
latest view when it is ready for one, and delays no other. Making a view costs the server; the pause
after it grows with this cost, which is at most `SHARE` of a core, as long as it may be.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from time import monotonic, thread_time

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ingress.observe.live.view import View
from ingress.serving.http import uvicorn_connection

PAUSE_S = 0.5
LONGEST_S = 2.0
SHARE = 0.003
MOST = 100
SEND_S = 20.0  # for a viewer that does not read


class Viewers:
    """The viewers of one server. Owned by the loop of the admin listener."""

    __slots__ = ("_latest", "_look", "_news", "_number", "_task", "count")

    def __init__(self, look: Callable[[], View]) -> None:
        self._look = look
        self.count = 0
        self._task: asyncio.Task[None] | None = None
        self._latest = b""
        self._number = 0
        self._news: asyncio.Future[None] | None = None

    async def response(self) -> Response:
        """Return the stream for one more viewer, or a refusal."""
        if self.count >= MOST:
            text = f"{MOST} viewers are connected already; close one, or try again."
            return PlainTextResponse(text, 503, {"retry-after": "5"})
        return _Stream(self)

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
                self._latest, cost_s = _event({"error": f"{type(error).__name__}: {error}"}), 0.0
            self._number += 1
            if self._news is not None and not self._news.done():
                self._news.set_result(None)
            pause_s = min(LONGEST_S, max(PAUSE_S, cost_s / SHARE))
            await asyncio.sleep(max(0.0, begin + pause_s - monotonic()))

    def _made(self) -> tuple[bytes, float]:
        """Return a view as an event, and the processor time that it took."""
        begin = thread_time()
        return _event(self._look()), thread_time() - begin

    async def next(self, seen: int) -> tuple[int, bytes]:
        """Return the number and the event of a view that is later than the one `seen`."""
        while self._number <= seen or not self._latest:
            if self._news is None or self._news.done():
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._news)
        return self._number, self._latest


class _Stream(Response):
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
