"""`isolation="process"` in a config file, with worker processes, with --reload, in `TestClient`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingress.testing import TestClient
from tests import process_app
from tests.programs import INGRESS, environment, process, write_module
from tests.servers import get, wait_until
from tests.serving.processes.test_process_ends import is_alive

APP = """
import os
import ingress as serve

@serve.deployment
class Model:
    def __init__(self):
        print("a model", flush=True)

    async def __call__(self):
        return os.getpid()

@serve.deployment
class Gateway:
    def __init__(self, model):
        self.model = model

    async def __call__(self, request):
        return [os.getpid(), await self.model.remote(), "VERSION"]

app = Gateway.bind(Model.bind())
"""
CONFIG = {
    "applications": [
        {"import_path": "app:app", "deployments": [{"name": "Model", "isolation": "process"}]}
    ]
}


def answer(port: int) -> list[Any]:
    found = get(port, "/")
    return list(json.loads(found.body)) if found.status == 200 else []


def test_a_test_client_serves_with_children() -> None:
    with TestClient(process_app.api) as client:
        pid = client.get("/pid").json()
        assert client.post("/echo", content=b"x" * 100_000).content == b"x" * 100_000
        with client.websocket_connect("/echo") as websocket:
            websocket.send_text("a")
            assert websocket.receive_text().startswith("a from ")
    assert pid != os.getpid()
    wait_until(lambda: not is_alive(pid))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_config_file_puts_a_deployment_of_each_worker_into_processes(tmp_path: Path) -> None:
    write_module(tmp_path, "app", APP)
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(CONFIG))
    command = [*INGRESS, "run", "serve.yaml", "--port", "0", "--workers", "2"]
    with process(command, tmp_path, environment(tmp_path)) as server:
        server.wait_for("is ready")
        seen: set[tuple[int, int]] = set()

        def both() -> bool:
            if found := answer(server.port):
                seen.add((found[0], found[1]))
            return len(seen) == 2

        wait_until(both)
        pids = {pid for pair in seen for pid in pair}
        assert len(pids) == 4
        server.signal(signal.SIGTERM)
        server.wait()
        wait_until(lambda: not any(map(is_alive, pids)))
    assert server.output.count("a model") == 2


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_reload_replaces_the_children(tmp_path: Path) -> None:
    source = APP.replace("@serve.deployment\nclass Model", _ISOLATED + "\nclass Model")
    write_module(tmp_path, "app", source)
    command = [*INGRESS, "run", "app:app", "--port", "0", "--reload"]
    with process(command, tmp_path, environment(tmp_path)) as server:
        server.wait_for("is ready")
        port = server.port
        _, before, version = answer(port)
        write_module(tmp_path, "app", source.replace("VERSION", "next"))

        wait_until(lambda: answer(port)[2:] == ["next"])
        assert version == "VERSION"
        assert answer(port)[1] != before
        wait_until(lambda: not is_alive(before))
        server.signal(signal.SIGTERM)
        server.wait()


_ISOLATED = '@serve.deployment(isolation="process")'
