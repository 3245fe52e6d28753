"""docs/reference.md: each option of a deployment and each environment variable, as in the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from ingress.config import DeploymentConfig
from ingress.core.base import settings
from ingress.core.base.options import Options
from ingress.core.base.settings import Settings
from ingress.serving.processes import resources
from tests.documents import ROOT

PAGE = ROOT / "docs" / "reference.md"
RAYS_NAMES = {"LoggingConfig": "schema.LoggingConfig"}
"""The classes of options that are not in `ray.serve.config`."""


def rows(title: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table, by the name in its first cell."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    names = [row[0].strip("`") for row in cells]
    assert len(set(names)) == len(names)
    return dict(zip(names, (row[1:] for row in cells), strict=True))


OPTIONS = rows("Options of `@serve.deployment`")
VARIABLES = rows("Environment variables")


def fields(kind: type[Options], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield each option of a class with Ray's name of it and its default, those within too."""
    of_ray = RAYS_NAMES.get(kind.__name__, f"config.{kind.__name__}")
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True)
        ray = f"serve.deployment({name})" if kind is DeploymentConfig else f"{of_ray}.{name}"
        yield prefix + name, ray, default
        for each in (field.annotation, *get_args(field.annotation)):
            if isinstance(each, type) and issubclass(each, Options):
                yield from fields(each, f"{prefix}{name}.")


FIELDS = {name: (ray, default) for name, ray, default in fields(DeploymentConfig)}


def test_the_page_has_each_option_of_a_deployment_and_no_other() -> None:
    assert "autoscaling_config.policy.policy_function" in FIELDS
    assert set(OPTIONS) == {"name", *FIELDS}


@pytest.mark.parametrize("name", FIELDS)
def test_the_default_of_an_option_is_the_one_on_the_page(name: str) -> None:
    _, default = FIELDS[name]
    shown = ast.literal_eval(OPTIONS[name][0].strip("`"))

    assert shown == (default.changed() if isinstance(default, Options) else default)


def test_the_page_says_which_options_ray_serve_does_not_have() -> None:
    api = json.loads((ROOT / "docs" / "compatibility.json").read_text())["api"]
    names = {each["name"] for each in api}

    missing = {name for name, (ray, _) in FIELDS.items() if ray not in names}

    assert {"isolation", "lanes", "loop"} <= missing
    assert {name for name, row in OPTIONS.items() if row[2] == "ingress only"} == missing


def variables_read(module: ModuleType) -> set[str]:
    """Return the environment variables that a module reads, by the syntax of its code."""
    assert module.__file__ is not None
    found: set[str] = set()
    for call in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(call, ast.Call):
            read: list[ast.expr] = []
            if isinstance(call.func, ast.Attribute) and call.func.attr == "get":
                if re.search(r"\benv", ast.unparse(call.func.value)):
                    read = call.args[:1]
            elif call.args and ast.unparse(call.args[0]) in ("env", "os.environ"):
                read = call.args[1:2]
            for name in read:
                if isinstance(name, ast.Constant):
                    found.add(str(name.value))
                elif isinstance(name, ast.Name) and name.id.isupper():
                    found.add(getattr(module, name.id))
    return found


def variables_named() -> set[str]:
    """Return the texts of the code that look like a variable of this package or of Ray Serve."""
    return {
        node.value
        for path in (ROOT / "ingress").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(INGRESS|RAY_SERVE)(_[A-Z0-9]+)+", node.value)
    }


def test_the_page_has_each_environment_variable_and_no_other() -> None:
    read = variables_read(settings) | variables_read(resources) | set(settings.NATIVE_THREADS)
    named = variables_named() - set(settings._INSTEAD)

    assert {settings.ADMIN, settings.SYNC_IN_THREADPOOL, "NO_COLOR", resources.VISIBLE} <= read
    assert set(VARIABLES) == read | named


@pytest.mark.parametrize("name", [name for name, row in VARIABLES.items() if row[0]])
def test_the_default_of_a_variable_is_the_one_on_the_page(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def effects() -> tuple[Settings, bool, bool]:
        return Settings.from_environment(), settings.handles_signals(), settings.makes_spans()

    monkeypatch.delenv(name, raising=False)
    unset = effects()
    monkeypatch.setenv(name, VARIABLES[name][0].strip("`"))

    assert effects() == unset


def test_the_links_lead_to_sections() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", PAGE.read_text())
    for path, anchor in set(targets):
        text = (PAGE.parent / path).read_text()
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
        assert not anchor or anchor in anchors, f"{path}#{anchor}"
