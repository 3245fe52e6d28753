"""The artefacts: FastAPI's tests whose way of looking, not the behaviour, fails on a deployment.

`artefacts.toml` has them in groups, with a reason and a check for each group. A check is a test
here that looks at the same behaviour in another way, or `BORROWED`: the test itself passes if user
code runs on the event loop of the test, as `RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0` has it.
A group that `counts` explains differences, which count as failures nevertheless.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

BORROWED = "on the event loop of the test"
MOST = 80


@dataclass(frozen=True, slots=True)
class Artefact:
    """The reason and the check of one test of FastAPI's."""

    reason: str
    check: str
    counts: bool


def artefacts() -> dict[str, Artefact]:
    """Return the artefacts by the ids of their tests."""
    groups = tomllib.loads(Path(__file__).with_name("artefacts.toml").read_text())["group"]
    return {
        test: Artefact(" ".join(each["reason"].split()), each["check"], each.get("counts", False))
        for each in groups
        for test in each["tests"]
    }
