"""A server under twice its load, with deadlines of one second and clients that disconnect.

    python -m tests.reliability.deadline_load 1000000

On CPython 3.11 the server died twice in 560,000 of these requests, before requests had
`__slots__`. A server that dies is counted and restarted.
"""

from __future__ import annotations

import asyncio
import itertools
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

from tests.reliability.load_app import SERVICE_S
from tests.servers import INGRESS, PATIENCE_S, ServerProcess, environment, get, process

TARGET = "tests.reliability.load_app:app"
REPLICAS = 2
SLOTS = 20
CAPACITY = REPLICAS * SLOTS / SERVICE_S
RATE = 2 * CAPACITY
CLIENTS = 2_500  # the requests in flight within a second, and some that linger
LEAVING = 0.1
PATHS = ["/async"] * 9 + ["/def"]
HEADERS = "host: localhost\r\nx-request-timeout-seconds: 1\r\n"


@dataclass(slots=True)
class Outcome:
    """Counts of answers, and of deaths of the server."""

    became: Counter[str] = field(default_factory=Counter)
    deaths: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        answers = ", ".join(f"{count:,} x {what}" for what, count in self.became.most_common())
        return (
            f"CPython {platform.python_version()}: {self.became.total():,} requests in "
            f"{self.seconds:.0f} s ({answers}); {len(self.deaths)} deaths"
        )


class Attack:
    """The clients. `port` changes when the server is restarted."""

    def __init__(self, requests: int, *, is_cancellation: bool = False) -> None:
        self.outcome = Outcome()
        self.port = 0
        self._requests = requests
        self._numbers = itertools.count()
        self._is_told = is_cancellation

    async def run(self, folder: Path) -> Outcome:
        with ExitStack() as servers:
            server = await asyncio.to_thread(self._serve, servers, folder)
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
        return self.outcome

    def _serve(self, servers: ExitStack, folder: Path) -> ServerProcess:
        settings = {"REPLICAS": REPLICAS, "SLOTS": SLOTS, "QUEUED": -1}
        environ = environment(folder, sync="1")
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
                        streams = await asyncio.open_connection("127.0.0.1", self.port)
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
        writer.write(f"GET {random.choice(PATHS)} HTTP/1.1\r\n{HEADERS}\r\n".encode())
        if random.random() < LEAVING:
            await asyncio.sleep(random.uniform(0.0, 1.2))
            if random.random() < 0.5:
                writer.close()  # with FIN; else with RST
            return "left"
        async with asyncio.timeout(PATIENCE_S):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
        if b"connection: close" in head:
            writer.close()
        return head.split()[1].decode()


def attack(requests: int, *, is_cancellation: bool = False) -> Outcome:
    """Make `count` requests and return their outcome."""
    with tempfile.TemporaryDirectory() as folder:
        return uvloop.run(Attack(requests, is_cancellation=is_cancellation).run(Path(folder)))


if __name__ == "__main__":
    outcome = attack(int(sys.argv[1]), is_cancellation=True)
    print(*outcome.deaths, sep="\n", end="")
    sys.exit(min(1, len(outcome.deaths)))
