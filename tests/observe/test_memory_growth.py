"""The growth of a server's memory: by the hour in the view, by lines in `ingress memory`."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from ingress.observe.live.history import Growth
from ingress.observe.live.problems import problems_of
from ingress.state.memory import memory_of
from ingress.state.server import ProcessSnapshot, Snapshot
from tests.cli.test_control_commands import runtime as runtime
from tests.programs import run_ingress, write_module
from tests.servers import PATIENCE_S, get, ingress_run

MIB = 1 << 20


def of(memory: dict[str, int]) -> list[Snapshot]:
    """Return a snapshot of processes with this resident memory."""
    processes = [ProcessSnapshot(name, 1, rss) for name, rss in memory.items()]
    return [Snapshot(0.0, 1, processes=processes)]


def test_the_growth_is_that_of_the_last_hour_without_the_first_minute() -> None:
    growth, last = Growth(), None
    for minute in range(90):
        # It doubles at its start, and then grows by 2 MiB a minute.
        rss = (100 if minute == 0 else 200 + 2 * minute) * MIB
        [last] = growth.add(minute * 60.0, of({"server": rss}))
        if minute < 2:
            assert last["bytes_per_h"] is None
    assert last is not None
    assert last["bytes_per_h"] == pytest.approx(120 * MIB)
    [problem] = problems_of({}, [], [], [last])
    assert problem["level"] == "warn"
    assert problem["text"].startswith("the memory of server grows by 120 MiB an hour, and is 378 ")
    assert problems_of({}, [], [], [{**last, "bytes_per_h": 60.0 * MIB}]) == []


def test_a_process_that_did_not_answer_for_a_while_has_its_growth_since_its_first_look() -> None:
    growth = Growth()
    growth.add(0.0, of({"server": MIB, "worker-1": MIB}))
    for minute in range(1, 4):
        growth.add(minute * 60.0, of({"server": MIB}))
    last = growth.add(200.0, of({"server": MIB, "worker-1": 2 * MIB}))
    found = {each["process"]: each for each in last}

    assert found["worker-1"]["bytes_per_h"] == pytest.approx(18 * MIB)


def test_the_line_and_the_type_that_grow_are_named() -> None:
    kept: list[object] = []
    is_over = threading.Event()

    class Leaked:
        def __init__(self, data: bytearray) -> None:
            self.data = data

    def leak() -> None:
        while not is_over.wait(0.001):
            kept.append(Leaked(bytearray(10_000)))  # it leaks

    thread = threading.Thread(target=leak)
    thread.start()
    try:
        found = memory_of("server", 0.3)
    finally:
        is_over.set()
        thread.join(PATIENCE_S)

    first = found["lines"][0]
    assert (first["file"], first["source"]) == (
        __file__,
        "kept.append(Leaked(bytearray(10_000)))  # it leaks",
    )
    assert first["bytes"] > 10_000
    assert any(each["type"].endswith("Leaked") for each in found["types"])


APP = """
import asyncio
import ingress as serve

KEPT = []

@serve.deployment(isolation=ISOLATION)
class Model:
    async def __call__(self, request) -> str:
        asyncio.get_running_loop().create_task(leak())
        return "it leaks from now on"

async def leak():
    while True:
        KEPT.append(bytearray(10_000))
        await asyncio.sleep(0.001)

app = Model.bind()
"""


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")
@pytest.mark.parametrize(
    ("isolation", "name"), [("thread", "server"), ("process", "server/default/Model#0")]
)
def test_a_leak_of_a_running_server_ends_at_its_line(
    tmp_path: Path, runtime: Path, isolation: str, name: str
) -> None:
    write_module(tmp_path, "app", APP.replace("ISOLATION", repr(isolation)))
    with ingress_run(tmp_path, "app:app", "--admin", "off") as server:
        server.wait_for("is ready at")
        assert get(server.port, "/").status == 200
        told = run_ingress(tmp_path, "memory", "--seconds", "1", "--json")
        found = {each["process"]: each for each in json.loads(told.stdout)["processes"]}
        text = run_ingress(tmp_path, "memory", "--seconds", "0.5", "--deployment", "Model").stdout
        wrong = run_ingress(tmp_path, "memory", "--seconds", "0")

    first = found[name]["lines"][0]
    assert (Path(first["file"]).name, first["source"]) == (
        "app.py",
        "KEPT.append(bytearray(10_000))",
    )
    assert first["bytes"] > 100_000
    assert " KiB in " in text
    assert "KEPT.append(bytearray(10_000))" in text
    assert ("server " in text) == (isolation == "thread")
    assert wrong.returncode == 2
