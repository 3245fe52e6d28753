"""The tables of `http.reply_state`, walked against what must be true of every request.

A `World` has the facts that a client, a server and user code see, and no state of the table. From
these facts each event may come or not, and the actions that follow must keep the promises: a
request is answered once or visibly cut, a slot is given back once, user code is told once that
nobody waits for it, nothing is sent after the end, and no server's task waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ingress.serving.http.reply_state import (
    ACCEPT,
    ASK,
    BEGIN,
    BREAK,
    CANCEL,
    CLOSE,
    EXCUSE,
    FINISH,
    GO,
    HEARD,
    HTTP,
    INTERRUPT,
    LEAVE,
    OVER,
    OWN,
    PART,
    RAISE,
    READ,
    READING,
    REFUSE,
    RELEASE,
    REPORT,
    RUN,
    RUNNING,
    SLOT,
    STOP,
    TELL,
    UNSENT,
    WAKE,
    WEBSOCKET,
    Action,
    ReplyEvent,
    ReplyState,
    Table,
)
from tests import reply_states

TABLES = pytest.mark.parametrize("is_http", [True, False], ids=["http", "websocket"])


@dataclass(frozen=True)
class World:
    """The facts of one request or WebSocket.

    asked      its call was submitted
    runs       the call runs in the server's task
    begun      the server has the start of the response, or the acceptance
    is_open    the WebSocket is accepted
    finished   the server has the last message
    ended      the call has ended
    cut        the reply has cut it, at its deadline or because of its body
    gone       its client has left
    listening  user code, which asked for that, was told by a message, and is not cancelled
    broken     the server has cancelled its task
    told       times that user code was told to stop
    left       the server's task has left
    """

    is_http: bool
    asked: bool = False
    runs: bool = False
    begun: bool = False
    is_open: bool = False
    finished: bool = False
    ended: bool = False
    cut: bool = False
    gone: bool = False
    listening: bool = False
    broken: bool = False
    told: int = 0
    left: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for what user code does."""
        return not (self.cut or self.gone or self.broken or self.left)

    def may_come(self, event: ReplyEvent) -> bool:
        """Whether the server, the client, the clock or user code can cause the event now."""
        if event is READ:
            return not self.asked and self.is_wanted and not self.ended
        if not self.asked and not self.is_http:
            return False  # nothing is read of a WebSocket before its call
        if event in (SLOT, GO):
            return self.asked
        if event is PART:
            return self.asked and self.is_http
        if event is ACCEPT:
            return self.asked and not self.is_http
        if event is BEGIN or (event is FINISH and self.is_http):
            return self.asked  # also a body without a start, which the server refuses
        if event in (FINISH, HEARD):
            return self.begun or (self.asked and not self.is_wanted)
        if event is BREAK:
            return not (self.left or self.broken)
        if event is LEAVE:
            return not self.left
        if event is UNSENT:
            return not self.left or self.asked
        return True

    def after(self, event: ReplyEvent, actions: tuple[Action, ...]) -> World:
        """Return the facts after an event. Raises `AssertionError` if a promise is broken."""
        assert len(set(actions)) == len(actions)
        follow: Callable[[frozenset[Action]], World] = getattr(self, f"_{event.name.lower()}")
        return follow(frozenset(actions))

    def _read(self, actions: frozenset[Action]) -> World:
        assert actions == {ASK}, "the call is submitted, once"
        return replace(self, asked=True)

    def _slot(self, actions: frozenset[Action]) -> World:
        if self.is_wanted and not (self.ended or self.begun):
            assert actions == {RUN}, "a call that waits runs in its slot"
            return replace(self, runs=True)
        assert actions == {RELEASE}, "a slot that nobody needs is given back"
        return self

    def _accept(self, actions: frozenset[Action]) -> World:
        is_first = not self.begun and self.is_wanted
        return replace(self._send(actions), is_open=self.is_open or is_first)

    def _begin(self, actions: frozenset[Action]) -> World:
        return self._send(actions)

    def _finish(self, actions: frozenset[Action]) -> World:
        after = self._send(actions)
        is_last = self.begun and self.is_wanted
        return replace(after, begun=self.begun, finished=self.finished or is_last)

    def _send(self, actions: frozenset[Action]) -> World:
        is_after_the_end = self.cut or self.broken or self.left
        assert actions == ({REFUSE} if is_after_the_end else set()), "nothing after the end"
        return self if is_after_the_end else replace(self, begun=True)

    def _end(self, actions: frozenset[Action]) -> World:
        if self.ended or self.left or self.cut or self.broken:
            assert not actions, "the task is awake, or has left"
        elif self.asked or self.is_wanted:
            wakes = WAKE if self.asked else INTERRUPT
            assert actions == {wakes}, "the server's task goes on once the call has ended"
        return replace(self, ended=True, listening=False)

    def _late(self, actions: frozenset[Action]) -> World:
        if self.listening:
            assert actions == {CANCEL}, "code that was told has a deadline"
            return self._told()
        is_cut = (
            self.is_wanted
            and not self.finished
            and not (self.ended and not self.begun)  # it has failed before
            and (self.is_http or not self.begun)
        )
        if not is_cut:
            assert not actions, "it is complete, over, or cut already"
            return self
        assert actions == {CANCEL, INTERRUPT}, "user code and the server's task are stopped"
        return replace(self._told(), cut=True)

    def _go(self, actions: frozenset[Action]) -> World:
        if not self.is_wanted or self.finished or self.ended:
            assert not actions, "a background task runs on; else there is nothing to stop"
            return self
        assert actions == {CANCEL if self.is_http else TELL}, "user code is told"
        return replace(self._told(), gone=True)

    def _part(self, actions: frozenset[Action]) -> World:
        if not self.is_wanted or self.finished or self.ended:
            assert not actions, "as without a listener"
            return self
        assert actions == {TELL}, "user code ends by itself"
        return replace(self, gone=True, listening=True)

    def _heard(self, actions: frozenset[Action]) -> World:
        assert not actions, "user code knows"
        if not (self.is_http and self.is_wanted):
            return self
        return replace(self._told(), gone=True)

    def _unsent(self, actions: frozenset[Action]) -> World:
        if self.listening:
            assert actions == {CANCEL}, "the server's task leaves, and nothing sends what comes"
            return self._told()
        if not self.is_wanted:
            assert not actions, "it is known"
            return self
        assert actions == (set() if self.ended else {CANCEL}), "what still runs is cancelled"
        return replace(self._told(), gone=True)

    def _break(self, actions: frozenset[Action]) -> World:
        if self.listening:
            assert actions == {CANCEL}, "the server cancels it"
            return replace(self._told(), broken=True)
        if self.gone:
            assert not actions, "the call was cancelled before"
            return self
        how = STOP if self.finished else CANCEL
        is_told = self.ended or self.cut
        assert actions == (set() if is_told else {how}), "what still runs is cancelled"
        return replace(self if is_told else self._told(), broken=True)

    def _leave(self, actions: frozenset[Action]) -> World:
        if not (self.ended or self.told):
            assert actions == {CANCEL}, "no code runs on for nobody"
            return replace(self._told(), left=True)
        if self.broken:
            assert not actions, "the server gets its own cancellation back"
        elif self.gone:
            assert actions == (set() if self.is_http else {EXCUSE}), "nobody is there"
        elif self.cut:
            assert actions == {OWN}, "its client is told, or cut off"
        elif self.finished:
            assert actions == {REPORT}, "its client has the answer; a stop is no failure"
        elif self.is_open:
            assert actions == {CLOSE}, "its client gets a close code"
        else:
            assert actions == {RAISE}, "its client is told of the failure"
        return replace(self, left=True)

    def _told(self) -> World:
        told = self.told + (not self.ended)
        assert told <= 1, "user code is told once"
        return replace(self, told=told, listening=False)


