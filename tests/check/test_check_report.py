"""`ingress check`: the output of findings, and the page of each rule."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ingress.check.checker import check_files
from ingress.check.rules import RULES, Format, Report, rendered
from ingress.core.base.settings import Settings
from tests.servers import ROOT, write_module

PAGES = ROOT / "docs" / "rules"

APP = """
import time
import ingress as serve

@serve.deployment
class A:
    async def wait(self):
        time.sleep(1)
    def count(self):
        self.n += 1
"""


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    write_module(tmp_path, "app", APP)
    monkeypatch.chdir(tmp_path)
    return check_files([Path("app.py")], Settings(), migrate=True)


def test_text_has_a_line_a_fix_and_a_page_for_each(report: Report) -> None:
    lines = rendered(report, Format.TEXT).splitlines()

    assert lines[0] == (
        "app.py:8:9: ASYNC251 `time.sleep` blocks the event loop, in `async def` A.wait"
    )
    assert lines[1:3] == ["    fix: await asyncio.sleep(...)", "    docs/rules/ASYNC251.md"]
    assert lines[3].startswith("app.py:10:9: IG101 `self.n` is read and written without a lock")
    assert lines[-1] == "2 findings."


def test_json_has_the_same(report: Report) -> None:
    first, second = json.loads(rendered(report, Format.JSON))["findings"]

    place = [first[key] for key in ("rule", "path", "line", "column")]
    assert place == ["ASYNC251", "app.py", 8, 9]
    assert (second["rule"], second["functions"], second["page"]) == (
        "IG101",
        ["A.count"],
        "docs/rules/IG101.md",
    )


def test_sarif_is_what_the_standard_asks_for(report: Report) -> None:
    log = json.loads(rendered(report, Format.SARIF))

    (run,) = log["runs"]
    assert log["version"] == "2.1.0"
    assert run["tool"]["driver"]["name"] == "ingress check"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["ASYNC251", "IG101"]
    first, second = run["results"]
    assert (first["ruleId"], first["level"], second["level"]) == ("ASYNC251", "error", "warning")
    assert first["message"]["text"].startswith("`time.sleep` blocks the event loop")
    (location,) = first["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "app.py"},
        "region": {"startLine": 8, "startColumn": 9},
    }


def test_github_gets_a_workflow_command_for_each(report: Report) -> None:
    first, second = rendered(report, Format.GITHUB).splitlines()

    assert first.startswith(
        "::error file=app.py,line=8,col=9,title=ASYNC251 time.sleep on the event loop::`time.sleep`"
    )
    assert second.startswith("::warning file=app.py,line=10,col=9,title=IG101 ")


def test_nothing_found_is_nothing_to_annotate() -> None:
    assert rendered(Report(), Format.GITHUB) == ""
    assert rendered(Report(), Format.TEXT) == "No findings."


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_each_rule_has_a_page_with_its_title_and_a_row_in_the_index(rule: object) -> None:
    assert isinstance(rule, type(RULES["IG101"]))
    assert (ROOT / rule.page).read_text().splitlines()[0] == f"# {rule.id} {rule.title}"
    assert f"| [{rule.id}]({rule.id}.md) | {rule.title} |" in (PAGES / "README.md").read_text()


def test_there_is_no_page_without_a_rule() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*RULES, "README"}


HEAD = """
import anyio, asyncio, functools, httpx, os, requests, sqlite3, subprocess, threading, time
import ingress as serve
from pathlib import Path
URL = ""
"""


def program(block: str) -> str:
    """Return the code of a page as a complete program."""
    if re.search(r"^(async )?def \w+\(self", block, re.M) and not re.search("^class", block, re.M):
        block = "class Page:\n" + "".join(f"    {line}\n" for line in block.splitlines())
    return HEAD + re.sub(r"^class ", "@serve.deployment\nclass ", block, flags=re.M)


@pytest.mark.parametrize("family", ["ASYNC", "IG"])
def test_the_first_code_of_each_page_is_found_and_the_second_is_not(
    tmp_path: Path, family: str
) -> None:
    expected = {}
    for path in PAGES.glob(f"{family}*.md"):
        if path.stem in ("IG111", "IG112", "IG113"):
            continue  # of imported applications: test_loop_sharing, test_check_processes
        wrong, right = re.findall(r"```python\n(.*?)```", path.read_text(), re.S)
        write_module(tmp_path, f"{path.stem}_wrong", program(wrong))
        write_module(tmp_path, f"{path.stem}_right", program(right))
        lines = program(wrong).splitlines()
        (line,) = [at for at, text in enumerate(lines, 1) if f"# {path.stem}" in text]
        expected[f"{path.stem}_wrong"] = [(path.stem, line)]

    settings = Settings(run_sync_in_threadpool=family == "IG")
    report = check_files([tmp_path], settings, migrate=family == "IG")

    found: dict[str, list[tuple[str, int]]] = {}
    for each in report.findings:
        found.setdefault(each.path.stem, []).append((each.rule.id, each.line))
    assert found == expected
