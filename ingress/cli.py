"""`ingress run`, `build`, `explain`, `check` and `openapi`: the command line.

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
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
import yaml

from ingress import api
from ingress.budget import ThreadBudget, start_again, thread_budget
from ingress.build import build
from ingress.check.findings import CheckError, Report
from ingress.check.report import Format, rendered
from ingress.config import HTTPOptions
from ingress.declaration import Application
from ingress.engines import current_engine, ray_engine
from ingress.engines.ray.config_file import HEADER, config_of
from ingress.exceptions import RayServeException
from ingress.inspection import Level, explain
from ingress.inspection.table import as_json, show
from ingress.settings import ENGINES, OMP_NUM_THREADS, Settings
from ingress.targets import TargetError, load
from ingress.terminal import LOGGING, console, error_exit, print_plan, write

app = typer.Typer(
    name="ingress",
    help="FastAPI classes on a pool of replicas, in one process.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
WORKER_HEALTHCHECK_S = 30  # a worker that holds the GIL for some seconds is busy, not dead

Target = Annotated[
    str, typer.Argument(metavar="MODULE:APP", help="The bound application, such as main:hello.")
]
AppDir = Annotated[
    Path, typer.Option(help="Where MODULE is looked for.", file_okay=False, exists=True)
]


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
    engine: Annotated[
        str | None,
        typer.Option(
            help="local: this process; ray: a Ray cluster.  [default: local]", show_default=False
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The Ray cluster; without it, RAY_ADDRESS, or one is started on this machine.",
            show_default=False,
        ),
    ] = None,
    working_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="What Ray's workers get a copy of; for clusters of several machines.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve an application over HTTP until Ctrl-C.

    [dim]ingress run main:hello --port 9000[/dim]

    Ctrl-C (or SIGTERM) drains: what runs may end, new requests are refused. A second one stops at
    once.

    Sets OMP_NUM_THREADS and its like, if they are not set, to what the cores are worth for each
    call that computes.
    """
    engine = engine or _settings().engine
    _check_engine(engine, reload=reload, workers=workers, ray_only=[address, working_dir])
    application = _load(target, app_dir)
    settings = _settings()
    host = host or settings.http_host
    logging.config.dictConfig(LOGGING)
    if engine == "ray":
        options = HTTPOptions(host=host, port=port)
        _prepare_ray(address, working_dir, options)
        _serve(application, options, settings, None, engine)
        return
    budget = _budget(application, settings, processes=workers)
    to_set = budget.variables
    os.environ.update(to_set)
    if reload or workers > 1:  # which are new processes
        print_plan(application, settings, budget)
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
    if OMP_NUM_THREADS in to_set and (read := budget.already_read()):
        what = f"{' and '.join(read)} was imported with a thread for every core"
        how = f"starting again with {OMP_NUM_THREADS}={budget.threads}"
        console.print(f"[dim]{what}: {how}[/dim]", highlight=False, soft_wrap=True)
        start_again()
    _serve(application, HTTPOptions(host=host, port=port), settings, budget, engine)


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
        raise error_exit(str(error)) from None
    if output is None:
        typer.echo(schema)
    else:
        write(output, schema + "\n")


@app.command("build")
def build_command(
    target: Target,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write to this file.", dir_okay=False)
    ],
    app_dir: AppDir = Path("."),
) -> None:
    """Write an application's configuration for Ray: `serve deploy`, KubeRay.

    [dim]ingress build main:hello -o serve.yaml[/dim]

    It names the application, it does not contain it: the cluster has to be able to import its
    modules, and ingress. Nothing is started, and Ray need not be installed.
    """
    application = _load(target, app_dir)
    try:
        config = config_of(build(application, "default", acts_on_all=True), target, _settings())
    except (TypeError, ValueError, RayServeException) as error:
        raise error_exit(str(error)) from None
    write(output, HEADER.format(target=target) + yaml.safe_dump(config, sort_keys=False))


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
        raise error_exit(str(error)) from None
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
        error_exit(report.failure)
        raise typer.Exit(2)
    raise typer.Exit(1 if report.findings else 0)


def main() -> None:
    """Run the command line: the console script `ingress`."""
    app()


def _budget(application: Application, settings: Settings, *, processes: int) -> ThreadBudget:
    try:
        with warnings.catch_warnings(action="ignore"):  # what is wrong is said when it is deployed
            return thread_budget(build(application, "default"), settings, processes=processes)
    except Exception as error:
        raise error_exit(str(error)) from None


def _check_engine(engine: str, *, reload: bool, workers: int, ray_only: list[str | None]) -> None:
    if engine not in ENGINES:
        raise error_exit(f"--engine must be {' or '.join(ENGINES)}, got {engine!r}")
    if engine == "ray" and (reload or workers > 1):
        raise error_exit(
            "--reload and --workers are for the local engine; on Ray, num_replicas says how many "
            "processes a deployment has"
        )
    if engine != "ray" and any(ray_only):
        raise error_exit("--address and --working-dir are for --engine ray")


def _prepare_ray(address: str | None, working_dir: str | None, options: HTTPOptions) -> None:
    try:
        ray_engine().use(address, working_dir, options)
    except RuntimeError as error:
        raise error_exit(str(error)) from None
    console.print("[dim]starting on Ray, which takes a while[/dim]", highlight=False)


def _serve(
    application: Application,
    options: HTTPOptions,
    settings: Settings,
    budget: ThreadBudget | None,
    engine: str,
) -> None:
    try:
        if engine == "local":
            api.start(options, engine=engine)
        api.run(application, engine=engine)  # Ray looks at the application before it starts
    except KeyboardInterrupt:  # it may take a while on Ray
        api.shutdown()
        raise typer.Exit(130) from None
    except Exception as error:
        api.shutdown()
        if engine == "local":
            cause = error.__cause__
            needs_a_look = cause is not None and not isinstance(cause, OSError)
        else:  # what user code raised is among the workers' records
            expected = (RuntimeError, TypeError, ValueError, RayServeException)
            needs_a_look = not isinstance(error, expected)
        if needs_a_look:
            raise  # user code raised it: its traceback is what one needs to see
        raise error_exit(str(error)) from None
    print_plan(application, settings, budget)
    where = "" if engine == "local" else f" on {engine.capitalize()}"
    console.print(
        f"Application 'default' is ready at {current_engine().url()}{where} (Ctrl-C to stop)",
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
        error_exit(str(error))
    except typer.Exit:  # `_load` has said it
        pass
    except Exception:  # what the user's module raises when it is imported, say
        traceback.print_exc()
    raise typer.Exit(2)


def _load(target: str, app_dir: Path) -> Application:
    """Import what `MODULE:APP` names. Ends the program, with one line, if it is no application."""
    try:
        return load(target, app_dir)
    except TargetError as error:
        raise error_exit(str(error)) from None


def _settings() -> Settings:
    try:
        return Settings.from_environment()
    except ValueError as error:
        raise error_exit(str(error)) from None


def _graceful_s(application: Application) -> int:
    """Return after how many s a worker process cancels what would not be drained.

    The worker itself drains in the time that the deployments say, see `engines.hosting`.
    """
    configs = [each.deployment.config for each in build(application, "default").deployments]
    return math.ceil(max(each.graceful_shutdown_timeout_s for each in configs)) + 1
