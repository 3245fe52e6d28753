"""The usual policy: of two replicas drawn at random, the less loaded is taken."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.serving.replicas.choosing import TwoChoices

CHOICES = TwoChoices()
DRAWS = 60  # of two candidates, in either order: one that is never drawn by then has 1 in 2 ** 60


@dataclass(eq=False)
class Replica:
    """A candidate, as the router shows it to the policy."""

    ongoing: int = 0
    model_ids: frozenset[str] = frozenset()
    requested: dict[str, int] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    state = random.getstate()
    random.seed(7)
    yield
    random.setstate(state)


def of_loads(*loads: int) -> list[Replica]:
    return [Replica(load) for load in loads]


def taken(
    candidates: list[Replica], awake: Replica | None = None, draws: int = DRAWS
) -> Counter[int]:
    """Return how often each candidate, by its index, is taken."""
    return Counter(candidates.index(CHOICES.choose(candidates, awake)) for _ in range(draws))


loads = st.integers(0, 4)


@given(loads=st.lists(loads, min_size=2, max_size=6).filter(lambda each: len({*each}) == len(each)))
def test_the_most_loaded_of_all_is_never_taken_and_all_others_are(loads: list[int]) -> None:
    candidates = of_loads(*loads)
    others = {index for index, load in enumerate(loads) if load < max(loads)}

    assert taken(candidates, draws=300).keys() == others


@given(loads=st.lists(loads, min_size=1, max_size=6), index=st.integers(0, 5))
def test_the_candidate_at_work_is_one_of_the_two_and_wins_a_tie(
    loads: list[int], index: int
) -> None:
    candidates = of_loads(*loads)
    awake = candidates[index % len(candidates)]
    others = [each for each in candidates if each is not awake]
    less = {candidates.index(each) for each in others if each.ongoing < awake.ongoing}
    may_win = len(less) < len(others) or not others

    found = taken(candidates, awake, draws=300).keys()

    assert found == less | ({candidates.index(awake)} if may_win else set())


def test_a_single_candidate_is_taken() -> None:
    assert taken(of_loads(3)) == {0: DRAWS}


@pytest.mark.parametrize(
    ("loads", "shares"),
    [
        pytest.param((1, 1, 1), (2, 2, 2), id="equal"),
        pytest.param((0, 1, 2), (4, 2, 0), id="rising"),
        pytest.param((2, 1, 0), (0, 2, 4), id="falling"),
        pytest.param((1, 0, 1), (1, 4, 1), id="one-less"),
    ],
)
def test_every_pair_is_drawn_equally_often(loads: tuple[int, ...], shares: tuple[int, ...]) -> None:
    found = taken(of_loads(*loads), draws=6_000)

    assert [found[index] / 1_000 for index in range(3)] == pytest.approx(shares, abs=0.15)


# Models.


def chosen(candidates: list[Replica]) -> set[int]:
    """Return the indices of the candidates that are taken for the model `m`."""
    return {candidates.index(CHOICES.choose_for_model(candidates, "m")) for _ in range(DRAWS)}


NONE = frozenset[str]()
M = frozenset("m")


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([Replica(9, M), Replica(0)], {0}, id="has-the-model"),
        pytest.param([Replica(9, NONE, {"m": 1}), Replica(0)], {0}, id="will-have-it"),
        pytest.param([Replica(9, M), Replica(9, NONE, {"m": 1}), Replica(0)], {0, 1}, id="either"),
        pytest.param([Replica(1, M), Replica(2, M), Replica(0)], {0}, id="the-less-loaded-of-them"),
        pytest.param([Replica(9), Replica(0, frozenset("a"))], {0}, id="has-fewer-models"),
        pytest.param([Replica(9), Replica(0, NONE, {"a": 1})], {0}, id="will-have-fewer"),
        pytest.param(
            [Replica(9, frozenset("a"), {"a": 1}), Replica(0, frozenset("ab"))],
            {0},
            id="a-requested-model-that-is-there-counts-once",
        ),
        pytest.param(
            [Replica(9, frozenset("ab"), {"a": 1}), Replica(0, frozenset("abc"), {})],
            {0},
            id="all-models-count",
        ),
        pytest.param(
            [Replica(1, frozenset("a")), Replica(0, NONE, {"b": 1}), Replica(0, frozenset("cd"))],
            {1},
            id="the-less-loaded-of-those-with-the-fewest",
        ),
    ],
)
def test_a_model_goes_to_replicas_that_have_it_else_to_those_with_the_fewest(
    candidates: list[Replica], expected: set[int]
) -> None:
    assert chosen(candidates) == expected
