"""`serve.run` of an application that runs: replica by replica, without losing a request."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import ingress as serve
from ingress.engines import local_engine
from ingress.handle import DeploymentHandle
from ingress.serving.control.plan import Phase
from ingress.serving.control.reconciler import FEW
from ingress.testing import Latch
from tests.servers import (
    PATIENCE_S,
    Connection,
    bind,
    get,
    overview,
    result,
    served,
    settle,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("shutdown")


def version(text: str, **options: Any) -> Any:
    """Return an application whose answers are `text`."""

    @serve.deployment(name="Model", **options)
    class Model:
        def __init__(self) -> None:
            if text == "broken":
                raise LookupError("no weights")

        async def __call__(self) -> str:
            return text

    return bind(Model)


class Live:
    """The number of replicas that start or serve at once, and of instances that are there."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = self.most = 0
        self.fails = -1  # the number of the construction that fails
        self.constructed = 0

    def begin(self) -> None:
        with self.lock:
            self.constructed += 1
            if self.constructed == self.fails:
                raise LookupError("no weights")
            self.count += 1
            running = local_engine().applications.get("default")
            members = [] if running is None else list(running.ingress.members)
            # Those that leave only end their last calls.
            live = [each for each in members if each.phase in (Phase.STARTING, Phase.SERVING)]
            self.most = max(self.most, len(live))

    def end(self) -> None:
        with self.lock:
            self.count -= 1


def counted(live: Live, text: str, **options: Any) -> Any:
    @serve.deployment(name="Model", **options)
    class Model:
        def __init__(self) -> None:
            live.begin()
            self.is_made = True

        def __del__(self) -> None:
            if hasattr(self, "is_made"):
                live.end()

        async def __call__(self) -> str:
            return text

    return bind(Model)


def test_an_update_replaces_one_replica_after_another_and_handles_stay_valid() -> None:
    live = Live()
    handle = serve.run(counted(live, "one", num_replicas=4), route_prefix=None)
    assert {result(handle.remote()) for _ in range(8)} == {"one"}
    serve.run(counted(live, "two", num_replicas=4), route_prefix=None)

    assert {result(handle.remote()) for _ in range(16)} == {"two"}
    assert (live.constructed, live.count) == (8, 4)
    assert live.most == 5, "one more at a time"
    assert [each.replica_id for each in overview("Model").replicas] == ["4", "5", "6", "7"]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"rolling_update_percentage": 0.5}, 6),
        ({"rolling_update_percentage": 1.0}, 8),
        ({"rolling_update_percentage": 1.0, "max_surge_percent": 25}, 5),
    ],
    ids=["half", "all", "surge"],
)
def test_the_options_say_how_many_are_replaced_at_a_time(options: Any, most: int) -> None:
    live = Live()
    serve.run(counted(live, "one", num_replicas=4), route_prefix=None)
    serve.run(counted(live, "two", num_replicas=4, **options), route_prefix=None)
    assert live.count == 4
    assert min(most, 6) <= live.most <= most


@pytest.mark.reliability("E03")
def test_no_request_is_lost_by_updates(switch_interval: None) -> None:
    port = served(version("0", num_replicas=2, max_ongoing_requests=4))
    is_over = threading.Event()

    def ask() -> list[tuple[int, bytes]]:
        found = []
        while not is_over.is_set():
            answer = get(port, "/")
            found.append((answer.status, answer.body))
        return found

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask) for _ in range(4)]
        try:
            for number in range(1, 5):
                serve.run(version(str(number), num_replicas=2, max_ongoing_requests=4))
                assert get(port, "/").body == str(number).encode()
        finally:
            is_over.set()
        found = [each for client in clients for each in client.result(PATIENCE_S)]

    assert len(found) > 20
    assert {status for status, _ in found} == {200}


def test_calls_that_run_and_that_wait_survive_an_update() -> None:
    inside, go = Latch(2, timeout_s=PATIENCE_S), Latch(timeout_s=PATIENCE_S)

    def held(text: str) -> Any:
        @serve.deployment(name="Model", num_replicas=2, max_ongoing_requests=1)
        class Model:
            async def __call__(self) -> str:
                inside.count_down()
                await go
                return text

        return bind(Model)

    handle: DeploymentHandle = serve.run(held("one"), route_prefix=None)
    answers = [handle.remote() for _ in range(2)]
    inside.wait()
    answers += [handle.remote() for _ in range(6)]
    updating = threading.Thread(target=partial(serve.run, held("two"), route_prefix=None))
    updating.start()
    wait_until(lambda: any(each.replica_id > "1" for each in overview("Model").replicas))
    go.count_down()
    updating.join(PATIENCE_S)
    found = [result(each) for each in answers]

    assert found[:2] == ["one", "one"]
    assert set(found) <= {"one", "two"}
    assert result(handle.remote()) == "two"


def test_a_version_that_does_not_start_leaves_the_old_one() -> None:
    handle = serve.run(version("one", num_replicas=2), route_prefix=None)
    with pytest.raises(RuntimeError, match="'Model' failed to start: LookupError: no weights"):
        serve.run(version("broken", num_replicas=2), route_prefix=None)

    settle()
    assert serve.status().applications["default"].status == "DEPLOY_FAILED"
    assert {result(handle.remote()) for _ in range(8)} == {"one"}
    replicas = local_engine().applications["default"].ingress.members
    assert [each.number for each in replicas] == [0, 1]
    serve.run(version("two"), route_prefix=None)
    assert serve.status().applications["default"].status == "RUNNING"
    assert {result(handle.remote()) for _ in range(8)} == {"two"}


