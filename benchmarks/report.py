"""Results as cells of text, and as a table on the terminal."""

from __future__ import annotations

from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import targets
from benchmarks.results import Report, Result
from benchmarks.targets import Target

WIDTH = 156  # width of the table in characters
COLUMNS = ("baseline", "ingress", "ratio [min-max]", "p50 ms", "p99 ms", "required")


def shown(name: str, value: float) -> str:
    """Return a figure with the unit at the end of its name."""
    if name.endswith("_added"):
        return f"{'+' if value >= 0 else '-'}{shown(name.removesuffix('_added'), abs(value))}"
    for ending, form in (
        ("_ratio", "{:,.0f} x" if value >= 100 else "{:.2f} x"),
        ("_per_s", "{:,.0f}/s" if value >= 100 else "{:,.1f}/s"),
        ("_us", "{:,.0f} us"),
        ("_ms", "{:,.0f} ms" if value >= 100 else "{:.3f} ms" if value < 1 else "{:.1f} ms"),
        ("_s", "{:.2f} s"),
        ("_mb", "{:.2f} MB" if value < 10 else "{:.1f} MB"),
        ("", "{:,.0f}"),
    ):
        if name.endswith(ending):
            return form.format(value)
    raise AssertionError("every name ends with nothing")


def title(result: Result) -> str:
    return ", ".join(filter(None, (result.row, result.load, result.setup)))


def label(result: Result) -> str:
    """Return a shorter title."""
    return title(result).replace("connections", "conn.").replace("connection", "conn.")


def requirement(target: Target) -> str:
    percentile = f"{target.figure[:3]} " if target.figure.startswith("p") else ""
    what = "errors " if target.figure == "errors" else percentile
    return f"{what}{target.relation} {shown(target.figure, target.required)}"


def verdict(target: Target, result: Result) -> str:
    if target.is_met(result):
        return f"{requirement(target)}: met"
    median = result.figures[target.figure].median
    found = shown(target.figure, median)
    if found == shown(target.figure, target.required):
        found = f"{median:.5g}"  # so close that the rounded figure would look met
    return f"{requirement(target)}: NOT MET, {found}"


def cells(result: Result) -> list[str]:
    """Return the text for each of `COLUMNS`; missing figures are empty."""
    main, figures = result.main, result.figures
    ours = figures[main]
    baseline = ratio = ""
    spread, name = ours, main
    if result.baseline:
        theirs = figures[f"baseline_{main}"].median
        baseline = shown(main, theirs)
        if theirs:  # a ratio to nothing says nothing
            spread, name = figures[f"{main}_ratio"], f"{main}_ratio"
            ratio = shown(name, spread.median)
    if spread.runs > 1:
        least, greatest = (
            shown(name, each).split()[0].removesuffix("/s")
            for each in (spread.least, spread.greatest)
        )
        ratio = f"{ratio} [{least}-{greatest}]".strip()
    percentiles = []
    for percentile in ("p50_ms", "p99_ms"):
        known = [
            figures[each].median
            for each in (f"baseline_{percentile}", percentile)
            if each in figures
        ]
        percentiles.append(
            " → ".join(f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in known)
        )
    required = "\n".join(verdict(target, result) for target in targets.of(result))
    return [baseline, shown(main, ours.median), ratio, *percentiles, required]


def table(report: Report) -> Table:
    """Return the table of all results, grouped by baseline."""
    made = Table(title=f"ingress on {report.machine}", box=SIMPLE_HEAD)
    made.add_column("", no_wrap=True)
    for column in COLUMNS:
        justify = "left" if column == "required" else "right"
        made.add_column(column.replace("[", "\\["), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for baseline, results in groupby(report.results, lambda result: result.baseline):
        made.add_row(f"against {baseline}" if baseline else "", style="bold")
        for result in results:
            made.add_row(label(result), *(cell.replace("[", "\\[") for cell in cells(result)))
        made.add_section()
    return made
