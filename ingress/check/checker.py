"""One check: of an application, or of files that are not imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingress.app.declaration.assignments import shown
from ingress.app.declaration.build import build
from ingress.app.declaration.declaration import Application
from ingress.check.blocking import blocking_calls
from ingress.check.decorated import dependencies_in, sources_in, subjects_in
from ingress.check.findings import Report
from ingress.check.migration import migration_findings
from ingress.check.races import races_now
from ingress.check.replicas import findings_of_processes, shared_objects
from ingress.check.sources import Sources
from ingress.check.subjects import Subject, sources_of, subjects_of
from ingress.core.base.settings import SYNC_IN_THREADPOOL, Settings


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
    if migrate:
        report.add(migration_findings(sources, subjects))
    return report
