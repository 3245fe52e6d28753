"""docs/scaling.md, made from the results of `benchmarks.scaling` and a model for larger setups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import shown
from benchmarks.results import Figure, Report

SETUPS = ("1 process", "2 workers", "local Ray")
WORK_MS = (0.1, 1.0, 10.0, 100.0)

PAGE = Path(__file__).parent / "scaling.md"
"""The template of the page."""


@dataclass(frozen=True, slots=True)
class Model:
    """The processor time of a request in ms for each setup, without user code; from its no-op rate.

    The part `proxy` of `cluster` runs in one process for each node.
    """

    one: float
    workers: float
    cluster: float
    proxy: float

    @classmethod
    def of(cls, rates: dict[str, float], proxy_ms: float, cores: int) -> Model:
        one, workers, cluster = (rates[setup] for setup in SETUPS)
        return cls(1e3 / one, cores * 1e3 / workers, cores * 1e3 / cluster, proxy_ms)

    def rates(self, work_ms: float, cores: int, nodes: int) -> tuple[float, float, float]:
        """Return requests/s of one process, of workers on one machine, and of a cluster."""
        return (
            1e3 / (self.one + work_ms),
            cores * 1e3 / (self.workers + work_ms),
            nodes * min(cores * 1e3 / (self.cluster + work_ms), 1e3 / self.proxy),
        )


def page(found: Report) -> str:
    """Return the text of docs/scaling.md."""
    figures = {
        (each.row, *each.load.partition(", ")[::2], name): figure
        for each in found.results
        for name, figure in each.figures.items()
    }

    def median(row: str, setup: str, figure: str, connections: str = "") -> float:
        return _figure(figures, row, setup, figure, connections).median

    cores = int(found.machine.split()[0])
    rates = {setup: median("no-op", setup, "requests_per_s", "many") for setup in SETUPS}
    model = Model.of(rates, median("proxy", "local Ray", "cpu_ms"), cores)
    computed = {setup: median("compute", setup, "requests_per_s", "many") for setup in SETUPS}
    work_ms = max(0.0, 1e3 / computed["1 process"] - model.one)
    predicted = dict(zip(SETUPS, model.rates(work_ms, cores, 1), strict=True))
    checked = [
        f"{setup} {predicted[setup]:,.0f}/s against {computed[setup]:,.0f}/s" for setup in SETUPS
    ]
    alone = {setup: median("no-op", setup, "p50_ms", "1 connection") for setup in SETUPS}
    memory = {setup: median("memory", setup, "rss_mb") for setup in SETUPS}
    nodes = next(n for n in range(1, 1000) if model.rates(10, 8, n)[2] >= model.rates(10, 8, n)[1])
    libraries = ", ".join(f"{name} {version}" for name, version in found.libraries.items())
    return PAGE.read_text().format(
        added_ms=f"{alone['local Ray'] - alone['1 process']:.1f}",
        source=f"`python -m benchmarks.scaling`, {found.date}, {found.machine}, Python "
        f"{found.python}, {libraries}.",
        flag="RAY_SERVE_RUN_SYNC_IN_THREADPOOL",
        measured=_measured(figures),
        costs=f"{model.one:.3f}, {model.workers:.3f} and {model.cluster:.2f} ms",
        cores=cores,
        t_ms=f"{work_ms:.1f}",
        checked="; ".join(checked),
        beyond="\n".join(_beyond(model, work) for work in WORK_MS),
        added_mb=f"{memory['2 workers'] - memory['1 process']:.0f}",
        proxy=f"{model.proxy:.2f}",
        bound=f"{1e3 / model.proxy:,.0f}",
        cr=f"{model.cluster:.1f}",
        pays_ms=f"{9 * model.cluster:.0f}",
        more=f"{model.cluster / model.one:.0f}",
        nodes=nodes,
        s="" if nodes == 1 else "s",
    )


Figures = dict[tuple[str, str, str, str], Figure]


def _figure(figures: Figures, row: str, setup: str, name: str, connections: str) -> Figure:
    """Return a figure; `connections` is "1 connection", "many", or empty if there are none."""
    for (of_row, of_setup, of_connections, of_name), figure in figures.items():
        kind = "many" if of_connections.endswith("s") else of_connections
        if (of_row, of_setup, of_name, kind) == (row, setup, name, connections):
            return figure
    raise KeyError((row, setup, name, connections))


def _measured(figures: Figures) -> str:
    rows = [
        ("no-op, requests/s", "no-op", "requests_per_s", "many"),
        ("... p50 of a lone request", "no-op", "p50_ms", "1 connection"),
        ("... p99 of a lone request", "no-op", "p99_ms", "1 connection"),
        ("`compute`, requests/s", "compute", "requests_per_s", "many"),
        ("... p50 of a lone request", "compute", "p50_ms", "1 connection"),
        ("`wait`, 64 connections, requests/s", "wait", "requests_per_s", "many"),
        ("... p50 of a lone request", "wait", "p50_ms", "1 connection"),
        ("from the command to the first answer", "start", "first_answer_s", ""),
        ("memory", "memory", "rss_mb", ""),
    ]
    lines = [f"| | {' | '.join(SETUPS)} |", "|---|---:|---:|---:|"]
    for text, row, name, connections in rows:
        found = (_figure(figures, row, setup, name, connections) for setup in SETUPS)
        lines.append(f"| {text} | {' | '.join(_cell(name, each) for each in found)} |")
    return "\n".join(lines)


def _cell(name: str, figure: Figure) -> str:
    median = shown(name, figure.median)
    if figure.runs == 1 or not name.endswith("_per_s"):
        return median
    least, greatest = (
        shown(name, each).removesuffix("/s") for each in (figure.least, figure.greatest)
    )
    return f"{median} [{least}-{greatest}]"


def _beyond(model: Model, work_ms: float) -> str:
    one, workers, node = model.rates(work_ms, 8, 1)
    cells = (one, workers, node, node * 4, node * 32)
    return f"| {work_ms:g} ms | {' | '.join(f'{each:,.0f}' for each in cells)} |"
