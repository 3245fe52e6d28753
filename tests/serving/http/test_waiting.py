"""Waiting requests, and the ends of their waits: retries, full queues, handshakes, models.

Each leaves slots, queues and tasks as they were: `Engine.is_idle`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.requests import Request
from starlette.types import Message, Scope
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.core.calls.call import Call
from ingress.engines import local_engine
from ingress.exceptions import (
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ingress.serving.http.proxy import HTTPProxy, RouteTable
from ingress.serving.http.retrying import RequestLimits
from ingress.serving.replicas.router import Router
from ingress.testing import Latch
from tests.fakes import FakeReplica
from tests.servers import (
    PATIENCE_S,
    UPGRADE,
    Connection,
    asking,
    bind,
    end_a_replica,
    served,
    until,
    wait_until,
)

SHORT_S = 0.2
LISTED: dict[str, Any] = {"retry_started_methods": ["GET"]}


class Engine:
    """A served application; `is_idle` if its slots, queues and tasks are as at its start."""

    def __init__(self, target: Any, **options: Any) -> None:
        self.port = served(target, **options)
        self.engine = local_engine()
        self.running = self.engine.applications["default"]
        self._tasks = {loop: len(_tasks(loop)) for loop in self._loops()}

    def _loops(self) -> set[asyncio.AbstractEventLoop]:
        assert self.engine.http.server is not None
        loops = {each.loop for each in self.replicas()}
        return {*loops, self.engine.http.server.home.loop, self.engine.threads.control.loop}

    def replicas(self, name: str | None = None) -> list[Any]:
        return [
            replica
            for each in self.running.deployments.values()
            for replica in each.replicas
            if name is None or each.built.name == name
        ]

    def queued(self) -> int:
        return self.running.ingress.router.num_queued

    def ongoing(self) -> int:
        return self.running.ingress.router.num_ongoing

    def is_idle(self) -> bool:
        routers = [each.router for each in self.running.deployments.values()]
        return (
            not self.engine.http.proxy.in_flight.replies
            and not any(each.num_queued or each.num_ongoing or each._holders for each in routers)
            and not any(
                each.running or each.context.batches or each.context.models.in_use
                for each in self.replicas()
            )
            and all(len(_tasks(loop)) <= self._tasks.get(loop, 0) for loop in self._loops())
        )


def _tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    return {each for each in asyncio.all_tasks(loop) if not each.done()}


def request(engine: Engine, headers: str = "", path: str = "/") -> Connection:
    """Send a request and return its connection."""
    connection = Connection(engine.port)
    connection.request(path, headers=headers + "Connection: close\r\n")
    return connection


# A pause before a retry: the proxy and the router, over fake replicas.


class Going(FakeReplica):
    """A replica that ends without its router knowing."""

    @property
    def loop(self) -> Any:
        return None

    def submit(self, call: Call) -> None:
        if call.settled:
            super().submit(call)
            return
        self.release(call)
        self.router.reassign(call, ReplicaUnavailableError("gone"))


class Silent(FakeReplica):
    """A replica that never answers; `on_cancel` is called before the request's next attempt."""

    def __init__(self, router: Router, on_cancel: Callable[[], Any]) -> None:
        super().__init__(router, max_ongoing=4)
        self.on_cancel = on_cancel

    def cancel(self, call: Call) -> None:
        random.seed(LONGEST_PAUSE)
        self.on_cancel()
        super().cancel(call)
        self.finish(call)


LONGEST_PAUSE = next(seed for seed in range(1000) if random.Random(seed).random() > 0.99)
"""A seed whose first number gives the longest pause."""


