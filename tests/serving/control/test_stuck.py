"""Requests of a replica whose event loop does not turn, once another replica takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import BackgroundTasks, FastAPI, WebSocket
from starlette.responses import StreamingResponse
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import ingress as serve
from ingress.core.base.settings import WEDGED_AFTER_S
from ingress.core.base.types import DeploymentID
from ingress.engines import local_engine
from ingress.exceptions import ReplicaUnavailableError
from ingress.testing import Latch
from tests import process_stuck_app
from tests.servers import PATIENCE_S, Connection, bind, get, overview, result, served, wait_until

ROUNDS = 30

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.usefixtures("shutdown", "soon"),
]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a loop count as stuck after 0.3 s."""
    monkeypatch.setenv(WEDGED_AFTER_S, "0.3")


class Gates:
    """Signals between one test and the replicas of its deployment."""

    def __init__(self) -> None:
        self.is_held = Latch(timeout_s=PATIENCE_S)
        self.has_begun = Latch(timeout_s=PATIENCE_S)
        self.may_construct = threading.Event()
        self.may_turn = threading.Event()
        self.done: list[str] = []


@pytest.fixture
def gates() -> Iterator[Gates]:
    made = Gates()
    made.may_construct.set()
    yield made
    made.may_construct.set()
    made.may_turn.set()


def holding(gates: Gates, *, grace_s: float = 60.0, **options: Any) -> Any:
    """Return an application whose replica can be held. It has a slot for each request."""
    app = FastAPI()

    @serve.deployment(max_ongoing_requests=20, graceful_shutdown_timeout_s=grace_s, **options)
    @serve.ingress(app)
    class Holding:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag
            if self.tag != "0":
                gates.may_construct.wait(PATIENCE_S)

        def hold(self) -> str:  # on the event loop
            gates.is_held.count_down()
            gates.may_turn.wait(PATIENCE_S)
            return f"held {self.tag}"

        async def hold_inside(self) -> str:
            handle = serve.get_deployment_handle("Holding", "default")
            return f"{await handle.hold.remote()} inside"

        async def where(self) -> str:
            return str(self.tag)

        async def wait(self) -> str:
            if self.tag == "0":
                gates.has_begun.count_down()
                await asyncio.Event().wait()
            return str(self.tag)

        async def items(self) -> AsyncIterator[str]:
            yield str(self.tag)
            if self.tag == "0":
                gates.has_begun.count_down()
                await asyncio.Event().wait()

        @app.get("/where")
        async def get_where(self) -> str:
            return await self.where()

        @app.post("/where")
        async def post_where(self, body: dict[str, int]) -> str:
            return f"{self.tag} {body}"

        @app.get("/wait")
        async def get_wait(self) -> str:
            return await self.wait()

        @app.get("/stream")
        async def get_stream(self) -> StreamingResponse:
            return StreamingResponse(self.items())

        @app.get("/later")
        async def get_later(self, tasks: BackgroundTasks) -> str:
            async def later() -> None:
                gates.has_begun.count_down()
                while not gates.may_turn.is_set():
                    await asyncio.sleep(0.001)
                gates.done.append(self.tag)

            tasks.add_task(later)
            return str(self.tag)

        @app.websocket("/socket")
        async def socket(self, websocket: WebSocket) -> None:
            await websocket.accept()
            await websocket.send_text(self.tag)
            gates.has_begun.count_down()
            await websocket.receive_text()

    return bind(Holding)


def by_call(port: int) -> str:
    return str(result(serve.get_deployment_handle("Holding", "default").where.remote()))


def by_stream(port: int) -> str:
    handle = serve.get_deployment_handle("Holding", "default").options(stream=True)
    return str(next(iter(handle.items.remote())))


def by_get(port: int) -> str:
    return get(port, "/where").body.decode()


def by_post(port: int) -> str:
    with Connection(port) as connection:
        head = "content-type: application/json\r\ncontent-length: 8\r\nConnection: close\r\n"
        connection.request("/where", method="POST", headers=head)
        connection.send(b'{"a": 1}')
        return connection.answer().body.decode()


