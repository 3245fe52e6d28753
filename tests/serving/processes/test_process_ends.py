"""The start and the end of replicas in child processes, also where both go wrong.

No application runs when a test begins.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingress as serve
from ingress.core.base.types import DeploymentID
from ingress.engines import local_engine
from ingress.exceptions import ReplicaUnavailableError
from tests import large_app, process_app, process_attacks_app
from tests.process_app import pids
from tests.programs import environment, process, write_module
from tests.servers import PATIENCE_S, ongoing, overview, served, wait_until

pytestmark = pytest.mark.usefixtures("shutdown")

REQUESTS = 24


def is_alive(pid: int) -> bool:
    """Return whether a process runs, on Linux; one that is not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# The end of a child.


@pytest.mark.reliability("P01")
def test_a_child_that_ends_takes_its_own_requests_and_is_replaced() -> None:
    url = f"http://127.0.0.1:{served(process_app.api)}"
    before = pids("Api")

    answer = httpx.get(f"{url}/exit")

    assert answer.status_code == 503
    assert "ended with exit code 3" in answer.text
    assert httpx.get(f"{url}/pid").json() in before
    wait_until(lambda: len(set(pids("Api")) - set(before)) == 1, timeout_s=50)
    assert len(pids("Api")) == 2


@pytest.mark.reliability("P01")
@pytest.mark.thorough
def test_requests_that_a_killed_child_had_not_begun_go_to_another() -> None:
    url = f"http://127.0.0.1:{served(process_app.api)}"
    victim = local_engine().routers[DeploymentID("Api", "default")].replicas[0]
    pid: int = victim.host.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = [pool.submit(httpx.get, f"{url}/pid", timeout=60) for _ in range(REQUESTS)]
        wait_until(lambda: sum(each.done() for each in answers) + victim.slots.ongoing == REQUESTS)
        waited = victim.slots.ongoing

        os.kill(pid, signal.SIGKILL)

        assert {each.result().status_code for each in answers} == {200}
    assert waited > 0


@pytest.mark.reliability("P01")
def test_a_call_that_a_killed_child_had_begun_fails_and_names_the_signal() -> None:
    model = serve.run(process_app.model, route_prefix=None)
    response = model.wait.remote()
    wait_until(lambda: model.seen.remote().result())
    os.kill(model.pid.remote().result(), signal.SIGKILL)

    with pytest.raises(ReplicaUnavailableError, match="was killed by SIGKILL"):
        response.result()
    assert model.remote(14).result() == 42  # by the replacement, for which it waits


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_request_that_writes_to_the_link_of_its_child_is_503_and_names_the_frame() -> None:
    url = f"http://127.0.0.1:{served(process_attacks_app.web)}"
    before = httpx.get(f"{url}/pid").json()

    answer = httpx.get(f"{url}/attack/{os.getpid()}/2-GB", timeout=PATIENCE_S)

    assert answer.status_code == 503
    assert "was ended, because it sent a frame of 2147483648 bytes" in answer.text
    assert httpx.get(f"{url}/pid", timeout=PATIENCE_S).json() != before


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_child_that_takes_from_its_link_ends_and_logs_what_its_loop_was_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"http://127.0.0.1:{served(process_attacks_app.web)}"
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(httpx.get, f"{url}/take/{os.getpid()}", timeout=PATIENCE_S)
        wait_until(lambda: ongoing() == 1)
        httpx.get(f"{url}/pid", timeout=PATIENCE_S)  # its frame
        taking.result()

    wait_until(lambda: "Web#0: its server sent a frame of" in caplog.text)


@pytest.mark.reliability("P05")
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_nothing_is_left_of_large_messages_when_the_child_is_killed() -> None:
    def array_of(number: int) -> Any:
        return np.full(200_000, number, np.uint8)

    handle = serve.run(large_app.large, route_prefix=None)
    ours = large_app.holdings()
    pid = handle.pid.remote().result()
    results = [handle.same.remote(array_of(number)).result() for number in range(4)]
    stay = [handle.stay.remote(array_of(number)) for number in range(8)]
    wait_until(lambda: len(handle.sums.remote().result()) == len(stay))
    os.kill(pid, signal.SIGSTOP)
    more = [handle.same.remote(array_of(number)) for number in range(8)]

    os.kill(pid, signal.SIGKILL)

    for response in stay:
        with pytest.raises(ReplicaUnavailableError):
            response.result()
    assert [int(each.result()[0]) for each in more] == list(range(8))  # by the replacement
    assert [int(each[0]) for each in results] == list(range(4))
    del results, more
    wait_until(lambda: large_app.holdings() == ours)


@pytest.mark.thorough
def test_options_of_a_child_change_while_it_runs() -> None:
    target = process_app.Model.options(max_ongoing_requests=2).bind()
    handle = serve.run(target, route_prefix=None)
    before = pids("Model")

    changed = {"user_config": {"factor": 5}, "max_ongoing_requests": 40}
    local_engine().change("default", {"Model": changed})

    wait_until(lambda: handle.remote(2).result() == 10)
    calls = [handle.meet.remote(40) for _ in range(40)]
    assert sorted(each.result() for each in calls) == list(range(40))
    assert pids("Model") == before


