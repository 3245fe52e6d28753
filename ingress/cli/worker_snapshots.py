"""The snapshot of a server with worker processes: their sum, with the counters of those that ended.

supervisor's thread    keeps the last snapshot that each worker has pushed, and adds it to `Ended`
                       when the worker has ended
admin listener         asks the workers for new ones, and sums; a silent worker's last one is used

A worker pushes a snapshot each second, and when it has drained. One that is killed takes the counts
since then with it, at most those of a second.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from time import time
from typing import TYPE_CHECKING

from ingress.cli.worker_commands import STATUS_S, Asked
from ingress.core.base.process import process_facts
from ingress.core.base.snapshot import ProcessSnapshot, Snapshot, both_kept, merged

if TYPE_CHECKING:
    from ingress.cli.workers import Supervisor

MAX_PIDS = 1000


@dataclass(frozen=True, slots=True)
class Ended:
    """The counters of the workers that have ended, and their pids. Replaced as a whole."""

    snapshot: Snapshot | None = None
    pids: tuple[int, ...] = ()

    def with_worker(self, pid: int, last: Snapshot | None) -> Ended:
        """Return these with another worker's."""
        snapshot = self.snapshot if last is None else both_kept(self.snapshot, last)
        return Ended(snapshot, (*self.pids[-MAX_PIDS:], pid))


def snapshot_of_workers(workers: Supervisor, url: str | None) -> Snapshot:
    """Return the sum of all workers now. It blocks, for at most `STATUS_S`."""
    asked = Asked("snapshot", {})
    workers.post(asked)
    asked.wait(STATUS_S)
    found = dict(workers.last_snapshots())
    found |= {pid: each for pid, each in dict(asked.answers).items() if isinstance(each, Snapshot)}
    silent = sorted(asked.waits_for)
    # Race with the end of a worker that has just answered: it is added to `ended` with its last
    # snapshot, and must not be counted twice. So this is read last.
    ended = workers.ended
    parts = [each for pid, each in found.items() if pid not in ended.pids]
    mine = ProcessSnapshot("supervisor", os.getpid(), *process_facts(os.getpid()))
    if not parts:
        parts = [Snapshot(time(), os.getpid())]
    whole = merged(parts, ended.snapshot)
    return replace(
        whole,
        pid=os.getpid(),
        url=url,
        workers=[pid for pid in whole.workers if pid not in silent],
        silent=silent,
        processes=[mine, *whole.processes],
    )
