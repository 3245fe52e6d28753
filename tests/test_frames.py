"""What a request enters: the frames that a reader follows, and that each request pays for.

A number here is a bound: a change that lowers it lowers the bound too, and one that must raise it
says why. Without a stall watchdog the frames do not depend on the load of the machine, but for a
few that note slow requests.
"""

from __future__ import annotations

import pytest

from benchmarks.frames import count

NOTED = 8
"""Frames that a request may have more on a machine that grows slow, so that each is noted."""


@pytest.mark.parametrize(
    ("name", "flags", "frames", "modules"),
    [
        ("async", "default", 53, 25),
        ("async", "both 0", 48, 25),
        ("def", "default", 69, 27),
        ("stream of 3", "default", 111, 29),
        ("with a handle", "default", 123, 30),
        ("in a process", "default", 79, 28),
        ("in the child", "default", 54, 22),
    ],
)
def test_a_request_enters_no_more_functions_and_modules_than_these(
    name: str, flags: str, frames: int, modules: int
) -> None:
    counted = count(name, flags)

    assert counted.frames <= frames + NOTED, counted.functions
    assert counted.modules <= modules, sorted(counted.functions)
