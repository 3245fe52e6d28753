"""Children killed at random moments under load: nothing of them is left behind.

    python -m tests.process_kills 1000 [SEED]       prints a line per 50 kills, and what is left

One server, its replicas in child processes, and clients: short and long requests, streams, uploads,
WebSockets, calls by handle from child to child, and large arrays. A child is killed once it is old
enough that its loss is not one of a series, which the control plane answers with longer pauses;
some are killed while they start. Exits with 1 if a client saw another answer than the promised
ones, or if a process, a descriptor, a thread, shared memory or a slot is left.
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import ingress as serve
from ingress.engines import local_engine
from ingress.exceptions import RayServeException
from ingress.serving.control.running import SHORT_LIFE_S
from tests.process_app import array_caller, killed
from tests.servers import served, wait_until

MIB = 1 << 20
CLIENTS = 1  # of each kind
PAUSE_S = 0.01  # of a client, between two requests
STARTING = 0.1  # the share of children that are killed while they start
MISSING = 3  # children that may be missing when the next one is killed
LAST_S = 30.0


class Load:
    """Clients in threads, and the outcomes of their requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.outcomes: Counter[str] = Counter()
        self.unexpected: Counter[str] = Counter()
        self._stopping = threading.Event()
        kinds = (self.short, self.long, self.stream, self.upload, self.websocket, self.handle)
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), daemon=True)
            for kind in kinds * CLIENTS
        ]
        for each in self._threads:
            each.start()

    def _run(self, ask: Callable[[httpx.Client], str]) -> None:
        with httpx.Client(base_url=self.url, timeout=LAST_S) as client:
            while not self._stopping.wait(PAUSE_S):
                try:
                    outcome = ask(client)
                except (httpx.RemoteProtocolError, httpx.ReadError, ConnectionClosed):
                    outcome = "cut"
                except Exception as error:
                    self.unexpected[f"{ask.__name__}: {error!r}"[:300]] += 1
                    continue
                self.outcomes[f"{ask.__name__} {outcome}"] += 1

    def stop(self) -> None:
        self._stopping.set()
        for each in self._threads:
            each.join(LAST_S)

    def _status(self, answer: httpx.Response) -> str:
        if answer.status_code not in (200, 503):
            raise AssertionError(f"{answer.status_code} {answer.text[:200]}")
        return str(answer.status_code)

    def short(self, client: httpx.Client) -> str:
        return self._status(client.get("/pid"))

    def long(self, client: httpx.Client) -> str:
        return self._status(client.get("/sleep"))

    def stream(self, client: httpx.Client) -> str:
        return self._status(client.get("/stream"))

    def upload(self, client: httpx.Client) -> str:
        return self._status(client.post("/echo", content=os.urandom(MIB)))

    def websocket(self, client: httpx.Client) -> str:
        try:
            with connect(self.url.replace("http", "ws") + "/echo") as socket:
                for _ in range(20):
                    socket.send("a")
                    socket.recv(LAST_S)
        except InvalidStatus as error:
            if error.response.status_code != 403:  # closed before it was accepted
                raise
            return "refused"
        return "echoed"

    def handle(self, client: httpx.Client) -> str:
        calls = serve.get_app_handle("arrays")
        try:
            found = calls.double.remote(bytes(MIB)).result(timeout_s=LAST_S)
        except RayServeException as error:
            return type(error).__name__
        assert len(found) == 2 * MIB
        return "doubled"


