"""`ingress.serving.replicas.multiplex`: loading, sharing and evicting models."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio.from_thread
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

import ingress as serve
from ingress.core.base.settings import Settings
from ingress.engines import local_engine
from ingress.exceptions import (
    ReplicaUnavailableError,
    RequestCancelledError,
    RequestCycleError,
    UserCodeExit,
)
from ingress.handle import DeploymentHandle
from ingress.testing import Latch
from tests.fakes import bind
from tests.servers import PATIENCE_S, Connection, result, served, turns, until, wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.usefixtures("shutdown"),
]


class Ledger:
    """The events of the models of these tests. Thread-safe.

    `hold(event)` holds loads and requests at that event until `let(event)`.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.loads: Counter[str] = Counter()
        self.unloads: Counter[str] = Counter()
        self.relays: Counter[str] = Counter()
        self.is_over = False
        self.alive = 0
        self.most_alive = 0
        self._held: dict[str, Latch] = {}
        self._lock = threading.Lock()

    def hold(self, *events: str) -> None:
        self._held |= {event: Latch() for event in events}

    def let(self, *events: str) -> None:
        for event in events:
            self._held.pop(event).count_down()

    def note(self, event: str) -> None:
        with self._lock:
            self.events.append(event)

    async def pass_by(self, what: str) -> None:
        self.note(what)
        if held := self._held.get(what):
            await held

    def saw(self, *events: str) -> None:
        """Wait until all these events were noted."""
        wait_until(lambda: set(events) <= set(self.events))

    def begins(self, model_id: str) -> None:
        with self._lock:
            self.loads[model_id] += 1
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)

    def ended(self, model_id: str) -> None:
        with self._lock:
            self.unloads[model_id] += 1
            self.alive -= 1


class Net:
    """A model. Its `__del__` blocks its thread, as freeing memory does."""

    def __init__(self, ledger: Ledger, model_id: str) -> None:
        self.ledger = ledger
        self.id = model_id
        self.is_loaded = True

    def __del__(self) -> None:
        self.is_loaded = False
        self.ledger.note(f"del {self.id} in {threading.current_thread().name}")
        self.ledger.ended(self.id)


class AsyncNet:
    def __init__(self, ledger: Ledger, model_id: str) -> None:
        self.ledger = ledger
        self.id = model_id

    async def __del__(self) -> None:
        await asyncio.sleep(0)
        self.ledger.note(f"async del {self.id} in {threading.current_thread().name}")


@serve.deployment
class Server:
    """A deployment with room for two models."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def __del__(self) -> None:
        self.ledger.note("del server")

    @serve.multiplexed(max_num_models_per_replica=2)
    async def model(self, model_id: str) -> Net:
        self.ledger.begins(model_id)
        try:
            await self.ledger.pass_by(f"load {model_id}")
            if model_id.startswith("bad"):
                raise ValueError(f"no model {model_id}")
            if model_id == "exit":
                raise SystemExit(3)
        except BaseException:
            self.ledger.ended(model_id)
            raise
        return Net(self.ledger, model_id)

    @serve.multiplexed(max_num_models_per_replica=1)
    async def tokenizer(self, model_id: str) -> AsyncNet:
        await self.ledger.pass_by(f"load tokenizer {model_id}")
        return AsyncNet(self.ledger, model_id)

    @serve.multiplexed(max_num_models_per_replica=-1)
    async def unlimited(self, model_id: str) -> str:
        self.ledger.loads[model_id] += 1
        return model_id

    async def __call__(self, model_id: str = "") -> str:
        """Use a model, by default the one the request names, while `use <id>` is held."""
        net = await self.model(model_id or serve.get_multiplexed_model_id())
        await self.ledger.pass_by(f"use {net.id}")
        assert net.is_loaded, "evicted while it was in use"
        return str(net.id)

    async def several(self, first: str, *others: str) -> str:
        """Use models one after the other; each is loaded while it is used."""
        for model_id in (first, *others):
            net = await self.model(model_id)
            assert net.is_loaded
            await self.ledger.pass_by(f"has {model_id} for {first}{len(others)}")
        return str(net.id)

    async def wants(self, have: list[str], want: str, name: str) -> str:
        """Get some models, then, after the ledger's gate, one more."""
        for model_id in have:
            await self.model(model_id)
        await self.ledger.pass_by(f"{name} has {have}")
        return str((await self.model(want)).id)

    async def leaves_a_task(self) -> None:
        async def use() -> list[str]:
            await asyncio.sleep(0)  # the request has ended
            return [(await self.model(f"t{number % 2}")).id for number in range(40)]

        self.task = asyncio.create_task(use())

    async def task_saw(self) -> list[str]:
        return await self.task

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=PATIENCE_S)
    async def together(self, numbers: list[int]) -> list[str]:
        net = await self.model(serve.get_multiplexed_model_id())
        await self.ledger.pass_by(f"use {net.id}")
        assert net.is_loaded
        return [net.id for _ in numbers]

    async def batched(self) -> str:
        return str(await self.together(1))

    async def relay(self, model_id: str) -> str:
        """Use a model until the next request for it has arrived and had time to get it."""
        self.ledger.relays[model_id] += 1
        mine = self.ledger.relays[model_id]
        net = await self.model(model_id)
        await until(lambda: self.ledger.relays[model_id] != mine or self.ledger.is_over)
        await turns(20)
        assert net.is_loaded
        return str(net.id)

    async def tokens(self, model_id: str) -> str:
        return (await self.tokenizer(model_id)).id

    async def both(self, model_id: str) -> list[str]:
        return [type(await load(model_id)).__name__ for load in (self.model, self.tokenizer)]

    async def any_number(self, count: int) -> int:
        for number in range(count):
            await self.unlimited(str(number))
        return sum(self.ledger.loads.values())

    async def stream(self, model_id: str) -> AsyncIterator[str]:
        net = await self.model(model_id)
        yield "begins"
        await self.ledger.pass_by("streams")
        assert net.is_loaded
        yield "ends"

    def in_thread(self, model_id: str) -> str:
        net = anyio.from_thread.run(self.model, model_id)
        self.ledger.note(f"thread has {model_id}")
        if held := self.ledger._held.get("thread"):
            held.wait()
        assert net.is_loaded
        return str(net.id)

    async def on_another_loop(self, model_id: str) -> str:
        net = await asyncio.to_thread(lambda: asyncio.run(self.model(model_id)))
        return str(net.id)

    async def by_keyword(self, model_id: str) -> str:
        return str((await self.model(model_id=model_id)).id)

    async def wrong(self, *args: Any, **kwargs: Any) -> None:
        await self.model(*args, **kwargs)

    async def gives_up(self, model_id: str) -> str:
        try:
            async with asyncio.timeout(0.01):
                await self.model(model_id)
        except TimeoutError:
            return "gave up"
        return "got it"


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def one(ledger: Ledger) -> DeploymentHandle:
    """Serve one replica, at the default flags."""
    return serve.run(bind(Server, ledger), name="app", route_prefix=None)


