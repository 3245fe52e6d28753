"""The work of `ingress run` on either engine, with parts that other commands share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import partial

import typer
import uvicorn
from uvicorn.supervisors import ChangeReload

from ingress import api
from ingress.base.settings import ENGINES, OMP_NUM_THREADS, Settings
from ingress.cli.target import refusal
from ingress.cli.terminal import console, print_plan, showing_start
from ingress.cli.worker import work_until_reloaded
from ingress.cli.workers import run_workers
from ingress.config import HTTPOptions
from ingress.declaration.build import build
from ingress.declaration.declaration import Application
from ingress.engines import current_engine, local_engine, ray_engine
from ingress.exceptions import RayServeException
from ingress.http.connections import Connections
from ingress.http.server import check_address
from ingress.inspection.budget import ThreadBudget, start_again, thread_budget


def read_settings() -> Settings:
    try:
        return Settings.from_environment()
    except ValueError as error:
        raise refusal(str(error)) from None


def budget_for(application: Application, settings: Settings, *, processes: int) -> ThreadBudget:
    try:
        with warnings.catch_warnings(action="ignore"):  # the deployment warns again
            return thread_budget(build(application, "default"), settings, processes=processes)
    except Exception as error:
        raise refusal(str(error)) from None


def start_again_if_needed(budget: ThreadBudget, to_set: Mapping[str, str]) -> None:
    """Restart the process if a library has read its number of threads before it was set."""
    if OMP_NUM_THREADS in to_set and (read := budget.already_read()):
        verb = "was" if len(read) == 1 else "were"
        what = f"{' and '.join(read)} {verb} imported with a thread for every core"
        how = f"starting again with {OMP_NUM_THREADS}={budget.threads}"
        console.print(f"[dim]{what}: {how}[/dim]", highlight=False, soft_wrap=True)
        start_again()


def check_engine(
    engine: str,
    *,
    reload: bool,
    workers: int,
    limit_connections: int | None,
    ray_only: list[str | None],
) -> None:
    if engine not in ENGINES:
        raise refusal(f"--engine must be {' or '.join(ENGINES)}, got {engine!r}")
    if engine == "ray" and limit_connections is not None:
        raise refusal("--limit-connections is for the local engine; on Ray, the proxies are Ray's")
    if engine == "ray" and (reload or workers > 1):
        raise refusal(
            "--reload and --workers are for the local engine; on Ray, num_replicas says how many "
            "processes a deployment has"
        )
    if engine != "ray" and any(ray_only):
        raise refusal("--address and --working-dir are for --engine ray")


def prepare_ray(address: str | None, working_dir: str | None, options: HTTPOptions) -> None:
    try:
        ray_engine().use(address, working_dir, options)
    except RuntimeError as error:
        raise refusal(str(error)) from None
    console.print("[dim]starting on Ray, which takes a while[/dim]", highlight=False)


def serve_until_ctrl_c(
    application: Application,
    options: HTTPOptions,
    settings: Settings,
    budget: ThreadBudget | None,
    engine: str,
) -> None:
    try:
        with api.serving_until_signal():
            _start(application, options, engine)
            print_plan(application, settings, budget)
            where = "" if engine == "local" else f" on {engine.capitalize()}"
            console.print(
                f"Application 'default' is ready at {current_engine().url()}{where} "
                "(Ctrl-C to stop)",
                highlight=False,
            )
    except KeyboardInterrupt:  # during the start
        raise typer.Exit(130) from None


def _start(application: Application, options: HTTPOptions, engine: str) -> None:
    try:
        if engine == "local":
            local_engine().use(options)
            with showing_start(local_engine().status):
                api.run(application, engine=engine)
        else:
            api.run(application, engine=engine)  # the Ray engine checks before it starts
    except Exception as error:
        api.shutdown()
        if engine == "local":
            cause = error.__cause__
            needs_a_look = cause is not None and not isinstance(cause, OSError)
        else:  # errors of user code are in the workers' log records
            expected = (RuntimeError, TypeError, ValueError, RayServeException)
            needs_a_look = not isinstance(error, expected)
        if needs_a_look:
            raise  # user code raised it, so the user needs its traceback
        raise refusal(str(error)) from None


def serve_in_new_processes(
    target: str,
    host: str,
    port: int,
    application: Application,
    settings: Settings,
    *,
    reload: bool,
    workers: int,
) -> None:
    """Serve a module in uvicorn's worker processes, or in one that restarts when a file changes.

    Each process drains within its deployments' timeouts, see `engines.hosting`. A second later it
    cancels the remaining requests.
    """
    configs = [each.deployment.config for each in build(application, "default").deployments]
    graceful_s = math.ceil(max(each.graceful_shutdown_timeout_s for each in configs)) + 1
    connections = Connections(settings.http_limits)  # each process has its own
    try:
        check_address(host, port)
    except RuntimeError as error:
        raise refusal(str(error)) from None
    config = uvicorn.Config(
        target,
        host=host,
        port=port,
        reload=reload,
        workers=workers,
        timeout_graceful_shutdown=graceful_s,
        **connections.options(),
    )
    if reload:
        serve_here = partial(work_until_reloaded, config)
        ChangeReload(config, target=serve_here, sockets=[config.bind_socket()]).run()
        return
    code = run_workers(config)
    raise typer.Exit(code)
