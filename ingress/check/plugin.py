"""The pytest plugin of `ingress check --run`: rehearse instances that stop, and write the outcome.

    pytest -p ingress.check.plugin --ingress-rehearsal FOLDER

FOLDER has `watched.json`. Each process that runs tests adds an `outcome-PID.json`.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from ingress import api
from ingress.check.rehearsal import Outcome, RehearsingUserCode, WatchedCalls
from ingress.engines import local_engine

if TYPE_CHECKING:
    import pytest

WATCHED = "watched.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ingress").addoption(
        "--ingress-rehearsal", metavar="FOLDER", help="used by `ingress check --run`"
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--ingress-rehearsal")
    if folder is not None:
        config.pluginmanager.register(Rehearsals(Path(folder)), "ingress-rehearsals")


class Written(TypedDict):
    """The writes of one line to one attribute, as a process that runs tests reports them."""

    path: str
    line: int
    attribute: str
    count: int
    lost: int
    threads: int


class Raised(TypedDict):
    """An error that a line raised."""

    path: str
    line: int
    text: str


class Rehearsals:
    """The plugin while tests run. One per process that runs tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watched = tuple(
            WatchedCalls(tuple(each["functions"]), each["attribute"])
            for each in json.loads((folder / WATCHED).read_text())
        )
        self._outcome = Outcome()
        self._in_use = ExitStack()
        user_code = partial(RehearsingUserCode, self._watched, self._outcome)
        self._in_use.enter_context(
            local_engine().instrumented(lambda made: replace(made, user_code=user_code))
        )

    def pytest_unconfigure(self) -> None:
        api.shutdown()  # instances that the tests left running are rehearsed now
        self._in_use.close()
        writes: list[Written] = [
            {
                "path": path,
                "line": line,
                "attribute": attribute,
                "count": seen.count,
                "lost": seen.lost,
                "threads": len(seen.threads),
            }
            for (path, line, attribute), seen in self._outcome.writes.items()
        ]
        errors: list[Raised] = [
            {"path": path, "line": line, "text": error}
            for (path, line), error in self._outcome.errors.items()
        ]
        text = json.dumps({"writes": writes, "errors": errors})
        (self._folder / f"outcome-{os.getpid()}.json").write_text(text)
