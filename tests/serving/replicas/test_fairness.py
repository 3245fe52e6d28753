"""`fairness_key`: the queue in turns of keys, and the key on its way there. docs/fair-queues.md."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

import ingress as serve
from ingress.config import FairnessConfig
from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import Call
from ingress.core.calls.retries import NotBegunError
from ingress.engines import local_engine
from ingress.exceptions import BackPressureError
from ingress.serving.replicas.fairness import FairCalls, Fairness, KeyLine
from ingress.serving.replicas.overload import MIN_SAMPLES, Shed, UsualTimes, WaitingCalls
from ingress.serving.replicas.router import Router
from ingress.testing import Latch
from tests.fakes import FakeReplica, make_call, together
from tests.servers import bind, change, get, overview, served, set_flags, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")
WEIGHTS = {"gold": 4.0, "silver": 1.5, "lead": 0.5}


def call_of(key: str, priority: int = 0, left_s: float | None = None) -> Call:
    call = make_call(left_s=left_s)
    call.metadata = call.metadata._replace(fairness_key=key, priority=priority)
    return call


def queue_of(keys: str = "", **options: Any) -> FairCalls:
    queue = FairCalls(WaitingCalls(UsualTimes()), FairnessConfig(**options))
    for key in keys:
        queue.add(call_of(key), 0.0)
    return queue


def key_of(call: Call | None) -> str:
    assert call is not None
    return call.metadata.fairness_key


def served_keys(queue: FairCalls, count: int) -> str:
    return "".join(key_of(queue.next(0.0, [])) for _ in range(count))


# The queue


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "next", "leave", "return"]),
        st.sampled_from(["", "a", *WEIGHTS]),
        st.sampled_from([0, 0, 0, 1, -1]),
    ),
    max_size=120,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_calls_of_a_key_are_in_order_none_is_lost_and_no_key_stays(steps: Any) -> None:
    queue = queue_of(weights=WEIGHTS)
    waiting: dict[tuple[str, int], list[Call]] = {}
    had: list[Call] = []
    for step, key, priority in steps:
        line = waiting.setdefault((key, priority), [])
        if step == "add":
            line.append(call_of(key, priority))
            queue.add(line[-1], 0.0)
        elif step == "leave" and line:
            assert queue.discard(line[len(line) // 2])
            assert not queue.discard(line.pop(len(line) // 2))
        elif step == "return" and had:  # its replica was gone
            call = had.pop()
            waiting[key_of(call), call.metadata.priority].insert(0, call)
            queue.add_first(call, 0.0)
        elif step == "next":
            call_or_none = queue.next(0.0, [])
            assert (call_or_none is None) == (not any(waiting.values())), "it is work conserving"
            if call_or_none is not None:
                first = waiting[key_of(call_or_none), call_or_none.metadata.priority].pop(0)
                assert first is call_or_none, "of a key and a priority the first goes first"
                had.append(first)
        sizes = Counter({key: len(calls) for (key, _), calls in waiting.items() if calls})
        assert len(queue) == sum(len(each) for each in waiting.values())
        assert sum(queue.largest(9).values()) == len(queue)
        assert set(queue.largest(9)) == set(sizes)
    assert {*queue.clear()} == {call for calls in waiting.values() for call in calls}
    assert (len(queue), queue.largest(9), queue.next(0.0, [])) == (0, {}, None)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.2, 5.0), min_size=2),
    st.integers(1, 200),
)
def test_keys_that_always_wait_get_slots_by_their_weights(
    weights: dict[str, float], count: int
) -> None:
    queue = queue_of("".join(key * (count + 1) for key in weights), weights=weights)

    got = Counter(served_keys(queue, count))

    least = min(1.0, *weights.values())
    shares = [got[key] / (weight / least) for key, weight in weights.items()]
    assert max(shares) - min(shares) <= 2, "one turn, and the rest of a turn"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", *WEIGHTS]), max_size=60), st.integers(0, 40))
def test_a_key_that_comes_waits_for_at_most_one_turn_of_each_other_key(
    keys: list[str], before: int
) -> None:
    queue = queue_of(weights=WEIGHTS)
    for key in keys:
        queue.add(call_of(key), 0.0)
    for _ in range(min(before, len(keys))):
        queue.next(0.0, [])
    new = call_of("new")
    queue.add(new, 0.0)

    waited: Counter[str] = Counter()
    while (call := queue.next(0.0, [])) is not new:
        waited[key_of(call)] += 1

    assert all(waited[key] <= WEIGHTS.get(key, 1.0) / 0.5 + 1 for key in waited)


def test_a_key_that_was_just_served_is_behind_a_key_that_comes() -> None:
    queue = queue_of("aaa")

    assert served_keys(queue, 1) == "a"
    queue.add(call_of("b"), 0.0)
    assert served_keys(queue, 3) == "baa"


def test_a_turn_has_as_many_calls_as_the_weight_and_the_rest_of_a_part_is_kept() -> None:
    assert served_keys(queue_of("aaaaaaggggggg", weights={"g": 2.5}), 10) == "aggagggagg"


def test_priorities_go_first_and_keys_take_turns_within_each() -> None:
    queue = queue_of()
    for key, priority in [*[("a", 0)] * 3, ("b", 0), *[("a", 1)] * 2, ("c", 1), ("d", -1)]:
        queue.add(call_of(key, priority), 0.0)

    assert served_keys(queue, 8) == "acaabaad"


def test_under_overload_the_newest_call_of_a_key_goes_first_and_late_calls_are_shed() -> None:
    usual, now = UsualTimes(), time.monotonic()
    for _ in range(MIN_SAMPLES):
        ended = call_of("a", left_s=60)
        ended.assigned_at = now - 1.0
        usual.add(ended, now)
    queue = FairCalls(WaitingCalls(usual), FairnessConfig())
    times = [("late", -0.1), ("late", -0.1), ("a", 2.0), ("a", 3.0), ("b", 3.0)]
    calls = [call_of(key, left_s=left_s) for key, left_s in times]
    for call in calls:
        queue.add(call, now - 10)

    shed: list[Shed] = []
    order = [queue.next(now, shed) for _ in range(4)]

    assert order == [calls[3], calls[4], calls[2], None]
    assert {each.call for each in shed} == {*calls[:2]}


def test_a_key_with_few_calls_is_not_turned_away_because_of_the_calls_of_another() -> None:
    queue, now = queue_of("a" * 40), 100.0
    for call in [call_of("a") for _ in range(16)]:
        queue.add(call, now)
        queue.next(now + 8.0, [])  # about two a second

    assert "requests wait" in queue.turns_away(now + 9.0, now + 8.0, "a")
    assert queue.turns_away(now + 9.0, now + 8.0, "b") == ""


# The router


def router_of(slots: int = 1, **options: Any) -> tuple[Router, FakeReplica]:
    limit = options.pop("max_queued_requests", -1)
    router = Router(DeploymentID("D"), limit, fairness=Fairness(None, FairnessConfig(**options)))
    replica = FakeReplica(router, slots)
    router.add(replica)
    for _ in range(slots):
        router.assign(call_of("first"))
    return router, replica


def assigned(router: Router, *keys: str) -> list[Call]:
    calls = [call_of(key) for key in keys]
    for call in calls:
        router.assign(call)
    return calls


def test_a_key_at_its_limit_is_refused_with_retry_after_and_no_other_key_is() -> None:
    router, _ = router_of(max_queued_per_key=2)
    *waiting, refused, other = assigned(router, "a", "a", "a", "b")

    assert isinstance(refused.error, BackPressureError)
    assert (refused.error.status_code, refused.error.retry_after_s) == (503, 1.0)
    assert "2 requests with the fairness key 'a' wait (max_queued_per_key=2)" in str(refused.error)
    assert not any(each.settled for each in (*waiting, other))
    assert (router.num_rejected, router.queued_by_key(9)) == (1, {"a": 2, "b": 1})
    assert router.turns_away(None, "a") is not None
    assert router.turns_away(None, "c") is None


def test_a_full_queue_has_room_for_a_key_with_fewer_calls_than_another() -> None:
    router, _ = router_of(max_queued_requests=4)
    greedy = assigned(router, *"aaaa")
    (refused,) = assigned(router, "a")
    polite = assigned(router, "b", "c", "b")

    assert isinstance(refused.error, BackPressureError)
    assert [each.settled for each in greedy] == [False, False, True, True]
    assert isinstance(greedy[3].error, BackPressureError)
    assert greedy[3].error.retry_after_s == 1.0
    assert [each.settled for each in polite] == [False, False, True], "b would have as many as a"
    assert router.num_queued == 4
    assert (router.num_rejected, router.num_shed) == (2, 2)


def test_expired_calls_of_any_number_of_keys_leave_nothing_behind() -> None:
    router, _ = router_of()
    for number in range(20_000):
        call = call_of(str(number), left_s=0.0)
        router.assign(call)
        call.cancel_late()
    gc.collect()

    assert (router.num_queued, router.queued_by_key(9)) == (0, {})
    assert not any(type(each) is KeyLine for each in gc.get_objects())


def test_most_keys_are_counted_as_one() -> None:
    router, _ = router_of()
    assigned(router, *"aaabbcdef")

    assert router.queued_by_key(2) == {"a": 3, "b": 2, "other": 4}


def test_a_call_whose_replica_is_gone_is_the_next_and_keeps_its_key() -> None:
    router, gone = router_of()
    other = FakeReplica(router)
    router.add(other)
    assigned(router, *"abba")
    router.remove(gone)
    (moved,) = gone.started
    router.reassign(moved, NotBegunError("gone"))
    for _ in range(5):
        other.finish(other.started[-1])

    assert other.started[1] is moved
    assert [key_of(each) for each in other.started] == ["a", "first", "b", "a", "b"]


def test_a_call_with_a_key_makes_a_queue_fair_that_had_none() -> None:
    router = Router(DeploymentID("D"))
    replica = FakeReplica(router)
    router.add(replica)
    assigned(router, *["", "", "", "", "b"])
    for _ in range(4):
        replica.finish(replica.started[-1])

    assert [key_of(each) for each in replica.started] == ["", "", "b", "", ""]


def test_weights_change_for_the_turns_that_follow() -> None:
    router, replica = router_of()
    assigned(router, *"aaaabbbb")
    router.limit(-1, None, Fairness(None, FairnessConfig(weights={"b": 3})))
    for _ in range(8):
        replica.finish(replica.started[-1])

    assert "".join(key_of(each) for each in replica.started[1:]) == "ababbbaa"


def test_each_call_leaves_once_while_threads_add_cancel_and_end_calls_of_many_keys(
    switch_interval: None,
) -> None:
    router, replica = router_of(2, max_queued_requests=30, weights={"k1": 3})
    calls: list[Call] = []
    added = threading.Event()

    def add(number: int) -> None:
        for index in range(300):
            call = call_of(f"k{(number + index) % 5}", priority=index % 3 - 1)
            calls.append(call)
            router.assign(call)
            if index % 7 == 0:
                call.cancel()
        added.set()

    def finish() -> None:
        while not added.is_set() or replica.running:
            for call in list(replica.running):
                replica.finish(call)

    together(partial(add, 0), partial(add, 1), partial(add, 2), finish)
    while replica.running:
        for call in list(replica.running):
            replica.finish(call)

    assert (router.num_queued, router.queued_by_key(9)) == (0, {})
    assert all(call.settled for call in calls)
    assert replica.most_running <= 2


# Requests and calls by handle


app = FastAPI()


@serve.deployment(max_ongoing_requests=1, fairness_key="X-Tenant")
@serve.ingress(app)
class Model:
    def __init__(self) -> None:
        self.latch = Latch()
        self.begun: list[str] = []

    @app.get("/hold")
    async def hold(self) -> None:
        await self.latch

    @app.get("/")
    async def note(self, name: str) -> str:
        self.begun.append(name)
        return name

    @app.websocket("/chat")
    async def chat(self, socket: WebSocket) -> None:
        self.begun.append("chat")
        await socket.accept()
        await socket.close()


@serve.deployment
class Front:
    def __init__(self, model: Any) -> None:
        self.model = model

    async def note(self, name: str) -> None:
        await self.model.note.remote(name)


def model_of() -> Any:
    (replica,) = local_engine().apps.running["default"].deployments["Model"].replicas
    return replica.context.servable_object


def wait_until_queued(count: int) -> None:
    wait_until(lambda: serve.status().applications["default"].deployments["Model"].queued == count)


@contextmanager
def held(port: int) -> Iterator[list[str]]:
    """Have the only slot of `Model` held; then let all calls run. Yields the names that began."""
    holding = threading.Thread(target=get, args=(port, "/hold"))
    holding.start()
    wait_until(lambda: overview("Model").replicas[0].ongoing == 1)
    threads = threading.enumerate()
    yield (begun := model_of().begun)
    model_of().latch.count_down()
    holding.join()
    for each in threading.enumerate():
        if each not in threads and each.name.startswith("asking"):
            each.join()
    assert begun


def ask(port: int, name: str, tenant: str = "") -> None:
    """Begin a request that notes a name, once it waits."""
    waiting = serve.status().applications["default"].deployments["Model"].queued
    headers = {"x-tenant": tenant} if tenant else {}
    url = f"http://127.0.0.1:{port}/?name={name}"
    kwargs = {"headers": headers, "timeout": 60}
    threading.Thread(target=httpx.get, args=(url,), kwargs=kwargs, name=f"asking {name}").start()
    wait_until_queued(waiting + 1)


@pytest.mark.parametrize("separate", ["0", "1"])
def test_requests_take_turns_by_a_header_and_those_without_share_one_key(
    monkeypatch: pytest.MonkeyPatch, separate: str
) -> None:
    set_flags(monkeypatch, separate)
    port = served(bind(Model))
    with held(port) as begun:
        for name in ("a1", "a2", "a3", "b1", "1", "2"):
            ask(port, name, tenant=name[:-1])

    assert begun == ["a1", "b1", "1", "a2", "2", "a3"]


def by_query(request: Any) -> str | None:
    tenant: str | None = request.query_params.get("name", "x")[0]
    if tenant == "e":
        raise SystemExit("no such tenant")
    return 5 if tenant == "n" else None if tenant == "-" else tenant  # type: ignore[return-value]


@pytest.mark.parametrize("key", [by_query, f"{__name__}:by_query"], ids=["function", "path"])
def test_a_function_gives_the_key_of_requests_and_of_websockets(key: Any) -> None:
    port = served(bind(Model.options(fairness_key=key)))

    def chat() -> None:
        with connect(f"ws://127.0.0.1:{port}/chat?name=c"):
            pass

    with held(port) as begun:
        for name in ("a1", "a2", "a3"):
            ask(port, name)
        threading.Thread(target=chat, name="asking chat").start()
        wait_until_queued(4)
        ask(port, "-1")

    assert begun == ["a1", "chat", "-1", "a2", "a3"]


def test_a_function_that_fails_is_a_500_and_takes_no_slot(caplog: pytest.LogCaptureFixture) -> None:
    port = served(bind(Model.options(fairness_key=by_query)))

    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        answers = [client.get(f"/?name={name}") for name in ("e1", "n1", "a1")]
    assert [each.status_code for each in answers] == [500, 500, 200]
    assert "x-request-id" in answers[0].headers
    assert "connection" not in answers[0].headers  # it is kept

    (application,) = local_engine().snapshot().applications.values()
    failed = [each for each in application.deployments["Model"].http if each.status == 500]
    assert sum(each.latency.count for each in failed) == 2
    assert "no such tenant" in caplog.text
    assert "fairness_key=by_query returned 5; a key is a str, or None" in caplog.text
    assert (model_of().begun, overview("Model").replicas[0].ongoing) == (["a1"], 0)


def test_a_long_header_is_a_key_of_its_own_and_is_not_shown() -> None:
    port = served(bind(Model.options(fairness_config={"max_queued_per_key": 1})))
    with held(port):
        ask(port, "1", "token" * 1000 + "1")
        ask(port, "2", "token" * 1000 + "2")
        headers = {"x-tenant": "token" * 1000 + "1"}
        refused = httpx.get(f"http://127.0.0.1:{port}/?name=3", headers=headers)

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "token" not in refused.text


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_calls_of_a_handle_have_its_key_or_that_of_the_request_that_makes_them(
    isolation: Any,
) -> None:
    fronts = Front.options(isolation=isolation)
    front = serve.run(bind(fronts, bind(Model)), route_prefix=None)
    model = serve.get_deployment_handle("Model", "default")
    responses = [model.hold.remote()]
    wait_until(lambda: overview("Model").replicas[0].ongoing == 1)
    for number, (handle, key) in enumerate(
        [(front, "a"), (model, "a"), (front, "a"), (model, ""), (front, "b")]
    ):
        named = handle.options(fairness_key=key)
        responses.append(named.note.remote(f"{key}{number}"))
        wait_until_queued(number + 1)

    begun = model_of().begun
    model_of().latch.count_down()
    for each in responses:
        each.result()

    assert begun == ["a0", "3", "b4", "a1", "a2"]


@pytest.mark.parametrize("key", [1, b"a", True])
def test_a_key_of_a_handle_that_is_no_string_is_refused(key: Any) -> None:
    handle = serve.run(bind(Front, None), route_prefix=None)

    with pytest.raises(TypeError, match="fairness_key must be a string, got"):
        handle.options(fairness_key=key)


def test_the_options_can_be_changed_while_calls_wait() -> None:
    port = served(bind(Model))
    with held(port) as begun:
        for name, tenant in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")]:
            ask(port, name, tenant)
        change("Model", fairness_config={"weights": {"b": 2}, "max_queued_per_key": 3})
        refused = httpx.get(f"http://127.0.0.1:{port}/?name=a4", headers={"x-tenant": "a"})
        change("Model", fairness_key=None)
        ask(port, "1", "a")

    assert refused.status_code == 503
    assert begun == ["a1", "b1", "1", "a2", "b2", "a3"]


def test_an_update_changes_the_options_and_a_queue_without_replicas_is_fair() -> None:
    router = Router(DeploymentID("D"), fairness=Fairness())
    calls = assigned(router, *"aab")
    replica = FakeReplica(router)
    router.add(replica)
    for _ in calls:
        replica.finish(replica.started[-1])
    assert "".join(key_of(each) for each in replica.started) == "aba"

    serve.run(bind(Model))
    port = served(bind(Model.options(fairness_config={"max_queued_per_key": 1})))
    with held(port):
        ask(port, "a1", "a")
        assert httpx.get(f"http://127.0.0.1:{port}/?name=a2", headers={"x-tenant": "a"}).is_error
        ask(port, "b1", "b")


def test_a_path_that_cannot_be_imported_ends_the_start_with_the_fix() -> None:
    broken = Model.options(fairness_key="no.such:key")
    with pytest.raises(ValueError, match=r"fairness_key='no\.such:key' cannot be imported"):
        served(bind(broken))
