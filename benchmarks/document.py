"""docs/benchmarks, docs/scaling.md and the README's benchmarks, made from the stored results.

Results of another machine give the same pages with other figures.
`python -m benchmarks.document` makes them again without measuring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks import charts, scaling_page, targets
from benchmarks.charts import Bar, Chart
from benchmarks.report import COLUMNS, cells, label, shown, title
from benchmarks.results import FOLDER, Report, Result
from benchmarks.rows import PROCESS_ROWS, ROWS
from benchmarks.servers import ROOT
from benchmarks.slices import SLICES
from benchmarks.starts import STARTS

DOCS = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
SCALING = ROOT / "docs" / "scaling.md"
EQUAL = "both in processes"
BEGIN, END = "<!-- benchmarks -->\n", "<!-- /benchmarks -->\n"
SHORT = ("async", "async-query", "model", "def", "def-depends", "websocket", "call")
"""The rows of the table in the README."""

HOW = """\
All measurements, with the requirements that they meet or miss: against plain FastAPI, against other
servers, and of ingress against itself. `make bench` and the commands below repeat them.

| term | meaning |
|---|---|
| *ratio* | ingress over its baseline: the median of all pairs, with the least and the greatest |
| latency | medians over the runs, baseline → ingress |
| *both 0* | the flags `..._USER_CODE_IN_SEPARATE_THREAD` and `..._ROUTER_IN_SEPARATE_LOOP` at 0 |
| *sync 0*, *sync 1* | `RAY_SERVE_RUN_SYNC_IN_THREADPOOL` at 0, at 1 |

