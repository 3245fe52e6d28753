"""The environment of replicas in child processes: native threads and GPUs of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
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
