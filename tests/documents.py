"""Runs the blocks of a document in their order.

python    a file, whose name is in its first line
console   commands, each after `$ `, and what they print; a line of `...` is any number of lines
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from tests.servers import INGRESS, environment

ROOT = Path(__file__).parents[1]

_VARIES = [
    r"assert [2-4] == 1",
    r" in \d+\.\d+s",
    r"^[\d.]+ cores?: .*",
    r"\{200: \d+, 503: \d+\}",
    r"[0-9a-f]{8}-[0-9a-f-]{27}",
]
"""Output that depends on the machine or the time."""


def blocks(path: Path) -> list[tuple[str, str]]:
    """Return language and text of each block of a Markdown file."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def links(path: Path) -> list[str]:
    """Return the files that a document links to."""
    return re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())


class Reader:
    """Executes the blocks of a document in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / ".bin"
        self._bin.mkdir()
        plugin = ["-p", "ingress.testing.plugin", "-p", "no:cacheprovider"]
        self._command("ingress", 200, INGRESS)
        self._command("python", 80, [sys.executable])
        self._command("pytest", 80, [sys.executable, "-m", "pytest", *plugin])

    def _command(self, name: str, columns: int, words: list[str]) -> None:
        path = self._bin / name
        quoted = " ".join(f"'{word}'" for word in words)
        path.write_text(f'#!/bin/sh\nCOLUMNS={columns} exec {quoted} "$@"\n')
        path.chmod(0o755)

    def write(self, text: str) -> None:
        """Write a block as the file that its first line names."""
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, f"which file is this?\n{text}"
        (self._folder / name[1]).write_text(text)

    def run(self, session: str) -> None:
        """Run the commands of a block. Fails if the output of one differs from the document."""
        begins = [match.start() for match in re.finditer(r"^\$ ", session, re.MULTILINE)]
        assert begins[0] == 0
        for begin, end in pairwise([*begins, len(session)]):
            command, _, shown = session[begin + 2 : end].partition("\n")
            printed = self.output(command)
            assert is_shown(printed, shown.strip()), f"$ {command}\n{printed}"

    def output(self, command: str, more: Mapping[str, str] | None = None) -> str:
        """Run a command, with `more` variables, and return what it prints."""
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self._folder,
            env={
                **environment(self._folder),
                **(more or {}),
                "PATH": os.pathsep.join([str(self._bin), os.environ["PATH"]]),
                "PYTHONDONTWRITEBYTECODE": "1",  # a file that is replaced within a second
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=50,
            check=False,
        )
        return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip()


def is_shown(printed: str, shown: str) -> bool:
    """Return whether an output is the one that a document shows."""
    for each in _VARIES:
        printed = re.sub(each, "*", printed, flags=re.MULTILINE)
        shown = re.sub(each, "*", shown, flags=re.MULTILINE)
    lines = [
        r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in shown.split("\n")
    ]
    return re.fullmatch("".join(lines), printed + "\n") is not None
