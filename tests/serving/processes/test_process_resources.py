"""The environment of replicas in child processes: native threads, cores, GPUs of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import ingress as serve
from tests.process_app import Model, pids
from tests.servers import wait_until

pytestmark = pytest.mark.usefixtures("shutdown")

GPUS = "CUDA_VISIBLE_DEVICES"


def model(num_replicas: int = 1, **actor: Any) -> Any:
    options: dict[str, Any] = {"num_replicas": num_replicas, "ray_actor_options": actor}
    return Model.options(max_constructor_retry_count=1, **options).bind()


def variables(handle: Any, name: str, replicas: int) -> list[str]:
    """Return the values of a variable in each replica, once all have answered."""
    found: dict[int, str] = {}

    def ask() -> bool:
        pid, value = handle.variable_here.remote(name).result()
        found[pid] = value
        return set(pids("Model")) <= found.keys() and len(pids("Model")) == replicas

    wait_until(ask)
    return sorted(found[pid] for pid in pids("Model"))


@pytest.mark.parametrize(("num_gpus", "found"), [(1, ["4", "7"]), (0.5, ["4", "4"])])
def test_each_replica_has_gpus_of_its_own_or_its_part_of_one(
    num_gpus: float, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, "4,7")

    handle = serve.run(model(2, num_gpus=num_gpus), route_prefix=None)

    assert variables(handle, GPUS, 2) == found


def test_the_gpu_of_a_killed_child_goes_to_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4")
    handle = serve.run(model(num_gpus=1), route_prefix=None)
    before = handle.pid.remote().result()

    os.kill(before, signal.SIGKILL)

    assert handle.variable.remote(GPUS).result() == "4"
    assert handle.pid.remote().result() != before


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("", r"'Model' asks for .*'num_gpus': 2.* a replica, and this machine has no GPU"),
        ("4", r"and too little is free of the GPUs \(4: 1\); use fewer replicas"),
    ],
    ids=["none", "too few"],
)
def test_gpus_that_are_missing_fail_the_start(
    there: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, there)

    with pytest.raises(RuntimeError, match=message):
        serve.run(model(num_gpus=2), route_prefix=None)


def test_gpus_are_not_counted_on_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []

    def count() -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_loop.append(False)
        else:
            on_loop.append(True)

    nvml = SimpleNamespace(nvmlInit=count, nvmlDeviceGetCount=lambda: 2, nvmlShutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv(GPUS, raising=False)

    handle = serve.run(model(num_gpus=1), route_prefix=None)

    assert handle.variable.remote(GPUS).result() in ("0", "1")
    assert set(on_loop) == {False}


def test_a_variable_may_name_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4")
    monkeypatch.setenv("FOLDER", "/x")
    given = {"FOLDER": "${FOLDER}/y", "SEEN": "$FOLDER of ${GONE}${CUDA_VISIBLE_DEVICES}"}
    handle = serve.run(model(num_gpus=1, runtime_env={"env_vars": given}), route_prefix=None)

    assert handle.variable.remote("SEEN").result() == "/x/y of 4"


@pytest.mark.parametrize(
    ("name", "value"), [("A=B", "x"), ("", "x"), ("A", "x\0"), ("A\0", "x"), (3, "x")]
)
def test_a_variable_that_no_environment_can_have_is_refused(name: Any, value: str) -> None:
    with pytest.raises(ValueError, match=r"names of text without '=', and no NUL"):
        model(runtime_env={"env_vars": {name: value}})


def test_a_start_that_fails_for_any_reason_is_told_and_gives_the_gpu_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(GPUS, "4")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "python\0")  # for which `Popen` raises `ValueError`
        with pytest.raises(RuntimeError, match="could not be started: embedded null byte"):
            serve.run(model(num_gpus=1), route_prefix=None)

    assert serve.run(model(num_gpus=1), route_prefix=None).variable.remote(GPUS).result() == "4"


@pytest.mark.parametrize("missing", ["-process", "-output"])
def test_a_start_without_a_thread_is_told_and_leaves_nothing(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS, "4")
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.endswith(missing):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            serve.run(model(num_gpus=1), route_prefix=None)

    assert serve.run(model(num_gpus=1), route_prefix=None).variable.remote(GPUS).result() == "4"


def test_a_number_of_gpus_is_whole_or_a_part_of_one() -> None:
    with pytest.raises(ValueError, match=r"a whole number, or a part of one GPU.*got 1\.5"):
        model(num_gpus=1.5)


def test_native_threads_follow_num_cpus_unless_they_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")

    handle = serve.run(model(num_cpus=3), route_prefix=None)

    assert handle.variable.remote("OMP_NUM_THREADS").result() == "3"
    assert handle.variable.remote("MKL_NUM_THREADS").result() == "7"


def cores_of(pid: int) -> set[frozenset[int]]:
    """Return the sets of cores that the threads of a process may use."""
    return {frozenset(os.sched_getaffinity(int(each))) for each in os.listdir(f"/proc/{pid}/task")}


ALL = frozenset(os.sched_getaffinity(0)) if sys.platform == "linux" else frozenset()
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, and sets affinities")


@on_linux
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_are_pinned_to_cores_in_turn_and_a_replacement_to_those_that_are_free(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGRESS_START_METHOD", method)
    monkeypatch.setenv("INGRESS_PIN_CPUS", "1")
    handle = serve.run(model(min(2, len(ALL)), num_cpus=1.5), route_prefix=None)
    before = pids("Model")
    handle.variable.remote("MODEL_FOLDER").result()

    found = [cores_of(each) for each in before]
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: len(pids("Model")) == len(before) and before[0] not in pids("Model"))
    (new,) = set(pids("Model")) - set(before)

    assert all(len(each) == 1 for each in found)  # also the threads of user code
    assert set().union(*found) == {frozenset([each]) for each in sorted(ALL)[:2]}
    assert cores_of(new) == found[0]
    assert handle.variable.remote("INGRESS_PINNED_CPUS").result() is None


@on_linux
def test_a_child_that_needs_more_cores_than_there_are_fails_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INGRESS_PIN_CPUS", "1")
    message = rf"'num_cpus': {len(ALL) + 1}}} a replica, and this process may use {len(ALL)} of"

    with pytest.raises(RuntimeError, match=message):
        serve.run(model(num_cpus=len(ALL) + 1), route_prefix=None)

    serve.run(model(num_cpus=len(ALL)), route_prefix=None)
    assert cores_of(pids("Model")[0]) == {ALL}


@on_linux
def test_a_child_that_gets_no_gpu_gives_its_core_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGRESS_PIN_CPUS", "1")
    monkeypatch.setenv(GPUS, "4")
    with pytest.raises(RuntimeError, match="too little is free of the GPUs"):
        serve.run(model(num_cpus=1, num_gpus=2), route_prefix=None)

    serve.run(model(num_cpus=1), route_prefix=None)

    assert cores_of(pids("Model")[0]) == {frozenset([min(ALL)])}


@on_linux
@pytest.mark.parametrize(
    ("pins", "options"), [("0", {"num_cpus": 1}), ("1", {}), ("1", {"num_cpus": 0})]
)
def test_no_child_is_pinned_unless_the_server_and_its_deployment_say_so(
    pins: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGRESS_PIN_CPUS", pins)

    serve.run(model(**options), route_prefix=None)

    assert cores_of(pids("Model")[0]) == {ALL}
