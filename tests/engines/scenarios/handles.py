"""Calling deployments from Python: results, errors, cancellation, composition."""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tests.engines.api import serve
from tests.engines.client import Client, outcome, raised, refused, text
from tests.engines.probe import hold, note, notes, open_gate, wait_for_notes, wait_until
from tests.engines.suite import Deviation, scenario

BY_REFERENCE = Deviation(
    "in one process nothing is copied", row="arguments and results of handles", columns=("local",)
)
CHECKED = Deviation("a typo is found where it is made", row="`hasattr(handle, name)`")


class Odd(Exception):
    """A user's own error."""


class Worker:
    async def __call__(self, value: Any = None) -> Any:
        return value

    async def add(self, one: Any, other: Any = 0) -> Any:
        return one + other

    async def append(self, values: list[Any]) -> list[Any]:
        values.append("appended")
        return values

    async def fails(self, what: str) -> None:
        raise {"ValueError": ValueError, "KeyError": KeyError, "Odd": Odd}[what]("told so")

    def fails_in_def(self) -> None:
        raise ValueError("told so")

    async def fails_with_cause(self) -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    async def holds(self, key: str) -> str:
        try:
            await hold(key)
        except asyncio.CancelledError:
            note(f"{key}-ended", "cancelled")
            raise
        note(f"{key}-ended", "done")
        return "held"

    async def items(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def type_of(self, value: Any) -> str:
        return type(value).__name__

    async def nothing(self) -> None:
        return None

    async def lock(self) -> Any:
        import threading

        return threading.Lock()


def worker() -> Any:
    return serve.deployment(Worker).bind()


@scenario("Results and errors of handles", worker)
def a_result_comes_back_as_often_as_asked(it: Client) -> Any:
    response = it.handle.remote("value")

    async def twice() -> Any:
        other = it.handle.remote("awaited")
        return [await other, await other]

    return [response.result(), response.result(), it.run(twice())]


@scenario("Results and errors of handles", worker)
def keyword_arguments_and_defaults_arrive(it: Client) -> Any:
    add = it.handle.add
    return [add.remote(1).result(), add.remote(1, other=2).result(), add.remote(one=3).result()]


@scenario("Results and errors of handles", worker, BY_REFERENCE)
def what_a_method_does_to_its_argument_the_caller_does_not_see(it: Client) -> Any:
    mine: list[Any] = []
    result = it.call("append", mine)
    return {"result": result, "mine": mine}


@scenario("Results and errors of handles", worker, BY_REFERENCE)
def a_result_that_cannot_be_copied_is_an_error(it: Client) -> Any:
    try:
        return type(it.call("lock")).__name__
    except Exception:
        return "an error"


@scenario("Results and errors of handles", worker)
def an_error_of_user_code_is_caught_as_what_it_is(it: Client) -> Any:
    found = []
    for what in ("ValueError", "KeyError"):
        try:
            it.call("fails", what)
        except (ValueError, KeyError) as error:
            found.append([raised(error), text(error)])
    try:
        it.call("fails", "Odd")
    except Odd as error:
        found.append(["Odd", text(error)])
    return found


@scenario("Results and errors of handles", worker)
def an_error_of_a_def_is_caught_as_what_it_is(it: Client) -> Any:
    return outcome(lambda: it.call("fails_in_def"), says=True)


@scenario(
    "Results and errors of handles",
    worker,
    Deviation("in one process the error itself arrives, with its cause", columns=("local",)),
    Deviation("Ray's message without its traceback", columns=("ray",)),
)
def the_type_and_text_of_an_error_as_it_arrives(it: Client) -> Any:
    try:
        it.call("fails_with_cause")
    except ValueError as error:
        return [type(error).__name__, str(error).splitlines()[0][:20]]


class Leaving:
    async def leaves(self) -> None:
        raise SystemExit(3)

    async def stays(self) -> str:
        return "here"


def leaving() -> Any:
    return serve.deployment(graceful_shutdown_timeout_s=1)(Leaving).bind()


@scenario(
    "Results and errors of handles",
    leaving,
    Deviation(
        "the request fails and the replica lives",
        row="`SystemExit`, `KeyboardInterrupt` in user code",
    ),
)
def a_system_exit_of_user_code_does_not_end_the_replica(it: Client) -> Any:
    left = outcome(lambda: it.handle.leaves.remote().result(timeout_s=5))
    return [left, outcome(lambda: it.handle.stays.remote().result(timeout_s=5))]


@scenario("Results and errors of handles", worker)
def result_is_refused_inside_a_running_loop(it: Client) -> Any:
    async def inside() -> Any:
        response = it.handle.remote(1)
        refusal = outcome(response.result, says=True)
        return [refusal, await response]

    return it.run(inside())


@scenario("Results and errors of handles", worker)
def a_timeout_of_result_leaves_the_request_running(it: Client) -> Any:
    response = it.handle.holds.remote("result-timeout")
    wait_for_notes("result-timeout")
    late = outcome(lambda: response.result(timeout_s=0.05))
    open_gate("result-timeout")
    return [late, response.result()]


@scenario("Cancellation", worker)
def cancel_reaches_a_running_coroutine(it: Client) -> Any:
    response = it.handle.holds.remote("cancel")
    wait_for_notes("cancel")
    response.cancel()
    error = outcome(response.result)
    return [error, wait_for_notes("cancel-ended"), response.cancelled()]


@scenario("Cancellation", worker)
def a_cancelled_request_says_its_id(it: Client) -> Any:
    response = it.handle.holds.remote("cancel-id")
    wait_for_notes("cancel-id")
    response.cancel()
    told = outcome(response.result, says=True)
    told["says"] = told["says"].replace(response.request_id, "ID")
    return told


@scenario(
    "Cancellation", worker, Deviation("what was answered was not cancelled", row="`cancelled()`")
)
def cancel_after_the_answer_changes_nothing_but_what_cancelled_says(it: Client) -> Any:
    response = it.handle.remote("value")
    first = response.result()
    response.cancel()
    return [first, response.cancelled(), outcome(response.result)]


@scenario(
    "Cancellation", worker, Deviation("the call is over, wherever it is", row="`cancelled()`")
)
def cancelling_the_awaiting_task_is_a_cancelled_error(it: Client) -> Any:
    async def awaited() -> Any:
        response = it.handle.holds.remote("awaiter")
        task = asyncio.ensure_future(wait(response))
        await asyncio.sleep(0)  # the thread may be done before the task has begun
        await asyncio.to_thread(wait_for_notes, "awaiter")
        task.cancel()
        try:
            await task
        except asyncio.CancelledError as error:
            return [type(error).__name__, response.cancelled()]

    async def wait(response: Any) -> Any:
        return await response

    found = it.run(awaited())
    open_gate("awaiter")
    return found


@scenario("Responses as arguments", worker)
def a_response_as_an_argument_is_resolved_first(it: Client) -> Any:
    one, two = it.handle.add.remote(1, 1), it.handle.add.remote(2, 2)
    return it.handle.add.remote(one, other=two).result()


@scenario("Responses as arguments", worker)
def an_error_of_an_argument_is_the_error_of_the_call(it: Client) -> Any:
    failing = it.handle.fails.remote("ValueError")
    return outcome(lambda: it.handle.add.remote(failing).result(), says=True)


@scenario("Responses as arguments", worker)
def a_stream_as_an_argument_is_refused(it: Client) -> Any:
    stream = it.handle.options(stream=True).items.remote(2)
    return refused(
        lambda: it.handle.add.remote(stream).result(),
        "Streaming deployment handle results cannot be passed to downstream handle calls.",
    )


@scenario(
    "Responses as arguments",
    worker,
    Deviation("it arrives as it is, to be awaited there", columns=("local",)),
)
def a_response_inside_a_list_is_refused(it: Client) -> Any:
    inner = it.handle.remote(1)
    return outcome(lambda: it.call("type_of", [inner]))


@scenario("Methods of handles", worker)
def a_method_by_attribute_and_by_option_are_one(it: Client) -> Any:
    by_option = it.handle.options(method_name="add").remote(1, 2).result()
    return [it.handle.add.remote(1, 2).result(), by_option]


@scenario("Methods of handles", worker, CHECKED)
def an_attribute_that_is_no_method_is_an_error_at_once(it: Client) -> Any:
    return [hasattr(it.handle, "absent"), hasattr(it.handle, "add")]


@scenario("Methods of handles", worker)
def a_method_that_is_not_there_is_told_with_those_that_are(it: Client) -> Any:
    return refused(lambda: it.call("absent"), "absent", "does not exist", "add")


@scenario("Methods of handles", worker)
def an_unknown_option_of_a_handle_is_a_type_error(it: Client) -> Any:
    return outcome(lambda: it.handle.options(absent=1))


@scenario("Methods of handles", worker, Deviation("a handle is a value", columns=("local", "ray")))
def a_handle_can_be_copied_deeply(it: Client) -> Any:
    return outcome(lambda: copy.deepcopy(it.handle).remote(1).result())


def function(*args: Any) -> Any:
    return [*args]


def function_handle() -> Any:
    return serve.deployment(function).bind()


@scenario("Methods of handles", function_handle)
def a_function_is_called_by_any_method_name(it: Client) -> Any:
    return it.handle.anything.remote(1, 2).result()


# Generators: errors


class Streams:
    made = 0

    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    def plain_numbers(self, count: int) -> Iterator[int]:
        note("plain-started")
        yield from range(count)

    async def one(self) -> int:
        return 1

    def one_plain(self) -> int:
        return 1

    async def fails_midway(self) -> AsyncIterator[int]:
        yield 0
        raise ValueError("midway")

    async def held(self, key: str) -> AsyncIterator[str]:
        try:
            yield "first"
            await hold(key)
            yield "second"
        except asyncio.CancelledError:
            note(f"{key}-ended", "cancelled")
            raise
        finally:
            note(f"{key}-ended", "finally")

    def endless(self) -> Iterator[int]:
        for number in range(1000):
            self.made = number
            yield number

    async def made_so_far(self) -> int:
        return self.made


def streams() -> Any:
    return serve.deployment(max_ongoing_requests=8)(Streams).bind()


@scenario("Streams", streams)
def a_stream_is_iterated_in_a_thread_or_on_a_loop(it: Client) -> Any:
    async def on_loop() -> Any:
        return [each async for each in it.handle.options(stream=True).numbers.remote(3)]

    return [list(it.handle.options(stream=True).numbers.remote(3)), it.run(on_loop())]


@scenario("Streams", streams)
def a_stream_that_fails_midway_gives_its_items_first(it: Client) -> Any:
    found: list[Any] = []
    try:
        for item in it.handle.options(stream=True).fails_midway.remote():
            found += [item]
    except ValueError as error:
        found.append(text(error))
    return found


@scenario("Streams", streams)
def a_stream_is_no_single_result(it: Client) -> Any:
    stream = it.handle.options(stream=True).numbers.remote(1)

    async def awaited() -> Any:
        return await stream

    return [outcome(stream.result), outcome(lambda: it.run(awaited()), says=True), list(stream)]


@scenario("Streams", streams)
def iterating_a_stream_inside_a_loop_is_refused(it: Client) -> Any:
    async def inside() -> Any:
        stream = it.handle.options(stream=True).numbers.remote(2)
        refusal = outcome(lambda: next(stream), says=True)
        return [refusal, [each async for each in stream]]

    return it.run(inside())


@scenario("Mistakes with streams", streams)
def a_generator_that_is_called_without_stream_says_what_to_do(it: Client) -> Any:
    return outcome(lambda: it.call("numbers", 1), says=True)


@scenario("Mistakes with streams", streams)
def a_def_generator_that_is_called_without_stream_says_so_too(it: Client) -> Any:
    told = outcome(lambda: it.call("plain_numbers", 1), says=True)
    return [told, len(notes("plain-started"))]


@scenario("Mistakes with streams", streams)
def what_is_no_generator_cannot_be_streamed(it: Client) -> Any:
    return [
        outcome(lambda: list(it.handle.options(stream=True).one.remote()), says=True),
        outcome(lambda: list(it.handle.options(stream=True).one_plain.remote()), says=True),
    ]


@scenario("Cancellation", streams)
def a_cancelled_stream_raises_in_its_generator_and_runs_its_finally(it: Client) -> Any:
    stream = it.handle.options(stream=True).held.remote("stream")
    first = next(stream)
    wait_for_notes("stream")
    stream.cancel()
    return [first, wait_for_notes("stream-ended", 2), stream.cancelled()]


@scenario("Cancellation", streams)
def the_next_item_of_a_cancelled_stream_is_an_error(it: Client) -> Any:
    stream = it.handle.options(stream=True).held.remote("cancelled-next")
    next(stream)
    wait_for_notes("cancelled-next")
    stream.cancel()
    return outcome(lambda: next(stream))


@scenario(
    "Streams",
    streams,
    Deviation("back-pressure", row="sync generator in a thread", columns=("local",)),
    flags="1",
)
def a_generator_in_a_thread_waits_for_its_consumer(it: Client) -> Any:
    stream = it.handle.options(stream=True).endless.remote()
    found = [next(stream), next(stream)]
    before, made = -1, 0
    while made > before:  # until the generator waits, or has ended
        time.sleep(0.05)
        before, made = made, it.call("made_so_far")
    stream.cancel()
    return [found, "waits" if made < 100 else "far ahead"]


class Pair:
    """Two replicas, which know their rank."""

    def __init__(self) -> None:
        self.rank = serve.get_replica_context().rank.rank
        self.count = 0

    def add(self, value: int) -> int:
        self.count += value
        return self.count

    async def fails_in_one(self) -> str:
        if self.rank:
            raise ValueError("told so")
        return "fine"

    async def waits(self, key: str) -> str:
        await hold(key)
        return "waited"

    async def my_rank(self) -> int:
        return self.rank

    async def ranks(self, count: int) -> AsyncIterator[int]:
        for _ in range(count):
            yield self.rank


def pair() -> Any:
    return serve.deployment(num_replicas=2)(Pair).bind()


@scenario("Results and errors of handles", pair)
def a_broadcast_is_a_call_of_each_replica(it: Client) -> Any:
    async def awaited() -> Any:
        return await it.handle.broadcast("add", value=10).results_async()

    return [it.handle.broadcast("add", 1).results(), it.run(awaited())]


@scenario("Results and errors of handles", pair)
def the_arguments_of_a_broadcast_are_awaited_first(it: Client) -> Any:
    first = it.handle.add.remote(5)
    return sorted(it.handle.broadcast("add", first).results())


@scenario("Results and errors of handles", pair)
def an_error_of_one_replica_is_that_of_the_broadcast(it: Client) -> Any:
    found = it.handle.broadcast("fails_in_one").results(return_exceptions=True)

    async def awaited() -> Any:
        return await it.handle.broadcast("fails_in_one").results_async()

    return [
        sorted(each if isinstance(each, str) else raised(each) for each in found),
        outcome(lambda: it.handle.broadcast("fails_in_one").results()),
        outcome(lambda: it.run(awaited())),
    ]


@scenario("Results and errors of handles", pair)
def the_answers_of_a_broadcast_can_be_fetched_after_a_timeout(it: Client) -> Any:
    response = it.handle.broadcast("waits", "broadcast")
    late = outcome(lambda: response.results(timeout_s=0.2))
    open_gate("broadcast")
    return [late, response.results(), response.results()]


@scenario("Results and errors of handles", pair)
def what_a_broadcast_refuses(it: Client) -> Any:
    response = it.handle.broadcast("add", 0)

    async def blocks() -> Any:
        return response.results()

    async def awaits() -> Any:
        return await response

    return [
        outcome(lambda: response.results(timeout_s=-1)),
        outcome(lambda: it.run(blocks())),
        outcome(lambda: it.run(awaits())),
        sorted(response.results()),
    ]


@scenario("Methods of handles", pair)
def a_chosen_replica_runs_the_call_that_is_dispatched_to_it(it: Client) -> Any:
    async def choose() -> Any:
        found: list[Any] = []
        handle = it.handle.options(method_name="my_rank")
        async with handle.choose_replica() as one, handle.choose_replica() as other:
            for each in (one, other, one):
                try:
                    response = it.handle.dispatch(each)
                    found.append(await response in (0, 1))
                except RuntimeError as error:
                    found.append(text(error).replace(each.replica_id, "ID"))
            names = sorted(one.to_dict())
        return [found, names, one.replica_id in repr(one)]

    return it.run(choose())


@scenario("Methods of handles", pair)
def a_stream_is_dispatched_too(it: Client) -> Any:
    async def choose() -> Any:
        handle = it.handle.options(method_name="ranks", stream=True)
        async with handle.choose_replica() as chosen:
            return len({item async for item in handle.dispatch(chosen, 3)})

    return it.run(choose())


@scenario("Methods of handles", pair)
def a_selection_ends_with_its_context(it: Client) -> Any:
    async def choose() -> Any:
        async with it.handle.my_rank.choose_replica() as chosen:
            pass
        return await it.handle.dispatch(chosen)

    return outcome(lambda: it.run(choose()))


class Deep:
    """A queue of its own, whose depth it records for the policy."""

    def __init__(self) -> None:
        self.depth = 0

    def deepen(self, depth: int) -> None:
        self.depth = depth

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"depth": self.depth}


def by_depth(context: Any) -> tuple[int, dict[str, Any]]:
    """Return a replica for each call of a depth that is recorded, by both kinds of metrics."""
    mean = (context.aggregated_metrics or {}).get("depth", {})
    raw = (context.raw_metrics or {}).get("depth", {})
    latest = max((values[-1].value for values in raw.values()), default=0)
    return (2 if latest == 9 and max(mean.values()) > 5 else 1), {}


def deep() -> Any:
    scaling = {"min_replicas": 1, "max_replicas": 2, "metrics_interval_s": 0.1}
    pauses = {"look_back_period_s": 1.0, "upscale_delay_s": 0, "downscale_delay_s": 600}
    policy = {"policy": {"policy_function": "tests.engines.scenarios.handles:by_depth"}}
    return serve.deployment(autoscaling_config={**scaling, **pauses, **policy})(Deep).bind()


@scenario("Statuses over time", deep)
def a_policy_gets_what_record_autoscaling_stats_returns(it: Client) -> Any:
    it.call("deepen", 9)
    wait_until(lambda: len(it.handle.broadcast("deepen", 9).results()) == 2, "two replicas")
    return "two replicas"