class Caller:
    """A client of an ASGI app."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.left = asyncio.Event()
        self._has_request = False
        self.asked: Callable[[], Any] = lambda: None  # called by `receive`
        self.statuses: list[int] = []
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "GET",
            "path": "/",
            "query_string": b"",
            "headers": [*headers],
        }

    async def receive(self) -> Message:
        if not self._has_request:
            self._has_request = True
            return {"type": "http.request", "body": b"", "more_body": False}
        self.asked()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


async def no_task_is_left() -> None:
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()
        await no_task_is_left()

    asyncio.run(main())


def routed(router: Router, limits: RequestLimits | None = None) -> HTTPProxy:
    proxy = HTTPProxy()
    proxy.table = RouteTable({"/": router})
    proxy.limits = limits or RequestLimits()
    return proxy


@pytest.mark.parametrize(
    ("how", "statuses"),
    [("left", []), ("late", [408]), ("stopped", [503]), ("refused", [503]), ("cancelled", [])],
)
def test_a_request_that_rests_before_it_is_sent_on_ends_at_once(
    how: str, statuses: list[int]
) -> None:
    resting: list[Callable[[], Any]] = []

    async def scenario() -> None:
        router = Router(DeploymentID("D"), later=lambda _, callback: resting.append(callback))
        replicas = [Going(router), Going(router)]
        for replica in replicas:
            router.add(replica)
        proxy = routed(router)
        headers = [(b"x-request-timeout-seconds", b"0.3")] if how == "late" else []
        caller = Caller(*headers)
        task = asyncio.create_task(proxy(caller.scope, caller.receive, caller.send))
        await until(lambda: resting)
        assert (router.num_queued, router.num_ongoing) == (1, 0)
        match how:
            case "left":
                caller.left.set()
            case "stopped":
                await proxy.in_flight.drain(router, 0.0)
            case "refused":
                router.refuse("it stops")
            case "cancelled":
                task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done()
        assert task.cancelled() == (how == "cancelled")
        assert caller.statuses == statuses
        resting.pop()()
        assert (router.num_queued, router.num_ongoing) == (0, 0)
        assert not router._holders
        assert not any(replica.skipped for replica in replicas)
        assert not proxy.in_flight.replies

    run(scenario)


@pytest.mark.parametrize(
    ("how", "statuses"), [("left", None), ("refused", [503]), ("cancelled", [])]
)
def test_the_end_of_a_request_in_the_pause_before_another_attempt_is_seen_there(
    how: str, statuses: list[int] | None
) -> None:
    """No further attempt starts. A client that has left is sent nothing of importance."""

    async def scenario() -> None:
        caller = Caller()
        router = Router(DeploymentID("D"))
        task: asyncio.Task[None]
        ends: dict[str, Callable[[], Any]] = {
            "left": caller.left.set,
            "refused": lambda: router.refuse("it stops"),
            "cancelled": lambda: setattr(caller, "asked", task.cancel),  # in the pause
        }
        replica = Silent(router, ends[how])
        router.add(replica)
        proxy = routed(router, RequestLimits(0.05, frozenset({"GET"})))
        task = asyncio.create_task(proxy(caller.scope, caller.receive, caller.send))
        await asyncio.wait([task], timeout=PATIENCE_S)
        assert task.done()
        assert task.cancelled() == (how == "cancelled")
        assert statuses is None or caller.statuses == statuses
        assert len(replica.started) == 1
        assert (router.num_queued, router.num_ongoing) == (0, 0)
        assert not proxy.in_flight.replies

    run(scenario)


def test_a_clients_limit_that_passes_in_or_after_a_pause_is_a_408_and_ends_all(
    threadpool: str,
) -> None:
    runs: Counter[str] = Counter()

    @serve.deployment
    async def slow(request: Request) -> None:
        runs[request.headers["x-request-id"]] += 1
        await asyncio.Future()

    engine = Engine(bind(slow), request_timeout_s=0.05, **LISTED)
    for number in range(20):
        limit = asking(0.05 + number * 0.002)  # a pause is up to 0.025 s
        with request(engine, limit + f"x-request-id: {number}\r\n") as client:
            assert client.answer().status == 408
    wait_until(engine.is_idle)
    assert set(runs.values()) <= {1, 2}


@pytest.mark.parametrize("methods", [["GET"], []], ids=["listed", "not-listed"])
def test_clients_that_leave_or_are_late_while_replicas_end_leave_nothing(
    threadpool: str, methods: list[str], switch_interval: None
) -> None:
    @serve.deployment(num_replicas=3, max_ongoing_requests=2)
    async def brief(request: Request) -> str:
        await asyncio.sleep(0.01)
        return "brief"

    engine = Engine(bind(brief), request_timeout_s=5, retry_started_methods=methods)

    def ask(number: int) -> int:
        with request(engine, asking(0.03) if number % 3 == 1 else "") as client:
            if number % 3 == 2:
                time.sleep(number % 7 * 0.002)
                client.reset()
                return 0
            return client.answer().status

    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(ask, number) for number in range(120)]
        end_a_replica()
        end_a_replica()
        statuses = Counter(answer.result() for answer in answers)
    assert set(statuses) <= {0, 200, 408, 503}
    assert statuses[0] == 40
    wait_until(engine.is_idle)
    with request(engine) as client:
        assert client.answer().status == 200


# A full queue.


def test_a_full_queue_is_a_503_that_costs_no_retry(threadpool: str) -> None:
    gate = Latch()
    runs: list[str] = []

    @serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
    async def held(request: Request) -> str:
        runs.append(request.headers["x-request-id"])
        await gate
        return "held"

    engine = Engine(bind(held), **LISTED)
    budget = engine.engine.http.proxy._budget
    with request(engine, "x-request-id: 1\r\n") as first:
        wait_until(lambda: runs)
        with request(engine, "x-request-id: 2\r\n") as second:
            wait_until(lambda: engine.queued() == 1)
            before = budget.balance
            with request(engine, "x-request-id: 3\r\n") as third:
                answer = third.answer()
            assert answer.status == 503
            assert b"max_queued_requests=1" in answer.body
            assert budget.balance == pytest.approx(before + 0.2), "it came, and was not retried"
            gate.count_down()
            assert (first.answer().status, second.answer().status) == (200, 200)
    assert runs == ["1", "2"]
    wait_until(engine.is_idle)


def test_another_attempt_that_finds_the_queue_full_is_a_503_and_the_last(threadpool: str) -> None:
    gate = threading.Event()
    runs: list[Any] = []

    @serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
    def held(request: Any) -> None:
        runs.append(request)
        gate.wait(PATIENCE_S)

    engine = Engine(bind(held), request_timeout_s=SHORT_S, **LISTED)
    budget = engine.engine.http.proxy._budget
    before = budget.balance
    with request(engine) as client:
        wait_until(lambda: runs)
        queued = serve.get_app_handle("default").remote("queued")
        answer = client.answer()
    assert answer.status == 503
    assert b"max_queued_requests=1" in answer.body
    assert budget.balance == pytest.approx(before + 0.2 - 1)
    assert (engine.ongoing(), engine.queued()) == (1, 1), "the thread of the first attempt"
    gate.set()
    queued.result(timeout_s=PATIENCE_S)
    wait_until(engine.is_idle)
    assert runs[1:] == ["queued"]


# A handshake.


class Door:
    """A WebSocket handler with one slot; it accepts at once only a client named "inside"."""

    def __init__(self, **options: Any) -> None:
        self.entered: list[str] = []
        self.left: list[str] = []
        door = self
        app = FastAPI()

        @serve.deployment(max_ongoing_requests=1, graceful_shutdown_timeout_s=0.3)
        @serve.ingress(app)
        class Doors:
            @app.websocket("/{name}")
            async def enter(self, websocket: WebSocket, name: str) -> None:
                door.entered.append(name)
                try:
                    if name != "inside":
                        await asyncio.Event().wait()
                    await websocket.accept()
                    await websocket.receive_text()
                finally:
                    door.left.append(name)

        self.engine = Engine(bind(Doors), **options)
        self.url = f"ws://127.0.0.1:{self.engine.port}"

    def knock(self, name: str) -> Connection:
        connection = Connection(self.engine.port)
        connection.request(f"/{name}", headers=UPGRADE)
        return connection


wheres = pytest.mark.parametrize("where", ["handler", "queue"])


@wheres
@pytest.mark.parametrize("limit", ["header", "option"])
def test_a_websocket_that_is_not_accepted_in_time_is_refused(
    threadpool: str, where: str, limit: str
) -> None:
    door = Door(**({"request_timeout_s": SHORT_S} if limit == "option" else {}))
    headers = {"x-request-timeout-seconds": str(SHORT_S)} if limit == "header" else {}
    with door.knock("inside") as inside:
        if where == "queue":
            inside.receive_until(b"101 Switching Protocols")
        else:
            inside.reset()
            wait_until(door.engine.is_idle)
        with pytest.raises(InvalidStatus):
            connect(door.url + "/late", additional_headers=headers, open_timeout=PATIENCE_S)
        assert door.engine.queued() == 0
        if where == "queue":
            assert door.engine.ongoing() == 1
    wait_until(door.engine.is_idle)
    assert ("late" in door.entered, "late" in door.left) == (where == "handler",) * 2


@wheres
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_a_client_that_leaves_before_its_websocket_is_accepted_takes_no_slot(
    threadpool: str, where: str, how: str
) -> None:
    door = Door()
    with door.knock("inside") as inside:
        if where == "queue":
            inside.receive_until(b"101 Switching Protocols")
        else:
            inside.reset()
            wait_until(door.engine.is_idle)
        with door.knock("leaver") as leaver:
            if where == "queue":
                wait_until(lambda: door.engine.queued() == 1)
            else:
                wait_until(lambda: "leaver" in door.entered)
            if how == "RST":
                leaver.reset()
        wait_until(lambda: door.engine.queued() == 0)
        if where == "handler":
            wait_until(lambda: "leaver" in door.left)
    wait_until(door.engine.is_idle)
    assert ("leaver" in door.entered) == (where == "handler")


@wheres
def test_an_application_that_stops_refuses_the_websockets_it_has_not_accepted(
    threadpool: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door()
    with door.knock("inside") as inside, door.knock("waiter") as waiter:
        inside.receive_until(b"101 Switching Protocols")
        wait_until(lambda: door.engine.queued() == 1)
        if where == "handler":
            inside.reset()
            wait_until(lambda: "waiter" in door.entered)
        serve.delete("default")
        assert b"503 Service Unavailable" in waiter.receive_all()
    wait_until(door.engine.is_idle)
    assert door.entered == ["inside", "waiter"], "what waits is drained too"
    assert sorted(door.left) == ["inside", "waiter"]
    assert not [each for each in caplog.records if each.exc_info]


# A model.


class Loads:
    """Counts of the loads of each model, and a gate for each."""

    def __init__(self) -> None:
        self.began: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.asked = 0
        self.gates: dict[str, Latch] = {}
        self.lock = threading.Lock()

    def gate(self, name: str) -> Latch:
        with self.lock:
            return self.gates.setdefault(name, Latch())


def family(loads: Loads, loader: str) -> Any:
    """Return a parent whose children need one model each; there is room for one model."""

    class Children:
        async def load(self, model_id: str) -> str:
            loads.began[model_id] += 1
            try:
                await loads.gate(f"load {model_id}")
                return model_id
            finally:
                loads.ended[model_id] += 1

        def load_in_thread(self, model_id: str) -> str:
            loads.began[model_id] += 1
            try:
                loads.gate(f"load {model_id}").wait()
                return model_id
            finally:
                loads.ended[model_id] += 1

        async def __call__(self, model_id: str) -> str:
            loads.asked += 1
            model: str = await getattr(self, "model")(model_id)  # noqa: B009
            await loads.gate(f"use {model_id}")
            return model

    multiplexed = serve.multiplexed(max_num_models_per_replica=1)
    if loader == "async def":
        Children.model = multiplexed(Children.load)  # type: ignore[attr-defined]
    else:

        async def model(self: Any, model_id: str) -> str:
            return await asyncio.to_thread(self.load_in_thread, model_id)

        Children.model = multiplexed(model)  # type: ignore[attr-defined]

    class Parent:
        def __init__(self, child: Any) -> None:
            self.child = child

        async def __call__(self, request: Request) -> list[str]:
            model_id = request.url.path[1:]
            responses = [self.child.remote(model_id) for _ in range(3)]
            return [await response for response in responses]

    return bind(serve.deployment(Parent), bind(serve.deployment(Children)))


loaders = pytest.mark.parametrize("loader", ["async def", "thread"])


@loaders
@pytest.mark.parametrize("how", ["left", "late"])
def test_a_parent_that_is_cancelled_ends_the_load_its_children_wait_for(
    threadpool: str, loader: str, how: str, switch_interval: None
) -> None:
    loads = Loads()
    engine = Engine(family(loads, loader))
    with request(engine, asking(0.5) if how == "late" else "", "/a") as client:
        wait_until(lambda: loads.asked == 3 and loads.began["a"] == 1)
        if how == "left":
            client.reset()
        else:
            assert client.answer().status == 408
        wait_until(engine.is_idle)
    loads.gate("load a").count_down()
    wait_until(lambda: loads.ended["a"] == 1)
    loads.gate("use a").count_down()
    with request(engine, path="/a") as client:
        assert client.answer().body == b'["a","a","a"]'
    wait_until(engine.is_idle)
    assert loads.began["a"] == loads.ended["a"] == 2


@loaders
def test_children_that_wait_for_room_leave_with_their_parent_and_load_nothing(
    threadpool: str, loader: str, switch_interval: None
) -> None:
    loads = Loads()
    engine = Engine(family(loads, loader))
    loads.gate("load a").count_down()
    with request(engine, path="/a") as user:
        wait_until(lambda: loads.ended["a"] == 1)
        with request(engine, path="/b") as waiter:
            wait_until(lambda: loads.asked == 6)
            waiter.reset()
        wait_until(lambda: engine.ongoing() == 1)
        (children,) = engine.replicas("Children")
        wait_until(lambda: children.ongoing == 3 and children.model_ids == {"a"})
        loads.gate("use a").count_down()
        assert user.answer().body == b'["a","a","a"]'
    wait_until(engine.is_idle)
    assert loads.began == {"a": 1}


# A permit.


def batched(runs: list[list[int]], gate: Latch, written: str) -> Any:
    class Batched:
        @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.0, max_concurrent_batches=1)
        async def in_loop(self, xs: list[int]) -> list[int]:
            runs.append(xs)
            await gate
            return xs

        @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.0, max_concurrent_batches=1)
        def in_thread(self, xs: list[int]) -> list[int]:
            runs.append(xs)
            gate.wait()
            return xs

        async def __call__(self, x: int) -> Any:
            return await (self.in_loop if written == "async def" else self.in_thread)(x)

    return serve.deployment(graceful_shutdown_timeout_s=0.2)(Batched)


@pytest.mark.parametrize("written", ["async def", "def"])
@pytest.mark.parametrize("how", ["died", "replaced", "deleted"])
def test_a_call_that_waits_for_a_permit_fails_when_its_replica_ends_and_never_runs(
    threadpool: str, written: str, how: str, switch_interval: None
) -> None:
    runs: list[list[int]] = []
    gate = Latch()
    deployment = batched(runs, gate, written)
    engine = Engine(bind(deployment))
    handle = serve.get_app_handle("default")
    responses = [handle.remote(0)]
    wait_until(lambda: runs)
    responses += [handle.remote(x) for x in range(1, 6)]
    (replica,) = engine.replicas()
    # A call that has not begun waits for another replica.
    wait_until(lambda: replica.slots.begun == 6)
    ends: dict[str, Callable[[], object]] = {
        "died": end_a_replica,
        "replaced": partial(serve.run, bind(deployment)),
        "deleted": partial(serve.delete, "default"),
    }
    ending = threading.Thread(target=ends[how])
    ending.start()
    errors = (DeploymentUnavailableError, ReplicaUnavailableError, RequestCancelledError)
    for response in responses:
        with pytest.raises(errors):
            response.result(timeout_s=PATIENCE_S)
    gate.count_down()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert runs == [[0]]
    wait_until(lambda: not replica.running and not replica.context.batches)
    assert replica.ongoing == 0
    if how == "replaced":
        assert serve.get_app_handle("default").remote(7).result(timeout_s=PATIENCE_S) == 7
        assert runs == [[0], [7]]
