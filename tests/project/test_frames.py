"""What a request enters: the frames that a reader follows, and that each request pays for.

A number here is a bound: a change that lowers it lowers the bound too, and one that must raise it
says why: the events of a reply are frames, and a stream under `ingress run` begins without a task
and goes on in one. Without a stall watchdog the frames do not depend on the load of the machine,
but for a few that note slow requests.
"""

from __future__ import annotations

import pytest

from benchmarks.frames import count

NOTED, NOTED_IN = 8, 3
"""Frames that a request may have more on a machine that grows slow, so that each is noted, and
their modules: `notable` and `tracing`."""


@pytest.mark.parametrize(
    ("name", "flags", "frames", "modules"),
    [
        ("async", "default", 60, 24),
        pytest.param("async", "both 0", 59, 24, marks=pytest.mark.thorough),
        ("def", "default", 76, 26),
        pytest.param("stream of 3", "default", 122, 28, marks=pytest.mark.thorough),
        ("with a handle", "default", 131, 29),
        ("in a process", "default", 93, 22),
        pytest.param("in the child", "default", 57, 17, marks=pytest.mark.thorough),
        ("async", "ingress run", 58, 22),
        pytest.param("def", "ingress run", 76, 25, marks=pytest.mark.thorough),
        pytest.param("stream of 3", "ingress run", 138, 31, marks=pytest.mark.thorough),
    ],
)
def test_a_request_enters_no_more_functions_and_modules_than_these(
    name: str, flags: str, frames: int, modules: int
) -> None:
    counted = count(name, flags)

    assert counted.frames <= frames + NOTED, counted.functions
    assert counted.modules <= modules + NOTED_IN, sorted(counted.functions)
