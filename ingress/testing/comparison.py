"""The differences between two runs of one test. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ingress.core.execution.execution import ExecutionMode
from ingress.exceptions import SyncMethodOnEventLoopWarning

ON_LOOP = ExecutionMode.EVENT_LOOP.value
_SHOWN = 3
"""Number of answers that are shown per request and run."""


@dataclass(slots=True)
class Run:
    """One run of a test.

    `why` is the last line of its failure. `answers` has, by request, each answer with its count.
    `ran` has, by callable, each place with the largest number of calls at once.
    """

    outcome: str = ""
    why: str = ""
    answers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ran: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    warnings: set[str] = field(default_factory=set)

    def warn(self, category: type[Warning], text: str, path: str, line: int) -> None:
        # The flag's own warning is not a difference: it comes at 0 by design.
        if not issubclass(category, SyncMethodOnEventLoopWarning):
            self.warnings.add(f"{category.__name__}: {text.splitlines()[0]} ({path}:{line})")


@dataclass(frozen=True, slots=True)
class Moved:
    """A `def` that ran on the event loop at 0, and at 1 in `where`, up to `most` calls at once."""

    name: str
    where: str
    most: int


def differences(at_0: Run, at_1: Run) -> dict[str, str]:
    """Return the differences by their subject: the test's outcome, a request, a callable ..."""
    return dict(_differences(at_0, at_1))


def moved(at_0: Run, at_1: Run) -> list[Moved]:
    """Return the callables that the flag has moved, as it is meant to."""
    return [
        Moved(name, where, most)
        for name, places in at_1.ran.items()
        for where, most in places.items()
        if where != ON_LOOP and set(at_0.ran.get(name, ())) == {ON_LOOP}
    ]


def _differences(at_0: Run, at_1: Run) -> Iterator[tuple[str, str]]:
    if at_0.outcome != at_1.outcome:
        yield (
            "outcome",
            "; ".join(
                f"{run.outcome} at {flag}" + (f": {run.why}" if run.why else "")
                for flag, run in enumerate((at_0, at_1))
            ),
        )
    for request in _either(at_0.answers, at_1.answers):
        counts = [Counter(run.answers.get(request, {})) for run in (at_0, at_1)]
        if counts[0] != counts[1]:
            only = (counts[0] - counts[1], counts[1] - counts[0])
            told = "; ".join(f"only at {flag}: {_shown(each)}" for flag, each in enumerate(only))
            yield request, f"{request}: {told}"
    for warning in sorted(at_0.warnings ^ at_1.warnings):
        yield warning, f"only at {int(warning in at_1.warnings)}: {warning}"
    for name in _either(at_0.ran, at_1.ran):
        places = [set(run.ran.get(name, ())) for run in (at_0, at_1)]
        if not all(places):
            yield f"call of {name}", f"{name} was called only at {int(bool(places[1]))}"
        elif places[0] != places[1] and places[0] != {ON_LOOP}:
            at = [" and ".join(sorted(each)) for each in places]
            yield f"place of {name}", f"{name} ran in {at[0]} at 0, in {at[1]} at 1"


def _either(one: Iterable[str], other: Iterable[str]) -> list[str]:
    return sorted({*one, *other})


def _shown(answers: Counter[str]) -> str:
    shown = [
        answer if count == 1 else f"{count} x {answer}"
        for answer, count in sorted(answers.items())[:_SHOWN]
    ]
    more = len(answers) - len(shown)
    return ", ".join(shown + ([f"and {more} others"] if more else [])) or "nothing"
