"""The command line: `ingress run`, `build`, `explain`, `check`, `migrate`, `new` and others.

The heavy packages (typer, rich, uvicorn) are imported here and nowhere below, so that `import
ingress` stays light.
"""

from __future__ import annotations

import inspect
import json
import logging.config
import re
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ingress import __version__
from ingress.app.config_file.loading import is_config_file
from ingress.check.rules import CheckError, Format, Report, rendered
from ingress.cli.cluster_commands import delete
from ingress.cli.control_commands import memory, profile, reload, scale, status, stop
from ingress.cli.file_commands import RUN_OPTIONS, build_command
from ingress.cli.file_commands import config as config_command
from ingress.cli.jobs_commands import jobs
from ingress.cli.migrate_command import migrate as migrate_command
from ingress.cli.run_command import run
from ingress.cli.run_server import budget_for, read_settings, start_again_if_needed
from ingress.cli.target import (
    NOTEBOOK,
    AppDir,
    AsJSON,
    FileOrTarget,
    TargetArgument,
    load,
    load_each,
    note_json,
    refusal,
    refusing,
)
from ingress.cli.terminal import LOGGING, OutputOption, console, say, write
from ingress.cli.top_command import top
from ingress.cli.trace_command import TraceError, traced
from ingress.cli.writing_commands import new as new_command
from ingress.cli.writing_commands import stubs_command
from ingress.core.base import gil
from ingress.core.base.settings import TRACE_FILE, export, export_threads
from ingress.exceptions import RayServeException
from ingress.observe.inspection import Level, explain
from ingress.observe.inspection.table import as_json, show

