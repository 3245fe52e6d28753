"""`request_router_config`: policies of users, session affinity, and what a slow policy may hold."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import httpx
import pytest

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.engines import local_engine
from ingress.exceptions import (
    BackPressureError,
    RequestCancelledError,
    RequestCycleError,
    UserCodeExit,
)
from ingress.request_router import (
    ConsistentHashRouter,
    PendingRequest,
    PowerOfTwoChoicesRequestRouter,
    RequestRouter,
    RoundRobinRouter,
    RunningReplica,
    SyncRequestRouter,
)
from ingress.testing import Latch
from tests.fakes import together
from tests.servers import bind, get, overview, served, settle, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")


def replica_tag() -> str:
    return serve.get_replica_context().replica_tag


class Gate:
    latch: ClassVar[Latch]


@serve.deployment(num_replicas=4, max_ongoing_requests=2)
class Model:
    async def where(self) -> str:
        return replica_tag()

    async def hold(self) -> str:
        await Gate.latch
        return replica_tag()

    async def __call__(self, request: Any) -> str:
        return replica_tag()


@pytest.fixture(autouse=True)
def latch() -> Iterator[Latch]:
    Gate.latch = Latch()
    yield Gate.latch
    Gate.latch.count_down()


def run(router: Any, *, limit: int = -1, replicas: int = 4, **kwargs: Any) -> Any:
    routing = {"request_router_class": router, "request_router_kwargs": kwargs}
    model: Any = Model
    options = {"max_queued_requests": limit, "num_replicas": replicas}
    target = model.options(request_router_config=routing, **options).bind()
    return serve.run(target, route_prefix=None)


def queued() -> int:
    return overview("Model").queued


class Chosen(RequestRouter):
    """Chooses the replica that a call's session id names, and notes what it is told."""

    notes: ClassVar[list[Any]] = []

    def initialize_state(self, *, greeting: str = "") -> None:
        self.notes.append(greeting)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        await asyncio.sleep(0)
        wanted = pending_request.metadata.session_id
        return [[each] for each in candidate_replicas if each.replica_id.unique_id == wanted]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        self.notes.append(("routed", pending_request.metadata.call_method, replica_id.unique_id))

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self.notes.append(("completed", replica_id.unique_id))


@pytest.mark.usefixtures("separate")
def test_a_policy_by_import_path_chooses_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Chosen.notes.clear()
    module = type(sys)("users_policy")
    vars(module)["Chosen"] = Chosen
    monkeypatch.setitem(sys.modules, "users_policy", module)
    handle = run("users_policy:Chosen", greeting="hello")

    for tag in ("2", "0", "3"):
        assert handle.options(session_id=tag).where.remote().result() == tag

    wait_until(lambda: len(Chosen.notes) == 7)
    assert Chosen.notes[0] == "hello"
    assert Counter(Chosen.notes[1:]) == Counter(
        each for tag in "203" for each in (("routed", "where", tag), ("completed", tag))
    )


def test_a_call_waits_for_the_chosen_replica_and_no_other_call_waits_for_it(latch: Latch) -> None:
    handle = run(Chosen)
    holding = [handle.options(session_id="1").hold.remote() for _ in range(3)]
    wait_until(lambda: queued() == 1)

    assert handle.options(session_id="2").where.remote().result() == "2"
    assert queued() == 1
    latch.count_down()
    assert [each.result() for each in holding] == ["1", "1", "1"]


def test_a_policy_is_told_of_a_call_that_has_waited_while_it_runs(latch: Latch) -> None:
    Chosen.notes.clear()
    handle = run(Chosen).options(session_id="1")
    holding = [handle.hold.remote() for _ in range(3)]
    wait_until(lambda: queued() == 1)
    holding[0].cancel()

    wait_until(lambda: Chosen.notes.count(("routed", "hold", "1")) == 3)
    latch.count_down()
    assert [each.result() for each in holding[1:]] == ["1", "1"]


class Undecided(RequestRouter):
    """Chooses the replicas of its list, one for each question, then those that are left."""

    choices: ClassVar[list[list[str]]] = []
    asked: ClassVar[int] = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        Undecided.asked += 1
        tags = self.choices.pop(0) if self.choices else ["0", "1", "2", "3"]
        return [[each] for each in candidate_replicas if each.replica_id.unique_id in tags]


@pytest.fixture
def undecided() -> type[Undecided]:
    Undecided.choices, Undecided.asked = [], 0
    return Undecided


def test_a_policy_is_asked_once_if_it_finds_a_slot_or_the_call_has_gone(
    latch: Latch, undecided: type[Undecided]
) -> None:
    handle = run(undecided)

    assert [handle.where.remote().result() for _ in range(5)]
    assert undecided.asked == 5

    undecided.choices = [["1"]] * 10_000
    held = [handle.hold.remote() for _ in range(3)]
    wait_until(lambda: queued() == 1)
    held[-1].cancel()
    asked = undecided.asked
    undecided.choices = []
    latch.count_down()
    assert [each.result() for each in held[:2]] == ["1", "1"]
    assert handle.where.remote().result() in "0123"
    assert undecided.asked <= asked + 2, "at most once more for the call that was cancelled"


