"""`ingress run`, `explain`, `check`, `trace` and `openapi`: the command line.

Everything heavy (typer, rich, uvicorn) is imported here and nowhere below, so that `import ingress`
stays light.
"""

from __future__ import annotations

import json
import logging.config
import math
import os
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingress import api
from ingress.budget import ThreadBudget, start_again, thread_budget
from ingress.build import build
from ingress.check.findings import CheckError, Report
from ingress.check.report import Format, rendered
from ingress.config import HTTPOptions
from ingress.declaration import Application
from ingress.engines import current_engine
from ingress.exceptions import RayServeException
from ingress.inspection import Level, explain
from ingress.inspection.table import as_json, show
from ingress.settings import OMP_NUM_THREADS, TRACE_FILE, Settings
from ingress.target import AppDir, Target
from ingress.target import load as _load
from ingress.target import refusal as _error
from ingress.tracing import Session, TraceError

app = typer.Typer(
    name="ingress",
    help="FastAPI classes on a pool of replicas, in one process.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
console = Console()

WORKER_HEALTHCHECK_S = 30  # a worker that holds the GIL for some seconds is busy, not dead


@app.callback()
def _main() -> None:
    """FastAPI classes on a pool of replicas, in one process."""


@app.command()
def run(
    target: Target,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on.  [default: 127.0.0.1]", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 lets the system choose.")] = 8000,
    reload: Annotated[bool, typer.Option("--reload", help="Restart when a file changes.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes; each has all the replicas.")] = 1,
    app_dir: AppDir = Path("."),
) -> None:
    """Serve an application over HTTP until Ctrl-C.

    [dim]ingress run main:hello --port 9000[/dim]

    Ctrl-C (or SIGTERM) drains: what runs may end, new requests are refused. A second one stops at
    once.

    Sets OMP_NUM_THREADS and its like, if they are not set, to what the cores are worth for each
    call that computes.
    """
    application = _load(target, app_dir)
    settings = _settings()
    host = host or settings.http_host
    logging.config.dictConfig(_LOGGING)
    budget = _budget(application, settings, processes=workers)
    to_set = budget.variables
    os.environ.update(to_set)
    if reload or workers > 1:  # which are new processes
        _print_plan(application, settings, budget)
        uvicorn.run(
            target,
            host=host,
            port=port,
            reload=reload,
            workers=workers,
            app_dir=str(app_dir),
            timeout_graceful_shutdown=_graceful_s(application),
            timeout_worker_healthcheck=WORKER_HEALTHCHECK_S,
        )
        return
    _start_again_if_needed(budget, to_set)
    _serve(application, HTTPOptions(host=host, port=port), settings, budget)


@app.command()
def openapi(
    target: Target,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.", dir_okay=False)
    ] = None,
    app_dir: AppDir = Path("."),
) -> None:
    """Write the OpenAPI schema of an application, without starting it."""
    application = _load(target, app_dir)
    try:
        schema = json.dumps(application.openapi(), indent=2)
    except TypeError as error:
        raise _error(str(error)) from None
    if output is None:
        typer.echo(schema)
    else:
        try:
            output.write_text(schema + "\n")
        except OSError as error:
            problem = f"cannot write {str(output)!r}: {error.strerror}"
            raise _error(f"{problem}; give -o a path in a folder that is there") from None