Found = tuple[ReplyState, World]


def step(table: Table, state: ReplyState, world: World, event: ReplyEvent) -> Found:
    """Return what follows an event that may come. Raises `AssertionError`."""
    cell = table[state][event]
    assert cell is not None, f"{event.name} comes in {state.name}"
    following, after = cell[0], world.after(event, cell[1])
    is_over = after.ended and not (after.cut or after.broken or after.left)
    assert (following in OVER) == is_over, "the server's task leaves once the call has ended"
    if after.asked and not (after.ended or after.left):
        assert following in RUNNING, "its client is watched while its call runs"
    elif is_over or after.left or after.is_wanted:
        assert following not in RUNNING, "nothing is watched before and after"
    return following, after


def walk(table: Table, *, is_http: bool) -> set[Found]:
    """Walk through all that can happen, and return the situations. Raises `AssertionError`."""
    todo = [(READING, World(is_http))]
    seen = set(todo)
    possible: set[tuple[ReplyState, ReplyEvent]] = set()
    while todo:
        state, world = todo.pop()
        for event in ReplyEvent:
            if world.may_come(event):
                possible.add((state, event))
                found = step(table, state, world, event)
                if found not in seen:
                    seen.add(found)
                    todo.append(found)
    for state in ReplyState:
        for event in ReplyEvent:
            if (state, event) not in possible:
                assert table[state][event] is None, "an event that cannot come is refused"
    return seen


