"""A pytest plugin that serves the apps of another project's tests as deployments.

    --served-by=itself    the tests as they are
    --served-by=ingress   a client gets `@serve.deployment @serve.ingress(app)` in place of `app`
    --served-by=borrowed  the same, and user code runs on the event loop of the test

The clients are Starlette's `TestClient` and httpx's `ASGITransport`. An app has one deployment,
however many clients it has. Applications without a lifespan stop after the test, or after the
module that made them. Tests on trio do not run: an application needs asyncio.

`--outcomes=FILE` writes the outcome of each test.
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
from starlette import testclient
from starlette.applications import Starlette
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

import ingress as serve

_applications: dict[int, tuple[Any, Any]] = {}
"""By the id of an app: the app, which keeps the id, and its application."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--served-by", choices=("itself", "ingress", "borrowed"), default="itself")
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    served_by = config.getoption("--served-by")
    if served_by != "itself":
        _replace_apps(testclient.TestClient)
        _note_lifespans()
        for each in _transports():
            _replace_apps(each)
            if served_by == "borrowed":
                os.environ["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] = "0"
                _start_with_client(each)
        # The tests count log records and lines of standard error.
        logging.getLogger("ingress").setLevel(logging.ERROR)
    if config.getoption("--outcomes") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_trio = [each for each in items if _is_on_trio(each)]
    config.hook.pytest_deselected(items=on_trio)
    items[:] = [each for each in items if each not in on_trio]


def _is_on_trio(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    backends = (params.get(name) for name in ("anyio_backend", "backend"))
    return any((each[0] if isinstance(each, tuple) else each) == "trio" for each in backends)


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


def _replace_apps(client: Any) -> None:
    made = client.__init__

    def init(self: Any, app: Any, *args: Any, **kwargs: Any) -> None:
        made(self, _application(app), *args, **kwargs)

    client.__init__ = init


class _Raw:
    """An ASGI app that is no Starlette, as `TestClient` calls it.

    It may be a class or an ASGI 2 app, and has a lifespan only if the client is in a `with`. A
    replica has one always, which the apps of many tests answer as if it were a request.
    """

    def __init__(self, app: Any) -> None:
        self.app = app if testclient._is_asgi3(app) else testclient._WrapASGI2(app)
        self.has_lifespan = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" or self.has_lifespan:
            await self.app(scope, receive, send)


def _note_lifespans() -> None:
    entered = testclient.TestClient.__enter__

    def enter(self: Any) -> Any:
        app = self.app.deployment.func_or_class.__ingress_spec__.app
        if isinstance(app, _Raw):
            app.has_lifespan = True
        return entered(self)

    testclient.TestClient.__enter__ = enter  # type: ignore[method-assign]


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
        served = app if isinstance(app, (Starlette, Router)) else _Raw(app)
        application = serve.deployment(serve.ingress(served)()).bind()
        known = _applications[id(app)] = app, application
    return known[1]


def _stop(application: Any) -> None:
    if application._hosted is not None:
        asyncio.run(application.aclose())
