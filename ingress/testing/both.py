"""`--sync-in-threadpool=both`: each test at 0 and at 1, and the differences.

    all tests at 0 -> every fixture torn down, everything stopped -> all tests at 1 -> compare
                   -> all tests at 0 again, if some passed twice with answers that differ

In this order an application that a session's fixture serves is started again at 1. The last step
separates answers that the flag changes from answers that always differ, such as ids. It runs all
tests, because an answer may depend on earlier tests. Threads switch after every few bytecodes, so
that races in them show.

With pytest-xdist the two runs of a test may be in two processes: reports carry the observations to
the process that compares, and no test is run again.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import pytest
from _pytest.runner import runtestprotocol

from ingress import api
from ingress.core.base.settings import SYNC_IN_THREADPOOL, export
from ingress.testing.comparison import Moved, Run, differences, moved
from ingress.testing.observation import Observer, Seen

FIXTURE = "sync_in_threadpool"
SWITCH_INTERVAL_S = 1e-6
_FLAGS = ("0", "1")


@dataclass(eq=False)
class BothValues:
    """The plugin of `both`. One per process that runs or compares tests."""

    _config: pytest.Config
    _runs: dict[str, dict[str, Run]] = field(default_factory=dict)
    _again: dict[str, Run] = field(default_factory=dict)
    _is_again: bool = False
    _single: set[str] = field(default_factory=set)
    _observer: Observer = field(default_factory=Observer)
    _in_use: ExitStack = field(default_factory=ExitStack)

    # Running every test twice, in two halves.

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if FIXTURE not in metafunc.fixturenames:
            metafunc.fixturenames.append(FIXTURE)
        metafunc.parametrize(FIXTURE, _FLAGS, indirect=True, ids=[f"flag{flag}" for flag in _FLAGS])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: _flag_of(item) or "0")

    def pytest_sessionstart(self) -> None:
        self._in_use.enter_context(self._observer.installed())

    def pytest_unconfigure(self) -> None:
        self._in_use.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        flag = _flag_of(item) or "0"
        is_last = nextitem is None or (_flag_of(nextitem) or "0") != flag
        export({SYNC_IN_THREADPOOL: flag})
        self._observer.seen = Seen()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            self._run_one(item, None if is_last else nextitem)
        finally:
            sys.setswitchinterval(interval)
        if is_last:
            api.shutdown()  # applications left running would keep the flag's old value
        return True

    def _run_one(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Run a test. Without a next test all fixtures are torn down, also the session's."""
        if self._is_again:
            run = self._again[_without_flag(item.nodeid)] = Run()
            for report in runtestprotocol(item, log=False, nextitem=nextitem):
                _add(run, report)
        else:
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            runtestprotocol(item, nextitem=nextitem)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    # Carrying the observations to the process that compares.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if (flag := _flag_of(item)) is not None:
            seen = self._observer.seen.as_dict() if report.when == "teardown" else None
            test = _without_flag(item.nodeid)
            vars(report)["ingress"] = {"test": test, "flag": flag, "seen": seen}
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (about := getattr(report, "ingress", None)) is None:
            self._single.add(report.nodeid)
        else:
            _add(self._run(about["test"], about["flag"]), report)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, nodeid: str
    ) -> None:
        if (flag := re.search(r"flag([01])\]$", nodeid)) is None:
            return
        test = _without_flag(nodeid)
        run = self._again[test] if self._is_again else self._run(test, flag[1])
        message, path = warning_message.message, os.path.basename(warning_message.filename)
        run.warn(warning_message.category, str(message), path, warning_message.lineno)

    def _run(self, test: str, flag: str) -> Run:
        return self._runs.setdefault(test, {}).setdefault(flag, Run())

    # Comparing the runs.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, bool, bool]:
        done = yield
        if hasattr(self._config, "workerinput"):
            return done  # the controller of pytest-xdist compares
        if self._is_unsure() and not (session.shouldstop or session.shouldfail):
            self._run_again(getattr(session, "items", []))  # none if xdist's workers run them
        if self._findings():
            session.testsfailed += 1  # so that pytest ends with 1
        return done

    def _is_unsure(self) -> bool:
        """Return whether a test passed twice with different answers, which may always differ."""
        return any(
            at_0.outcome == at_1.outcome == "passed" and differences(at_0, at_1)
            for _, at_0, at_1 in self._pairs()
        )

    def _run_again(self, items: list[pytest.Item]) -> None:
        at_0 = [item for item in items if (_flag_of(item) or "0") == "0"]
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and at_0:
            reporter.write_line("\nat 0 again, because answers differ")
        self._is_again = True
        for item, following in pairwise([*at_0, None]):
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self._is_again = False

    def _pairs(self) -> Iterator[tuple[str, Run, Run]]:
        whole = [each for each in sorted(self._runs.items()) if len(each[1]) == len(_FLAGS)]
        yield from ((test, runs["0"], runs["1"]) for test, runs in whole)

    def _findings(self) -> dict[str, list[str]]:
        """Return, by test, the differences between 0 and 1 that are not between 0 and 0."""
        found = {}
        for test, at_0, at_1 in self._pairs():
            varying = self._varying(test)
            found[test] = [t for w, t in differences(at_0, at_1).items() if w not in varying]
        return {test: lines for test, lines in found.items() if lines}

    def _varying(self, test: str) -> list[str]:
        """Return the subjects in which a second run of a test at 0 differed from the first."""
        if (again := self._again.get(test)) is None:
            return []
        return [what for what in differences(self._runs[test]["0"], again) if what != "outcome"]

    def _moved(self) -> list[Moved]:
        """Return the callables that left the event loop, each with its most calls at once."""
        found = [each for _, at_0, at_1 in self._pairs() for each in moved(at_0, at_1)]
        found.sort(key=lambda each: (each.name, -each.most))
        return [next(same) for _, same in groupby(found, lambda each: each.name)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tell = terminalreporter.write_line
        terminalreporter.section(f"{SYNC_IN_THREADPOOL}: 0 and 1", bold=True)
        if moves := self._moved():
            tell("on the event loop at 0, and at 1, as the flag says:")
        for each in moves:
            together = f"{each.most} calls at once" if each.most > 1 else _NEVER_TOGETHER
            tell(f"  {each.name}: {each.where}, {together}")
        findings = self._findings()
        for test, lines in findings.items():
            tell(f"DIFFERS {test}", red=True)
            for line in lines:
                tell(f"  {line}")
        for test, _, _ in self._pairs():
            if varying := self._varying(test):
                tell(f"never the same, at 0 either: {test}: {', '.join(varying)}")
        if self._is_unsure() and not self._again:
            tell("not run at 0 again: some of these answers may never be the same")
        if self._single:
            tell(f"tests at 0 only, which are no test functions: {len(self._single)}")
        tell(f"tests at 0 and at 1: {len([*self._pairs()])}; that differ: {len(findings)}")


_NEVER_TOGETHER = "never two at once, so no test shows whether it is safe in threads"


def _flag_of(item: pytest.Item) -> str | None:
    """Return the flag's value in a test; `None` if the test could not be doubled.

    unittest's tests cannot. Such tests run once, at 0.
    """
    callspec = getattr(item, "callspec", None)
    flag = None if callspec is None else callspec.params.get(FIXTURE)
    return flag if flag in _FLAGS else None


def _without_flag(nodeid: str) -> str:
    """Return the common name of a test's two runs, whose ids end with the flag."""
    return re.sub(r"\[flag[01]\]$", "", re.sub(r"-flag[01]\]$", "]", nodeid))


def _add(run: Run, report: pytest.TestReport) -> None:
    """Add one phase of a test to its run. The worst outcome counts."""
    if run.outcome in ("", "passed") or (report.failed and run.outcome != "failed"):
        run.outcome = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        run.why = crash.message.splitlines()[0] if report.failed and crash is not None else ""
    if (about := getattr(report, "ingress", None)) is not None and about["seen"] is not None:
        run.answers, run.ran = about["seen"]["answers"], about["seen"]["ran"]
