"""Code in a `def` that is not safe once several threads run it at once.

The check covers every `def` that `execution` puts in a thread with the flag at 1, and one level of
the `def`s that it calls without a lock. It also covers those that FastAPI runs in threads at either
flag, where unsafe code is already unsafe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ingress.check.affinity import affine_objects, awaitables, loop_uses
from ingress.check.findings import Finding
from ingress.check.races import found, inside, merged, races_of, where, with_callees
from ingress.check.sharing import Unsafe
from ingress.check.sources import Function, Sources
from ingress.check.subjects import Subject
from ingress.core.base.settings import SYNC_IN_THREADPOOL


def migration_findings(sources: Sources, subjects: list[Subject]) -> list[Finding]:
    """Return the findings of `--migrate`, without those that a `# noqa` suppresses."""
    findings = [each for subject in subjects for each in _of_subject(subject, sources)]
    for constructor in dict.fromkeys(each.function for each in subjects if each.is_lifecycle):
        if constructor.node.name == "__init__":
            findings += _of_constructor(constructor, subjects, sources)
    return merged(findings)


def _of_subject(subject: Subject, sources: Sources) -> Iterator[Finding]:
    function, names = subject.function, (subject.function.name,)
    if subject.sync_wrapper:
        message = (
            f"{function.name} is an `async def`, its wrapper {subject.sync_wrapper} is not: at "
            f"{SYNC_IN_THREADPOOL}=1 the wrapper runs in a thread, the `async def` on the loop"
        )
        yield from found(Unsafe("IG104", function.node, ""), function, names, message)
    if not subject.is_threaded_at_1:
        return
    yield from races_of(subject, sources)
    for each in with_callees(function, sources) if subject.moves else ():
        for access, used in loop_uses(each, sources):
            yield from found(access, each, names, f"{used}, {inside(each, subject)}")
    if subject.moves:
        for access, used in awaitables(function, sources):
            message = (
                f"{function.name} returns the awaitable of {used}{where(subject)}; ingress awaits "
                "it on the event loop, Ray Serve 2.60 does not await it"
            )
            yield from found(access, function, names, message)


def _of_constructor(
    constructor: Function, subjects: list[Subject], sources: Sources
) -> Iterator[Finding]:
    users = [
        each
        for subject in subjects
        if subject.moves and subject.is_threaded_at_1
        if (subject.function.file, subject.function.cls) == (constructor.file, constructor.cls)
        for each in with_callees(subject.function, sources)
    ]
    for access, what in affine_objects(constructor, users, sources):
        message = (
            f"{constructor.name} {what} in the event loop's thread; at "
            f"{SYNC_IN_THREADPOOL}=1 methods run in other threads"
        )
        names = tuple(dict.fromkeys(each.name for each in users))
        yield from found(replace(access, place=""), constructor, names, message)
