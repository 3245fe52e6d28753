"""`control.plan`: the decision about replicas, on histories with a clock of their own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from ingress.serving.control.plan import (
    Act,
    ActionKind,
    Desired,
    Fact,
    Observed,
    Phase,
    decide,
    is_blocked,
    replaced_at_once,
    retry_after_s,
)


def serving(*numbers: int, **marks: int | bool) -> list[Fact]:
    return [Fact(number, Phase.SERVING, **marks) for number in numbers]  # type: ignore[arg-type]


def actions(desired: Desired, facts: list[Fact], now: float = 0.0, **more: float) -> list[Act]:
    return decide(desired, Observed(facts, **more), now)  # type: ignore[arg-type]


START = Act(ActionKind.START)


def drop(*numbers: int) -> list[Act]:
    return [Act(ActionKind.DROP, number) for number in numbers]


@pytest.mark.parametrize(
    ("desired", "facts", "expected"),
    [
        (Desired(3), [], [START] * 3),
        (Desired(3, one_first=True), [], [START]),
        (Desired(3, one_first=True), serving(0), [START] * 2),
        (Desired(3), serving(0, 1, 2), []),
        (Desired(1), serving(0, 1, 2), drop(1, 2)),
        (Desired(0), serving(0), drop(0)),
        (Desired(1, version=1), serving(0), [START]),
        (Desired(1, version=1), [*serving(0), Fact(1, Phase.STARTING, 1)], []),
        (Desired(1, version=1), [*serving(0), *serving(1, version=1)], drop(0)),
        (Desired(1, version=1), serving(0, 1), [START]),
        (Desired(5, version=1), serving(0, 1, 2, 3, 4), [START]),
        (Desired(5, version=1, at_once=2), serving(0, 1, 2, 3, 4), [START] * 2),
        (Desired(1, version=2), [Fact(0, Phase.STARTING, 1)], [*drop(0), START]),
        (Desired(1), serving(0, is_ill=True), [START]),
        (Desired(1), [*serving(0, is_ill=True), *serving(1)], drop(0)),
        (Desired(1), serving(0, is_stuck=True), [Act(ActionKind.PARK, 0), START]),
        (Desired(1), serving(0, is_lost=True), [*drop(0), START]),
        (Desired(1), [Fact(0, Phase.PARKED, is_stuck=True), *serving(1)], []),
        (
            Desired(1),
            [Fact(0, Phase.PARKED), *serving(1)],
            [Act(ActionKind.RETURN, 0), *drop(1)],
        ),
        (
            Desired(1),
            [Fact(0, Phase.PARKED, is_stuck=True), *serving(1, is_stuck=True)],
            [Act(ActionKind.PARK, 1)],
        ),
        (Desired(2, config=1), serving(0, 1), [Act(ActionKind.RECONFIGURE, 0)]),
        (Desired(2, config=1), [Fact(0, Phase.AWAY), *serving(1)], []),
        (Desired(1), [Fact(0, Phase.STARTING), Fact(1, Phase.STARTING)], drop(1)),
        (Desired(1), [Fact(0, Phase.LEAVING)], [START]),
        (
            Desired(1),
            [*(Fact(each, Phase.PARKED, is_stuck=True) for each in range(2)), *serving(2)],
            [],
        ),
        (Desired(1), [Fact(0, Phase.AWAY, is_lost=True)], [*drop(0), START]),
        (Desired(1), [Fact(0, Phase.AWAY, is_stuck=True)], [Act(ActionKind.PARK, 0), START]),
        (Desired(1, version=1), [Fact(0, Phase.AWAY)], [START]),
        (Desired(1, version=1), [Fact(0, Phase.AWAY), *serving(1, version=1)], drop(0)),
        (Desired(1), [Fact(0, Phase.AWAY), *serving(1)], drop(0)),
        (Desired(0), [Fact(0, Phase.AWAY)], drop(0)),
        (Desired(2, version=1, at_once=0), [*serving(0), *serving(1, version=1)], []),
        (Desired(2, at_once=0), serving(0), [START]),
    ],
    ids=[
        "start", "the first one alone", "then the others", "all there", "the newest leave", "zero",
        "an update starts one", "and waits for it", "then the old one leaves",
        "also to fewer replicas", "one at a time",
        "or two", "a start of an old version ends", "ill: a new one first", "then it leaves",
        "stuck: out of routing first", "lost", "stuck and replaced", "back: the spare leaves",
        "too many are stuck", "user_config", "one after another", "one start too many",
        "one that leaves does not count", "those that are stuck cost none that serves",
        "away and lost", "away and stuck", "an update does not wait for one that is away",
        "nor keeps it", "nor do fewer replicas", "nor none",
        "before the end none is replaced", "but one that is missing starts",
    ],
)  # fmt: skip
def test_one_decision(desired: Desired, facts: list[Fact], expected: list[Act]) -> None:
    assert actions(desired, facts) == expected


def test_replicas_that_were_left_behind_cost_none_that_serves() -> None:
    assert actions(Desired(1), serving(0), left_behind=2) == []
    assert actions(Desired(1), [], left_behind=1) == [START]
    assert actions(Desired(1), [], left_behind=2) == []


def test_an_update_is_blocked_while_too_many_are_stuck_for_the_replicas_that_are_missing() -> None:
    new = Desired(2, version=1)
    for left_behind, facts, expected in [
        (2, serving(0, 1), False),
        (3, serving(0, 1), True),
        (3, [*serving(0), *serving(1, version=1)], True),
        (3, serving(0, 1, version=1), False),
        (2, [*serving(0, version=1), *serving(1, version=1, is_stuck=True)], True),
    ]:
        assert is_blocked(new, Observed(facts, left_behind)) is expected


def test_failed_starts_make_the_next_one_wait_and_longer_each_time() -> None:
    assert actions(Desired(1), [], now=9.9, retry_at=10.0) == []
    assert actions(Desired(1), [], now=10.0, retry_at=10.0) == [START]
    pauses = [retry_after_s(failures) for failures in range(1, 20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[-1]) == (0.5, 1.0, 60.0)


@pytest.mark.parametrize(
    ("count", "percentage", "surge", "expected"),
    [(1, 0.2, 0, 1), (10, 0.2, 0, 2), (10, 1.0, 0, 10), (10, 1.0, 25, 3), (10, 0.2, 100, 2)],
)
def test_an_update_replaces_as_many_at_a_time_as_the_options_say(
    count: int, percentage: float, surge: float, expected: int
) -> None:
    assert replaced_at_once(count, percentage, surge) == expected


@dataclass
class World:
    """Replicas that follow the decisions, with delays and accidents of its own."""

    chance: random.Random
    desired: Desired = field(default_factory=lambda: Desired(3))
    facts: dict[int, Fact] = field(default_factory=dict)
    next_number: int = 0
    now: float = 0.0
    retry_at: float = 0.0
    busy_until: dict[int, float] = field(default_factory=dict)
    left_behind: int = 0

    def step(self, *, accidents: bool) -> None:
        self.now += self.chance.random()
        self._end_what_is_due()
        if accidents:
            self._have_an_accident()
        before, live_before = self._serving(), self._live()
        observed = Observed([*self.facts.values()], self.left_behind, self.retry_at)
        actions = decide(self.desired, observed, self.now)
        for action in actions:
            self._do(action)
        back = sum(action.kind is ActionKind.RETURN for action in actions)
        assert self._live() <= max(self.desired.count, live_before + back) + self.desired.at_once
        if self._serving() < before and not self._away():
            assert self._serving() >= self.desired.count, "replicas left that were needed"

    def _serving(self) -> int:
        return sum(
            each.phase is Phase.SERVING and not each.is_stuck and not each.is_lost
            for each in self.facts.values()
        )

    def _live(self) -> int:
        phases = [each.phase for each in self.facts.values()]
        return phases.count(Phase.SERVING) + phases.count(Phase.STARTING)

    def _away(self) -> int:
        return sum(each.phase is Phase.AWAY for each in self.facts.values())

    def _do(self, action: Act) -> None:
        number = action.number
        if number is None:
            number, self.next_number = self.next_number, self.next_number + 1
            desired = self.desired
            self.facts[number] = Fact(number, Phase.STARTING, desired.version, desired.config)
        else:
            phase = {
                ActionKind.DROP: Phase.LEAVING,
                ActionKind.PARK: Phase.PARKED,
                ActionKind.RETURN: Phase.SERVING,
                ActionKind.RECONFIGURE: Phase.AWAY,
            }[action.kind]
            assert self.facts[number].phase is not Phase.LEAVING, "it leaves already"
            self.facts[number] = replace(self.facts[number], phase=phase)
        self.busy_until[number] = self.now + 3 * self.chance.random()

    def _end_what_is_due(self) -> None:
        for number, each in list(self.facts.items()):
            if self.busy_until[number] > self.now:
                continue
            if each.phase is Phase.LEAVING:
                del self.facts[number]
            elif each.phase is Phase.STARTING:
                self.facts[number] = replace(each, phase=Phase.SERVING)
            elif each.phase is Phase.AWAY:
                self.facts[number] = replace(each, phase=Phase.SERVING, config=self.desired.config)

    def _have_an_accident(self) -> None:
        kind = self.chance.randrange(13)
        desired = self.desired
        if kind == 0:
            self.desired = replace(desired, count=self.chance.randrange(6))
        elif kind == 1:
            self.desired = replace(desired, version=desired.version + 1)
        elif kind == 2:
            self.desired = replace(desired, config=desired.config + 1)
        elif kind == 3:
            self.retry_at = self.now + 2 * self.chance.random()
        elif kind == 12:
            self.left_behind = self.chance.randrange(4)
        elif self.facts:
            number = self.chance.choice([*self.facts])
            each = self.facts[number]
            if kind == 4:
                self.facts[number] = replace(each, is_ill=not each.is_ill)
            elif kind in (5, 6) and each.phase in (Phase.SERVING, Phase.AWAY, Phase.PARKED):
                self.facts[number] = replace(each, is_stuck=not each.is_stuck)
            elif kind == 7 and each.phase in (Phase.SERVING, Phase.AWAY, Phase.PARKED):
                self.facts[number] = replace(each, is_lost=True)


def test_any_history_comes_to_rest_with_the_replicas_that_are_desired() -> None:
    for seed in range(60):
        world = World(random.Random(seed))
        for _ in range(60):
            world.step(accidents=True)
        world.left_behind = 0
        world.facts = {
            number: replace(each, is_ill=False, is_stuck=False)
            for number, each in world.facts.items()
        }
        for _ in range(200):
            world.step(accidents=False)

        desired = world.desired
        assert len(world.facts) == desired.count, seed
        assert {(each.phase, each.version, each.config) for each in world.facts.values()} <= {
            (Phase.SERVING, desired.version, desired.config)
        }, seed
