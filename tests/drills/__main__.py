"""Play the incidents: `python -m tests.drills [NAME...]`, or `make test-drills`.

Each incident has a server of its own, `ingress run`, and clients at a fixed rate that give up after
a second and count their answers. The page, `ingress top`, which was open before, `ingress status`
and the log are read until each names the cause; so are the metrics, until the alert's condition
holds. Exits with 1 if
a view takes longer than 5 s, but for the leak, whose growth must be measured first.

With INGRESS_SCREENSHOTS=1 and Chromium, the pictures of docs/incidents are made again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from ingress.core.base.settings import RUNTIME_DIR
from tests.drills import incidents
from tests.programs import INGRESS, ROOT, ServerProcess, environment, process, run_ingress

SOON_S = 5.0
LEAK_S = 130.0
LEAD_S = 2.0  # of good load, where the incident needs some before
SOURCE = Path(incidents.__file__)
PICTURES = ROOT / "docs" / "incidents"
SIZE = "1200,345"


def line_of(text: str) -> str:
    """Return FILE:LINE of the line with a text."""
    lines = SOURCE.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f"{SOURCE.name}:{number}"


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that is wrong. `names` is what each view must say, `alert` a line of `/metrics`."""

    name: str
    rate: float
    names: str
    alert: Callable[[str], bool] | None  # that of a leak needs half an hour of scrapes
    within_s: float = SOON_S


def sample(metrics: str, name: str, labels: str = "") -> float:
    found = re.findall(rf"^{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)", metrics, re.MULTILINE)
    return sum(map(float, found))


def stalls(metrics: str) -> bool:
    return sample(metrics, "ingress_loop_stall_seconds_sum", 'method="Napping.__call__"') > 0


def fails(metrics: str) -> bool:
    errors = sample(metrics, "ray_serve_num_http_error_requests_total", 'error_code="500"')
    return errors > 0.05 * sample(metrics, "ray_serve_num_http_requests_total")


def is_held(metrics: str) -> bool:
    return sample(metrics, "ingress_deployment_held_seconds", 'deployment="Locked"') > 3


def leaves(metrics: str) -> bool:
    """Return whether 5 % of the clients have left: calls that are cancelled free their slots."""
    left = sample(metrics, "ray_serve_num_http_requests_total", 'status_code="499"')
    return left > 0.05 * sample(metrics, "ray_serve_num_http_requests_total")


def waits(metrics: str) -> bool:
    return sample(metrics, "ray_serve_deployment_queued_queries", 'deployment="Overloaded"') > 0


INCIDENTS = [
    Incident("lock", 20, line_of("LOCK.acquire()"), is_held),
    Incident("nap", 20, line_of("time.sleep(1.0)"), stalls),
    Incident("hang", 20, line_of("await asyncio.Event().wait()"), leaves),
    Incident("overload", 120, "requests wait for a slot", waits),
    Incident("replica", 60, "Uneven#1 fails", fails),
    Incident("leak", 60, "the memory of server grows", None, LEAK_S),
]


class Clients:
    """Clients that come at a fixed rate, and give up after a second."""

    def __init__(self, url: str, rate: float) -> None:
        self.answers: Counter[str] = Counter()
        self._url, self._rate = url, rate
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=1000)
        async with httpx.AsyncClient(timeout=1.0, limits=limits) as client:
            tasks: set[asyncio.Task[None]] = set()
            due = time.monotonic()
            while not self._is_over.is_set():
                task = asyncio.create_task(self._ask(client))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due += 1 / self._rate
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await asyncio.gather(*tasks)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        try:
            self.answers[str((await client.get(self._url)).status_code)] += 1
        except httpx.TimeoutException:
            self.answers["left"] += 1
        except httpx.HTTPError as error:
            self.answers[type(error).__name__] += 1


def page(admin: str) -> str:
    """Return the problems on the page."""
    with httpx.stream("GET", f"{admin}/api/events", timeout=5.0) as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                view = json.loads(line[6:])
                return "\n".join(each["text"] for each in view.get("problems", ()))
    return ""


