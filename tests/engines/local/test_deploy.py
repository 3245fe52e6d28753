"""The files of docs/deploy: what they serve, and what supervisors see."""

from __future__ import annotations

import configparser
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI, Request

import ingress as serve
from ingress.app.config_file.loading import ConfigFile
from ingress.app.config_file.models import checked
from ingress.app.config_file.reading import parse
from ingress.cli.control_commands import stop
from ingress.core.base.settings import RUNTIME_DIR
from tests.fakes import bind
from tests.servers import INGRESS, PATIENCE_S, ROOT, environment, get, process, served

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")

DEPLOY = ROOT / "docs" / "deploy"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets, whose paths have at most 107 bytes. It is the runtime folder too."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(RUNTIME_DIR, str(Path(folder) / "run"))
        yield Path(folder)


def manifests() -> dict[str, Any]:
    """Return the manifests by their kind."""
    text = (DEPLOY / "kubernetes.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.mark.timeout(150)  # it starts a process
def test_the_supervisor_is_told_of_readiness_and_stop(short: Path, tmp_path: Path) -> None:
    command = [*INGRESS, "run", str(DEPLOY / "serve.yaml"), "--app-dir", str(DEPLOY)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(short / "notify"))
        systemd.settimeout(3 * PATIENCE_S)
        environ = {**environment(tmp_path), "NOTIFY_SOCKET": str(short / "notify")}
        with process([*command, "--port", "0"], tmp_path, environ) as server:
            assert systemd.recv(100) == b"READY=1"
            assert get(server.port, "/?name=Ada").body == b'"hi, Ada"'
            container = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert get(server.port, container[probe]["httpGet"]["path"]).status == 200

            stop()
            assert systemd.recv(100) == b"STOPPING=1"
            assert server.wait() == 0


app = FastAPI()


@serve.deployment
@serve.ingress(app)
class Clients:
    @app.get("/")
    async def client(self, request: Request) -> list[str]:
        assert request.client is not None
        return [request.url.scheme, request.client.host]


@pytest.mark.parametrize(
    ("trusted", "client"),
    [
        (None, ["https", "9.9.9.9"]),
        ("10.0.0.0/8", ["http", "127.0.0.1"]),
        ("127.0.0.0/8, 9.9.9.9", ["https", "8.8.8.8"]),
        ("*", ["https", "7.7.7.7"]),
    ],
)
def test_the_client_is_the_last_address_that_is_not_trusted(
    trusted: str | None, client: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    headers = {"x-forwarded-for": "7.7.7.7, 8.8.8.8, 9.9.9.9", "x-forwarded-proto": "https"}
    try:
        answer = httpx.get(f"http://127.0.0.1:{served(bind(Clients))}/", headers=headers)
    finally:
        serve.shutdown()

    assert answer.json() == client


def test_the_manifest_has_the_file_and_time_for_the_drain() -> None:
    found = manifests()
    file = checked(parse(found["ConfigMap"]["data"]["serve.yaml"], "serve.yaml"), "serve.yaml")
    pod = found["Deployment"]["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    delay_s = int(arguments[arguments.index("--drain-delay") + 1])
    own = ConfigFile.read(DEPLOY / "serve.yaml").config

    assert file.applications[0].deployments == own.applications[0].deployments
    drain_s = max(each.graceful_shutdown_timeout_s for each in file.applications[0].deployments)
    assert pod["terminationGracePeriodSeconds"] >= delay_s + drain_s + 10


def test_prometheus_finds_the_metrics_where_the_pod_monitor_says(tmp_path: Path) -> None:
    monitor = yaml.safe_load((DEPLOY / "podmonitor.yaml").read_text())["spec"]
    pods = manifests()["Deployment"]["spec"]["template"]
    (container,) = pods["spec"]["containers"]
    (scraped,) = monitor["podMetricsEndpoints"]
    variables = {each["name"]: each for each in container["env"]}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    host, port = variables["INGRESS_ADMIN"]["value"].split(":")

    assert monitor["selector"]["matchLabels"] == pods["metadata"]["labels"]
    assert int(port) == ports[scraped["port"]]
    secret = variables["INGRESS_ADMIN_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == scraped["authorization"]["credentials"]
    given = {"INGRESS_ADMIN": f"{host}:0", "INGRESS_ADMIN_TOKEN": "x" * 64}
    command = [*INGRESS, "run", str(DEPLOY / "serve.yaml"), "--app-dir", str(DEPLOY)]
    environ = {**environment(tmp_path), **given}
    with process([*command, "--port", "0"], tmp_path, environ) as server:
        server.wait_for("is ready at")
        admin = int(server.wait_for(r"Metrics at http://[\d.]+:(\d+)/metrics")[1])
        header = f"Authorization: {scraped['authorization']['type']} {'x' * 64}\r\n"
        assert get(admin, scraped["path"]).status == 401
        answer = get(admin, scraped["path"], header)
    assert answer.status == 200
    assert b"ray_serve_deployment_status" in answer.body


def test_the_unit_waits_for_readiness_and_leaves_time_for_the_drain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "ingress.service")
    service = unit["Service"]

    assert service["Type"] == "notify"
    assert service["ExecReload"].endswith("ingress reload --pid $MAINPID --wait")
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > 20 + 10