@pytest.fixture
def server(flags: Settings, one: DeploymentHandle) -> DeploymentHandle:
    """Serve one replica, at combinations of the flags."""
    return one


# Decoration and arguments.


async def good(model_id: str) -> str:
    return model_id


def sync(model_id: str) -> str:
    return model_id


async def generator(model_id: str) -> Any:
    yield model_id


async def three(self: Any, model_id: str, more: str) -> str:
    return model_id


async def no_id(self: Any) -> str:
    return "the same for all"


@pytest.mark.parametrize(
    ("decorate", "text"),
    [
        (lambda: serve.multiplexed(sync), "only be used to decorate async functions"),  # type: ignore[type-var]
        (lambda: serve.multiplexed(generator), "to decorate async functions"),
        (lambda: serve.multiplexed()(3), "must be used with a function or method"),  # type: ignore[type-var]
        (lambda: serve.multiplexed(three), "must take exactly one argument"),
        (lambda: serve.multiplexed(no_id), r"exactly one argument.*no_id: \(self"),
        (lambda: serve.multiplexed(3), "give the limit by name"),  # type: ignore[call-overload]
    ],
    ids=["def", "generator", "no function", "three", "no id", "bare limit"],
)
def test_a_mistake_is_refused_where_it_is_made(decorate: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        decorate()


@pytest.mark.parametrize(
    ("limit", "error", "text"),
    [
        (0, ValueError, "positive"),
        (-2, ValueError, "positive"),
        (1.5, TypeError, "an integer"),
        (True, TypeError, "an integer"),
    ],
)
def test_a_limit_is_a_positive_integer(limit: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"max_num_models_per_replica must be {text}"):
        serve.multiplexed(max_num_models_per_replica=limit)


@pytest.mark.anyio
async def test_outside_of_a_replica_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="can only be used within a deployment"):
        await serve.multiplexed(good)("m")


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((), TypeError, "must take exactly one argument"),
        (("a", "b"), TypeError, "must take exactly one argument"),
        ((3,), TypeError, r"The model ID must be a string, got 3"),
        (("",), ValueError, "The model ID cannot be empty"),
    ],
    ids=["none", "two", "int", "empty"],
)
def test_what_is_no_model_id_is_refused(
    one: DeploymentHandle, args: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        result(one.wrong.remote(*args))


def test_a_handle_takes_no_model_id_that_is_no_string(one: DeploymentHandle) -> None:
    with pytest.raises(TypeError, match=r"multiplexed_model_id must be a string, got \['a'\]"):
        one.options(multiplexed_model_id=["a"])  # type: ignore[arg-type]


def test_the_id_may_be_given_by_name(one: DeploymentHandle, ledger: Ledger) -> None:
    assert result(one.by_keyword.remote("a")) == "a"
    assert result(one.remote("a")) == "a"
    assert ledger.loads == {"a": 1}


# The cache.


def test_the_one_not_used_for_longest_goes_and_its_del_runs_once_in_a_thread(
    server: DeploymentHandle, ledger: Ledger, flags: Settings
) -> None:
    for model_id in ("a", "b", "a", "c", "a", "b"):
        assert result(server.remote(model_id)) == model_id
    gc.collect()

    assert ledger.loads == {"a": 1, "b": 2, "c": 1}
    assert ledger.unloads == {"b": 1, "c": 1}
    (gone,) = (event for event in ledger.events if event.startswith("del b in"))
    assert "Server#0-worker" in gone or "ingress-user-worker" in gone


def test_an_async_del_is_awaited_once(server: DeploymentHandle, ledger: Ledger) -> None:
    for model_id in ("a", "b"):
        assert result(server.tokens.remote(model_id)) == model_id
    gc.collect()

    gone = [event for event in ledger.events if event.startswith("async del")]
    assert [event.split()[2] for event in gone] == ["a"]


def test_two_methods_of_an_object_have_a_cache_each(one: DeploymentHandle, ledger: Ledger) -> None:
    assert result(one.both.remote("a")) == ["Net", "AsyncNet"]
    assert result(one.both.remote("b")) == ["Net", "AsyncNet"]

    assert ledger.loads == {"a": 1, "b": 1}
    assert not ledger.unloads, "there is room for two of these, and for one of the others"


def test_minus_one_is_no_limit(one: DeploymentHandle) -> None:
    assert result(one.any_number.remote(200)) == 200
    assert result(one.any_number.remote(200)) == 200


def test_the_first_request_for_a_model_may_leave_and_the_others_get_the_model(
    server: DeploymentHandle, ledger: Ledger
) -> None:
    ledger.hold("load a")
    first = server.remote("a")
    ledger.saw("load a")
    others = [server.remote("a") for _ in range(5)]
    deployment = serve.status().applications["app"].deployments["Server"]
    assert deployment.requests == 6
    wait_until(lambda: result(server.gives_up.remote("a")) == "gave up")  # the others wait by now
    first.cancel()
    with pytest.raises(RequestCancelledError):
        result(first)
    assert result(server.gives_up.remote("a")) == "gave up"
    ledger.let("load a")

    assert [result(response) for response in others] == ["a"] * 5
    assert ledger.loads == {"a": 1}


def test_a_load_without_waiting_requests_is_cancelled_and_starts_again_for_the_next(
    server: DeploymentHandle, ledger: Ledger
) -> None:
    ledger.hold("load a")
    assert result(server.gives_up.remote("a")) == "gave up"
    wait_until(lambda: ledger.unloads["a"] == 1)
    ledger.let("load a")

    assert result(server.remote("a")) == "a"
    assert ledger.loads["a"] == 2


@pytest.mark.parametrize(("model_id", "error"), [("bad", ValueError), ("exit", UserCodeExit)])
def test_a_load_that_fails_fails_all_who_wait_is_logged_once_and_tried_again(
    server: DeploymentHandle,
    ledger: Ledger,
    model_id: str,
    error: type[Exception],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger.hold(f"load {model_id}")
    responses = [server.remote(model_id) for _ in range(5)]
    ledger.saw(f"load {model_id}")
    wait_until(lambda: result(server.gives_up.remote(model_id)) == "gave up")
    ledger.let(f"load {model_id}")

    for response in responses:
        with pytest.raises(error):
            result(response)
    (failed,) = (vars(each) for each in caplog.records if "Failed to load model" in each.message)
    assert failed["request_id"] == responses[0].request_id
    assert failed["multiplexed_model_id"] == model_id
    with pytest.raises(error):
        result(server.remote(model_id))
    assert ledger.loads[model_id] == 2
    assert [result(server.remote(each)) for each in "abc"] == ["a", "b", "c"], "its room is free"


def test_different_models_load_side_by_side_as_long_as_there_is_room(
    server: DeploymentHandle, ledger: Ledger
) -> None:
    loads = [f"load {model_id}" for model_id in "abc"]
    ledger.hold(*loads)
    responses = [server.remote(model_id) for model_id in "abc"]
    wait_until(lambda: sum(ledger.loads.values()) == 2)
    ledger.let(*loads)

    assert [result(response) for response in responses] == ["a", "b", "c"]
    assert ledger.most_alive == 2


def test_a_model_goes_under_no_request_that_runs(server: DeploymentHandle, ledger: Ledger) -> None:
    ledger.hold("use a", "use b")
    using = [server.remote("a"), server.remote("b")]
    ledger.saw("use a", "use b")
    waiting = server.remote("c")
    assert result(server.gives_up.remote("c")) == "gave up"
    assert not ledger.unloads
    assert ledger.loads["c"] == 0
    ledger.let("use b")

    assert result(waiting) == "c"
    assert ledger.unloads == {"b": 1}
    ledger.let("use a")
    assert [result(response) for response in using] == ["a", "b"]


@pytest.mark.parametrize("user", ["use a", "streams", "thread"])
def test_a_batch_a_stream_and_a_cancelled_def_keep_their_model_to_their_end(
    user: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "1")
    handle = serve.run(bind(Server, ledger), route_prefix=None)
    ledger.hold(user, "use b")
    if user == "use a":
        batched = handle.options(multiplexed_model_id="a").batched
        using = [batched.remote(), batched.remote()]
        ledger.saw("use a")
    elif user == "streams":
        stream = handle.options(stream=True).stream.remote("a")
        assert next(stream) == "begins"
    else:
        cancelled = handle.in_thread.remote("a")
        ledger.saw("thread has a")
        cancelled.cancel()
        with pytest.raises(RequestCancelledError):
            result(cancelled)
    other = handle.remote("b")
    ledger.saw("use b")
    assert result(handle.gives_up.remote("c")) == "gave up"
    assert ledger.loads == {"a": 1, "b": 1}
    assert not ledger.unloads
    ledger.let(user)
    if user == "use a":
        assert [result(each) for each in using] == ["a", "a"]
    elif user == "streams":
        assert [*stream] == ["ends"]
    assert result(handle.remote("c")) == "c"
    assert ledger.unloads == {"a": 1}
    ledger.let("use b")
    assert result(other) == "b"


def test_a_request_that_asks_for_more_than_fits_gives_up_its_own(
    server: DeploymentHandle, ledger: Ledger
) -> None:
    assert result(server.several.remote("a", "b", "c", "d")) == "d"
    assert ledger.unloads == {"a": 1, "b": 1}
    assert ledger.most_alive == 2


def test_two_requests_that_use_what_the_other_needs_do_not_hang(
    server: DeploymentHandle, ledger: Ledger
) -> None:
    """Both use a and b. One wants c, the other d: neither can get it before the other ends."""
    both = [f"{name} has ['a', 'b']" for name in ("one", "other")]
    ledger.hold(*both)
    responses = [server.wants.remote(["a", "b"], *each) for each in [("c", "one"), ("d", "other")]]
    ledger.saw(*both)
    ledger.let(*both)

    answers: list[Any] = []
    for response in responses:
        try:
            answers.append(result(response))
        except RequestCycleError as error:
            answers.append(str(error))
    failed = [each for each in answers if "max_num_models_per_replica=2" in each]
    assert len(failed) == 1
    assert "Raise max_num_models_per_replica of Server.model" in failed[0]
    assert {*answers} - {*failed} < {"c", "d"}


@serve.deployment
class Cascade:
    """A deployment that calls itself for another model; it may wait in a thread."""

    def __init__(self, *, waits_in_thread: bool = False) -> None:
        self.waits_in_thread = waits_in_thread

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, model_id: str) -> str:
        return model_id

    async def __call__(self, depth: int) -> str:
        self.lowest = depth
        model = await self.model(str(depth))
        if depth == 0:
            return model
        child = serve.get_deployment_handle("Cascade").remote(depth - 1)
        if self.waits_in_thread:
            return model + str(await asyncio.to_thread(child.result))
        await until(lambda: self.lowest < depth)
        await turns()  # so that the child waits for room before it is awaited
        return model + str(await child)


def test_a_cycle_that_a_thread_breaks_while_its_requests_leave_keeps_no_room(
    flags: Settings, switch_interval: None
) -> None:
    """Race of the thread, which fails a load, with the loop, which gives it room."""
    handle = serve.run(bind(Cascade, waits_in_thread=True), route_prefix=None)
    outcomes: Counter[str] = Counter()
    for number in range(150):
        response = handle.remote(1)
        if number % 3:
            time.sleep(number % 10 * 0.0003)  # until somewhere in the chain
            response.cancel()
        try:
            result(response)
        except (RequestCancelledError, RequestCycleError) as error:
            outcomes[type(error).__name__] += 1
    assert result(handle.remote(0)) == "0"
    (replica,) = local_engine().applications["default"].ingress.replicas
    wait_until(lambda: not replica.context.models.in_use)

    assert outcomes["RequestCancelledError"]
    assert outcomes["RequestCycleError"] >= 50
    assert outcomes.total() == 150


@serve.deployment
class Owner:
    """A deployment with one model, whose owner asks for another one in calls of its own."""

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, model_id: str) -> str:
        return model_id

    async def asks(self) -> str:
        return await self.model("wanted")

    async def __call__(self, left: list[Any]) -> None:
        await self.model("mine")
        handle = serve.get_deployment_handle("Owner")
        left.append(handle.asks.remote())  # waits for the model, too, and is awaited by no one
        await turns()
        await handle.asks.remote()


