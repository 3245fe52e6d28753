"""The admin listener: where it listens, who may use it, and the snapshot that it serves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from ingress.observe.admin import listener as admin
from ingress.observe.admin.listener import AdminListener
from ingress.serving.http.admin_address import AdminOptions
from ingress.state.server import Snapshot
from tests.programs import free_port
from tests.servers import (
    UVICORN,
    ServerProcess,
    bind,
    environment,
    get,
    ingress_run,
    is_ready,
    process,
    run_ingress,
    served,
    wait_until,
    write_module,
)

TOKEN = "0123456789abcdef"
APP = """
import asyncio, os
from fastapi import APIRouter, FastAPI
import ingress as serve

app, sub, inner = FastAPI(), FastAPI(), APIRouter()

@inner.get("/{number}")
async def one(number: int):
    return number

app.include_router(inner, prefix="/a")
app.include_router(inner, prefix="/b")
sub.include_router(inner, prefix="/deep")
app.mount("/sub", sub)

class Api:
    @app.get("/items/{number}")
    async def item(self, number: int):
        if number == 0:
            raise ValueError("zero")
        return os.getpid()

    @app.get("/hold")
    async def hold(self):
        print("holds", flush=True)
        await asyncio.sleep(3600)

hello = serve.deployment(num_replicas=2)(serve.ingress(app)(Api)).bind()
far = serve.deployment(isolation="process")(serve.ingress(app)(Api)).bind()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    return tmp_path


@contextmanager
def serving(folder: Path, *options: str, app: str = "hello") -> Iterator[ServerProcess]:
    with ingress_run(folder, f"app:{app}", *options) as server:
        server.wait_for("is ready at")
        yield server


def admin_port(server: ServerProcess) -> int:
    return int(server.wait_for(r"Metrics at http://127\.0\.0\.1:(\d+)/metrics")[1])


def snapshot(port: int, headers: str = "") -> Any:
    answer = get(port, "/api/snapshot", headers)
    assert answer.status == 200, answer.raw
    return json.loads(answer.body)


def counted(port: int) -> dict[tuple[str, str, int], int]:
    """Return the numbers of HTTP requests, by route, method and status."""
    applications = snapshot(port)["applications"].values()
    return {
        (each["route"], each["method"], each["status"]): sum(each["latency"]["buckets"])
        for application in applications
        for deployment in application["deployments"].values()
        for each in deployment["http"]
    }


def make() -> Snapshot:
    return Snapshot(made_at_s=1.0, pid=os.getpid())


@contextmanager
def listening(
    options: AdminOptions, make: Callable[[], Snapshot] = make
) -> Iterator[AdminListener]:
    listener = AdminListener(make, options)
    try:
        yield listener
    finally:
        listener.stop()


def port_of(listener: AdminListener) -> int:
    return int(listener.url.rpartition(":")[2])


ANY_PORT = AdminOptions("127.0.0.1:0")


