"""`make test-reliability`: run every test that carries an id, then write docs/reliability.md.

With arguments, which go to pytest, it runs the selected tests and leaves the page alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.reliability import figures, page
from tests.reliability.promises import ROOT, TESTS

ROUNDS = "34"
"""Number of rounds of random tests: with three seeds each, every cell runs 100 times."""
COMMAND = [sys.executable, "-m", "pytest", "-s", "--timeout=900", "-m", figures.MARK]


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "figures.jsonl")
        record.touch()
        environ = {"INGRESS_RELIABILITY_ROUNDS": ROUNDS, **os.environ, figures.FILE: str(record)}
        ran = subprocess.run([*COMMAND, *arguments, str(TESTS)], cwd=ROOT, env=environ, check=False)
        if not arguments:
            page.write(record)
            print(f"written: {page.PAGE.relative_to(ROOT)}")
    return ran.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
