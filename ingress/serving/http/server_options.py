"""The options that a command line gives a server, and the arguments of `uvicorn.Config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ingress.config import HTTPOptions
from ingress.core.base.settings import HTTPLimits, Settings
from ingress.serving.http.address import Address

if TYPE_CHECKING:
    from ingress.serving.http.admin_address import AdminOptions


ZTTP = "zttp"
"""The parser of uvicorn's whose connections have no limits of ours: those of ASGI hold."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a command line, which take precedence over those of `serve.start`.

    `http` are keywords of `HTTPOptions`; `origins` has those that come from a file, and the
    variables that a file sets, each with its place. `uvicorn` are arguments of `uvicorn.Config`
    that `HTTPOptions` does not have. `shutdown_timeout_s` replaces the deployments'
    `graceful_shutdown_timeout_s` when the process stops. For `drain_delay_s` before that it still
    takes requests, while its health checks fail. If `serves_http`, the `host=None` of
    `serve.start` has no effect. `has_own_server` is false in a process whose server is not that
    of `serve.run`, such as a worker process: there, `serve.start` only records its options.
    `admin` are the options of the admin listener that the command itself starts; with `None` the
    engine may start one. `process` is the name of the process in snapshots. If it `replaces` a
    server, it accepts connections only once it `begin`s; it `shares_port` if both have sockets.
    `http_threads` is the number of loops that read and write HTTP.
    """

    http: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    uvicorn: Mapping[str, Any] = field(default_factory=dict)
    uds: str | None = None
    fd: int | None = None
    shutdown_timeout_s: float | None = None
    drain_delay_s: float = 0.0
    serves_http: bool = False
    has_own_server: bool = True
    admin: AdminOptions | None = None
    process: str = "server"
    replaces: bool = False
    shares_port: bool = False
    http_threads: int = 1

    def over(self, options: HTTPOptions) -> HTTPOptions:
        """Return the options with those of the command line in their place."""
        given = {name: getattr(options, name) for name in options.model_fields_set}
        if self.serves_http and given.get("host", "") is None:
            del given["host"]
        return HTTPOptions(**{**given, **self.http})

    def address(self, options: HTTPOptions, settings: Settings) -> Address:
        """Return the address; `options` are those that `over` returns."""
        host = options.host if "host" in options.model_fields_set else None
        host = host or settings.http_host
        return Address(host, options.port, self.uds, self.fd, self.shares_port)

    def uvicorn_arguments(self, options: HTTPOptions, limits: HTTPLimits) -> dict[str, Any]:
        """Return arguments of `uvicorn.Config`; `options` are those that `over` returns."""
        from ingress.serving.http.connections import Connections  # imports uvicorn

        parser = self.uvicorn.get("http", "auto")
        return {
            "root_path": options.root_path,
            "timeout_keep_alive": int(options.keep_alive_timeout_s),
            "ssl_keyfile": options.ssl_keyfile,
            "ssl_certfile": options.ssl_certfile,
            "ssl_keyfile_password": options.ssl_keyfile_password,
            "ssl_ca_certs": options.ssl_ca_certs,
            **self.uvicorn,
            **({} if parser == ZTTP else Connections(limits, parser).options()),
        }
