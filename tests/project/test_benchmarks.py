"""The benchmarks measure both sides alike, omit nothing, and leave nothing running.

No test checks a speed.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient

from benchmarks import charts, command, document, load, report, slices, targets
from benchmarks.apps import watched
from benchmarks.charts import Bar, Chart
from benchmarks.comparison import in_turn
from benchmarks.peers.__main__ import Peer, installed
from benchmarks.results import FOLDER, Figure, Report, Result, Sample
from benchmarks.rows import FASTAPI, FASTAPI_CLIENTS, PROCESS_ROWS, ROWS, STAY, Row, Served, ours
from benchmarks.scaling_page import Model
from benchmarks.servers import ROOT, BenchmarkError, Program, Request, Server
from benchmarks.slices import SLICES
from benchmarks.starts import STARTS
from tests.servers import wait_until

SVG = "{http://www.w3.org/2000/svg}"
WRK = """
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     2.71ms  512.00us  13.07ms   90.12%
  Latency Distribution
     50%  730.00us
     75%    2.90ms
     90%    3.36ms
     99%    1.20s 
  11381 requests in 1.00s, 1.42MB read
Requests/sec:  11381.10
Transfer/sec:      1.42MB
"""  # noqa: W291 - as wrk prints it


def pairs(row: str = "async", ratios: tuple[float, ...] = (0.5, 3.0, 1.0, 0.9, 1.1)) -> Result:
    """Return a result with these ratios to a baseline of 1,000 requests per second."""
    runs = [{"requests_per_s": 1000 * ratio, "p50_ms": 1.0, "p99_ms": 2.0} for ratio in ratios]
    plain = [{"requests_per_s": 1000.0, "p50_ms": 1.0, "p99_ms": 2.0}] * len(ratios)
    return Result(row, "32 connections", "", runs, "plain FastAPI", plain)


def is_running(pid: int) -> bool:
    """Return whether a process exists that is not a zombie; another process reaps it."""
    ran = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    return ran.stdout.strip() not in (b"", b"Z", b"Zs", b"ZN", b"Z+")


def ran_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)


# Measured requests


@pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning")
@pytest.mark.parametrize("side", ["baseline", "ours"])
@pytest.mark.parametrize(
    "row", [*ROWS, *PROCESS_ROWS], ids=lambda row: f"{row.name}-{row.setup}".strip("-")
)
def test_both_sides_of_a_row_agree(row: Row, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: Served = getattr(row, side)
    module, name = served.app.split(":")
    for variable, value in served.env.items():
        monkeypatch.setenv(variable, value)
    app = getattr(importlib.import_module(f"benchmarks.apps.{module}"), name)
    request = row.request

    with TestClient(app) as client:
        headers = {"content-type": "application/json"}
        answer = client.request(request.method, request.path, content=request.body, headers=headers)

    assert (answer.status_code, answer.content) == (200, request.answer)


def test_the_plain_side_does_not_import_ours() -> None:
    script = "import benchmarks.apps.plain, sys; print('ingress' in sys.modules)"
    assert ran_here([sys.executable, "-c", script]).stdout == "False\n"


def test_every_target_of_a_row_over_http_is_measured() -> None:
    measured = {
        (row.name, f"{count} connection{'s' if count > 1 else ''}", row.setup)
        for row in (*ROWS, *PROCESS_ROWS)
        for count in row.connections
    } | {(name, "fresh process", "") for name in STARTS}
    measured |= {(name, f"{slices.CONNECTIONS} connections", "") for name in SLICES}
    names = {row.name for row in (*ROWS, *PROCESS_ROWS)} | set(SLICES) | set(STARTS)
    asked = {
        (target.row, target.load, target.setup)
        for target in targets.TARGETS
        if target.row in names and ("connection" in target.load or target.load == "fresh process")
    }

    assert len(asked) > 10
    assert asked <= measured


def test_a_slice_has_the_watchdog_look_or_not() -> None:
    def is_so(there: bool) -> bool:
        return there is ("ingress-watchdog" in {each.name for each in threading.enumerate()})

    with TestClient(watched.methods) as client, ThreadPoolExecutor() as other:

        def rate(there: bool) -> float:
            slice_ = other.submit(client.get, "/slice", params={"watched": int(there)})
            while not slice_.done():
                assert client.get("/async").json() == "hello"
            return float(slice_.result().json())

        for there in (False, True, False, True):
            wait_until(partial(rate, there))  # a busy machine may begin no request in 50 ms
            wait_until(partial(is_so, there))  # it ends after its last look


# Measuring


def test_fewer_than_five_pairs_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="4 pairs are too few"):
        pairs(ratios=(1.0, 1.0, 1.0, 1.0))
    with pytest.raises(BenchmarkError, match="4 pairs are too few"):
        in_turn(dict, dict, 4)


def test_a_median_is_of_all_runs_and_the_spread_names_the_worst() -> None:
    assert pairs().figures["requests_per_s_ratio"] == Figure(1.0, 0.5, 3.0, 5)
    assert pairs().figures["requests_per_s_added"] == Figure(0.0, -500.0, 2000.0, 5)


def test_the_two_of_a_pair_take_turns_in_being_first() -> None:
    order: list[str] = []

    def run(side: str) -> Callable[[], Sample]:
        def one() -> Sample:
            order.append(side)
            return {"number": len(order)}

        return one

    runs, baseline = in_turn(run("ours"), run("plain"), 5)

    assert order == ["ours", "plain", "plain", "ours"] * 2 + ["ours", "plain"]
    assert [run["number"] for run in runs] == [1, 4, 5, 8, 9]
    assert [run["number"] for run in baseline] == [2, 3, 6, 7, 10]


def test_what_wrk_prints_is_read_with_its_units() -> None:
    assert load.parse(WRK) == {"requests_per_s": 11381.1, "p50_ms": 0.73, "p99_ms": 1200.0}
    with pytest.raises(BenchmarkError, match="something else than expected"):
        load.parse("Requests/sec:  11.00")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["websocket", "leaving"])
@pytest.mark.parametrize("served", [FASTAPI_CLIENTS, ours("clients")], ids=lambda it: it.label)
def test_a_client_of_ours_counts_what_came_back(served: Served, kind: str) -> None:
    with served.server(STAY) as server:
        found = load.client(kind, server, connections=2, seconds=1)

    rate, p50_ms, p99_ms = found.values()
    assert rate > 1
    assert 0 < p50_ms <= p99_ms < 1000


def test_a_client_that_is_not_answered_ends_the_benchmark_with_one_line() -> None:
    with FASTAPI.server(Request("/async", b'"hello"')) as server:
        with pytest.raises(BenchmarkError, match=r"^plain:fastapi_app: .* websocket .*\d{3}") as it:
            load.client("websocket", server, connections=2, seconds=1)

    assert "\n" not in str(it.value)


def test_an_earlier_version_serves_the_app_of_its_own_checkout(tmp_path: Path) -> None:
    apps = tmp_path / "benchmarks" / "apps"
    apps.mkdir(parents=True)
    for package in (apps, apps.parent):
        (package / "__init__.py").touch()
    (apps / "ours.py").write_text(
        "from starlette.responses import PlainTextResponse\n"
        "methods = PlainTextResponse('of the earlier version')\n"
    )
    earlier = Request("/async", b"of the earlier version")
    with replace(ours("methods"), root=tmp_path).server(earlier) as server:
        server.check(earlier)
        assert 0 < server.cpu_s() < 60
    (row, *_) = [each for each in ROWS if each.name == "async"]
    with row.ours.server(row.request) as server:
        server.check(row.request)


def test_another_answer_than_expected_stops_it() -> None:
    with pytest.raises(BenchmarkError, match=r"gave 200 b'\"hello\"', not b'\"bye\"'"):
        with FASTAPI.server(Request("/async", b'"bye"')):
            pass


# Processes left behind


def test_a_server_that_ends_is_told_with_what_it_said() -> None:
    script = "import sys; sys.exit('no such model')"
    server = Server("broken", lambda port: [sys.executable, "-c", script], STAY)

    with pytest.raises(BenchmarkError, match=r"^broken .* ended with 1:\nno such model$"):
        with server:
            pass


def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(BenchmarkError, match=r"^absent did not start: .*no-such-command"):
        with Server("absent", lambda port: ["no-such-command"], STAY):
            pass


class Family(Program):
    """A process with a child that outlives it; `pid` is the child's."""

    SCRIPT = (
        "import signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()"
    )

    def __init__(self) -> None:
        super().__init__("family", [sys.executable, "-c", self.SCRIPT], {}, 10.0, 10.0)

    @property
    def stdout(self) -> int:
        return subprocess.PIPE

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())


