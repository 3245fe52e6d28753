"""Batched calls, and models that are evicted for each other."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from tests.engines.api import serve
from tests.engines.client import Client, outcome, refused
from tests.engines.probe import here, hold, note, notes, open_gate, wait_for_notes, wait_until
from tests.engines.suite import Deviation, scenario

BATCH = "`@batch`"
EACH_AN_ERROR = (
    "callers of a batch that fails in any way (`CancelledError`, `SystemExit`, a `batch_size_fn` "
    "that raises)"
)


class Half:
    """An object inside a replica with its own batches."""

    def __init__(self, name: str) -> None:
        self.name = name

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.2)
    async def both(self, values: list[int]) -> list[Any]:
        return [[self.name, len(values)]] * len(values)


class Batches:
    def __init__(self) -> None:
        self.halves = [Half("left"), Half("right")]
        self.inside = 0
        self.most = 0

    @serve.batch(max_batch_size=3, batch_wait_timeout_s=30)
    async def full(self, values: list[int]) -> list[Any]:
        return [[value, len(values), values] for value in values]

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.05)
    async def after_a_while(self, values: list[int]) -> list[int]:
        return [len(values)] * len(values)

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0)
    async def single(self, values: list[int]) -> list[int]:
        return [value * 2 for value in values]

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def named(self, values: list[int], factors: list[int]) -> list[int]:
        return [value * factor for value, factor in zip(values, factors, strict=True)]

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def too_few(self, values: list[int]) -> list[int]:
        return values[:1]

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def no_list(self, values: list[int]) -> Any:
        return None

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def as_tuple(self, values: list[int]) -> Any:
        return tuple(values)

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def fails(self, values: list[int]) -> list[int]:
        raise ValueError(f"of {len(values)}")

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def is_cancelled(self, values: list[int]) -> list[int]:
        raise asyncio.CancelledError

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def an_error_among_them(self, values: list[int]) -> list[Any]:
        return [ValueError("as a value") if value else "fine" for value in values]

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def streams(self, counts: list[int]) -> AsyncIterator[list[Any]]:
        for number in range(max(counts)):
            yield [number if number < count else StopIteration for count in counts]

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def stream_fails(self, counts: list[int]) -> AsyncIterator[list[Any]]:
        yield counts
        raise ValueError("midway")

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.3, batch_size_fn=sum)
    async def weighed(self, weights: list[int]) -> list[Any]:
        return [sum(weights)] * len(weights)

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def place(self, values: list[int]) -> list[str]:
        return [here()] * len(values)

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0, max_concurrent_batches=2)
    async def side_by_side(self, values: list[str]) -> list[str]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await hold(values[0])
        self.inside -= 1
        return values

    @serve.batch(max_batch_size=1, batch_wait_timeout_s=0)
    async def one_at_a_time(self, values: list[str]) -> list[str]:
        note("turns", f"begin {values[0]}")
        await hold(f"turn-{values[0]}")
        note("turns", f"end {values[0]}")
        return values

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=1.0)
    async def with_one_less(self, values: list[str]) -> list[int]:
        note("one-less", values)
        return [len(values)] * len(values)

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=30)
    async def changed(self, values: list[int]) -> list[int]:
        return [len(values)] * len(values)

    async def change(self) -> list[Any]:
        self.changed.set_max_batch_size(2)
        self.changed.set_batch_wait_timeout_s(20.0)
        changed: Any = self.changed
        return [changed._get_max_batch_size(), changed._get_batch_wait_timeout_s()]

    async def of_two_instances(self) -> Any:
        return await asyncio.gather(*(half.both(1) for half in self.halves))

    async def together(self, method: str, calls: list[list[Any]]) -> Any:
        """Make these calls at once; return the results in their order."""
        found = (getattr(self, method)(*arguments) for arguments in calls)
        return [tell(each) for each in await asyncio.gather(*found, return_exceptions=True)]

    async def by_name(self) -> Any:
        batched: Any = self.named
        return await asyncio.gather(batched(2, factors=3), batched(4, factors=5))

    async def missing(self) -> Any:
        try:
            await self.named(1)  # type: ignore[call-arg]
        except TypeError as error:
            return "missing a required argument" in str(error)

    async def all_of(self, method: str, counts: list[int]) -> Any:
        async def one(count: int) -> Any:
            found: list[Any] = []
            try:
                async for item in getattr(self, method)(count):
                    found += [item]
            except ValueError as error:
                found.append(str(error))
            return found

        return await asyncio.gather(*map(one, counts))

    async def seen(self) -> int:
        return self.most


def tell(value: Any) -> Any:
    if isinstance(value, BaseException):
        return [type(value).__name__, str(value)]
    return value


def batches() -> Any:
    return serve.deployment(max_ongoing_requests=50)(Batches).bind()


@scenario(BATCH, batches)
def calls_that_arrive_together_are_one_batch_in_their_order(it: Client) -> Any:
    return it.call("together", "full", [[1], [2], [3]])


@scenario(BATCH, batches)
def more_calls_than_fit_are_several_batches(it: Client) -> Any:
    return it.call("together", "full", [[number] for number in range(6)])


@scenario(BATCH, batches)
def calls_by_handle_are_batched_too(it: Client) -> Any:
    calls = [it.handle.full.remote(number) for number in range(3)]
    return [call.result()[:2] for call in calls]


@scenario(BATCH, batches)
def a_batch_that_is_not_full_starts_after_a_while(it: Client) -> Any:
    return it.call("together", "after_a_while", [[1], [2]])


@scenario(BATCH, batches)
def a_batch_of_one_does_not_wait(it: Client) -> Any:
    return it.call("together", "single", [[1], [2]])


@scenario(BATCH, batches)
def each_parameter_is_a_list_also_by_name(it: Client) -> Any:
    return [it.call("together", "named", [[1, 2], [3, 4]]), it.call("by_name")]


@scenario(BATCH, batches)
def a_missing_argument_is_told_at_the_call(it: Client) -> Any:
    return it.call("missing")


@scenario(BATCH, batches)
def too_few_results_are_an_error_for_each(it: Client) -> Any:
    told = it.call("together", "too_few", [[1], [2]])
    return [[name, text.partition(".")[0]] for name, text in told]


@scenario(BATCH, batches)
def no_list_of_results_is_a_type_error(it: Client) -> Any:
    return [name for name, _ in it.call("together", "no_list", [[1], [2]])]


@scenario(BATCH, batches)
def a_tuple_of_results_is_fine(it: Client) -> Any:
    return it.call("together", "as_tuple", [[1], [2]])


@scenario(BATCH, batches)
def the_error_of_a_batch_is_that_of_each_caller(it: Client) -> Any:
    return it.call("together", "fails", [[1], [2]])


@scenario(BATCH, batches, Deviation("no caller hangs", row=EACH_AN_ERROR))
def callers_of_a_batch_that_is_cancelled_are_answered(it: Client) -> Any:
    calls = [it.handle.is_cancelled.remote(number) for number in range(2)]
    found = []
    for call in calls:
        try:
            call.result(timeout_s=2)
        except TimeoutError:
            found.append("hangs")
        except Exception:
            found.append("an error")
        call.cancel()
    return found


@scenario(BATCH, batches)
def an_error_among_the_results_is_a_value(it: Client) -> Any:
    return it.call("together", "an_error_among_them", [[0], [1]])


@scenario(BATCH, batches)
def a_batched_generator_streams_to_each_as_much_as_it_wants(it: Client) -> Any:
    return it.call("all_of", "streams", [1, 3])


@scenario(BATCH, batches)
def a_batched_generator_that_fails_has_given_its_items(it: Client) -> Any:
    return it.call("all_of", "stream_fails", [1, 2])


@scenario(
    BATCH,
    batches,
    Deviation("first in, first out", row="an item that does not fit by `batch_size_fn`"),
)
def a_batch_is_as_large_as_its_items_weigh(it: Client) -> Any:
    return it.call("together", "weighed", [[3], [3], [1], [1]])


@scenario(BATCH, batches)
def a_batch_runs_on_the_loop(it: Client) -> Any:
    return it.call("together", "place", [[1], [2]])


@scenario(BATCH, batches)
def batches_run_side_by_side_up_to_their_limit(it: Client) -> Any:
    calls = [it.handle.side_by_side.remote(f"side-{number}") for number in range(2)]
    wait_for_notes("side-0")
    wait_for_notes("side-1")
    calls.append(it.handle.side_by_side.remote("side-2"))  # not before: Ray may run it first
    it.call("seen")  # runs after that call, on the same loop
    third = len(notes("side-2"))
    for number in range(3):
        open_gate(f"side-{number}")
    return [[call.result() for call in calls], third, it.call("seen")]


@scenario(BATCH, batches)
def one_batch_runs_after_the_other(it: Client) -> Any:
    first = it.handle.one_at_a_time.remote("a")
    wait_for_notes("turn-a")
    second = it.handle.one_at_a_time.remote("b")
    open_gate("turn-b")
    open_gate("turn-a")
    return [first.result(), second.result(), notes("turns")]


@scenario(BATCH, batches)
def a_call_that_is_cancelled_before_its_batch_is_left_out(it: Client) -> Any:
    calls = [it.handle.with_one_less.remote("gone")]
    it.call("seen")  # runs after that call, on the same loop
    calls[0].cancel()
    outcome(calls[0].result)
    kept = it.handle.with_one_less.remote("kept")
    return [kept.result(), notes("one-less")]


@scenario(BATCH, batches)
def the_limits_of_a_batch_can_be_changed_while_it_runs(it: Client) -> Any:
    return [it.call("change"), it.call("together", "changed", [[1], [2]])]


@scenario(BATCH, batches, Deviation("instances share nothing", row="`@batch` queues"))
def each_instance_has_batches_of_its_own(it: Client) -> Any:
    return it.call("of_two_instances")


class OverHTTP:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
    async def __call__(self, requests: list[Request]) -> list[str]:
        return [f"{len(requests)} {request.query_params['n']}" for request in requests]


def over_http() -> Any:
    return serve.deployment(OverHTTP).bind()


@scenario(BATCH, over_http)
def http_requests_are_batched(it: Client) -> Any:
    asked = [it.start(it.get, f"/?n={number}") for number in range(2)]
    return [each.result().text for each in asked]


def batched_def() -> Any:
    class Plain:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=30)
        def work(self, values: list[int]) -> list[str]:
            return [here()] * len(values)

        async def together(self) -> Any:
            found = (self.work(number) for number in range(2))
            return [tell(each) for each in await asyncio.gather(*found, return_exceptions=True)]

    return serve.deployment(Plain).bind()


@scenario(
    BATCH,
    batched_def,
    Deviation("runs in the worker threads", row="`@batch` on a `def`, a `def` generator"),
)
def a_def_may_be_batched(it: Client) -> Any:
    found = it.call("together")
    return [each if isinstance(each, str) else each[0] for each in found]


@scenario(BATCH, None, Deviation("tests and scripts", row="`@batch` outside of a replica"))
def a_batch_runs_outside_of_a_replica(it: Client) -> Any:
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=5)
    async def doubled(values: list[int]) -> list[int]:
        return [value * 2 for value in values]

    async def two() -> Any:
        found = await asyncio.gather(doubled(1), doubled(2), return_exceptions=True)
        return [each if isinstance(each, int) else type(each).__name__ for each in found]

    return it.run(two())


# Models


class Model:
    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        note("models", f"del {self.name}")


class Models:
    @serve.multiplexed(max_num_models_per_replica=2)
    async def load(self, name: str) -> Model:
        if name.startswith("bad"):
            note("bad")
            raise ValueError(f"no {name}")
        if name.startswith("slow"):
            note("loads", name)
            await asyncio.sleep(0.05)
        note("models", f"load {name}")
        return Model(name)

    async def __call__(self, _: Any = None) -> str:
        name = serve.get_multiplexed_model_id()
        return (await self.load(name)).name if name else "none"

    async def same(self, name: str) -> bool:
        one, two = await asyncio.gather(self.load(name), self.load(name))
        return one is two


def models() -> Any:
    return serve.deployment(Models).bind()


class Loaders:
    @serve.multiplexed(max_num_models_per_replica=2)
    async def tokenizer(self, name: str) -> str:
        return f"tokenizer {name}"

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, name: str) -> str:
        return f"model {name}"

    async def __call__(self) -> Any:
        return [await self.tokenizer("x"), await self.model("x")]


def loaders() -> Any:
    return serve.deployment(Loaders).bind()


MODELS = "`@multiplexed`"


@scenario(MODELS, models, Deviation("`__del__` runs once", row="model `__del__`"))
def the_least_recently_used_model_makes_room(it: Client) -> Any:
    for name in ("a", "b", "a", "c"):
        assert it.handle.options(multiplexed_model_id=name).remote().result() == name
    wait_until(lambda: "load c" in notes("models"))
    found = notes("models")
    return found[: found.index("load c") + 1]


@scenario(MODELS, models)
def the_id_comes_from_a_handle_or_from_a_header(it: Client) -> Any:
    return [
        it.handle.options(multiplexed_model_id="slow-h").remote().result(),
        it.get("/", serve_multiplexed_model_id="slow-u").text,
        it.get("/", **{"Serve-Multiplexed-Model-Id": "slow-d"}).text,
        it.get("/").text,
    ]


@scenario(MODELS, models)
def a_model_that_several_ask_for_is_loaded_once(it: Client) -> Any:
    return [it.call("same", "slow-once"), notes("loads").count("slow-once")]


@scenario(MODELS, models)
def a_failed_load_is_raised_and_tried_again(it: Client) -> Any:
    bad = it.handle.options(multiplexed_model_id="bad-one")
    return [outcome(lambda: bad.remote().result(), says=True) for _ in range(2)] + notes("bad")


@scenario(
    MODELS,
    loaders,
    Deviation("a tokenizer is no model", row="`@multiplexed` methods of one object"),
)
def two_loaders_of_one_object_load_two_things(it: Client) -> Any:
    return it.handle.remote().result()


@scenario(MODELS, None)
def mistakes_with_multiplexed_are_told(it: Client) -> Any:
    def plain(name: str) -> None: ...

    async def loader(name: str) -> None: ...

    decorate: Any = serve.multiplexed
    return [
        refused(lambda: decorate(plain), "async"),
        refused(lambda: decorate(max_num_models_per_replica=0)(loader), "positive"),
        refused(lambda: decorate(max_num_models_per_replica="2")(loader), "integer"),
    ]
