"""`ingress explain`: each row names the thread its code then runs on."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI

import ingress as serve
from app_examples import slow_server
from ingress.execution import code_of
from ingress.inspection import Explanation, Row, explain
from ingress.settings import SYNC_IN_THREADPOOL, USER_CODE_IN_SEPARATE_THREAD, Settings
from tests import explain_app
from tests.conformance.observe import TIMEOUT_S, Served, served
from tests.servers import INGRESS, PATIENCE_S, ROOT, environment, write_module
from tests.test_app_examples import EXAMPLES, application

pytestmark = [
    pytest.mark.filterwarnings("ignore::ingress.exceptions.SyncMethodOnEventLoopWarning"),
    pytest.mark.filterwarnings("ignore:max_concurrent_queries is deprecated:DeprecationWarning"),
]


class Watch:
    """Notes the threads that code runs on, those started while it is on included."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self._wanted = {code for row in rows if (code := code_of_row(row)) is not None}
        self.seen: dict[CodeType, set[str]] = {code: set() for code in self._wanted}

    def __enter__(self) -> Watch:
        threading.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in self._wanted:
            is_on_loop = asyncio._get_running_loop() is not None
            thread = re.sub(r"\d+", "N", threading.current_thread().name)
            self.seen[frame.f_code].add(f"{'loop' if is_on_loop else 'thread'} {thread}")


def code_of_row(row: Row) -> CodeType | None:
    func: Any = explain_app.SpyPath.__fspath__ if row.what == "file" else row.func
    return code_of(func) or code_of(getattr(func, "__init__", func))


def check(explanation: Explanation, watch: Watch, serving: str) -> list[str]:
    """Assert that each row names where its code ran; return the rows whose code did not run."""
    flag = explanation.settings.run_sync_in_threadpool
    expected: dict[CodeType, set[str]] = {}
    unseen = []
    for row in explanation.rows:
        code, place = code_of_row(row), row.places[flag]
        if code is None or not watch.seen[code]:
            unseen.append(f"{row.what}: {row.name}")
            continue
        thread = serving if place.thread == "the server's" else f"{place.thread}"
        where = "loop" if place.where == "event loop" else "thread"
        # `a or b` where one function is used in two ways.
        expected.setdefault(code, set()).add(f"{where} {thread}")
    assert {code: places for code, places in watch.seen.items() if places} == expected
    return unseen


def serving_loop(it: Served) -> str:
    return re.sub(r"\d+", "N", it.loop.removeprefix("loop "))


@pytest.mark.parametrize("user", ["1", "0"], ids=["own loop", "the server's loop"])
@pytest.mark.parametrize("sync", ["0", "1"], ids=["flag 0", "flag 1"])
def test_every_kind_of_row_names_the_thread_it_runs_on(
    sync: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, sync)
    monkeypatch.setenv(USER_CODE_IN_SEPARATE_THREAD, user)
    explanation = explain(explain_app.app, Settings.from_environment())

    with Watch(explanation.rows) as watch:
        with served(explain_app.app) as it:
            explain_app.call_everything(it)
            serving = serving_loop(it)

    unseen = check(explanation, watch, serving)
    assert unseen == ["background task: task"]


def drive(name: str, it: Served) -> None:
    """Send an example the requests that its docstring shows."""
    if name == "websocket_echo":
        assert it.get().status_code == 200
        with it.client.websocket_connect("/echo") as socket:  # type: ignore[union-attr]
            socket.send_text("a")
            assert socket.receive_text() == "1: a"
    elif name == "multiplexed":
        assert it.get("/loaded").status_code == 200
        for model_id in ("de", "en", "fr"):
            headers = {"serve_multiplexed_model_id": model_id}
            assert it.client.get("/greet?name=Ada", headers=headers).status_code == 200
    elif name in ("model", "request_batching"):
        assert it.handle.remote(1).result(timeout_s=TIMEOUT_S) == 2
    else:
        docstring = import_module(f"app_examples.{name}").__doc__ or ""
        for path in re.findall(r"http://127\.0\.0\.1:8000(/[^\s']*)(?<!\.)", docstring):
            assert it.get(path).status_code == 200


@pytest.mark.parametrize("sync", ["0", "1"], ids=["flag 0", "flag 1"])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "slow_server"])
def test_every_row_of_an_example_names_the_thread_it_runs_on(
    name: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SYNC_IN_THREADPOOL, sync)
    app = application(name)
    explanation = explain(app, Settings.from_environment())
    sleep = asyncio.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, result=None: sleep(0, result))

    with slow_server.running(wait=lambda: None) as slow, Watch(explanation.rows) as watch:
        monkeypatch.setenv("SLOW_SERVER_URL", slow.url)
        with served(app) as it:
            drive(name, it)

    assert check(explanation, watch, "") == []