def test_what_a_program_started_ends_with_it() -> None:
    with Family() as family:
        assert is_running(family.pid)

    assert family.process.poll() is not None
    wait_until(lambda: not is_running(family.pid))  # it was killed, which takes its moment


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_servers_end_with_the_benchmark_that_is_told_to_end(number: signal.Signals) -> None:
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # may be ignored by a shell
        "from benchmarks import command\n"
        "from tests.project.test_benchmarks import Family\n"
        "def measure():\n"
        "    with Family() as family:\n"
        "        print(family.process.pid, family.pid, flush=True)\n"
        "        signal.pause()\n"
        "        yield\n"
        "raise SystemExit(command.run('none', measure(), 1))\n"
    )
    benchmark = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert benchmark.stdout is not None
    pids = [int(pid) for pid in benchmark.stdout.readline().split()]

    os.kill(benchmark.pid, number)
    _, said = benchmark.communicate(timeout=60)

    assert len(pids) == 2
    assert benchmark.returncode == 128 + number
    assert b"Traceback" not in said
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--pairs", "4"], "argument --pairs: must be at least 5"),
        (["--seconds", "0"], "argument --seconds: must be at least 1"),
        (["--rows", "nothing"], "argument --rows: invalid choice: 'nothing'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line_is_told(arguments: list[str], told: str) -> None:
    ran = ran_here([sys.executable, "-m", "benchmarks", *arguments])

    assert ran.returncode == 2
    assert told in ran.stderr


def test_without_wrk_it_says_so() -> None:
    ran = ran_here(
        [sys.executable, "-m", "benchmarks", "--rows", "async"], env={**os.environ, "PATH": ""}
    )

    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "wrk is missing; get it with `apt-get install wrk`\n"


def test_a_missing_peer_is_left_out_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(installed([Peer("Absent", "no-such-peer", lambda *_: [], STAY)])) == []
    assert capsys.readouterr().out == "Absent is left out: it is not in .venv-peers/no-such-peer\n"


def test_figures_before_an_error_are_printed_only(capsys: pytest.CaptureFixture[str]) -> None:
    def measure() -> command.Results:
        yield pairs()
        raise BenchmarkError("the server hung up")

    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command.run("none", measure(), 1) == 1
    finally:
        signal.signal(signal.SIGTERM, handler)

    out, err = capsys.readouterr()
    assert err == "the server hung up\nnothing is written\n"
    assert "≥ 0.92 x: met" in out
    assert not (FOLDER / "none.json").exists()


# Reports


def test_every_stored_result_that_is_slower_has_its_reason() -> None:
    results = [each for found in document.read().values() for each in found.results]
    slower = [each for each in results if document.loses(each)]

    assert 0 < len(slower) < len(results)
    assert [each.row for each in slower if each.row not in document.WHY] == []


def test_a_target_says_whether_it_is_met() -> None:
    met, missed = pairs(ratios=(1.0,) * 5), pairs(ratios=(0.9,) * 5)
    target, p99 = targets.of(met)

    assert report.verdict(target, met) == "≥ 0.92 x: met"
    assert report.verdict(target, missed) == "≥ 0.92 x: NOT MET, 0.90 x"
    assert report.verdict(target, pairs(ratios=(0.9199,) * 5)) == "≥ 0.92 x: NOT MET, 0.9199"
    assert report.verdict(p99, met) == "p99 ≤ 1.20 x: met"


def test_results_are_the_same_after_they_were_written(tmp_path: Path) -> None:
    written = Report.of([pairs()], seconds_per_run=1)
    written.write(tmp_path / "http.json")

    assert Report.read(tmp_path / "http.json") == written


def test_a_chart_draws_every_bar_from_the_least_to_the_greatest_run() -> None:
    bars = [
        Bar("first & best", Figure(1.0, 0.5, 3.0, 5), required=0.9),
        Bar("second", Figure(2.0, 2.0, 2.0, 5), "baseline"),
    ]
    tree = ElementTree.fromstring(charts.svg(Chart("Title", "axis", bars, "{:.1f}".format)))
    texts = [each.text for each in tree.iter(f"{SVG}text")]
    places = {
        kind: [each for each in tree.iter(f"{SVG}line") if each.get("class") == kind]
        for kind in ("whisker", "required")
    }
    widths = {each.get("class"): float(each.get("width", 0)) for each in tree.iter(f"{SVG}rect")}
    whisker = max(places["whisker"], key=lambda line: float(line.get("x2", 0)))

    assert {"Title", "axis", "first & best", "second", "1.0", "2.0"} <= set(texts)
    assert widths["baseline"] == pytest.approx(2 * widths["ours"], abs=0.2)
    assert float(whisker.get("x2", 0)) == pytest.approx(charts.LEFT + 3 * widths["ours"], abs=0.5)
    assert len(places["required"]) == 2  # on the bar, and in the legend


def test_a_chart_is_made_for_light_and_dark() -> None:
    text = charts.svg(Chart("Title", "axis", [Bar("bar", Figure(1, 1, 1, 1))], str))

    assert "prefers-color-scheme: dark" in text
    assert 'class="ground"' in text


def test_the_pages_are_what_the_results_say() -> None:
    made = document.pages(document.read(), document.README.read_text())

    assert set(document.DOCS.iterdir()) <= set(made)
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name}: make bench-document"


