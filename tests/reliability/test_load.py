"""Goodput under overload, with clients that retry, read slowly, or do not read.

Handlers sleep, so that slots and not the machine limit the capacity.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.open_loop import Load, Stream, closed_loop, load
from tests.programs import INGRESS, UVICORN, ServerProcess, environment, process, write_module
from tests.reliability.figures import Figures
from tests.reliability.load_app import CAPACITY, SERVICE_S
from tests.servers import get, is_ready, wait_until

pytestmark = pytest.mark.slow

LASTS_S = 30.0
PLAIN_LASTS_S = 8.0
IN_TIME_S = 1.0
"""Bound on the latency of goodput, in seconds: answers with 200 within this time."""

HEALTH = Stream("/-/healthz", rate=20, seconds=LASTS_S)
DEADLINE = "x-request-timeout-seconds: 1\r\n"
ALONE = {"separate1": "1", "separate0": "0"}


@contextmanager
def serving(
    folder: Path, application: str = "app", *, separate: str = "1", workers: int = 1, **load: int
) -> Iterator[ServerProcess]:
    """Serve `load_app` with these of its settings."""
    target = f"tests.reliability.load_app:{application}"
    command = [*UVICORN, target, "--no-access-log"]
    if application == "app":
        command = [*INGRESS, "run", target, "--port", "0"]
        command += ["--workers", str(workers)] if workers > 1 else []
    environ = environment(folder, separate=separate)
    environ |= {f"LOAD_{name.upper()}": str(value) for name, value in load.items()}
    with process(command, folder, environ) as server:
        wait_until(lambda: is_ready(server.port))
        yield server


def seen(server: ServerProcess) -> Any:
    return json.loads(get(server.port, "/seen").body)


def plain_goodput(folder: Path, stream: Stream) -> float:
    """Return the goodput of plain FastAPI under the same load, run for a shorter time."""
    with serving(folder, "plain") as server:
        (found,) = load(server.port, stream)
        return found.rate(within_s=IN_TIME_S)


def shorter(stream: Stream) -> Stream:
    """Return the load, shortened, for plain FastAPI, whose queue is unbounded."""
    return replace(stream, seconds=PLAIN_LASTS_S, patience_s=2)


def nothing_is_lost(figures: Figures, found: Load) -> None:
    figures.note("requests", len(found.sent))
    figures.at_most("lost", found.lost, 0)
    other = sum(count for status, count in found.statuses.items() if status not in (200, 408, 503))
    figures.at_most("answered with anything but 200, 408 and 503", other - found.lost, 0)


def nothing_is_held(figures: Figures, server: ServerProcess) -> None:
    time.sleep(1)
    figures.at_most("ongoing and queued a second after", seen(server)["held"], 0)


def health_is_told(figures: Figures, health: Load, beside: str, bound_ms: float) -> None:
    """Note the health checks beside a load; its ids contain A17."""
    figures.at_most(f"p99 of /-/healthz beside {beside}, ms", health.p99_ms(), bound_ms, row="A17")
    figures.at_most("refused health checks", len(health.sent) - health.statuses[200], 0, row="A17")


def most_are_served(figures: Figures, found: Load, plain: float, row: str, *, least: float) -> None:
    """Note what was served of five times the capacity, and how soon it was answered."""
    nothing_is_lost(figures, found)
    goodput = found.rate(within_s=IN_TIME_S) / CAPACITY
    figures.at_least("goodput, of capacity", goodput, least, plain=plain, row=row)
    worst = found.worst_second(within_s=IN_TIME_S) / CAPACITY
    figures.at_least("worst second, of capacity", worst, 0.8, row=row)
    figures.at_most("p99 of 200, ms", found.p99_ms(200), 225, row=row)
    figures.at_most("p99 of 503, ms", found.p99_ms(503), 100, row=row)


@pytest.mark.reliability("A01", "A17", "F08")
@pytest.mark.parametrize("separate", ALONE.values(), ids=ALONE)
def test_five_times_what_async_def_can_serve(
    figures: Figures, tmp_path: Path, separate: str
) -> None:
    stream = Stream("/async", rate=5 * CAPACITY, seconds=LASTS_S)
    with serving(tmp_path, separate=separate) as server:
        found, health = load(server.port, stream, HEALTH)
        nothing_is_held(figures, server)
    plain = plain_goodput(tmp_path, shorter(stream)) / CAPACITY

    most_are_served(figures, found, plain, "A01", least=0.9)
    health_is_told(figures, health, "async def", 100)


@pytest.mark.reliability("A02", "A17")
def test_five_times_what_def_can_serve(figures: Figures, tmp_path: Path) -> None:
    stream = Stream("/def", rate=5 * CAPACITY, seconds=LASTS_S)
    with serving(tmp_path) as server:
        before = seen(server)["threads"]
        found, health = load(server.port, stream, HEALTH)
        figures.at_most("more threads", seen(server)["threads"] - before, 2 * 13, row="A02")
        nothing_is_held(figures, server)
    plain = plain_goodput(tmp_path, shorter(stream)) / CAPACITY

    most_are_served(figures, found, plain, "A02", least=0.85)
    health_is_told(figures, health, "def", 200)


@pytest.mark.reliability("A03", "A17")
@pytest.mark.parametrize("slots", [8, 32])
def test_five_times_what_computing_def_can_serve(
    figures: Figures, tmp_path: Path, slots: int
) -> None:
    with serving(tmp_path, replicas=1, slots=slots) as server:
        capacity = closed_loop(server.port, "/cpu", slots, 5).rate()
        stream = Stream("/cpu", rate=5 * capacity, seconds=15)
        found, health = load(server.port, stream, Stream("/-/healthz", 20, 15))
    with serving(tmp_path, "plain", replicas=1, slots=slots) as server:
        plain_capacity = closed_loop(server.port, "/cpu", slots, 5).rate()
        theirs, their_health = load(
            server.port,
            Stream("/cpu", 5 * plain_capacity, PLAIN_LASTS_S, patience_s=2),
            Stream("/-/healthz", 20, PLAIN_LASTS_S, patience_s=10),
        )

    nothing_is_lost(figures, found)
    goodput = found.rate(within_s=IN_TIME_S) / capacity
    plain = theirs.rate(within_s=IN_TIME_S) / plain_capacity
    figures.at_least(f"goodput, {slots} slots, of capacity", goodput, 0.7, plain=plain, row="A03")
    figures.at_most(f"p99 of 503, {slots} slots, ms", found.p99_ms(503), 250, row="A03")
    figures.at_most(
        f"p99 of /-/healthz beside {slots} computing def, ms",
        health.p99_ms(),
        250,
        plain=their_health.p99_ms(),
        row="A17",
    )
    figures.at_most("refused health checks", len(health.sent) - health.statuses[200], 0, row="A17")


@pytest.mark.reliability("A06")
def test_it_recovers_from_clients_that_retry(figures: Figures, tmp_path: Path) -> None:
    capacity = 2 / SERVICE_S  # small: each request of the storm is sent four times
    storm = Stream("/async", rate=10 * capacity, seconds=10, retries=3)
    calm = Stream("/async", rate=0.5 * capacity, seconds=15, begin_s=10)
    with serving(tmp_path, replicas=1, slots=2, queued=20) as server:
        (baseline,) = load(server.port, Stream("/async", rate=0.5 * capacity, seconds=5))
        stormy, calmer = load(server.port, storm, calm)
        nothing_is_held(figures, server)

    nothing_is_lost(figures, stormy)
    after = [each for each in calmer.sent if each.due_s >= 15]
    figures.at_least(
        "answered 5 s after the storm", sum(e.status == 200 for e in after) / len(after), 0.99
    )
    figures.at_most(
        "p99 5 s after the storm, of what it was before",
        calmer.p99_ms(since_s=15) / baseline.p99_ms(),
        2,
    )


@pytest.mark.reliability("A10")
@pytest.mark.parametrize("times", [2, 5])
def test_what_is_answered_under_overload_is_answered_in_time(
    figures: Figures, tmp_path: Path, times: int
) -> None:
    stream = Stream("/async", times * CAPACITY, LASTS_S, headers=DEADLINE, connections=2_000)
    with serving(tmp_path, queued=500) as server:
        (found,) = load(server.port, stream)
        started = sum(seen(server)["started"])
    plain = plain_goodput(tmp_path, shorter(stream)) / CAPACITY

    nothing_is_lost(figures, found)
    goodput = found.rate(within_s=IN_TIME_S) / CAPACITY
    worst = found.worst_second(within_s=IN_TIME_S) / CAPACITY
    figures.at_least(f"goodput at {times}x, of capacity", goodput, 0.85, plain=plain)
    figures.at_least(f"worst second at {times}x, of capacity", worst, 0.6)
    wasted = (started - found.statuses[200]) / started
    figures.at_most(f"begun in vain at {times}x", wasted, 0.02)


@pytest.mark.reliability("A13")
def test_idle_connections_cost_nothing(figures: Figures, tmp_path: Path) -> None:
    idle: list[socket.socket] = []
    stream = Stream("/async", rate=0.8 * CAPACITY, seconds=8)
    try:
        with serving(tmp_path) as server:
            (control,) = load(server.port, stream)
            before = rss_kb(server)
            ends = time.monotonic() + 40
            for _ in range(2_000):
                one = socket.create_connection(("127.0.0.1", server.port))
                idle.append(one)
                one.sendall(b"GET /-/healthz HTTP/1.1\r\nhost: a\r\n\r\n")
                assert one.recv(4096)
            assert time.monotonic() < ends
            grown = (rss_kb(server) - before) / len(idle)
            (found,) = load(server.port, stream)
    finally:
        for one in idle:
            one.close()

    nothing_is_lost(figures, found)
    figures.at_most("refused", found.statuses[503], 0)
    figures.at_most("p99, of what it is without", found.p99_ms() / control.p99_ms(), 1.5)
    figures.at_most("memory of an idle connection, KiB", grown, 64)


def rss_kb(server: ServerProcess) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return float(status.partition("VmRSS:")[2].split()[0])


BARE = """
async def refuse(scope, receive, send):
    if scope["type"] != "http":
        return
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})
"""


@pytest.mark.reliability("A18")
def test_a_refusal_is_cheap(figures: Figures, tmp_path: Path) -> None:
    write_module(tmp_path, "bare", BARE)

    def refusals(server: ServerProcess) -> tuple[float, float]:
        before = server.cpu_s
        found = closed_loop(server.port, "/async", 32, 6)
        assert set(found.statuses) <= {200, 503}
        return found.statuses[503] / 6, (server.cpu_s - before) / found.statuses[503]

    with process([*UVICORN, "bare:refuse"], tmp_path, environment(tmp_path)) as server:
        wait_until(lambda: get(server.port, "/").status == 503)
        bare, bare_cpu_s = refusals(server)
    with serving(tmp_path, replicas=1, slots=1, queued=1) as server:
        ours, ours_cpu_s = refusals(server)

    figures.at_least("503 a second, of a bare ASGI app's", ours / bare, 0.5)
    figures.at_most("processor time of a 503, of a bare ASGI app's", ours_cpu_s / bare_cpu_s, 2)


@pytest.mark.reliability("A16")
def test_equal_replicas_get_equal_shares(figures: Figures, tmp_path: Path) -> None:
    with serving(tmp_path, replicas=4) as server:
        (found,) = load(server.port, Stream("/async", 0.7 * 20 / SERVICE_S, seconds=36))
        ran = seen(server)

    nothing_is_lost(figures, found)
    assert sum(ran["started"]) == len(found.sent)
    figures.at_most("greatest share of the least", max(ran["started"]) / min(ran["started"]), 1.25)
    figures.at_most("most at once on one of 5 slots", ran["most"], 5)


BULKHEAD = """
import asyncio, threading
import ingress as serve
from tests.reliability.load_app import burn

