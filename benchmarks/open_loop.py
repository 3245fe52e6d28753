"""An open-loop load client in a separate process: requests are sent when they are due.

    python -m benchmarks.open_loop PORT '[{"path": "/", "rate": 100, ...}, ...]' FILE

`load` runs it. A latency counts from the moment a request was due, so that a server that makes its
clients wait does not look fast.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from time import monotonic
from typing import cast

import uvloop

from benchmarks.servers import ROOT

CUT, SILENT = 0, -1
"""Status of a request without an answer: its connection ended, or no bytes arrived."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one kind: `rate` a second, from `begin_s` on, for `seconds`.

    A request that is refused, or cut, is sent again at once up to `retries` times. With `rate` 0
    each of the `connections` sends its next request after each answer. `burst` requests are due at
    one moment. With a `body`, of JSON, each is a POST.
    """

    path: str
    rate: float
    seconds: float
    begin_s: float = 0.0
    headers: str = ""
    retries: int = 0
    connections: int = 200
    patience_s: float = 30.0
    burst: int = 1
    body: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: the time it was due, its latency from then, and its last status."""

    due_s: float
    latency_s: float
    status: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Load:
    """The outcomes of the requests of one stream."""

    stream: Stream
    sent: list[Sent] = field(repr=False)

    @property
    def statuses(self) -> Counter[int]:
        return Counter(each.status for each in self.sent)

    @property
    def lost(self) -> int:
        return sum(each.status in (CUT, SILENT) for each in self.sent)

    def p99_ms(self, *statuses: int, since_s: float = 0.0, quantile: float = 0.99) -> float:
        """Return the 99th percentile of the latencies of these statuses, of all without any."""
        found = sorted(
            each.latency_s
            for each in self.sent
            if each.due_s >= since_s and (not statuses or each.status in statuses)
        )
        return 1000 * found[math.ceil(quantile * len(found)) - 1] if found else 0.0

    def share(self, within_s: float, since_s: float = 0.0) -> float:
        """Return the share of all requests that had a 200 within a time of their due time."""
        good = sum(each.due_s >= since_s for each in self._good(within_s))
        return good / max(1, sum(each.due_s >= since_s for each in self.sent))

    def rate(self, *, within_s: float = math.inf, since_s: float = 0.0) -> float:
        """Return the number of 200s per second that arrived within a time of their due time."""
        good = [each for each in self._good(within_s) if each.due_s >= since_s]
        return len(good) / (self.stream.begin_s + self.stream.seconds - since_s)

    def worst_second(self, *, within_s: float = math.inf, since_s: float = 2.0) -> float:
        """Return the fewest 200s that arrived in one second of the load."""
        arrived = Counter(int(each.due_s + each.latency_s) for each in self._good(within_s))
        begin = self.stream.begin_s
        seconds = range(math.ceil(begin + since_s), math.floor(begin + self.stream.seconds))
        return min(arrived[second] for second in seconds)

    def _good(self, within_s: float) -> Iterable[Sent]:
        return (each for each in self.sent if each.status == 200 and each.latency_s <= within_s)


def load(port: int, *streams: Stream) -> list[Load]:
    """Send all streams to a server of `ingress` and return the outcome of each."""
    command = [sys.executable, "-m", "benchmarks.open_loop", str(port)]
    limit_s = max(each.begin_s + each.seconds + each.patience_s for each in streams) + 30
    with tempfile.NamedTemporaryFile() as answers:
        wanted = json.dumps([asdict(each) for each in streams])
        subprocess.run([*command, wanted, answers.name], cwd=ROOT, check=True, timeout=limit_s)
        found = json.loads(answers.read())
    return [
        Load(stream, [Sent(*each) for each in sent])
        for stream, sent in zip(streams, found, strict=True)
    ]


def closed_loop(port: int, path: str, connections: int, seconds: float) -> Load:
    """Measure a server's throughput: each connection sends its next request after each answer."""
    return load(port, Stream(path, rate=0, seconds=seconds, connections=connections))[0]


