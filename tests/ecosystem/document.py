"""`docs/ecosystem.md`, from the results of the last run: python -m tests.ecosystem.document"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from importlib import metadata

from tests.ecosystem.as_class import APPS
from tests.programs import ROOT

RESULTS = ROOT / ".ecosystem"
PAGE = ROOT / "docs" / "ecosystem.md"

REASONS = {
    "fastapi_cache2": "its key has all arguments, also `self`: each replica has its own entries; "
    "`key_builder=` can leave `self` out",
    "tortoise": "refuses a second `Tortoise.init()` in a process, and the lifespan runs in each "
    "replica: initialise it once, or use one replica",
}
"""The packages that work differently with two replicas, by the names of their apps, and why."""

HEAD = """\
# Packages, beside plain FastAPI

This page says which packages of FastAPI's users work the same in a deployment. It is written by
`make test-ecosystem`. For each package, uvicorn serves one small app in three forms: as functions
of plain FastAPI, and the same functions as methods of a class, with one replica and with two. Each
form runs in its own process and gets the same requests. The answers must be equal: status, body,
the headers and cookies that the package sets, its spans, events or metrics, and the OpenAPI
schema. The apps are in [tests/ecosystem/apps](../tests/ecosystem/apps).

"""


@dataclass(frozen=True, slots=True)
class Result:
    """The comparison of one app's forms: the number of compared answers, and which are equal."""

    name: str
    answers: int
    one: bool
    two: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def version_of(package: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return metadata.version(package.partition("[")[0])
    except metadata.PackageNotFoundError:
        return ""


def page() -> str:
    """Return the page. Raises `FileNotFoundError` for an app without a result."""
    rows = []
    for path in APPS.glob("*.py"):
        result = Result(**json.loads((RESULTS / f"{path.stem}.json").read_text()))
        found = re.search(r'^PACKAGE = "(.*)"$', path.read_text(), re.MULTILINE)
        assert found is not None
        package = found[1].partition("[")[0]
        cells = [package, version_of(package), str(result.answers)]
        cells += ["equal" if each else "different" for each in (result.one, result.two)]
        rows.append(f"| {' | '.join([*cells, REASONS.get(path.stem, '')])} |")
    used = ", ".join(f"{each} {version_of(each)}" for each in ("fastapi", "starlette", "uvicorn"))
    return (
        f"{HEAD}{len(rows)} packages, with {used}.\n\n"
        "| package | version | compared answers | one replica | two replicas | |\n"
        "|---|---|---|---|---|---|\n" + "\n".join(sorted(rows, key=str.lower)) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
