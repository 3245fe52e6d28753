"""The output of the command line: progress, plans, files and logs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Annotated, Any

import typer
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from ingress.api import RunTarget
from ingress.app.declaration.declaration import Application
from ingress.cli.target import Output, refusal
from ingress.core.base import gil
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings, environment
from ingress.observe.inspection import explain
from ingress.observe.inspection.budget import ThreadBudget
from ingress.schema import ServeStatus
from ingress.telemetry.logs.formats import tame
from ingress.telemetry.logs.options import AccessPrinter, Foreign, Printer

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write to this file.  [default: standard output]", dir_okay=False
    ),
]
console = Output()

NEWS_S = 0.5  # until the first line about a start; most starts are over by then
MOST_NEWS_S = 30.0
LIVE_S = 0.2
JOIN_S = 1.0
_ERASE = Control((ControlType.ERASE_IN_LINE, 2), ControlType.CARRIAGE_RETURN)


def say(*lines: str, style: str | None = None) -> None:
    """Print lines, those that are not empty. A long one is not broken."""
    for line in filter(None, lines):
        console.print(line, style=style, soft_wrap=True)


def tamed(value: Any) -> Any:
    """Return a value of JSON whose texts have no character that is a command to a terminal."""
    match value:
        case str():
            return tame(value)
        case dict():
            return {tamed(key): tamed(each) for key, each in value.items()}
        case list():
            return [tamed(each) for each in value]
    return value


def print_json(value: Any) -> None:
    """Print JSON. All characters but ASCII's printable ones are escaped in it."""
    typer.echo(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def write(output: Path | None, text: str) -> None:
    """Write a file, or standard output. Ends the program with one line if it cannot be written."""
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as error:
        problem = f"cannot write {str(output)!r}: {error.strerror}"
        raise refusal(f"{problem}; give another path") from None


@contextmanager
def showing_start(status: Callable[[], ServeStatus]) -> Iterator[None]:
    """Print the progress of a start: on a terminal in one line, elsewhere when it changes."""
    over = Event()
    thread = Thread(target=_show_start, args=(status, over), name="ingress-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(JOIN_S)  # a terminal that is not read may block it


def _show_start(status: Callable[[], ServeStatus], over: Event) -> None:
    begin = monotonic()
    is_live = console.is_terminal and not console.is_dumb_terminal
    pause_s = NEWS_S
    told = ""
    # A failed print must not end a start.
    with suppress(OSError, ValueError, RuntimeError, SystemExit):
        while not over.wait(LIVE_S if is_live and told else pause_s):
            news = "; ".join(_starting(status()))
            if not news or (news == told and not is_live):
                continue
            told = news
            line = f"{news} ... {monotonic() - begin:.1f} s"
            if is_live:
                # The cursor stays at the beginning of the line: a log record overwrites the line.
                console.control(_ERASE)
                console.print(line, end="\r", no_wrap=True, overflow="crop")
            else:
                say(line)
                pause_s = min(2 * pause_s, MOST_NEWS_S)  # few lines for many replicas
        if is_live and told:
            console.control(_ERASE)


def _starting(status: ServeStatus) -> Iterator[str]:
    for application in status.applications.values():
        for name, deployment in application.deployments.items():
            states = deployment.replica_states
            if "STARTING" in states:
                ready = states.get("RUNNING", 0)
                yield f"starting {name} ({ready} of {ready + states['STARTING']} replicas)"


def print_plan(
    applications: Sequence[Application], settings: Settings, budget: ThreadBudget | None
) -> None:
    """Print the deployments, and where each route runs."""
    deployments = Table("deployment", "replicas", "max ongoing", "queue", box=None, pad_edge=False)
    callables = Table("route", "calls", "written", "runs in", box=None, pad_edge=False)
    explanations = [explain(each, settings) for each in applications]
    for each in chain.from_iterable(one.deployments for one in explanations):
        config = each.deployment.config
        queue = config.max_queued_requests
        deployments.add_row(
            each.name,
            str(config.first_count),
            str(config.max_ongoing_requests),
            "no limit" if queue < 0 else str(queue),
        )
    for row in chain.from_iterable(one.rows for one in explanations):
        if row.is_route:
            place = row.places[settings.run_sync_in_threadpool]
            callables.add_row(row.what, row.name, row.kind, place.where)
    console.print(deployments, Text(), callables, Text(), sep="\n", end="")
    say(_about_sync(settings) + "\n")
    if budget is None:  # each replica is a process with the CPUs that Ray gives it
        return
    summary = "\n".join(filter(None, (budget.summary, gil.told())))
    say(summary + "\n")
    if budget.warning:
        console.print(Text.assemble(("Warning:", "yellow"), f" {budget.warning}\n"))


def _about_sync(settings: Settings) -> str:
    """Return the flag that decides where `def` methods run, and its source."""
    in_threads = settings.run_sync_in_threadpool
    source = "as set" if environment().get(SYNC_IN_THREADPOOL) else "the default; Ray 2.60 has 1"
    where = "in threads" if in_threads else "on the event loop"
    flag = f"{SYNC_IN_THREADPOOL}={int(in_threads)}, {source}"
    return f"`def` methods that are no routes run {where}: {flag}"


def ready_lines(targets: Sequence[RunTarget], server: str | None, where: str = "") -> str:
    """Return a line for each application, which says that it is served at this server."""
    lines = []
    for each in targets:
        prefix = each.route_prefix
        at = f" at {server}{'' if prefix == '/' else prefix}" if server and prefix else ""
        lines.append(f"Application '{each.name}' is ready{at}{where}")
    return "\n".join(lines) + " (Ctrl-C to stop)"


LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {
        "default": {"()": Printer},
        "access": {"()": AccessPrinter},
    },
    "filters": {"foreign": {"()": Foreign}},
    "loggers": {
        "ingress": {"handlers": ["default"], "level": "INFO", "propagate": False},
        "ingress.access": {"handlers": ["access"], "level": "INFO", "propagate": False},
        "ray.serve": {"handlers": ["default"], "level": "INFO", "propagate": False},
        "uvicorn": {
            "handlers": ["default"],
            "filters": ["foreign"],
            "level": "INFO",
            "propagate": False,
        },
        "uvicorn.error": {"filters": ["foreign"], "level": "INFO"},
        "uvicorn.access": {"level": "WARNING"},  # `ingress.access` has the requests
    },
}
"""The configuration of logging of a server; `logs.process.ProcessLogs` completes it."""
