"""Load clients that wrk lacks, in a separate process: `python -m benchmarks.client KIND PORT ...`.

    websocket   sends 32 characters and waits for them to come back, again and again
    leaving     sends a request on a keep-alive connection and waits for the answer; then sends one
                on a new connection, and disconnects after a moment without the answer

Prints one line of JSON: round trips per second, median and p99 latency of the awaited answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from statistics import quantiles
from time import perf_counter
from typing import cast

import uvloop

STAY_S = 0.002
"""Seconds after which a leaving client disconnects, so that the server has started."""

TEXT = b"x" * 32
MASK = b"\x01\x02\x03\x04"
UPGRADE = (
    b"GET /echo HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
# RFC 6455: a client masks its frames, a server does not.
SENT = (
    bytes([0x81, 0x80 | len(TEXT)])
    + MASK
    + bytes(byte ^ MASK[place % 4] for place, byte in enumerate(TEXT))
)
ECHOED = bytes([0x81, len(TEXT)]) + TEXT
CLOSE = b"\x88\x80" + MASK

ASK = b"GET /stay HTTP/1.1\r\nhost: localhost\r\n\r\n"
ANSWER = b'\r\n\r\n"hello"'
ASK_AND_LEAVE = b"GET /leave HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Conversation(asyncio.Protocol):
    """One connection: sends a request, and waits until the answer ends as expected."""

    def __init__(self) -> None:
        self._received = b""
        self._ending = b""
        self._answer: asyncio.Future[None] | None = None

    @classmethod
    async def begin(cls, port: int) -> Conversation:
        _, conversation = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return conversation

    async def ask(self, request: bytes, ending: bytes) -> bytes:
        """Return the answer. Raises `ConnectionError` if the server closes the connection first."""
        if self._transport.is_closing():
            raise ConnectionError("the server has hung up")
        self._received, self._ending = b"", ending
        self._answer = asyncio.get_running_loop().create_future()
        self.tell(request)
        await self._answer
        return self._received

    def tell(self, request: bytes) -> None:
        self._transport.write(request)

    def end(self) -> None:
        self._answer = None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._answer and not self._answer.done() and self._received.endswith(self._ending):
            self._answer.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer and not self._answer.done():
            said = self._received[:200]
            self._answer.set_exception(ConnectionError(f"the server hung up after {said!r}"))


async def websocket(port: int, until: float) -> list[float]:
    """Return the seconds each echo took."""
    took = []
    conversation = await Conversation.begin(port)
    answer = await conversation.ask(UPGRADE, b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 101 "):
        raise ConnectionError(f"no WebSocket: {answer[:200]!r}")
    while (begin := perf_counter()) < until:
        await conversation.ask(SENT, ECHOED)
        took.append(perf_counter() - begin)
    conversation.tell(CLOSE)
    conversation.end()
    return took


async def leaving(port: int, until: float) -> list[float]:
    """Return the seconds each answer took."""
    took = []
    staying = await Conversation.begin(port)
    while (begin := perf_counter()) < until:
        await staying.ask(ASK, ANSWER)
        took.append(perf_counter() - begin)
        left = await Conversation.begin(port)
        left.tell(ASK_AND_LEAVE)
        await asyncio.sleep(STAY_S)
        left.end()
    staying.end()
    return took


CLIENTS = {"websocket": websocket, "leaving": leaving}


async def main(kind: str, port: str, connections: str, seconds: str) -> None:
    client = CLIENTS[kind]
    begin = perf_counter()
    until = begin + float(seconds)
    found = await asyncio.gather(*(client(int(port), until) for _ in range(int(connections))))
    elapsed = perf_counter() - begin
    took_ms = [each * 1e3 for took in found for each in took]
    percentiles = quantiles(took_ms, n=100)
    print(json.dumps([len(took_ms) / elapsed, percentiles[49], percentiles[98]]))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
