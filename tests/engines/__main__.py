"""Run every scenario on every column, and write docs/compatibility.json and docs/compatibility.md.

    python -m tests.engines                        all of it; what `make test-ray` does
    python -m tests.engines --only NAME ...        some scenarios or modules; nothing is written
    python -m tests.engines --only ... --record    the same; their observations are recorded
    python -m tests.engines --columns ray          against what was recorded of the other columns

Exits with 1 if there is an undeclared difference, or a declared one that does not occur.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.engines.audit import audit, theirs, undecided
from tests.engines.cluster import ENVIRONMENT, cluster
from tests.engines.page import PAGE, page
from tests.engines.suite import COLUMNS, FLAGS, scenarios
from tests.engines.verdicts import FAILURES, RESULTS, ROOT, Results, compare

COLUMN_S = 900


def run(columns: list[str], only: list[str], folder: Path) -> dict[str, Any]:
    """Run the columns one after another, both values of the flag at once; those on Ray share one
    cluster. Returns the observations of each."""
    port = _free_port()
    found: dict[str, Any] = {}
    with cluster(port) as address, ThreadPoolExecutor(len(FLAGS)) as pool:

        def observed(column: str, flag: str) -> Any:
            command = [sys.executable, "-m", "tests.engines.column", column, flag, str(folder)]
            command += ["--address", address, "--url", f"http://127.0.0.1:{port}", "--only", *only]
            return _observed(command, folder / f"{column}-{flag}", f"{column}, flag {flag}")

        for column in columns:
            for flag, seen in zip(FLAGS, pool.map(partial(observed, column), FLAGS), strict=True):
                found[f"{column}-{flag}"] = seen
    return found


def _observed(command: list[str], path: Path, title: str) -> Any:
    begin = time.monotonic()
    log = path.with_suffix(".log")
    environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
            timeout=COLUMN_S,
        )
    print(f"{title}: {time.monotonic() - begin:.0f} s", flush=True)
    if ran.returncode:
        raise SystemExit(f"{title} ended with {ran.returncode}:\n{log.read_text()}")
    return json.loads(path.with_suffix(".json").read_text())


def main() -> int:
    parser = ArgumentParser("python -m tests.engines", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="scenarios or modules")
    parser.add_argument("--columns", nargs="*", default=[*COLUMNS], choices=COLUMNS)
    parser.add_argument("--record", action="store_true", help="write the observations of --only")
    parser.add_argument("--keep", type=Path, help="a folder for observations and logs")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = run(options.columns, options.only, folder)
    if {*options.columns} < {*COLUMNS} and RESULTS.exists():  # compare with the recorded columns
        recorded = Results.read().observations
        found = {**recorded, **found}
    chosen = [
        each
        for each in scenarios()
        if not options.only or {each.name, each.module} & {*options.only}
    ]
    compared = [each for each in compare(chosen, found) if each.column in options.columns]
    failures = [each for each in compared if each.verdict in FAILURES]
    for each in failures:
        print(each)
    surface = theirs()
    gaps = list(undecided(audit(surface)))
    for name in gaps:
        print(f"not the same, and not declared: {name}")
    print(f"{len(compared) - len(failures)} of {len(compared)} as they should be")
    if options.only and options.record:
        made = Results.read().with_observations(found, surface)
        made.write()
        PAGE.write_text(page(made))
        print(f"written: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
    if not options.only and {*options.columns} == {*COLUMNS}:
        took_s = round(time.monotonic() - begin)
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        made = Results(version("ray"), platform.python_version(), date, took_s, found, surface)
        made.write()
        PAGE.write_text(page(made))
        print(f"written: {RESULTS.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}; {took_s} s")
    return 1 if failures or gaps else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
