"""An open-loop client, whose requests do not wait for each other, in a separate process.

    python -m benchmarks.open_loop PORT PATH RATE SECONDS DEADLINE_S

It sends RATE requests a second at even intervals, each on an idle connection, and counts a latency
from the moment when its request was due. DEADLINE_S goes into `x-request-timeout-seconds`; 0 sends
no header, and counts each 200 as good.

Prints one line of JSON: for each second the good answers (200, in time); the count of each
status, 0 for a connection that failed; median and p99 latency of the good answers in ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from statistics import quantiles
from typing import cast

import uvloop

PATIENCE_S = 5.0
"""Seconds to wait for answers after the last request."""


class Connection(asyncio.Protocol):
    """One connection that carries one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = b""
        self._due = 0.0
        self._is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, due: float) -> None:
        self._due, self._is_busy, self._received = due, True, b""
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        _, _, length = head.lower().partition(b"content-length:")
        if length and len(body) < int(length.split(b"\r\n")[0]):
            return
        self._is_busy = False
        self._load.answered(self._due, int(head[9:12]))
        if b"\r\nconnection: close" in head.lower():
            self._transport.close()
        else:
            self._load.idle.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_busy:
            self._is_busy = False
            self._load.answered(self._due, 0)
        elif self in self._load.idle:
            self._load.idle.remove(self)


class Load:
    """Requests at a steady rate, and their answers."""

    def __init__(self, port: int, path: str, deadline_s: float) -> None:
        limit = f"x-request-timeout-seconds: {deadline_s}\r\n" if deadline_s else ""
        self.request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{limit}\r\n".encode()
        self.idle: list[Connection] = []
        self._port = port
        self._deadline_s = deadline_s or float("inf")
        self._waiting = 0
        self._good: Counter[int] = Counter()
        self._statuses: Counter[int] = Counter()
        self._took_ms: list[float] = []

    async def run(self, rate: float, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._begin = begin = loop.time() + 0.1
        starting: set[asyncio.Task[None]] = set()
        for number in range(int(rate * seconds)):
            due = begin + number / rate
            if (early_s := due - loop.time()) > 0:
                await asyncio.sleep(early_s)
            self._waiting += 1
            if self.idle:
                self.idle.pop().ask(due)
            else:
                task = loop.create_task(self._ask_anew(due))
                starting.add(task)
                task.add_done_callback(starting.discard)
        until = loop.time() + PATIENCE_S
        while self._waiting and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._statuses[0] += self._waiting

    async def _ask_anew(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(
                lambda: Connection(self), "127.0.0.1", self._port
            )
        except OSError:
            self.answered(due, 0)
        else:
            made.ask(due)

    def answered(self, due: float, status: int) -> None:
        now = asyncio.get_running_loop().time()
        self._waiting -= 1
        self._statuses[status] += 1
        if status == 200 and now - due <= self._deadline_s:
            self._good[int(now - self._begin)] += 1
            self._took_ms.append((now - due) * 1e3)

    def found(self, seconds: float) -> dict[str, object]:
        cuts = quantiles(self._took_ms, n=100) if len(self._took_ms) > 1 else [0.0] * 99
        return {
            "good": [self._good[second] for second in range(int(seconds))],
            "statuses": dict(self._statuses),
            "p50_ms": cuts[49],
            "p99_ms": cuts[98],
        }


async def main(port: str, path: str, rate: str, seconds: str, deadline_s: str) -> None:
    load = Load(int(port), path, float(deadline_s))
    await load.run(float(rate), float(seconds))
    print(json.dumps(load.found(float(seconds))))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
