"""`ingress run`: from the options of its command line to the applications that it serves."""

from __future__ import annotations

import inspect
import os
import ssl
import sys
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS, SSL_PROTOCOL_VERSION, create_ssl_context

from ingress.api import RunTarget
from ingress.app.config_file.loading import ConfigFile, is_config_file
from ingress.app.config_file.reading import ConfigFileError
from ingress.app.declaration.names import check_names
from ingress.cli.admin import admin_options
from ingress.cli.control_socket import RunningServer
from ingress.cli.keeping import DELAY_S, check_keep
from ingress.cli.reloading import FileState
from ingress.cli.replacing import replaced_by
from ingress.cli.run_options import HTTP, UVICORN, RunOptions
from ingress.cli.run_server import (
    budget_for,
    prepare_ray,
    read_settings,
    serve_in_new_processes,
    serve_until_ctrl_c,
    start_again_if_needed,
)
from ingress.cli.target import read_file, refusal, refusing, reporting_mistakes
from ingress.cli.terminal import LOGGING, print_plan, say
from ingress.cli.worker import Served
from ingress.config import LoggingConfig
from ingress.core.base import gil
from ingress.core.base.settings import (
    ENGINES,
    EVENT_LOOP,
    FIRST_FD,
    METRICS_ROUTES,
    TRACING,
    Settings,
    environment,
    export,
    export_threads,
    listen_fds,
    log_encoding,
)
from ingress.core.base.signals import pass_on_handlers
from ingress.core.base.standard_streams import make_lossy
from ingress.core.calls.loops import loop_class
from ingress.engines import local_engine
from ingress.exceptions import OptionNotActedOnWarning, RayServeException
from ingress.serving.http.address import Address
from ingress.serving.http.admin_address import OFF
from ingress.serving.http.server_options import ZTTP, ServerOptions
from ingress.telemetry.logs.options import LOGS
from ingress.telemetry.logs.streams import ProcessLogs


def run(**typed: Any) -> None:
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
    options, folder, file = RunOptions(**typed), Path.cwd(), None
    if is_config_file(options.target):
        options, file = options.from_here(), read_file(Path(options.target).absolute())
        check_file(
            file, name=options.name, route_prefix=options.route_prefix, factory=options.factory
        )
    elif options.watch:
        raise refusal("--watch is for a file, such as serve.yaml; for code there is --reload")
    logs = _configured_logs(options, file)
    if file is not None:
        file = replace(file, environ=environment())  # with the variables of the `--env-file`
        print_unused(file)
    server = _server_options(options, file, folder)
    variables = {} if file is None else prepare(file)
    if options.tracing:
        export({TRACING: "1"})
    if options.loop is not None:
        _choose_loop(options.loop, options.app_dir)
    settings = read_settings()
    engine = options.engine or settings.engine
    _check_engine(engine, options, server)
    if engine != "ray" and LOGS.is_logged:
        server = replace(server, uvicorn={**server.uvicorn, "access_log": False})
    _check_server(server, options)
    _check_workers(options)
    _check_parser(server)
    replaced: RunningServer | None = None
    if options.replace:
        if engine == "ray" or options.reload:
            raise refusal("--replace is for a server on the local engine, without --reload")
        replaced, server = replaced_by(server)
    served = _served(options, server, logs, file, folder)
    if engine == "ray":
        _run_on_ray(options, served, settings)
    else:
        _run_here(options, served, settings, variables, replaced)


# typer reads the parameters of a command from its signature: that of the table.
run.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    RunOptions, eval_str=True
).replace(return_annotation=None)


