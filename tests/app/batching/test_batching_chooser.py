"""`target_latency_ms`: the size and the wait that are chosen, and what they are learned from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingress as serve
from ingress.app.batching.chooser import LONGEST_S, SHARE, SizeChooser
from ingress.testing import Latch
from tests.observe.test_admin import admin_port
from tests.observe.test_page import event, viewing
from tests.programs import ingress_run, run_ingress, write_module
from tests.servers import bind, get, turns, wait_until

SOON_MS = 1e6  # a target that no batch of a test reaches


def taught(base_s: float, each_s: float, target_s: float = 0.05, bound: int = 1000) -> SizeChooser:
    """Return a chooser that has seen batches as its own choice makes them, under a long queue."""
    chooser = SizeChooser(target_s, bound)
    for _ in range(20):
        size = chooser.size
        chooser.learn(size, base_s + each_s * size)
    return chooser


# Mistakes.


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"target_latency_ms": 0}, ValueError, "target_latency_ms must be a number of mill"),
        ({"target_latency_ms": float("inf")}, ValueError, "target_latency_ms must be a number"),
        ({"target_latency_ms": "50"}, TypeError, "target_latency_ms must be a number"),
        ({"target_latency_ms": True}, TypeError, "target_latency_ms must be a number"),
        (
            {"target_latency_ms": 50, "batch_wait_timeout_s": 0.01},
            ValueError,
            "batch_wait_timeout_s=0.01 would have no effect; leave one of them out",
        ),
        ({"per_model": 1}, TypeError, "per_model must be True or False, got 1"),
    ],
)
def test_a_wrong_option_is_refused(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        serve.batch(**options)


def test_a_generator_has_no_time_to_aim_at() -> None:
    with pytest.raises(TypeError, match="'stream' is a generator"):

        @serve.batch(target_latency_ms=50)
        async def stream(xs: list[int]) -> Any:
            yield xs


def test_the_wait_cannot_be_set_where_it_is_chosen() -> None:
    @serve.batch(target_latency_ms=50)
    async def function(xs: list[int]) -> list[int]:
        return xs

    with pytest.raises(ValueError, match="leave set_batch_wait_timeout_s out"):
        function.set_batch_wait_timeout_s(0.1)
    function.set_max_batch_size(8)  # a bound


# The choice.


@pytest.mark.parametrize(
    ("base_s", "each_s", "size"),
    [(0.0, 0.001, 40), (0.01, 0.001, 30), (0.002, 0.0005, 76), (0.02, 0.0, 1000)],
)
def test_the_size_is_the_largest_whose_batch_leaves_time_for_the_one_before(
    base_s: float, each_s: float, size: int
) -> None:
    chooser = taught(base_s, each_s)
    assert size - 1 <= chooser.size <= size
    assert chooser.time_s(chooser.size) <= SHARE * chooser.target_s + 1e-9


def test_it_is_right_again_within_twenty_batches_after_a_change() -> None:
    chooser = taught(0.002, 0.0005)
    for base_s, each_s, size in ((0.01, 0.003, 10), (0.001, 0.0002, 195)):
        for _ in range(20):
            chooser.learn(chooser.size, base_s + each_s * chooser.size)
        assert 0.9 * size <= chooser.size <= 1.1 * size


def test_a_target_that_no_batch_meets_is_said_and_nothing_starves() -> None:
    chooser = taught(0.1, 0.01)
    assert 2 <= chooser.size <= 11  # half of the time is that of the calls
    assert "even one call takes longer than the target" in chooser.chosen(1).reason
    assert SizeChooser(0.05, 1000).chosen(1).reason == "no batch has run yet"


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 10))), st.integers(1, 500))
def test_no_history_gives_a_size_out_of_bounds_or_a_long_wait(
    batches: list[tuple[int, float]], bound: int
) -> None:
    chooser = SizeChooser(0.05, bound)
    for size, took_s in batches:
        chooser.came()
        chooser.learn(size, took_s)
        assert 1 <= chooser.size <= bound
        assert 0 <= chooser.wait_s(size, chooser.came_at) <= LONGEST_S
        assert chooser.chosen(size).reason


@pytest.mark.parametrize(("comes", "waits"), [(True, True), (False, False)])
def test_a_batch_waits_only_if_one_more_call_came_after_earlier_ones(
    comes: bool, waits: bool
) -> None:
    chooser = taught(0.03, 0.0)
    for _ in range(20):
        chooser.came()
        assert 0.0 <= chooser.wait_s(8, chooser.came_at) <= LONGEST_S
        if not comes:
            passed = monotonic() + 1.5 * LONGEST_S
            while monotonic() < passed:
                pass
    chooser.came()
    assert (chooser.wait_s(8, chooser.came_at) > 0.0) == waits
    assert (chooser.chosen(8).wait_s > 0.0) == waits


# The batches.


@pytest.mark.anyio
@pytest.mark.parametrize("fails", [False, True])
async def test_batches_grow_as_they_succeed_and_a_failed_one_teaches_nothing(fails: bool) -> None:
    sizes: list[int] = []

    @serve.batch(target_latency_ms=SOON_MS)
    async def function(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        if fails:
            raise ValueError("no")
        return xs

    answers = await asyncio.gather(*map(function, range(43)), return_exceptions=True)

    # From the third on the line through two sizes is known.
    assert sizes == ([1] * 43 if fails else [1, 2, 8, 32])
    assert [type(each) for each in answers] == [ValueError if fails else int] * 43


@pytest.mark.anyio
async def test_a_batch_that_all_callers_have_left_teaches_nothing() -> None:
    sizes: list[int] = []
    door = asyncio.Event()

    @serve.batch(target_latency_ms=SOON_MS)
    async def function(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        await door.wait()
        return xs

    leaving = asyncio.ensure_future(function(0))
    while not sizes:
        await asyncio.sleep(0)
    leaving.cancel()
    later = [asyncio.ensure_future(function(n)) for n in range(3)]
    await asyncio.sleep(0)
    door.set()
    await asyncio.gather(*later)

    assert sizes == [1, 1, 2]


@pytest.mark.anyio
async def test_an_item_that_is_larger_than_the_chosen_size_runs_alone() -> None:
    batches: list[list[int]] = []

    @serve.batch(max_batch_size=100, target_latency_ms=SOON_MS, batch_size_fn=sum)
    async def function(xs: list[int]) -> list[int]:
        batches.append(xs)
        return xs

    answers = await asyncio.gather(*map(function, [60, 30, 10, 101]), return_exceptions=True)

    assert batches == [[60], [30, 10]]
    assert answers[:3] == [60, 30, 10]
    assert "greater than max_batch_size" in str(answers[3])


@pytest.mark.anyio
async def test_each_instance_has_a_chooser_of_its_own() -> None:
    sizes: dict[str, list[int]] = {"one": [], "other": []}

    class Model:
        def __init__(self, name: str) -> None:
            self.name = name

        @serve.batch(target_latency_ms=SOON_MS)
        async def predict(self, xs: list[int]) -> list[int]:
            sizes[self.name].append(len(xs))
            return xs

    one, other = Model("one"), Model("other")
    await asyncio.gather(*map(one.predict, range(7)))
    await asyncio.gather(*map(one.predict, range(8)))  # its queue went, what it learned stayed
    await asyncio.gather(*map(other.predict, range(7)))

    assert sizes == {"one": [1, 2, 4, 8], "other": [1, 2, 4]}


@pytest.mark.parametrize("per_model", [True, False])
@pytest.mark.usefixtures("separate")
def test_batches_of_three_models_run_side_by_side_if_they_may(per_model: bool) -> None:
    entered: list[str] = []
    running = most_running = 0
    door = Latch()

    class K:
        @serve.batch(max_batch_size=1, per_model=per_model)
        async def __call__(self, xs: list[int]) -> list[int]:
            nonlocal running, most_running
            entered.append(serve.get_multiplexed_model_id())
            running += 1
            most_running = max(running, most_running)
            await door
            running -= 1
            return xs

        async def turn(self) -> None:
            await turns()

        @serve.multiplexed(max_num_models_per_replica=3)
        async def load(self, name: str) -> str:
            return name

    handle: Any = serve.run(bind(serve.deployment(K)))
    responses = [handle.options(multiplexed_model_id=each).remote(1) for each in "abca"]
    wait_until(lambda: len(entered) >= (3 if per_model else 1))
    handle.turn.remote().result()  # all four calls are in their queues
    if per_model:
        assert sorted(entered) == ["a", "b", "c"]  # the fourth waits for its model's first
    door.count_down()
    assert [each.result() for each in responses] == [1] * 4
    assert most_running == (3 if per_model else 1)


# What people see.

APP = """
import asyncio
import ingress as serve

