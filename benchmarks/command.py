"""Code shared by the commands: progress, the table, the files, and the exit code."""

from __future__ import annotations

import shutil
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator, Mapping
from contextlib import closing

from rich.console import Console

from benchmarks import document, report
from benchmarks.results import FOLDER, MIN_PAIRS, Report, Result
from benchmarks.servers import ROOT, BenchmarkError

Results = Generator[Result, None, None]


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type with a lower bound."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"must be at least {least}")
        return value

    return number


pairs = at_least(MIN_PAIRS)


def require_wrk() -> None:
    """Exit if wrk is not installed."""
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing; get it with `apt-get install wrk`")


def run(
    name: str,
    results: Results,
    seconds: int,
    *,
    whole: bool = True,
    others: Mapping[str, str] | None = None,
) -> int:
    """Measure and print; if `whole`, write results/`name`.json and the document.

    Returns the exit code. SIGTERM also ends the servers.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(highlight=False, soft_wrap=True)
    found: list[Result] = []
    failed = 0
    try:
        with closing(results):
            for result in results:
                console.print(_line(result), markup=False)
                found.append(result)
    except BenchmarkError as error:
        print(f"{error}\nnothing is written", file=sys.stderr)
        failed = 1
    except KeyboardInterrupt:
        print("stopped; nothing is written", file=sys.stderr)
        failed = 128 + signal.SIGINT
    if not found:
        return failed
    made = Report.of(found, seconds, others)
    console.width = max(console.width, report.WIDTH)
    console.print(report.table(made))
    if whole and not failed:
        path = FOLDER / f"{name}.json"
        made.write(path)
        for written in (path, *document.write()):
            console.print(f"written: {written.relative_to(ROOT)}")
    return failed


def _line(result: Result) -> str:
    baseline, ours, ratio, *_ = report.cells(result)
    against = f" against {baseline}" if baseline else ""
    return f"{report.title(result)}: {ours}{against}, {ratio}".removesuffix(", ")