def _choose_loop(name: str, app_dir: Path) -> None:
    if ":" in name:
        sys.path.insert(0, str(app_dir.resolve()))
    with refusing(ValueError):
        loop_class(name)
    export({EVENT_LOOP: name})


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not `None`."""
    return {name: value for name, value in options.items() if value is not None}


def _check_engine(engine: str, options: RunOptions, server: ServerOptions) -> None:
    """Refuse an unknown engine, and options that are for the other engine."""
    if engine not in ENGINES:
        raise refusal(f"--engine must be {' or '.join(ENGINES)}, got {engine!r}")
    if engine != "ray":
        if options.address or options.working_dir:
            raise refusal("--address and --working-dir are for --engine ray")
        return
    has_admin = options.admin not in (None, OFF) or options.admin_token not in (None, OFF)
    processes = "num_replicas says how many processes a deployment has"
    metrics = (
        "leave them out: the metrics are at the port that `ray start --metrics-export-port` names"
    )
    for is_given, names, instead in (
        (options.has_new_processes, "--reload and --workers are", processes),
        (options.watch, "--watch is", "run the command again when the file changes"),
        (options.http_threads > 1, "--http-threads is", "Ray's proxies are processes"),
        (has_admin, "--admin and --admin-token are", metrics),
        (options.metrics_routes, "--metrics-routes is", "leave it out: the metrics are Ray's"),
        (options.loop, "--loop is", "leave it out: Ray starts the processes"),
        (server.drain_delay_s, "--drain-delay is", "leave it out: the proxies are Ray's"),
    ):
        if is_given:
            raise refusal(f"{names} for the local engine; on Ray, {instead}")
    local = _given(
        uds=server.uds,
        fd=server.fd,
        timeout_graceful_shutdown=server.shutdown_timeout_s,
        limit_connections=server.http.get("limit_connections"),
        min_body_rate=server.http.get("min_body_rate"),
        **server.uvicorn,
    )
    if local:
        name = _as_typed(next(iter(local.items())))
        raise refusal(f"{name} is for the local engine; on Ray, the proxies are Ray's")


def _as_typed(option: tuple[str, Any]) -> str:
    name, value = option
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _check_server(server: ServerOptions, options: RunOptions) -> None:
    """Refuse options that exclude each other, and a certificate that cannot be used.

    A host and a port in a file are overridden.
    """
    http, typed = server.http, options.handed(HTTP)
    host_or_port = typed.get("host", typed.get("port"))
    fd = "--fd" if options.fd is not None else "the socket of systemd (LISTEN_FDS)"
    wheres = {"--uds": server.uds, fd: server.fd, "--host or --port": host_or_port}
    named = [name for name, value in wheres.items() if value is not None]
    if len(named) > 1:
        raise refusal(f"{named[0]} and {named[1]} are both given; a server has one address")
    if server.fd is not None:
        # Now: later the number may be that of a socket of this process.
        with refusing(RuntimeError):
            Address(fd=server.fd).bind().close()
    tls = [name for name in (*http, *server.uvicorn) if name.startswith("ssl_")]
    certificate, key = http.get("ssl_certfile"), http.get("ssl_keyfile")
    if tls and (certificate is None or key is None):
        raise refusal(
            f"{_as_typed((tls[0], ''))} needs a certificate and its key; give both --ssl-certfile "
            "and --ssl-keyfile, or neither for plain HTTP"
        )
    if certificate is None:
        return
    given = {**http, **server.uvicorn}
    try:
        create_ssl_context(
            certfile=certificate,
            keyfile=key,
            password=given.get("ssl_keyfile_password", ""),  # `None` would ask at the terminal
            ssl_version=given.get("ssl_version", SSL_PROTOCOL_VERSION),
            cert_reqs=given.get("ssl_cert_reqs", ssl.CERT_NONE),
            ca_certs=given.get("ssl_ca_certs"),
            ciphers=given.get("ssl_ciphers"),
        )
    except (OSError, ValueError) as error:
        raise refusal(
            f"--ssl-certfile {certificate!r} and the other --ssl options cannot be used: {error}; "
            "check that the key is the certificate's, its password, and that the files are PEM"
        ) from None


def _check_workers(options: RunOptions) -> None:
    """Refuse options for processes that are not there."""
    if options.reload and options.workers > 1:
        raise refusal("--reload serves in one process; leave out --workers, or --reload")
    if options.timeout_worker_healthcheck is not None and options.workers == 1:
        raise refusal("--timeout-worker-healthcheck is for --workers; leave it out")
    if options.http_threads > 1:
        _check_http_threads(options)


def _check_http_threads(options: RunOptions) -> None:
    instead = f"leave --http-threads out, or serve with --workers {options.http_threads}"
    if gil.is_on():
        python = gil.told() or "This Python has the GIL"
        raise refusal(f"{python}. Its threads would read HTTP one at a time: {instead}")
    if options.has_new_processes:
        raise refusal(f"--http-threads is for a server that is one process: {instead}")
    if options.uds is not None or options.fd is not None or listen_fds():
        raise refusal("--http-threads needs a socket for each thread: give --host and --port")
    if sys.platform != "linux":
        raise refusal(f"only Linux distributes connections among sockets of one port: {instead}")


def _check_parser(server: ServerOptions) -> None:
    """Refuse a parser of HTTP that is not there, and limits that it does not hold."""
    parser, http2 = server.uvicorn.get("http", "auto"), server.uvicorn.get("http2", False)
    if parser not in ("auto", "h11", "httptools", ZTTP):
        raise refusal(f"--http must be auto, h11, httptools or zttp, got {parser!r}")
    if http2 and parser != ZTTP:
        raise refusal("--http2 needs --http zttp; give both, or leave out --http2")
    if parser not in ("auto", "h11") and find_spec(parser) is None:
        raise refusal(f"--http {parser} needs it: python -m pip install {parser}")
    if parser != ZTTP:
        return
    if parser not in HTTP_PROTOCOLS or (
        http2 and "http2" not in inspect.signature(uvicorn.Config).parameters
    ):
        name, since = ("--http2", "0.53") if http2 else ("--http zttp", "0.52")
        raise refusal(
            f"{name} needs uvicorn {since} or newer, and {uvicorn.__version__} is installed: "
            f"python -m pip install 'uvicorn>={since}'"
        )
    if given := sorted(_OF_CONNECTIONS & server.http.keys()):
        raise refusal(
            f"{given[0]} has no effect with --http zttp, whose connections are "
            "uvicorn's; leave out one of them"
        )
    text = (
        "with --http zttp there are no limits for connections and headers: limit_connections, "
        "max_header_bytes, header_timeout_s. Those for bodies hold for each request"
    )
    say(text, style="dim")


_OF_CONNECTIONS = {"limit_connections", "max_header_bytes", "header_timeout_s"}


def _configured_logs(options: RunOptions, file: ConfigFile | None) -> ProcessLogs:
    """Set the variables of the `--env-file`, and configure logging, as uvicorn does."""
    logs = process_logs(
        file,
        options.log_level and options.log_level.value,
        options.log_format and options.log_format.value.upper(),
        access_log=options.access_log,
        prints=options.log_config is None,
    )
    env_file = options.env_file and str(options.env_file)
    arguments = _log_arguments(options, logs)
    try:
        uvicorn.Config("", access_log=options.access_log, env_file=env_file, **arguments)
    except Exception as error:  # a file that is no configuration may fail in any way
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        name = arguments["log_config"]
        raise refusal(f"--log-config {name!r} cannot be used: {problem}") from None
    logs.adopt()
    return logs


def _log_arguments(options: RunOptions, logs: ProcessLogs) -> dict[str, Any]:
    is_given = "log_level" in logs.config.model_fields_set
    return {
        "log_config": LOGGING if options.log_config is None else str(options.log_config),
        "log_level": logs.config.log_level if is_given else None,
    }


def _server_options(options: RunOptions, file: ConfigFile | None, folder: Path) -> ServerOptions:
    http = options.handed(HTTP)
    if options.metrics_routes is not None:
        export({METRICS_ROUTES: str(options.metrics_routes)})
    with refusing(ValueError):
        admin = admin_options(options.admin, options.admin_token)
    return ServerOptions(
        http=http if file is None else {**file.http_options(folder), **http},
        origins={} if file is None else file.process_origins(http),
        uvicorn={
            **({} if options.access_log else {"access_log": False}),
            **options.handed(UVICORN),
        },
        uds=None if options.uds is None else os.path.abspath(options.uds),
        fd=FIRST_FD if options.fd is None and listen_fds() else options.fd,
        shutdown_timeout_s=options.timeout_graceful_shutdown,
        drain_delay_s=options.drain_delay,
        serves_http=True,
        has_own_server=not options.has_new_processes,
        http_threads=options.http_threads,
        admin=admin,
    )


def _served(
    options: RunOptions,
    server: ServerOptions,
    logs: ProcessLogs,
    file: ConfigFile | None,
    folder: Path,
) -> Served:
    name, route_prefix = options.name or "default", options.route_prefix or "/"
    with refusing(ValueError, RayServeException):
        check_names(name, route_prefix)
    return Served(
        options.target,
        options.app_dir.absolute(),
        name,
        route_prefix,
        server,
        is_factory=options.factory,
        arguments=builder_arguments(options.arguments, file, is_factory=options.factory),
        logs=logs,
        file=file,
        http=options.handed(HTTP),
        folder=folder,
    )


def _run_on_ray(options: RunOptions, served: Served, settings: Settings) -> None:
    grpc = None if served.file is None else served.file.config.grpc_options
    prepare_ray(
        options.address,
        options.working_dir,
        served.server,
        grpc.model_dump() if grpc is not None and grpc.changed() else None,
    )
    if served.file is not None:
        served = replace(served, file=replace(served.file, on_cluster=True))
    serve_until_ctrl_c(load_targets(served), served, settings, None, "ray", None, None)


def _run_here(
    options: RunOptions,
    served: Served,
    settings: Settings,
    variables: dict[str, str | None],
    replaced: RunningServer | None,
) -> None:
    local_engine().use(served.server)
    pass_on_handlers()
    targets = load_targets(served)
    check_keep(options.keep or (), served, reload=options.reload)
    file = served.file
    state = None if file is None else FileState(file, served.app_dir, variables, served.folder)
    budget = budget_for([each.target for each in targets], settings, processes=options.workers)
    export_threads(budget.variables)
    if not options.has_new_processes:
        start_again_if_needed(budget, served.folder, variables)
        serve_until_ctrl_c(
            targets, served, settings, budget, "local", state, replaced, watches=options.watch
        )
        return
    print_plan([each.target for each in targets], settings, budget)
    config = {
        **_log_arguments(options, served.logs),
        **_given(timeout_worker_healthcheck=options.timeout_worker_healthcheck),
        "reload": options.reload,
        "workers": options.workers,
    }
    if options.reload and served.file is not None:
        config["reload_includes"] = ["*.py", served.file.path.name]
    if options.keep:
        config["reload_delay"] = DELAY_S
    serve_in_new_processes(
        targets,
        served,
        settings,
        config,
        state,
        replaced,
        watches=options.watch,
        keep=options.keep or (),
    )


def check_file(file: ConfigFile, **options: Any) -> None:
    """Refuse options of the command line that each application of a file has."""
    for name, value in options.items():
        if value:
            raise refusal(
                f"--{name.replace('_', '-')} is for MODULE:APP; in {file.path.name}, each "
                "application has its own"
            )


def builder_arguments(
    words: list[str] | None, file: ConfigFile | None, *, is_factory: bool
) -> dict[str, str] | None:
    """Return the arguments KEY=VALUE of a builder, `None` if there are none."""
    if not words:
        return None
    if file is not None:
        raise refusal(f"{words[0]!r}: in {file.path.name}, each application has its own `args`")
    if is_factory:
        raise refusal(
            f"{words[0]!r} is for a builder, which has one parameter; leave out --factory"
        )
    for word in words:
        key, _, value = word.partition("=")
        if not key or not value:  # the words of Ray 2.60.0, scripts.py
            raise refusal(
                f"invalid application argument {word!r}, it must be of the form KEY=VALUE"
            )
    return dict(word.split("=", 1) for word in words)


def print_unused(file: ConfigFile) -> None:
    """Print, in one line of standard error, the options that only a cluster acts on."""
    pods = ["the pods of the RayService, their images and their env"] if file.top.is_inside else []
    if unused := [*pods, *file.config.for_a_cluster()]:
        text = f"Without effect here, only on a cluster: {'; '.join(unused)}"
        typer.echo(f"{file.path.name}: {text}", err=True)


def process_logs(
    file: ConfigFile | None,
    level: str | None,
    encoding: str | None,
    *,
    access_log: bool,
    prints: bool,
) -> ProcessLogs:
    """Return the logging of the command line, else of the file, else of the environment.

    `prints` is false with a `--log-config`.
    """
    options: dict[str, Any] = {}
    with refusing(ValueError):
        if (named := log_encoding()) is not None:
            options["encoding"] = named
    if file is not None:
        config = file.config.logging
        options |= {name: getattr(config, name) for name in config.model_fields_set}
    if encoding is not None:
        if not prints:
            raise refusal("--log-format and --log-config are both given; the file has the format")
        options["encoding"] = encoding
    if level is not None:
        options["log_level"] = level.upper()
    is_logged = access_log and options.get("enable_access_log", True)
    return ProcessLogs(LoggingConfig(**options), is_logged, prints)


@refusing(ConfigFileError)
def prepare(file: ConfigFile) -> dict[str, str | None]:
    """Set the variables and the folder of a file. Returns the variables' previous values.

    Ends the program if its applications disagree.
    """
    return file.prepare()


def load_targets(served: Served) -> list[RunTarget]:
    """Import the applications. Ends the program on an error."""
    with reporting_mistakes(served.target):
        targets = list(served.targets())
    if served.file is not None:  # they are named: the file's by `print_unused`, the code's just now
        warnings.filterwarnings("ignore", category=OptionNotActedOnWarning)
    return targets
