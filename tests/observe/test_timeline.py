"""`ingress.observe.timeline`: records of calls, for each of their outcomes, and their drawing."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient

import ingress as serve
from ingress.cli.trace_command import TraceError, Wanted, traced, wanted
from ingress.core.base.settings import (
    STALL_THRESHOLD_MS,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
)
from ingress.core.execution.threads import WorkerThreads
from ingress.engines import local_engine
from ingress.exceptions import BackPressureError, RequestCancelledError
from ingress.observe.timeline.chrome import Window, as_json, merged
from ingress.observe.timeline.instrumentation import record as record_with
from ingress.observe.timeline.picture import SHOWN, as_svg
from ingress.observe.timeline.recorder import (
    Journey,
    Recorder,
    Timeline,
    Track,
    WaitKind,
    loops_of,
    rows,
    waits_of,
)
from ingress.observe.timeline.sampling import record as sampled
from ingress.serving.control.factories import Factories
from ingress.serving.replicas.replica import Replica
from ingress.serving.replicas.router import Router
from ingress.telemetry.watchdog import Stall, StallReason, stacks
from tests.conformance.observe import TIMEOUT_S, Gate
from tests.servers import wait_until
from tests.traces import Picture, Trace

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.usefixtures("shutdown"),
]


Record = Callable[..., Recorder]


@pytest.fixture
def record() -> Iterator[Record]:
    """Set the recorder of later applications; stop everything at the end of the test."""
    with ExitStack() as in_use:

        def set_recorder(**limits: int) -> Recorder:
            recorder = in_use.enter_context(Recorder(**limits))
            in_use.enter_context(local_engine().instrumented(partial(record_with, recorder)))
            return recorder

        in_use.callback(serve.shutdown)
        yield set_recorder


class Held:
    """A deployment whose calls wait at the gate of its class, which a test opens."""

    gate: Gate

    async def __call__(self, name: str = "") -> str:
        await self.gate.wait_async()
        return name

    def block(self) -> str:
        self.gate.wait()
        return threading.current_thread().name


def run(gate: Gate | None = None, **options: Any) -> Any:
    cls = type("Held", (Held,), {"gate": gate or Gate()})
    return serve.run(serve.deployment(**options)(cls).bind(), route_prefix=None)


def over(recorder: Recorder) -> Timeline:
    """Return the timeline once all calls have ended."""
    wait_until(lambda: not recorder.timeline().unfinished)
    return recorder.timeline()


def only(timeline: Timeline) -> Journey:
    (journey,) = timeline.journeys
    return journey


def check(timeline: Timeline) -> tuple[Trace, Picture]:
    """Check a trace by reading it as viewers do."""
    return Trace(as_json([timeline], "t")), Picture(as_svg(timeline, "t"))


def kinds(timeline: Timeline, journey: Journey) -> list[str]:
    return [wait.kind for wait in waits_of(timeline).get(journey, [])]


@pytest.mark.parametrize("starts", [True, False], ids=["starts", "does-not-start"])
def test_a_session_leaves_nothing_running(tmp_path: Path, starts: bool) -> None:
    class Maybe:
        def __init__(self) -> None:
            if not starts:
                raise ValueError("no model")

        async def __call__(self) -> str:
            return "ok"

    out = tmp_path / "trace.json"
    lines = traced(serve.deployment(Maybe).bind(), "app", ["/"], 2, None, out, None)

    if starts:
        first, *_ = lines
        assert first == "GET /: 2 x 200"
    else:
        with pytest.raises(TraceError, match="failed to start: ValueError: no model"):
            list(lines)
    assert out.exists() == starts
    assert serve.status().applications == {}
    assert local_engine().factories == Factories()


def test_without_a_recorder_nothing_of_it_is_there() -> None:
    handle = run()
    router = local_engine().router(handle.deployment_id)
    (replica,) = router.replicas
    assert isinstance(replica, Replica)
    assert replica.host.pools is not None
    threads = replica.host.pools.default.threads
    made = [type(each) for each in (router, replica, threads)]
    serve.shutdown()

    assert made == [Router, Replica, WorkerThreads]


def test_a_call_by_handle_is_recorded_with_its_slot_and_its_loop(record: Record) -> None:
    recorder, gate = record(), Gate()
    handle = run(gate)
    gate.open()

    assert handle.remote("x").result() == "x"
    timeline = over(recorder)
    call = only(timeline)
    assert (call.name, call.deployment, call.replica) == ("Held.__call__", "Held", "Held#0")
    assert call.arrived_at <= call.slot_at <= call.began_at <= call.ended_at
    assert [each.name for each in timeline.tracks] == ["Held#0"]
    assert kinds(timeline, call) == [WaitKind.LOOP]
    check(timeline)


def test_what_runs_now_can_be_looked_at(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    recorder, gate = record(), Gate()
    response = run(gate).block.remote()
    gate.wait_for(1)
    timeline = recorder.timeline()
    gate.open()
    worker = response.result(timeout_s=TIMEOUT_S)

    call = only(timeline)
    assert timeline.unfinished == {call}
    (blocked,) = [each for each in timeline.runs if not each.track.is_loop]
    assert (blocked.track.name, blocked.ended_at) == (worker, timeline.now)
    assert blocked.journey is call
    trace, picture = check(timeline)
    assert trace.requests[0].args["unfinished"] is True
    assert "has not ended" in picture.about


def test_a_server_that_is_not_instrumented_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    gate = Gate()
    handle = run(gate)
    response = handle.block.remote()
    gate.wait_for(1)
    (replica,) = local_engine().router(handle.deployment_id).replicas
    assert isinstance(replica, Replica)
    trace = Trace(sampled([replica], 0.1) or "")
    gate.open()
    worker = response.result(timeout_s=TIMEOUT_S)

    (call,) = trace.requests
    assert (call.name, call.args["kind"], call.args["replica"]) == ("Held.block", "call", "Held#0")
    assert call.args["unfinished"] is True
    # The loop may be seen, too, on its way back to the events it waits for.
    (blocked,) = [each for each in trace.runs if "-worker-" in each.track]
    assert (blocked.name, blocked.track) == ("Held.block", worker)
    assert call.began <= blocked.began < blocked.ended == pytest.approx(call.ended)


def test_a_wait_for_a_thread_is_recorded(record: Record) -> None:
    class OneThread:
        @serve.method(lane="one")
        def block(self) -> None:
            gate.wait()

    recorder, gate = record(), Gate()
    app = serve.deployment(lanes={"one": 1})(OneThread).bind()
    handle = serve.run(app, route_prefix=None)
    responses = [handle.block.remote() for _ in range(3)]
    gate.wait_for(1)
    gate.open()
    for response in responses:
        response.result(timeout_s=TIMEOUT_S)
    timeline = over(recorder)
    runs = [each for each in timeline.runs if not each.track.is_loop]
    assert [each.track.name for each in runs] == ["OneThread#0-one-worker-0"] * 3
    waits = [waits_of(timeline)[each.journey][-1] for each in runs]
    assert {each.kind for each in waits} == {WaitKind.THREAD}
    for before, wait in itertools.pairwise(zip(runs, waits, strict=True)):
        assert wait[1].ended_at >= before[0].ended_at
    check(timeline)


def test_a_call_that_is_refused_never_ran(record: Record) -> None:
    recorder, gate = record(), Gate()
    handle = run(gate, max_ongoing_requests=1, max_queued_requests=1)
    responses = [handle.remote()]
    gate.wait_for(1)
    responses.append(handle.remote())
    with pytest.raises(BackPressureError):
        handle.remote().result()
    timeline = recorder.timeline()
    gate.open()
    for response in responses:
        response.result(timeout_s=TIMEOUT_S)

    _, queued, refused = timeline.journeys
    assert kinds(timeline, queued) == [WaitKind.QUEUE]
    assert (refused.error, refused.loop, refused.slot_at) == ("BackPressureError", None, 0.0)
    assert kinds(timeline, refused) == []
    _, picture = check(timeline)
    assert picture.tracks == ["Held#0, event loop", "on no replica"]


def test_a_call_that_is_cancelled_in_the_queue_waited_there(record: Record) -> None:
    recorder, gate = record(), Gate()
    handle = run(gate, max_ongoing_requests=1)
    response = handle.remote()
    gate.wait_for(1)
    queued = handle.remote()
    queued.cancel()
    with pytest.raises(RequestCancelledError):
        queued.result()
    timeline = recorder.timeline()
    gate.open()
    response.result(timeout_s=TIMEOUT_S)

    running, cancelled = timeline.journeys
    assert running.slot_at <= cancelled.arrived_at
    assert cancelled.error == "RequestCancelledError"
    assert kinds(timeline, cancelled) == [WaitKind.QUEUE]


def test_a_call_that_is_cancelled_lasts_as_long_as_its_thread(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    recorder, gate = record(), Gate()
    response = run(gate).block.remote()
    gate.wait_for(1)
    response.cancel()
    with pytest.raises(RequestCancelledError):
        response.result()
    during = recorder.timeline()
    gate.open()
    call = only(over(recorder))

    assert len(during.unfinished) == 1
    assert call.error == "RequestCancelledError"


def test_what_user_code_raises_is_told_and_leaves_as_it_is(record: Record) -> None:
    class Failing:
        async def __call__(self) -> None:
            await asyncio.sleep(0)
            raise LookupError("mine")

    recorder = record()
    handle = serve.run(serve.deployment(Failing).bind(), route_prefix=None)
    with pytest.raises(LookupError, match="mine"):
        handle.remote().result()

    assert only(recorder.timeline()).error == "LookupError"


def test_a_cancellation_reaches_user_code_where_it_awaits(record: Record) -> None:
    seen: list[str] = []

    class Awaiting:
        async def __call__(self) -> None:
            try:
                gate.inside += 1
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                seen.append("cancelled")
                raise

    recorder, gate = record(), Gate()
    handle = serve.run(serve.deployment(Awaiting).bind(), route_prefix=None)
    response = handle.remote()
    gate.wait_for(1)
    response.cancel()
    timeline = over(recorder)

    assert seen == ["cancelled"]
    # To its `await`, from there to that of its handler, and to its end.
    assert [each.journey for each in timeline.runs] == [only(timeline)] * 3
    check(timeline)


def test_a_stream_runs_step_by_step(record: Record) -> None:
    class Stream:
        async def __call__(self) -> AsyncIterator[int]:
            for number in range(3):
                await asyncio.sleep(0)
                yield number

    recorder = record()
    handle = serve.run(serve.deployment(Stream).bind(), route_prefix=None)
    assert list(handle.options(stream=True).remote()) == [0, 1, 2]
    timeline = over(recorder)
    assert len(timeline.runs) >= 4
    assert {each.journey for each in timeline.runs} == {only(timeline)}
    check(timeline)


def test_http_and_websockets_have_the_names_of_their_routes(record: Record) -> None:
    app = FastAPI()

    @serve.deployment
    @serve.ingress(app)
    class Rooms:
        @app.get("/rooms/{room}")
        async def get(self, room: int) -> int:
            return room

        @app.websocket("/rooms/{room}/ws")
        async def join(self, websocket: WebSocket, room: int) -> None:
            await websocket.accept()
            await websocket.send_text(await websocket.receive_text())

    recorder = record()
    with TestClient(Rooms.bind()) as client:
        assert client.get("/rooms/7").json() == 7
        assert client.get("/nope").status_code == 404
        with client.websocket_connect("/rooms/7/ws") as socket:
            socket.send_text("hey")
            assert socket.receive_text() == "hey"

    timeline = recorder.timeline()
    names = [each.name for each in timeline.journeys]
    assert names == ["GET /rooms/{room}", "GET /nope", "WS /rooms/{room}/ws"]
    check(timeline)


def test_what_is_recorded_is_bounded_and_belongs_together(record: Record) -> None:
    recorder, gate = record(requests=5, runs=7), Gate()
    handle = run(gate)
    gate.open()
    for number in range(20):
        assert handle.remote(str(number)).result() == str(number)
    timeline = over(recorder)
    assert [each.number for each in timeline.journeys] == [16, 17, 18, 19, 20]
    assert 0 < len(timeline.runs) <= 7
    assert {each.journey for each in timeline.runs} <= {*timeline.journeys}
    check(timeline)


@pytest.mark.parametrize("sync", ["0", "1"])
def test_it_is_whole_whenever_it_is_looked_at(
    record: Record, switch_interval: None, monkeypatch: pytest.MonkeyPatch, sync: str
) -> None:
    class Quick:
        def __call__(self, child: Any = None) -> None: ...

        async def twice(self) -> None:
            await asyncio.sleep(0)

    monkeypatch.setenv(SYNC_IN_THREADPOOL, sync)
    recorder = record(requests=50, runs=100)
    deployment = serve.deployment(max_ongoing_requests=2, num_replicas=2)(Quick)
    handle = serve.run(deployment.bind(), route_prefix=None)
    left = itertools.count()

    def call(_: int) -> None:
        number = next(left)
        response = handle.remote() if number % 2 else handle.twice.remote()
        if number % 7 == 0:
            response.cancel()
        else:
            response.result(timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(6, "caller") as callers:
        calls = callers.map(call, range(200))
        for _ in range(20):
            check(recorder.timeline())
        list(calls)
    timeline = over(recorder)
    assert len(timeline.journeys) == 50
    assert max(each.number for each in timeline.journeys) == 200
    check(timeline)


def test_a_stall_is_on_the_track_of_the_servers_loop_if_that_is_where_user_code_runs(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, "0")
    monkeypatch.setenv(STALL_THRESHOLD_MS, "20")
    recorder, gate = record(), Gate()
    response = run(gate).block.remote()
    wait_until(lambda: bool(recorder.timeline().standstills))
    timeline = recorder.timeline()
    gate.open()
    thread = response.result(timeout_s=TIMEOUT_S)

    (standstill,) = timeline.standstills
    assert (standstill.track.name, standstill.track.is_loop) == (thread, True)
    assert standstill.track == only(timeline).loop
    assert standstill.began_at >= only(timeline).arrived_at - 1
    trace, picture = check(timeline)
    assert [each.track for each in trace.stalls] == [f"{thread} stalls"]
    assert picture.tracks == [f"{thread}, event loop"]
    assert "the event loop is stalled" in picture.legend


@pytest.mark.parametrize(
    ("loop", "ids", "expected"),
    [
        ("Held#0", (), "Held#0"),
        ("Held#0 (ingress-http)", (), "ingress-http"),
        ("Held#0 (a thread)", (), "Held#0"),
        ("Gone#0 (a thread)", ("mine",), "MainThread"),
        ("Gone#0 (a thread)", ("another",), None),
    ],
)
def test_a_stall_belongs_to_the_loop_it_names_also_if_its_thread_has_ended(
    loop: str, ids: tuple[str, ...], expected: str | None
) -> None:
    tracks = [Track("Held#0-worker-0", is_loop=False)]
    tracks += [Track(name, is_loop=True) for name in ("MainThread", "ingress-http", "Held#0")]
    if "http" in loop:
        del tracks[-1]
    journey = Journey(1, "request", "GET /", "mine", "Held", 1.0, loop=tracks[1])
    stall = Stall(
        began_at_s=0.0,
        duration_ms=1.0,
        reason=StallReason.BLOCKED,
        loop=loop,
        application="default",
        deployment=loop.partition("#")[0],
        replica="0",
        method="",
        request_ids=ids,
        place=stacks.EMPTY.place,
        waited=0,
    )

    found = [each.name for each in loops_of(stall, tracks, [journey])]
    assert found == ([] if expected is None else [expected])


def test_a_picture_of_many_shows_the_last_and_says_so(record: Record) -> None:
    recorder, gate = record(), Gate()
    handle = run(gate)
    gate.open()
    for _ in range(SHOWN + 3):
        handle.remote().result()
    _, picture = check(over(recorder))
    assert {each.request for each in picture.bars_of("request")} == set(range(4, SHOWN + 4))
    assert f"{SHOWN + 3} calls in " in picture.text
    assert f"; the last {SHOWN}<" in picture.text


def test_the_files_of_several_processes_are_one_on_their_common_clock() -> None:
    texts = []
    for number, began_at in ((1, 20.0), (2, 10.5)):
        journey = Journey(1, "call", "x", "", "D", began_at, ended_at=began_at + 1)
        texts.append(as_json([Timeline([journey], [], [], [], frozenset(), 30.0, number)], "t"))

    spans = [(each.pid, each.began, each.ended) for each in Trace(merged(texts)).requests]
    assert spans == [(2, 0.0, 1000.0), (1, 9500.0, 10500.0)]


def test_a_picture_of_nothing_is_one_all_the_same() -> None:
    trace, picture = check(Recorder().timeline())

    assert (trace.requests, picture.bars) == ([], [])


def test_names_are_text_in_a_picture_whatever_is_in_them() -> None:
    journey = Journey(1, "request", '</text><script>&"', "", "d", 1.0, ended_at=2.0)
    picture = Picture(as_svg(Timeline([journey], [], [], [], frozenset(), 2.0), "<b>" * 40))

    assert '</text><script>&"' in picture.about
    assert picture.title == "<b>" * 40


def test_rows_are_as_few_as_hold_all_without_an_overlap() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 5.0), (3.0, 6.0)]

    assert rows(spans, lambda each: each) == [
        [(0.0, 2.0), (2.0, 4.0)],
        [(1.0, 3.0), (3.0, 6.0)],
        [(2.5, 5.0)],
    ]


def test_a_trace_that_is_written_is_logged_with_its_number_of_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    window = Window(str(tmp_path / "trace.json"))
    with caplog.at_level("INFO", "ingress"):
        window.stop(TIMEOUT_S)

    assert f"wrote the trace of 0 requests to {tmp_path / 'trace.json'}" in caplog.text


def test_a_signal_handler_of_the_users_is_kept(tmp_path: Path) -> None:
    def mine(*_: object) -> None: ...

    window = Window(str(tmp_path / "trace.json"))
    try:
        for handler in (mine, signal.SIG_IGN, signal.SIG_DFL):
            previous = signal.signal(signal.SIGUSR2, handler)
            try:
                with window.writing_on_signal():
                    meanwhile = signal.getsignal(signal.SIGUSR2)
                assert (meanwhile is handler) == (handler is not signal.SIG_DFL)
                assert signal.getsignal(signal.SIGUSR2) is handler
            finally:
                signal.signal(signal.SIGUSR2, previous)
    finally:
        window.stop(TIMEOUT_S)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("/", Wanted("GET", "/")),
        ("/a?b=c", Wanted("GET", "/a?b=c")),
        ("post /items", Wanted("POST", "/items")),
        ('PUT /a {"b": 1}', Wanted("PUT", "/a", '{"b": 1}')),
        ("items", None),
        ("POST", None),
        ("JUMP /a", None),
        ("", None),
    ],
)
def test_a_request_is_a_path_or_a_method_a_path_and_a_body(text: str, read: Wanted | None) -> None:
    if read is not None:
        assert wanted(text) == read
    else:
        with pytest.raises(ValueError, match="is not a request; write a path"):
            wanted(text)