def table_of(is_http: bool) -> Table:
    return HTTP if is_http else WEBSOCKET


@TABLES
def test_all_that_can_happen_keeps_the_promises(is_http: bool) -> None:
    seen = walk(table_of(is_http), is_http=is_http)
    assert {state for state, _ in seen} == {
        state for state in ReplyState if any(table_of(is_http)[state])
    }


def mutants(table: Table) -> Iterator[tuple[str, Table]]:
    """Yield the tables with one defect: another next state, a lost action, another or one more."""
    for state in ReplyState:
        for event in ReplyEvent:
            cell = table[state][event]
            if cell is None:
                if any(table[state]):
                    yield (
                        f"{state.name} {event.name} is no defect",
                        _with(table, state, event, (state, ())),
                    )
                continue
            for other in ReplyState:
                if other is not cell[0]:
                    name = f"{state.name} {event.name} -> {other.name}"
                    yield name, _with(table, state, event, (other, cell[1]))
            for action in Action:
                changed = tuple(each for each in cell[1] if each is not action)
                if changed == cell[1]:
                    changed = (*cell[1], action)
                name = f"{state.name} {event.name}: {[each.name for each in changed]}"
                yield name, _with(table, state, event, (cell[0], changed))


def _with(
    table: Table, state: ReplyState, event: ReplyEvent, cell: tuple[ReplyState, tuple[Action, ...]]
) -> Table:
    row = tuple(cell if each is event else table[state][each] for each in ReplyEvent)
    return tuple(row if each is state else table[each] for each in ReplyState)


@TABLES
def test_each_defect_of_a_table_breaks_a_promise(is_http: bool) -> None:
    survivors = []
    for name, table in mutants(table_of(is_http)):
        try:
            walk(table, is_http=is_http)
        except AssertionError:
            continue
        survivors.append(name)
    assert survivors == []


class Requests(RuleBasedStateMachine):
    """Requests and WebSockets before one replica on their loop, which has so many slots."""

    SLOTS = 2

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Found] = []
        self.free = self.SLOTS
        self.holders: set[int] = set()

    @rule(is_http=st.booleans())
    def arrives(self, is_http: bool) -> None:
        self.requests.append((READING, World(is_http)))

    @precondition(lambda self: self.requests)
    @rule(choice=st.randoms(use_true_random=False))
    def happens(self, choice: Random) -> None:
        index = choice.randrange(len(self.requests))
        state, world = self.requests[index]
        events = [each for each in ReplyEvent if world.may_come(each)]
        if not self.free and SLOT in events:
            events.remove(SLOT)
        if not events:
            return
        event = choice.choice(events)
        following, after = step(table_of(world.is_http), state, world, event)
        self.requests[index] = following, after
        if event is SLOT and after.runs and index not in self.holders and after.is_wanted:
            self.free -= 1
            self.holders.add(index)
        if index in self.holders and (after.ended or after.left):
            self.holders.discard(index)
            self.free += 1

    @invariant()
    def no_slot_is_lost_or_given_twice(self) -> None:
        assert self.free + len(self.holders) == self.SLOTS
        for index in self.holders:
            assert self.requests[index][1].runs


TestRequests = Requests.TestCase


def test_the_documents_show_the_tables() -> None:
    assert reply_states.PATH.read_text() == reply_states.document(), "python -m tests.reply_states"
