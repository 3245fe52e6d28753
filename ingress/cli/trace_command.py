"""`ingress trace`: serve an application, send some requests, and write a timeline of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from ingress import api
from ingress.app.declaration.declaration import Application
from ingress.config import HTTPOptions
from ingress.core.base.settings import Settings
from ingress.engines import local_engine
from ingress.observe.inspection import explain
from ingress.observe.timeline.chrome import as_json
from ingress.observe.timeline.client import Answer, Wanted, ask, wanted
from ingress.observe.timeline.instrumentation import record
from ingress.observe.timeline.picture import as_svg
from ingress.observe.timeline.recorder import Recorder, Timeline
from ingress.observe.timeline.texts import summary
from ingress.observe.timeline.window import check_writable

AT_ONCE = 32
"""Default number of concurrent requests."""

_NAMED = 5  # routes that an error names


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
    by_request: defaultdict[Wanted, Counter[int]] = defaultdict(Counter)
    for answer in answers:
        by_request[answer.wanted][answer.status] += 1
    for each in dict.fromkeys(asked):
        # An endpoint may answer 404, too: only who asked knows whether the path is the right one.
        hint = f"; {_what_there_is(application)}" if set(by_request[each]) == {404} else ""
        yield f"{each}: {_counted(by_request[each])}{hint}"
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
    with engine.instrumented(partial(record, recorder)):
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
