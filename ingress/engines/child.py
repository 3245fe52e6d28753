"""A replica's process: its main function, and the functions of a server that work there."""

from __future__ import annotations

from typing import NoReturn

from ingress.core.base.types import DeploymentID
from ingress.engines.current import use_only
from ingress.handle import DeploymentHandle, directory_here
from ingress.serving.processes import child


def main(socket: int, shared: int, name: str) -> None:
    """Serve one replica until the server says to stop."""
    use_only(ChildEngine(name))
    child.main(socket, shared)


class ChildEngine:
    """The engine of a replica's process: it has handles, whose calls the server's process makes.

    The server knows which deployments run, so a handle of one that does not fails at its call.
    """

    __slots__ = ("_replica",)

    def __init__(self, replica: str) -> None:
        self._replica = replica

    @property
    def is_running(self) -> bool:
        return True

    def app_handle(self, name: str) -> DeploymentHandle:
        return DeploymentHandle(DeploymentID("", name), directory_here())

    def deployment_handle(self, deployment_name: str, app_name: str) -> DeploymentHandle:
        return DeploymentHandle(DeploymentID(deployment_name, app_name), directory_here())

    def _refuse(self, *args: object, **options: object) -> NoReturn:
        raise RuntimeError(
            f"this is the process of replica {self._replica}, in which serve.run(), serve.status() "
            "and the other functions of a server are not available, except those that return "
            "handles; in a script, put serve.run() under `if __name__ == '__main__':`, because "
            "child processes import the script"
        )

    start = run = delete = leave = writing_on_signal = shutdown = status = url = _refuse
