"""The view of a server as tables for a terminal: for `ingress status` and `ingress top`.

The view is one that `terminal.tamed` has returned: its texts are an application's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from ingress.observe.live.view import DeploymentView, ReplicaOfServer, View
from ingress.state.memory import MemoryOfProcess
from ingress.state.running import Batches, Lane, Loop, StallOfLoop

MIB = 1 << 20
_BARS = "▁▂▃▄▅▆▇█"
_GOOD = ("RUNNING", "HEALTHY")
_BAD = ("DEPLOY_FAILED", "UNHEALTHY", "HELD", "STALLED", "FAILING")
_MARKS = {"bad": ("!!", "bold red"), "warn": ("! ", "yellow")}

SORTS: Mapping[str, Callable[[DeploymentView], str | float]] = {
    "name": lambda each: each["name"],
    "rate": lambda each: -each["rate"],
    "latency": lambda each: -(each["p99"] or 0),
    "errors": lambda each: -each["errors"],
    "queue": lambda each: -each["queued"],
}
"""The orders of deployments, by their names."""


def headline(view: View) -> Text:
    """Return the line about the server."""
    workers = len(view["workers"])
    text = Text(no_wrap=True, overflow="ellipsis").append(f"server {view['pid']}", "bold")
    several = f", {workers} workers" if workers > 1 else ""
    text.append(several + (f" at {view['url']}" if view["url"] else ""))
    if view["memory"]:
        text.append(f"  {_memory_of(view)}", "dim")
    return text.append("  ").append(*_health(view))


def _memory_of(view: View) -> str:
    """Return the memory of all processes, and its growth by the hour once it is known."""
    rss = sum(each["rss_bytes"] for each in view["memory"]) / MIB
    known = [each["bytes_per_h"] for each in view["memory"] if each["bytes_per_h"] is not None]
    return f"{rss:.0f} MiB" + (f" ({sum(known) / MIB:+.0f}/h)" if known else "")


def _health(view: View) -> tuple[str, str]:
    count = len(view["problems"])
    if not view["is_healthy"]:
        return "not healthy", "bold red"
    if count:
        return f"healthy, with {count} remark{'s' * (count > 1)}", "yellow"
    return "healthy", "green"


def problems(view: View, most: int = 1000) -> list[Text]:
    """Return a line of at most `most` characters for each problem, the gravest first."""
    lines = []
    for each in view["problems"]:
        mark, style = _MARKS[each["level"]]
        where = ":".join(filter(None, (each["application"], each["deployment"])))
        line = Text().append(f"{mark} ", style)
        line.append(f"{where}: " if where else "", "bold")
        line.append(" ".join(each["text"].split()))
        line.truncate(most, overflow="ellipsis")
        lines.append(line)
    return lines


def memory(found: MemoryOfProcess) -> list[Text]:
    """Return the lines about the growth of one process."""
    before, after = found["before_bytes"] / MIB, found["after_bytes"] / MIB
    head = Text(found["process"], "bold")
    if found["problem"]:
        return [head.append(f": {found['problem']}", "red")]
    lines = [head.append(f"  {before:.0f} -> {after:.0f} MiB", "not bold")]
    for each in found["lines"]:
        size = f"{each['bytes'] / 1024:+,.0f} KiB"
        at = f"{os.path.basename(each['file'])}:{each['line']}"
        lines.append(Text(f"  {size:>14} in {each['blocks']:>7,} blocks  {at}: {each['source']}"))
    if found["types"]:
        kinds = ", ".join(f"{each['objects']:+,} {each['type']}" for each in found["types"][:5])
        lines.append(Text(f"  objects: {kinds}", "dim"))
    return lines


def deployments(
    view: View,
    *,
    sort: str = "",
    wanted: str = "",
    most: int | None = None,
    charts: bool = False,
) -> Table:
    """Return the table of deployments, application by application unless it is sorted.

    `wanted` is a part of the names that are shown, `most` the number of rows. With `charts` it has
    small ones, in place of two percentiles.
    """
    percentiles: Sequence[Literal["p50", "p95", "p99"]]
    percentiles = ("p99",) if charts else ("p50", "p95", "p99")
    every = [each for one in view["applications"] for each in one["deployments"]]
    cancelled = ["cancel/s"] * any(each["cancelled"] for each in every)
    with_jobs = ["jobs"] * any(each["jobs"] for each in every)
    heads = ["deployment", "status", "replicas", "run", "queue", *with_jobs]
    heads += ["req/s", "err/s", *cancelled]
    heads += percentiles
    table = _table(heads, right_from=3)
    if charts:
        table.add_column("req/s", width=8, no_wrap=True)
        table.add_column("p99", width=8, no_wrap=True)
    rows = [
        (application, each)
        for application in view["applications"]
        for each in application["deployments"]
        if wanted.lower() in f"{application['name']}:{each['name']}".lower()
    ]
    if sort:
        rows.sort(key=lambda row: SORTS[sort](row[1]))
    several = len(view["applications"]) > 1
    for application, each in rows[:most]:
        name = f"{application['name']}:{each['name']}" if several else each["name"]
        row = [
            Text(name, "bold"),
            _status(each["state"]),
            _states(each["replica_states"]),
            Text(str(each["ongoing"])),
            Text(str(each["queued"])),
            *(jobs_of(each["jobs"]) for _ in with_jobs),
            Text(_number(each["rate"])),
            Text(_number(each["errors"]), "bold red" if each["errors"] else ""),
            *(Text(_number(each["cancelled"])) for _ in cancelled),
            *(Text(milliseconds(each[key])) for key in percentiles),
        ]
        if charts:
            row += [Text(sparkline(each["recent"][key], 8), "cyan") for key in ("rate", "p99")]
        table.add_row(*row)
    if most is not None and len(rows) > most:
        table.add_row(Text(f"and {len(rows) - most} more", "dim"))
    return table


def jobs_of(jobs: Mapping[str, Any] | None) -> Text:
    """Return the states of jobs that are not over."""
    states = ("waiting", "retrying", "running", "dead", "unreadable")
    found = [f"{jobs[each]} {each}" for each in states if jobs and jobs[each]]
    return Text(", ".join(found), "bold red" if jobs and jobs["dead"] else "")


def replicas(view: View, *, wanted: str = "", most: int | None = None) -> Table:
    """Return the table of replicas, with what is on each: those that stand or work come first."""
    table = _table(
        ["replica", "loop", "thr", "lanes, batches", "runs now", "last stall"], right_from=9
    )
    table.columns[-1].min_width = 20
    found = [
        each
        for each in view["replicas"]
        if wanted.lower() in f"{each['application']}:{each['deployment']}".lower()
    ]
    found.sort(key=lambda each: (-each["loop"]["stands_ms"], -each["ongoing"]))
    several = len(view["workers"]) > 1
    for each in found[:most]:
        process = each["process"] if several else each["pid"]
        name = Text(f"{each['deployment']}#{each['replica']}", "bold")
        table.add_row(
            name.append(f" {process}", "dim") if process else name,
            _busy(each["loop"]),
            _threads(each),
            Text(" ".join([*map(_lane, each["lanes"]), *map(_batches, each.get("batches", ()))])),
            _runs(each),
            _last_stall(each["stalls"]),
        )
    if most is not None and len(found) > most:
        table.add_row(Text(f"and {len(found) - most} more", "dim"))
    return table


def _batches(chosen: Batches) -> str:
    """Return what `target_latency_ms` has chosen: "predict<=32 1.2ms"."""
    name = chosen["name"].rpartition(".")[2]
    return f"{name}<={chosen['size']} {_number(chosen['wait_ms'])}ms"


def _table(heads: Sequence[str], right_from: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for number, head in enumerate(heads):
        justify: Literal["left", "right"] = "right" if number >= right_from else "left"
        table.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis")
    return table


def _status(status: str) -> Text:
    return Text(status, "green" if status in _GOOD else "bold red" if status in _BAD else "yellow")


def _states(states: Mapping[str, int]) -> Text:
    if [*states] == ["RUNNING"]:
        return Text(str(states["RUNNING"]))
    return Text(", ".join(f"{count} {state}" for state, count in states.items()) or "0", "yellow")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or not value else f"{value:.1f}"


def milliseconds(value: float | None) -> str:
    """Return a time in ms for people: without a unit it is in ms."""
    if value is None:
        return "-"
    if value >= 1_000:
        return f"{value / 1e3:.{1 if value < 100_000 else 0}f}s"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _busy(loop: Loop) -> Text:
    if loop["stands_ms"]:
        return Text(f"STANDS {milliseconds(loop['stands_ms'])}", "bold red")
    return Text("-" if loop["busy"] is None else f"{loop['busy']:.0%}")


def _threads(replica: ReplicaOfServer) -> Text:
    if replica["pid"] and not replica["loop"]["thread"]:  # its process has not answered
        return Text("-")
    return Text(f"{len(replica['threads']['runs'])}/{replica['threads']['limit']}")


def _lane(lane: Lane) -> str:
    queued = f"+{lane['queued']}" if lane["queued"] else ""
    return f"{lane['name']} {lane['ongoing']}/{lane['limit']}{queued}"


def _runs(replica: ReplicaOfServer) -> Text:
    """Return the code that has run longest; without any, the number of calls that await."""
    every = [replica["loop"]["runs"], *replica["threads"]["runs"]]
    every += [run for lane in replica["lanes"] for run in lane["runs"]]
    runs = [run for run in every if run is not None]
    if runs:
        first = max(runs, key=lambda each: each["ms"] or 0)
        ms = "" if first["ms"] is None else f" {milliseconds(first['ms'])}"
        more = f" +{len(runs) - 1}" if len(runs) > 1 else ""
        return Text(f"{first['method'] or first['title']}{ms}{more}")
    waiting = len(replica["calls"]) + replica["more_calls"]
    return Text(f"{waiting} awaiting" if waiting else "", "dim")


def _last_stall(stalls: Iterable[StallOfLoop]) -> Text:
    for each in stalls:
        line = each["line"]
        at = f" {os.path.basename(line['file'])}:{line['line']}" if line else ""
        why = {"gil": " GIL", "starved": " no processor"}.get(each["reason"], "")
        return Text(f"{milliseconds(each['ms'])}{why}{at}")
    return Text("")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the last values as bars; the highest one is full, and a space is no value."""
    last = list(values)[-width:]
    most = max((each or 0.0 for each in last), default=0.0)
    if not most:
        return _BARS[0] * len(last)
    return "".join(
        " " if each is None else _BARS[round(each / most * (len(_BARS) - 1))] for each in last
    )
