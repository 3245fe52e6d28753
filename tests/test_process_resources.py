"""The environment of replicas in child processes: native threads and GPUs of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import ingress as serve
from tests.process_app import Model, pids
from tests.servers import wait_until

GPUS = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    serve.shutdown()


def model(num_replicas: int = 1, **actor: Any) -> Any:
    options = {"num_replicas": num_replicas, "ray_actor_options": actor}
    return Model.options(max_constructor_retry_count=1, **options).bind()  # type: ignore[attr-defined]


def variables(handle: Any, name: str, replicas: int) -> list[str]:
    """Return the values of a variable in each replica, once all have answered."""
    found: dict[int, str] = {}

    def ask() -> bool:
        pid, value = handle.variable_here.remote(name).result()
        found[pid] = value
        return set(pids("Model")) <= found.keys() and len(pids("Model")) == replicas

    wait_until(ask)
    return sorted(found[pid] for pid in pids("Model"))


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4,7")

    handle = serve.run(model(2, num_gpus=1), route_prefix=None)

    assert variables(handle, GPUS, 2) == ["4", "7"]


def test_the_gpu_of_a_killed_child_goes_to_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4")
    handle = serve.run(model(num_gpus=1), route_prefix=None)
    before = handle.pid.remote().result()

    os.kill(before, signal.SIGKILL)

    assert handle.variable.remote(GPUS).result() == "4"
    assert handle.pid.remote().result() != before


def test_replicas_share_a_gpu_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS, "4,7")

    handle = serve.run(model(2, num_gpus=0.5), route_prefix=None)

    assert variables(handle, GPUS, 2) == ["4", "4"]


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
