"""The page of the admin listener, without a browser: its file, its events, and its other data."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, time
from typing import Any, cast

import pytest
from fastapi import FastAPI

import ingress as serve
from ingress.cli import worker_commands, workers
from ingress.engines import local_engine
from ingress.observe.admin.listener import AdminListener
from ingress.observe.live.observer import Observer, parts_of
from ingress.observe.live.page import MOST, PAUSE_S, REPLICA, routes
from ingress.serving.http.admin_address import AdminOptions
from ingress.state.applications import ApplicationSnapshot
from ingress.state.looking import Look
from ingress.state.server import Snapshot
from ingress.telemetry.logs.last_lines import LINES
from ingress.telemetry.notable import NOTABLE
from ingress.testing import Latch
from tests.observe.test_admin import admin_port
from tests.programs import INGRESS, environment, process, write_module
from tests.servers import PATIENCE_S, Answer, Connection, bind, get, served, wait_until

PAGE = Path(serve.__file__).with_name("live") / "page.html"
EVENTS = "/api/events"
BAD_ROUTE = "/<script>alert(1)</script>"


@contextmanager
def listening(ask: Callable[..., Any], options: AdminOptions | None = None) -> Iterator[int]:
    """Serve the page for what `ask` returns, and yield its port."""
    observer = Observer(ask)
    snapshot = partial(Snapshot, 0.0, 1)
    options = options or AdminOptions("127.0.0.1:0")
    listener = AdminListener(snapshot, options, routes(observer))
    try:
        yield int(listener.url.rpartition(":")[2])
    finally:
        listener.stop()


class Asked:
    """A server that has these applications, and counts how often it is asked."""

    def __init__(self, **applications: ApplicationSnapshot) -> None:
        self.counts: Counter[str] = Counter()
        self._look = Look(Snapshot(0.0, 1, applications=applications), [], [], [])

    def __call__(self, what: str, argument: float = 0.0) -> Any:
        self.counts[what] += 1
        return [self._look], {}


@contextmanager
def viewing(port: int, receive_buffer: int | None = None) -> Iterator[Connection]:
    with Connection(port, receive_buffer=receive_buffer) as viewer:
        viewer.request(EVENTS, headers="")
        yield viewer


def event(viewer: Connection) -> Any:
    """Return the next event of a viewer."""
    received = viewer.receive_until(b"\n\n\r\n")
    begin, end = received.index(b"data: ") + 6, received.index(b"\n\n\r\n")
    viewer.received = received[end + 5 :]
    return json.loads(received[begin:end])


def test_the_page_is_one_small_file_whose_own_code_alone_may_run() -> None:
    with listening(Asked()) as port:
        answer = get(port, "/")
    text = answer.body.decode()
    policy = answer.headers["content-security-policy"]

    assert answer.status == 200
    assert len(answer.body) <= 150_000
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    for tag in ("script", "style"):
        (code,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert re.findall(r"<[^>]*\s(on\w+|style)=", text) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text) == []


def test_a_viewer_gets_at_most_two_views_a_second_and_nothing_is_made_without_one() -> None:
    asked = Asked()
    with listening(asked) as port:
        get(port, "/")
        assert asked.counts["look"] == 0
        with viewing(port) as first, viewing(port) as second:
            times = [event(first)["at"] for _ in range(3)]
            assert event(second)["is_healthy"]
            assert min(b - a for a, b in pairwise(times)) > 0.8 * PAUSE_S

        # Both have left: a third one is the first again, after a while without views.
        wait_until(lambda: is_quiet(lambda: asked.counts["look"]))


def is_quiet(count: Callable[[], int]) -> bool:
    """Return whether a count stands for three pauses."""
    before, until = count(), monotonic() + 3 * PAUSE_S
    wait_until(lambda: count() != before or monotonic() > until)
    return count() == before


def test_a_viewer_that_does_not_read_delays_no_other() -> None:
    big = [{"level": "bad", "text": "x" * 1000}] * 2000
    asked = Asked(app=ApplicationSnapshot("RUNNING", json.dumps(big), "/", 0.0))
    with listening(asked) as port, viewing(port, receive_buffer=4096) as slow:
        slow.receive_until(b"HTTP/1.1 200")
        with viewing(port) as other:
            assert [len(event(other)["applications"]) for _ in range(3)] == [1, 1, 1]


def test_more_streams_than_there_may_be_are_refused_in_words() -> None:
    with listening(Asked()) as port, ExitStack() as stack:
        viewers = [stack.enter_context(viewing(port)) for _ in range(MOST)]
        for each in viewers:
            each.receive_until(b"data: ")
        refused = [get(port, EVENTS) for _ in range(100)]
        assert {each.status for each in refused} == {503}
        assert f"{MOST} viewers are connected already" in refused[0].body.decode()
        assert get(port, "/").status == 200
        viewers[0].reset()
        wait_until(lambda: _is_taken(port))


def test_a_recording_without_some_processes_names_them() -> None:
    parts: list[dict[str, Any]] = []

    def ask(what: str, argument: float = 0.0) -> Any:
        return parts, {7: "does not answer"}

    with listening(ask) as port:
        answer = get(port, "/api/record?seconds=1")
        assert answer.status == 504
        assert b"no process has recorded: worker 7 does not answer" in answer.body
        parts.append({"pid": 8, "trace": "{}"})
        answer = get(port, "/api/record?seconds=1")
        assert (answer.status, answer.body) == (200, b"{}")
        assert answer.headers["ingress-missing"] == "worker 7 does not answer"


def test_a_recording_of_a_worker_may_come_later_than_a_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_commands, "STATUS_S", 0.01)

    class Supervisor:
        pid = 1

        def ask(self, command: str, arguments: Any, wait_s: float) -> workers.Asked:
            asked = workers.Asked(command, arguments, waits_for={7})
            told = {"pid": 7, "trace": "{}"}
            threading.Timer(0.3, asked.answer, (7, told)).start()
            asked.is_answered.wait(wait_s)
            return asked

    commands = worker_commands.WorkersCommands(cast("Any", Supervisor()), None)
    assert commands.observer.record(0.01) == ("{}", [])


def _is_taken(port: int) -> bool:
    with viewing(port) as viewer:
        return b" 200 " in viewer.receive_until(b"\r\n\r\n")


def test_a_server_that_does_not_answer_is_said_and_asked_again() -> None:
    answers, serving = iter([RuntimeError("no worker answers")] * 2), Asked()

    def ask(what: str, argument: float = 0.0) -> Any:
        error = next(answers, None)
        if error is not None:
            raise error
        return serving(what, argument)

    with listening(ask) as port, viewing(port) as viewer:
        assert event(viewer) == {"error": "RuntimeError: no worker answers"}
        found = [event(viewer), event(viewer)]
        assert "is_healthy" in found[-1]


def test_the_page_needs_no_token_and_its_data_does() -> None:
    options = AdminOptions("127.0.0.1:0", "secret")
    with listening(Asked(), options) as port:
        assert get(port, "/").status == 200
        for path in (EVENTS, "/api/series", "/api/configuration", "/api/record"):
            assert get(port, path).status == 401
        token = "Authorization: Bearer secret\r\n"
        assert get(port, "/api/series", token).status == 200


@pytest.fixture
def go() -> Iterator[Latch]:
    made = Latch(timeout_s=PATIENCE_S)
    yield made
    made.count_down()
    serve.shutdown()


@pytest.fixture
def port(go: Latch) -> int:
    api = FastAPI()

    @serve.deployment(name="Api", max_ongoing_requests=7)
    @serve.ingress(api)
    class Api:
        @api.get(BAD_ROUTE)
        async def bad(self) -> str:
            raise ValueError("</script><img src=x>")

        @api.get("/wait")
        async def wait(self) -> str:
            await go
            return "x"

        def work(self) -> str:
            return "x"

    return served(bind(Api))


def test_hostile_names_are_data_in_one_line(port: int) -> None:
    assert get(port, "/%3Cscript%3Ealert(1)%3C/script%3E").status == 500
    with listening(partial(parts_of, local_engine())) as admin:
        with viewing(admin) as viewer:
            view = event(viewer)
        while not view["failed"]:
            with viewing(admin) as viewer:
                view = event(viewer)
        assert view["failed"][0]["name"] == f"GET {BAD_ROUTE}"
        assert view["failed"][0]["error"] == "ValueError: </script><img src=x>"


def test_the_time_of_a_request_is_the_same_in_every_view(port: int) -> None:
    NOTABLE.clear()
    began = time()
    assert get(port, BAD_ROUTE.replace("<", "%3C").replace(">", "%3E")).status == 500
    with listening(partial(parts_of, local_engine())) as admin, viewing(admin) as viewer:
        views = [event(viewer) for _ in range(3)]
    times = {each["at"] for view in views for each in view["failed"]}
    assert len(times) == 1
    assert began - 0.5 <= times.pop() <= time()


def test_the_series_of_a_deployment_and_its_options_are_there(port: int) -> None:
    with listening(partial(parts_of, local_engine())) as admin:
        series = json.loads(get(admin, "/api/series?application=default&deployment=Api").body)
        found = json.loads(get(admin, "/api/configuration").body)

    assert series["step_s"] == 5
    options = {each["where"]: each for each in found["options"]}
    assert options["default:Api.max_ongoing_requests"] == {
        "where": "default:Api.max_ongoing_requests", "value": 7, "origin": "code",
    }  # fmt: skip
    assert options["default:Api.max_queued_requests"]["origin"] == "default"
    retries = options["environment.RAY_SERVE_HTTP_REQUEST_MAX_RETRIES"]
    assert (retries["value"], retries["origin"]) == (10, "default")
    assert found["flag"] == {"name": "RAY_SERVE_RUN_SYNC_IN_THREADPOOL", "value": "0"}
    moves = [(each["name"], each["from"], each["to"]) for each in found["moves"]]
    assert moves == [("Api.work", "event loop", "threadpool")]


def test_an_option_of_http_is_shown_with_the_value_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, go: Latch
) -> None:
    @serve.deployment
    class Model:
        async def __call__(self, request: Any) -> None: ...

    monkeypatch.setenv("INGRESS_MAX_HEADER_BYTES", "4096")
    served(bind(Model))
    with listening(partial(parts_of, local_engine())) as admin:
        found = json.loads(get(admin, "/api/configuration").body)

    values = {each["where"]: each["value"] for each in found["options"]}
    assert values["http_options.max_header_bytes"] == 4096


def test_a_recording_has_the_requests_that_ran_meanwhile(port: int, go: Latch) -> None:
    with listening(partial(parts_of, local_engine())) as admin:
        for wrong in ("0", "-1", "nan", "61", "x"):
            assert get(admin, f"/api/record?seconds={wrong}").status == 400

        def record() -> Answer:
            # Also while one of the attempts below is a recording.
            while (answer := get(admin, "/api/record?seconds=1")).status == 409:
                pass
            return answer

        with ThreadPoolExecutor() as threads:
            threads.submit(get, port, "/wait")
            recording = threads.submit(record)
            wait_until(lambda: get(admin, "/api/record?seconds=0.01").status == 409)
            go.count_down()

    events = json.loads(recording.result().body)["traceEvents"]
    (request,) = [
        each["args"] for each in events if (each["ph"], each["name"]) == ("b", "GET /wait")
    ]
    assert (request["kind"], request["replica"]) == ("request", "Api#0")
    assert "unfinished" not in request
    assert {each["cat"] for each in events if each["ph"] == "b"} == {"request"}


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_viewers_and_scrapes_while_the_server_ends_do_not_delay_it_and_are_no_errors(
    tmp_path: Path, workers: str
) -> None:
    write_module(
        tmp_path,
        "app",
        "import asyncio\nimport ingress as serve\n\n@serve.deployment\nclass Model:\n"
        "    async def __call__(self, request):\n        print('holds', flush=True)\n"
        "        await asyncio.sleep(3600)\n\nhello = Model.bind()\n",
    )
    command = [*INGRESS, "run", "app:hello", "--port", "0", "--workers", workers]
    command += ["--admin", "127.0.0.1:0", "--timeout-graceful-shutdown", "2"]
    with process(command, tmp_path, environment(tmp_path)) as server, ExitStack() as stack:
        server.wait_for("Ctrl-C to stop")
        admin = int(server.wait_for(r"page at http://127\.0\.0\.1:(\d+)/")[1])
        reads = stack.enter_context(viewing(admin))
        stack.enter_context(viewing(admin, receive_buffer=4096))  # does not read
        event(reads)
        holding = stack.enter_context(Connection(server.port))
        holding.request("/")
        server.wait_for("holds")
        server.signal()
        server.wait_for("stopping: waiting for")
        scraped: list[int] = []

        def scrape() -> None:
            while True:
                try:
                    scraped.append(get(admin, "/metrics").status)
                except OSError:  # refused
                    return

        scraping = threading.Thread(target=scrape)
        scraping.start()
        assert "data: " in reads.receive_all().decode()  # until the listener closes
        scraping.join(PATIENCE_S)
        assert server.wait() == 0
    assert {*scraped} - {0} == {200}
    assert "Traceback" not in server.output, server.output


@pytest.mark.thorough
def test_the_view_of_workers_has_each_process(tmp_path: Path) -> None:
    write_module(
        tmp_path,
        "app",
        "import ingress as serve\n\n@serve.deployment\nclass Model:\n"
        "    async def __call__(self, request):\n        return 'x'\n\nhello = Model.bind()\n",
    )
    command = [*INGRESS, "run", "app:hello", "--port", "0", "--workers", "2", "--admin"]
    with process([*command, "127.0.0.1:0"], tmp_path, environment(tmp_path)) as server:
        server.wait_for("Ctrl-C to stop")
        admin = int(server.wait_for(r"page at http://127\.0\.0\.1:(\d+)/")[1])
        for _ in range(20):
            assert get(server.port, "/").status == 200
        with viewing(admin) as viewer:
            while len((view := event(viewer))["workers"]) < 2:
                pass
        assert {each["process"] for each in view["replicas"]} == set(view["workers"])
        assert view["pid"] == server.process.pid
        assert view["url"] == server.url
        (deployment,) = view["applications"][0]["deployments"]
        assert deployment["replica_states"] == {"RUNNING": 2}
        assert deployment["requests"] == 20


LOGGING = """
import logging
import ingress as serve

