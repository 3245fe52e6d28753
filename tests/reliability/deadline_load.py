"""A server under twice its load, with deadlines of one second and clients that disconnect.

Clients leave before their answer, and in the middle of streams and files. In the end no file,
descriptor, task, thread or slot of theirs may be left.

    python -m tests.reliability.deadline_load 1000000        by the flags 111
    python -m tests.reliability.deadline_load 1000000 all    by each of the eight combinations

The flags are those of the threadpool, the user loops and the router, in that order; 111 is all on.
On CPython 3.11 the server died twice in 560,000 of these requests, before requests had
`__slots__`. A server that dies is counted and restarted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.programs import INGRESS, ServerProcess, environment, process
from tests.reliability.load_app import SERVICE_S
from tests.servers import PATIENCE_S, get

TARGET = "tests.reliability.load_app:with_model"
REPLICAS = 2
SLOTS = 20
CAPACITY = REPLICAS * SLOTS / SERVICE_S
RATE = 2 * CAPACITY
CLIENTS = 2_500  # the requests in flight within a second, and some that linger
LARGEST = 4_000_000  # bytes of a stream
LEAVING = 0.1
LEAVING_LARGE = 0.8  # of those that have got the head of a stream or a file
SETTLES_S = 20.0
KEPT = {"threads": 40, "descriptors": 8}  # of the pool of threads; of what is made at first use
LARGE = ["/stream", "/file"]
PATHS = ["/async"] * 20 + ["/handle"] * 8 + ["/late"] * 8 + LARGE
IN_THREADS = [*PATHS, *["/def"] * 4]  # a `def` that sleeps on a loop stops all
FLAGS = ["".join(each) for each in itertools.product("01", repeat=3)]
EXPECTED = ("200", "408", "503", "left", "cut at its deadline")
HEADERS = "host: localhost\r\nx-request-timeout-seconds: {}\r\n"


@dataclass(slots=True)
class Outcome:
    """Counts of answers, of deaths of the server, and of what is left in it."""

    became: Counter[str] = field(default_factory=Counter)
    deaths: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def faults(self) -> dict[str, int]:
        """Return the counts of the outcomes that no request may have."""
        return {what: count for what, count in self.became.items() if what not in EXPECTED}

    def __str__(self) -> str:
        answers = ", ".join(f"{count:,} x {what}" for what, count in self.became.most_common())
        return (
            f"CPython {platform.python_version()}: {self.became.total():,} requests in "
            f"{self.seconds:.0f} s ({answers}); {len(self.deaths)} deaths, left: {self.left}"
        )


class Attack:
    """The clients. `port` changes when the server is restarted."""

    def __init__(self, requests: int, flags: str, *, is_told: bool) -> None:
        self.outcome = Outcome()
        self.port = 0
        self._requests = requests
        self._numbers = itertools.count()
        self._is_told = is_told
        self._flags = flags
        self._paths = IN_THREADS if flags[0] == "1" else PATHS

    async def run(self, folder: Path) -> Outcome:
        with ExitStack() as servers:
            server = await asyncio.to_thread(self._serve, servers, folder)
            before = await asyncio.to_thread(self._held)
            began = time.monotonic()
            clients = asyncio.gather(*(self._client(began) for _ in range(CLIENTS)))
            while not clients.done():
                await asyncio.wait([clients], timeout=1.0)
                self.outcome.seconds = time.monotonic() - began
                if server.process.poll() is not None:
                    self.outcome.deaths.append(f"{server.process.returncode}: {server.output}")
                    server = await asyncio.to_thread(self._serve, servers, folder)
                if self._is_told:
                    print(self.outcome, flush=True)
            clients.result()
            assert (await asyncio.to_thread(get, self.port, "/async")).status == 200
            ends = time.monotonic() + SETTLES_S
            while True:
                after = await asyncio.to_thread(self._held)
                self.outcome.left = {
                    what: count - before[what] - KEPT.get(what, 0)
                    for what, count in after.items()
                    if count > before[what] + KEPT.get(what, 0)
                }
                if not self.outcome.left or time.monotonic() > ends:
                    break
                await asyncio.sleep(0.5)
        return self.outcome

    def _held(self) -> dict[str, int]:
        held: dict[str, int] = json.loads(get(self.port, "/left").body)
        return held

    def _serve(self, servers: ExitStack, folder: Path) -> ServerProcess:
        settings = {"REPLICAS": REPLICAS, "SLOTS": SLOTS, "QUEUED": -1}
        sync, separate, router = list(self._flags)
        environ = environment(folder, sync=sync, separate=separate, router=router)
        environ |= {f"LOAD_{name}": str(value) for name, value in settings.items()}
        environ["PYTHONFAULTHANDLER"] = "1"
        command = [*INGRESS, "run", TARGET, "--port", "0"]
        server = servers.enter_context(process(command, folder, environ))
        server.wait_for("is ready")
        self.port = server.port
        return server

    async def _client(self, began: float) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while (number := next(self._numbers)) < self._requests:
            await asyncio.sleep(began + number / RATE - time.monotonic())
            became, is_used = "cut", True
            # Retry once: the server may have closed the idle connection.
            while became == "cut" and is_used:
                is_used = streams is not None
                try:
                    if streams is None:
                        streams = await asyncio.open_connection(
                            "127.0.0.1", self.port, limit=LARGEST
                        )
                    became = await self._ask(*streams)
                except TimeoutError:
                    became = "no answer"
                except (OSError, EOFError):
                    streams = None
            self.outcome.became[became] += 1
            if not became.isdigit() and streams is not None:
                streams[1].transport.abort()
                streams = None
        if streams is not None:
            streams[1].close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        path = random.choice(self._paths)
        headers = HEADERS.format(SERVICE_S if path == "/late" else 1)
        writer.write(f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode())
        if random.random() < LEAVING:
            await asyncio.sleep(random.uniform(0.0, 1.2))
            if random.random() < 0.5:
                writer.close()  # with FIN; else with RST
            return "left"
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            is_large = path in LARGE and b" 200 " in head
            try:
                if is_large and random.random() < LEAVING_LARGE:
                    await reader.readexactly(random.randrange(100_000))
                    if random.random() < 0.5:
                        writer.close()
                    return "left"
                if b"chunked" in head:
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
                    await reader.readexactly(int(length))
            except EOFError:
                if is_large:
                    return "cut at its deadline"
                raise
        if b"connection: close" in head:
            writer.close()
        return head.split()[1].decode()


def attack(requests: int, flags: str = "111", *, is_told: bool = False) -> Outcome:
    """Make that many requests by these flags, and return their outcome."""
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(Attack(requests, flags, is_told=is_told).run(Path(folder)))


def main(requests: int, combinations: list[str]) -> int:
    """Make that many requests, divided among the combinations; return the number of faults."""
    faults = 0
    for flags in combinations:
        outcome = attack(requests // len(combinations), flags, is_told=len(combinations) == 1)
        print(f"{flags}: {outcome}", *outcome.deaths, sep="\n", flush=True)
        faults += len(outcome.deaths) + len(outcome.faults) + len(outcome.left)
    return faults


if __name__ == "__main__":
    combination = sys.argv[2] if len(sys.argv) > 2 else "111"
    sys.exit(main(int(sys.argv[1]), FLAGS if combination == "all" else [combination]) > 0)
