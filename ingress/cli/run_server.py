"""The work of `ingress run` on either engine, with parts that other commands share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import typer
import uvicorn
from uvicorn.supervisors import ChangeReload

from ingress import api
from ingress.api import RunTarget
from ingress.app.declaration.build import BuiltApplication, build
from ingress.app.declaration.cluster_options import check_here
from ingress.app.declaration.declaration import Application
from ingress.cli.admin import Admin, resolved
from ingress.cli.control_socket import Command, RunningServer, control_socket
from ingress.cli.keeping import KeepingProcess, KeepingReload
from ingress.cli.reloading import (
    FileState,
    Reloads,
    WorkersAddress,
    reload_one_process,
    reload_workers,
)
from ingress.cli.replacing import (
    handover_of_one_process,
    handover_of_workers,
    take_over,
)
from ingress.cli.sd_notify import READY, feed_watchdog, notify
from ingress.cli.server_commands import change, commands_of, jobs
from ingress.cli.target import mistake, refusal, refusing
from ingress.cli.terminal import console, print_plan, ready_lines, say, showing_start
from ingress.cli.worker import Served, run_all, work_until_reloaded
from ingress.cli.worker_commands import WorkersCommands
from ingress.cli.workers import SILENCE_S, Supervisor
from ingress.config import LoggingConfig
from ingress.core.base.ctrl_c import INTERRUPTED, say_stopped
from ingress.core.base.settings import ENGINE, OMP_NUM_THREADS, Settings, event_loop, export
from ingress.engines import current_engine, local_engine, ray_engine
from ingress.exceptions import RayServeException
from ingress.observe.inspection.budget import ThreadBudget, thread_budget
from ingress.observe.live.observer import Observer, parts_of
from ingress.serving.http.address import SharedPort, url_of
from ingress.serving.http.admin_address import OFF, AdminOptions
from ingress.serving.http.server_options import ServerOptions
from ingress.telemetry.mistakes import format_failed_start

NEW_EVENT_LOOP = "ingress.core.calls.loops:new_event_loop"  # as uvicorn takes it


@refusing(ValueError)
def read_settings() -> Settings:
    return Settings.from_environment()


@refusing(Exception)
def budget_for(
    applications: Sequence[Application], settings: Settings, *, processes: int
) -> ThreadBudget:
    # The start warns of options without effect.
    built = [build(each, "default", acts_on_all=True) for each in applications]
    deployments = tuple(chain.from_iterable(each.deployments for each in built))
    for each in deployments:
        check_here(each)
    return thread_budget(BuiltApplication("default", deployments), settings, processes=processes)


_READ_AT_IMPORT = {"cv2", "jax", "numexpr", "numpy", "sklearn", "tensorflow", "torch"}


def start_again_if_needed(
    budget: ThreadBudget,
    folder: Path | None = None,
    variables: Mapping[str, str | None] | None = None,
) -> None:
    """Restart the process if a library has read its number of threads before it was set.

    The number of replicas is known only after the import of the user's module, which often imports
    NumPy. The new process has the variables from its start, so it does not restart again. On
    Windows no process can replace itself by another.

    `folder` is the current folder of the command, if a `working_dir` has replaced it since.
    `variables` are the values that a file's `env_vars` have replaced.
    """
    read = sorted(_READ_AT_IMPORT & sys.modules.keys())
    is_too_many = OMP_NUM_THREADS in budget.variables and budget.threads < int(budget.cores)
    if read and is_too_many and sys.platform != "win32":
        verb = "was" if len(read) == 1 else "were"
        what = f"{' and '.join(read)} {verb} imported with a thread for every core"
        how = f"starting again with {OMP_NUM_THREADS}={budget.threads}"
        say(f"{what}: {how}", style="dim")
        if folder is not None:
            os.chdir(folder)
        export(variables or {})
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@refusing(RuntimeError)
def prepare_ray(
    address: str | None,
    working_dir: str | None,
    server: ServerOptions,
    grpc: dict[str, object] | None = None,
) -> None:
    """Choose the Ray engine, before the module is imported: it may call `serve.start`."""
    ray_engine().use(address, working_dir, server)
    if grpc is not None:
        ray_engine().use_grpc(grpc)
    export({ENGINE: "ray"})


def serve_until_ctrl_c(
    targets: Sequence[RunTarget],
    served: Served,
    settings: Settings,
    budget: ThreadBudget | None,
    engine: str,
    state: FileState | None,
    replaced: RunningServer | None,
    *,
    watches: bool = False,
) -> None:
    """Serve in this process until a signal. `state` is that of the file, if there is one.

    `replaced` is the server whose place this one takes.
    """
    handover = handover_of_one_process()
    reload = None if state is None else partial(reload_one_process, state)
    reloads = Reloads(reload, state.file if state is not None and watches else None)
    # On Ray, the applications are the cluster's: `ingress status --address`.
    is_local = engine == "local"
    observer = Observer(partial(parts_of, local_engine()))
    table = {
        **commands_of(observer, change, jobs),
        **handover.table(),
        "reload": reloads.command,
    }
    commands = table if is_local else None
    hang_up = reloads.ask if is_local else None
    admin_options = resolved(served.server.admin) if is_local else AdminOptions(OFF)
    admin = Admin(local_engine().snapshot, admin_options, observer)
    handover.stop_admin = admin.close
    try:
        # The socket outlives the drain, which takes place when the last context ends.
        # So does the admin listener, for the last scrape.
        with (
            controlled(commands, observer),
            closing(admin),
            reloads.running(),
            api.serving_until_signal(hang_up),
        ):
            _listen(admin, replaced, is_ready=False)
            _start(targets, engine, served.logs.config)
            if is_local and served.server.shares_port:
                # Workers that retire close sockets of their own: connections need another before.
                local_engine().begin_http()
            _listen(admin, replaced, is_ready=True)
            if is_local:
                local_engine().begin_http()
                if (server := local_engine().http.server) is not None:
                    feed_watchdog(server.home.loop)
            print_plan([each.target for each in targets], settings, budget)
            where = "" if engine == "local" else f" on {engine.capitalize()}"
            say(ready_lines(targets, current_engine().url(), where), admin.line)
            notify(READY)
            reloads.begin()
    except KeyboardInterrupt:  # during the start
        say_stopped()
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def controlled(commands: Mapping[str, Command] | None, observer: Observer) -> Iterator[None]:
    """Answer the commands of a control socket, if there are any, and print its path."""
    if commands is None:
        yield
        return
    with control_socket(commands) as path:
        if path is not None:
            say(f"control socket {path}", style="dim")
        with observer:
            yield


def _listen(admin: Admin, replaced: RunningServer | None, *, is_ready: bool) -> None:
    """Have the admin listener begin, before the server starts.

    If the server takes the place of another one, which has the address until it retires, both
    happen once this one is ready. Ends the program if the address is busy.
    """
    if is_ready is (replaced is not None):
        if replaced is not None:
            take_over(replaced)
        try:
            admin.listen()
        except RuntimeError as error:
            raise refusal(f"--admin: {error}") from None


def _start(targets: Sequence[RunTarget], engine: str, logs: LoggingConfig) -> None:
    # Here, the process's own logging is for all deployments already.
    logging_config = logs if engine == "ray" and logs.model_fields_set else None
    try:
        if engine == "local":
            with showing_start(local_engine().status):
                run_all(targets)
        else:
            console.print("starting on Ray, which takes a while", style="dim")
            run_all(targets, engine, logging_config)  # the Ray engine checks before it starts
    except Exception as error:
        api.shutdown()
        if engine == "local":
            if error.__cause__ is not None and not isinstance(error.__cause__, OSError):
                raise mistake(format_failed_start(error)) from None
        # Errors of user code are in the workers' log records.
        elif not isinstance(error, RuntimeError | TypeError | ValueError | RayServeException):
            raise
        raise refusal(str(error)) from None


def serve_in_new_processes(
    targets: Sequence[RunTarget],
    served: Served,
    settings: Settings,
    config: Mapping[str, Any],
    state: FileState | None,
    replaced: RunningServer | None,
    *,
    watches: bool = False,
    keep: Sequence[str] = (),
) -> None:
    """Serve applications in worker processes, or in one that restarts when a file changes.

    `config` are arguments of `uvicorn.Config`; `keep` are modules that stay when code changes. Each
    process drains within its deployments' timeouts, see `engines.hosting`. A second later it
    cancels the remaining requests.
    """
    server = served.server
    drain_s = server.shutdown_timeout_s
    if drain_s is None:
        built = [build(each.target, each.name).deployments for each in targets]
        configs = [each.deployment.config for each in chain.from_iterable(built)]
        drain_s = max(each.graceful_shutdown_timeout_s for each in configs)
    options = local_engine().http.options  # with those of `serve.start` in the module
    limits = options.limits(settings.http_limits)  # each process has its own
    address = server.address(options, settings)
    with refusing(RuntimeError):
        bound = address.bind()
    is_own = not settings.run_user_code_in_separate_thread or event_loop() != "auto"
    made = uvicorn.Config(
        served.target,
        timeout_graceful_shutdown=math.ceil(drain_s) + 1,
        # A loop that runs user code reports calls from other threads.
        loop=NEW_EVENT_LOOP if is_own else "auto",
        **{"timeout_worker_healthcheck": SILENCE_S, **config},
        **server.uvicorn_arguments(options, limits),
    )
    url = url_of(bound, is_tls=made.is_ssl)
    shared: SharedPort | None = None
    try:
        if made.reload:
            bound.set_inheritable(True)
            line = ready_lines(targets, url)
            keeping = partial(KeepingProcess, keep) if keep else None
            (KeepingReload if keep else ChangeReload)(
                made,
                target=partial(work_until_reloaded, made, served, line, keeping),
                sockets=[bound],
            ).run()
            return
        line = ready_lines(targets, url, f", in {made.workers} processes")
        shared = SharedPort(bound, address)
        place = WorkersAddress(served, shared, options, settings)
        code = _supervise(made, served, shared, url, line, state, place, replaced, watches=watches)
    finally:
        if shared is None or not shared.is_handed_over:
            address.clean_up()
    raise typer.Exit(code)


def _supervise(
    config: uvicorn.Config,
    served: Served,
    port: SharedPort,
    url: str | None,
    line: str,
    state: FileState | None,
    place: WorkersAddress,
    replaced: RunningServer | None,
    *,
    watches: bool,
) -> int:
    """Serve in worker processes. Returns the exit code."""

    def when_ready() -> None:
        _listen(admin, replaced, is_ready=True)
        say(line, admin.line)
        notify(READY)
        reloads.begin()

    options = resolved(served.server.admin)
    served = replace(served, server=replace(served.server, admin=options))
    supervisor = Supervisor(config, served, port, when_ready, lambda: reloads.ask())
    commands = WorkersCommands(supervisor, url)
    reload = None if state is None else partial(reload_workers, state, commands, place)
    reloads = Reloads(reload, state.file if state is not None and watches else None)
    handover = handover_of_workers(supervisor, port)
    table = {
        **commands_of(commands.observer, commands.change, commands.jobs),
        **handover.table(),
        "reload": reloads.command,
    }
    admin = Admin(commands.snapshot, options, commands.observer)
    handover.stop_admin = admin.close
    with (
        controlled(table, commands.observer),
        closing(admin),
        reloads.running(),
    ):
        _listen(admin, replaced, is_ready=False)
        return supervisor.run()