def test_the_status_names_the_end_of_a_process_while_its_replacement_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(
        tmp_path,
        "slow_module",
        "import os\n"
        "import ingress as serve\n"
        "@serve.deployment(isolation='process')\n"
        "class Slow:\n"
        "    def __init__(self):\n"
        "        if os.path.exists('go'): open('go').close()\n"
        "    async def __call__(self):\n"
        "        os.write(2, b'the last words\\n')\n"
        "        os._exit(7)\n",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("slow_module")
    handle = serve.run(module.Slow.bind(), route_prefix=None)
    os.mkfifo(tmp_path / "go")
    with pytest.raises(ReplicaUnavailableError):
        handle.remote().result()

    wait_until(lambda: "ended with exit code 7" in overview("Slow").message)
    assert "the last words" in overview("Slow").message
    assert overview("Slow").status == "HEALTHY"
    with (tmp_path / "go").open("w"):
        pass
    wait_until(lambda: not overview("Slow").message)


@pytest.mark.reliability("P01")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems name signals differently")
def test_a_crash_in_c_ends_one_replica_and_an_allocation_that_fails_none() -> None:
    handle = serve.run(process_app.spinning, route_prefix=None)
    before = handle.pid.remote().result()

    with pytest.raises(MemoryError):
        handle.allocate.remote().result()
    assert handle.pid.remote().result() == before
    with pytest.raises(ReplicaUnavailableError, match="was killed by SIGSEGV"):
        handle.crash.remote().result()
    assert handle.pid.remote().result() != before


@pytest.mark.reliability("P02")
@pytest.mark.thorough
@pytest.mark.parametrize("method", ["spin", "hold_gil"])
def test_a_child_whose_loop_does_not_turn_is_killed_and_replaced(method: str) -> None:
    handle = serve.run(process_app.spinning, route_prefix=None)
    before = handle.pid.remote().result()

    response = handle.options(method_name=method).remote()

    with pytest.raises(ReplicaUnavailableError):
        response.result(timeout_s=50)
    assert handle.pid.remote().result() != before
    wait_until(lambda: not is_alive(before))


@pytest.mark.reliability("P03")
@pytest.mark.thorough
def test_a_process_that_dies_again_and_again_is_replaced_after_longer_and_longer_pauses() -> None:
    serve.run(process_app.short_lived, route_prefix=None)

    wait_until(lambda: overview("ShortLived").status == "UNHEALTHY", timeout_s=50)
    assert "ended with exit code 9" in overview("ShortLived").message
    assert "the last words" in overview("ShortLived").message


@pytest.mark.reliability("P03")
@pytest.mark.thorough
def test_a_replacement_that_does_not_start_is_tried_with_longer_and_longer_pauses(
    tmp_path: Path,
) -> None:
    handle = serve.run(process_app.fails_later(str(tmp_path)), route_prefix=None)
    (tmp_path / "fails").touch()
    os.kill(handle.pid.remote().result(), signal.SIGKILL)

    wait_until(lambda: overview("FailsLater").status == "UNHEALTHY")
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() > begun + 5)
    # Pauses of 0, 0.5, 1, 2, 4 s: the sixth start is 7.5 s after the first.
    assert 3 <= len((tmp_path / "starts").read_text()) <= 6
    assert "failed to start" in overview("FailsLater").message
    assert "ended with exit code 5" in overview("FailsLater").message
    assert "the last words" in overview("FailsLater").message
    (tmp_path / "fails").unlink()
    assert handle.pid.remote().result(timeout_s=50)
    wait_until(lambda: overview("FailsLater").status == "HEALTHY")


@pytest.mark.reliability("P04")
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_children_end_with_their_parent(tmp_path: Path) -> None:
    write_module(
        tmp_path,
        "script",
        "import os, time\n"
        "import ingress as serve\n"
        "from tests.process_app import Model\n"
        "if __name__ == '__main__':\n"
        "    handle = serve.run(Model.bind(), route_prefix=None)\n"
        "    print('child', handle.pid.remote().result(), flush=True)\n"
        "    time.sleep(60)\n",
    )
    with process([sys.executable, "script.py"], tmp_path, environment(tmp_path)) as server:
        child = int(server.wait_for(r"child (\d+)")[1])
        assert is_alive(child)
        server.signal(signal.SIGKILL)
        server.wait()

        wait_until(lambda: not is_alive(child))


