"""The ways to start replicas in processes: `INGRESS_START_METHOD`.

No application runs when a test begins.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ingress as serve
from tests.process_app import Model, pids
from tests.servers import environment, process, wait_until, write_module
from tests.test_process_ends import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is for Linux")


@pytest.fixture(autouse=True)
def _forkserver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INGRESS_START_METHOD", "forkserver")
    yield
    serve.shutdown()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def model(**actor: Any) -> Any:
    return Model.options(num_replicas=2, ray_actor_options=actor).bind(3)  # type: ignore[attr-defined]


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