class Children:
    """The child processes of this one, from /proc, with the time at which each was first seen."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def ages(self) -> dict[int, float]:
        now = time.monotonic()
        alive = _children()
        self._seen = {pid: self._seen.get(pid, now) for pid in alive}
        return {pid: now - since for pid, since in self._seen.items()}


def _children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except FileNotFoundError:
            pass
    return found


def _serving() -> set[int]:
    return {
        each.host.pid  # type: ignore[attr-defined]
        for router in list(local_engine().routers.values())
        for each in list(router.replicas)
    }


def held() -> dict[str, Any]:
    """Return what a killed child may leave behind."""
    descriptors = Counter(
        _target(each).split(":")[0] for each in Path("/proc/self/fd").iterdir() if _target(each)
    )
    return {
        "processes": len(_children()),
        "descriptors": dict(descriptors),
        "threads": sorted(each.name for each in threading.enumerate()),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "slots": sum(
            each.slots.ongoing + router.num_queued
            for router in list(local_engine().routers.values())
            for each in list(router.replicas)
        ),
    }


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def kill(wanted: int, chance: random.Random, children: Children) -> float:
    """Kill one of `wanted` children at a random moment: an old one, or one that starts.

    Returns the seconds until another process is there.
    """
    starting = chance.random() < STARTING
    deadline = time.monotonic() + 10 * SHORT_LIFE_S
    while True:
        time.sleep(chance.random() * 0.2)
        ages, serving = children.ages(), _serving()
        if starting and time.monotonic() < deadline - 9 * SHORT_LIFE_S:
            candidates = [pid for pid in ages if pid not in serving]
        else:
            candidates = [p for p, age in ages.items() if p in serving and age > SHORT_LIFE_S + 2]
        if candidates and len(serving) >= wanted - MISSING:
            break
        assert time.monotonic() < deadline, "the replacements did not come"
    victim = chance.choice(candidates)
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended, because its start was given up
        return kill(wanted, chance, children)
    return _until_replaced({*ages})


def _until_replaced(before: set[int]) -> float:
    """Return the seconds until another process is there; `nan` if that takes half a second.

    Then its replacement waits, because it did not start, or the machine is busy.
    """
    begun = time.monotonic()
    while (took := time.monotonic() - begun) < 0.5:
        if _children() - before:
            return took
        time.sleep(0.002)
    return math.nan


def main(kills: int = 1000, seed: int = 0) -> int:
    chance = random.Random(seed)
    begun = time.monotonic()
    url = f"http://127.0.0.1:{served(killed, name='killed')}"
    serve.run(array_caller, name="arrays", route_prefix=None)
    wanted = len(_serving())
    children = Children()
    children.ages()
    load = Load(url)  # the clients open their connections, and the server its threads
    time.sleep(3)
    load.stop()
    wait_until(lambda: not held()["slots"])
    before = held()
    load = Load(url)
    took_s: list[float] = []
    for number in range(1, kills + 1):
        took_s.append(kill(wanted, chance, children))
        if number % 50 == 0 or number == kills:
            took_ms = sorted(round(each * 1e3) for each in took_s if not math.isnan(each))
            print(
                f"{number} kills, {time.monotonic() - begun:.0f} s; the next process began after "
                f"{statistics.median(took_ms)} ms, p95 {took_ms[len(took_ms) * 95 // 100]} ms, in "
                f"{len(took_ms)} cases: {dict(load.outcomes)}"
            )
    load.stop()
    wait_until(lambda: len(_serving()) == wanted and len(_children()) == wanted, 120)
    wait_until(lambda: not held()["slots"])
    after = held()
    lost = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    lost = {name: differs(*both) for name, both in lost.items()}
    serve.shutdown()
    left = len(_children())
    print(f"unexpected: {dict(load.unexpected)}")
    print(f"before and after the kills: {lost or 'the same'}")
    print(f"after the shutdown: {left} processes, {held()['descriptors']}")
    return 1 if load.unexpected or any(lost.values()) or left else 0


_NUMBERED = re.compile(r"#\d+-|^asyncio_|-executor-|-control-worker-")
"""Names of threads that differ: of replicas, and of executors, which keep their threads."""


def differs(before: Any, after: Any) -> Any:
    """Return what there is more than before."""
    if isinstance(before, int):
        return max(0, after - before)
    if isinstance(before, dict):
        return {
            name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)
        }
    more = Counter(after) - Counter(before)
    return [name for name in more if not _NUMBERED.search(name)]


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
