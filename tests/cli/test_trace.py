"""`ingress trace` and `INGRESS_TRACE`: their files, read as a viewer reads them."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ingress.core.base.settings import TRACE_FILE
from tests.programs import (
    INGRESS,
    ROOT,
    UVICORN,
    ServerProcess,
    environment,
    process,
    run_ingress,
    said_by,
    write_module,
)
from tests.servers import PATIENCE_S, wait_until
from tests.traces import Picture, Span, Trace

PICTURES = ROOT / "docs" / "trace"

WHERE = """
import asyncio, threading
from pathlib import Path
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

def note(kind):
    thread = threading.current_thread().name
    with open("seen.txt", "a") as file:
        file.write(f"{serve.get_request_context().request_id} {kind} {thread}\\n")

@serve.deployment
class Model:
    def __init__(self):
        self.ready = threading.Event()
    def predict(self):
        note("predict")
        return 1
    @serve.batch(max_batch_size=2, batch_wait_timeout_s=5)
    def answer(self, items):
        with open("seen.txt", "a") as file:
            file.write(f"- batch {threading.current_thread().name}\\n")
        return items

@serve.deployment(num_replicas=2, lanes={"db": 1})
@serve.ingress(app)
class Where:
    def __init__(self, model):
        self.model = model
    @app.get("/sync/{item}")
    def sync(self, item: int):
        note("sync")
    @app.get("/async")
    async def on_loop(self):
        note("async")
    @app.get("/lane")
    @serve.method(lane="db")
    def lane(self):
        note("lane")
    @app.get("/to_thread")
    async def to_thread(self):
        await asyncio.to_thread(note, "to_thread")
    @app.get("/call")
    async def call(self):
        note("call")
        return await self.model.predict.remote()
    @app.get("/batch")
    async def batch(self):
        return await self.model.answer.remote(1)
    @app.post("/post")
    async def post(self, body: dict):
        Path("body.txt").write_text(str(body))

where = Where.bind(Model.bind())

@serve.deployment
class Together:
    def __init__(self):
        self.all = asyncio.Barrier(3)
    async def __call__(self):
        await self.all.wait()
together = Together.bind()

@serve.deployment
class Failing:
    def __init__(self):
        raise ValueError("no model")
failing = Failing.bind()

@serve.deployment
class Holding:
    def __call__(self):
        Path("inside.txt").write_text("")
        while not Path("go.txt").exists():
            threading.Event().wait(0.005)
holding = Holding.options(max_ongoing_requests=2).bind()

@serve.deployment
class Endless:
    async def __call__(self):
        Path("inside.txt").write_text("")
        await asyncio.Event().wait()
endless = Endless.bind()

@serve.deployment(isolation="process")
class Stalling:
    async def __call__(self):
        threading.Event().wait(0.5)
stalling = Stalling.bind()

api = FastAPI()

@serve.deployment(isolation="process", lanes={"db": 1})
@serve.ingress(api)
class There:
    @api.get("/")
    @serve.method(lane="db")
    def hold(self):
        Path("inside.txt").write_text("")
        while not Path("go.txt").exists():
            threading.Event().wait(0.005)
there = There.bind()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", WHERE)
    return tmp_path