@serve.deployment(max_ongoing_requests=5, max_queued_requests=20)
class Overloaded:
    async def __call__(self, request):
        await asyncio.sleep(0.05)
        return "slept"

@serve.deployment(max_ongoing_requests=5, max_queued_requests=20)
class Computing:
    def __call__(self, request):
        burn(5)
        return "computed"

@serve.deployment(max_ongoing_requests=5, max_queued_requests=20)
class Wedged:
    async def __call__(self, request):
        threading.Event().wait()

@serve.deployment(max_ongoing_requests=10)
class Other:
    async def __call__(self, request):
        await asyncio.sleep(0.05)
        return "slept"

serve.start({"port": 0})
for each in (Overloaded, Computing, Wedged):
    serve.run(each.bind(), name=each.name, route_prefix=f"/{each.name}")
print("serving on", *serve.status().proxies, flush=True)
serve.run(Other.bind(), name="Other", route_prefix="/Other", blocking=True)
"""


@pytest.mark.reliability("A14")
@pytest.mark.parametrize(
    ("victim", "rate", "bound"),
    [("Overloaded", 500.0, 1.5), ("Wedged", 50.0, 1.5), ("Computing", 500.0, 3.0)],
    ids=["overloaded", "wedged", "computing"],
)
def test_one_deployment_does_not_take_the_others_with_it(
    figures: Figures, tmp_path: Path, victim: str, rate: float, bound: float
) -> None:
    write_module(tmp_path, "bulkhead", BULKHEAD)
    other = Stream("/Other", rate=100, seconds=8)
    environ = environment(tmp_path, sync="1")
    with process([sys.executable, "bulkhead.py"], tmp_path, environ) as server:
        wait_until(lambda: get(server.port, "/Other").status == 200)
        (control,) = load(server.port, other)
        _, found = load(server.port, Stream(f"/{victim}", rate, seconds=8, patience_s=1), other)

    name = victim.lower()
    figures.at_most(f"errors beside one that is {name}", len(found.sent) - found.statuses[200], 0)
    ratio = found.p99_ms() / control.p99_ms()
    figures.at_most(f"p99 beside one that is {name}, of what it is alone", ratio, bound)


@pytest.mark.reliability("A22", "F08")
def test_two_worker_processes_compute_almost_twice_as_much(
    figures: Figures, tmp_path: Path
) -> None:
    rates = []
    for workers in (1, 2):
        with serving(tmp_path, replicas=1, slots=8, queued=100, workers=workers) as server:
            time.sleep(2)  # until the second worker listens too
            found = closed_loop(server.port, "/cpu", 16, 8)
            rates.append(found.rate())
            nothing_is_lost(figures, found)

    figures.at_least("requests a second, of one process's", rates[1] / rates[0], 1.7)


STREAMS = """
import asyncio
from starlette.responses import StreamingResponse
import ingress as serve

