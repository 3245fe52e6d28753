"""The ways to start replicas in processes: `INGRESS_START_METHOD`.

No application runs when a test begins.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.engines import local_engine
from tests.process_app import Model, pids
from tests.programs import environment, process, write_module
from tests.servers import PATIENCE_S, forking, wait_until
from tests.serving.processes.test_process_ends import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux")


@pytest.fixture(autouse=True)
def _forked() -> Iterator[None]:
    with forking():
        yield


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def sockets(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    return {name for each in folder.iterdir() if (name := os.readlink(each)).startswith("socket:")}


def model(**actor: Any) -> Any:
    return Model.options(num_replicas=2, ray_actor_options=actor).bind(3)


def test_children_are_forked_from_one_process_also_the_replacement_of_a_killed_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    handle = serve.run(model(num_gpus=1, num_cpus=3), route_prefix=None)
    before = set(pids("Model"))
    parents = {parent(each) for each in before}

    assert len(before) == 2
    assert len(parents) == 1
    assert os.getpid() not in parents
    assert not sockets(*parents) & {found for each in before for found in sockets(each)}
    assert handle.remote(14).result() == 42
    assert handle.variable.remote("CUDA_VISIBLE_DEVICES").result() in ("4", "7")
    assert handle.variable.remote("OMP_NUM_THREADS").result() == "3"
    for each in before:
        os.kill(each, signal.SIGSEGV)
    wait_until(lambda: len(pids("Model")) == 2 and not before & set(pids("Model")))
    assert handle.remote(14).result() == 42
    assert {parent(each) for each in pids("Model")} == parents
    assert caplog.text.count("was killed by SIGSEGV") == 2


@pytest.mark.reliability("P01")
def test_the_children_of_a_fork_server_that_is_killed_end_and_are_replaced() -> None:
    handle = serve.run(model(), route_prefix=None)
    before = set(pids("Model"))

    os.kill(parent(min(before)), signal.SIGKILL)

    wait_until(lambda: not any(map(is_alive, before)))
    wait_until(lambda: len(pids("Model")) == 2 and not before & set(pids("Model")))
    assert handle.remote(14).result() == 42


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_that_user_code_starts_does_not_get_the_connection_to_the_server(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGRESS_START_METHOD", method)
    handle = serve.run(Model.bind(), route_prefix=None)

    handle.program.remote(str(tmp_path / "found")).result()

    found = (tmp_path / "found").read_text()
    assert "/found" in found
    assert "socket:" not in found
    assert "memfd:" not in found


def test_a_module_that_starts_threads_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_module(
        tmp_path,
        "threaded_module",
        "import threading\n"
        "import ingress as serve\n"
        "over = threading.Event()\n"
        "threading.Thread(target=over.wait, daemon=True).start()\n"
        "@serve.deployment(isolation='process')\n"
        "class Threaded:\n"
        "    async def __call__(self): return 'answered'\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("threaded_module")

    handle = serve.run(module.Threaded.bind(), route_prefix=None)

    assert handle.remote().result() == "answered"
    assert [parent(each) for each in pids("Threaded")] == [os.getpid()]
    module.over.set()
    assert "not possible for module threaded_module: it has 2 threads" in caplog.text


FORKS = """
import os, sys
import ingress as serve

if "pytest" not in sys.modules:  # in the fork server
    fork = os.fork

    def unlike():
        if os.path.exists("fails"):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        if os.path.exists("begun"):
            with open("begun", "w"), open("go"):
                pass
        return fork()

    os.fork = unlike

@serve.deployment(isolation="process")
class Forked:
    async def __call__(self): return os.getpid()
"""


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A deployment whose fork server does what the files in the current folder say."""
    write_module(tmp_path, "forks_module", FORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "forks_module", raising=False)
    return importlib.import_module("forks_module").Forked


def test_a_fork_that_fails_leaves_the_other_children_alone(forked: Any, tmp_path: Path) -> None:
    serve.run(forked.bind(), route_prefix=None)
    before = pids("Forked")
    (tmp_path / "fails").touch()
    local_engine().change("default", {"Forked": {"num_replicas": 2}})

    def deployment() -> Any:
        return serve.status().applications["default"].deployments["Forked"]

    wait_until(lambda: "could not fork" in deployment().message)
    assert all(map(is_alive, before))
    (tmp_path / "fails").unlink()
    wait_until(lambda: len(pids("Forked")) == 2)
    assert set(before) < set(pids("Forked"))


def test_a_child_that_ends_while_another_is_forked_takes_no_other_with_it(
    forked: Any, tmp_path: Path
) -> None:
    serve.run(forked.options(num_replicas=2).bind(), route_prefix=None)
    killed, other = pids("Forked")
    replica = local_engine().routers[DeploymentID("Forked", "default")].replicas[0]
    child = replica.host.link._child  # type: ignore[attr-defined]
    for name in ("begun", "go"):
        os.mkfifo(tmp_path / name)
    local_engine().change("default", {"Forked": {"num_replicas": 3}})
    with (tmp_path / "begun").open():  # the fork server forks a third one
        pass
    (tmp_path / "begun").unlink()

    os.kill(killed, signal.SIGKILL)  # its end and the order to kill it arrive in this order
    wait_until(lambda: child._process._is_unwanted)
    with (tmp_path / "go").open("w"):
        pass

    wait_until(lambda: len(pids("Forked")) == 3 and killed not in pids("Forked"))
    assert other in pids("Forked")


def test_a_start_whose_import_hangs_in_the_fork_server_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "never")
    write_module(
        tmp_path,
        "hanging_module",
        "import os, sys\n"
        "import ingress as serve\n"
        "if 'pytest' not in sys.modules:  # in the child\n"
        "    with open('begun', 'w') as file: file.write(str(os.getpid()))\n"
        "    open('never')\n"
        "@serve.deployment(isolation='process', graceful_shutdown_timeout_s=0)\n"
        "class Hanging:\n"
        "    async def __call__(self): ...\n",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("hanging_module")
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(serve.run, module.Hanging.bind(), route_prefix=None)
        fork_server = int((tmp_path / "begun").read_text())

        serve.shutdown()

        with pytest.raises(Exception):  # noqa: B017  # the start was given up
            start.result(timeout=PATIENCE_S)
    wait_until(lambda: not is_alive(fork_server))


@pytest.mark.reliability("P04")
def test_the_fork_server_and_its_children_end_with_their_server(tmp_path: Path) -> None:
    write_module(
        tmp_path,
        "script",
        "import os, time\n"
        "import ingress as serve\n"
        "@serve.deployment(isolation='process')\n"
        "class Own:\n"
        "    async def __call__(self): return os.getpid(), os.getppid()\n"
        "if __name__ == '__main__':\n"
        "    handle = serve.run(Own.bind(), route_prefix=None)\n"
        "    print('children', os.getpid(), *handle.remote().result(), flush=True)\n"
        "    time.sleep(60)\n",
    )
    with process([sys.executable, "script.py"], tmp_path, environment(tmp_path)) as server:
        found = server.wait_for(r"children (\d+) (\d+) (\d+)")
        parent_pid, *children = map(int, found.groups())
        assert parent_pid not in children
        assert all(map(is_alive, children))
        server.signal(signal.SIGKILL)
        server.wait()

        wait_until(lambda: not any(map(is_alive, children)))
