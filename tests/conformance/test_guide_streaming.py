"""The guide "Asyncio and concurrency best practices": streaming semantics.

Over a real connection: bytes that a client has received have left the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

import ingress as serve
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from tests.conformance.observe import TIMEOUT_S, Gate, flag_values, here, online, served
from tests.servers import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")


class Stream:
    """Yields, waits at the gate, and yields again."""

    gate: Gate
    calls: list[str]

    def blocking(self) -> Iterator[str]:
        yield "first\n"
        self.gate.wait()
        yield "second\n"

    async def non_blocking(self) -> AsyncIterator[str]:
        yield "first\n"
        await self.gate.wait_async()
        yield "second\n"


class Generator(Stream):
    def __call__(self, request: Request) -> Iterator[str]:
        self.calls.append(here())
        yield from self.blocking()


class AsyncGenerator(Stream):
    async def __call__(self, request: Request) -> AsyncIterator[str]:
        self.calls.append(here())
        async for item in self.non_blocking():
            yield item


class ReturnsGenerator(Stream):
    def __call__(self, request: Request) -> Iterator[str]:
        self.calls.append(here())
        return self.blocking()


class AsyncDefReturnsAsyncGenerator(Stream):
    async def __call__(self, request: Request) -> AsyncIterator[str]:
        self.calls.append(here())
        return self.non_blocking()


class ReturnsStreamingResponse(Stream):
    async def __call__(self, request: Request) -> StreamingResponse:
        self.calls.append(here())
        return StreamingResponse(self.blocking(), media_type="text/plain")


def bound(cls: type[Stream], gate: Gate) -> tuple[serve.Application, list[str]]:
    calls: list[str] = []
    watched = type(cls.__name__, (cls,), {"gate": gate, "calls": calls})
    return serve.deployment(watched).bind(), calls


KINDS = [
    Generator,
    AsyncGenerator,
    ReturnsGenerator,
    AsyncDefReturnsAsyncGenerator,
    ReturnsStreamingResponse,
]


# "Streaming is different from a regular response because the client starts receiving data while
# your handler is still running."
# "Serve calls your handler once, gets back a generator or async generator, and then repeatedly asks
# it for the next chunk."
# "If you block between chunks, you delay the next piece of data to the client."
@pytest.mark.parametrize("flag", ["0", "1"])
@pytest.mark.parametrize("cls", KINDS)
def test_the_first_chunk_is_there_while_the_handler_still_runs(
    monkeypatch: pytest.MonkeyPatch, cls: type[Stream], flag: str
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, flag)
    gate = Gate()
    application, calls = bound(cls, gate)
    with online(application) as it, it.client.stream("GET", "/") as response:
        lines = response.iter_lines()
        assert next(lines) == "first"
        gate.wait_for(1)
        gate.open()
        assert list(lines) == ["second"]

    assert len(calls) == 1
    assert response.headers["content-type"] == "text/plain; charset=utf-8"


# "That generator code still runs on the same user event loop (or in a worker thread if you offload
# it)." is proven by tests/conformance/test_plain_http.py and test_methods.py, for every kind.


# "While the generator is blocked on the event loop, other requests on that loop can't make
# progress." "Blocks the event loop between yields."
def test_no_other_request_begins_while_a_generator_blocks_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "0")
    gate = Gate()
    application, calls = bound(Generator, gate)
    with online(application) as it, it.client.stream("GET", "/") as response:
        lines = response.iter_lines()
        assert next(lines) == "first"
        gate.wait_for(1)
        [other] = it.send()
        wait_until(lambda: it.ongoing() == 2)
        assert len(calls) == 1, "the replica has the other request, and cannot begin it"

        gate.open()
        assert list(lines) == ["second"]
        assert other.result().text == "first\nsecond\n"


# "Better streaming example: Yields items without blocking the loop."
# "Prefer async def generators that use await between yields."
@pytest.mark.parametrize(
    ("cls", "flag"), [(AsyncGenerator, "0"), (AsyncDefReturnsAsyncGenerator, "0"), (Generator, "1")]
)
def test_streams_that_leave_the_loop_free_go_on_side_by_side(
    monkeypatch: pytest.MonkeyPatch, cls: type[Stream], flag: str
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, flag)
    gate = Gate()
    application, calls = bound(cls, gate)
    with served(application) as it:
        responses = it.send(count=3)
        gate.wait_for(3)
        gate.open()
        assert {response.result().text for response in responses} == {"first\nsecond\n"}

    assert len(calls) == 3


class EndlessAsyncGenerator:
    produced = 0
    closed = False

    async def __call__(self) -> AsyncIterator[int]:
        try:
            for number in range(1_000_000):
                self.produced += 1
                yield number
        finally:
            self.closed = True

    async def progress(self) -> tuple[int, bool]:
        return self.produced, self.closed


class EndlessGenerator(EndlessAsyncGenerator):
    def __call__(self) -> Iterator[int]:  # type: ignore[override]
        try:
            for number in range(1_000_000):
                self.produced += 1
                yield number
        finally:
            self.closed = True


# "Integrates with backpressure and non-blocking iteration."
# "The system also cannot react quickly to slow clients (backpressure) or cancellation" holds for a
# generator that blocks the loop. For one that does not:
@pytest.mark.parametrize(
    ("flags", "cls"),
    [
        pytest.param(*flags.values, cls, id=f"{cls.__name__}-{flags.id}")
        for cls, combinations in {
            EndlessAsyncGenerator: flag_values(router="1"),
            EndlessGenerator: flag_values(sync="1", router="1"),
        }.items()
        for flags in combinations
    ],
    indirect=["flags"],
)
def test_a_generator_waits_for_a_slow_consumer_and_is_closed_when_it_leaves(
    flags: Settings, cls: type
) -> None:
    with served(serve.deployment(cls).bind(), flags) as it:

        def progress() -> Any:
            return it.handle.progress.remote().result(timeout_s=TIMEOUT_S)

        stream = it.handle.options(stream=True).remote()
        assert next(stream) == 0
        for _ in range(5):
            produced, closed = progress()
            assert produced < 100, "it runs ahead by what a channel holds, no more"
            assert not closed
        assert [next(stream) for _ in range(200)] == list(range(1, 201))

        stream.cancel()
        wait_until(lambda: progress()[1])