def test_a_request_outside_of_a_cycle_gets_the_model_that_the_cycle_waited_for(
    separate: str,
) -> None:
    handle = serve.run(bind(Owner), route_prefix=None)
    left: list[Any] = []

    with pytest.raises(RequestCycleError, match="Owner -> Owner"):
        result(handle.remote(left))

    assert result(left[0]) == "wanted"


@serve.deployment
class Nested:
    """A deployment with two models whose loads need a model, another one or their own."""

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, model_id: str) -> str:
        needs = {"outer": "inner", "own": "own"}.get(model_id)
        return model_id if needs is None else f"{model_id}, {await self.model(needs)}"

    async def __call__(self, model_id: str) -> str:
        return await self.model(model_id)


@pytest.mark.parametrize(
    ("deployment", "asked", "told", "fits"),
    [
        (Nested, "own", "waits for its own answer", "inner"),
        (Nested, "outer", "Model 'inner' can never be loaded", "inner"),
        (Cascade, 1, "Model '0' can never be loaded", 0),
    ],
    ids=["its own model", "the room of its own model", "a child that needs its room"],
)
def test_a_load_that_needs_what_it_holds_is_told_so_and_the_room_is_free_again(
    deployment: Any, asked: Any, told: str, fits: Any
) -> None:
    handle = serve.run(bind(deployment), route_prefix=None)
    with pytest.raises(RequestCycleError, match=told):
        result(handle.remote(asked))
    assert result(handle.remote(fits)) == str(fits)