def test_an_update_that_fails_in_the_middle_is_taken_back() -> None:
    live = Live()
    handle = serve.run(counted(live, "one", num_replicas=3), route_prefix=None)
    live.fails = 5  # the second of the new version
    with pytest.raises(RuntimeError, match="no weights"):
        serve.run(counted(live, "two", num_replicas=3), route_prefix=None)

    settle()
    assert {result(handle.remote()) for _ in range(12)} == {"one"}
    assert live.count == 3


def test_the_children_of_an_update_that_fails_are_taken_back_too() -> None:
    class Child:
        def __init__(self, text: str) -> None:
            self.text = text

        async def __call__(self) -> str:
            return self.text

    class Gate:
        def __init__(self, child: DeploymentHandle, text: str) -> None:
            if text == "broken":
                raise LookupError("no door")
            self.child, self.text = child, text

        async def __call__(self) -> str:
            return f"{self.text} {await self.child.remote()}"

    def gate(text: str) -> Any:
        child = bind(serve.deployment(Child), text)
        return bind(serve.deployment(Gate), child, text)

    handle = serve.run(gate("one"), route_prefix=None)
    with pytest.raises(RuntimeError, match="no door"):
        serve.run(gate("broken"), route_prefix=None)
    settle()
    assert result(handle.remote()) == "one one"
    serve.run(gate("two"), route_prefix=None)
    assert result(handle.remote()) == "two two"


def test_deployments_come_and_go_with_an_update() -> None:
    def chain(*names: str) -> Any:
        application: Any = None
        for name in names:

            class Link:
                def __init__(self, child: Any, name: str) -> None:
                    self.child, self.name = child, name

                async def __call__(self) -> str:
                    below = "" if self.child is None else await self.child.remote()
                    return self.name + below

            application = bind(serve.deployment(Link).options(name=name), application, name)
        return application

    port = served(chain("A", "B", "C"))
    assert get(port, "/").body == b"CBA"
    serve.run(chain("B", "D"))
    assert get(port, "/").body == b"DB"
    assert list(serve.status().applications["default"].deployments) == ["B", "D"]
    with pytest.raises(KeyError, match="A"):
        serve.get_deployment_handle("A", "default")


def test_websockets_reconnect_and_streams_end_by_themselves() -> None:
    go = Latch(timeout_s=PATIENCE_S)

    def streaming(text: str) -> Any:
        app = FastAPI()

        @serve.deployment(name="Model")
        @serve.ingress(app)
        class Model:
            @app.get("/stream")
            async def stream(self) -> StreamingResponse:
                async def items() -> Any:
                    yield text + " begins"
                    await go
                    yield text + " ends"

                return StreamingResponse(items())

            @app.get("/")
            async def root(self) -> str:
                return text

            @app.websocket("/talk")
            async def talk(self, websocket: WebSocket) -> None:
                await websocket.accept()
                while True:
                    await websocket.receive_text()

        return bind(Model)

    port = served(streaming("one"))
    with Connection(port) as connection, connect(f"ws://127.0.0.1:{port}/talk") as talk:
        connection.request("/stream")
        connection.receive_until(b"one begins")
        updating = threading.Thread(target=serve.run, args=(streaming("two"),))
        updating.start()
        with pytest.raises(ConnectionClosed) as caught:
            talk.recv(PATIENCE_S)
        wait_until(lambda: get(port, "/").body == b'"two"')
        go.count_down()
        answer = connection.answer()
    updating.join(PATIENCE_S)

    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1012
    assert answer.is_complete
    assert answer.body.endswith(b"one ends")


def test_a_replica_knows_its_version_and_its_place() -> None:
    @serve.deployment(num_replicas=2)
    class Placed:
        async def __call__(self) -> tuple[str, int, int]:
            here = serve.get_replica_context()
            return here.code_version, here.rank.rank, here.world_size

    handle = serve.run(bind(Placed), route_prefix=None)
    found = {result(handle.remote()) for _ in range(64)}  # the chance of one replica: 2 ** -63
    assert found == {("0", 0, 2), ("0", 1, 2)}
    serve.run(bind(Placed), route_prefix=None)
    assert {result(handle.remote())[0] for _ in range(9)} == {"1"}


def test_an_update_is_ended_by_delete() -> None:
    entered, leave = Latch(timeout_s=PATIENCE_S), Latch(timeout_s=PATIENCE_S)

    @serve.deployment(name="Model")
    class Slow:
        async def __init__(self) -> None:  # type: ignore[misc]
            entered.count_down()
            await leave

        async def __call__(self) -> str:
            return "slow"

    serve.run(version("one"), route_prefix=None)
    with ThreadPoolExecutor(1) as threads:
        updating = threads.submit(serve.run, bind(Slow), route_prefix=None)
        entered.wait()
        serve.delete("default")
        with pytest.raises(RuntimeError, match="deleted while it started"):
            updating.result(PATIENCE_S)
    assert serve.status().applications == {}


def test_an_update_of_more_than_a_few_replicas_replaces_them_all() -> None:
    @serve.deployment(num_replicas=FEW + 20, graceful_shutdown_timeout_s=1)
    class Answers:
        def __init__(self, answer: str) -> None:
            self.answer = answer

        async def __call__(self) -> str:
            return self.answer

    handle = serve.run(bind(Answers, "first"), route_prefix=None)
    before = {each.replica_id for each in overview("Answers").replicas}
    assert overview("Answers").replica_states == {"RUNNING": FEW + 20}
    assert result(handle.remote()) == "first"

    serve.run(bind(Answers, "second"), route_prefix=None)
    wait_until(lambda: overview("Answers").replica_states == {"RUNNING": FEW + 20})
    assert {result(handle.remote()) for _ in range(10)} == {"second"}
    assert not before & {each.replica_id for each in overview("Answers").replicas}
