"""Random applications answer as plain FastAPI does: `tests/differential`."""

from __future__ import annotations

import pytest

from tests.differential.compare import SECRET, compare, differences
from tests.differential.mutants import MUTANTS, Mutant, programs_until_found
from tests.differential.programs import program

FLAGS = ["011", "111", "001", "000"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flags", FLAGS)
def test_random_applications_answer_as_plain_fastapi(flags: str) -> None:
    told: list[str] = []
    first = FLAGS.index(flags) * 50

    bad, refused = compare(range(first, first + 50), [flags], report=told.append)

    assert not bad, "\n".join(told)
    assert sum(refused.values()) <= 5, refused  # most of those plain FastAPI refuses, too


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.__name__)
def test_each_old_defect_is_found_if_it_is_put_back(mutant: Mutant) -> None:
    assert programs_until_found(mutant, 2000) is not None


def test_an_open_guard_and_an_instance_in_an_answer_are_named() -> None:
    plain = [["get /", [[401, "", []], []]], ["get /who", [[200, '"x"', []], []]]]
    ours = [["get /", [[200, "", []], []]], ["get /who", [[200, f'"{SECRET}-..."', []], []]]]

    leak, is_open, other = differences(ours, plain)

    assert leak.startswith("LEAK")
    assert is_open.startswith("OPEN get /")
    assert other.startswith("get /who")


def test_a_program_is_the_same_for_the_same_seed() -> None:
    assert program(7).text(plain=False) == program(7).text(plain=False)
    assert program(7).text(plain=False) != program(8).text(plain=False)