@serve.deployment
class Recursive:
    """A deployment that calls itself for the model it uses."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, model_id: str) -> str:
        return model_id

    async def __call__(self, depth: int) -> str:
        model_id = serve.get_multiplexed_model_id()
        self.ledger.note(f"{model_id} {depth}")
        model = str(await self.model(model_id))
        if depth == 0:
            return model
        await self.ledger.pass_by("uses it")
        handle = serve.get_deployment_handle("Recursive").options(multiplexed_model_id=model_id)
        return model + str(await handle.remote(depth - 1))


def test_a_child_for_the_same_model_passes_the_load_that_waits_for_its_parent(
    flags: Settings, ledger: Ledger
) -> None:
    ledger.hold("uses it")
    handle = serve.run(bind(Recursive, ledger), route_prefix=None)
    parent = handle.options(multiplexed_model_id="a").remote(2)
    ledger.saw("uses it")
    other = handle.options(multiplexed_model_id="b").remote(0)
    ledger.saw("b 0")
    ledger.let("uses it")
    assert result(parent) == "aaa"
    assert result(other) == "b"


def test_a_model_that_always_has_requests_makes_room_in_the_end(
    server: DeploymentHandle, ledger: Ledger
) -> None:
    """Each request for a, and for b, ends after the next one arrived: both are always in use."""

    def relay(model_id: str) -> None:
        previous = server.relay.remote(model_id)
        while not ledger.is_over:
            following = server.relay.remote(model_id)
            assert result(previous) == model_id
            previous = following
        assert result(previous) == model_id

    with ThreadPoolExecutor() as threads:
        relays = [threads.submit(relay, model_id) for model_id in "ab"]
        try:
            wait_until(lambda: ledger.relays["a"] > 5 and ledger.relays["b"] > 5)
            for number in range(5):
                assert result(server.remote(f"c{number}")) == f"c{number}"
        finally:
            ledger.is_over = True
        for each in relays:
            each.result()
    assert ledger.most_alive == 2


def test_a_request_for_a_model_about_to_be_evicted_waits_behind_the_load_that_evicts_it(
    one: DeploymentHandle, ledger: Ledger
) -> None:
    ledger.hold("use a", "use b", "load c")
    using = [one.remote("a"), one.remote("b")]
    ledger.saw("use a", "use b")
    waiting = one.remote("c")
    assert result(one.gives_up.remote("c")) == "gave up"  # by now the first waits for room
    assert result(one.gives_up.remote("a")) == "gave up", "a was used longest ago"
    assert result(one.gives_up.remote("b")) == "got it"
    ledger.let("use a")
    ledger.saw("load c")
    assert ledger.unloads == {"a": 1}
    ledger.let("load c", "use b")
    assert result(waiting) == "c"
    assert [result(response) for response in using] == ["a", "b"]
    assert result(one.remote("a")) == "a"


def test_it_can_be_called_from_another_loop_and_from_a_thread(
    server: DeploymentHandle, ledger: Ledger, flags: Settings
) -> None:
    assert result(server.on_another_loop.remote("a")) == "a"
    if flags.run_sync_in_threadpool:
        assert result(server.in_thread.remote("a")) == "a"
    assert ledger.loads == {"a": 1}


# Functions, constructors, nested loads.


loaded: list[str] = []


@serve.multiplexed(max_num_models_per_replica=1)
async def load(model_id: str) -> str:
    loaded.append(f"{model_id}#{serve.get_replica_context().replica_tag}")
    return model_id


@serve.deployment
async def function(model_id: str) -> str:
    return await load(model_id)


def test_a_function_deployment_has_a_cache_per_replica() -> None:
    loaded.clear()
    handle = serve.run(function.options(num_replicas=2).bind(), route_prefix=None)
    for _ in range(40):
        assert result(handle.remote("a")) == "a"

    assert sorted(loaded) == ["a#0", "a#1"]


@serve.deployment
class Ensemble:
    """A deployment that loads a model in its constructor, and others as parts of a model."""

    async def __init__(self) -> None:  # type: ignore[misc]
        self.loaded: list[str] = []
        await self.part("first")

    @serve.multiplexed(max_num_models_per_replica=2)
    async def part(self, model_id: str) -> str:
        self.loaded.append(f"{model_id}:{serve.get_multiplexed_model_id()}")
        return model_id

    @serve.multiplexed
    async def whole(self, model_id: str) -> str:
        return "".join([await self.part(part) for part in model_id])

    async def __call__(self, model_id: str) -> tuple[str, list[str]]:
        return await self.whole(model_id), self.loaded


def test_a_constructor_and_a_load_may_load_models() -> None:
    handle = serve.run(bind(Ensemble), route_prefix=None)
    whole, parts = result(handle.remote("abc"))

    assert whole == "abc"
    assert parts == ["first:first", "a:a", "b:b", "c:c"], "each load sees the id it is for"


def test_a_task_of_no_request_gets_a_model_that_is_loaded(
    one: DeploymentHandle, ledger: Ledger
) -> None:
    """The end of its use is unknown, so the model may be evicted at any time after it was given."""
    result(one.leaves_a_task.remote())
    requests = [one.remote(f"m{number % 5}") for number in range(100)]
    assert [result(each) for each in requests] == [f"m{number % 5}" for number in range(100)]
    assert result(one.task_saw.remote()) == ["t0", "t1"] * 20


# The end of a replica.


def test_a_replica_that_stops_unloads_its_models_after_its_own_del(
    server: DeploymentHandle, ledger: Ledger
) -> None:
    result(server.both.remote("a"))
    result(server.remote("b"))
    serve.shutdown()
    gc.collect()

    ends = [event.partition(" in ")[0] for event in ledger.events if "del " in event]
    assert ends[0] == "del server"
    assert sorted(ends[1:]) == ["async del a", "del a", "del b"]


def test_a_load_in_flight_ends_with_its_replica(
    server: DeploymentHandle, ledger: Ledger, flags: Settings
) -> None:
    ledger.hold("load a")
    response = server.remote("a")
    ledger.saw("load a")
    started = time.monotonic()
    local_engine().shutdown(0.1)

    assert time.monotonic() - started < PATIENCE_S
    assert ledger.unloads == {"a": 1}
    with pytest.raises((ReplicaUnavailableError, RequestCancelledError)):
        result(response)


class Stuck:
    async def __del__(self) -> None:
        await asyncio.Future()


@serve.deployment(graceful_shutdown_timeout_s=0.1)
class HasStuck:
    @serve.multiplexed
    async def model(self, model_id: str) -> Stuck:
        return Stuck()

    async def __call__(self) -> None:
        await self.model("m")


@pytest.mark.reliability("B31")
@pytest.mark.filterwarnings("ignore:coroutine 'Stuck.__del__' was never awaited")
def test_a_del_that_never_returns_does_not_hold_up_the_end(
    flags: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    handle = serve.run(bind(HasStuck), route_prefix=None)
    result(handle.remote())
    serve.shutdown()

    assert "did not stop within" in caplog.text


class FailingNet:
    def __del__(self) -> None:
        raise ValueError("cannot free")


@serve.deployment
class HasFailing:
    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, model_id: str) -> FailingNet:
        return FailingNet()

    async def __call__(self, model_id: str) -> str:
        await self.model(model_id)
        return model_id


def test_a_del_that_fails_is_logged_and_the_next_model_is_loaded(
    flags: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    handle = serve.run(bind(HasFailing), route_prefix=None)
    assert [result(handle.remote(each)) for each in "ab"] == ["a", "b"]
    assert caplog.text.count("Failed to unload model 'a' of HasFailing.model") == 1
    serve.shutdown()
    assert caplog.text.count("Failed to unload model 'b' of HasFailing.model") == 1


# Under load.


def test_eight_replicas_under_mixed_models_keep_what_they_promise(
    flags: Settings, switch_interval: None
) -> None:
    """In each of 800 requests the model is loaded while it is used; some are cancelled."""
    ledgers = {str(number): Ledger() for number in range(8)}

    @serve.deployment(num_replicas=8, max_ongoing_requests=6)
    class Mixed:
        def __init__(self) -> None:
            self.ledger = ledgers[serve.get_replica_context().replica_tag]

        @serve.multiplexed(max_num_models_per_replica=2)
        async def model(self, model_id: str) -> Net:
            self.ledger.begins(model_id)
            try:
                await turns()
                if model_id == "m0":
                    raise ValueError("no model m0")
            except BaseException:
                self.ledger.ended(model_id)
                raise
            return Net(self.ledger, model_id)

        async def __call__(self) -> str:
            net = await self.model(serve.get_multiplexed_model_id())
            for _ in range(3):
                assert net.is_loaded, "evicted while it was in use"
                await asyncio.sleep(0)
            return str(net.id)

    handle = serve.run(bind(Mixed), route_prefix=None)
    sent = []
    for number in range(800):
        model_id = f"m{(number * 7) % 23}"
        sent.append((model_id, handle.options(multiplexed_model_id=model_id).remote()))
        if number % 11 == 0:
            sent[-1][1].cancel()
    outcomes: Counter[str] = Counter()
    for model_id, response in sent:
        try:
            assert result(response) == model_id
            outcomes["answered"] += 1
        except RequestCancelledError:
            outcomes["cancelled"] += 1
        except ValueError:
            assert model_id == "m0"
            outcomes["failed"] += 1
    serve.shutdown()
    gc.collect()

    assert outcomes["answered"] > 600
    assert outcomes["cancelled"]
    assert outcomes["failed"]
    for ledger in ledgers.values():
        assert ledger.most_alive <= 2
        assert ledger.loads == ledger.unloads, "each was unloaded, and once"


# Routing.


@serve.deployment(num_replicas=4, max_ongoing_requests=2)
class Where:
    """Returns the replica it ran on; the first argument holds it there."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    @serve.multiplexed(max_num_models_per_replica=3)
    async def model(self, model_id: str) -> str:
        self.ledger.loads[model_id] += 1
        return model_id

    async def __call__(self, held: str = "") -> str:
        await self.model(serve.get_multiplexed_model_id())
        if held:
            await self.ledger.pass_by(held)
        return serve.get_replica_context().replica_tag