# The process of the client.


class Connection(asyncio.Protocol):
    """A keep-alive connection; one request at a time, answered with a `content-length`."""

    def __init__(self) -> None:
        self._received = b""
        self._answer: asyncio.Future[int] | None = None
        self._expected = -1
        self._status = CUT
        self.is_open = False

    def ask(self, request: bytes) -> asyncio.Future[int]:
        """Send a request; the future is its status."""
        self._received, self._expected = b"", -1
        self._answer = asyncio.get_running_loop().create_future()
        if self.is_open:
            self._transport.write(request)
        else:
            self._answer.set_result(CUT)
        return self._answer

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._expected < 0:
            head, found, _ = self._received.partition(b"\r\n\r\n")
            if not found:
                return
            lines = head.lower().split(b"\r\n")
            self._status = int(lines[0].split()[1])
            fields = dict(line.split(b": ", 1) for line in lines[1:])
            self._expected = len(head) + 4 + int(fields.get(b"content-length", b"0"))
            if fields.get(b"connection") == b"close":
                self.is_open = False
        if len(self._received) >= self._expected:
            self._settle(self._status)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._settle(CUT)

    def _settle(self, status: int) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)


class Client:
    """Sends one stream."""

    def __init__(self, port: int, stream: Stream, idle: list[Connection]) -> None:
        self._port, self._stream, self._idle = port, stream, idle
        method, fields = "GET", stream.headers
        if stream.body:
            method = "POST"
            fields += f"content-type: application/json\r\ncontent-length: {len(stream.body)}\r\n"
        head = f"{method} {stream.path} HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n"
        self._request = (head + stream.body).encode()
        self._free = asyncio.Semaphore(stream.connections)
        self._sent: list[Sent] = []

    async def run(self, began: float) -> list[Sent]:
        stream = self._stream
        async with asyncio.TaskGroup() as group:
            if not stream.rate:
                for _ in range(stream.connections):
                    group.create_task(self._again_and_again(began))
            for number in range(round(stream.rate * stream.seconds)):
                number -= number % stream.burst
                due = began + stream.begin_s + number / stream.rate
                if (left := due - monotonic()) > 0:
                    await asyncio.sleep(left)
                group.create_task(self._one(began, due))
        return self._sent

    async def _again_and_again(self, began: float) -> None:
        while (now := monotonic()) < began + self._stream.seconds:
            await self._one(began, now)

    async def _one(self, began: float, due: float) -> None:
        status, attempts = SILENT, 0
        try:
            async with asyncio.timeout(self._stream.patience_s):
                while attempts <= self._stream.retries:
                    attempts += 1
                    async with self._free:
                        status = await self._ask()
                    if 0 < status < 500 and status != 408:
                        break
        except TimeoutError:
            status = SILENT
        self._sent.append(Sent(due - began, monotonic() - due, status, attempts))

    async def _ask(self) -> int:
        connection = await self._connection()
        try:
            status = await connection.ask(self._request)
        except asyncio.CancelledError:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return status

    async def _connection(self) -> Connection:
        while self._idle:
            if (found := self._idle.pop()).is_open:
                return found
        loop = asyncio.get_running_loop()
        try:
            return (await loop.create_connection(Connection, "127.0.0.1", self._port))[1]
        except OSError:
            return Connection()  # not open: its requests count as cut


async def main(port: int, streams: list[Stream]) -> list[list[Sent]]:
    idle: list[Connection] = []
    began = monotonic() + 0.1
    clients = [Client(port, each, idle) for each in streams]
    found = await asyncio.gather(*(each.run(began) for each in clients))
    for connection in idle:
        connection.close()
    return found


if __name__ == "__main__":
    port, wanted, file = sys.argv[1:]
    became = uvloop.run(main(int(port), [Stream(**each) for each in json.loads(wanted)]))
    Path(file).write_text(json.dumps([[astuple(each) for each in sent] for sent in became]))
