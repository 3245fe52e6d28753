"""Code in a `def` that is not safe once several threads run it at once.

The check covers every `def` that `execution` puts in a thread with the flag at 1, and one level of
the `def`s that it calls without a lock. It also covers those that FastAPI runs in threads at either
flag, where unsafe code is already unsafe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ingress.check.affinity import affine_objects, awaitables, loop_uses
from ingress.check.calls import calls_of
from ingress.check.findings import Finding
from ingress.check.rules import RULES
from ingress.check.sharing import Access, accesses, locked_nodes
from ingress.check.sources import AnyDef, Function, Sources
from ingress.check.subjects import Subject
from ingress.core.base.settings import SYNC_IN_THREADPOOL


def migration_findings(sources: Sources, subjects: list[Subject]) -> list[Finding]:
    """Return the findings of `--migrate`, without those that a `# noqa` suppresses."""
    found: dict[tuple[str, int, int, str], Finding] = {}
    for subject in subjects:
        for finding in _of_subject(subject, sources):
            known = found.setdefault(finding.key, finding)
            functions = tuple(dict.fromkeys([*known.functions, *finding.functions]))
            found[finding.key] = replace(known, functions=functions)
    for constructor in dict.fromkeys(each.function for each in subjects if each.is_lifecycle):
        if constructor.node.name == "__init__":
            for finding in _of_constructor(constructor, subjects, sources):
                found.setdefault(finding.key, finding)
    return list(found.values())


def _of_subject(subject: Subject, sources: Sources) -> Iterator[Finding]:
    function, names = subject.function, (subject.function.name,)
    if subject.sync_wrapper:
        message = (
            f"{function.name} is an `async def`, its wrapper {subject.sync_wrapper} is not: at "
            f"{SYNC_IN_THREADPOOL}=1 the wrapper runs in a thread, the `async def` on the loop"
        )
        yield from _found(Access("IG104", function.node, ""), function, names, message)
    if not subject.is_threaded_at_1:
        return
    where = _where(subject)
    for each in _with_callees(function, sources):
        via = "" if each is function else f", called by {function.name}"
        for access in accesses(each, sources):
            if subject.one_at_a_time and access.place.startswith("self."):
                continue
            race = _RACES[access.rule_id].format(place=access.place)
            yield from _found(access, each, names, f"{race} in {each.name}{via}{where}")
        for access, used in loop_uses(each, sources) if subject.moves else ():
            yield from _found(access, each, names, f"{used}, in {each.name}{via}{where}")
    if subject.moves:
        for access, used in awaitables(function, sources):
            message = (
                f"{function.name} returns the awaitable of {used}{where}; ingress awaits it on "
                "the event loop, Ray Serve 2.60 does not await it"
            )
            yield from _found(access, function, names, message)


_RACES = {
    "IG101": "`{place}` is read and written without a lock",
    "IG102": "`{place}` is checked, then changed, without a lock",
}


def _of_constructor(
    constructor: Function, subjects: list[Subject], sources: Sources
) -> Iterator[Finding]:
    users = [
        each
        for subject in subjects
        if subject.moves and subject.is_threaded_at_1
        if (subject.function.file, subject.function.cls) == (constructor.file, constructor.cls)
        for each in _with_callees(subject.function, sources)
    ]
    for access, what in affine_objects(constructor, users, sources):
        message = (
            f"{constructor.name} {what} in the event loop's thread; at "
            f"{SYNC_IN_THREADPOOL}=1 methods run in other threads"
        )
        names = tuple(dict.fromkeys(each.name for each in users))
        yield from _found(replace(access, place=""), constructor, names, message)


def _with_callees(function: Function, sources: Sources) -> list[Function]:
    """Return a function and the `def`s that it calls without a lock."""
    locked = locked_nodes(function, sources)
    calls = calls_of(function, sources, returned=True)
    called = (call.callee for call in calls if call.node not in locked)
    return list(dict.fromkeys([function, *called]))


def _where(subject: Subject) -> str:
    return ", which runs in threads" + f" at {SYNC_IN_THREADPOOL}=1" * subject.moves


def _found(
    access: Access, function: Function, names: tuple[str, ...], message: str
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
            access.place,
            end_line=node.end_lineno or 0,
        )