def test_a_call_waits_for_the_replicas_that_were_chosen_last(
    latch: Latch, undecided: type[Undecided]
) -> None:
    handle = run(undecided)
    undecided.choices = [["0"], ["0"], ["1"], ["1"], ["0"], *[["1"]] * 10_000]
    zero = [handle.hold.remote() for _ in range(2)]
    wait_until(lambda: undecided.asked == 2)
    one = [handle.hold.remote() for _ in range(2)]
    wait_until(lambda: undecided.asked == 4)
    waiting = handle.where.remote()
    wait_until(lambda: undecided.asked >= 7)  # and chooses another
    for each in zero:
        each.cancel()
    wait_until(lambda: sorted(each.ongoing for each in overview("Model").replicas) == [0, 0, 0, 2])

    assert queued() == 1
    latch.count_down()
    assert waiting.result() == "1"
    assert [each.result() for each in one] == ["1", "1"]


def test_the_pauses_between_questions_are_those_of_the_configuration(
    undecided: type[Undecided],
) -> None:
    """By default 200 of them take over a minute."""
    undecided.choices = [[] for _ in range(200)]
    model: Any = Model
    routing = {
        "request_router_class": undecided,
        "initial_backoff_s": 0.001,
        "max_backoff_s": 0.001,
    }
    handle = serve.run(model.options(request_router_config=routing).bind(), route_prefix=None)

    assert handle.where.remote().result(timeout_s=20) in "0123"


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("router", [RoundRobinRouter, Undecided])
def test_a_cycle_through_a_policy_is_found(router: Any) -> None:
    """A policy of the second kind chooses after the call is awaited."""

    @serve.deployment(
        max_ongoing_requests=1, request_router_config={"request_router_class": router}
    )
    class Recursive:
        async def again(self, depth: int) -> str:
            handle = serve.get_deployment_handle("Recursive", "default")
            return await handle.again.remote(depth - 1) if depth else "the end"

    handle = serve.run(bind(Recursive), route_prefix=None)

    with pytest.raises(RequestCycleError, match="all slots of 'Recursive' are held"):
        handle.again.remote(1).result(timeout_s=20)


def test_calls_that_wait_are_cancelled_refused_and_ended_as_others_are(latch: Latch) -> None:
    handle = run(Chosen, limit=1)
    there = handle.options(session_id="1")
    holding = [there.hold.remote() for _ in range(2)]
    wait_until(lambda: overview("Model").requests == 2)
    wait_until(lambda: queued() == 0)
    for tag in "023":
        holding += [handle.options(session_id=tag).hold.remote() for _ in range(2)]
    wait_until(lambda: queued() == 0)
    waiting = there.hold.remote()
    wait_until(lambda: queued() == 1)
    with pytest.raises(BackPressureError):
        there.hold.remote().result()
    waiting.cancel()
    with pytest.raises(RequestCancelledError):
        waiting.result()
    assert queued() == 0
    latch.count_down()
    assert [each.result() for each in holding] == [*"11002233"]


class Slow(PowerOfTwoChoicesRequestRouter):
    entered = threading.Event()
    opened = threading.Event()

    async def choose_replicas(self, *args: Any, **kwargs: Any) -> Any:
        self.entered.set()
        self.opened.wait(20)  # blocks its event loop
        return await super().choose_replicas(*args, **kwargs)


@pytest.mark.reliability("B28")
def test_a_policy_that_blocks_delays_only_the_calls_of_its_deployment() -> None:
    Slow.entered.clear()
    Slow.opened.clear()

    @serve.deployment
    class Other:
        def __init__(self, slow: Any) -> None:
            self.slow = slow

        async def free(self) -> str:
            return "free"

        async def both(self) -> str:
            pending = self.slow.where.remote()
            await pending
            return "both"

    model: Any = Model
    slow = model.options(request_router_config={"request_router_class": Slow}).bind()
    handle = serve.run(bind(Other, slow), route_prefix=None)
    try:
        both = handle.both.remote()
        assert Slow.entered.wait(20)
        assert handle.free.remote().result() == "free"
        assert queued() == 1  # the router's lock is free
        cancelled = serve.get_deployment_handle("Model", "default").where.remote()
        cancelled.cancel()
    finally:
        Slow.opened.set()
    assert both.result() == "both"


class Failing(RequestRouter):
    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        if pending_request.metadata.session_id == "wrong":
            return candidate_replicas
        raise KeyError("no such replica")


@pytest.mark.reliability("B28")
def test_an_error_of_the_policy_is_that_of_the_call_and_a_wrong_result_is_named() -> None:
    handle = run(Failing)

    with pytest.raises(KeyError, match="no such replica"):
        handle.where.remote().result()
    with pytest.raises(TypeError, match="choose_replicas must return a list of lists"):
        handle.options(session_id="wrong").where.remote().result()
    assert queued() == 0


