"""The options of `ingress run` that cannot be used together: one line for each such mistake."""

from __future__ import annotations

import ssl
from typing import Any

from uvicorn.config import SSL_PROTOCOL_VERSION, create_ssl_context

from ingress.cli.run_options import RunOptions
from ingress.cli.target import refusal
from ingress.core.base.settings import ENGINES
from ingress.serving.http.admin_address import OFF
from ingress.serving.http.server_options import ServerOptions


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not `None`."""
    return {name: value for name, value in options.items() if value is not None}


def check_engine(engine: str, options: RunOptions, server: ServerOptions) -> None:
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
        (has_admin, "--admin and --admin-token are", metrics),
        (server.drain_delay_s, "--drain-delay is", "leave it out: the proxies are Ray's"),
    ):
        if is_given:
            raise refusal(f"{names} for the local engine; on Ray, {instead}")
    local = given(
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


def check_server(server: ServerOptions) -> None:
    """Refuse options that exclude each other, and a certificate that cannot be used."""
    http = server.http
    host_or_port = http.get("host", http.get("port"))
    wheres = {"--uds": server.uds, "--fd": server.fd, "--host or --port": host_or_port}
    named = [name for name, value in wheres.items() if value is not None]
    if len(named) > 1:
        raise refusal(f"{named[0]} and {named[1]} are both given; a server has one address")
    tls = [name for name in (*http, *server.uvicorn) if name.startswith("ssl_")]
    certificate, key = http.get("ssl_certfile"), http.get("ssl_keyfile")
    if tls and (certificate is None or key is None):
        raise refusal(
            f"{_as_typed((tls[0], ''))} needs a certificate and its key; give both --ssl-certfile "
            "and --ssl-keyfile, or neither for plain HTTP"
        )
    if certificate is None:
        return
    options = {**http, **server.uvicorn}
    try:
        create_ssl_context(
            certfile=certificate,
            keyfile=key,
            password=options.get("ssl_keyfile_password", ""),  # `None` would ask at the terminal
            ssl_version=options.get("ssl_version", SSL_PROTOCOL_VERSION),
            cert_reqs=options.get("ssl_cert_reqs", ssl.CERT_NONE),
            ca_certs=options.get("ssl_ca_certs"),
            ciphers=options.get("ssl_ciphers"),
        )
    except (OSError, ValueError) as error:
        raise refusal(
            f"--ssl-certfile {certificate!r} and the other --ssl options cannot be used: {error}; "
            "check that the key is the certificate's, its password, and that the files are PEM"
        ) from None


def check_workers(options: RunOptions) -> None:
    """Refuse options for processes that are not there."""
    if options.reload and options.workers > 1:
        raise refusal("--reload serves in one process; leave out --workers, or --reload")
    if options.timeout_worker_healthcheck is not None and options.workers == 1:
        raise refusal("--timeout-worker-healthcheck is for --workers; leave it out")
