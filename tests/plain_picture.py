"""The picture of the tutorial's first step: 60 requests at once to a plain FastAPI application.

No timeline shows it: `ingress trace` records what ingress serves.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ingress.observe.timeline import picture as svg
from tests.servers import Connection, uvicorn_in_a_thread

REQUESTS = 60
_ROW, _TOP = 4, 66


@dataclass(frozen=True, slots=True)
class Run:
    """The time in which a request had a thread, in seconds after all were sent."""

    thread: int
    began_at: float
    ended_at: float


def plain_picture(source: Path) -> str:
    """Serve a step's file, whose endpoint sleeps, and return what its requests did as SVG."""
    runs: list[Run] = []
    spec: Any = importlib.util.spec_from_file_location(source.stem, source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sent_at = 0.0

    def sleep(seconds: float) -> None:
        began_at = time.monotonic() - sent_at
        time.sleep(seconds)
        runs.append(Run(threading.get_ident(), began_at, time.monotonic() - sent_at))

    module.time = SimpleNamespace(sleep=sleep)  # type: ignore[attr-defined]
    with uvicorn_in_a_thread(module.app, {}) as port:
        for _ in range(2):  # the first time starts the threads
            with ExitStack() as stack:
                connections = [stack.enter_context(Connection(port)) for _ in range(REQUESTS)]
                runs.clear()
                sent_at = time.monotonic()
                for each in connections:
                    each.request("/score?text=good")
                assert {each.answer().status for each in connections} == {200}
    return _drawn(sorted(runs, key=lambda run: run.began_at))


def _drawn(runs: list[Run]) -> str:
    width = (svg.WIDTH - 2 * svg.MARGIN) / max(run.ended_at for run in runs)
    threads = len({run.thread for run in runs})
    ground = _TOP + len(runs) * _ROW
    lines = [
        svg.text(svg.MARGIN, 24, "Plain FastAPI: a request is a line", "title"),
        svg.text(svg.MARGIN, 42, f"{len(runs)} requests at once, {threads} threads", "muted"),
    ]
    for at in range(0, int(max(run.ended_at for run in runs) * 1000) + 1, 50):
        x = svg.MARGIN + at / 1000 * width
        lines += [svg.grid(x, _TOP - 6, ground), svg.text(x, ground + 16, f"{at} ms", "muted")]
    for row, run in enumerate(runs):
        y = _TOP + row * _ROW
        begin = svg.MARGIN + run.began_at * width
        lines.append(svg.bar("thread", svg.MARGIN, y, begin - svg.MARGIN, _ROW - 1))
        lines.append(svg.bar("work", begin, y, (run.ended_at - run.began_at) * width, _ROW - 1))
    y = ground + 30
    for x, kind, words in ((14, "work", "in a thread"), (120, "thread", "waits for a thread")):
        lines += [svg.bar(kind, x, y, 14, 10), svg.text(x + 20, y + 10, words)]
    late = min(run.began_at for run in runs[threads:])
    about = (
        f"{len(runs)} requests at once: {threads} run in {threads} threads, "
        f"the others wait {late * 1000:.0f} ms or longer for a thread."
    )
    return svg.document("Plain FastAPI's threads", about, y + 24, lines)
