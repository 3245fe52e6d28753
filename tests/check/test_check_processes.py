"""`ingress check` and `ingress explain` of deployments with `isolation="process"`."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ingress.check.checker import check_application
from ingress.cli.target import Output
from ingress.core.base.settings import Settings
from ingress.observe.inspection.explain import explain
from ingress.observe.inspection.table import as_json, show
from tests.documents import blocks
from tests.servers import ROOT, write_module

HEAD = "import threading\nimport ingress as serve\n"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(source: str) -> ModuleType:
        write_module(tmp_path, "users", HEAD + source)
        sys.modules.pop("users", None)
        return __import__("users")

    yield load
    sys.modules.pop("users", None)


def found(app: Any, folder: Path) -> list[tuple[str, int]]:
    report = check_application(app, "users", folder, Settings(), migrate=False)
    return [(each.rule.id, each.line) for each in report.findings if each.rule.id[:2] == "IG"]


@pytest.mark.parametrize("rule", ["IG112", "IG113"])
def test_the_first_code_of_each_page_is_found_and_the_second_is_not(
    load: Any, tmp_path: Path, rule: str
) -> None:
    wrong, right = [text for _, text in blocks(ROOT / f"docs/rules/{rule}.md")]
    line = next(n for n, text in enumerate((HEAD + wrong).splitlines(), 1) if f"# {rule}" in text)

    module = load(wrong)
    assert found(getattr(module, "app", None) or module.Counter.bind(), tmp_path) == [(rule, line)]
    module = load(right)
    assert found(getattr(module, "app", None) or module.Counter.bind(None), tmp_path) == []


WRITES = """
seen = []
total = 0
names = {}
local = threading.local()

@serve.deployment(ISOLATION)
class Model:
    def __init__(self):
        names.update(a=1)

    async def __call__(self, x):
        global total
        total += 1
        seen.append(x)
        names["x"] = 2  # noqa: IG112
        del names["x"]
        total_here = total
        self.seen = seen
        names = {}
        return total_here
"""


def test_each_write_of_a_global_is_found_in_processes_only(load: Any, tmp_path: Path) -> None:
    source = WRITES.replace("        names = {}\n", "")
    lines = [
        number
        for number, text in enumerate((HEAD + source).splitlines(), 1)
        if text.strip() in ("names.update(a=1)", "total += 1", "seen.append(x)", 'del names["x"]')
    ]

    isolated = load(source.replace("ISOLATION", 'isolation="process"')).Model.bind()
    assert found(isolated, tmp_path) == [("IG112", line) for line in lines]
    assert found(load(source.replace("ISOLATION", "")).Model.bind(), tmp_path) == []


def test_a_local_name_is_no_global(load: Any, tmp_path: Path) -> None:
    source = WRITES.replace("ISOLATION", 'isolation="process"').replace("global total", "total = 0")
    lines = [line for _, line in found(load(source).Model.bind(), tmp_path)]

    texts = (HEAD + source).splitlines()
    assert [texts[each - 1].strip() for each in lines] == ["names.update(a=1)", "seen.append(x)"]


def test_explain_says_that_replicas_are_processes(load: Any) -> None:
    source = WRITES.replace("ISOLATION", 'isolation="process", num_replicas=2, fairness_key="x-t"')
    told = explain(load(source).Model.bind(), Settings(run_user_code_in_separate_thread=False))

    (deployment,) = as_json(told)["deployments"]
    assert deployment["place"] == "process"
    assert {row.places[0].thread for row in told.rows} == {"Model#N"}
    console = Output(width=200, record=True, quiet=False, file=StringIO())
    show(told, console)
    place = "in turns by x-t, each in a process, event loop Model#N"
    assert place in console.export_text()
