"""`ingress check` without the GIL: what several threads change, at the flags' values."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ingress.core.base import gil
from ingress.core.base.settings import Settings
from tests.checking import checked_as_application, expected, found
from tests.programs import INGRESS, environment

PROGRAM = """
import asyncio
import threading
import ingress as serve

COUNT, SEEN, SAFE, LOCK = 0, {}, 0, threading.Lock()


def counted():
    global COUNT
    COUNT += 1  #: GLOBAL


@serve.deployment(OPTIONS)
class A:
    hits = 0

    def __init__(self):
        self.n = 0

    async def on_the_loop(self):
        self.n += 1
        counted()
        if "key" not in SEEN:
            SEEN["key"] = await asyncio.sleep(0, 1)  #: CHECKED
        A.hits += 1  #: GLOBAL

    async def under_a_lock(self):
        global SAFE
        with LOCK:
            SAFE += 1

    def in_a_thread(self):
        self.n += 1  #: OWN


a = A.bind()
"""
BETWEEN = {"GLOBAL": "IG101", "CHECKED": "IG102"}
THREADED = {"OWN": "IG101"}


@pytest.mark.parametrize(
    ("options", "settings", "rules"),
    [
        ("num_replicas=2", Settings(), BETWEEN),
        ("autoscaling_config={'min_replicas': 1, 'max_replicas': 2}", Settings(), BETWEEN),
        ("num_replicas=2", Settings(run_sync_in_threadpool=True), BETWEEN | THREADED),
        ("num_replicas=1", Settings(run_sync_in_threadpool=True), THREADED),
        ("num_replicas=1", Settings(), {}),
        ("num_replicas=2, isolation='process'", Settings(), {}),
        ("num_replicas=2, loop='shared'", Settings(), {}),
        ("num_replicas=2", Settings(run_user_code_in_separate_thread=False), {}),
    ],
)
def test_what_threads_change_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: str,
    settings: Settings,
    rules: dict[str, str],
) -> None:
    program = PROGRAM.replace("OPTIONS", options)
    report = checked_as_application(tmp_path, monkeypatch, program, settings, gil_is_on=False)

    races = [each for each in found(report) if each[1] in ("IG101", "IG102")]
    assert races == [(line, rules[each]) for line, each in expected(program) if each in rules]


def test_with_the_gil_they_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAM.replace("OPTIONS", "num_replicas=2")
    settings = Settings(run_sync_in_threadpool=True)
    assert found(checked_as_application(tmp_path, monkeypatch, program, settings)) == []


def test_a_finding_names_the_state_and_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = PROGRAM.replace("OPTIONS", "num_replicas=2")
    report = checked_as_application(tmp_path, monkeypatch, program, Settings(), gil_is_on=False)
    (message,) = [each.message for each in report.findings if "`COUNT`" in each.message]
    assert message == (
        "`COUNT` is read and written without a lock in counted; the replicas of A run it, each in "
        "a thread"
    )


def test_the_command_asks_this_python(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(PROGRAM.replace("OPTIONS", "num_replicas=2"))
    done = subprocess.run(
        [*INGRESS, "check", "users:a", "--json"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    rules = {each["rule"] for each in json.loads(done.stdout)["findings"]}
    assert rules == (set() if gil.is_on() else {"IG101", "IG102"})