class Exiting(SyncRequestRouter):
    def rank(self, candidates: Any, request: PendingRequest) -> Any:
        sys.exit("no such replica")


def test_a_policy_that_exits_where_it_is_called_ends_its_call_only() -> None:
    routing = {"request_router_class": Exiting}
    model: Any = Model
    port = served(model.options(request_router_config=routing).bind())

    assert get(port, "/").status == 500
    with pytest.raises(UserCodeExit, match="raised SystemExit"):
        serve.get_app_handle("default").where.remote().result()
    assert queued() == 0


@pytest.mark.parametrize(
    ("router", "kwargs", "message"),
    [
        ("nowhere:Router", {}, "request_router_class='nowhere:Router' cannot be imported"),
        ("ingress.request_router:Nothing", {}, "cannot be imported"),
        (dict, {}, "must be a subclass of ingress.request_router.RequestRouter"),
        (Failing, {"x": 1}, r"request_router_kwargs \['x'\] are not parameters of Failing"),
        (ConsistentHashRouter, {"num_virtual_nodes": 0}, "num_virtual_nodes must be an integer"),
    ],
)
def test_a_policy_that_is_none_is_refused_at_the_start(
    router: Any, kwargs: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        run(router, **kwargs)


def sessions_of(handle: Any) -> dict[str, str]:
    return {
        name: handle.options(session_id=name).where.remote().result()
        for name in (f"session {number}" for number in range(60))
    }


@pytest.mark.parametrize(
    "router",
    [ConsistentHashRouter, "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"],
)
def test_a_session_stays_at_its_replica_and_few_move_when_one_comes(router: Any) -> None:
    handle = run(router, replicas=3)
    before = sessions_of(handle)

    assert sessions_of(handle) == before
    assert {*before.values()} == {"0", "1", "2"}
    assert min(Counter(before.values()).values()) >= 8
    local_engine().change("default", {"Model": {"num_replicas": 4}})
    settle()
    with_one_more = sessions_of(handle)
    moved = [name for name, tag in with_one_more.items() if tag != before[name]]
    assert {with_one_more[name] for name in moved} == {"3"}
    assert len(moved) <= 30


@pytest.mark.usefixtures("separate")
def test_a_session_id_comes_from_the_header_and_http_requests_stay_too() -> None:
    routing = {"request_router_class": ConsistentHashRouter}
    model: Any = Model
    port = served(model.options(request_router_config=routing).bind())

    def tags(name: str, session: str) -> set[str]:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={name: session}) as client:
            return {client.get("/").text for _ in range(6)}

    handle = serve.get_deployment_handle("Model", "default")
    for session in ("a", "b", "c"):
        (tag,) = tags("x-session-id", session)
        assert tags("X_Session_Id", session) == {tag}
        assert handle.options(session_id=session).where.remote().result() == tag


def test_strict_affinity_waits_and_the_default_falls_back_to_the_next(latch: Latch) -> None:
    for fallback, count in ((0, 1), (2, 3)):
        handle = run(ConsistentHashRouter, num_fallback_replicas=fallback).options(session_id="s")
        responses = [handle.hold.remote() for _ in range(7)]
        wait_until(lambda count=count: queued() == 7 - 2 * count)  # type: ignore[misc]
        latch.count_down()
        assert len({each.result() for each in responses}) == count
        latch = Gate.latch = Latch()


def test_round_robin_takes_the_replicas_in_turn() -> None:
    handle = run("ray.serve.experimental.round_robin_router.RoundRobinRouter")

    tags = [handle.where.remote().result() for _ in range(8)]

    assert len({*tags[:4]}) == 4
    assert tags[4:] == tags[:4]


def test_a_prefix_router_says_that_it_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    handle = run("ray.serve.llm.request_router:PrefixCacheAffinityRouter")

    assert handle.where.remote().result() in "0123"
    assert "PrefixCacheAffinityRouter knows no prefix caches in this process" in caplog.text


@pytest.mark.usefixtures("separate")
@pytest.mark.parametrize("router", [ConsistentHashRouter, Chosen])
def test_no_call_is_lost_while_threads_call_cancel_and_end_sessions(
    router: Any, switch_interval: None
) -> None:
    handle = run(router)
    answered: list[str] = []

    def call_many(number: int) -> None:
        for index in range(60):
            response = handle.options(session_id=str((number + index) % 4)).where.remote()
            if index % 7 == 0:
                response.cancel()
            else:
                answered.append(response.result(timeout_s=20))

    together(*[partial(call_many, number) for number in range(4)])
    assert len(answered) == 4 * 51
    wait_until(lambda: queued() == 0)


def test_the_base_class_says_what_to_define() -> None:
    router = RequestRouter(DeploymentID("Model"))

    with pytest.raises(NotImplementedError, match="RequestRouter must define choose_replicas"):
        asyncio.run(router.choose_replicas([]))