def by_socket(port: int) -> str:
    with connect(f"ws://127.0.0.1:{port}/socket", open_timeout=PATIENCE_S) as websocket:
        return str(websocket.recv(PATIENCE_S))


def ongoing() -> list[int]:
    return [each.ongoing for each in overview("Holding").replicas]


@pytest.mark.reliability("B07")
def test_requests_that_have_not_begun_on_a_stuck_loop_are_answered_by_another_replica(
    gates: Gates,
) -> None:
    kinds = [by_call, by_stream, by_get, by_post, by_socket]
    port = served(holding(gates))
    held = serve.get_deployment_handle("Holding", "default").hold.remote()
    gates.is_held.wait()
    with ThreadPoolExecutor(len(kinds)) as threads:
        asked = [threads.submit(ask, port) for ask in kinds]
        answers = [each.result(PATIENCE_S) for each in asked]
    assert answers == ["1", "1", '"1"', "\"1 {'a': 1}\"", "1"]
    gates.may_turn.set()

    assert result(held) == "held 0"
    wait_until(lambda: [each.replica_id for each in overview("Holding").replicas] == ["0"])
    assert by_get(port) == '"0"'


def call_begun(port: int) -> str:
    with pytest.raises(ReplicaUnavailableError) as raised:
        result(serve.get_deployment_handle("Holding", "default").wait.remote())
    return str(raised.value)


def stream_begun(port: int) -> str:
    handle = serve.get_deployment_handle("Holding", "default").options(stream=True)
    with pytest.raises(ReplicaUnavailableError) as raised:
        list(handle.items.remote())
    return str(raised.value)


def get_begun(port: int) -> str:
    answer = get(port, "/wait")
    assert answer.status == 503
    return answer.body.decode()


def response_begun(port: int) -> str:
    answer = get(port, "/stream")
    return f"{answer.status} {answer.body!r} {answer.is_complete}"


def socket_begun(port: int) -> str:
    with connect(f"ws://127.0.0.1:{port}/socket") as websocket:
        websocket.recv(PATIENCE_S)
        with pytest.raises(ConnectionClosed) as raised:
            websocket.recv(PATIENCE_S)
    return str(raised.value.rcvd)


BEGUN = [call_begun, stream_begun, get_begun, response_begun, socket_begun]
ENDS = [*["Replica Holding#0"] * 3, "200 b'0' False", "1012 (service restart)"]


@pytest.mark.reliability("B07")
def test_requests_that_have_begun_on_a_stuck_loop_end_and_the_one_that_holds_it_goes_on(
    gates: Gates,
) -> None:
    gates.has_begun = Latch(len(BEGUN), timeout_s=PATIENCE_S)
    port = served(holding(gates, grace_s=0.5))
    with ThreadPoolExecutor(len(BEGUN)) as threads:
        asked = [threads.submit(ask, port) for ask in BEGUN]
        gates.has_begun.wait()
        held = serve.get_deployment_handle("Holding", "default").hold.remote()
        ends = [each.result(PATIENCE_S) for each in asked]
    assert [each.partition(" of ")[0] for each in ends] == ENDS
    assert repr(held).endswith("pending)")
    gates.may_turn.set()

    assert result(held) == "held 0"
    wait_until(lambda: [each.replica_id for each in overview("Holding").replicas] == ["0"])
    wait_until(lambda: overview("Holding").replicas[0].ongoing == 0)  # no slot is lost


def test_a_request_that_has_begun_goes_on_until_another_replica_serves(gates: Gates) -> None:
    gates.may_construct.clear()
    handle = serve.run(holding(gates, grace_s=0.0), route_prefix=None)
    begun = handle.wait.remote()
    gates.has_begun.wait()
    held = handle.hold.remote()
    wait_until(lambda: len(overview("Holding").replicas) == 2)  # one is stuck, one starts
    threading.Event().wait(0.6)  # three looks

    assert repr(begun).endswith("pending)")
    gates.may_construct.set()
    with pytest.raises(ReplicaUnavailableError, match="is stuck, and another takes its place"):
        result(begun)
    gates.may_turn.set()
    assert result(held) == "held 0"


