"""What every engine does; `ingress.api` has one line for each."""

from __future__ import annotations

from typing import Any, Protocol

from ingress.config import HTTPOptions
from ingress.declaration import Application
from ingress.handle import DeploymentHandle
from ingress.schema import ServeStatus


class Engine(Protocol):
    """Runs applications. Every method may be called from any thread that has no running loop."""

    def start(self, http_options: HTTPOptions | None) -> None: ...

    def run(
        self, application: Application, name: str, route_prefix: str | None
    ) -> DeploymentHandle: ...

    def delete(self, name: str) -> None: ...

    def shutdown(self) -> None: ...

    def status(self) -> ServeStatus: ...

    def app_handle(self, name: str) -> DeploymentHandle: ...

    def deployment_handle(self, deployment_name: str, app_name: str) -> DeploymentHandle: ...

    def addresses(self) -> dict[str, Any]: ...
