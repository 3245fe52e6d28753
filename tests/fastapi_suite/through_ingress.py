"""A pytest plugin that serves the apps of another project's tests as deployments.

    --served-by=fastapi   the tests as they are
    --served-by=ingress   a client gets `@serve.deployment @serve.ingress(app)` in place of `app`
    --served-by=borrowed  the same, and user code runs on the event loop of the test

The clients are Starlette's `TestClient` and httpx's `ASGITransport`. An app has one deployment,
however many clients it has. Applications without a lifespan stop after the test, or after the
module that made them.

`--outcomes=FILE` writes the outcome of each test, and which tests ran on trio.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import starlette.testclient

import ingress as serve

ON_TRIO = "on trio"

_applications: dict[int, tuple[Any, Any]] = {}
"""By the id of an app: the app, which keeps the id, and its application."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--served-by", choices=("fastapi", "ingress", "borrowed"), default="fastapi")
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    _note_trio_clients()
    served_by = config.getoption("--served-by")
    if served_by != "fastapi":
        _replace_apps(starlette.testclient.TestClient)
        for each in _transports():
            _replace_apps(each)
            if served_by == "borrowed":
                os.environ["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] = "0"
                _start_with_client(each)
        # The tests count log records and lines of standard error.
        logging.getLogger("ingress").setLevel(logging.ERROR)
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    params = getattr(getattr(item, "callspec", None), "params", {})
    backend = params.get("anyio_backend")
    _Current.ran_on_trio = "trio" in (backend[0] if isinstance(backend, tuple) else str(backend))
    try:
        return (yield)
    finally:
        if _Current.ran_on_trio:
            item.user_properties.append((ON_TRIO, True))


@pytest.fixture(autouse=True)
def _stop_applications_of_test() -> Iterator[None]:
    before = set(_applications)
    yield
    for key in _applications.keys() - before:
        _stop(_applications.pop(key)[1])


@pytest.fixture(autouse=True, scope="module")
def _stop_applications_of_module() -> Iterator[None]:
    yield
    for _, application in list(_applications.values()):
        _stop(application)


class _Current:
    ran_on_trio = False


class _Outcomes:
    """The outcomes of a run, by test. Owned by the process that reports."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self._outcomes.setdefault(report.nodeid, {"outcome": report.outcome, "why": ""})
        if known["outcome"] != "failed":
            known["outcome"] = report.outcome
            if report.failed:
                known["why"] = _last_line(report.longreprtext)
        if (ON_TRIO, True) in report.user_properties:
            known["trio"] = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            why = _last_line(report.longreprtext)
            self._outcomes[report.nodeid] = {"outcome": "failed", "why": why}

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._outcomes, indent=1))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E  ")] or [text]
    return lines[0].removeprefix("E").strip()[:300]


def _transports() -> Iterator[Any]:
    for name in ("httpx", "httpx2"):
        yield pytest.importorskip(name).ASGITransport


def _note_trio_clients() -> None:
    made = starlette.testclient.TestClient.__init__

    def init(self: Any, app: Any, *args: Any, **kwargs: Any) -> None:
        made(self, app, *args, **kwargs)
        if self.async_backend["backend"] == "trio":
            _Current.ran_on_trio = True

    starlette.testclient.TestClient.__init__ = init  # type: ignore[method-assign]


def _replace_apps(client: Any) -> None:
    made = client.__init__

    def init(self: Any, app: Any, *args: Any, **kwargs: Any) -> None:
        made(self, _application(app), *args, **kwargs)

    client.__init__ = init


def _start_with_client(transport: Any) -> None:
    """Start the application with its client: then its lifespan lends it the loop of the test."""

    async def enter(self: Any) -> Any:
        self.running = self.app.lifespan()
        await self.running.__aenter__()
        return self

    async def leave(self: Any, *error: Any) -> None:
        await self.running.__aexit__(*error)

    transport.__aenter__, transport.__aexit__ = enter, leave


def _application(app: Any) -> Any:
    known = _applications.get(id(app))
    if known is None:
        application = serve.deployment(serve.ingress(app)()).bind()
        known = _applications[id(app)] = app, application
    return known[1]


def _stop(application: Any) -> None:
    if application._hosted is not None:
        asyncio.run(application.aclose())
