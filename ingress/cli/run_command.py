"""`ingress run` and its options. Those of uvicorn have uvicorn's names, and are passed on to it."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn

from ingress.base.settings import TRACING, export, export_threads
from ingress.base.standard_streams import make_lossy
from ingress.cli.reloading import FileState
from ingress.cli.run_checks import check_admin, check_engine, check_server, check_workers, given
from ingress.cli.run_file import (
    builder_arguments,
    check_file,
    load_targets,
    prepare,
    print_unused,
    process_logs,
)
from ingress.cli.serving import (
    budget_for,
    prepare_ray,
    read_settings,
    serve_in_new_processes,
    serve_until_ctrl_c,
    start_again_if_needed,
)
from ingress.cli.target import AppDir, FileOrTarget, read_file, refusal
from ingress.cli.terminal import LOGGING, print_plan
from ingress.cli.worker import Served
from ingress.config_file.loading import is_config_file
from ingress.declaration.names import check_names
from ingress.engines import local_engine
from ingress.exceptions import RayServeException
from ingress.http.server_options import ServerOptions
from ingress.logs.options import LOGS


class LogLevel(StrEnum):
    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"
    TRACE = "trace"


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


def _option(*words: Any, **more: Any) -> Any:
    return typer.Option(*words, show_default=False, **more)


def _file(*words: Any, **more: Any) -> Any:
    return _option(*words, metavar="FILE", exists=True, dir_okay=False, readable=True, **more)


_APPLICATION = "Application"
_ADDRESS = "Address"
_TLS = "TLS"
_LOGS = "Logs"
_ADMIN = "Metrics"
_LIMITS = "Limits"
_PROCESSES = "Processes"
_RAY = "Ray"


def run(
    target: FileOrTarget,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Arguments of APP, if it is a function that builds the application from them.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        _option(help="Name of the application.  [default: default]", rich_help_panel=_APPLICATION),
    ] = None,
    route_prefix: Annotated[
        str | None,
        _option(
            metavar="PATH",
            help="Path under which it is served.  [default: /]",
            rich_help_panel=_APPLICATION,
        ),
    ] = None,
    factory: Annotated[
        bool,
        _option(
            "--factory",
            help="APP is a function without parameters that returns the application.",
            rich_help_panel=_APPLICATION,
        ),
    ] = False,
    app_dir: AppDir = Path("."),
    env_file: Annotated[
        Path | None,
        _file(
            help="Set the variables of this file, unless they are set, before MODULE is imported.",
            rich_help_panel=_APPLICATION,
        ),
    ] = None,
    host: Annotated[
        str | None,
        _option(help="Address to listen on.  [default: 127.0.0.1]", rich_help_panel=_ADDRESS),
    ] = None,
    port: Annotated[
        int | None,
        _option(
            min=0,
            max=65535,
            help="Port to listen on; 0 lets the system choose.  [default: 8000]",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    uds: Annotated[
        str | None,
        _option(
            metavar="PATH",
            help="Listen on this Unix domain socket instead.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    fd: Annotated[
        int | None,
        _option(
            min=0,
            metavar="NUMBER",
            help="Listen on the socket of this inherited file descriptor instead.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    root_path: Annotated[
        str | None,
        _option(
            metavar="PATH",
            help="Path that a proxy in front removes: ASGI's root_path.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    proxy_headers: Annotated[
        bool,
        typer.Option(
            "--proxy-headers/--no-proxy-headers",
            help="Take scheme and client from X-Forwarded-Proto and X-Forwarded-For.",
            rich_help_panel=_ADDRESS,
        ),
    ] = True,
    forwarded_allow_ips: Annotated[
        str | None,
        _option(
            metavar="ADDRESSES",
            help="Proxies whose headers are believed: addresses, networks, paths of sockets, or *."
            "  [default: FORWARDED_ALLOW_IPS, or 127.0.0.1,::1]",
            rich_help_panel=_ADDRESS,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, _file(help="Key of the certificate.", rich_help_panel=_TLS)
    ] = None,
    ssl_certfile: Annotated[
        Path | None, _file(help="Certificate; the server speaks HTTPS.", rich_help_panel=_TLS)
    ] = None,
    ssl_keyfile_password: Annotated[
        str | None, _option(metavar="TEXT", help="Password of the key.", rich_help_panel=_TLS)
    ] = None,
    ssl_version: Annotated[
        int | None,
        _option(metavar="NUMBER", help="Protocol, a number of Python's ssl.", rich_help_panel=_TLS),
    ] = None,
    ssl_cert_reqs: Annotated[
        int | None,
        _option(
            min=0,
            max=2,
            help="Certificates of clients: 0 none, 1 optional, 2 required.  [default: 0]",
            rich_help_panel=_TLS,
        ),
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None, _file(help="Authorities of clients' certificates.", rich_help_panel=_TLS)
    ] = None,
    ssl_ciphers: Annotated[
        str | None,
        _option(metavar="LIST", help="Ciphers, as OpenSSL names them.", rich_help_panel=_TLS),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        _option(
            help="Least level of the loggers `ingress` and `uvicorn`."
            "  [default: info; uvicorn: warning]",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    log_format: Annotated[
        LogFormat | None,
        _option(
            help="Format of all lines on standard output and error."
            "  [default: text, and JSON for requests unless on a terminal]",
            rich_help_panel=_LOGS,
        ),
    ] = None,
    log_config: Annotated[
        Path | None,
        _file(help="Configuration of logging: .json, .yaml or .ini.", rich_help_panel=_LOGS),
    ] = None,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log/--no-access-log", help="Log each request.", rich_help_panel=_LOGS
        ),
    ] = True,
    tracing: Annotated[
        bool,
        _option(
            "--tracing",
            help="Make OpenTelemetry spans of calls and batches.  [default: INGRESS_TRACING]",
            rich_help_panel=_LOGS,
        ),
    ] = False,
    admin: Annotated[
        str | None,
        _option(
            metavar="ADDRESS",
            help="Address of the admin listener, with the page and /metrics: HOST:PORT, the "
            "path of a Unix socket, or off.  [default: INGRESS_ADMIN, or the first free port from "
            "127.0.0.1:8265 on]",
            rich_help_panel=_ADMIN,
        ),
    ] = None,
    admin_token: Annotated[
        str | None,
        _option(
            metavar="TEXT",
            help="Token that its clients must send, as Authorization: Bearer; required if other "
            "machines reach it.  [default: INGRESS_ADMIN_TOKEN]",
            rich_help_panel=_ADMIN,
        ),
    ] = None,
    limit_connections: Annotated[
        int | None,
        _option(
            min=1,
            metavar="N",
            help="Connections at once, in each process; further ones are answered 503 and closed."
            "  [default: as many as the process may open files]",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    min_body_rate: Annotated[
        float | None,
        _option(
            min=0,
            metavar="BYTES",
            help="Refuse a request whose body comes with fewer bytes a second; 0 for any rate."
            "  [default: 240]",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    timeout_keep_alive: Annotated[
        int | None,
        _option(
            min=1,
            metavar="SECONDS",
            help="Close a connection that is idle so long.  [default: 90]",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    timeout_graceful_shutdown: Annotated[
        int | None,
        _option(
            min=0,
            metavar="SECONDS",
            help="Time for requests in flight at the end."
            "  [default: graceful_shutdown_timeout_s of the deployments, 20]",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    drain_delay: Annotated[
        float,
        _option(
            min=0,
            metavar="SECONDS",
            help="Time to take requests after SIGTERM, while /-/readyz fails.  [default: 0]",
            rich_help_panel=_LIMITS,
        ),
    ] = 0.0,
    reload: Annotated[
        bool, _option("--reload", help="Restart when a file changes.", rich_help_panel=_PROCESSES)
    ] = False,
    watch: Annotated[
        bool,
        _option(
            "--watch",
            help="Apply FILE when it changes, as SIGHUP and `ingress reload` do.",
            rich_help_panel=_PROCESSES,
        ),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=1, help="Processes; each has all the replicas.", rich_help_panel=_PROCESSES
        ),
    ] = 1,
    timeout_worker_healthcheck: Annotated[
        int | None,
        _option(
            min=5,
            metavar="SECONDS",
            help="Replace a worker that is silent so long.  [default: 30]",
            rich_help_panel=_PROCESSES,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        _option(help="local: this machine; ray: a Ray cluster.  [default: local]"),
    ] = None,
    address: Annotated[
        str | None,
        _option(
            metavar="HOST:PORT",
            help="The Ray cluster; without it, RAY_ADDRESS, or one is started on this machine.",
            rich_help_panel=_RAY,
        ),
    ] = None,
    working_dir: Annotated[
        str | None,
        _option(
            metavar="FOLDER",
            help="What Ray's workers get a copy of; for clusters of several machines.",
            rich_help_panel=_RAY,
        ),
    ] = None,
) -> None:
    """Serve an application, or those of a file, over HTTP until Ctrl-C.

    [dim]ingress run main:hello --port 9000[/dim]
    [dim]ingress run main:build model=large device=cpu[/dim]
    [dim]ingress run serve.yaml[/dim]

    The file is that of Ray's `serve deploy`; `ingress build` writes one.

    Ctrl-C (or SIGTERM) drains: requests in flight may end, new requests are refused.
    A second signal stops at once. Host, port and the other options here take
    precedence over those of `serve.start` in MODULE.

    Sets OMP_NUM_THREADS and similar variables, if they are not set, to the share
    of the cores that each computing call has.
    """
    make_lossy()
    before = Path.cwd()
    variables: dict[str, str | None] = {}
    if is_config_file(target):  # its `working_dir` changes the folder
        log_config, ssl_keyfile, ssl_certfile, ssl_ca_certs = (
            None if each is None else each.absolute()
            for each in (log_config, ssl_keyfile, ssl_certfile, ssl_ca_certs)
        )
    file = read_file(Path(target).absolute()) if is_config_file(target) else None
    if file is not None:
        check_file(file, name=name, route_prefix=route_prefix, factory=factory)
    elif watch:
        raise refusal("--watch is for a file, such as serve.yaml; for code there is --reload")
    process = process_logs(
        file,
        log_level and log_level.value,
        log_format and log_format.value.upper(),
        access_log=access_log,
        prints=log_config is None,
    )
    level = process.config.log_level if "log_level" in process.config.model_fields_set else None
    logs = {"log_config": _text(log_config) or LOGGING, "log_level": level}
    _configure(logs, access_log=access_log, env_file=_text(env_file))
    process.adopt()
    if file is not None:
        print_unused(file)
    several = reload or workers > 1
    http = given(
        host=host,
        port=port,
        root_path=root_path,
        keep_alive_timeout_s=timeout_keep_alive,
        limit_connections=limit_connections,
        min_body_rate=min_body_rate,
        ssl_keyfile=_text(ssl_keyfile),
        ssl_certfile=_text(ssl_certfile),
        ssl_keyfile_password=ssl_keyfile_password,
        ssl_ca_certs=_text(ssl_ca_certs),
    )
    server = ServerOptions(
        http=http if file is None else {**file.http_options(before), **http},
        origins={} if file is None else file.process_origins(http),
        uvicorn=given(
            access_log=None if access_log else False,
            proxy_headers=None if proxy_headers else False,
            forwarded_allow_ips=forwarded_allow_ips,
            ssl_version=ssl_version,
            ssl_cert_reqs=ssl_cert_reqs,
            ssl_ciphers=ssl_ciphers,
        ),
        uds=None if uds is None else os.path.abspath(uds),
        fd=fd,
        shutdown_timeout_s=timeout_graceful_shutdown,
        drain_delay_s=drain_delay,
        serves_http=True,
        has_own_server=not several,
        admin=check_admin(admin, admin_token),
    )
    if file is not None:
        variables = prepare(file)
    if tracing:
        export({TRACING: "1"})
    settings = read_settings()
    engine = engine or settings.engine
    check_engine(
        engine,
        server,
        reload=reload,
        watch=watch,
        workers=workers,
        ray_only=[address, working_dir],
        admin=[admin, admin_token],
    )
    if engine != "ray" and LOGS.is_logged:
        server = replace(server, uvicorn={**server.uvicorn, "access_log": False})
    check_server(server)
    check_workers(timeout_worker_healthcheck, reload=reload, workers=workers)
    name, route_prefix = name or "default", route_prefix or "/"
    try:
        check_names(name, route_prefix)
    except (ValueError, RayServeException) as error:
        raise refusal(str(error)) from None
    served = Served(
        target,
        app_dir.absolute(),
        name,
        route_prefix,
        server,
        is_factory=factory,
        arguments=builder_arguments(arguments, file, is_factory=factory),
        logs=process,
        file=file,
        http=http,
        folder=before,
    )
    if engine == "ray":
        prepare_ray(address, working_dir, server)
        if file is not None:
            served = replace(served, file=replace(file, on_cluster=True))
        targets = load_targets(served)
        serve_until_ctrl_c(targets, served, settings, None, engine)
        return
    local_engine().use(server)
    targets = load_targets(served)
    state = None
    if file is not None:
        state = FileState(file, served.app_dir, variables, before)
    budget = budget_for([each.target for each in targets], settings, processes=workers)
    to_set = budget.variables
    export_threads(to_set)
    if not several:
        start_again_if_needed(budget, to_set, before)
        serve_until_ctrl_c(targets, served, settings, budget, engine, state, watches=watch)
        return
    print_plan([each.target for each in targets], settings, budget)
    config = {
        **logs,
        **given(timeout_worker_healthcheck=timeout_worker_healthcheck),
        "reload": reload,
        **({"reload_includes": ["*.py", file.path.name]} if reload and file is not None else {}),
        "workers": workers,
    }
    serve_in_new_processes(targets, served, settings, config, state, watches=watch)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _configure(logs: dict[str, Any], *, access_log: bool, env_file: str | None) -> None:
    """Set the variables of the file, and configure logging, as uvicorn does."""
    try:
        uvicorn.Config("", access_log=access_log, env_file=env_file, **logs)
    except Exception as error:  # a file that is no configuration may fail in any way
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise refusal(f"--log-config {logs['log_config']!r} cannot be used: {problem}") from None
