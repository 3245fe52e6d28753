"""docs/reliability.md, made from the record of a run of `make test-reliability`."""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.results import LIBRARIES, machine
from tests.reliability.figures import shown
from tests.reliability.promises import ROOT, Promise, carriers, promises

PAGE = ROOT / "docs" / "reliability.md"
SECTIONS = {
    "A": "Load",
    "B": "Faults",
    "C": "Bad input",
    "D": "Properties",
    "E": "Soaks",
    "F": "What it is compared with",
    "P": "Replicas in processes",
    "S": "Security",
}
HOW = """\
What is promised, the tests that hold it, and what they printed. `make test-reliability` runs them
and writes this page; `make test-reliability ARGS="-k A01"` runs those of one id and leaves the page
alone. Where a figure has a bar, it stands behind it. Loads are open: requests are sent when they
are due, however long the others take, and latencies count from then. Plain FastAPI is the same
handler on uvicorn, in the same run. A figure of several cases is their least and greatest.
"""
Lines = list[dict[str, Any]]


def page(lines: Lines) -> str:
    """Return the page of one run, given its record."""
    by_id: defaultdict[str, Lines] = defaultdict(list)
    for line in lines:
        for id in line["ids"]:
            by_id[id].append(line)
    tests = carriers()
    kept = [each for each in promises() if not each.not_yet]
    parts = ["# Reliability", HOW.strip(), _ran(lines), *_not_met(kept, by_id)]
    for letter, title in SECTIONS.items():
        rows = [each for each in kept if each.id.startswith(letter)]
        table = ["| | promise | this run | plain FastAPI | tests |", "|---|---|---|---|---|"]
        table += [_row(each, by_id[each.id], tests.get(each.id, [])) for each in rows]
        parts += [f"## {title}", "\n".join(table)]
    absent = [
        f"| {each.id} | {each.promise} | {each.not_yet} |" for each in promises() if each.not_yet
    ]
    parts += [
        "## Not yet",
        "\n".join(["| | would be promised | why not |", "|---|---|---|", *absent]),
    ]
    return "\n\n".join(parts) + "\n"


def _ran(lines: Lines) -> str:
    outcomes = [each for each in lines if "outcome" in each]
    counts = Counter(each["outcome"] for each in outcomes)
    versions = [f"{name} {version(name)}" for name in LIBRARIES]
    where = [f"{datetime.now(UTC):%Y-%m-%d}", machine(), f"Python {platform.python_version()}"]
    ran = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items())
    minutes = sum(each["seconds"] for each in outcomes) / 60
    return f"{', '.join([*where, *versions])}: {ran} in {minutes:.0f} minutes."


def _not_met(kept: list[Promise], by_id: dict[str, Lines]) -> Iterator[str]:
    missed = [
        f"- {each.id}, {text}" for each in kept for text in _figures(by_id[each.id], missed=True)
    ]
    missed += [
        f"- {each.id}: `{line['test'].rpartition('::')[2]}` {line['outcome']}"
        for each in kept
        for line in {line["test"]: line for line in by_id[each.id] if _is_bad(line)}.values()
    ]
    if missed:
        yield "Not met:\n\n" + "\n".join(missed)


def _is_bad(line: dict[str, Any]) -> bool:
    return line.get("outcome", "passed") not in ("passed", "skipped")


def _row(promise: Promise, lines: Lines, tests: list[str]) -> str:
    counts = Counter(each["outcome"] for each in lines if "outcome" in each)
    ran = [f"{count:,} {outcome}" for outcome, count in counts.items()]
    cells = [
        f"**{promise.id}**",
        promise.promise + (f" ({promise.note})" if promise.note else ""),
        "<br>".join([", ".join(ran) or "not run", *_figures(lines)]),
        "<br>".join(_plain(lines)),
        "<br>".join(f"`{test}`" for test in tests),
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _figures(lines: Lines, *, missed: bool = False) -> Iterator[str]:
    for (what, required), found in _grouped(lines, "value").items():
        is_missed = not all(
            line["holds"]
            for line in lines
            if (line.get("what"), line.get("required")) == (what, required)
        )
        bar = f" ({required})" if required else ""
        if not missed:
            yield f"{what}: {_range(found)}{bar}" + (" **not met**" if is_missed else "")
        elif is_missed:
            yield f"{what}: {_range(found)}{bar}"


def _plain(lines: Lines) -> Iterator[str]:
    for (what, _), found in _grouped(lines, "plain").items():
        yield f"{what}: {_range(found)}"


def _grouped(lines: Lines, field: str) -> dict[tuple[str, str], list[Any]]:
    """Return the values of each figure, by its name and its bar."""
    found: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
    for line in lines:
        if line.get(field) is not None:
            found[line["what"], line["required"]].append(line[field])
    return dict(found)


def _range(values: list[Any]) -> str:
    if any(isinstance(each, str) for each in values):
        return ", ".join(dict.fromkeys(map(shown, values)))
    return " to ".join(dict.fromkeys([shown(min(values)), shown(max(values))]))


def write(record: Path) -> None:
    """Make the page from the record of a run."""
    PAGE.write_text(page([json.loads(line) for line in record.read_text().splitlines()]))