CHUNK = b"x" * 65536
made = 0

@serve.deployment(max_ongoing_requests=300)
class Streams:
    async def __call__(self, request):
        global made
        if request.url.path == "/made":
            return made
        if request.url.path == "/quick":
            await asyncio.sleep(0.05)
            return "quick"
        chunks = self.chunks() if request.url.path == "/async" else self.sync_chunks()
        return StreamingResponse(chunks)

    async def chunks(self):
        global made
        for _ in range(800):
            made += 1
            yield CHUNK

    def sync_chunks(self):
        global made
        for _ in range(800):
            made += 1
            yield CHUNK

app = Streams.bind()
"""


@pytest.mark.reliability("A11")
@pytest.mark.parametrize("kind", ["async", "def"])
def test_slow_readers_suspend_only_their_own_streams(
    figures: Figures, tmp_path: Path, kind: str
) -> None:
    write_module(tmp_path, "streams", STREAMS)
    readers: list[socket.socket] = []
    quick = Stream("/quick", rate=50, seconds=10)
    command = [*INGRESS, "run", "streams:app", "--port", "0"]
    try:
        with process(command, tmp_path, environment(tmp_path)) as server:
            wait_until(lambda: is_ready(server.port))
            (control,) = load(server.port, quick)
            before = rss_kb(server)
            for _ in range(100):
                one = socket.socket()
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect(("127.0.0.1", server.port))
                one.sendall(f"GET /{kind} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                readers.append(one)
            ends = time.monotonic() + 10
            beside: list[Load] = []
            asking = threading.Thread(target=lambda: beside.extend(load(server.port, quick)))
            asking.start()
            while time.monotonic() < ends:
                for one in readers:
                    one.recv(1024)
                time.sleep(1)
            asking.join()
            grown_mb = (rss_kb(server) - before) / 1024
            made = int(get(server.port, "/made").body)
    finally:
        for one in readers:
            one.close()

    figures.at_most("memory of 100 slow readers, MiB", grown_mb, 100 * 0.25 + 20)
    figures.at_most("chunks of 64 KiB made for each, of 800", made / 100, 100)
    (found,) = beside
    figures.at_most("lost", found.lost, 0)
    figures.at_most("p99 beside them, of what it is without", found.p99_ms() / control.p99_ms(), 2)