@pytest.fixture
def where(flags: Settings, ledger: Ledger) -> DeploymentHandle:
    return serve.run(bind(Where, ledger), route_prefix=None)


def test_a_request_goes_to_the_replica_that_has_its_model(
    where: DeploymentHandle, ledger: Ledger
) -> None:
    handles = {each: where.options(multiplexed_model_id=each) for each in "abcdefgh"}
    home = {model_id: result(handle.remote()) for model_id, handle in handles.items()}

    assert Counter(home.values()) == dict.fromkeys("0123", 2), "those with the fewest models first"
    for _ in range(20):
        for model_id, handle in handles.items():
            assert result(handle.remote()) == home[model_id]
    assert set(ledger.loads.values()) == {1}


def test_a_burst_for_a_new_model_goes_to_one_replica_as_far_as_it_has_slots(
    where: DeploymentHandle, ledger: Ledger
) -> None:
    ledger.hold("in")
    handle = where.options(multiplexed_model_id="a")
    responses = [handle.remote("in") for _ in range(3)]
    wait_until(lambda: ledger.events.count("in") == 3)
    ledger.let("in")
    first, second, third = (result(response) for response in responses)

    assert first == second
    assert third != first, "a free slot is not left unused for a model's sake"
    assert ledger.loads == {"a": 2}