@serve.deployment{options}
class Model:
    @serve.batch(target_latency_ms=50)
    async def predict(self, xs):
        await asyncio.sleep(0.001)
        return xs

    async def __call__(self, request):
        return await self.predict(1)

app = Model.bind()
"""


@pytest.mark.parametrize("options", ["", '(isolation="process")'])
def test_the_choice_and_its_reason_are_in_the_view_and_in_metrics(
    options: str, tmp_path: Path
) -> None:
    write_module(tmp_path, "module", APP.replace("{options}", options))
    with ingress_run(tmp_path, "module:app", "--admin", "127.0.0.1:0") as server:
        server.wait_for("is ready at")
        for _ in range(3):
            assert get(server.port, "/").status == 200
        port = admin_port(server)

        def chosen() -> list[Any]:
            with viewing(port) as viewer:
                (replica,) = event(viewer)["replicas"]
            return list(replica["batches"])

        wait_until(chosen)
        (batch,) = chosen()
        metrics = get(port, "/metrics").body.decode()
        top = run_ingress(tmp_path, "top", "--pid", str(server.process.pid)).stdout

    assert batch["name"].endswith("predict")
    assert (batch["size"], batch["target_ms"]) == (2, 50)
    assert "a batch of n takes" in batch["reason"]
    assert 'ingress_batch_chosen_size{application="default",deployment="Model"' in metrics
    assert "ingress_batch_chosen_wait_seconds{" in metrics
    assert "predict<=2" in top


def test_explain_says_that_they_are_chosen(tmp_path: Path) -> None:
    write_module(tmp_path, "module", APP.replace("{options}", ""))
    told = run_ingress(tmp_path, "explain", "module:app")
    assert "batch for 50 ms" in told.stdout, json.dumps(told.stdout + told.stderr)