def test_a_class_of_a_script_runs_in_a_child(tmp_path: Path) -> None:
    write_module(
        tmp_path,
        "script",
        "import os\n"
        "import ingress as serve\n"
        "class Box: pass\n"
        "@serve.deployment(isolation='process')\n"
        "class Boxes:\n"
        "    def __init__(self, box): self.box = box\n"
        "    async def __call__(self): return os.getpid(), self.box\n"
        "if __name__ == '__main__':\n"
        "    handle = serve.run(Boxes.bind(Box()), route_prefix=None)\n"
        "    pid, box = handle.remote().result()\n"
        "    print('child' if pid != os.getpid() and type(box) is Box else 'not', flush=True)\n"
        "    serve.shutdown()\n",
    )
    with process([sys.executable, "script.py"], tmp_path, environment(tmp_path)) as server:
        server.wait_for("child")
        assert server.wait() == 0


def test_a_class_of_a_module_that_python_runs_has_its_package_in_a_child(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("NUMBER = 41\n")
    (package / "module.py").write_text(
        "import ingress as serve\n"
        "from .other import NUMBER\n"
        "@serve.deployment(isolation='process')\n"
        "class Adding:\n"
        "    async def __call__(self, number): return NUMBER + number\n"
        "if __name__ == '__main__':\n"
        "    print('sum', serve.run(Adding.bind(), route_prefix=None).remote(1).result())\n"
        "    serve.shutdown()\n"
    )
    command = [sys.executable, "-m", "package.module"]
    with process(command, tmp_path, environment(tmp_path)) as server:
        server.wait_for("sum 42")
        assert server.wait() == 0


NOTEBOOK = """
import os
import ingress as serve

class Box:
    def __init__(self, content): self.content = content

class NoBox(Exception): pass

@serve.deployment(isolation="process")
class Boxes:
    def __init__(self, box): self.box = box
    async def __call__(self, box):
        if not isinstance(box, Box): raise NoBox(box)
        return os.getpid(), Box([self.box.content, box.content])

handle = serve.run(Boxes.bind(Box(1)), route_prefix=None)
pid, box = handle.remote(Box(2)).result()
assert pid != os.getpid()
assert type(box) is Box and box.content == [1, 2]
try:
    handle.remote(3).result()
except NoBox as error:
    assert error.args == (3,)
    print("as in a module")
serve.shutdown()
"""


@pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="needs cloudpickle")
def test_classes_of_a_notebook_cross_in_arguments_results_and_errors(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-"],  # `__main__` has no file, as in a notebook
        input=NOTEBOOK,
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ran.stdout == "as in a module\n", ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("cloudpickle") is None, reason="needs cloudpickle")
def test_locks_of_a_class_that_no_module_has_arrive_unlocked_and_of_their_kind() -> None:
    locks = threading.Lock(), threading.RLock()

    @serve.deployment(isolation="process")
    class Local:
        async def __call__(self) -> list[list[bool]]:
            return [[each.acquire(blocking=False) for _ in range(2)] for each in locks]

    with locks[0], locks[1]:
        handle = serve.run(Local.bind(), route_prefix=None)
    assert handle.remote().result() == [[True, False], [True, True]]


# Starts that fail.


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("broken", r"'Broken' failed to start: .*OddError: it is broken"),
        ("exit", r"exit code 5[^$]*ERROR:mine:a record\nof two lines\nthe last words"),
        ("unfinished", r"exit code 5[^$]*the last line\nand no line break"),
    ],
)
def test_a_constructor_that_raises_or_ends_its_process_fails_the_start_with_the_reason(
    how: str, told: str
) -> None:
    with pytest.raises(RuntimeError, match=told):
        serve.run(process_app.broken(how), name="broken", route_prefix=None)


@pytest.mark.thorough
def test_the_async_del_of_an_instance_runs_in_a_child_if_its_constructor_fails(
    tmp_path: Path,
) -> None:
    left = tmp_path / "left"
    serve.run(process_app.spinning, name="other", route_prefix=None)  # else a start has 0.5 s

    with pytest.raises(RuntimeError, match="half"):
        serve.run(process_app.half(str(left)), name="half", route_prefix=None)

    wait_until(left.exists)
    assert left.read_text() == "gone"


def test_reconfigure_gets_its_rank_in_a_child() -> None:
    handle = serve.run(process_app.ranked, route_prefix=None)

    assert handle.remote().result() == (None, 0, 0)


def test_a_large_error_at_the_import_of_a_module_reaches_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(
        tmp_path,
        "unreadable_module",
        "import json, sys\n"
        "import ingress as serve\n"
        "if 'pytest' not in sys.modules:  # in the child\n"
        "    json.loads('x' * 200_000)  # the error contains the document\n"
        "@serve.deployment(isolation='process')\n"
        "class Unreadable:\n"
        "    async def __call__(self): ...\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    target = importlib.import_module("unreadable_module").Unreadable

    with pytest.raises(RuntimeError, match="JSONDecodeError: Expecting value"):
        serve.run(target.bind(), name="unreadable", route_prefix=None)


def test_a_class_that_no_module_has_is_refused_without_cloudpickle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    @serve.deployment(isolation="process")
    class Local:
        async def __call__(self) -> None: ...

    with pytest.raises(RuntimeError, match=r"no module has .*Local, so a child process cannot"):
        serve.run(Local.bind(), name="local", route_prefix=None)