def test_a_request_that_waits_for_the_one_that_holds_the_loop_goes_on(gates: Gates) -> None:
    handle = serve.run(holding(gates, grace_s=0.0), route_prefix=None)
    begun = handle.wait.remote()
    gates.has_begun.wait()
    held = handle.hold_inside.remote()
    with pytest.raises(ReplicaUnavailableError):
        result(begun)
    gates.may_turn.set()
    assert result(held) == "held 0 inside"


def test_a_background_task_on_a_stuck_loop_goes_on(gates: Gates) -> None:
    port = served(holding(gates, grace_s=0.0))
    handle = serve.get_deployment_handle("Holding", "default")
    with Connection(port) as connection:
        connection.request("/later")
        connection.receive_until(b'"0"')
        gates.has_begun.wait()
        begun = handle.wait.remote()
        wait_until(lambda: ongoing() == [2])
        held = handle.hold.remote()
        with pytest.raises(ReplicaUnavailableError):
            result(begun)
        gates.may_turn.set()
        assert result(held) == "held 0"
        wait_until(lambda: gates.done == ["0"])


def test_a_listed_method_that_has_begun_is_tried_again(gates: Gates) -> None:
    port = served(holding(gates, grace_s=0.0), retry_started_methods=["GET"])
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(get, port, "/wait")
        gates.has_begun.wait()
        held = serve.get_deployment_handle("Holding", "default").hold.remote()
        assert asked.result(PATIENCE_S).body == b'"1"'
    gates.may_turn.set()
    assert result(held) == "held 0"


def handed_over_while_it_turns(members: list[Any], end: Latch) -> int:
    """Hand the calls of replicas over, whose loops turn meanwhile. Return how many that were."""
    start = threading.Barrier(len(members) + 1)

    def hand_over(member: Any) -> int:
        start.wait(PATIENCE_S)
        return sum(member.replica.hand_over() for _ in range(3))

    with ThreadPoolExecutor(len(members)) as threads:
        counts = [threads.submit(hand_over, each) for each in members]
        start.wait(PATIENCE_S)
        end.count_down()
        return sum(each.result(PATIENCE_S) for each in counts)


@pytest.mark.usefixtures("switch_interval")
def test_a_call_begins_once_although_its_loop_turns_again_while_it_is_handed_over() -> None:
    begun: Counter[int] = Counter()
    gates: list[tuple[Latch, Latch]] = []

    @serve.deployment(max_ongoing_requests=200, num_replicas=2)
    class Racing:
        async def hold(self) -> None:
            is_held, end = gates[-1]
            is_held.count_down()
            end.wait()  # on the event loop

        async def count(self, number: int) -> int:
            begun[number] += 1
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return number

    handle = serve.run(bind(Racing), route_prefix=None)
    members = local_engine().applications["default"].ingress.members
    handed = 0
    for index in range(ROUNDS):
        gates.append((Latch(2, timeout_s=PATIENCE_S), Latch(timeout_s=PATIENCE_S)))
        is_held, end = gates[-1]
        held = [handle.hold.remote() for _ in range(2)]
        is_held.wait()
        calls = [handle.count.remote(100 * index + each) for each in range(100)]
        handed += handed_over_while_it_turns(members, end)
        assert [result(each) for each in calls] == [100 * index + each for each in range(100)]
        for each in held:
            result(each)
    assert handed
    assert set(begun.values()) == {1}
    assert len(begun) == 100 * ROUNDS
    wait_until(lambda: [each.ongoing for each in overview("Racing").replicas] == [0, 0])


# Replicas that leave, or stop.


