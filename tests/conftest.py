"""Fixtures for every test, and a check that no test leaves anything behind."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from fastapi import FastAPI

import ingress as serve
from ingress import testing
from ingress.core.base.settings import (
    ROUTER_IN_SEPARATE_LOOP,
    SYNC_IN_THREADPOOL,
    USER_CODE_IN_SEPARATE_THREAD,
    Settings,
)
from tests import long
from tests.fakes import Gate
from tests.reliability.figures import Figures, ids_of, write
from tests.servers import ROUNDS, set_flags

CALL_FAILED = pytest.StashKey[bool]()
FIGURES = pytest.StashKey[Figures]()


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The event loop of `async` tests. A test on uvloop asks for it:

    `@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])`
    """
    return request.param


# The default, each flag alone, and both loops shared; `make test-reliability` runs all eight.
FLAGS = ["011", "111", "001", "010", "000"]


@pytest.fixture(
    params=itertools.product("01", repeat=3) if ROUNDS else FLAGS,
    ids=lambda values: "sync{}-user{}-router{}".format(*values),
)
def flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Set combinations of the flags in the environment; return the settings.

    The id's digits are sync in threadpool, user code in separate thread, router in separate loop.
    """
    names = (SYNC_IN_THREADPOOL, USER_CODE_IN_SEPARATE_THREAD, ROUTER_IN_SEPARATE_LOOP)
    for name, value in zip(names, request.param, strict=True):
        monkeypatch.setenv(name, value)
    return Settings.from_environment()


@pytest.fixture(params=["0", "1"], ids=["separate0", "separate1"])
def separate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the flags of user code and of the router, without and with loops of their own.

    End all applications after the test.
    """
    set_flags(monkeypatch, request.param)
    yield request.param
    serve.shutdown()


@pytest.fixture
def threadpool(separate: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run sync user code in threads, at both values of `separate`."""
    monkeypatch.setenv(SYNC_IN_THREADPOOL, "1")
    return separate


@pytest.fixture(autouse=True)
def blocking_call_check() -> Iterator[BlockBuster]:
    """Fail a test if `ingress` makes a blocking call on an event loop; user code may block it.

    Locks are exempt: `ingress` holds its locks for a few lines of arithmetic only.
    """
    with blockbuster_ctx(scanned_modules=["ingress"]) as checks:
        for name in ("threading.Lock.acquire", "threading.Lock.acquire_lock"):
            checks.functions.pop(name).deactivate()
        for check in checks.functions.values():
            check.can_block_in(
                "ingress/core/execution/execution.py",
                {"run", "run_part", "stream", "iterate", "call_inline"},
            )
            check.can_block_in("ingress/app/asgi/replica_app.py", {"__call__", "_run"})
            check.can_block_in("ingress/serving/http/server.py", {"_start"})  # imports uvicorn
            check.can_block_in("ingress/app/declaration/build.py", {"place_of"})  # for a message
            check.can_block_in("ingress/serving/replicas/user_code.py", {"_plain"})
            check.can_block_in("ingress/testing/leaks.py", {"_descriptors"})
            check.can_block_in("ingress/core/calls/loops.py", {"reserve_descriptors"})  # not a disk
        yield checks


@pytest.fixture(autouse=True)
def stalls_are_quiet() -> Iterator[None]:
    """Keep the watchdog's log records out of all tests but its own.

    The watchdog runs in all tests; a busy machine, or user code that blocks on purpose, makes it
    log.
    """
    logger = logging.getLogger("ingress")
    logger.addFilter(_is_no_stall)
    yield
    logger.removeFilter(_is_no_stall)


@pytest.fixture(autouse=True)
def uvicorn_is_quiet() -> Iterator[None]:
    """Restore the levels of uvicorn's loggers, which each of its servers may set."""
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")]
    levels = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


def _is_no_stall(record: logging.LogRecord) -> bool:
    return not hasattr(record, "stall")


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """Make threads switch after every few bytecodes, so that races happen."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def shutdown() -> Iterator[None]:
    """End all applications after the test."""
    yield
    serve.shutdown()


@pytest.fixture
def app() -> FastAPI:
    """Return an app without routes."""
    return FastAPI()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.go.count_down()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Record figures of a test for docs/reliability.md; one that misses its bar fails the test."""
    found = request.node.stash[FIGURES] = Figures(request.node)
    return found


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let `-k A01` select the tests that carry that id."""
    item.extra_keyword_matches.update(ids_of(item))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests to `make test-reliability`, and mark those that are listed as long."""
    names = long.listed()
    for item in items:
        if long.is_listed(item.nodeid, names):
            item.add_marker(pytest.mark.long)
    slow = [item for item in items if item.get_closest_marker("slow") and not ROUNDS]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    yield
    if (found := item.stash.get(FIGURES, None)) and found.missed:
        pytest.fail("\n".join(found.missed), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[CALL_FAILED] = report.failed
    if report.when == "call" or report.failed:
        outcome = "failed as known" if hasattr(report, "wasxfail") else report.outcome
        write(item, ids_of(item), {"outcome": outcome, "seconds": report.duration})
    return report


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a file descriptor, a task or a slot behind.

    An open event loop shows as its descriptors. A test that failed is not checked, and not
    delayed.
    """
    with testing.leak_check() as check:
        yield
        if request.node.stash.get(CALL_FAILED, True):
            check.forgive()
