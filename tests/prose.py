"""Reads the prose of the documentation: `python -m tests.prose` prints what breaks its rules.

The rules are proselint's, without those for type-setting, and the project's own: short sentences,
named subjects, no filler. Code, in blocks and in lines, is not prose.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__ as rules_of_proselint
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from tests.documents import ROOT

LONGEST = 40
"""Words of a sentence."""

OWN_RULES = {
    r"nobody|no one|somebody|someone|anybody|everybody": "name the subject: a client, a thread",
    r"simply|easily|obviously|of course|basically|actually": "say it without the filler",
    r"really|quite|extremely": "say how much, or leave it out",
    r"in order to": "to",
    r"utili[sz]e[sd]?|leverage[sd]?": "use",
    r"etc|and so on|and the like": "name the others, or the rule that gives them",
    r"whilst|upon|amongst|thereby|hereby|therein|thereof|wherein": "use the everyday word",
    r"via": "by, through, over",
    r"should be able to": "can",
}

OF_PROSELINT: Config = {
    **DEFAULT,
    "checks": {
        "dates_times.dates.decade_apostrophes": False,  # "of Ray 2.60's"
        **{name: name not in ("typography", "restricted") for name in DEFAULT["checks"]},
    },
}


def pages() -> Iterator[Path]:
    """Yield the documents that are written by hand and are not about words."""
    yield from (ROOT / "README.md", ROOT / "CHANGELOG.md")
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if path.name not in ("compatibility.md", "reliability.md"):
            yield path


def without_code(text: str) -> str:
    """Return a document with a `…` where it has code; each line keeps its number."""
    text = re.sub(
        r"^( *)```.*?^ *```$",
        lambda block: "\n" * block[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    text = re.sub(r"`[^`]*`", lambda code: "…" + "\n" * code[0].count("\n"), text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"^(#+ .*)$", r"\1.", text, flags=re.MULTILINE)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and words of each sentence, item of a list, and cell of a table."""
    line = 1
    for part in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\. ))|\||(?<=[.!?:;])\s+)", text):
        yield line + len(part) - len(part.lstrip("\n")), part
        line += part.count("\n")


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and message of each place of a document that breaks a rule."""
    prose = without_code(text)
    for number, line in enumerate(prose.splitlines(), start=1):
        for words, advice in OWN_RULES.items():
            for found in re.finditer(rf"\b(?:{words})\b", line, re.IGNORECASE):
                yield number, f"{found[0]!r}: {advice}"
    for start, sentence in sentences(prose):
        if (length := len(sentence.split())) > LONGEST:
            yield start, f"a sentence of {length} words: at most {LONGEST}"
    for found in LintFile("a page", prose).lint(OF_PROSELINT):
        yield found.pos[0] - 1, f"{found.check_result.message} ({found.check_result.check_path})"


def main() -> int:
    CheckRegistry().register_many(rules_of_proselint)
    count = 0
    for path in pages():
        for line, message in sorted(findings(path.read_text())):
            print(f"{path.relative_to(ROOT)}:{line}: {message}")
            count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
