"""`ingress trace`: serve an application, send some requests, and write a timeline of them."""

from __future__ import annotations

import http.client
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from ingress import api
from ingress.app.declaration.declaration import Application
from ingress.config import HTTPOptions
from ingress.core.base.settings import Settings
from ingress.engines import local_engine
from ingress.observe.inspection import explain
from ingress.observe.timeline.chrome import as_json, check_writable
from ingress.observe.timeline.instrumentation import record
from ingress.observe.timeline.picture import as_svg, summary
from ingress.observe.timeline.recorder import Recorder, Timeline

AT_ONCE = 32
"""Default number of concurrent requests."""

_NAMED = 5  # routes that an error names

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


class TraceError(Exception):
    """There is nothing to trace, or the file cannot be written."""


def traced(
    application: Application,
    target: str,
    requests: Iterable[str],
    number: int,
    concurrency: int | None,
    out: Path,
    svg: Path | None,
) -> Iterator[str]:
    """Send the requests, write the files, and yield the report line by line.

    Each is made `number` times, `concurrency` at a time.

    Raises `TraceError` for an invalid request, for a file that cannot be written, and if the
    application does not start: then no file is written. The server has ended at return.
    """
    try:
        asked = [wanted(each) for each in requests] * number
        check_writable(out, "--out")
        if svg is not None:
            check_writable(svg, "--svg")
    except ValueError as error:
        raise TraceError(str(error)) from None
    timelines, answers = _record(application, asked, concurrency or AT_ONCE)
    timeline, *children = timelines
    for each in dict.fromkeys(asked):
        statuses = Counter(status for request, status in answers if request == each)
        # An endpoint may answer 404, too: only who asked knows whether the path is the right one.
        hint = f"; {_what_there_is(application)}" if set(statuses) == {404} else ""
        yield f"{each}: {_counted(statuses)}{hint}"
    yield summary(timeline, children)
    try:
        out.write_text(as_json(timelines, target))
        yield f"{out}: open it at https://ui.perfetto.dev or in chrome://tracing"
        if svg is not None:
            svg.write_text(as_svg(timeline, target))
            what = "a picture of the server's process" if children else "the same as a picture"
            yield f"{svg}: {what}"
    except OSError as error:
        raise TraceError(f"cannot write {error.filename!r}: {error.strerror}") from None


def _record(
    application: Application, requests: list[Wanted], concurrency: int
) -> tuple[list[Timeline], list[Answer]]:
    """Serve the application on a free port until the requests end; Ctrl-C ends them early."""
    engine = local_engine()
    recorder = Recorder()
    answers: list[Answer] = []
    cut: list[Timeline] = []
    with recorder, engine.instrumented(partial(record, recorder)):
        try:
            try:
                api.start(HTTPOptions(host="127.0.0.1", port=0), engine="local")
                api.run(application)
            except Exception as error:
                raise TraceError(f"{error}; `ingress run` shows where") from None
            try:
                ask(str(engine.url()), requests, concurrency, answers)
            except KeyboardInterrupt:
                cut = recorder.timelines()  # before the remaining requests are cancelled
        finally:
            engine.shutdown(0.0 if cut else None)
    # Not earlier: background tasks and the watchdog's last look have ended now.
    return cut or recorder.timelines(), answers


def _counted(statuses: Counter[int]) -> str:
    """Return the count of each status as text."""
    known = [f"{count} x {status or 'cut'}" for status, count in sorted(statuses.items())]
    return ", ".join(known) or "no answer"


def _what_there_is(application: Application) -> str:
    rows = explain(application, Settings.from_environment()).rows
    routes = [row.what for row in rows if row.is_route]
    more = f" and {len(routes) - _NAMED} more" if len(routes) > _NAMED else ""
    return f"there is {', '.join(routes[:_NAMED])}{more}" if routes else "there is no route"


class Wanted(NamedTuple):
    """One request to send. `body` is sent as JSON, unless it is empty."""

    method: str
    path: str
    body: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


Answer = tuple[Wanted, int]
"""A request and the status of its answer, 0 if the connection was cut."""


def wanted(text: str) -> Wanted:
    """Read "/path", "POST /path" or "POST /path {body}". Raises `ValueError` for anything else."""
    found = re.fullmatch(r"(?:([A-Za-z]+)\s+)?(/\S*)(?:\s+(.+))?", text.strip(), re.DOTALL)
    method = (found[1] or "GET").upper() if found is not None else ""
    if found is None or method not in METHODS:
        raise ValueError(
            f"{text!r} is not a request; write a path such as /items, or a method and a path and, "
            'if there is one, the body: \'POST /items {"name": "pen"}\''
        )
    return Wanted(method, found[2], found[3] or "")


def ask(url: str, requests: Sequence[Wanted], concurrency: int, answers: list[Answer]) -> None:
    """Send requests in order, `concurrency` at a time, and append the answers to a list."""
    left = deque(requests)

    def work() -> None:
        while True:
            try:
                each = left.popleft()
            except IndexError:
                return
            answers.append((each, _status(url, each)))

    threads = [
        # Daemons: a thread that reads an endless stream must not block a Ctrl-C.
        threading.Thread(target=work, name=f"ingress-client-{number}", daemon=True)
        for number in range(min(concurrency, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _status(url: str, wanted: Wanted) -> int:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    headers = {"content-type": "application/json"} if wanted.body else {}
    path = quote(wanted.path, safe="/?&=%+,:;@!$'()*~[]")
    try:
        connection.request(wanted.method, path, wanted.body.encode() or None, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