All other [variables](../reference.md#environment-variables) have their defaults. The two runs of a
pair follow each other, on servers that were started for the row with the same settings (uvloop,
httptools, no access log, one process). A noisy machine affects both runs, so the ratio says more
than the rates. No run is left out, and fewer than five pairs are not shown. The figures of every
run are in `benchmarks/results/*.json`.
"""
_HOPS = "a request crosses to the user's loop and back: two sleeping threads are woken"
_CORES = "server, child and client share two cores, and both processes handle each request"
WHY = {
    "async": _HOPS,
    "def": "two sleeping threads are woken, as on plain FastAPI; the bound is 0.05 to 0.07 ms",
    "websocket": "a message crosses to the user's loop and back through bounded queues",
    "call": "5 us more in process, 15 behind a socket with cold caches; no single step",
    "chain-2": "each deployment is a call with a slot of its own and two hops",
    "chain-5": "each deployment is a call with a slot of its own and two hops",
    "replicas-2": "each replica has its own loop and thread: fewer requests share a wake-up",
    "replicas-8": "a request switches threads 3 times instead of 0.2, each with the GIL",
    "workers-2": "two computing workers and the client share two cores; 1.73 to 1.96 by run",
    "import": (
        "ingress is imported, besides FastAPI; garbage collections, one of them full, take 0.4 of "
        "the difference"
    ),
    "start": "ingress is imported, and its control threads start",
    "memory": "the code of ingress and its control threads",
    "1,000 replicas": "the thread of a call has slept, and has cold caches",
    "process": f"{_CORES}; the row `crossing` is the bound of a lone request",
    "crossing": "no part of ingress: two sleeping processes are woken, with cold caches",
    "process-thread": _CORES,
    "process-stream": "each chunk crosses two processes",
    "process-download": "each chunk is copied into shared memory, and out of it again",
    "process-compute-2": f"{_CORES}: two children alone would take both",
    "process call": "each call is written and read twice; a lone one wakes six sleeping threads",
    "batches, fixed cost": (
        "0.95 is one step of 5 %; with either setting the median of p99 was 41 to 52 ms at the "
        "rates that were tried, 815 to 1,780/s: chance decides where it crosses 50"
    ),
    "no-op": "CPython without the GIL takes more processor time for a no-op",
    "def, 5 ms, against mosec, 2 processes": "both cores compute all the time in either",
    "start of mosec": "mosec imports no FastAPI",
    "no-op in 1 process on mosec": "mosec's HTTP server is written in Rust",
    "computing in 2 processes on mosec": (
        "the server's process, in Python, takes 0.1 of the two cores; mosec's is written in Rust"
    ),
}
"""The reason for each row that may be slower. docs/performance.md has the measurements."""
SAME = """\
On {machine}, 32 connections, one replica; medians of pairs that ran in turn. *both 0*: the two
SEPARATE flags at 0. Ray Serve is in its best mode on one machine, once also in its default. `make
bench` measures on yours. [All rows, modes and requirements](docs/benchmarks/README.md).
"""
IN_PROCESS = """\
`call` is one no-op deployment, called from an event loop in the same process; in a chain each
deployment awaits the next. The other three have the shape of the benchmarks of Ray Serve's
documentation, on one machine instead of 33. `recursive` is 10 deployments x 100 replicas, each of
which calls the next five at once: a request is 480 calls, and one run takes a minute. `ensemble`
sends an input to 10 nodes and sums their answers, 4 clients x 20 requests.
"""
PEERS = """\
The newest versions on PyPI, each in an environment of its own, with its own no-op service and its
own server; `ingress` answers the same request. Ray Serve has every replica in a process of its own,
behind a cluster: its purpose is more than one machine. Memory is the sum of all processes; shared
pages count in each. In the rows with processes, both servers run user code in that many child
processes, `ingress` with `isolation="process"`; *computing* takes 5 ms of Python. The HTTP server
of mosec is written in Rust.

Ray Serve's modes, by the processes that a request goes through, and what stands against them:

- default: the proxy and the replica; against `ingress` by default, one process.
- *both 0*, the two SEPARATE flags at 0: the same processes; against the same flags, one loop.
- *throughput mode*, `RAY_SERVE_THROUGHPUT_OPTIMIZED=1`: the same processes; against the same
  variable, which sets both flags to 0.
- *the replica's port*, in that mode: the client connects past the proxy to the replica, one
  process; against the same. Without the proxy, a balancer has to choose among replicas and retry.
- *HAProxy*, `RAY_SERVE_ENABLE_HA_PROXY=1` with an installed HAProxy: that and the replicas; against
  `isolation="process"`, the server and the replicas.

One machine does not show what Ray Serve is for: a proxy on each machine, actors whose objects stay
in shared memory, a replica on the machine with a free GPU.

Three rows are those of Ray Serve's documentation, in a size that Ray Serve can have on one machine,
where each replica is a process: the ensemble with one replica for each of its 11 deployments;
`recursive` with 6 deployments x 2 replicas, so that a request is 32 calls; and a no-op on 8
replicas. They are called by handle, 4 clients x 20 requests; in the throughput mode by gRPC.
`ingress` has its replicas in threads, except in the rows *both in processes*.
"""

PROCESSES = """\
Replicas with `isolation="process"`: one in a process against plain FastAPI and against one in a
thread, two that compute against one thread, calls by handle, and an array of 10 MB. `crossing` is
the lower bound of a lone request in another process on this machine, for any server.
[When to use them](../processes.md).
"""

FREE_THREADING = """\
The same version of CPython without the GIL and with it, both built by one script with
profile-guided optimisation. *10 ms* and *1.3 ms* are additions in Python. The model is read by
NumPy, 20 MB for each request. Server and client share the machine's cores.
[What this means for a service](../free-threading.md).
"""

OVERLOAD = """\
A deployment that can answer 200 requests a second gets more, each with a deadline of one second.
The [overload policy](../timeouts.md#under-overload) is compared with the commit before it, where
requests were served in order of arrival until their deadline.
"""

BATCHING = """\
`@serve.batch(target_latency_ms=50)` is compared with the best fixed setting, which a search found,
with the default setting, and with BentoML's adaptive batching with the same target. The figure is
the greatest rate at which 99 % of the requests are answered within 50 ms; it is found in steps of
5 %, with all servers in turn. The chosen and the fixed setting begin each climb at one rate. One
model is eight layers of NumPy, whose time grows with its batch; the other takes 20 ms for any
batch. In the rows with 10 a second, the latency of a lone request is compared with a setting that
never waits.
[How size and wait are chosen](../batching.md#batches-that-tune-themselves).
"""

Pages = dict[Path, str]
Charts = dict[str, Chart]


def pages(reports: Mapping[str, Report], readme: str) -> Pages:
    """Return the text of each page; `reports`, by name, may be incomplete."""
    made: Pages = {}
    text = ["# Benchmarks", HOW, _slower(reports)]
    sections = {
        "http": _http,
        "handles": _handles,
        "processes": _processes,
        "free-threading": _free_threading,
        "peers": _peers,
        "overload": _overload,
        "batching": _batching,
    }
    for name, section in sections.items():
        if found := reports.get(name):
            parts, drawn = section(found)
            text += parts
            made |= {DOCS / f"{name}.svg": charts.svg(chart) for name, chart in drawn.items()}
    made[DOCS / "README.md"] = "\n\n".join(part.strip() for part in text if part) + "\n"
    if scaling := reports.get("scaling"):
        made[SCALING] = scaling_page.page(scaling)
    if http := reports.get("http"):
        made[README] = _in_readme(http, reports.get("peers"), readme)
    return made


def _http(found: Report) -> tuple[list[str], Charts]:
    results = found.results
    before = [each for each in results if each.load == "fresh process"]
    plain = [each for each in results if each not in before and "plain " in each.baseline]
    itself = [each for each in results if each not in before and each not in plain]
    streams = [each for each in plain if each.load == "4 connections"]
    served = [each for each in plain if each.load == "32 connections"]
    as_set = [each for each in served if not each.setup]
    alone = [each for each in plain if each.load == "1 connection"]
    growing = [each for each in plain if each.row in ("async", "def") and not each.setup]
    drawn = {
        "ratio": _ratios("Throughput against plain FastAPI and Starlette", served, "plain"),
        "streams": _ratios("Throughput of streams against plain FastAPI", streams, "plain"),
        "connections": _both("Throughput by connections", "requests per second", growing),
        "latency": _both("Median latency, one connection", "milliseconds", alone, "p50_ms"),
        "p99": _both("p99 latency, 32 connections", "milliseconds", as_set, "p99_ms"),
    }
    of_itself = {"itself": _ratios("Throughput against itself", itself, "without")}
    text = [
        "## Against plain FastAPI and Starlette",
        _from(found, "make bench"),
        *_section(plain, drawn),
        "## Against itself",
        "The effect of more deployments, replicas or worker processes, and of batching.",
        *_section(itself, of_itself),
        "## Before the first request",
        *_section(before, {}),
    ]
    return text, _there(drawn | of_itself)


def _handles(found: Report) -> tuple[list[str], Charts]:
    rates = [each for each in found.results if each.main == "calls_per_s"]
    bars = [Bar(label(each), each.figures[each.main]) for each in rates]
    drawn = {"handles": Chart("Calls by handle", "calls per second", bars, _form("calls_per_s"))}
    where = _from(found, "make bench-handles")
    return ["## In one process", where, IN_PROCESS, *_section(found.results, drawn)], _there(drawn)


def _processes(found: Report) -> tuple[list[str], Charts]:
    rates = [each for each in found.results if each.baseline and each.main.endswith("_per_s")]
    drawn = {"processes": _ratios("Throughput of replicas in processes", rates, "theirs")}
    where = _from(found, "make bench-processes")
    text = ["## Replicas in processes", where, PROCESSES, *_section(found.results, drawn)]
    return text, _there(drawn)


def _free_threading(found: Report) -> tuple[list[str], Charts]:
    name = "Throughput without the GIL against the same Python with it"
    drawn = {"free-threading": _ratios(name, found.results, "with the GIL")}
    where = _from(found, 'make bench-free-threading PYTHONS="..."')
    text = ["## Without the GIL", where, FREE_THREADING, *_section(found.results, drawn)]
    return text, _there(drawn)


def _peers(found: Report) -> tuple[list[str], Charts]:
    rates = [each for each in found.results if each.main == "requests_per_s"]
    starts = [each for each in found.results if each.main == "first_answer_s"]
    drawn = {
        "peers": _ratios("Throughput against other servers", rates, "theirs", logarithmic=True),
        "starts": _both("From the start of the process to the first answer", "seconds", starts),
    }
    where = _from(found, "make bench-peers")
    return ["## Against other servers", where, PEERS, *_section(found.results, drawn)], _there(
        drawn
    )


def _overload(found: Report) -> tuple[list[str], Charts]:
    drawn = {"overload": _both("Goodput over load", "answers in time per second", found.results)}
    where = _from(found, "make bench-overload BEFORE=<another checkout>")
    return ["## Overload", where, OVERLOAD, *_section(found.results, drawn)], _there(drawn)


def _batching(found: Report) -> tuple[list[str], Charts]:
    rates = [each for each in found.results if each.main == "requests_per_s"]
    drawn = {"batching": _ratios("Requests/s with p99 within 50 ms", rates, "theirs")}
    where = _from(found, "make bench-batching")
    return ["## Batches", where, BATCHING, *_section(found.results, drawn)], _there(drawn)


def _ratios(name: str, results: list[Result], one: str, *, logarithmic: bool = False) -> Chart:
    bars = []
    for each in results:
        figure = f"{each.main}_ratio"
        required = [target.required for target in targets.of(each) if target.figure == figure]
        bars.append(Bar(label(each), each.figures[figure], "ours", *required))
    axis = "ratio, logarithmic; more is better" if logarithmic else "ratio; more is better"
    return Chart(name, axis, bars, _form("_ratio"), one, logarithmic=logarithmic)


def _both(name: str, axis: str, results: list[Result], figure: str = "") -> Chart:
    """Draw a figure of the baseline and of `ingress`, by default the main figure of the row."""
    bars = []
    for each in results:
        asked = figure or each.main
        bars.append(Bar(label(each), each.figures[f"baseline_{asked}"], "baseline"))
        bars.append(Bar("", each.figures[asked]))
    baselines = " or ".join(dict.fromkeys(each.baseline for each in results))
    legend = (("baseline", baselines), ("ours", "ingress"))
    form = _form(figure or results[0].main) if results else str
    return Chart(name, axis, bars, form, legend=legend)


def _form(figure: str) -> Callable[[float], str]:
    return partial(shown, figure)


def _there(drawn: Charts) -> Charts:
    """Return the charts that have bars."""
    return {name: chart for name, chart in drawn.items() if chart.bars}


def _section(results: list[Result], drawn: Charts) -> list[str]:
    """Return the pictures, the table, and the descriptions of its rows."""
    if not results:
        return []
    pictures = [f"![{chart.title}]({name}.svg)" for name, chart in _there(drawn).items()]
    lines = [f"| | against | {' | '.join(COLUMNS)} |"]
    lines.append(f"|---|---|{'---:|' * (len(COLUMNS) - 1)}---|")
    for each in results:
        found = " | ".join(cells(each)).replace("\n", "<br>")
        lines.append(f"| {title(each)} | {each.baseline} | {found} |")
    whats = _whats()
    rows = [row for row in dict.fromkeys(each.row for each in results) if row in whats]
    return [*pictures, "\n".join(lines), "\n".join(f"- `{row}`: {whats[row]}" for row in rows)]


def _of_peers(results: list[Result]) -> list[Result]:
    """Return each row in the peer's best mode, and those over HTTP in its default, too.

    A mode with as many processes on both sides goes before the others.
    """
    found = []
    for each in (each for each in results if not each.setup):
        modes = [one for one in results if one.row == each.row and one.setup]
        modes.sort(key=lambda one: (EQUAL in one.setup, _theirs(one)))
        found += [each] * (not modes or "connections" in each.load) + modes[-1:]
    return found


def _theirs(result: Result) -> float:
    return result.figures[f"baseline_{result.main}"].median


def _in_readme(http: Report, peers: Report | None, readme: str) -> str:
    """Return the README with a new part between the marks."""
    chosen = [each for each in http.results if each.row in SHORT and "32" in each.load]
    rates = [each for each in peers.results if each.main == "requests_per_s"] if peers else []
    chosen += _of_peers([each for each in rates if " in " not in each.row])
    whats = _whats()
    lines = ["| | against | | ingress | ratio [least-greatest] |", "|---|---|---:|---:|---:|"]
    for each in chosen:
        baseline, ours, ratio, *_ = cells(each)
        what = whats.get(each.row, each.row) + (f", *{each.setup}*" if each.setup else "")
        lines.append(f"| {what} | {each.baseline} | {baseline} | {ours} | {ratio} |")
    picture = "![Requests per second against plain FastAPI](docs/benchmarks/ratio.svg)"
    table = "\n".join(lines)
    part = f"{picture}\n\n{table}\n\n{SAME.format(machine=http.machine)}"
    pattern = re.compile(f"(?<={BEGIN}).*?(?={END})", re.DOTALL)
    return pattern.sub(lambda _: f"\n{part}\n", readme)


def _from(found: Report, command: str) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in found.libraries.items())
    return f"`{command}`, {found.date}, {found.machine}, Python {found.python}, {libraries}."


def _whats() -> dict[str, str]:
    return {row.name: row.what for row in reversed((*ROWS, *PROCESS_ROWS))} | SLICES | STARTS


def _slower(reports: Mapping[str, Report]) -> str:
    """Return the results that lose, or miss a requirement, each with its reason."""
    results = [each for found in reports.values() for each in found.results]
    asked = [(each, target) for each in results for target in targets.of(each)]
    met = [each for each, target in asked if target.is_met(each)]
    lines = [
        "## What is slower, and why",
        "",
        f"Of {len(asked)} requirements {len(met)} are met.",
        "[Slower than others](../performance.md#slower-than-others) has the measurements.",
        "",
        "| | against | ratio [min-max] | required | why |",
        "|---|---|---:|---|---|",
    ]
    for each in filter(loses, results):
        _, _, ratio, _, _, required = cells(each)
        row = title(each), each.baseline, ratio, required, WHY.get(each.row, "")
        lines.append(f"| {' | '.join(row)} |".replace("\n", "<br>"))
    return "\n".join(lines)


def loses(result: Result) -> bool:
    """Return whether a result is worse than its baseline by more than 3 %, or than required."""
    if not all(target.is_met(result) for target in targets.of(result)):
        return True
    ratio = result.figures.get(f"{result.main}_ratio")
    if ratio is None or not ratio.median:
        return False
    return ratio.median < 0.97 if result.main.endswith("_per_s") else ratio.median > 1.03


def read() -> dict[str, Report]:
    """Return the stored reports."""
    paths = {
        name: FOLDER / f"{name}.json"
        for name in (
            "http",
            "handles",
            "processes",
            "free-threading",
            "peers",
            "overload",
            "batching",
            "scaling",
        )
    }
    return {name: Report.read(path) for name, path in paths.items() if path.exists()}


def write() -> list[Path]:
    """Write the pages; return their paths."""
    DOCS.mkdir(parents=True, exist_ok=True)
    made = pages(read(), README.read_text())
    for path, text in made.items():
        path.write_text(text)
    return list(made)


if __name__ == "__main__":
    for written in write():
        print(f"written: {written.relative_to(ROOT)}")
