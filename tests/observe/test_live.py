"""`ingress.observe.live`: what runs on each thing now, the rates, and what is wrong in words."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

import ingress as serve
from ingress.core.base.counters import LATENCY_BUCKETS_MS, Latency, ReplicaCounts
from ingress.core.base.settings import NOT_READY_AFTER_S
from ingress.core.calls.call import Call
from ingress.engines import local_engine
from ingress.observe.live import problems
from ingress.observe.live.history import STEP_S, History, percentile
from ingress.observe.live.observer import Observer, parts_of
from ingress.observe.live.view import DeploymentView
from ingress.state.applications import ApplicationSnapshot
from ingress.state.deployments import DeploymentSnapshot, ReplicaSnapshot
from ingress.state.server import Snapshot
from ingress.telemetry.notable import FAILED, KEPT_S, SLOWEST, Ended, NotableCalls
from ingress.testing import Latch
from tests import process_app
from tests.fakes import make_call, together
from tests.servers import PATIENCE_S, Connection, bind, get, served, set_flags, wait_until

pytestmark = [
    pytest.mark.usefixtures("shutdown"),
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
]


class Place:
    """The places where requests of a test wait, each until `go`."""

    def __init__(self) -> None:
        self.begun = {name: Latch(timeout_s=PATIENCE_S) for name in ("loop", "thread", "lane")}
        self.awaits = Latch(timeout_s=PATIENCE_S)
        self.go = Latch(timeout_s=PATIENCE_S)

    def wait(self, name: str) -> None:
        self.begun[name].count_down()
        self.go.wait()


def application(place: Place, **options: Any) -> serve.Application:
    api = FastAPI()

    @serve.deployment(name="Places", lanes={"db": 1}, **options)
    @serve.ingress(api)
    class Places:
        @api.get("/loop")
        async def on_loop(self) -> str:
            place.wait("loop")  # blocks the loop
            return "x"

        @api.get("/thread/{number}")
        def in_thread(self, number: int) -> str:
            place.wait("thread")
            return "x"

        @api.get("/lane")
        @serve.method(lane="db")
        def in_lane(self) -> str:
            place.wait("lane")
            return "x"

        @api.get("/await")
        async def awaiting(self) -> str:
            place.awaits.count_down()
            await place.go
            return "x"

        @api.get("/fails")
        async def fails(self) -> str:
            raise ValueError("<script>it broke</script>")

        @api.get("/stream")
        async def stream(self) -> StreamingResponse:
            async def parts() -> Any:
                yield "a"
                await place.go
                yield "b"

            return StreamingResponse(parts())

    return bind(Places)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.go.count_down()


@pytest.fixture
def observer() -> Observer:
    return Observer(partial(parts_of, local_engine()))


class Requests:
    """Requests in threads, which end before the test."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._threads: list[threading.Thread] = []

    def send(self, *paths: str) -> None:
        for path in paths:
            thread = threading.Thread(target=get, args=(self._port, path))
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for each in self._threads:
            each.join(PATIENCE_S)


def replica_of(observer: Observer) -> Any:
    (found,) = observer.look()["replicas"]
    return found


def seen(observer: Observer, is_it: Callable[[Any], Any]) -> Any:
    """Return the replica once it is seen so."""
    found: list[Any] = []

    def look() -> bool:
        replica = replica_of(observer)
        found.append(replica)
        return bool(is_it(replica))

    wait_until(look)
    return found[-1]


