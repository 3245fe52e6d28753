"""Applications of several people on one Ray cluster, each started and ended by its own process.

Skipped without Ray.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from ingress.engines.ray import check_installed
from tests.engines.ray_processes import (
    PATIENCE_S,
    cluster,
    ended,
    environment,
    free_port,
    wait_until,
)
from tests.servers import INGRESS, ServerProcess

pytest.importorskip("ray", exc_type=ImportError)
check_installed()

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

MODULE = """
import ingress as serve

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
def hello():
    return "hello"

@serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 3})
def large():
    return "large"

@serve.deployment(ray_actor_options={"num_gpus": 1, "resources": {"tape": 2}})
def rare():
    return "rare"

hello, large, rare = hello.bind(), large.bind(), rare.bind()
"""


OWNER = """
import ingress as serve, ray, shop
from ingress.api import serving_until_signal

with serving_until_signal():
    serve.start({{"port": {port}}}, engine="ray")
    serve.run(shop.hello, name="owner", route_prefix="/owner")
    print("address", ray.get_runtime_context().gcs_address, flush=True)
"""


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Check nothing: all that these tests start is in other processes."""


class Cluster:
    """A cluster without Serve, and the processes that use it."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.port = free_port()
        self.folder = folder
        self.processes: list[ServerProcess] = []
        (folder / "shop.py").write_text(MODULE)

    def start(self, name: str, app: str = "hello", *more: str) -> ServerProcess:
        """Begin to deploy an application under its name as the prefix."""
        where = ("--engine", "ray", "--address", self.address, "--port", str(self.port))
        how = ("--name", name, "--route-prefix", f"/{name}", *more)
        command = [*INGRESS, "run", f"shop:{app}", *where, *how]
        server = ServerProcess(command, self.folder, environment(self.folder))
        self.processes.append(server)
        return server

    def serve(self, name: str) -> ServerProcess:
        """Deploy an application and wait until it is ready."""
        server = self.start(name)
        expect(server, "Ctrl-C to stop")
        return server

    def end(self, server: ServerProcess) -> None:
        server.signal(signal.SIGINT)
        assert server.wait(PATIENCE_S) == 0, server.output
        assert "retries remaining" not in server.output

    def get(self, name: str) -> int:
        """Return the status of the answer; 0 if no server listens."""
        url = f"http://127.0.0.1:{self.port}/{name}"
        try:
            return httpx.get(url, trust_env=False, timeout=PATIENCE_S).status_code
        except httpx.ConnectError:
            return 0

    def ingress(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return ended([*INGRESS, *arguments, "--address", self.address], self.folder)


def expect(server: ServerProcess, pattern: str) -> str:
    """Wait until the output matches; return the line."""
    wait_until(
        lambda: re.search(pattern, server.output, re.MULTILINE) or server.process.poll() is not None
    )
    found = re.search(f".*(?:{pattern}).*", server.output, re.MULTILINE)
    assert found, server.output
    return found[0]


@contextmanager
def guests(cluster_address: str, folder: Path) -> Iterator[Cluster]:
    it = Cluster(cluster_address, folder)
    try:
        yield it
    finally:
        for server in it.processes:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(cpus=4) as address, guests(address, tmp_path_factory.mktemp("guests")) as it:
        yield it


@pytest.mark.parametrize("first", ["alice", "bob"])
def test_who_ends_first_takes_only_its_own_and_the_last_one_takes_serve(
    it: Cluster, first: str
) -> None:
    servers = {"alice": it.serve("alice"), "bob": it.serve("bob")}  # alice's starts Serve
    last = "bob" if first == "alice" else "alice"
    assert [it.get("alice"), it.get("bob")] == [200, 200]

    it.end(servers[first])
    assert [it.get(first), it.get(last)] == [404, 200]
    again = it.serve(first)
    assert [it.get(first), it.get(last)] == [200, 200]
    it.end(again)
    it.end(servers[last])

    assert it.get(last) == 0


def test_an_application_of_a_process_that_lives_is_not_replaced_and_one_of_a_dead_one_is(
    it: Cluster,
) -> None:
    first = it.serve("shared")

    second = it.start("shared", "hello", "--log-level", "info")
    assert second.wait(PATIENCE_S) == 1
    line = expect(second, "Error: application 'shared' is on this cluster already, deployed by")
    assert "run shop:hello --engine ray" in line
    assert "--name" in line
    assert "ingress delete shared --address" in line
    assert it.get("shared") == 200

    first.process.kill()
    first.process.wait()
    third = it.serve("shared")
    assert "application 'shared' is replaced: it was deployed by process" in third.output
    it.end(third)


def test_status_and_delete_are_for_the_applications_of_everybody(it: Cluster) -> None:
    server = it.serve("listed")

    status = it.ingress("status")
    assert status.returncode == 0, status.stderr
    assert "listed" in status.stdout
    assert "RUNNING" in status.stdout
    assert "deployed by process" in status.stdout
    answer = json.loads(it.ingress("status", "--json").stdout)
    listed = answer["applications"]["listed"]
    assert answer["is_healthy"]
    assert listed["status"] == "RUNNING"
    assert listed["deployments"]["hello"]["replica_states"] == {"RUNNING": 1}

    missing = it.ingress("delete", "absent")
    assert missing.returncode == 1
    assert "no application 'absent' is on this cluster; there: ['listed']" in missing.stderr
    assert it.ingress("delete", "listed").returncode == 0
    wait_until(lambda: it.get("listed") == 404)
    it.end(server)  # without harm, although its application is gone


@pytest.mark.parametrize(
    ("app", "line"),
    [
        ("large", "'waits': 1 replica waits for 3 CPU; the cluster has 1 of 4 CPU free"),
        ("rare", "'rare' of application 'waits': 1 replica waits for"),
    ],
)
def test_replicas_that_the_cluster_has_no_room_for_are_named_within_five_seconds(
    it: Cluster, app: str, line: str
) -> None:
    server = it.start("waits", app)
    expect(server, "Deploying new version of Deployment")
    begin = time.monotonic()
    told = expect(server, line)
    took = time.monotonic() - begin

    assert took < 5 + 5, took  # five of patience for a busy machine
    if app == "rare":
        for text in ("1 GPU", "2 tape", "0 of 0 GPU", "0 of 0 tape", "ray_actor_options"):
            assert text in told
    server.signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 130
    status = it.ingress("status")
    assert "waits" not in status.stdout
    assert status.returncode == (0 if "RUNNING" in status.stdout else 1)


def test_a_cluster_of_its_own_that_is_too_small_is_refused_before_serve_starts(
    tmp_path: Path,
) -> None:
    cpus = os.cpu_count() or 1
    (tmp_path / "huge.py").write_text(
        "import ingress as serve\n"
        f"@serve.deployment(ray_actor_options={{'num_cpus': {cpus + 1.5}}})\n"
        "def huge(): return 1\n"
        "app = huge.bind()\n"
    )
    command = [*INGRESS, "run", "huge:app", "--engine", "ray", "--port", str(free_port())]
    ran = ended(command, tmp_path)

    assert ran.returncode == 1
    asks = f"deployment 'huge' asks for 1 x {cpus + 1.5:g} CPU, and the cluster that this process"
    assert asks in ran.stderr
    assert f"has {cpus} CPU" in ran.stderr
    assert "Started Serve" not in ran.stderr + ran.stdout


def test_a_cluster_that_another_person_uses_ends_when_that_person_leaves(tmp_path: Path) -> None:
    with guests("", tmp_path) as it:
        (tmp_path / "owner.py").write_text(OWNER.format(port=it.port))
        command = [sys.executable, "owner.py"]
        owner = ServerProcess(command, tmp_path, environment(tmp_path, RAY_ADDRESS="local"))
        it.processes.append(owner)
        it.address = expect(owner, "address [0-9]").split()[1]
        guest = it.serve("guest")

        owner.signal(signal.SIGINT)
        expect(owner, "waits for its other users: application 'guest'; process")
        wait_until(lambda: it.get("owner") == 404)
        assert it.get("guest") == 200
        it.end(guest)

        assert owner.wait(PATIENCE_S) == 0


SCRIPT = """
import ingress as serve

@serve.deployment
class Hello:
    async def __call__(self):
        return "hello"

serve.start({{"port": {port}}}, engine="ray")
print(serve.run(Hello.bind(), route_prefix=None).remote().result())
serve.shutdown()
print("over")
"""


def test_a_script_that_shuts_down_prints_nothing_of_tasks_to_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(port=free_port()))
    ran = ended([sys.executable, "script.py"], tmp_path, RAY_ADDRESS="local")

    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    assert {"hello", "over"} <= {*ran.stdout.splitlines()}
    assert "retries remaining" not in output
    assert "LongPollHost errored" not in output