def ingress(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_ingress(folder, "trace", *arguments, **environ)


def traced(folder: Path, *arguments: str, **environ: str) -> Trace:
    result = ingress(folder, *arguments, **environ)
    assert result.returncode == 0, result.stderr
    return Trace((folder / "trace.json").read_text())


@contextmanager
def calling(folder: Path, server: ServerProcess) -> Iterator[None]:
    """Have a request run in the application, until the end."""
    options = {"timeout": PATIENCE_S}
    caller = threading.Thread(target=httpx.get, args=(server.url,), kwargs=options)
    caller.start()
    try:
        wait_until(lambda: (folder / "inside.txt").exists())
        yield
    finally:
        (folder / "go.txt").write_text("")
        caller.join()


def written_twice(folder: Path, server: ServerProcess, name: str) -> tuple[Trace, Trace]:
    """Return what a server writes at a signal while a request runs, and what at its end."""
    file = folder / name
    with calling(folder, server):
        server.signal(signal.SIGUSR2)
        wait_until(file.exists)
        during = Trace(file.read_text())
    server.signal(signal.SIGTERM)
    server.wait()
    return during, Trace(file.read_text())


class Example:
    """Output and files of the command for one example, as the documents show it."""

    def __init__(self, name: str, folder: Path, *, sync: str = "0") -> None:
        arguments = [f"app_examples.{name}:app", "--svg", "blocking.svg", "--app-dir", str(ROOT)]
        result = ingress(folder, *arguments, **environment(folder, sync=sync))
        assert result.returncode == 0, result.stderr
        self.stdout = result.stdout
        self.trace = Trace((folder / "trace.json").read_text())
        self.picture = Picture((folder / "blocking.svg").read_text())


@pytest.fixture(scope="module")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example("blocking_echo", tmp_path_factory.mktemp("blocking"))


@pytest.fixture(scope="module")
def awaiting(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example("echo", tmp_path_factory.mktemp("awaiting"))


@pytest.fixture(scope="module")
def threaded(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example("blocking_echo", tmp_path_factory.mktemp("threaded"), sync="1")


# The examples


def test_requests_that_block_the_loop_stand_behind_each_other(blocking: Example) -> None:
    trace = blocking.trace
    runs = trace.runs

    assert len(trace.requests) == len(runs) == 3
    assert {each.track for each in runs} == {"BlockingEcho#0"}
    assert not any(a.overlaps(b) for a, b in itertools.combinations(runs, 2))
    assert all(a.overlaps(b) for a, b in itertools.combinations(trace.requests, 2))
    waits = trace.waits_for("loop")
    for wait, before in zip(waits[1:], runs, strict=False):
        assert wait.ended >= before.ended


def test_the_stall_of_a_blocked_loop_is_marked_beside_it(blocking: Example) -> None:
    assert blocking.trace.stalls
    for stall in blocking.trace.stalls:
        assert stall.track == "BlockingEcho#0 stalls"
        assert stall.args["reason"] == "blocked"
        assert stall.args["method"] == "BlockingEcho.__call__"
        assert any(stall.overlaps(run) for run in blocking.trace.runs)


def test_requests_that_await_overlap_and_nothing_stalls(folder: Path) -> None:
    trace = traced(folder, "app:together", "--svg", "trace.svg")

    assert len(trace.requests) == 3
    assert all(a.overlaps(b) for a, b in itertools.combinations(trace.requests, 2))
    # A request has two steps, before and after its `await`; the last one need not wait.
    assert set(Counter(each.args["request"] for each in trace.runs)) == {1, 2, 3}
    assert len(trace.runs) >= 5
    assert {each.track for each in trace.runs} == {"Together#0"}
    assert blocked(trace) == []
    assert not Picture((folder / "trace.svg").read_text()).is_stairs


def test_with_the_flag_a_def_is_on_the_track_of_its_worker_thread(threaded: Example) -> None:
    trace = threaded.trace
    workers = [each for each in trace.runs if "-worker-" in each.track]

    assert len(trace.requests) == len(workers) == 3
    assert len({each.track for each in workers}) == 3
    assert all(a.overlaps(b) for a, b in itertools.combinations(workers, 2))
    assert len(trace.waits_for("thread")) == 3
    assert blocked(trace) == []


def test_the_picture_shows_the_same(
    blocking: Example, awaiting: Example, threaded: Example
) -> None:
    for each in (blocking, awaiting, threaded):
        requests = each.picture.bars_of("request")
        assert [bar.request for bar in requests] == [1, 2, 3]
        for bar, span in zip(requests, each.trace.requests, strict=True):
            assert bar.ended == pytest.approx(span.ended, abs=0.01)
        assert len(each.picture.bars_of("standstill")) == len(each.trace.stalls)

    for each, kind in ((blocking, "run"), (awaiting, "await"), (threaded, "await")):
        assert {bar.work.kind for bar in each.picture.bars_of("request")} == {kind}
    for bar in blocking.picture.bars_of("request")[1:]:
        assert {part.kind for part in bar.parts} >= {"loop", "run"}
    assert blocking.picture.is_stairs
    assert [bar.work.kind for bar in threaded.picture.bars_of("work")] == ["work"] * 3
    assert {"waits for the event loop", "the event loop is stalled"} <= {*blocking.picture.legend}
    assert "runs in a worker thread" in threaded.picture.legend
    assert [each.picture.axis[0] for each in (blocking, awaiting, threaded)] == ["0"] * 3
    assert blocking.picture.axis[-1].endswith(",000 ms")
    labels = [bar.label for bar in blocking.picture.bars_of("request")]
    assert labels == ["1 GET /", "2 GET /", "3 GET /"]


@pytest.mark.parametrize("name", ["blocking", "async"])
def test_the_pictures_of_the_documents_are_what_the_command_makes(
    name: str, blocking: Example, awaiting: Example
) -> None:
    made = (blocking if name == "blocking" else awaiting).picture
    stored = Picture((PICTURES / f"{name}.svg").read_text())

    assert shape(stored) == shape(made)
    assert stored.is_stairs == (name == "blocking")
    assert str(ROOT.parent) not in stored.text


def test_the_document_shows_what_the_command_prints(blocking: Example) -> None:
    text = (PICTURES.parent / "trace.md").read_text()
    command = r"^\$ ingress trace .* --svg blocking\.svg\n(.*?)^```$"
    (shown,) = re.findall(command, text, re.M | re.S)

    # Durations and the number of stalls differ from run to run.
    masked = [re.sub(r"[\d,]+ ms.*", "ms", each) for each in (shown, blocking.stdout)]
    assert masked[0] == masked[1]


def blocked(trace: Trace) -> list[Span]:
    """Return the stalls by code on the loop; on a busy machine any loop may wait for the GIL."""
    return [each for each in trace.stalls if each.args["reason"] == "blocked"]


def shape(picture: Picture) -> object:
    """Return the parts of a picture that are the same in each run: tracks, requests, texts."""
    requests = [(bar.request, bar.label, bar.work.kind) for bar in picture.bars_of("request")]
    return picture.title, picture.tracks, picture.places, requests


# Tracks and names


@pytest.mark.parametrize(("sync", "separate"), [("0", "1"), ("1", "1"), ("0", "0")])
def test_what_runs_is_on_the_track_of_the_thread_it_finds_itself_on(
    folder: Path, sync: str, separate: str
) -> None:
    paths = ["/sync/7", "/async", "/lane", "/call"]
    # Of a loop that the replica does not own, it does not own the executor either.
    paths += ["/to_thread"] if separate == "1" else []
    environ = environment(folder, sync=sync, separate=separate)
    trace = traced(folder, "app:where", *paths, "-n", "3", **environ)

    seen = [line.split(maxsplit=2) for line in (folder / "seen.txt").read_text().splitlines()]
    assert len(seen) == 3 * (len(paths) + 1)
    names = {each: f"GET /{each}" for each in ("async", "lane", "to_thread", "call")}
    names |= {"sync": "GET /sync/{item}", "predict": "Model.predict"}
    for request_id, kind, thread in seen:
        tracks = {run.track for run in trace.runs_of(request_id) if run.name == names[kind]}
        assert thread in tracks
        assert ("-worker-" in thread) == (
            kind in ("sync", "lane", "to_thread") or (kind == "predict" and sync == "1")
        )


def test_a_batch_is_one_run_for_all_its_requests(folder: Path) -> None:
    trace = traced(folder, "app:where", "/batch", "-n", "2")

    (line,) = (folder / "seen.txt").read_text().splitlines()
    (batch,) = [each for each in trace.requests if each.name == "Model.answer x 2"]
    (run,) = [each for each in trace.runs if "-worker-" in each.track]
    assert (run.name, run.track) == (batch.name, line.split()[2])
    calls = [each for each in trace.requests if each.name == "Model.answer"]
    assert len(calls) == 2
    assert all(call.began <= run.began and run.ended <= call.ended for call in calls)


def test_a_body_and_a_method_are_sent(folder: Path) -> None:
    result = ingress(folder, "app:where", 'POST /post {"name": "pen"}', "/async", "-n", "1")

    assert "POST /post: 1 x 200" in result.stdout
    assert "GET /async: 1 x 200" in result.stdout
    assert (folder / "body.txt").read_text() == "{'name': 'pen'}"


def test_it_says_what_was_answered_and_what_was_written(folder: Path) -> None:
    result = ingress(folder, "app:where", "/sync/7", "/sync/x", "-o", "a.json", "--svg", "a.svg")

    lines = result.stdout.splitlines()
    assert lines[:2] == ["GET /sync/7: 3 x 200", "GET /sync/x: 3 x 422"]
    assert re.fullmatch(r"6 requests in \S+ ms", lines[2])
    assert [line.partition(":")[0] for line in lines[3:]] == ["a.json", "a.svg"]
    Trace((folder / "a.json").read_text())
    Picture((folder / "a.svg").read_text())


def test_ctrl_c_ends_requests_that_have_no_end(folder: Path) -> None:
    with process([*INGRESS, "trace", "app:endless"], folder, environment(folder)) as run:
        wait_until(lambda: (folder / "inside.txt").exists())
        run.signal(signal.SIGINT)
        assert run.wait() == 0

    trace = Trace((folder / "trace.json").read_text())
    assert trace.requests
    assert all(each.args["unfinished"] for each in trace.requests)


# Mistakes

MISTAKES = {
    "no-module": (["nothing:app"], "there is no module 'nothing' in"),
    "no-request": (["app:where", "nope"], "'nope' is not a request; write a path"),
    "no-method": (["app:where", "FETCH /async"], "'FETCH /async' is not a request; write a path"),
    "does-not-start": (["app:failing"], "failed to start: ValueError: no model"),
    "no-folder": (["app:where", "/async", "-o", "no/such/t.json"], "no folder 'no/such'"),
    "a-folder": (["app:where", "/async", "--svg", "."], "--svg='.' cannot be written: it is a"),
}


def test_a_mistake_is_one_line_and_writes_nothing(folder: Path) -> None:
    said = said_by(folder, *[["trace", *arguments] for arguments, _ in MISTAKES.values()])

    for (code, out, lines), (_, message) in zip(said, MISTAKES.values(), strict=True):
        (line,) = lines
        assert line.startswith("Error: ")
        assert message in line
        assert (code, out) == (1, "")
    assert [*folder.glob("*.json"), *folder.glob("*.svg")] == []


def test_a_path_that_answers_404_is_traced_and_the_paths_that_there_are_are_named(
    folder: Path,
) -> None:
    ((code, out, _),) = said_by(folder, ["trace", "app:where", "/nope", "-n", "3"])

    assert code == 0
    assert out.startswith("GET /nope: 3 x 404; there is GET /sync/{item}, ")
    assert len(Trace((folder / "trace.json").read_text()).requests) == 3


def test_help_tells_how_to_record_a_server_too(folder: Path) -> None:
    text = ingress(folder, "--help").stdout

    for word in ("--requests", "--concurrency", "--out", "--svg", "INGRESS_TRACE", "kill -USR2"):
        assert word in text


# A running server


@pytest.mark.parametrize(
    "command",
    [[*INGRESS, "run", "app:holding", "--port", "0"], [*UVICORN, "app:holding"]],
    ids=["ingress", "uvicorn"],
)
def test_a_signal_has_the_recent_past_of_a_server_written(folder: Path, command: list[str]) -> None:
    environ = environment(folder, sync="1") | {TRACE_FILE: "trace-{pid}.json"}
    with process(command, folder, environ) as server:
        during, after = written_twice(folder, server, f"trace-{server.process.pid}.json")

    for trace, is_over in ((during, False), (after, True)):
        (request,) = trace.requests
        (worker,) = [each for each in trace.runs if "-worker-" in each.track]
        assert ("unfinished" in request.args) != is_over
        assert (request.name, worker.name) == ("GET /", "GET /")
    assert not list(folder.glob("*.part"))


def test_a_child_process_has_tracks_of_its_own_on_the_same_clock(folder: Path) -> None:
    environ = environment(folder, sync="1") | {TRACE_FILE: "trace.json"}
    with process([*INGRESS, "run", "app:there", "--port", "0"], folder, environ) as server:
        parent = server.process.pid
        during, after = written_twice(folder, server, "trace.json")

    for trace, is_over in ((during, False), (after, True)):
        (child,) = set(trace.processes) - {parent}
        assert trace.processes[child] == f"There#0, process {child}"
        here, there = sorted(trace.requests, key=lambda each: each.pid != parent)
        assert [here.pid, there.pid] == [parent, child]
        assert here.name == there.name == "GET /"
        assert here.args["request_id"] == there.args["request_id"]
        assert all(("unfinished" in each.args) != is_over for each in (here, there))
        (worker,) = [each for each in trace.runs if each.track == "There#0-db-worker-0"]
        assert (worker.pid, worker.name) == (child, "GET /")
        assert here.began <= there.began <= worker.began
        if is_over:
            assert worker.ended <= there.ended <= here.ended


def test_the_stalls_of_a_child_process_are_counted(folder: Path) -> None:
    result = ingress(folder, "app:stalling", "--svg", "trace.svg")

    assert result.returncode == 0, result.stderr
    assert re.search(r"3 requests in .*, \d stalls?$", result.stdout, re.MULTILINE)
    assert "trace.svg: a picture of the server's process" in result.stdout


def test_the_page_records_child_processes_without_a_trace_file(folder: Path) -> None:
    command = [*INGRESS, "run", "app:there", "--port", "0", "--admin", "127.0.0.1:0"]
    with process(command, folder, environment(folder, sync="1")) as server:
        admin = server.wait_for(r"page at (http://127\.0\.0\.1:\d+/)")[1]
        with calling(folder, server):
            record = f"{admin}api/record?seconds=0.3"
            trace = Trace(httpx.get(record, timeout=PATIENCE_S).text)

    (child,) = set(trace.processes) - {server.process.pid}
    (run,) = [each for each in trace.runs if each.track == "There#0-db-worker-0"]
    assert (run.pid, run.name) == (child, "GET /")
    here, there = sorted(trace.requests, key=lambda each: each.pid == child)
    assert here.pid == server.process.pid
    assert here.began <= there.began <= run.began <= run.ended


def test_a_file_that_cannot_be_written_is_one_line_before_anything_starts(folder: Path) -> None:
    given = {TRACE_FILE: "no/such/trace.json"}
    result = run_ingress(folder, "run", "app:where", "--port", "0", **given)

    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: INGRESS_TRACE='no/such/trace.json' cannot be written: ")
    assert result.returncode == 1


def test_the_readers_refuse_what_a_viewer_would() -> None:
    """The tests above rely on these two readers."""
    event = {"ph": "X", "cat": "run", "name": "a", "pid": 1, "tid": 1, "args": {"request_id": ""}}
    name = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}}
    process = name | {"name": "process_name"}

    def trace(*events: object) -> Trace:
        return Trace(json.dumps({"traceEvents": [process, name, *events]}))

    nested = [event | {"ts": 0, "dur": 9}, event | {"ts": 1, "dur": 3}]
    (outer, inner) = trace(*nested).runs
    assert inner == replace(outer, began=0.001, ended=0.004)
    assert isinstance(outer, Span)
    for wrong in (
        [nested[0], event | {"ts": 5, "dur": 9}],
        [event | {"ts": 0}],
        [event | {"ts": -1, "dur": 1}],
        [{"ph": "b", "cat": "r", "id2": {"local": "1"}, "name": "a", "ts": 0, "pid": 1, "tid": 1}],
    ):
        with pytest.raises(AssertionError):
            trace(*wrong)
