"""One check: of an application, or of files that are not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ingress.app.declaration.build import build
from ingress.app.declaration.declaration import Application
from ingress.app.declaration.names import shown
from ingress.check.affinity import (
    affine_objects,
    awaitables,
    connections_of_module,
    loop_uses,
    settings_of_process,
)
from ingress.check.blocking import blocking_calls
from ingress.check.races import (
    Unsafe,
    found,
    inside,
    merged,
    races_now,
    races_of,
    where,
    with_callees,
)
from ingress.check.replicas import findings_of_processes, shared_objects
from ingress.check.rules import Finding, Report
from ingress.check.sources import Function, Sources
from ingress.check.subjects import (
    Subject,
    dependencies_in,
    sources_in,
    sources_of,
    subjects_in,
    subjects_of,
)
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings
from ingress.core.execution.execution import ExecutionMode, Role


def migration_findings(sources: Sources, subjects: list[Subject]) -> list[Finding]:
    """Return the findings of `--migrate`, without those that a `# noqa` suppresses.

    They are in every `def` that `execution` puts in a thread with the flag at 1, in one level of
    the `def`s that it calls without a lock, and in those that FastAPI runs in threads at either
    flag, where unsafe code is already unsafe.
    """
    findings = [each for subject in subjects for each in _of_subject(subject, sources)]
    for constructor in dict.fromkeys(
        each.function for each in subjects if each.role is Role.LIFECYCLE
    ):
        if constructor.node.name == "__init__":
            findings += _of_constructor(constructor, subjects, sources)
            if not _is_process(constructor):
                for each in with_callees(constructor, sources):
                    for access, what in settings_of_process(each, sources):
                        names = (constructor.name,)
                        message = (
                            f"{each.name} {what} for the whole process, which all replicas share "
                            "here; on Ray each replica is a process"
                        )
                        findings += found(access, each, names, message)
    return merged(findings)


def _is_process(constructor: Function) -> bool:
    """Return whether the decorators of the constructor's class give each replica a process."""
    decorators = constructor.file.classes[constructor.cls].decorator_list
    return any("isolation='process'" in ast.unparse(each) for each in decorators)


def _of_module(subjects: list[Subject], sources: Sources, settings: Settings) -> list[Finding]:
    """Return the findings of connections of a module, which is imported in the main thread."""
    findings: list[Finding] = []
    has_own_loops = settings.run_user_code_in_separate_thread
    for subject in subjects:
        if has_own_loops or subject.mode is not ExecutionMode.EVENT_LOOP:
            for access, what in connections_of_module(subject.function, sources):
                message = f"the module makes {what} in another thread"
                names = (subject.function.name,)
                findings += found(replace(access, place=""), subject.function, names, message)
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


def check_application(
    application: Application,
    module_name: str,
    app_dir: Path,
    settings: Settings,
    *,
    migrate: bool,
    gil_is_on: bool = True,
) -> Report:
    """Check the functions that an imported application runs, and all `async def`s in its files.

    Without the GIL, threads lose updates often that they lose seldom with it. So what several of
    them change is then found at once, not with `migrate` alone.
    """
    deployments = build(application, "default").deployments
    sources = sources_of(module_name, deployments, app_dir)
    dependencies = dependencies_in(sources, settings)
    elsewhere = {each.function for each in dependencies}  # FastAPI calls them, not a handle
    called = subjects_of(deployments, sources, settings)
    subjects = [each for each in called if each.function not in elsewhere]
    report = _check(sources, subjects + dependencies, settings, migrate=migrate)
    if settings.run_user_code_in_separate_thread:  # else all user code is on the server's loop
        report.add([*shared_objects(deployments, sources)])
    report.add([*findings_of_processes(deployments, sources, settings)])
    if not gil_is_on:
        report.add(races_now(deployments, subjects + dependencies, sources, settings))
    return report


def check_files(paths: Sequence[Path], settings: Settings, *, migrate: bool) -> Report:
    """Check files without importing them. Decorators decide where a function runs."""
    sources = sources_in(paths)
    report = _check(sources, subjects_in(sources, settings), settings, migrate=migrate)
    if unread := [each for each in sources.unread if each in paths]:
        report.failure = f"Python cannot parse {', '.join(map(shown, unread))}"
    return report


def _check(
    sources: Sources, subjects: list[Subject], settings: Settings, *, migrate: bool
) -> Report:
    # On a loop of its own, a constructor delays no request: its replica has none yet.
    constructors = not settings.run_user_code_in_separate_thread
    findings, count = blocking_calls(sources, subjects, constructors=constructors)
    flag = f"{SYNC_IN_THREADPOOL}={int(settings.run_sync_in_threadpool)}"
    functions = f"{flag}; functions on an event loop: {count}; files read: {len(sources.files)}."
    report = Report(notes=[functions])
    if sources.unread:
        paths = ", ".join(map(shown, sources.unread))
        report.notes.append(f"not read, because Python cannot parse it: {paths}")
    report.add(findings)
    report.add(_of_module(subjects, sources, settings))
    if migrate:
        report.add(migration_findings(sources, subjects))
    return report