def test_without_a_free_slot_they_are_served_in_the_order_they_came(ledger: Ledger) -> None:
    where: Any = Where
    one_slot = where.options(num_replicas=1, max_ongoing_requests=1)
    handle = serve.run(one_slot.bind(ledger), route_prefix=None)
    ledger.hold("in a")
    responses = [handle.options(multiplexed_model_id=each).remote(f"in {each}") for each in "abab"]
    ledger.saw("in a")
    ledger.let("in a")
    for response in responses:
        result(response)
    assert ledger.events == ["in a", "in b", "in a", "in b"]


@pytest.mark.reliability("C08", "E07")
def test_ten_thousand_model_ids_leave_nothing_behind(ledger: Ledger) -> None:
    handle = serve.run(bind(Where, ledger), route_prefix=None)
    for first in range(0, 10_000, 500):
        names = map(str, range(first, first + 500))
        for response in [handle.options(multiplexed_model_id=name).remote() for name in names]:
            result(response)
    replicas = local_engine().applications["default"].ingress.replicas
    assert [replica.slots.requested for replica in replicas] == [{}] * 4
    assert all(len(replica.model_ids) == 3 for replica in replicas)
    assert all(not replica.context.models.in_use for replica in replicas)


# The current model id.


@serve.deployment
class Child:
    async def __call__(self) -> str:
        return serve.get_multiplexed_model_id()


