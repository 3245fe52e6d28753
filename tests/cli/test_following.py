"""`--wait` of `ingress reload`, `scale` and `stop`: the end, the reasons, and the server's log."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_control_commands import runtime as runtime
from tests.programs import INGRESS, ServerProcess, environment, write_module
from tests.servers import PATIENCE_S, Connection, get, ingress_run, wait_until

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")

APP = """
import asyncio, pathlib
import ingress as serve

@serve.deployment
class Model:
    def reconfigure(self, config):
        if config["threshold"] < 0:
            raise ValueError(f"threshold must be positive, got {config['threshold']}")
        self.config = config

    async def __call__(self, request):
        if "hold" in request.query_params:
            pathlib.Path("held").touch()
            while not pathlib.Path("go").exists():
                await asyncio.sleep(0.01)
        return self.config["threshold"]

hello = Model.bind()
"""

FILE = """
applications:
- name: shop
  route_prefix: /
  import_path: app:hello
  deployments: [{name: Model, num_replicas: 1, user_config: {threshold: %d}}]
"""


@pytest.fixture
def folder(tmp_path: Path, runtime: Path) -> Path:
    write_module(tmp_path, "app", APP)
    (tmp_path / "serve.yaml").write_text(FILE % 1)
    return tmp_path


def command(folder: Path, *words: str) -> tuple[int, str, str]:
    """Run a command as a user does; return its exit code and what it printed."""
    done = subprocess.run(
        [*INGRESS, *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def answer(server: ServerProcess) -> bytes:
    return get(server.port, "/").body


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_a_command_waits_for_its_end_and_says_why_it_was_rolled_back(
    folder: Path, workers: str
) -> None:
    options = ["serve.yaml", "--admin", "off", *(["--workers", workers] * (workers != "1"))]
    with ingress_run(folder, *options) as server:
        server.wait_for("is ready at")
        code, out, err = command(folder, "scale", "Model=3", "--wait")
        assert (code, err) == (0, "")
        assert "shop: Model: num_replicas 1 -> 3" in out
        assert {f"shop:Model#{tag}" for tag in "12"} <= set(out.split())

        (folder / "serve.yaml").write_text(FILE % -1)
        code, out, err = command(folder, "reload", "--wait")
        words = (
            "shop:Model: reconfigure raised ValueError: threshold must be positive, got -1; "
            "the user_config before is in use"
        )
        assert code == 1
        assert words in err
        assert "s  shop:Model: " in out
        assert answer(server) == b"1"
        # Nothing has changed since, but the server does not have what the file says.
        code, out, _ = command(folder, "reload", "--wait", "--json")
        assert (code, words in json.loads(out)["error"]) == (1, True)

        (folder / "serve.yaml").write_text(FILE % 2)
        code, out, _ = command(folder, "reload", "--wait", "--json")
        assert (code, json.loads(out)["is_done"]) == (0, True)
        assert answer(server) == b"2"
        code, out, _ = command(folder, "scale", "None=1", "--json")
        assert code == 1
        assert json.loads(out) == {"error": "no application has None; name one of shop:Model"}

        (folder / "serve.yaml").write_text("applications: nothing")
        code, out, _ = command(folder, "reload", "--json")
        assert (code, "applications" in json.loads(out)["error"]) == (1, True)
        log = server.output
        assert f"process {server.process.pid}" not in log
        for line in ('scale {"shop": {"Model": 3}}, asked for by ', "reload, asked for by "):
            assert line in log
        assert "failed: serve.yaml" in log.replace(str(folder) + "/", "")
        code, out, _ = command(folder, "stop", "--wait")
        assert (code, f"server {server.process.pid} has ended" in out) == (0, True)
        assert server.wait() == 0
        assert "stop, asked for by " in server.output


@pytest.mark.thorough
def test_a_stop_that_takes_too_long_is_an_error_and_goes_on(folder: Path) -> None:
    with ingress_run(folder, "serve.yaml", "--admin", "off") as server:
        server.wait_for("is ready at")
        with Connection(server.port) as client:
            client.send(b"GET /?hold=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_until((folder / "held").exists)
            code, _, err = command(folder, "stop", "--wait", "--timeout", "0.3")
            assert code == 1
            assert "not done after 0.3 s, and it goes on; --timeout gives it longer" in err
            (folder / "go").touch()
            assert client.answer().body == b"1"
        assert server.wait() == 0
