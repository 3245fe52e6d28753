"""The HTTP side of `serve.run`: the options, the proxy, and the server while there is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from ingress.config import HTTPOptions
from ingress.core.base.settings import Settings
from ingress.core.calls.loops import run_blocking
from ingress.engines.engine_threads import EngineThreads
from ingress.serving.http.proxy import HTTPProxy
from ingress.serving.http.request_head import RoutingHeaders
from ingress.serving.http.retrying import RequestLimits
from ingress.serving.http.server import HTTPServer
from ingress.serving.http.server_options import ServerOptions
from ingress.telemetry.logs import logger

# Options that still take effect on a server that already listens.
_LIVE_OPTIONS = frozenset(
    (
        *("request_timeout_s", "retry_started_methods"),
        *("body_buffer_bytes", "body_idle_timeout_s", "min_body_rate", "max_body_size"),
    )
)


@dataclass(eq=False, slots=True)
class EngineHTTP:
    """The HTTP side of an engine. Changed only under the lock of the engine's operations.

    The engine sets the `proxy` when its threads start, before an application can use it.
    `is_kept` says that the server stays without applications, until `reset`. The options of
    `command_line` take precedence over all others.
    """

    command_line: ServerOptions = field(default_factory=ServerOptions)
    options: HTTPOptions = field(default_factory=HTTPOptions)
    proxy: HTTPProxy = field(default_factory=HTTPProxy)
    server: HTTPServer | None = None
    is_kept: bool = False

    @property
    def url(self) -> str | None:
        """The URL of the server, if there is one."""
        server = self.server
        return None if server is None else server.url

    def limits(self, settings: Settings) -> RequestLimits:
        """Return the limits of requests and the retried methods; code beats environment."""
        is_given = "request_timeout_s" in self.options.model_fields_set
        return RequestLimits(
            self.options.request_timeout_s if is_given else settings.request_timeout_s,
            frozenset(self.options.retry_started_methods),
            self.options.limits(settings.http_limits),
            RoutingHeaders.named(settings.session_header, settings.priority_header),
        )

    def start(self, threads: EngineThreads) -> None:
        """Start the server, unless it runs or HTTP is off. Raises `RuntimeError` if it cannot."""
        options = self.options
        self.proxy.limits = self.limits(threads.settings)
        command_line = self.command_line
        is_off = options.host is None or not command_line.has_own_server
        if self.server is not None or is_off:
            return
        server = HTTPServer(
            self.proxy,
            command_line.address(options, threads.settings),
            command_line.uvicorn_arguments(options, self.proxy.limits.http),
            waits=command_line.replaces,
            threads=command_line.http_threads,
        )
        self.server = server
        if not command_line.replaces:
            run_blocking(threads.control.loop, server.start())

    def begin(self, threads: EngineThreads) -> None:
        """Accept connections: the server that this one replaces does so no more, or not for long.

        No effect the second time.
        """
        if self.server is not None and self.command_line.replaces and not self.server.is_begun:
            run_blocking(threads.control.loop, self.server.start())

    def update(self, options: HTTPOptions, threads: EngineThreads) -> None:
        """Apply new options to the running server, and log those that have no effect on it."""
        previous, self.options = self.options, options
        self.proxy.limits = self.limits(threads.settings)
        ignored = [
            f"{name}={getattr(options, name)!r}"
            for name in sorted(options.model_fields_set - _LIVE_OPTIONS)
            if getattr(options, name) != getattr(previous, name)
        ]
        if ignored:
            assert self.server is not None
            logger.warning(
                "serve.start: %s has no effect, because the server listens at %s already; call "
                "serve.shutdown() first",
                ", ".join(ignored),
                self.server.url,
            )

    def stop_if_unused(self, threads: EngineThreads, until: float = 0.0) -> None:
        """Stop the server, unless there is an application to serve or the server is kept.

        Clients may take their answers until then (`time.monotonic`).
        """
        if (server := self.server) is None or self.is_kept or self.proxy.table.routes:
            return
        self.server = None
        run_blocking(threads.control.loop, server.stop(max(0.0, until - monotonic())))

    def reset(self) -> None:
        """Restore the initial options, and make a new proxy, for the next `start`."""
        self.options = HTTPOptions()
        self.proxy = HTTPProxy()
