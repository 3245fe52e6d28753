"""IG101 and IG102: where several threads run a function that changes state which they share.

Each request of a `def` may run in another thread: state of the instance counts, and all that is
shared by instances. An `async def` runs in one thread for each replica: of that the replicas of a
deployment share a global, or an attribute of a class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ingress.app.declaration.build import BuiltDeployment
from ingress.check.rules import RULES, Finding
from ingress.check.sharing import Unsafe, accesses, locked_nodes
from ingress.check.sources import AnyDef, Function, Sources, calls_of
from ingress.check.subjects import Subject, subjects_of
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.core.execution.execution import ExecutionMode

_RACES = {
    "IG101": "`{place}` is read and written without a lock",
    "IG102": "`{place}` is checked, then changed, without a lock",
}


@dataclass(frozen=True, slots=True)
class _Change:
    """An unsafe access in a function that a deployment runs."""

    access: Unsafe
    function: Function
    caller: str
    built: BuiltDeployment


def races_of(subject: Subject, sources: Sources) -> Iterator[Finding]:
    """Yield the findings of a `def` that threads run, and of the `def`s that it calls."""
    names = (subject.function.name,)
    for each in with_callees(subject.function, sources):
        for access in accesses(each, sources):
            if subject.one_at_a_time and access.place.startswith("self."):
                continue
            race = _RACES[access.rule_id].format(place=access.place)
            yield from found(access, each, names, f"{race} {inside(each, subject)}")


def races_now(
    deployments: Iterable[BuiltDeployment],
    subjects: Iterable[Subject],
    sources: Sources,
    settings: Settings,
) -> list[Finding]:
    """Return the findings of what runs in several threads at the flags' values."""
    threaded = [
        finding
        for subject in subjects
        if subject.is_threaded_at_1 and subject.mode is ExecutionMode.THREADPOOL
        for finding in races_of(subject, sources)
    ]
    if not settings.run_user_code_in_separate_thread:  # all replicas are on the server's loop
        return merged(threaded)
    return merged([*threaded, *_between_replicas(deployments, sources, settings)])


def _between_replicas(
    deployments: Iterable[BuiltDeployment], sources: Sources, settings: Settings
) -> Iterator[Finding]:
    """Yield the findings of globals and class attributes that several replicas change."""
    changes: defaultdict[tuple[Path, str], list[_Change]] = defaultdict(list)
    for built in deployments:
        config = built.deployment.config
        if config.isolation == "thread" and config.loop is None:
            for subject in subjects_of([built], sources, settings):
                for each in with_callees(subject.function, sources):
                    for access in accesses(each, sources):
                        if not access.place.startswith("self."):
                            change = _Change(access, each, subject.function.name, built)
                            changes[each.file.path, access.place].append(change)
    for same in changes.values():
        users = {change.built.name: change.built.deployment.config for change in same}
        scaled = any(config.autoscaling is not None for config in users.values())
        if scaled or sum(config.replica_count for config in users.values()) > 1:
            for change in same:
                race = _RACES[change.access.rule_id].format(place=change.access.place)
                message = (
                    f"{race} in {change.function.name}; the replicas of {' and '.join(users)} run "
                    "it, each in a thread"
                )
                yield from found(change.access, change.function, (change.caller,), message)


def with_callees(function: Function, sources: Sources) -> list[Function]:
    """Return a function and the `def`s that it calls without a lock."""
    locked = locked_nodes(function, sources)
    calls = calls_of(function, sources, returned=True)
    called = (call.callee for call in calls if call.node not in locked)
    return list(dict.fromkeys([function, *called]))


def inside(function: Function, subject: Subject) -> str:
    """Return the words for a function, which a subject is or calls."""
    via = "" if function is subject.function else f", called by {subject.function.name}"
    return f"in {function.name}{via}{where(subject)}"


def where(subject: Subject) -> str:
    """Return the words for where a `def` runs."""
    return ", which runs in threads" + f" at {SYNC_IN_THREADPOOL}=1" * subject.moves


def found(
    access: Unsafe, function: Function, names: tuple[str, ...], message: str
) -> Iterator[Finding]:
    """Yield the finding unless a `# noqa` on its line or its statement's last suppresses it."""
    node = access.node
    lines = (node.lineno, node.lineno if isinstance(node, AnyDef) else node.end_lineno or 0)
    if not function.file.allows(access.rule_id, *lines):
        yield Finding(
            RULES[access.rule_id],
            function.file.path,
            node.lineno,
            node.col_offset + 1,
            message,
            names,
        )


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each line and rule, with all functions that reach it."""
    known: dict[tuple[str, int, int, str], Finding] = {}
    for each in findings:
        first = known.setdefault(each.key, each)
        functions = tuple(dict.fromkeys([*first.functions, *each.functions]))
        known[each.key] = replace(first, functions=functions)
    return list(known.values())
