"""Prometheus scrapes a server under load, and evaluates the queries of the board and the alerts.

It needs Debian's package `prometheus`. The queries of the board are sent as Grafana sends them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.documents import ROOT
from tests.programs import INGRESS, ServerProcess, environment, free_port, process, write_module
from tests.servers import PATIENCE_S, is_ready, wait_until

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus"),
]

SCRAPE_S = 0.25
WINDOW = "10s"  # of the rates; Grafana takes four times what lies between two scrapes
BOARD = json.loads((ROOT / "docs" / "metrics" / "grafana.json").read_text())
ALERTS = ROOT / "docs" / "metrics" / "alerts.yml"

APP = """
import asyncio, os, time
from fastapi import FastAPI
import ingress as serve

app = FastAPI()

@serve.deployment(isolation=os.environ["ISOLATION"], num_replicas=2, max_queued_requests=1,
                  max_ongoing_requests=8, lanes={"disk": 1})
@serve.ingress(app)
class Shop:
    @app.get("/items/{number}")
    def item(self, number: int):
        if number == 0:
            raise ValueError("no such item")
        return sum(range(2000)) + number

    @app.get("/stalls")
    async def stalls(self):
        time.sleep(0.15)

    @app.get("/disk")
    @serve.method(lane="disk")
    def disk(self):
        time.sleep(0.01)

    @app.get("/waits")
    async def waits(self):
        await asyncio.sleep(0.5)

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.01)
    async def double(self, numbers):
        return [2 * number for number in numbers]

    @app.get("/batch/{number}")
    async def batch(self, number: int):
        return await self.double(number)

    @serve.multiplexed(max_num_models_per_replica=1)
    async def model(self, name):
        return name

    @app.get("/model/{name}")
    async def of_a_model(self, name: str):
        return await self.model(name)

shop = Shop.bind()
"""

PATHS = (
    *("/items/1", "/items/0", "/stalls", "/disk", "/batch/1", "/batch/2", "/model/a", "/model/b"),
    *(["/waits"] * 24),  # more than slots and queue hold
)


class Prometheus:
    """A client of a Prometheus server on loopback."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now, without those that are not a number."""
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return [each for each in found if each["value"][1] != "NaN"]

    def firing(self) -> set[str]:
        alerts = self._client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, admin_port: int) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes an admin listener, with the alerts, none of which waits."""
    alerts = yaml.safe_load(ALERTS.read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
            rule["expr"] = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rule["expr"])
    (folder / "alerts.yml").write_text(yaml.safe_dump(alerts))
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms", "evaluation_interval": "500ms"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": "ingress", "static_configs": [{"targets": [f"127.0.0.1:{admin_port}"]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}"),
        *(f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"),
    ]
    with (folder / "prometheus.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                found = Prometheus(client)
                wait_until(found.is_ready)
                yield found
        finally:
            running.terminate()
            running.wait(PATIENCE_S)


@contextmanager
def load(port: int) -> Iterator[Callable[[], None]]:
    """Send all of `PATHS` at once, again and again; what is yielded raises if one has no answer."""
    over = threading.Event()

    def send(path: str) -> int:
        return client.get(path).status_code

    def go_on() -> None:
        while not over.is_set():
            assert {200, 500, 503} >= set(pool.map(send, PATHS))

    limits = httpx.Limits(max_connections=len(PATHS))
    with (
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, limits=limits
        ) as client,
        ThreadPoolExecutor(len(PATHS) + 1) as pool,
    ):
        running = pool.submit(go_on)
        try:
            yield lambda: running.result(0) if running.done() else None
        finally:
            over.set()
        running.result(PATIENCE_S)


@pytest.fixture(params=[("thread", ()), ("process", ()), ("thread", ("--workers", "2"))])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    isolation, options = request.param
    write_module(tmp_path, "app", APP)
    environ = {**environment(tmp_path), "ISOLATION": isolation}
    command = [*INGRESS, "run", "app:shop", "--port", "0", "--admin", "127.0.0.1:0", *options]
    with process(command, tmp_path, environ) as running:
        wait_until(lambda: is_ready(running.port))
        yield running


def test_each_panel_of_the_board_has_data_and_the_alerts_fire(
    server: ServerProcess, tmp_path: Path
) -> None:
    admin_port = int(server.wait_for(r"Metrics at http://127\.0\.0\.1:(\d+)")[1])
    with prometheus(tmp_path, admin_port) as found, load(server.port) as go_on:
        for panel in BOARD["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", WINDOW)
                query = query.replace("$application", ".*")
                wait_until(partial(found.query, query), 2 * PATIENCE_S)
                for series in found.query(query):
                    words = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
                    # Prometheus leaves an empty label out: the lane of a call without a lane.
                    labels = {*series["metric"], "lane"}
                    assert set(words) <= labels, (panel["title"], series)
        [names] = [each for each in BOARD["templating"]["list"] if each["name"] == "application"]
        assert "label_values(ray_serve_application_status, application)" in names["query"]["query"]
        assert {
            each["metric"]["application"] for each in found.query("ray_serve_application_status")
        } == {"default"}
        expected = {"ServeErrors", "ServeRejects", "ServeEventLoopStalls"}
        wait_until(lambda: expected <= found.firing(), 2 * PATIENCE_S)
        assert not found.firing() & {"ServeDeploymentUnhealthy", "ServeWorkerSilent"}
        go_on()