def test_the_map_has_each_call_on_its_thread_and_line(place: Place, observer: Observer) -> None:
    requests = Requests(served(application(place)))
    requests.send("/await", "/thread/7", "/lane")
    place.awaits.wait()
    place.begun["thread"].wait()
    place.begun["lane"].wait()
    requests.send("/lane")  # behind the first
    seen(observer, lambda replica: replica["lanes"][0]["queued"] == 1)
    requests.send("/loop")
    place.begun["loop"].wait()

    replica = seen(observer, lambda replica: replica["loop"]["runs"])
    place.go.count_down()
    requests.join()

    runs = replica["loop"]["runs"]
    assert (runs["title"], runs["method"]) == ("GET /loop", "Places.on_loop")
    assert runs["line"]["source"] == "self.go.wait()"
    assert len(runs["request_id"]) == 36
    assert runs["ms"] >= 0
    (thread,) = replica["threads"]["runs"]
    assert thread["title"] == "GET /thread/{number}"
    assert thread["thread"] == "Places#0-worker-0"
    (lane,) = replica["lanes"]
    assert (lane["name"], lane["limit"], lane["ongoing"], lane["queued"]) == ("db", 1, 1, 1)
    assert [run["title"] for run in lane["runs"]] == ["GET /lane"]
    where = {call["title"]: call["where"] for call in replica["calls"]}
    assert where["GET /loop"] == "loop"
    assert where["GET /await"] == "awaits"
    awaits = next(call for call in replica["calls"] if call["title"] == "GET /await")
    assert awaits["line"]["source"] == "await place.go"


def test_a_loop_that_stands_is_named_with_its_line_while_it_stands_and_after(
    place: Place, observer: Observer
) -> None:
    requests = Requests(served(application(place)))
    requests.send("/loop")

    replica = seen(observer, lambda replica: replica["loop"]["stands_ms"])
    view = observer.look()
    place.go.count_down()
    requests.join()

    (stall,) = [each for each in replica["stalls"] if not each["is_over"]]
    assert stall["line"]["source"] == "self.go.wait()"
    assert stall["method"] == "Places.on_loop"
    text = next(each["text"] for each in view["problems"] if each["level"] == "bad")
    assert text.startswith("the event loop of Places#0 stands for ")
    assert "in Places.on_loop: self.go.wait()" in text
    after = seen(observer, lambda replica: any(each["is_over"] for each in replica["stalls"]))
    assert after["loop"]["stands_ms"] == 0
    assert "an event loop stalled once in the last minute" in str(observer.look()["problems"])


