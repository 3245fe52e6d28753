"""The commands of the control socket of `ingress run --workers`: each reaches all workers, or none.

control thread    `Asked` --> the supervisor's queue, and waits
supervisor        sends it to each worker by the worker's pipe, and collects the answers
worker            answers in a thread of its own

The snapshot of the server is the sum of its workers', and of the counters of those that ended. A
worker pushes one each second, and when it has drained, and the supervisor keeps the last. A worker
that is killed takes the counts since then with it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from time import monotonic, sleep, time
from typing import Any

from ingress.app.config_file.loading import ConfigFile
from ingress.cli.control_socket import CommandError
from ingress.cli.server_commands import (
    Changes,
    Failed,
    JobsAnswer,
)
from ingress.cli.workers import Supervisor, WorkerStartsError
from ingress.observe.live.observer import Observer
from ingress.observe.live.view import SILENT
from ingress.observe.timeline.recorder import ASK_S
from ingress.serving.http.address import SharedPort
from ingress.state.server import Snapshot, merged, process_snapshot

STATUS_S = 3.0  # for the state of a worker, which may stall
APPLY_S = 60.0
RETRY_S = 0.1


def answered_by_all(workers: Supervisor, command: str, **arguments: Any) -> list[Any]:
    """Return the answers of all workers.

    Raises `CommandError` if a worker starts, ends, refuses the command or does not answer.
    """
    asked = workers.ask(command, arguments, APPLY_S)
    if asked.waits_for:
        silent = ", ".join(map(str, sorted(asked.waits_for)))
        raise CommandError(f"worker {silent} did not answer within {APPLY_S:g} s")
    if failed := [text for text in asked.answers.values() if isinstance(text, Failed)]:
        raise CommandError(str(failed[0]))
    return list(asked.answers.values())


class WorkersCommands:
    """The commands of a server with worker processes. Called in the control socket's threads."""

    def __init__(self, workers: Supervisor, url: str | None) -> None:
        self.url = url
        self.workers = workers
        self._changing = threading.Lock()  # one change at a time
        self.observer = Observer(self._answers, lambda: self.url)

    def _answers(self, command: str, argument: float = 0.0) -> tuple[list[Any], dict[int, str]]:
        """Return the answers of the workers, and the reasons of those without one, by id."""
        wait_s = STATUS_S
        if command in ("record", "memory", "profile"):
            wait_s += argument + ASK_S  # a worker waits so long for its child processes
        asked = self.workers.ask(command, {"argument": argument}, wait_s)
        told = dict(asked.answers)
        failed = {pid: each for pid, each in told.items() if isinstance(each, Failed)}
        return [each for pid, each in told.items() if pid not in failed], {
            **dict.fromkeys(asked.starting, "starts"),
            **dict.fromkeys(sorted(asked.waits_for), SILENT),
            **{pid: f"answers with an error: {each}" for pid, each in failed.items()},
        }

    def snapshot(self) -> Snapshot:
        """Return the sum of all workers now. It blocks, for at most `STATUS_S`."""
        silent = sorted(self.workers.ask("snapshot", {}, STATUS_S).waits_for)
        found = self.workers.last_snapshots()  # an answer is one too
        # Race with the end of a worker that has just answered: it is added to `ended` with its last
        # snapshot, and must not be counted twice. So this is read last.
        ended = self.workers.ended
        parts = [each for pid, each in found.items() if pid not in ended.pids]
        mine = process_snapshot("supervisor", os.getpid())
        if not parts:
            parts = [Snapshot(time(), os.getpid())]
        whole = merged(parts, ended.snapshot)
        return replace(
            whole,
            pid=os.getpid(),
            url=self.url,
            workers=[pid for pid in whole.workers if pid not in silent],
            silent=silent,
            processes=[mine, *whole.processes],
        )

    def roll(self, file: ConfigFile, port: SharedPort | None) -> None:
        """Replace all workers, by those of `port` if it is another one.

        Raises `CommandError` if the first new one does not start.
        """
        with self._changing:
            self.workers.roll(file, port)

    def jobs(self, **arguments: Any) -> JobsAnswer:
        """Answer `ingress jobs`, by one worker: all share the queues."""
        (answer,) = answered_by_all(self.workers, "jobs", **arguments)
        found: JobsAnswer = answer
        return found

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
