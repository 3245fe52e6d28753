"""The tests of a project that pass plain and fail through a deployment, with reasons.

`fastapi.toml` and `starlette.toml` have them in groups, each with a reason, a kind and a check:

    artefact    the behaviour is the same, the test cannot see it    a test here that sees it
    deviation   the behaviour differs                                its row in docs/deviations.md
    defect      the behaviour differs, and should not                none

The check of an artefact may be `BORROWED`: the test passes if user code runs on its event loop, as
with `RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0`. Tests of a group that `races` pass sometimes.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

BORROWED = "on the event loop of the test"
Kind = Literal["artefact", "deviation", "defect"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Difference:
    """The reason why one test fails through a deployment."""

    kind: Kind
    reason: str
    check: str = ""
    races: bool = False


def differences(project: str) -> dict[str, Difference]:
    """Return a project's differences by the ids of their tests."""
    listed: dict[str, Difference] = {}
    groups = tomllib.loads(Path(__file__).with_name(f"{project}.toml").read_text())
    for group in groups.get("group", ()):
        tests = group.pop("tests")
        reason = " ".join(group.pop("reason").split())
        listed.update(dict.fromkeys(tests, Difference(reason=reason, **group)))
    return listed