def test_requests_that_a_leaving_replica_has_not_begun_go_to_another_if_its_loop_stands(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEDGED_AFTER_S, "1")  # it leaves before it would count as stuck
    is_held = threading.Event()

    @serve.deployment(num_replicas=2, max_ongoing_requests=20, graceful_shutdown_timeout_s=60)
    class Leaving:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag

        async def hold_newest(self) -> None:
            if self.tag == "1":
                is_held.set()
                gates.may_turn.wait(PATIENCE_S)

        async def where(self) -> str:
            return str(self.tag)

    handle = serve.run(bind(Leaving), route_prefix=None)
    held = []
    while not is_held.wait(0.01):
        held.append(handle.hold_newest.remote())
    calls = [handle.where.remote() for _ in range(20)]
    local_engine().change("default", {"Leaving": {"num_replicas": 1}})

    assert [result(each) for each in calls] == ["0"] * 20
    gates.may_turn.set()
    for each in held:
        result(each)
    wait_until(lambda: [each.replica_id for each in overview("Leaving").replicas] == ["0"])


@pytest.mark.parametrize(
    ("ask", "end"), [(response_begun, "200 b'0' False"), (socket_begun, "1001 (going away)")]
)
def test_a_stream_on_a_loop_that_stands_ends_with_its_application(
    ask: Any, end: str, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEDGED_AFTER_S, "60")
    port = served(holding(gates, grace_s=0.2))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, port)
        gates.has_begun.wait()
        serve.get_deployment_handle("Holding", "default").hold.remote()
        gates.is_held.wait()
        serve.delete("default")

        assert asked.result(PATIENCE_S) == end
    gates.may_turn.set()


# Items of batches.


def queued() -> int:
    members = local_engine().applications["default"].ingress.members
    return sum(sum(each.replica.host.counts().batch_queues.values()) for each in members)


def test_items_whose_batch_has_not_begun_on_a_stuck_loop_go_to_another_replica(
    gates: Gates,
) -> None:
    batches: list[tuple[str, list[int]]] = []
    may_answer = threading.Event()

    @serve.deployment(max_ongoing_requests=20, graceful_shutdown_timeout_s=1.0)
    class Holding:
        def __init__(self) -> None:
            self.tag = serve.get_replica_context().replica_tag

        @serve.batch(max_batch_size=4)
        async def predict(self, numbers: list[int]) -> list[str]:
            batches.append((self.tag, numbers))
            if self.tag == "0" and -1 in numbers:
                gates.has_begun.count_down()
                await asyncio.to_thread(gates.may_turn.wait, PATIENCE_S)
            if self.tag == "1":
                await asyncio.to_thread(may_answer.wait, PATIENCE_S)
            return [f"{self.tag} {number}" for number in numbers]

        async def inside(self, number: int) -> str:
            return f"inside {await self.predict(number)}"

        def hold(self) -> None:
            gates.may_turn.wait(PATIENCE_S)

    handle = serve.run(bind(Holding), route_prefix=None)
    begun = handle.predict.remote(-1)
    gates.has_begun.wait()
    waiting = [handle.predict.remote(number) for number in range(3)]
    inside = handle.inside.remote(3)  # its user code has begun
    wait_until(lambda: queued() == 4)
    held = handle.hold.remote()

    for each in (begun, inside):
        with pytest.raises(ReplicaUnavailableError):
            result(each)
    may_answer.set()
    assert [result(each) for each in waiting] == ["1 0", "1 1", "1 2"]
    gates.may_turn.set()
    result(held)
    wait_until(lambda: [each.replica_id for each in overview("Holding").replicas] == ["0"])
    wait_until(lambda: ongoing() == [0] and queued() == 0)
    assert sorted(n for tag, numbers in batches for n in numbers if n != 3) == [-1, 0, 1, 2]
    assert result(handle.predict.remote(5)) == "0 5"