logger = logging.getLogger("mine")

@serve.deployment{options}
class Model:
    async def __call__(self, request):
        for number in range(49):
            logger.warning("number %d of %s", number, request.query_params["name"])
        if "fail" in request.query_params:
            raise ValueError("\x1b[31mno stock")

app = Model.bind()
"""


@pytest.mark.parametrize("options", ["", '(isolation="process")'])
def test_the_last_log_lines_of_a_replica_and_of_a_request_are_there(
    options: str, tmp_path: Path
) -> None:
    write_module(tmp_path, "module", LOGGING.replace("{options}", options))
    command = [*INGRESS, "run", "module:app", "--port", "0", "--admin", "127.0.0.1:0"]
    with process(command, tmp_path, environment(tmp_path)) as server:
        wait_until(lambda: get(server.port, "/-/readyz").status == 200)
        port = admin_port(server)
        assert get(server.port, "/?name=first", "X-Request-ID: one\r\n").status == 200
        assert get(server.port, "/?name=second&fail=1", "X-Request-ID: two\r\n").status == 500
        with viewing(port) as viewer:
            (replica,) = event(viewer)["replicas"]
        names = "&".join(f"{each}={replica[each]}" for each in REPLICA)

        def lines(request_id: str = "") -> list[Any]:
            answer = get(port, f"/api/lines?{names}&request_id={request_id}")
            return list(json.loads(answer.body))

        # The server logs the failure of a child, whose own lines come later, by a pipe.
        wait_until(lambda: len(lines("two")) == LINES)
        second = lines("two")
        assert lines() == second  # those of the first are pushed out: the limit is of each replica
        assert "number 48 of second" in [each["text"] for each in second]
        assert any(each["text"].endswith("ValueError: \\x1b[31mno stock") for each in second)
        assert get(port, "/api/lines?process=x").status == 400
        assert not json.loads(get(port, f"/api/lines?{names}x").body)