app = typer.Typer(
    name="ingress",
    help="FastAPI classes on a pool of replicas, in threads or in processes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"ingress {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """FastAPI classes on a pool of replicas, in threads or in processes."""
    note_json(False)  # of a command before, in a process with several


app.command()(run)
app.command("build")(build_command)
app.command("migrate")(migrate_command)
app.command("stubs")(stubs_command)
app.command("new")(new_command)
for command in (status, top, memory, profile, stop, scale, reload, delete):
    app.command()(command)
app.command("config", context_settings=RUN_OPTIONS)(config_command)


@app.command()
def openapi(
    target: FileOrTarget,
    name: Annotated[
        str | None,
        typer.Option(help="The application of a file with several.", show_default=False),
    ] = None,
    output: OutputOption = None,
    app_dir: AppDir = Path("."),
) -> None:
    """Write the OpenAPI schema of an application, without starting it."""
    found = load_each(target, app_dir)
    names = [each.name for each in found]
    chosen = [each for each in found if name in (None, each.name)]
    if len(chosen) != 1:
        raise refusal(f"choose one application with --name: {', '.join(names)}")
    with refusing(TypeError):
        schema = json.dumps(chosen[0].application.openapi(), indent=2)
    write(output, schema + "\n")


@app.command("explain")
def explain_command(
    target: FileOrTarget,
    as_json_: AsJSON = False,
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
    [dim]ingress explain serve.yaml[/dim]

    The module is imported; nothing in it is created, called or started. A row is
    a route, WebSocket, dependency, its teardown, background task, stream,
    batch function, method, health check, constructor or lifespan:

    [bold]runs in[/bold]  where, under the flags in the environment
    [bold]at 1[/bold]     where, at the other value of RAY_SERVE_RUN_SYNC_IN_THREADPOOL
    [bold]threads[/bold]  the number of these threads in each replica

    [bold]event loop[/bold]    the replica's one thread: a def there stops all else
    [bold]threadpool[/bold]    a worker thread of the replica
    [bold]AnyIO thread[/bold]  a thread for code that Starlette and FastAPI themselves run

    In CI, so that no def runs on the event loop:

    [dim]ingress explain main:hello --fail-on warn[/dim]
    """
    found = load_each(target, app_dir)
    with refusing(TypeError, ValueError, RayServeException):
        explained = {each.name: explain(each.application, read_settings()) for each in found}
    if as_json_:
        told = {name: as_json(each, diff=diff) for name, each in explained.items()}
        one = next(iter(told.values()))
        typer.echo(json.dumps(one if len(told) == 1 else {"applications": told}, indent=2))
    else:
        for name, each in explained.items():
            if len(explained) > 1:
                console.print(f"application {name}", style="bold")
            show(each, console, diff=diff)
    if fail_on is not None and any(each.count(fail_on) for each in explained.values()):
        raise typer.Exit(1)


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="MODULE:APP, a file such as serve.yaml, or Python files or a folder to read only.",
        ),
    ],
    migrate: Annotated[
        bool,
        typer.Option("--migrate", help="Also what is not safe once each `def` runs in a thread."),
    ] = False,
    tests: Annotated[str | None, typer.Option("--run", hidden=True)] = None,
    as_json_: AsJSON = False,
    format: Annotated[
        Format, typer.Option(help="How to print it; --json is short for --format json.")
    ] = Format.TEXT,
    app_dir: AppDir = Path("."),
) -> None:
    """Find code that blocks an event loop or that replicas cannot share.

    With --migrate it also finds code that is not safe in threads.

    [dim]ingress check main:hello --migrate[/dim]

    Exit code 0: no findings; 1: findings; 2: the check failed. `# noqa: ID` suppresses the
    findings of its line.
    """
    if tests is not None:  # 0.2 had this option; it is refused for one version
        raise refusal(
            "--run is gone; use --migrate, and `pytest --sync-in-threadpool=both`, which runs "
            "your tests with each `def` in a thread, too",
            2,
        )
    report = _check(target, migrate, app_dir)
    typer.echo(rendered(report, Format.JSON if as_json_ else format))
    if report.failure:
        refusal(report.failure)
        raise typer.Exit(2)
    raise typer.Exit(1 if report.findings else 0)


@app.command()
def trace(
    target: TargetArgument,
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
        Path | None,
        typer.Option(help="Also write a picture of it to this file, without child processes."),
    ] = None,
    app_dir: AppDir = Path("."),
) -> None:
    """Serve an application, send some requests, and write a timeline of them.

    [dim]ingress trace main:hello /sync /async --svg trace.svg[/dim]

    Each event loop and each worker thread is a track. It shows the requests that
    ran there, their waits (for a slot, an event loop, a thread), and the stalls of
    the loop. Open the file at https://ui.perfetto.dev, or in chrome://tracing.
    Ctrl-C ends requests that have no end.

    For a running server: INGRESS_TRACE=trace.json ingress run main:hello.
    It keeps the last requests, and writes them at `kill -USR2` and at its end.
    """
    application = load(target, app_dir)
    budget = budget_for([application], read_settings(), processes=1)
    export_threads(budget.variables)
    export({TRACE_FILE: None})  # INGRESS_TRACE is for a running server
    start_again_if_needed(budget)
    logging.config.dictConfig(LOGGING)
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    with refusing(TraceError):
        told = traced(application, target, requests or ["/"], number, concurrency, out, svg)
        for line in told:
            say(line)


def main() -> None:
    """Run the command line: the console script `ingress`, or `python -m ingress`."""
    if not sys.warnoptions:  # Python shows a DeprecationWarning of `__main__` only
        warnings.filterwarnings("default", r"\w+ is deprecated; use", DeprecationWarning)
    app(prog_name="ingress")  # completion and help are those of the script


def _check(target: str, migrate: bool, app_dir: Path) -> Report:
    # Imported here, so that the other commands do not wait for it.
    from ingress.check.checker import check_application, check_files

    app_dir = app_dir.absolute()  # a file may have another folder
    try:
        is_file = is_config_file(target)
        if target.lower().endswith(".ipynb"):
            raise CheckError(f"{target!r} is {NOTEBOOK}")
        if ":" not in target and (path := app_dir / target).exists() and not is_file:
            report = check_files([path], read_settings(), migrate=migrate)
        elif target.endswith(".py"):
            raise CheckError(f"there is no file {str(path)!r}; check the spelling, or --app-dir")
        else:
            found, settings = load_each(target, app_dir), read_settings()
            reports = [
                check_application(
                    each.application,
                    each.module,
                    app_dir,
                    settings,
                    migrate=migrate,
                    gil_is_on=gil.is_on(),
                )
                for each in found
            ]
            report = reports[0]
            for each in reports[1:]:
                report.add(each.findings)
                report.notes += each.notes
        return report
    except CheckError as error:
        refusal(str(error))
    except typer.Exit:  # `load` has printed the error
        pass
    except Exception as error:
        traceback.print_exc()
        raise typer.Exit(2) from error
    raise typer.Exit(2)


def _paragraph(lines: str) -> str:
    """Return the lines of a paragraph as one, unless they are a table, a list or commands."""
    is_prose = not re.search(r"\S {2,}\S|^( |- |\d\. |\[dim\])", lines, re.MULTILINE)
    return lines.replace("\n", " ") if is_prose else lines


app.add_typer(jobs)

# typer keeps the line breaks of docstrings, which are wider than many terminals.
for info in (*app.registered_commands, *jobs.registered_commands):
    text = inspect.cleandoc((info.callback and info.callback.__doc__) or "")
    info.help = "\n\n".join(map(_paragraph, text.split("\n\n")))
