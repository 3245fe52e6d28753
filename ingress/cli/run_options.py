"""The options of `ingress run`, in one table: names, types, defaults, help texts, and their ways.

typer reads the fields of `RunOptions` as the parameters of a command. A mark beside an option says
that it is handed on under its own or another name: `HTTP` to `HTTPOptions`, `UVICORN` to
`uvicorn.Config`. uvicorn's options have uvicorn's names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, get_type_hints

import typer

from ingress.cli.target import AppDir, FileOrTarget, finite


class LogLevelName(StrEnum):
    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"
    TRACE = "trace"


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


class Way(NamedTuple):
    """The receiver of an option, and its name there if it has another one."""

    receiver: str
    name: str = ""


HTTP, UVICORN = Way("HTTPOptions"), Way("uvicorn.Config")


def _option(panel: str | None, *words: Any, **more: Any) -> Any:
    return typer.Option(*words, rich_help_panel=panel, **{"show_default": False, **more})


_file = partial(_option, metavar="FILE", exists=True, dir_okay=False, readable=True)

_APPLICATION = "Application"
_ADDRESS = "Address"
_PROXY = "Proxy in front"
_TLS = "TLS"
_LOGS = "Logs"
_ADMIN = "Metrics"
_LIMITS = "Limits"
_PROCESSES = "Processes"
_RAY = "Ray"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one command line."""

    target: FileOrTarget
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Arguments of APP, if it is a function that builds the application from them.",
            show_default=False,
        ),
    ] = None
    name: Annotated[
        str | None, _option(_APPLICATION, help="Name of the application.  [default: default]")
    ] = None
    route_prefix: Annotated[
        str | None,
        _option(_APPLICATION, metavar="PATH", help="Path under which it is served.  [default: /]"),
    ] = None
    factory: Annotated[
        bool,
        _option(
            _APPLICATION,
            "--factory",
            help="APP is a function without parameters that returns the application.",
        ),
    ] = False
    app_dir: AppDir = Path(".")
    env_file: Annotated[
        Path | None,
        _file(
            _APPLICATION,
            help="Set the variables of this file, unless they are set, before MODULE is imported.",
        ),
    ] = None
    host: Annotated[
        str | None, _option(_ADDRESS, help="Address to listen on.  [default: 127.0.0.1]"), HTTP
    ] = None
    port: Annotated[
        int | None,
        _option(
            _ADDRESS,
            min=0,
            max=65535,
            help="Port to listen on; 0 lets the system choose.  [default: 8000]",
        ),
        HTTP,
    ] = None
    uds: Annotated[
        str | None,
        _option(_ADDRESS, metavar="PATH", help="Listen on this Unix domain socket instead."),
    ] = None
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Take the place of the server at this address, once ready; no request is lost.",
        ),
    ] = False
    fd: Annotated[
        int | None,
        _option(
            _ADDRESS,
            min=0,
            metavar="NUMBER",
            help="Listen on the socket of this inherited file descriptor instead.",
        ),
    ] = None
    http: Annotated[
        str | None,
        _option(
            _ADDRESS,
            metavar="NAME",
            help="Parser of HTTP; zttp has no limits for connections and headers."
            "  [default: auto: httptools if it is installed]",
        ),
        UVICORN,
    ] = None
    http2: Annotated[
        bool, _option(_ADDRESS, "--http2", help="Speak HTTP/2 too, with --http zttp."), UVICORN
    ] = False
    root_path: Annotated[
        str | None,
        _option(
            _PROXY, metavar="PATH", help="Path that a proxy in front removes: ASGI's root_path."
        ),
        HTTP,
    ] = None
    proxy_headers: Annotated[
        bool,
        _option(
            _PROXY,
            "--proxy-headers/--no-proxy-headers",
            help="Take scheme and client from X-Forwarded-Proto and X-Forwarded-For.",
            show_default=True,
        ),
        UVICORN,
    ] = True
    forwarded_allow_ips: Annotated[
        str | None,
        _option(
            _PROXY,
            metavar="IPS",
            help="Proxies whose headers are believed: addresses, networks, or *, also for --uds."
            "  [default: FORWARDED_ALLOW_IPS, or 127.0.0.1,::1]",
        ),
        UVICORN,
    ] = None
    ssl_keyfile: Annotated[Path | None, _file(_TLS, help="Key of the certificate."), HTTP] = None
    ssl_certfile: Annotated[
        Path | None, _file(_TLS, help="Certificate; the server speaks HTTPS."), HTTP
    ] = None
    ssl_keyfile_password: Annotated[
        str | None, _option(_TLS, metavar="TEXT", help="Password of the key."), HTTP
    ] = None
    ssl_version: Annotated[
        int | None,
        _option(_TLS, metavar="NUMBER", help="Protocol, a number of Python's ssl."),
        UVICORN,
    ] = None
    ssl_cert_reqs: Annotated[
        int | None,
        _option(
            _TLS,
            min=0,
            max=2,
            help="Certificates of clients: 0 none, 1 optional, 2 required.  [default: 0]",
        ),
        UVICORN,
    ] = None
    ssl_ca_certs: Annotated[
        Path | None, _file(_TLS, help="Authorities of clients' certificates."), HTTP
    ] = None
    ssl_ciphers: Annotated[
        str | None, _option(_TLS, metavar="LIST", help="Ciphers, as OpenSSL names them."), UVICORN
    ] = None
    log_level: Annotated[
        LogLevelName | None,
        _option(
            _LOGS,
            help="Least level of the loggers `ingress` and `uvicorn`."
            "  [default: info; of uvicorn itself: warning]",
        ),
    ] = None
    log_format: Annotated[
        LogFormat | None,
        _option(
            _LOGS,
            help="Format of all lines on standard output and error."
            "  [default: text, and JSON for requests unless on a terminal]",
        ),
    ] = None
    log_config: Annotated[
        Path | None, _file(_LOGS, help="Configuration of logging: .json, .yaml or .ini.")
    ] = None
    access_log: Annotated[
        bool,
        _option(_LOGS, "--access-log/--no-access-log", help="Log each request.", show_default=True),
    ] = True
    tracing: Annotated[
        bool,
        _option(
            _LOGS,
            "--tracing",
            help="Make OpenTelemetry spans of calls and batches.  [default: INGRESS_TRACING]",
        ),
    ] = False
    admin: Annotated[
        str | None,
        _option(
            _ADMIN,
            metavar="ADDRESS",
            help="Address of the admin listener, with the page and /metrics: HOST:PORT, the "
            "path of a Unix socket, or off.  [default: INGRESS_ADMIN, or the first free port from "
            "127.0.0.1:8265 on]",
        ),
    ] = None
    admin_token: Annotated[
        str | None,
        _option(
            _ADMIN,
            metavar="TEXT",
            help="Token that its clients must send, as Authorization: Bearer; required if other "
            "machines reach it.  [default: INGRESS_ADMIN_TOKEN]",
        ),
    ] = None
    metrics_routes: Annotated[
        int | None,
        _option(
            _ADMIN,
            min=1,
            metavar="N",
            help="Routes of an application that /metrics names; all others are one, 'other'."
            "  [default: INGRESS_METRICS_ROUTES, or all]",
        ),
    ] = None
    limit_connections: Annotated[
        int | None,
        _option(
            _LIMITS,
            min=1,
            metavar="N",
            help="Connections at once, in each process; further ones are answered 503 and closed."
            "  [default: as many as the process may open files]",
        ),
        HTTP,
    ] = None
    min_body_rate: Annotated[
        float | None,
        _option(
            _LIMITS,
            min=0,
            callback=finite,
            metavar="BYTES",
            help="Refuse a request whose body comes with fewer bytes a second; 0 for any rate."
            "  [default: 240]",
        ),
        HTTP,
    ] = None
    timeout_keep_alive: Annotated[
        int | None,
        _option(
            _LIMITS,
            min=1,
            metavar="SECS",
            help="Close a connection that is idle so long.  [default: 90]",
        ),
        HTTP._replace(name="keep_alive_timeout_s"),
    ] = None
    timeout_graceful_shutdown: Annotated[
        int | None,
        _option(
            _LIMITS,
            min=0,
            metavar="SECS",
            help="Time for requests in flight at the end."
            "  [default: graceful_shutdown_timeout_s of the deployments, 20]",
        ),
    ] = None
    drain_delay: Annotated[
        float,
        _option(
            _LIMITS,
            min=0,
            callback=finite,
            metavar="SECS",
            help="Time to take requests after SIGTERM, while /-/readyz fails.  [default: 0]",
        ),
    ] = 0.0
    reload: Annotated[
        bool, _option(_PROCESSES, "--reload", help="Restart when a file changes.")
    ] = False
    keep: Annotated[
        list[str] | None,
        _option(
            _PROCESSES,
            metavar="MODULE",
            help="With --reload: keep this module and its objects; other changed code is executed "
            "again, and updates the application. Repeatable.",
        ),
    ] = None
    watch: Annotated[
        bool,
        _option(
            _PROCESSES,
            "--watch",
            help="Apply FILE when it changes, as SIGHUP and `ingress reload` do.",
        ),
    ] = False
    workers: Annotated[
        int,
        _option(
            _PROCESSES,
            min=1,
            metavar="N",
            help="Processes; each has all the replicas.",
            show_default=True,
        ),
    ] = 1
    http_threads: Annotated[
        int,
        _option(
            _PROCESSES,
            min=1,
            metavar="N",
            help="Threads that read and write HTTP, on Python without the GIL.",
            show_default=True,
        ),
    ] = 1
    timeout_worker_healthcheck: Annotated[
        int | None,
        _option(
            _PROCESSES,
            min=5,
            metavar="SECS",
            help="Replace a worker that is silent so long.  [default: 30]",
        ),
    ] = None
    loop: Annotated[
        str | None,
        _option(
            _PROCESSES,
            metavar="NAME",
            help="Event loops of the server and of user code.  [default: INGRESS_EVENT_LOOP, or "
            "auto: uvloop if it is installed]",
        ),
    ] = None
    engine: Annotated[
        str | None, _option(None, help="local: this machine; ray: a Ray cluster.  [default: local]")
    ] = None
    address: Annotated[
        str | None,
        _option(
            _RAY,
            metavar="HOST:PORT",
            help="The Ray cluster; without it, RAY_ADDRESS, or one is started on this machine.",
        ),
    ] = None
    working_dir: Annotated[
        str | None,
        _option(
            _RAY,
            metavar="FOLDER",
            help="What Ray's workers get a copy of; for clusters of several machines.",
        ),
    ] = None

    @property
    def has_new_processes(self) -> bool:
        """Return whether worker processes serve, and not this one."""
        return self.reload or self.workers > 1

    def handed(self, way: Way) -> dict[str, Any]:
        """Return the options that go a way, as the receiver's keywords, without the defaults."""
        return {
            mark.name or each.name: str(value) if isinstance(value, Path) else value
            for each in fields(self)
            for mark in _WAYS[each.name]
            if mark.receiver == way.receiver and (value := getattr(self, each.name)) != each.default
        }

    def from_here(self) -> Self:
        """Return the same with absolute paths: the `working_dir` of a file changes the folder."""
        names = ("log_config", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs")
        paths = {name: getattr(self, name) for name in names}
        return replace(self, **{name: path and path.absolute() for name, path in paths.items()})


_WAYS = {
    name: [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Way)]
    for name, hint in get_type_hints(RunOptions, include_extras=True).items()
}
