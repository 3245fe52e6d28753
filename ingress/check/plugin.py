"""The pytest plugin of `ingress check --run`: rehearse instances that stop, and write the outcome.

    pytest -p ingress.check.plugin --ingress-rehearsal FOLDER

FOLDER has `watched.json`. Each process that runs tests adds an `outcome-PID.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ingress import api
from ingress.check.rehearsal import Outcome, RehearsingUserCode, WatchedCalls
from ingress.replicas import replica
from ingress.replicas.user_code import UserCode

WATCHED = "watched.json"

_REPLICA = vars(replica)
"""The namespace in which a new replica looks up `UserCode`."""


def pytest_addoption(parser: Any) -> None:
    parser.getgroup("ingress").addoption(
        "--ingress-rehearsal", metavar="FOLDER", help="used by `ingress check --run`"
    )


def pytest_configure(config: Any) -> None:
    folder = config.getoption("--ingress-rehearsal")
    if folder is not None:
        watched = json.loads(Path(folder, WATCHED).read_text())
        RehearsingUserCode.watched = tuple(
            WatchedCalls(tuple(each["functions"]), each["attribute"]) for each in watched
        )
        RehearsingUserCode.outcome = Outcome()
        _REPLICA["UserCode"] = RehearsingUserCode


def pytest_unconfigure(config: Any) -> None:
    folder = config.getoption("--ingress-rehearsal")
    if folder is None or _REPLICA["UserCode"] is UserCode:
        return
    api.shutdown()  # instances that the tests left running are rehearsed now
    _REPLICA["UserCode"] = UserCode
    outcome = RehearsingUserCode.outcome
    writes = [
        {
            "path": path,
            "line": line,
            "attribute": attribute,
            "count": seen.count,
            "lost": seen.lost,
            "threads": len(seen.threads),
        }
        for (path, line, attribute), seen in outcome.writes.items()
    ]
    errors = [
        {"path": path, "line": line, "text": error}
        for (path, line), error in outcome.errors.items()
    ]
    text = json.dumps({"writes": writes, "errors": errors})
    Path(folder, f"outcome-{os.getpid()}.json").write_text(text)
