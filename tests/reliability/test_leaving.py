"""SIGTERM while clients send requests over keep-alive connections: each request is answered."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from tests.programs import INGRESS, UVICORN, environment, free_port, process, write_module
from tests.reliability.figures import Figures
from tests.servers import PATIENCE_S, ROUNDS, is_ready, wait_until

RUNS = 20 if ROUNDS else 1
REQUESTS = 2000 if ROUNDS else 400  # number before the signal, in each run

APP = """
import asyncio
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

@serve.deployment(max_ongoing_requests=200)
@serve.ingress(app)
class App:
    @app.get("/quick")
    async def quick(self):
        return "quick"

    @app.get("/slow")
    async def slow(self):
        await asyncio.sleep(0.02)
        return "slow"

hello = App.bind()

plain = FastAPI()

@plain.get("/quick")
async def quick():
    return "quick"

@plain.get("/slow")
async def slow():
    await asyncio.sleep(0.02)
    return "slow"

@plain.get("/-/healthz")
async def healthz():
    return "success"
"""

COMMANDS = {
    "run": [*INGRESS, "run", "app:hello", "--port"],
    "workers": [*INGRESS, "run", "app:hello", "--workers", "2", "--port"],
}
PLAIN = [*UVICORN[:-1], "{port}", "app:plain"]


@dataclass
class Clients:
    """Clients that send their next request after each answer, until no server listens."""

    port: int
    path: str
    answers: int = 0
    cuts: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self) -> None:
        """Send requests until the server is gone, over one connection while that is kept."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        while True:
            try:
                connection.request("GET", self.path)
                answer = connection.getresponse()
                answer.read()
            except ConnectionRefusedError:
                break
            except (OSError, HTTPException) as error:
                connection.close()
                with self.lock:
                    self.cuts.append(repr(error))
                continue
            assert answer.status in (200, 503)
            with self.lock:
                self.answers += 1
        connection.close()


def cut_at_sigterm(folder: Path, command: list[str], clients: int, path: str) -> int:
    """Serve, send SIGTERM under load, and return the number of requests that were cut."""
    port = free_port()
    words = [each.format(port=port) for each in command]
    with process(words, folder, environment(folder)) as server:
        wait_until(partial(is_ready, port))
        asking = Clients(port, path)
        threads = [threading.Thread(target=asking.ask) for _ in range(clients)]
        for each in threads:
            each.start()
        wait_until(lambda: asking.answers >= REQUESTS)
        server.signal(signal.SIGTERM)
        for each in threads:
            each.join(PATIENCE_S)
        assert server.wait() in (0, -signal.SIGTERM)
    return len(asking.cuts)


@pytest.mark.thorough
@pytest.mark.reliability("B15")
@pytest.mark.timeout(60 + 60 * RUNS)
@pytest.mark.parametrize("protocol", ["httptools", "h11"])
@pytest.mark.parametrize("path", ["/slow", "/quick"])
@pytest.mark.parametrize("how", COMMANDS)
def test_no_client_is_cut_that_asks_while_a_server_leaves(
    tmp_path: Path, figures: Figures, how: str, path: str, protocol: str
) -> None:
    write_module(tmp_path, "app", APP)
    if protocol == "h11":  # the parser without httptools
        write_module(tmp_path, "httptools", "raise ImportError")
    command = [*COMMANDS[how], "{port}"]
    cut = sum(cut_at_sigterm(tmp_path, command, 24, path) for _ in range(RUNS))
    plain = sum(cut_at_sigterm(tmp_path, PLAIN, 24, path) for _ in range(RUNS)) if ROUNDS else None

    what = f"{how}, {protocol}, {path}: of 24 clients in {RUNS} runs of {REQUESTS} requests, cut"
    figures.at_most(what, cut, 0, plain=plain)
