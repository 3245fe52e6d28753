"""The work of `ingress run` on either engine, with parts that other commands share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import typer
import uvicorn
from uvicorn.supervisors import ChangeReload

from ingress import api
from ingress.base.settings import OMP_NUM_THREADS, Settings
from ingress.cli.target import mistake, refusal
from ingress.cli.terminal import console, print_plan, ready_line, showing_start
from ingress.cli.worker import Served, work_until_reloaded
from ingress.cli.workers import SILENCE_S, run_workers
from ingress.config import HTTPOptions
from ingress.declaration.build import build
from ingress.declaration.declaration import Application
from ingress.engines import current_engine, local_engine, ray_engine
from ingress.exceptions import RayServeException
from ingress.execution.mistakes import format_failed_start
from ingress.http.address import url_of
from ingress.http.shared_port import SharedPort
from ingress.inspection.budget import ThreadBudget, start_again, thread_budget


def read_settings() -> Settings:
    try:
        return Settings.from_environment()
    except ValueError as error:
        raise refusal(str(error)) from None


def budget_for(application: Application, settings: Settings, *, processes: int) -> ThreadBudget:
    try:
        built = build(application, "default", acts_on_all=True)  # the start warns if it does not
        return thread_budget(built, settings, processes=processes)
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


def prepare_ray(address: str | None, working_dir: str | None, options: HTTPOptions) -> None:
    try:
        ray_engine().use(address, working_dir, options)
    except RuntimeError as error:
        raise refusal(str(error)) from None
    console.print("[dim]starting on Ray, which takes a while[/dim]", highlight=False)


def serve_until_ctrl_c(
    application: Application,
    served: Served,
    settings: Settings,
    budget: ThreadBudget | None,
    engine: str,
) -> None:
    try:
        with api.serving_until_signal():
            _start(application, served, engine)
            print_plan(application, settings, budget)
            where = "" if engine == "local" else f" on {engine.capitalize()}"
            line = ready_line(served.name, served.url(current_engine().url()), where)
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    except KeyboardInterrupt:  # during the start
        raise typer.Exit(130) from None


def _start(application: Application, served: Served, engine: str) -> None:
    run = partial(
        api.run, application, name=served.name, route_prefix=served.route_prefix, engine=engine
    )
    try:
        if engine == "local":
            with showing_start(local_engine().status):
                run()
        else:
            run()  # the Ray engine checks before it starts
    except Exception as error:
        api.shutdown()
        if engine == "local":
            cause = error.__cause__
            needs_a_look = cause is not None and not isinstance(cause, OSError)
        else:  # errors of user code are in the workers' log records
            expected = (RuntimeError, TypeError, ValueError, RayServeException)
            needs_a_look = not isinstance(error, expected)
        if needs_a_look and engine == "local":
            raise mistake(format_failed_start(error)) from None
        if needs_a_look:
            raise
        raise refusal(str(error)) from None


def serve_in_new_processes(
    application: Application, served: Served, settings: Settings, config: Mapping[str, Any]
) -> None:
    """Serve a module in worker processes, or in one that restarts when a file changes.

    `config` are arguments of `uvicorn.Config`. Each process drains within its deployments'
    timeouts, see `engines.hosting`. A second later it cancels the remaining requests.
    """
    server = served.server
    drain_s = server.shutdown_timeout_s
    if drain_s is None:
        configs = [each.deployment.config for each in build(application, "default").deployments]
        drain_s = max(each.graceful_shutdown_timeout_s for each in configs)
    options = local_engine().http.options  # with those of `serve.start` in the module
    limits = options.limits(settings.http_limits)  # each process has its own
    address = server.address(options, settings)
    try:
        bound = address.bind()
    except RuntimeError as error:
        raise refusal(str(error)) from None
    made = uvicorn.Config(
        served.target,
        timeout_graceful_shutdown=math.ceil(drain_s) + 1,
        **{"timeout_worker_healthcheck": SILENCE_S, **config},
        **server.uvicorn_arguments(options, limits),
    )
    url = served.url(url_of(bound, is_tls=made.is_ssl))
    try:
        if made.reload:
            bound.set_inheritable(True)
            line = ready_line(served.name, url)
            ChangeReload(
                made, target=partial(work_until_reloaded, made, served, line), sockets=[bound]
            ).run()
            return
        line = ready_line(served.name, url, f", in {made.workers} processes")
        code = run_workers(
            made,
            served,
            SharedPort(bound, address),
            lambda: console.print(line, highlight=False, soft_wrap=True, markup=False),
        )
    finally:
        address.clean_up()
    raise typer.Exit(code)
