"""The state of FastAPI's own telemetry, read once a second and not at every request."""

from __future__ import annotations

from time import monotonic
from typing import Any

from starlette.routing import Mount

from ingress.asgi.compat import native_telemetry

CHECK_EVERY_S = 1.0


class Telemetry:
    """The cached state of an app's telemetry, on or off. Owned by the user loop.

    FastAPI (0.142 and newer) checks at every request for a configured OpenTelemetry provider. That
    reads the environment six times: a tenth of the cost of a simple request. A provider that is
    configured later is found within a second.
    """

    __slots__ = ("_is_on", "_native", "_next_check")

    def __init__(self, native: Any) -> None:
        self._native = native
        self._is_on = True
        self._next_check = 0.0

    @classmethod
    def of(cls, app: Any) -> Telemetry | None:
        """Return the telemetry of a FastAPI app, `None` if the app has none.

        Also `None` if there are mounted apps, because these may have providers of their own.
        """
        native = native_telemetry(app)
        if native is None or any(isinstance(route, Mount) for route in app.routes):
            return None
        return cls(native)

    def is_on(self) -> bool:
        now = monotonic()
        if now >= self._next_check:
            self._next_check = now + CHECK_EVERY_S
            self._is_on = self._native.enabled()
        return self._is_on
