"""Jobs enqueued by 8 clients while their servers are killed: each ends at least once.

    python -m tests.reliability.job_kills 20000 100 [SEED]    prints what was lost or ran twice

Two servers share one file of jobs. At random moments one is killed with SIGKILL, and started again.
A client repeats an enqueue that was not answered with 202, with the same idempotency key.
Exits with 1 if a job is lost, or not done in the end.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.programs import INGRESS, ROOT, ServerProcess, environment, free_port

SERVERS, CLIENTS = 2, 8
END_S = 300.0  # for the jobs that are left when the last kill is over


class Servers:
    """The servers, on their ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        own = {"JOBS_FILE": f"{folder}/jobs.db", "JOBS_LOG": f"{folder}/log", "JOBS_CRASHES": "99"}
        self._environ = environment(ROOT) | own
        self.ports = [free_port() for _ in range(SERVERS)]
        self.running = [self._start(port) for port in self.ports]

    def _start(self, port: int) -> ServerProcess:
        options = ["--port", f"{port}", "--no-access-log"]
        command = [*INGRESS, "run", "tests.jobs.jobs_app:main", *options]
        return ServerProcess(command, self._folder, self._environ)

    def kill_one(self, chance: random.Random) -> None:
        number = chance.randrange(SERVERS)
        self.end(number, signal.SIGKILL)
        self.running[number] = self._start(self.ports[number])

    def end(self, number: int, how: signal.Signals) -> None:
        self.running[number].signal(how)
        self.running[number].process.wait()


def enqueue(ports: list[int], numbers: Iterator[int], lock: threading.Lock, seed: int) -> None:
    """Enqueue jobs until there are no more numbers."""
    chance = random.Random(seed)
    with httpx.Client(timeout=20.0) as client:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            given = {"number": number, "seconds": 0.02}
            while True:
                url = f"http://127.0.0.1:{chance.choice(ports)}/jobs/work"
                try:
                    if client.post(url, params=given).status_code == 202:
                        break
                except httpx.HTTPError:
                    time.sleep(0.05)


def states(folder: Path) -> Counter[str]:
    db = sqlite3.connect(folder / "jobs.db")
    found = Counter(dict(db.execute("select state, count(*) from job group by state")))
    db.close()
    return found


def main(jobs: int, kills: int, seed: int) -> int:
    folder = Path(tempfile.mkdtemp())
    chance, servers, lock = random.Random(seed), Servers(folder), threading.Lock()
    numbers = iter(range(jobs))
    began = time.monotonic()
    clients = [
        threading.Thread(target=enqueue, args=(servers.ports, numbers, lock, seed + each))
        for each in range(CLIENTS)
    ]
    for each in clients:
        each.start()
    for _ in range(kills):
        time.sleep(chance.uniform(1.0, 2.5))
        servers.kill_one(chance)
    for each in clients:
        each.join()
    until = time.monotonic() + END_S
    while states(folder)["done"] < jobs and time.monotonic() < until:
        time.sleep(0.5)
    took = time.monotonic() - began
    for number in range(SERVERS):
        servers.end(number, signal.SIGTERM)
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    begun = Counter(int(number) for what, number, _ in lines if what == "begin")
    ended = Counter(int(number) for what, number, _ in lines if what == "end")
    lost = [number for number in range(jobs) if not ended[number]]
    found = states(folder)
    print(f"{jobs} jobs, {kills} kills, {took:.0f} s, seed {seed}: {dict(found)}")
    print(f"lost: {len(lost)}; begun twice or more: {sum(n > 1 for n in begun.values())}")
    print(f"ended twice or more: {sum(n > 1 for n in ended.values())}, the work was done before "
          "the kill, and its end was not written yet")  # fmt: skip
    return int(bool(lost) or found != Counter(done=jobs))


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    sys.exit(main(given[0], given[1], given[2] if len(given) > 2 else 1))
