"""A command that changes a server, followed to its end: `--wait` of reload, scale and stop.

The command runs in a thread, because a reload of workers takes minutes. Meanwhile, and until the
replicas are those that the options ask for, each change of a replica is a line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Annotated, Any

import typer

from ingress.cli.control_socket import CommandError, RunningServer
from ingress.cli.target import refusal
from ingress.cli.terminal import tamed
from ingress.observe.live.observer import DeploymentProgress

ASK_S = 5.0
PAUSE_S = 0.2

Wait = Annotated[
    bool, typer.Option("--wait", help="End when it is done; exit with 1 if it was rolled back.")
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", min=0.1, help="With --wait: give up after this."),
]
TIMEOUT_S = 300.0

Tell = Callable[[str], object]
States = dict[str, str]
"""The states of replicas, by their names."""


class Following:
    """The progress of a server's replicas, as lines. `tell` prints one."""

    def __init__(self, server: RunningServer, timeout_s: float, tell: Tell) -> None:
        self._server = server
        self._began = monotonic()
        self._deadline = self._began + timeout_s
        self._timeout_s = timeout_s
        self._tell = tell
        self._states: States | None = None
        self._told: dict[str, str] = {}

    def change(self, command: str, arguments: Mapping[str, Any]) -> list[str]:
        """Ask for a change, and wait until all replicas are as wanted. Returns its lines.

        Ends the program with the reason if it is refused, rolled back or not done in time.
        """
        self._look()  # the states before
        with self._asked(command, arguments) as asked:
            while not asked.done():
                self._pause()
                self._look()
            lines: list[str] = _answer(asked, self._server)
        for line in lines or ["nothing to change"]:
            self._tell(line)
        while not self._is_settled():
            self._pause()
        return lines

    def end(self) -> None:
        """Ask the server to stop, and wait until its process has ended."""
        with self._asked("stop", {}) as asked:
            _answer(asked, self._server)
        self._tell(f"server {self._server.pid} stops")
        while _is_alive(self._server):
            self._look()
            self._pause()
        self._tell(f"server {self._server.pid} has ended")

    @contextmanager
    def _asked(self, command: str, arguments: Mapping[str, Any]) -> Iterator[Future[Any]]:
        pool = ThreadPoolExecutor(1, "ingress-ask")
        try:
            yield pool.submit(self._server.ask, command, self._timeout_s, **arguments)
        finally:
            pool.shutdown(wait=False)

    def _progress(self) -> list[DeploymentProgress] | None:
        """Return the progress of each deployment; `None` while a process starts or ends."""
        try:
            found: list[DeploymentProgress] | None = self._server.ask("progress", ASK_S)
        except (CommandError, OSError):
            return None
        return found

    def _look(self) -> list[DeploymentProgress] | None:
        """Tell how the replicas have changed since the last look."""
        if (found := self._progress()) is None:
            return None
        several = len({each["pid"] for each in found}) > 1
        states = {
            f"{_name(each)}#{tag}" + (f" in process {each['pid']}" if several else ""): state
            for each in found
            for tag, state in each["replicas"].items()
        }
        if self._states is not None:
            for name, state in states.items():
                if state != self._states.get(name):
                    self._say(f"{name} {state}")
            for name in self._states.keys() - states.keys():
                self._say(f"{name} has ended")
        self._states = states
        for each in found:
            name, problem = _name(each), each["problem"]
            if problem and problem != self._told.get(name):
                self._say(f"{name}: {problem}")
            self._told[name] = problem
        return found

    def _is_settled(self) -> bool:
        """Return whether all replicas are as wanted. Ends the program if they will not be."""
        if (found := self._look()) is None:
            return False
        if not all(each["is_settled"] for each in found):
            return False
        if wrong := [each for each in found if each["rejected"]]:
            raise refusal(tamed("; ".join(f"{_name(each)}: {each['rejected']}" for each in wrong)))
        return True

    def _pause(self) -> None:
        if monotonic() >= self._deadline:
            reasons = "; ".join(f"{name}: {text}" for name, text in self._told.items() if text)
            raise refusal(
                tamed(
                    f"not done after {self._timeout_s:g} s, and it goes on"
                    f"{f': {reasons}' if reasons else ''}; --timeout gives it longer"
                )
            )
        sleep(PAUSE_S)

    def _say(self, text: str) -> None:
        self._tell(f"{monotonic() - self._began:5.1f} s  {text}")


def _name(each: DeploymentProgress) -> str:
    return f"{each['application']}:{each['deployment']}"


def _answer(asked: Future[Any], server: RunningServer) -> Any:
    try:
        return asked.result()
    except CommandError as error:
        raise refusal(tamed(str(error))) from None
    except OSError as error:
        raise refusal(f"server {server.pid} does not answer: {error}") from None


def _is_alive(server: RunningServer) -> bool:
    try:
        server.connected(ASK_S).close()
    except OSError:
        pass
    else:
        return True
    try:  # its socket closes before its last thread has ended
        os.kill(server.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(server.pid)


def _is_zombie(pid: int) -> bool:
    """Return whether a process has ended, and its parent has not looked yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except (OSError, IndexError):
        return False
