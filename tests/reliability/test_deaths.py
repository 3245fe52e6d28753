"""A server at twice its load, with deadlines and clients that disconnect, does not die."""

from __future__ import annotations

import os

import pytest

from tests.reliability.deadline_load import attack
from tests.reliability.figures import Figures
from tests.servers import ROUNDS

REQUESTS = int(os.environ.get("INGRESS_RELIABILITY_REQUESTS", "100_000" if ROUNDS else "3_000"))


@pytest.mark.reliability("E11")
@pytest.mark.timeout(60 + REQUESTS / 200)
def test_no_server_dies_of_deadlines_and_of_clients_that_leave(figures: Figures) -> None:
    outcome = attack(REQUESTS)
    print(outcome)

    figures.note("requests", sum(outcome.became.values()))
    figures.at_most("deaths", len(outcome.deaths), 0)
    assert outcome.became["200"]
    assert outcome.became["left"]
    assert not outcome.became["no answer"]
    assert not outcome.became["cut"]