@app.command("explain")
def explain_command(
    target: Target,
    as_json_: Annotated[
        bool, typer.Option("--json", help="Print JSON; its keys are in docs/explain.md.")
    ] = False,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Only what moves when RAY_SERVE_RUN_SYNC_IN_THREADPOOL does."),
    ] = False,
    fail_on: Annotated[
        Level | None,
        typer.Option(help="Exit with 1 if there is such a finding, or a graver one, for CI."),
    ] = None,
    app_dir: AppDir = Path("."),
) -> None:
    """Print where each callable of an application runs, and why.

    [dim]ingress explain main:hello[/dim]

    The module is imported; nothing in it is made, called or started. A row is
    a route, WebSocket, dependency, its teardown, background task, stream,
    batch function, method, health check, constructor or lifespan:

    [bold]runs in[/bold]  where, under the flags in the environment
    [bold]at 1[/bold]     where, at the other value of RAY_SERVE_RUN_SYNC_IN_THREADPOOL
    [bold]threads[/bold]  how many of them, for each replica

    [bold]event loop[/bold]    the replica's one thread: while a def runs in it, nothing else does
    [bold]threadpool[/bold]    a worker thread of the replica
    [bold]AnyIO thread[/bold]  a thread for what Starlette and FastAPI run themselves

    In CI, so that no def gets onto the event loop:

    [dim]ingress explain main:hello --fail-on warn[/dim]
    """
    application = _load(target, app_dir)
    try:
        explanation = explain(application, _settings())
    except (TypeError, ValueError, RayServeException) as error:
        raise _error(str(error)) from None
    if as_json_:
        typer.echo(json.dumps(as_json(explanation, diff=diff), indent=2))
    else:
        show(explanation, console, diff=diff)
    if fail_on is not None and explanation.count(fail_on):
        raise typer.Exit(1)


@app.command()
def check(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="MODULE:APP, or a file or folder to read only.")
    ],
    migrate: Annotated[
        bool,
        typer.Option("--migrate", help="Also what is not safe once each `def` runs in a thread."),
    ] = False,
    tests: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="PYTEST",
            help="Also run these tests, and try in threads what --migrate finds.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[Format, typer.Option(help="How to print it.")] = Format.TEXT,
    app_dir: AppDir = Path("."),
) -> None:
    """Find what blocks an event loop, and with --migrate what is not safe in threads.

    [dim]ingress check main:hello --migrate[/dim]

    Exit code 0: nothing found; 1: something; 2: it could not be checked. A line with `# noqa: ID`
    is left out.
    """
    report = _check(target, migrate, tests, app_dir)
    typer.echo(rendered(report, format))
    if report.failure:
        _error(report.failure)
        raise typer.Exit(2)
    raise typer.Exit(1 if report.findings else 0)