@pytest.mark.parametrize("separate", ["0", "1"])
def test_a_queue_and_the_calls_in_the_slots_are_counted(
    place: Place, observer: Observer, separate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags(monkeypatch, separate)
    requests = Requests(served(application(place, max_ongoing_requests=1)))
    requests.send("/await")
    place.awaits.wait()
    requests.send("/await", "/await")

    def deployment() -> Any:
        return observer.look()["applications"][0]["deployments"][0]

    wait_until(lambda: deployment()["queued"] == 2)
    problems = observer.look()["problems"]
    found = deployment()
    place.go.count_down()
    requests.join()

    assert (found["slots"], found["ongoing"], found["queued"]) == (1, 1, 2)
    [text] = [each["text"] for each in problems]
    assert text == (
        "2 requests wait for a slot; 1 run in 1 slot of 1 replica. Its calls wait, most of them at "
        f"test_live.py:{line_of('await place.go')}: await place.go: raise "
        "max_ongoing_requests, or num_replicas; with max_queued_requests or a deadline, callers "
        "beyond that are refused at once"
    )


@pytest.mark.parametrize("is_overloaded", ["Shop", "Stock"])
def test_calls_that_wait_for_another_deployment_say_where_to_look(
    observer: Observer, is_overloaded: str
) -> None:
    slots = {"Shop": 100, "Stock": 100} | {is_overloaded: 2}
    go, begun = Latch(timeout_s=PATIENCE_S), Latch(2, timeout_s=PATIENCE_S)

    class Shelf:
        async def __call__(self) -> str:
            begun.count_down()
            await go  # all calls wait for this
            return "x"

    class Stock:
        def __init__(self, next_one: Any) -> None:
            self.next_one = next_one

        async def __call__(self, request: Request | None = None) -> str:
            answer: str = await self.next_one.remote()
            return answer

    shelf = serve.deployment(name="Shelf")(Shelf)
    stock = serve.deployment(name="Stock", max_ongoing_requests=slots["Stock"])(Stock)
    shop = serve.deployment(name="Shop", max_ongoing_requests=slots["Shop"])(Stock)
    requests = Requests(served(bind(shop, bind(stock, bind(shelf)))))
    requests.send("/", "/")
    begun.wait()
    requests.send("/")

    def texts() -> list[str]:
        problems = observer.look()["problems"]
        return [each["text"] for each in problems if each["deployment"] == is_overloaded]

    # A look may come between the calls and the first sample of what they wait for.
    wait_until(lambda: any("wait for Shelf" in text for text in texts()))
    [text] = texts()
    go.count_down()
    requests.join()

    # The end of the chain, whichever part of it has no slot left; never the caller.
    at = f"test_live.py:{line_of('await go  # all calls')}: await go  # all calls wait for this"
    assert f"2 of its 2 calls wait for Shelf, most of them at {at}" in text
    assert "Look there first" in text
    assert "raise max_ongoing_requests" not in text


def test_an_overloaded_deployment_does_not_blame_its_caller(observer: Observer) -> None:
    go, begun = Latch(timeout_s=PATIENCE_S), Latch(timeout_s=PATIENCE_S)

    @serve.deployment(name="Stock", max_ongoing_requests=1)
    class Stock:
        async def __call__(self) -> str:
            begun.count_down()
            await go
            return "x"

    @serve.deployment(name="Shop")
    class Shop:
        def __init__(self, stock: Any) -> None:
            self.stock = stock

        async def __call__(self, request: Request) -> str:
            answer: str = await self.stock.remote()
            return answer

    requests = Requests(served(bind(Shop, bind(Stock))))
    requests.send("/")
    begun.wait()
    requests.send("/")

    def texts() -> list[str]:
        problems = observer.look()["problems"]
        return [each["text"] for each in problems if each["deployment"] == "Stock"]

    wait_until(texts)
    [text] = texts()
    go.count_down()
    requests.join()

    assert "Its calls wait, most of them at test_live.py" in text
    assert "Shop" not in text


def line_of(source: str) -> int:
    """Return the number of the first line of this file that has this source."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if source in line)


def outage(go: Latch, begun: Latch) -> serve.Application:
    api = FastAPI()

    @serve.deployment(name="Outage", max_ongoing_requests=2)
    @serve.ingress(api)
    class Outage:
        @api.get("/hangs")
        def hangs(self) -> str:
            begun.count_down()
            go.wait()  # it hangs
            return "x"

    return bind(Outage)


@pytest.mark.parametrize("separate", ["0", "1"])
def test_slots_whose_calls_do_not_end_are_named_with_their_line_while_others_wait(
    observer: Observer,
    separate: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_flags(monkeypatch, separate, "1")
    monkeypatch.setenv(NOT_READY_AFTER_S, "0.1")
    monkeypatch.setattr(problems, "HELD_S", 0.1)
    monkeypatch.setattr("ingress.observe.live.observer.LOOK_S", 0.05)
    monkeypatch.setattr("ingress.observe.live.observer.OVER_S", 0.1)
    go, begun = Latch(timeout_s=PATIENCE_S), Latch(2, timeout_s=PATIENCE_S)
    port = served(outage(go, begun))
    requests = Requests(port)
    requests.send("/hangs", "/hangs")
    begun.wait()

    def deployment() -> Any:
        return observer.look()["applications"][0]["deployments"][0]

    wait_until(lambda: deployment()["held_s"] > 0.1)
    assert observer.look()["applications"][0]["docs"] == "/docs"
    # Only those that hold the slots: a stream may take as long as it likes.
    assert (deployment()["state"], deployment()["held_s"] > 0.1) == ("HEALTHY", True)
    words = "all slots are held, no call has ended for 0 s"
    assert get(port, "/-/readyz").body.decode() == f"default: Outage: {words}"
    with caplog.at_level(logging.INFO, "ingress"), observer:
        requests.send("/hangs")
        wait_until(lambda: deployment()["state"] == "HELD")
        view = observer.look()
        wait_until(lambda: "no call has ended" in caplog.text)
        go.count_down()
        requests.join()
        wait_until(lambda: "its calls end again" in caplog.text)
    [problem] = view["problems"]
    at = f"test_live.py:{line_of('go.wait()  # it hangs')}: go.wait()  # it hangs"
    expected = f"2 of 2 calls are at {at}; 1 request waits for a slot"
    assert problem["text"].startswith("all 2 slots are held, and no call has ended for 0 s; ")
    assert expected in problem["text"]
    assert expected in caplog.text
    assert (problem["level"], view["is_healthy"]) == ("bad", False)
    assert deployment()["state"] == deployment()["status"] == "HEALTHY"
    assert get(port, "/-/readyz").status == 200


def test_clients_that_left_before_their_answer_are_a_rate_and_no_latency(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags(monkeypatch, "1", "1")
    go, begun = Latch(timeout_s=PATIENCE_S), Latch(2, timeout_s=PATIENCE_S)
    port = served(outage(go, begun))
    observer.look()
    request = b"GET /hangs HTTP/1.1\r\nHost: x\r\n\r\n"
    with Connection(port) as one, Connection(port) as other:
        one.send(request)
        other.send(request)
        begun.wait()
    wait_until(lambda: observer.look()["routes"])
    view = observer.look()
    go.count_down()

    [route] = view["routes"]
    assert (route["route"], route["errors"], route["p99"], route["mean"]) == (
        "/hangs",
        0,
        None,
        None,
    )
    assert route["left"] == route["cancelled"] == route["rate"] > 0
    text = "100.0% of its clients left before their answer began in the last minute"
    assert text in [each["text"] for each in view["problems"] if each["level"] == "warn"]
    assert view["is_healthy"]
    assert view["applications"][0]["deployments"][0]["state"] == "HEALTHY"


def test_one_replica_that_fails_among_others_is_named(observer: Observer) -> None:
    @serve.deployment(num_replicas=3, max_ongoing_requests=1)
    class Model:
        async def __call__(self) -> str:
            if serve.get_replica_context().replica_tag == "1":
                raise ValueError("broken")  # of one replica
            return "x"

    port = served(bind(Model))
    observer.look()
    for _ in range(60):
        get(port, "/")
    view = observer.look()

    texts = [each["text"] for each in view["problems"]]
    assert any(
        text.startswith(
            "Model#1 fails 100% of its calls with ValueError: broken at test_live.py:"
            f"{line_of('# of one replica')}, the other 2 replicas 0.0%; a check_health"
        )
        for text in texts
    ), texts
    errors = {each["replica"]: each["errors"] > 0 for each in view["replicas"]}
    assert errors == {"0": False, "1": True, "2": False}


def test_failed_and_streamed_requests_keep_their_times(place: Place, observer: Observer) -> None:
    port = served(application(place), route_prefix="/v1")
    assert get(port, "/v1/fails").status == 500
    with Connection(port) as client:
        client.request("/v1/stream")
        client.receive_until(b"\r\na\r\n")  # the stream has begun, and does not go on
        place.go.count_down()
        assert client.answer().body == b"ab"

    wait_until(lambda: any("stream" in each["name"] for each in observer.look()["slowest"]))
    view = observer.look()
    failed = view["failed"][0]
    assert failed["name"] == "GET /v1/fails"
    assert failed["error"] == "ValueError: <script>it broke</script>"
    assert (failed["place"][0], failed["place"][2]) == (__file__, "Places.fails")
    steps = [failed[f"{name}_ms"] for name in ("queue", "hop", "run", "stream")]
    assert sum(steps) == pytest.approx(failed["ms"], abs=0.01)
    streamed = next(each for each in view["slowest"] if each["name"] == "GET /v1/stream")
    assert streamed["stream_ms"] > 0
    assert json.loads(json.dumps(view)) == view


def test_a_request_answered_5xx_without_an_error_is_kept_as_failed(observer: Observer) -> None:
    @serve.deployment
    class Busy:
        async def __call__(self, request: Any) -> PlainTextResponse:
            return PlainTextResponse("busy", 503)

    assert get(served(bind(Busy)), "/").status == 503

    def errors() -> list[str]:
        # Those of earlier tests are kept, too.
        failed = observer.look()["failed"]
        return [each["error"] for each in failed if each["deployment"] == "Busy"]

    wait_until(errors)
    assert errors() == ["answered 503"]


def test_the_observer_looks_for_the_rates_by_itself_and_ends(place: Place) -> None:
    port = served(application(place))
    looked = Latch(timeout_s=PATIENCE_S)

    def ask(what: str, argument: float = 0.0) -> Any:
        looked.count_down()
        return parts_of(local_engine(), what, argument)

    observer, looks = Observer(ask), list[DeploymentView]()

    def has_errors() -> float:
        looks.append(observer.look()["applications"][0]["deployments"][0])
        return looks[-1]["errors"]

    with observer:
        looked.wait()
        get(port, "/fails")
        wait_until(has_errors)
        deployment = looks[-1]  # a later look may have rates of another time

    assert deployment["rate"] == deployment["errors"] > 0
    assert "ingress-history" not in [each.name for each in threading.enumerate()]


CALL = make_call()


def ended(took_s: float, error: str = "", at: float | None = None) -> Ended:
    end = monotonic() if at is None else at
    begin = end - took_s
    return Ended("GET /", "id", "app", "D", "0", begin, begin, begin, 0.0, end, error)


def test_the_slowest_are_kept_and_a_fast_call_costs_a_comparison() -> None:
    calls = NotableCalls()
    for number in range(1000):
        if number * 1e-3 >= calls.least_s:
            calls.add(CALL, ended(number * 1e-3))
    slowest, failed = calls.recent()

    assert [round(each.answered_s * 1e3) for each in slowest] == [*range(999, 999 - SLOWEST, -1)]
    assert calls.least_s == pytest.approx(0.95)
    assert failed == []


def test_old_calls_are_forgotten_and_slow_ones_are_looked_for_anew() -> None:
    calls = NotableCalls()
    long_ago = monotonic() - KEPT_S - 1
    for _ in range(2 * SLOWEST):
        calls.add(CALL, ended(1.0, "ValueError: x", at=long_ago))
    assert calls.recent() == ([], [])
    assert calls.least_s == 0.0


def test_a_listener_gets_every_call_while_it_listens() -> None:
    calls = NotableCalls()
    for _ in range(3 * SLOWEST):
        calls.add(CALL, ended(1.0))
    assert calls.least_s == pytest.approx(1.0)
    heard: list[Call] = []

    def hear(call: Call, ended: Ended) -> None:
        heard.append(call)

    calls.listen(hear)
    assert calls.least_s == 0.0
    for _ in range(3 * SLOWEST):
        calls.add(CALL, ended(0.001))
    assert calls.least_s == 0.0
    calls.unlisten(hear)
    calls.add(CALL, ended(0.001))

    assert heard == [CALL] * (3 * SLOWEST)


def test_user_loops_add_calls_at_the_same_moment(switch_interval: None) -> None:
    calls = NotableCalls()

    def add(number: int) -> None:
        for each in range(300):
            calls.add(CALL, ended((number * 300 + each) * 1e-3, "ValueError: x"))

    together(*(partial(add, number) for number in range(4)))
    slowest, failed = calls.recent()

    assert [round(each.answered_s * 1e3) for each in slowest] == [*range(1199, 1199 - SLOWEST, -1)]
    assert len(failed) == FAILED


NAME = "app", "D"


def counted(pid: int, count: int, errors: int = 0, slow: int = 0, replica: str = "0") -> Snapshot:
    """Return a process with a deployment whose calls took 1 ms, and `slow` of them 1 s."""
    buckets = [0] * (len(LATENCY_BUCKETS_MS) + 1)
    buckets[0], buckets[LATENCY_BUCKETS_MS.index(1000)] = count - slow, slow
    latency = Latency(errors, 0, slow * 999.0 + count * 1.0, buckets)
    counts = ReplicaCounts(routes={"/x": latency})
    one = ReplicaSnapshot(replica, "", pid, "RUNNING", 0, 5, 0, "", 0, {}, [], {}, counts)
    deployment = DeploymentSnapshot("HEALTHY", "", "", 1, queued=3, replicas=[one])
    application = ApplicationSnapshot("RUNNING", "", None, 0.0, {"D": deployment})
    return Snapshot(0.0, pid, applications={"app": application})


def test_the_rates_are_those_of_the_last_minute() -> None:
    history = History()
    for step in range(40):
        history.add(step * STEP_S, [counted(1, step * 10, step, step)])
    rates, span_s = history.window()

    assert span_s == 60.0
    assert rates["app", "D", ""] == rates["app", "D", "/x"]
    assert rates["app", "D", "/x"]["rate"] == 2.0
    assert rates["app", "D", "/x"]["errors"] == 0.2
    p50, p95 = rates["app", "D", "/x"]["p50"], rates["app", "D", "/x"]["p95"]
    assert p50 is not None
    assert p95 is not None
    assert p50 < 1 < 500 < p95 <= 1000
    points = history.series(("app", "D", "/x"))["points"]
    assert len(points) == 39
    assert {(each["rate"], each["queued"]) for each in points} == {(2.0, 3)}
    assert (points[0]["ago_s"], points[-1]["ago_s"]) == (190.0, 0.0)
    assert history.recent()[NAME]["rate"] == [2.0] * 24


def test_a_replica_that_is_replaced_takes_nothing_away_and_a_silent_process_adds_nothing() -> None:
    history = History()
    history.add(0.0, [counted(1, 100), counted(2, 100)])
    history.add(5.0, [counted(1, 110), counted(2, 110)])
    history.add(10.0, [counted(1, 7, replica="1")])  # the other process does not answer
    history.add(15.0, [counted(1, 7, replica="1"), counted(2, 110)])
    rates, span_s = history.window()

    assert rates["app", "D", ""]["rate"] * span_s == pytest.approx(27)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [((0, 10), 0.5, 1.5), ((10,), 0.99, 0.99), ((), 0.5, None)],
    ids=["in the middle of a bucket", "in the first bucket", "without a value"],
)
def test_a_percentile_lies_in_its_bucket(
    values: tuple[int, ...], share: float, expected: float | None
) -> None:
    buckets = values + (0,) * (len(LATENCY_BUCKETS_MS) + 1 - len(values))

    assert percentile(buckets, share) == expected


def test_a_percentile_is_no_longer_than_its_longest_request_can_have_been() -> None:
    histogram = Latency()
    histogram.add(5_100.0)
    of_one = percentile(tuple(histogram.buckets), 0.99, histogram.total_ms)
    for _ in range(9):
        histogram.add(1.5)
    of_ten = percentile(tuple(histogram.buckets), 0.99, histogram.total_ms)

    assert of_one == pytest.approx(5_100, rel=0.001)
    assert of_ten == pytest.approx(5_100, rel=0.002)


def test_a_value_beyond_the_last_bucket_is_that_buckets_end() -> None:
    assert percentile((0,) * len(LATENCY_BUCKETS_MS) + (1,), 0.5) == LATENCY_BUCKETS_MS[-1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs replicas in processes")
def test_a_process_tells_the_line_on_each_of_its_threads(observer: Observer) -> None:
    serve.run(process_app.caller, name="model", route_prefix=None)
    model = serve.get_deployment_handle("Model", "model")
    held = model.in_lane.remote()

    found: list[Any] = []

    def look() -> bool:  # again, if the child answered too late
        found[:] = [
            each
            for each in observer.look()["replicas"]
            # The server's process may have looked just before the call came to the replica.
            if any(lane["runs"] for lane in each["lanes"]) and each["calls"]
        ]
        return bool(found)

    wait_until(look)
    (replica,) = found
    (run,) = (each for lane in replica["lanes"] for each in lane["runs"])
    (call,) = replica["calls"]
    model.end_lane.remote().result()
    held.result()

    assert run["title"] == call["title"] == "Model.in_lane"
    assert (run["line"]["file"], run["method"]) == (process_app.__file__, "Model.in_lane")
    assert (call["where"], call["line"]) == (run["thread"], run["line"])
    assert replica["loop"]["thread"] == f"Model#{replica['replica']}"
    assert replica["pid"] not in (None, os.getpid())


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="needs replicas in processes")
def test_a_process_whose_loop_stands_is_said_although_it_cannot_tell_the_line(
    observer: Observer,
) -> None:
    serve.run(process_app.caller, name="model", route_prefix=None)
    pid = next(each["pid"] for each in observer.look()["replicas"] if each["pid"])
    assert pid != os.getpid()

    def problems() -> str:
        return str(observer.look()["problems"])

    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: f"in process {pid} stands for" in problems())
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "stands for" not in problems())
