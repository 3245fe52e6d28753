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
        pytest.param("async", "both 0", 48, 25, marks=pytest.mark.thorough),
        ("def", "default", 69, 27),
        pytest.param("stream of 3", "default", 111, 29, marks=pytest.mark.thorough),
        ("with a handle", "default", 123, 30),
        ("in a process", "default", 79, 28),
        pytest.param("in the child", "default", 54, 22, marks=pytest.mark.thorough),
    ],
)
def test_a_request_enters_no_more_functions_and_modules_than_these(
    name: str, flags: str, frames: int, modules: int
) -> None:
    counted = count(name, flags)

    assert counted.frames <= frames + NOTED, counted.functions
    assert counted.modules <= modules, sorted(counted.functions)