def test_the_readme_has_a_peers_best_mode_with_as_many_processes_over_http_its_default_too() -> (
    None
):
    def rows(load: str, **modes: float) -> list[Result]:
        return [
            Result(
                *("no-op on R", load, setup.replace("_", " "), [{"requests_per_s": 9.0}] * 5),
                *("R", [{"requests_per_s": theirs}] * 5),
            )
            for setup, theirs in [("", 1.0), *modes.items()]
        ]

    http = Report.of([pairs()], 1)
    equal = document.EQUAL.replace(" ", "_")
    for results, shown in (
        (rows("32 connections", slow=2.0, fast=4.0, late=3.0), ["", ", *fast*"]),
        (rows("4 clients", fast=4.0, **{equal: 2.5}), [f", *{document.EQUAL}*"]),
        (rows("4 clients"), [""]),
    ):
        readme = f"{document.BEGIN}{document.END}"
        made = document.pages({"http": http, "peers": Report.of(results, 1)}, readme)
        lines = [each for each in made[document.README].splitlines() if "no-op on R" in each]

        assert [each.split(" | ")[0] for each in lines] == [f"| no-op on R{one}" for one in shown]


def test_beyond_what_was_measured_a_request_costs_its_way_and_its_work() -> None:
    model = Model(one=0.1, workers=0.1, cluster=8.0, proxy=2.0)

    assert model.rates(0.9, cores=8, nodes=1) == pytest.approx((1000, 8000, 500))
    assert model.rates(992.0, cores=8, nodes=4) == pytest.approx((1.008, 8.064, 32.0), rel=1e-3)
    assert Model.of({"1 process": 1e4, "2 workers": 2e4, "local Ray": 250}, 2.0, 2) == model


def test_of_the_readme_only_the_part_between_the_marks_is_made() -> None:
    readme = f"before\n{document.BEGIN}old\n{document.END}after\n"

    made = document.pages({"http": Report.of([pairs()], 1)}, readme)[document.README]

    assert made.startswith(f"before\n{document.BEGIN}")
    assert made.endswith(f"{document.END}after\n")
    assert "plain FastAPI | 1,000/s | 1,000/s | 1.00 x [0.50-3.00]" in made
    assert "old" not in made