@pytest.mark.usefixtures("switch_interval")
def test_an_item_is_in_one_batch_although_its_loop_turns_again_while_it_is_handed_over() -> None:
    begun: Counter[int] = Counter()
    gates: list[tuple[Latch, threading.Event, Latch, Latch]] = []

    @serve.deployment(max_ongoing_requests=200, num_replicas=2)
    class Racing:
        @serve.batch(max_batch_size=7, batch_wait_timeout_s=0)
        async def count(self, numbers: list[int]) -> list[int]:
            begun.update(numbers)
            if -1 in numbers:
                has_begun, goes_on, is_held, end = gates[-1]
                has_begun.count_down()
                while not goes_on.is_set():
                    await asyncio.sleep(0)
                is_held.count_down()
                end.wait()  # on the event loop
            return numbers

    handle = serve.run(bind(Racing), route_prefix=None)
    members = local_engine().applications["default"].ingress.members
    handed = 0
    for index in range(ROUNDS):
        has_begun, is_held, end = (Latch(each, timeout_s=PATIENCE_S) for each in (2, 2, 1))
        goes_on = threading.Event()
        gates.append((has_begun, goes_on, is_held, end))
        held = [handle.count.remote(-1) for _ in range(2)]
        has_begun.wait()
        calls = [handle.count.remote(100 * index + each) for each in range(100)]
        wait_until(lambda: queued() == 100)
        goes_on.set()
        is_held.wait()
        handed += handed_over_while_it_turns(members, end)
        assert [result(each) for each in calls] == [100 * index + each for each in range(100)]
        assert [result(each) for each in held] == [-1, -1]
        wait_until(lambda: [each.ongoing for each in overview("Racing").replicas] == [0, 0])
    assert handed
    assert begun.pop(-1) == 2 * ROUNDS
    assert set(begun.values()) == {1}
    assert len(begun) == 100 * ROUNDS


# Replicas in processes.


def begun_in(folder: Path) -> list[str]:
    file = folder / "begun"
    return file.read_text().splitlines() if file.exists() else []


def test_requests_of_a_process_that_is_stuck_go_elsewhere_or_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEDGED_AFTER_S, "1")  # a process shows four times a second that it turns
    waiting = [by_call, by_stream, by_get, by_post]
    port = served(bind(process_stuck_app.Holding, tmp_path))
    with ThreadPoolExecutor(len(BEGUN + waiting)) as threads:
        ends = [threads.submit(ask, port) for ask in BEGUN]
        wait_until(lambda: len(begun_in(tmp_path)) == len(BEGUN))
        held = serve.get_deployment_handle("Holding", "default").hold.remote()
        wait_until(lambda: len(begun_in(tmp_path)) == len(BEGUN) + 1)
        answers = [threads.submit(ask, port) for ask in waiting]

        assert [each.result(PATIENCE_S) for each in answers] == ["1", "1", '"1"', "\"1 {'a': 1}\""]
        assert [each.result(PATIENCE_S).partition(" of ")[0] for each in ends] == ENDS
    with pytest.raises(ReplicaUnavailableError, match="is stuck, and another takes its place"):
        result(held)


def handed_over(handle: Any, victim: Any, numbers: range, delay_s: float) -> int:
    """Hand the calls of a stopped process over, which goes on meanwhile. Return how many moved."""
    os.kill(victim.host.pid, signal.SIGSTOP)
    calls = [handle.count.remote(number) for number in numbers]
    wait_until(lambda: sum(repr(c).endswith("pending)") for c in calls) == victim.ongoing)
    waiting = int(victim.ongoing)
    goes_on = threading.Timer(delay_s, os.kill, (victim.host.pid, signal.SIGCONT))
    goes_on.start()
    victim.hand_over()
    answers = [result(each) for each in calls]
    goes_on.join()
    os.kill(victim.host.pid, signal.SIGKILL)  # it would begin no other call
    return waiting - answers.count(victim.replica_id.unique_id)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server")
def test_a_call_begins_once_although_its_process_goes_on_while_it_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGRESS_START_METHOD", "forkserver")  # its replacements start at once
    monkeypatch.setenv(WEDGED_AFTER_S, "60")
    delays = [0.0, 0.002, 0.005, 0.009, 0.011, 0.02]  # around the time until it counts
    target = process_stuck_app.Holding.options(num_replicas=len(delays) + 1)
    handle = serve.run(bind(target, tmp_path), route_prefix=None)
    router = local_engine().routers[DeploymentID("Holding", "default")]
    moved = 0
    for index, (delay_s, victim) in enumerate(zip(delays, list(router.replicas), strict=False)):
        moved += handed_over(handle, victim, range(100 * index, 100 * index + 100), delay_s)
    assert moved
    counts = Counter(begun_in(tmp_path))
    assert set(counts.values()) == {1}
    assert len(counts) == 100 * len(delays)
