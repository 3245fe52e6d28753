"""A server at twice its load, with deadlines and clients that disconnect, does not die."""

from __future__ import annotations

import os

import pytest

from tests.reliability.deadline_load import FLAGS, attack
from tests.reliability.figures import Figures
from tests.servers import ROUNDS

REQUESTS = int(os.environ.get("INGRESS_RELIABILITY_REQUESTS", "100_000" if ROUNDS else "2_500"))

# Each takes four seconds of a processor; the others come with `make test-all`.
EACH = [
    pytest.param(each, marks=[] if each in ("000", "111") else pytest.mark.thorough)
    for each in FLAGS
]


@pytest.mark.reliability("E11")
@pytest.mark.timeout(60 + REQUESTS / 200)
@pytest.mark.parametrize("flags", EACH)
def test_no_server_dies_of_deadlines_and_of_clients_that_leave(
    figures: Figures, flags: str
) -> None:
    outcome = attack(REQUESTS if flags == "111" else max(REQUESTS // 8, 2_500), flags)
    print(outcome)

    figures.note("requests", sum(outcome.became.values()))
    figures.at_most("deaths", len(outcome.deaths), 0)
    assert outcome.became["200"]
    assert outcome.became["left"]
    figures.at_most("kinds of things left", len(outcome.left), 0)
    assert not outcome.faults