@app.command()
def trace(
    target: Target,
    requests: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REQUEST]...",
            help='Such as /items or \'POST /items {"name": "pen"}\'; / by default.',
            show_default=False,
        ),
    ] = None,
    number: Annotated[
        int, typer.Option("--requests", "-n", min=1, help="How often each is made.")
    ] = 3,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            min=1,
            help="How many at a time; by default all, up to 32.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Write Chrome Trace Event JSON to this file.")
    ] = Path("trace.json"),
    svg: Annotated[
        Path | None, typer.Option(help="Also write a picture of it to this file.")
    ] = None,
    app_dir: AppDir = Path("."),
) -> None:
    """Serve an application, make some requests, and write a timeline of them.

    [dim]ingress trace main:hello /sync /async --svg trace.svg[/dim]

    Each event loop and each worker thread is a track. It shows when it ran for
    which request, what that waited for (a slot, its event loop, a thread), and
    when a loop stood still. Open the file at https://ui.perfetto.dev, or in
    chrome://tracing. Ctrl-C ends requests that have no end.

    For a server that runs: INGRESS_TRACE=trace.json ingress run main:hello.
    It keeps the last requests, and writes them at `kill -USR2` and at its end.
    """
    application = _load(target, app_dir)
    budget = _budget(application, _settings(), processes=1)
    to_set = budget.variables
    os.environ.update(to_set)
    os.environ.pop(TRACE_FILE, None)  # which records another server
    _start_again_if_needed(budget, to_set)
    logging.config.dictConfig(_LOGGING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    try:
        session = Session(target, requests or ["/"], number, concurrency, out, svg)
        for line in session.run(application):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    except TraceError as error:
        raise _error(str(error)) from None


def main() -> None:
    """Run the command line: the console script `ingress`."""
    app()


def _start_again_if_needed(budget: ThreadBudget, to_set: Mapping[str, str]) -> None:
    """Begin anew if a library has read how many threads it has before that was set."""
    if OMP_NUM_THREADS in to_set and (read := budget.already_read()):
        verb = "was" if len(read) == 1 else "were"
        what = f"{' and '.join(read)} {verb} imported with a thread for every core"
        how = f"starting again with {OMP_NUM_THREADS}={budget.threads}"
        console.print(f"[dim]{what}: {how}[/dim]", highlight=False, soft_wrap=True)
        start_again()


def _budget(application: Application, settings: Settings, *, processes: int) -> ThreadBudget:
    try:
        with warnings.catch_warnings(action="ignore"):  # what is wrong is said when it is deployed
            return thread_budget(build(application, "default"), settings, processes=processes)
    except Exception as error:
        raise _error(str(error)) from None


def _serve(
    application: Application, options: HTTPOptions, settings: Settings, budget: ThreadBudget
) -> None:
    try:
        api.start(options)
        api.run(application)
    except Exception as error:
        api.shutdown()
        if error.__cause__ is not None and not isinstance(error.__cause__, OSError):
            raise  # user code raised it: its traceback is what one needs to see
        raise _error(str(error)) from None
    _print_plan(application, settings, budget)
    console.print(
        f"Application 'default' is ready at {current_engine().url()} (Ctrl-C to stop)",
        highlight=False,
    )
    api.serve_until_signal()


def _check(target: str, migrate: bool, tests: str | None, app_dir: Path) -> Report:
    # Here, because the other commands need not wait for it.
    from ingress.check.checker import check_application, check_files
    from ingress.check.trial import tried

    settings = _settings()
    migrate = migrate or tests is not None
    try:
        if ":" not in target and (path := app_dir / target).exists():
            report = check_files([path], settings, migrate=migrate)
        elif target.endswith(".py"):
            raise CheckError(f"there is no file {str(path)!r}; check the spelling, or --app-dir")
        else:
            application = _load(target, app_dir)
            name = target.partition(":")[0]
            report = check_application(application, name, app_dir, settings, migrate=migrate)
        return report if tests is None else tried(report, tests)
    except CheckError as error:
        _error(str(error))
    except typer.Exit:  # `_load` has said it
        pass
    except Exception:  # what the user's module raises when it is imported, say
        traceback.print_exc()
    raise typer.Exit(2)


def _settings() -> Settings:
    try:
        return Settings.from_environment()
    except ValueError as error:
        raise _error(str(error)) from None


def _graceful_s(application: Application) -> int:
    """Return after how many s a worker process cancels what would not be drained.

    The worker itself drains in the time that the deployments say, see `engines.hosting`.
    """
    configs = [each.deployment.config for each in build(application, "default").deployments]
    return math.ceil(max(each.graceful_shutdown_timeout_s for each in configs)) + 1


def _print_plan(application: Application, settings: Settings, budget: ThreadBudget) -> None:
    """Print where each deployment and each route runs."""
    explanation = explain(application, settings)
    deployments = Table("deployment", "replicas", "max ongoing", "queue", box=None, pad_edge=False)
    callables = Table("route", "calls", "written", "runs in", box=None, pad_edge=False)
    for each in explanation.deployments:
        config = each.deployment.config
        queue = config.max_queued_requests
        deployments.add_row(
            each.name,
            str(config.replica_count),
            str(config.max_ongoing_requests),
            "no limit" if queue < 0 else str(queue),
        )
    for row in explanation.rows:
        if row.is_route:
            place = row.places[settings.run_sync_in_threadpool]
            callables.add_row(row.what, row.name, row.kind, place.where)
    console.print(deployments, Text(), callables, Text(), sep="\n", end="")
    console.print(budget.summary + "\n", highlight=False, soft_wrap=True)
    if budget.warning:
        console.print(f"[yellow]Warning:[/yellow] {budget.warning}\n", highlight=False)


_LOGGING: dict[str, Any] = {
    **uvicorn.config.LOGGING_CONFIG,
    "loggers": {
        **uvicorn.config.LOGGING_CONFIG["loggers"],
        "ingress": {"handlers": ["default"], "level": "INFO", "propagate": False},
        "uvicorn": {"handlers": ["default"], "level": "WARNING", "propagate": False},
        "uvicorn.error": {"level": "WARNING"},
    },
}