@contextmanager
def top(folder: Path) -> Iterator[Callable[[], str]]:
    """Run `ingress top` in a terminal, and yield a function that returns all it has shown."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (60, 300))
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # the terminal has gone
            while data := os.read(ours, 1 << 16):
                shown.extend(data)

    environ = {**environment(folder), "TERM": "xterm"}
    command = [*INGRESS, "top"]
    process = subprocess.Popen(
        command, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lambda: re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", bytes(shown).decode(errors="replace"))
    finally:
        process.terminate()
        process.wait()
        thread.join()
        os.close(ours)


def seconds_until(read: Callable[[], str], is_it: Callable[[str], bool], until: float) -> float:
    """Return when a view first says it, by `time.monotonic`; infinity for never."""
    while time.monotonic() < until:
        with suppress(httpx.HTTPError, ValueError):
            if is_it(read()):
                return time.monotonic()
        time.sleep(0.3)
    return float("inf")


def play(incident: Incident, folder: Path) -> dict[str, float | str]:
    """Return the seconds until each view names the cause, and what the clients got."""
    environ = environment(folder)
    command = [*INGRESS, "run", f"tests.drills.incidents:{incident.name}"]
    options = ["--port", "0", "--admin", "127.0.0.1:0", "--no-access-log"]
    with process([*command, *options], folder, environ) as server:
        server.wait_for("is ready at")
        admin = server.wait_for(r"page at (http://127\.0\.0\.1:\d+)/")[1]
        with top(folder) as shown:
            while "#0" not in shown():  # a replica
                time.sleep(0.1)
            time.sleep(LEAD_S)
            with Clients(server.url, incident.rate) as clients:
                row = watched(incident, server, admin, folder, shown)
        row["answers"] = ", ".join(f"{n} x {what}" for what, n in clients.answers.most_common())
    return row


def watched(
    incident: Incident, server: ServerProcess, admin: str, folder: Path, shown: Callable[[], str]
) -> dict[str, float | str]:
    began = time.monotonic()
    until = began + incident.within_s + 15.0

    def is_it(text: str) -> bool:
        return incident.names in text

    def ingress(*words: str) -> str:
        return run_ingress(folder, *words).stdout

    views: dict[str, tuple[Callable[[], str], Callable[[str], bool]]] = {
        "page": (lambda: page(admin), is_it),
        "top": (shown, is_it),
        "status": (lambda: ingress("status"), is_it),
        "log": (lambda: server.output, is_it),
    }
    if incident.alert is not None:
        views["alert"] = (lambda: httpx.get(f"{admin}/metrics").text, incident.alert)
    found: dict[str, float | str] = {}

    def watch(name: str) -> None:
        found[name] = seconds_until(*views[name], until) - began

    threads = [threading.Thread(target=watch, args=(name,)) for name in views]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if os.environ.get("INGRESS_SCREENSHOTS") == "1":
        photograph(admin, incident.name)
    if incident.name == "leak":
        told = ingress("memory", "--seconds", "5")
        at = time.monotonic() - began
        found["line"] = at if line_of("KEPT.append") in told else float("inf")
    return found


def photograph(admin: str, name: str) -> None:
    """Make the picture of the top of the page. It shows the incident, which goes on meanwhile."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("INGRESS_SCREENSHOTS=1 needs Chromium")
    options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--timeout=5000"]
    file = f"--screenshot={PICTURES / name}.png"
    command = [chromium, *options, f"--window-size={SIZE}", file, f"{admin}/"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def main(names: list[str]) -> int:
    chosen = [each for each in INCIDENTS if not names or each.name in names]
    is_late = False
    with tempfile.TemporaryDirectory() as runtime, tempfile.TemporaryDirectory() as folder:
        os.environ[RUNTIME_DIR] = f"{runtime}/run"
        for each in chosen:
            row = play(each, Path(folder))
            cells = [f"{k} {v:.1f} s" for k, v in row.items() if isinstance(v, float)]
            print(f"{each.name:9} {'  '.join(cells)}  ({row['answers']})", flush=True)
            late = [v for v in row.values() if isinstance(v, float) and v > each.within_s]
            is_late |= bool(late)
    return int(is_late)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
