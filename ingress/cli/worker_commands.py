"""The commands of the control socket of `ingress run --workers`: each reaches all workers, or none.

control thread    `Asked` --> the supervisor's queue, and waits
supervisor        sends it to each worker by the worker's pipe, and collects the answers
worker            answers in a thread of its own
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ingress.app.config_file.loading import ConfigFile
from ingress.cli.control_socket import Command, CommandError
from ingress.cli.server_commands import SCALE, Changes, livez, scaling, stop
from ingress.observe.live.observer import Observer
from ingress.observe.live.problems import SILENT
from ingress.observe.live.recording import ASK_S
from ingress.serving.http.shared_port import SharedPort

if TYPE_CHECKING:
    from ingress.cli.workers import Supervisor

STATUS_S = 3.0  # for the state of a worker, which may stall
APPLY_S = 60.0
RETRY_S = 0.1


@dataclass(eq=False, slots=True)
class Asked:
    """One command for all workers. `answers` maps process ids to values, or to an error's text.

    Written by the supervisor's thread only, until `is_answered` is set. `is_given_up` is its
    caller's: the supervisor then forgets it, with the answers that came.
    """

    command: str
    arguments: Mapping[str, Any]
    refusal: str = ""  # the reason if it was sent to no worker
    is_early: bool = False  # if that is the start of a worker
    starting: tuple[int, ...] = ()  # the workers that it was not sent to
    waits_for: set[int] = field(default_factory=set)
    answers: dict[int, Any] = field(default_factory=dict)
    is_answered: threading.Event = field(default_factory=threading.Event)
    is_given_up: bool = False

    def wait(self, timeout_s: float) -> None:
        """Wait for the answers; give those up that are still missing then."""
        self.is_given_up = not self.is_answered.wait(timeout_s)

    def answer(self, pid: int, value: Any) -> None:
        """Record the answer of a worker."""
        if pid in self.waits_for:
            self.waits_for.discard(pid)
            self.answers[pid] = value
            if not self.waits_for:
                self.is_answered.set()

    def refuse(self, reason: str, *, is_early: bool = False) -> None:
        """End it without an answer."""
        self.refusal, self.is_early = reason, is_early
        self.is_answered.set()


@dataclass(eq=False, slots=True)
class Rolling:
    """The replacement of all workers by workers with another version of the file.

    Written by the supervisor's thread only, until `is_over` is set. `error` says why none, or not
    all, were replaced.
    """

    file: ConfigFile
    port: SharedPort | None
    error: str = ""
    is_begun: bool = False  # a new worker serves: the version is that of later workers too
    is_over: threading.Event = field(default_factory=threading.Event)

    def end(self, error: str = "") -> None:
        """End it."""
        self.error = error
        self.is_over.set()


class WorkerStartsError(CommandError):
    """A worker starts, so a command that must reach all workers is sent to none."""


class Failed(str):
    """The text of an error in a worker."""

    __slots__ = ()


def answered_by_all(workers: Supervisor, command: str, **arguments: Any) -> list[Any]:
    """Return the answers of all workers.

    Raises `CommandError` if a worker starts, ends, refuses the command or does not answer.
    """
    asked = _asked(workers, command, APPLY_S, arguments)
    if asked.waits_for:
        silent = ", ".join(map(str, sorted(asked.waits_for)))
        raise CommandError(f"worker {silent} did not answer within {APPLY_S:g} s")
    if failed := [text for text in asked.answers.values() if isinstance(text, Failed)]:
        raise CommandError(str(failed[0]))
    return list(asked.answers.values())


def _asked(workers: Supervisor, command: str, wait_s: float, arguments: Mapping[str, Any]) -> Asked:
    asked = Asked(command, arguments)
    workers.post(asked)
    asked.wait(wait_s)
    if asked.refusal:
        raise (WorkerStartsError if asked.is_early else CommandError)(asked.refusal)
    return asked


class WorkersCommands:
    """The commands of a server with worker processes. Called in the control socket's threads."""

    def __init__(self, workers: Supervisor, url: str | None) -> None:
        self.url = url
        self.workers = workers
        self._changing = threading.Lock()  # one change at a time
        self.observer = Observer(self._answers, lambda: self.url)

    def table(self) -> dict[str, Command]:
        return {
            "livez": livez,
            "view": lambda arguments: self.observer.view(),
            "stop": stop,
            "scale": lambda arguments: self.change(scaling(arguments), SCALE, is_scaling=True),
        }

    def _answers(self, command: str, argument: float = 0.0) -> tuple[list[Any], dict[int, str]]:
        """Return the answers of the workers, and the reasons of those without one, by id."""
        wait_s = STATUS_S
        if command == "record":
            wait_s += argument + ASK_S  # a worker waits so long for its child processes
        asked = _asked(self.workers, command, wait_s, {"argument": argument})
        absent = dict.fromkeys(asked.starting, "starts")
        absent |= dict.fromkeys(sorted(asked.waits_for), SILENT)
        answers = []
        for pid, each in dict(asked.answers).items():
            if isinstance(each, Failed):
                absent[pid] = f"answers with an error: {each}"
            else:
                answers.append(each)
        return answers, absent

    def roll(self, file: ConfigFile, port: SharedPort | None) -> None:
        """Replace all workers, by those of `port` if it is another one.

        Raises `CommandError` if the first new one does not start.
        """
        with self._changing:
            rolling = Rolling(file, port)
            self.workers.roll(rolling)
            rolling.is_over.wait()
        if rolling.error:
            raise CommandError(rolling.error)

    def change(self, wanted: Changes, origin: str, *, is_scaling: bool = False) -> list[str]:
        """Change options in all workers, or in none. Returns a line for each.

        `origin` is the file or the command that asks for them.
        """
        with self._changing:
            answered_by_all(self.workers, "check", wanted=wanted, is_scaling=is_scaling)
            # From here on it is decided: a worker that dies is replaced by one with these options.
            self.workers.remember(wanted)
            given_up = monotonic() + APPLY_S
            asked = {"wanted": wanted, "origin": origin}
            while True:
                try:
                    return next(iter(answered_by_all(self.workers, "change", **asked)))
                except WorkerStartsError:
                    if monotonic() > given_up:
                        raise
                    sleep(RETRY_S)


def run_in_worker(commands: Callable[[], Mapping[str, Command]], name: str, arguments: Any) -> Any:
    """Return the answer of a worker to a command; `Failed` if it raises."""
    try:
        return commands()[name](arguments)
    except Exception as error:
        return Failed(str(error) if isinstance(error, CommandError) else repr(error))