@serve.deployment
class Says:
    def __init__(self, child: DeploymentHandle) -> None:
        self.child = child

    async def everywhere(self) -> dict[str, str]:
        loop = asyncio.get_running_loop()
        return {
            "async": await self.again(),
            "task": await asyncio.create_task(self.again()),
            "to_thread": await asyncio.to_thread(self.in_def),
            "executor": await loop.run_in_executor(None, self.in_def),
        }

    async def again(self) -> str:
        return self.in_def()

    def in_def(self) -> str:
        return serve.get_multiplexed_model_id()

    def in_generator(self) -> Iterator[str]:
        yield self.in_def()
        yield self.in_def()

    async def children(self) -> list[str]:
        named = self.child.options(multiplexed_model_id="other")
        return [await self.child.remote(), await named.remote()]


def test_the_model_id_is_known_wherever_a_request_goes_and_stays_with_it(flags: Settings) -> None:
    handle = serve.run(bind(Says, bind(Child)), route_prefix=None)
    named = handle.options(multiplexed_model_id="m")
    everywhere = result(named.everywhere.remote())
    assert everywhere == dict.fromkeys(["async", "task", "to_thread", "executor"], "m")
    assert result(named.in_def.remote()) == "m"
    assert [*named.options(stream=True).in_generator.remote()] == ["m", "m"]
    assert result(handle.in_def.remote()) == ""
    assert result(named.children.remote()) == ["", "other"], "a child has the one it was given"
    assert serve.get_multiplexed_model_id() == ""


