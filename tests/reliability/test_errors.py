"""The rate of errors that a server sustains, and its connections meanwhile."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from benchmarks.open_loop import CUT, closed_loop
from tests.programs import INGRESS, UVICORN, environment, process, write_module
from tests.reliability.figures import Figures
from tests.servers import get

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAIRS = 5
LASTS_S = 2.0
CONNECTIONS = 32

FAILING = """
from fastapi import FastAPI

import ingress as serve

plain = FastAPI()
api = FastAPI()


@plain.get("/boom")
async def boom() -> None:
    raise ValueError("it failed")


@serve.deployment
@serve.ingress(api)
class Failing:
    @api.get("/boom")
    async def boom(self) -> None:
        raise ValueError("it failed")


app = Failing.bind()
"""


@pytest.mark.reliability("B06")
def test_twice_as_many_errors_a_second_as_plain_fastapi_and_no_connection_is_lost(
    tmp_path: Path, figures: Figures
) -> None:
    """Both servers log to files, with one line for each request."""
    write_module(tmp_path, "failing", FAILING)
    environ = environment(tmp_path)
    ours = [*INGRESS, "run", "failing:app", "--port", "0"]
    with (
        process([*UVICORN, "failing:plain"], tmp_path, environ) as plain,
        process(ours, tmp_path, environ) as server,
    ):
        pairs, cut = [], 0
        for each in (plain, server):
            assert get(each.port, "/boom").status == 500
        for _ in range(PAIRS):
            loads = [
                closed_loop(each.port, "/boom", CONNECTIONS, LASTS_S) for each in (plain, server)
            ]
            pairs.append([load.statuses[500] / LASTS_S for load in loads])
            cut += loads[1].statuses[CUT]
            print("errors a second: plain {:.0f}, ours {:.0f}".format(*pairs[-1]))

    plain_rate, rate = (median(each) for each in zip(*pairs, strict=True))
    figures.note("errors a second", rate, plain=plain_rate)
    figures.at_least("errors a second / plain", median(b / a for a, b in pairs), 2.0)
    figures.at_most("connections lost", cut, 0)
