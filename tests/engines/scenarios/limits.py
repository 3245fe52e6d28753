"""Limits on concurrent requests, and the requests beyond them."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI

from tests.engines.api import serve
from tests.engines.client import Client, outcome
from tests.engines.probe import (
    hold,
    hold_blocking,
    note,
    notes,
    open_gate,
    wait_for_notes,
    wait_until,
)
from tests.engines.suite import Deviation, scenario

EXACT = Deviation("exact, and with advice", row="`max_queued_requests`")


class Two:
    async def holds(self, key: str) -> str:
        await hold(key)
        return "held"

    async def stream(self, key: str) -> AsyncIterator[int]:
        yield 1
        await hold(key)
        yield 2

    async def quick(self) -> str:
        note("quick-ran")
        return "quick"


def two_slots() -> Any:
    return serve.deployment(max_ongoing_requests=2)(Two).bind()


@scenario("`max_ongoing_requests`", two_slots)
def no_more_requests_are_inside_than_allowed(it: Client) -> Any:
    calls = [it.handle.holds.remote("ongoing") for _ in range(4)]
    wait_for_notes("ongoing", 2)
    late = it.handle.quick.remote()
    waited = outcome(lambda: late.result(timeout_s=0.7))
    inside = len(notes("ongoing"))
    open_gate("ongoing")
    return [inside, waited, [call.result() for call in calls], late.result()]


@scenario("`max_ongoing_requests`", two_slots)
def a_stream_holds_its_slot_until_its_end(it: Client) -> Any:
    streams = [it.handle.options(stream=True).stream.remote("streams") for _ in range(2)]
    first = [next(stream) for stream in streams]
    wait_for_notes("streams", 2)
    late = it.handle.quick.remote()
    waited = outcome(lambda: late.result(timeout_s=0.7))
    open_gate("streams")
    return [first, waited, [list(stream) for stream in streams], late.result()]


@scenario("`max_ongoing_requests`", two_slots)
def a_cancelled_request_frees_its_slot(it: Client) -> Any:
    calls = [it.handle.holds.remote("freed") for _ in range(2)]
    wait_for_notes("freed", 2)
    calls[0].cancel()
    quick = it.handle.quick.remote().result(timeout_s=10)
    open_gate("freed")
    return [quick, calls[1].result()]


class OneThread:
    def holds(self, key: str) -> str:
        hold_blocking(key)
        return "held"

    async def quick(self) -> str:
        return "quick"


def one_slot() -> Any:
    return serve.deployment(max_ongoing_requests=1)(OneThread).bind()


@scenario(
    "Cancellation",
    one_slot,
    Deviation("`max_ongoing_requests` is a promise", row="a cancelled or timed-out `def`"),
    flags="1",
)
def a_cancelled_def_holds_its_slot_until_its_thread_returns(it: Client) -> Any:
    call = it.handle.holds.remote("thread")
    wait_for_notes("thread")
    call.cancel()
    late = it.handle.quick.remote()
    waited = outcome(lambda: late.result(timeout_s=1.0))
    open_gate("thread")
    return [outcome(call.result), waited, late.result()]


class Full:
    def __init__(self, key: str) -> None:
        self.key = key

    async def __call__(self, *_: Any) -> str:
        await hold(self.key)
        return "held"


def queue_of_one() -> Any:
    limited = serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
    return limited(Full).bind("queue")


@scenario("`max_queued_requests`", queue_of_one)
def a_call_beyond_the_queue_is_refused_with_the_numbers(it: Client) -> Any:
    calls = [it.handle.remote()]
    wait_for_notes("queue")
    calls.append(it.handle.remote())
    refused = outcome(lambda: late(it).result(timeout_s=10), says=True)
    refused["says"] = refused.get("says", "").partition(")")[0]
    open_gate("queue")
    return [refused, [call.result() for call in calls]]


def late(it: Client) -> Any:
    """Call until a call is refused at once: a router that estimates may accept one more."""
    import time

    for _ in range(20):
        response = it.handle.remote()
        try:
            response.result(timeout_s=0.3)
        except TimeoutError:
            response.cancel()
            time.sleep(0.1)
        except Exception:
            return response
    return response


def http_queue_of_one() -> Any:
    limited = serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
    return limited(Full).bind("http-queue")


@scenario("`max_queued_requests`", http_queue_of_one)
def over_http_it_is_a_503_with_that_text(it: Client) -> Any:
    return refused_over_http(it, "http-queue")


def refused_over_http(it: Client, key: str) -> Any:
    """Fill the slot and the queue of a deployment; return the answer to the next request."""
    calls = [it.start(it.get)]
    wait_for_notes(key)
    calls += [it.start(it.get) for _ in range(8)]  # one is queued, the others are not
    wait_until(lambda: any(call.done() for call in calls), key)
    answers = [call.result() for call in calls if call.done()]
    open_gate(key)
    response = answers[0]
    statuses = sorted({call.result().status_code for call in calls})
    body = response.text.partition("(")[0].strip()
    return [response.status_code, body, response.headers.get("retry-after"), statuses]


def http_429() -> Any:
    limited = serve.deployment(
        max_ongoing_requests=1,
        max_queued_requests=1,
        backpressure_config={"status_code": 429, "retry_after_s": 1.5},
    )
    return limited(Full).bind("http-429")


@scenario("`max_queued_requests`", http_429)
def a_deployment_may_answer_429_with_retry_after(it: Client) -> Any:
    return refused_over_http(it, "http-429")


api = FastAPI()


@serve.ingress(api)
class Caller:
    def __init__(self, child: Any) -> None:
        self.child = child

    @api.get("/")
    async def call(self) -> str:
        result: str = await self.child.remote()
        return result


def nested_queue() -> Any:
    limited = serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
    return serve.deployment(max_ongoing_requests=50)(Caller).bind(limited(Full).bind("nested"))


@scenario("`max_queued_requests`", nested_queue)
def the_refusal_of_a_child_is_the_answer_of_an_endpoint(it: Client) -> Any:
    return refused_over_http(it, "nested")


class Vanilla:
    def __init__(self, child: Any) -> None:
        self.child = child

    async def __call__(self, *_: Any) -> Any:
        return await self.child.remote()


def nested_vanilla() -> Any:
    limited = serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
    child = limited(Full).bind("nested-vanilla")
    return serve.deployment(max_ongoing_requests=50)(Vanilla).bind(child)


@scenario("`max_queued_requests`", nested_vanilla)
def the_refusal_of_a_child_is_the_answer_of_a_plain_deployment(it: Client) -> Any:
    return refused_over_http(it, "nested-vanilla")


class Replicas:
    async def __call__(self, key: str) -> str:
        await hold(key, serve.get_replica_context().replica_tag)
        return "held"


def three_replicas() -> Any:
    return serve.deployment(num_replicas=3, max_ongoing_requests=1)(Replicas).bind()


@scenario("`max_ongoing_requests`", three_replicas)
def each_replica_has_slots_of_its_own(it: Client) -> Any:
    calls = [it.handle.remote("replicas") for _ in range(3)]
    tags = wait_for_notes("replicas", 3)
    open_gate("replicas")
    return [len(set(tags)), [call.result() for call in calls]]