# Over HTTP.


api = FastAPI()


@serve.deployment(num_replicas=2)
@serve.ingress(api)
class Web:
    @serve.multiplexed
    async def model(self, model_id: str) -> str:
        return f"{model_id} on {serve.get_replica_context().replica_tag}"

    @api.get("/on-loop")
    async def on_loop(self) -> str:
        return await self.model(serve.get_multiplexed_model_id())

    @api.get("/in-thread")
    def in_thread(self) -> str:
        return serve.get_multiplexed_model_id()


@pytest.mark.parametrize(
    "name",
    ["serve_multiplexed_model_id", "Serve-Multiplexed-Model-Id", "SERVE_MULTIPLEXED_MODEL_ID"],
)
def test_the_header_names_the_model(flags: Settings, name: str) -> None:
    with TestClient(bind(Web)) as client:
        headers = {name: "m"}
        first = client.get("/on-loop", headers=headers).json()
        assert first.startswith("m on ")
        assert {client.get("/on-loop", headers=headers).json() for _ in range(20)} == {first}
        assert client.get("/in-thread", headers=headers).json() == "m"
        assert client.get("/in-thread").json() == ""


def test_a_client_that_leaves_ends_the_load_of_its_header_that_was_for_it_alone(
    ledger: Ledger,
) -> None:
    @serve.deployment
    class Slow:
        @serve.multiplexed
        async def model(self, model_id: str) -> str:
            ledger.note(f"loading {model_id}")
            try:
                await asyncio.Future()
            finally:
                ledger.note("cancelled")
            return model_id

        async def __call__(self, request: Request) -> str:
            return await self.model(serve.get_multiplexed_model_id())

    port = served(bind(Slow))
    with Connection(port) as connection:
        connection.request("/", headers="serve_multiplexed_model_id: m\r\n")
        ledger.saw("loading m")
    ledger.saw("cancelled")


@pytest.mark.reliability("S05")
def test_a_model_id_in_a_log_is_printable_and_short(caplog: pytest.LogCaptureFixture) -> None:
    @serve.deployment
    class Logs:
        async def __call__(self) -> None:
            logging.getLogger("ingress").warning("said")

    handle = serve.run(bind(Logs), route_prefix=None)
    for model_id in ("a\x1b[31m\r\nb\u2028", "x" * 10_000):
        result(handle.options(multiplexed_model_id=model_id).remote())

    first, second = (vars(record) for record in caplog.records if record.message == "said")
    assert first["multiplexed_model_id"] == r"a\x1b[31m\r\nb\u2028"
    assert second["multiplexed_model_id"] == "x" * 256
