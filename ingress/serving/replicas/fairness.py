"""Fair queues by key: the calls of one key wait for their turn among keys, not for all calls.

    calls of several priorities wait   as without keys; the first call of the key whose turn it is
                                       stands for its priority
    calls of several keys wait         deficit round robin: in its turn a key gets as many slots as
                                       its weight, relative to the least weight, says; then the next
    calls of one key wait              as without keys: `overload` has the order
    the queue is full                  the key with the most calls gives up its newest, for a call
                                       of a key that would still have fewer

A key is there while a call of it waits, so any number of keys cost no more than the calls do.

Source: Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round Robin" (1995).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from math import inf
from pkgutil import resolve_name
from typing import Any, NamedTuple

from starlette.requests import HTTPConnection, Request
from starlette.types import Scope

from ingress.config import DeploymentConfig, FairnessConfig, check_key_function
from ingress.core.base.types import short_key
from ingress.core.calls.call import Call
from ingress.core.execution.execution import call_inline, name_of
from ingress.serving.replicas.overload import Shed, WaitingCalls


class Fairness(NamedTuple):
    """The fairness of a deployment: `fairness_key`, as a function of a scope, and the rest."""

    key_of: Callable[[Scope], str] | None = None
    config: FairnessConfig = FairnessConfig()


def fairness_of(config: DeploymentConfig) -> Fairness | None:
    """Return the fairness that a deployment's options ask for, `None` for none.

    Raises `ValueError` for a function that cannot be imported, or cannot be a `fairness_key`.
    """
    key, options = config.fairness_key, config.fairness_config
    if key is None:
        return None if options is None else Fairness(None, options)
    if isinstance(key, str) and ":" not in key:
        name = key.lower().encode("latin-1")
        return Fairness(partial(_header, name), options or FairnessConfig())
    if isinstance(key, str):
        try:
            key = resolve_name(key)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"fairness_key={key!r} cannot be imported: {error}; name it as "
                "'package.module:function'"
            ) from None
        check_key_function(key)
    return Fairness(partial(_returned, key), options or FairnessConfig())


def _header(name: bytes, scope: Scope) -> str:
    found = (value.decode("latin-1") for each, value in scope["headers"] if each == name)
    return short_key(next(found, ""))


def _returned(function: Callable[[Any], Any], scope: Scope) -> str:
    make = Request if scope["type"] == "http" else HTTPConnection
    key = call_inline(function, make(scope))
    if not isinstance(key, str | None):
        raise TypeError(
            f"fairness_key={name_of(function)} returned {key!r}; a key is a str, or None for the "
            "key that all requests without one share: return str(...)"
        )
    return short_key(key or "")


class KeyLine(OrderedDict[Call, float]):
    """The calls of one key and priority, since when each waits, and the slots of its turn."""

    __slots__ = ("credit",)
    credit: float


class FairCalls(WaitingCalls):
    """The waiting calls of a deployment, in turns of their keys. Guarded by its router's lock.

    `sizes` are the numbers of calls of the keys.
    """

    __slots__ = ("_by_size", "_lines", "_slots_of", "_weight", "sizes")

    def __init__(self, before: WaitingCalls, config: FairnessConfig) -> None:
        """Take the calls of the queue before."""
        super().__init__(before._usual)
        # The keys of each priority, first the key whose turn it is.
        self._lines: dict[int, OrderedDict[str, KeyLine]] = {n: OrderedDict() for n in (0, 1, -1)}
        self.sizes: Counter[str] = Counter()
        self._by_size: defaultdict[int, dict[str, None]] = defaultdict(dict)  # the other way round
        self.weigh(config)
        for calls in before._classes.values():
            for call, since in calls.items():
                self.add(call, since)
        self._rate = before._rate

    def weigh(self, config: FairnessConfig) -> None:
        """Change the weights, for the turns that begin from now on."""
        self._slots_of = config.slots_of
        self._weight = sum(map(self._slots_of, self.sizes))  # of the keys of all calls

    def _class_of(self, call: Call) -> OrderedDict[Call, float]:
        lines = self._lines[call.metadata.priority]
        return lines.get(call.metadata.fairness_key) or OrderedDict()

    def _next_class(self) -> OrderedDict[Call, float]:
        self._classes = {priority: self._turn(lines) for priority, lines in self._lines.items()}
        return super()._next_class()

    def _turn(self, lines: OrderedDict[str, KeyLine]) -> KeyLine:
        """Return the calls of the key whose turn it is; an empty line if no call waits.

        A turn ends when the next slot is free, not with its last slot: a key that comes meanwhile
        is before the key that has just had its turn.
        """
        while lines:
            key, line = next(iter(lines.items()))
            if line.credit >= 1:
                return line
            line.credit += self._slots_of(key)
            lines.move_to_end(key)
        return KeyLine()

    def next(self, now: float, shed: list[Shed]) -> Call | None:
        call = super().next(now, shed)
        # With the last call of a key, its turn has ended.
        if call is not None and isinstance(line := self._class_of(call), KeyLine):
            line.credit -= 1
        return call

    def add(self, call: Call, now: float) -> None:
        if not self.size:
            self._rate.restart(now)
        lines, key = self._lines[call.metadata.priority], call.metadata.fairness_key
        if key not in lines:
            lines[key] = KeyLine()
            lines[key].credit = self._slots_of(key)
        lines[key][call] = now
        self._count(call, 1)

    def add_first(self, call: Call, now: float) -> None:
        super().add_first(call, now)
        lines, key = self._lines[call.metadata.priority], call.metadata.fairness_key
        lines[key].credit += 1  # the slot that it had and could not use
        lines.move_to_end(key, last=False)

    def discard(self, call: Call) -> bool:
        line = self._class_of(call)
        if line.pop(call, None) is None:
            return False
        if not line:
            del self._lines[call.metadata.priority][call.metadata.fairness_key]
        self._count(call, -1)
        return True

    def _count(self, call: Call, step: int) -> None:
        """Count a call that was added, 1, or removed, -1."""
        key = call.metadata.fairness_key
        before = self.sizes.pop(key, 0)
        self._by_size[before].pop(key, None)
        if not self._by_size[before]:
            del self._by_size[before]
        if before + step:
            self.sizes[key] = before + step
            self._by_size[before + step][key] = None
        if not before or not before + step:
            self._weight += step * self._slots_of(key)
        self._without_deadline += step * (call.metadata.deadline is None)
        self.size += step

    def clear(self) -> list[Call]:
        lines = chain.from_iterable(self._lines[priority].values() for priority in (1, 0, -1))
        calls = list(chain.from_iterable(lines))
        for call in calls:
            self.discard(call)
        return calls

    def largest(self, most: int) -> dict[str, int]:
        """Return the numbers of calls of so many keys, those with the most, and of all "other"."""
        keys = chain.from_iterable(self._by_size[n] for n in sorted(self._by_size, reverse=True))
        found = Counter({key: self.sizes[key] for key in islice(keys, most)})
        found["other"] += self.size - found.total()
        return dict(+found)

    def yielding(self, key: str) -> Call | None:
        """Return the call that gives its place in a full queue to a call of a key, if any does.

        It is the newest, of the lowest priority, of the key with the most calls.
        """
        most = max(self._by_size, default=0)
        if most < self.sizes[key] + 2:
            return None
        longest = next(iter(self._by_size[most]))
        lines = next(self._lines[n][longest] for n in (-1, 0, 1) if longest in self._lines[n])
        return next(reversed(lines))

    def turns_away(self, deadline: float, now: float, key: str = "", ahead: float = inf) -> str:
        slots = self._slots_of(key)
        weight = self._weight + (0 if key in self.sizes else slots)
        return super().turns_away(deadline, now, key, (self.sizes[key] + 1) * weight / slots)
