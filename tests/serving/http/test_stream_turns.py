"""Large parts of many streams leave turns of the HTTP loop to requests."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from ingress.core.base.types import DeploymentID
from ingress.core.calls.channel import Channel
from ingress.serving.http.reply import LARGE, TURN, Reply, stream_turns
from ingress.serving.replicas.router import Router
from tests.fakes import make_call

PART = 64 * 1024  # bytes
PARTS = TURN // PART


def test_each_turn_has_room_for_a_few_parts_in_order_of_arrival() -> None:
    async def scenario() -> None:
        sent: list[int] = []
        turns = stream_turns(asyncio.get_running_loop())

        async def stream(number: int) -> None:
            for _ in range(3):
                await turns.wait(PART)
                sent.append(number)

        streams = [asyncio.create_task(stream(number)) for number in range(20)]
        most = 0
        while not all(each.done() for each in streams):
            before = len(sent)
            await asyncio.sleep(0)
            most = max(most, len(sent) - before)

        assert most == PARTS
        assert len(sent) == 60
        assert list(dict.fromkeys(sent)) == [*range(20)]

    asyncio.run(scenario())


def test_large_parts_of_responses_take_turns_and_small_parts_do_not() -> None:
    async def most_sent_in_a_turn(size: int) -> int:
        sent = 0

        async def nothing() -> Any:
            raise AssertionError("no code reads the request")

        async def send(_: Any) -> None:
            nonlocal sent
            sent += 1

        async def stream() -> None:
            metadata = make_call().metadata
            reply = Reply(metadata, router, {"type": "http"}, nothing, send)
            outbound: Channel[Any] = Channel()
            message = {"type": "http.response.body", "body": bytes(size), "more_body": True}
            outbound.put_nowait(message, size)
            outbound.finish()
            await reply.forward(outbound)

        router = Router(DeploymentID("D"))
        streams = [asyncio.create_task(stream()) for _ in range(20)]
        most = 0
        while not all(each.done() for each in streams):
            before = sent
            await asyncio.sleep(0)
            most = max(most, sent - before)
        assert sent == len(streams)
        return most

    assert asyncio.run(most_sent_in_a_turn(LARGE)) == TURN // LARGE
    assert asyncio.run(most_sent_in_a_turn(TURN)) == 1
    assert asyncio.run(most_sent_in_a_turn(1024)) == 20


def test_a_stream_that_is_cancelled_takes_no_turn() -> None:
    async def scenario() -> None:
        turns = stream_turns(asyncio.get_running_loop())
        waiting = [asyncio.create_task(turns.wait(PART)) for _ in range(4 * PARTS)]
        await asyncio.sleep(0)
        gone, rest = waiting[PARTS : 3 * PARTS], waiting[3 * PARTS :]
        for each in gone:
            each.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        assert all(each.cancelled() for each in gone)
        async with asyncio.timeout(1):
            await asyncio.gather(*rest)
            await turns.wait(PART)

    asyncio.run(scenario())


def test_the_turns_of_a_loop_do_not_keep_it() -> None:
    loop = asyncio.new_event_loop()
    found = weakref.ref(loop)
    loop.run_until_complete(stream_turns(loop).wait(PART))
    loop.close()
    del loop
    gc.collect()

    assert found() is None