def test_one_process_counts_requests_by_route_template_method_and_status(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0") as server:
        for path in ("/items/1", "/items/2", "/items/0", "/items/x", "/nowhere"):
            get(server.port, path)
        port = admin_port(server)

        assert counted(port) == {
            ("/items/{number}", "GET", 200): 2,
            ("/items/{number}", "GET", 500): 1,
            ("/items/{number}", "GET", 422): 1,
            ("/", "GET", 404): 1,
        }
        [deployment] = snapshot(port)["applications"]["default"]["deployments"].values()
        replicas = [each["counts"] for each in deployment["replicas"]]
        routes = [route for each in replicas for route in each["routes"].values()]
        assert sum(sum(route["buckets"]) for route in routes) == deployment["requests"] == 5
        assert [each["errors"] for each in replicas if each["errors"]] == [
            {"/items/{number}": {"ValueError": 1}}
        ]


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux")
def test_workers_are_summed_and_the_counts_of_a_killed_one_stay(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0", "--workers", "2") as server:
        port, key = admin_port(server), ("/items/{number}", "GET", 200)
        pids = {int(get(server.port, "/items/1").body) for _ in range(40)}
        # On a busy machine a worker may take longer to answer than the listener waits.
        wait_until(lambda: counted(port) == {key: 40} and not snapshot(port)["silent"])
        before = snapshot(port)
        assert pids <= {*before["workers"]}

        victim = before["workers"][0]
        names = {each["name"]: each["pid"] for each in before["processes"]}
        assert {*names} == {"supervisor", "worker-1", "worker-2"}
        os.kill(victim, signal.SIGKILL)
        server.wait_for(rf"worker {victim} ended \(SIGKILL\)")
        server.wait_for(r"worker \d+ is ready")
        for _ in range(10):
            get(server.port, "/items/2")

        wait_until(lambda: counted(port) == {key: 50} and len(snapshot(port)["workers"]) == 2)
        after = snapshot(port)
        [deployment] = after["applications"]["default"]["deployments"].values()
        assert deployment["requests"] == 50
        assert victim not in after["workers"]


def test_a_replica_in_a_process_counts_its_requests_across_its_end(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0", app="far") as server:
        port, key = admin_port(server), ("/items/{number}", "GET", 200)
        pid = int(get(server.port, "/items/1").body)
        [deployment] = snapshot(port)["applications"]["default"]["deployments"].values()
        assert [each["pid"] for each in deployment["replicas"]] == [pid]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: get(server.port, "/items/1").body not in (b"", str(pid).encode()))

        wait_until(lambda: counted(port)[key] >= 2)
        [deployment] = snapshot(port)["applications"]["default"]["deployments"].values()
        assert deployment["losses"] == 1
        assert list(deployment["ended"]) == ["0"]


def test_the_default_port_is_replaced_by_the_next_free_one_if_it_is_busy(folder: Path) -> None:
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            busy.bind(("127.0.0.1", 8265))
            busy.listen()
        except OSError:
            pass  # another program listens there, which is as good
        with listening(AdminOptions()) as first, listening(AdminOptions()) as second:
            ports = port_of(first), port_of(second)
            assert 8265 not in ports
            assert ports[0] != ports[1]
            assert snapshot(ports[1])["pid"] == os.getpid()


def test_a_busy_port_that_was_asked_for_is_refused_before_anything_is_served(folder: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        with ingress_run(folder, "app:hello", "--admin", address) as server:
            assert server.wait() == 1
            output = " ".join(server.output.split())
            assert f"--admin: Failed to bind to address '{address}'" in output


@pytest.mark.reliability("S16")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--admin", "0.0.0.0:8265"], "give a token"),
        (["--admin", "0.0.0.0:8265", "--admin-token", "123456789012345"], "at least 16"),
        pytest.param(["--admin", "8265"], "admin must be HOST:PORT", marks=pytest.mark.thorough),
        (["--admin", "127.0.0.1:99999"], "admin must be HOST:PORT"),
    ],
)
def test_a_wrong_address_is_refused(folder: Path, options: list[str], problem: str) -> None:
    result = run_ingress(folder, "run", "app:hello", "--port", "0", *options)
    assert result.returncode == 1
    assert problem in " ".join(result.stderr.split())


def test_off_means_that_there_is_none(folder: Path) -> None:
    with serving(folder, "--admin", "off") as server:
        assert get(server.port, "/items/1").status == 200
        assert "Metrics at" not in server.output


@pytest.mark.reliability("S16")
def test_a_unix_socket_is_its_users_own(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with listening(AdminOptions(str(path))) as listener:
        assert listener.url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /api/snapshot HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n")
            with client.makefile("rb") as file:
                assert file.readline() == b"HTTP/1.1 200 OK\r\n"
    assert not path.exists()


@pytest.mark.reliability("S16")
def test_a_page_of_another_site_gets_nothing() -> None:
    with listening(ANY_PORT) as listener:
        port = port_of(listener)
        for origin in ("http://evil.example", f"http://127.0.0.1:{port + 1}", "http://[", ""):
            assert get(port, "/api/snapshot", f"Origin: {origin}\r\n").status == 403
        raw = f"GET /api/snapshot HTTP/1.1\r\nHost: evil:{port}\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(raw.encode())
            with client.makefile("rb") as file:
                assert b" 403 " in file.readline()
        answer = get(port, "/api/snapshot")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
        assert get(port, "/nowhere").headers["x-content-type-options"] == "nosniff"


@pytest.mark.reliability("S16")
def test_a_token_is_asked_for_before_anything_else() -> None:
    with listening(AdminOptions("0.0.0.0:0", TOKEN)) as listener:
        port = port_of(listener)
        for headers in ("", "Authorization: Bearer wrong\r\n", f"Authorization: Basic {TOKEN}\r\n"):
            answer = get(port, "/api/snapshot", headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert get(port, "/nowhere").status == 401
        assert snapshot(port, f"Authorization: Bearer {TOKEN}\r\n")["pid"] == os.getpid()


@pytest.mark.reliability("S16")
def test_after_wrong_tokens_an_address_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    right = f"Authorization: Bearer {TOKEN}\r\n"
    with listening(AdminOptions("0.0.0.0:0", TOKEN)) as listener:
        port = port_of(listener)

        def statuses(*headers: str) -> list[int]:
            return [get(port, "/api/snapshot", each).status for each in headers]

        assert statuses(*[""] * 20, right) == [401] * 20 + [200]  # none is no wrong one
        wrong = [f"Authorization: Bearer {number:016}\r\n" for number in range(admin.MOST_WRONG)]
        assert statuses(*wrong, wrong[0], right) == [401] * admin.MOST_WRONG + [429, 429]
        assert 0 < int(get(port, "/metrics", right).headers["retry-after"]) <= admin.PERIOD_S
        assert statuses("") == [401]
        with socket.socket() as other:  # of another address, which need not wait
            other.bind(("127.0.0.2", 0))
            other.connect(("127.0.0.1", port))
            other.sendall(f"GET /metrics HTTP/1.1\r\nHost: a\r\n{right}\r\n".encode())
            assert other.recv(100).startswith(b"HTTP/1.1 200 ")

    monkeypatch.setattr(admin, "PERIOD_S", 0.0)  # it is over at once
    with listening(AdminOptions("0.0.0.0:0", TOKEN)) as listener:
        port = port_of(listener)
        assert statuses(*wrong, *wrong, right) == [401] * 2 * admin.MOST_WRONG + [200]


@pytest.mark.reliability("S12")
def test_viewers_at_once_share_one_snapshot() -> None:
    made: list[Snapshot] = []

    def count() -> Snapshot:
        made.append(make())
        return made[-1]

    with listening(ANY_PORT, count) as listener:
        address = ("127.0.0.1", port_of(listener))
        clients = [socket.create_connection(address) for _ in range(200)]
        for client in clients:
            client.sendall(b"GET /api/snapshot HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        heads = []
        for client in clients:  # none has read before all have asked
            with client, client.makefile("rb") as file:
                heads.append(file.readline())

    assert heads == [b"HTTP/1.1 200 OK\r\n"] * 200
    assert len(made) < 100


@pytest.mark.reliability("S12")
def test_two_hundred_viewers_that_do_not_read_leave_the_server_alone(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0") as server:
        port = admin_port(server)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        try:
            for client in clients:
                client.sendall(b"GET /api/snapshot HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20)
            for number in range(1, 20):
                assert get(server.port, f"/items/{number}").status == 200
            assert counted(port)["/items/{number}", "GET", 200] == 19
        finally:
            for client in clients:
                client.close()


def test_it_answers_while_the_server_drains(folder: Path) -> None:
    options = ("--admin", "127.0.0.1:0", "--timeout-graceful-shutdown", "30")
    with serving(folder, *options) as server:
        port = admin_port(server)
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /hold HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            server.wait_for("holds")
            server.signal()
            server.wait_for("stopping: waiting for running requests")
            [deployment] = snapshot(port)["applications"]["default"]["deployments"].values()
            assert sum(each["ongoing"] for each in deployment["replicas"]) == 1
        assert server.wait() == 0


def test_uvicorn_has_one_if_the_environment_says_so(folder: Path) -> None:
    environ = {**environment(folder), "INGRESS_ADMIN": "127.0.0.1:0"}
    with process([*UVICORN, "app:hello"], folder, environ) as server:
        at = int(server.wait_for(r"Uvicorn running on http://127\.0\.0\.1:(\d+)")[1])
        wait_until(lambda: is_ready(at))
        assert get(at, "/items/1").status == 200
        port = int(server.wait_for(r"admin listener at http://127\.0\.0\.1:(\d+)")[1])
        assert counted(port) == {("/items/{number}", "GET", 200): 1}
        server.wait_for('"GET /items/1 HTTP/1.1" 200')  # uvicorn's access log is still on
        assert "/api/snapshot" not in server.output


def test_uvicorn_has_none_by_default(folder: Path) -> None:
    with process([*UVICORN, "app:hello"], folder, environment(folder)) as server:
        wait_until(lambda: is_ready(server.port))
        assert get(server.port, "/items/1").status == 200
        assert "admin listener" not in server.output


def test_serve_start_gives_the_address(caplog: pytest.LogCaptureFixture) -> None:
    @serve.deployment
    class Model:
        async def __call__(self, request: Any) -> str:
            return "answer"

    with caplog.at_level("INFO", "ingress"):
        serve.start({"port": 0}, admin="127.0.0.1:0")
    port = int(re.findall(r"admin listener at http://127.0.0.1:(\d+)", caplog.text)[0])
    assert get(served(bind(Model), "mine", "/mine"), "/mine").status == 200
    assert counted(port) == {("/mine", "GET", 200): 1}
    serve.shutdown()
    with pytest.raises(OSError, match="refused"):
        get(port, "/api/snapshot")


def test_the_address_of_the_code_is_taken_before_that_of_the_environment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = free_port()
    monkeypatch.setenv("INGRESS_ADMIN", f"127.0.0.1:{others}")
    with caplog.at_level("INFO", "ingress"):
        serve.start({"port": 0}, admin="127.0.0.1:0")
    serve.shutdown()

    ports = re.findall(r"admin listener at http://127.0.0.1:(\d+)", caplog.text)
    assert len(ports) == 1
    assert ports != [str(others)]


def test_routes_of_included_routers_and_mounts_have_their_whole_template(folder: Path) -> None:
    with serving(folder, "--admin", "127.0.0.1:0", "--route-prefix", "/v1") as server:
        for path in ("/v1/a/1", "/v1/b/2", "/v1/b/3", "/v1/sub/deep/4", "/v1/other", "/else"):
            get(server.port, path)
        assert counted(admin_port(server)) == {
            ("/v1/a/{number}", "GET", 200): 1,
            ("/v1/b/{number}", "GET", 200): 2,
            ("/v1/sub/deep/{number}", "GET", 200): 1,
            ("/v1", "GET", 404): 1,
        }
        [refused] = snapshot(admin_port(server))["unrouted"]
        assert (refused["route"], refused["status"]) == ("", 404)
