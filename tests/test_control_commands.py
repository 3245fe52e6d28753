"""`ingress status`, `stop` and `scale`, and the control socket that they use."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ingress.base.settings import RUNTIME_DIR
from ingress.cli import commands as cli
from ingress.cli import control_commands
from ingress.cli.cluster_commands import are_healthy
from ingress.cli.control_socket import (
    MOST_BYTES,
    CommandError,
    ControlSocket,
    RunningServer,
    running_servers,
)
from ingress.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
)
from tests.fakes import together
from tests.servers import INGRESS, PATIENCE_S, environment, process, wait_until, write_module

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")

APP = """
import ingress as serve

@serve.deployment(num_replicas=2)
class Model:
    async def __call__(self, request):
        return "answer"

hello = Model.bind()
"""

FILE = """
http_options: {port: 0}
applications:
- {name: one, route_prefix: /one, import_path: app:hello}
- name: two
  route_prefix: /two
  import_path: app:hello
- name: auto
  route_prefix: /auto
  import_path: app:hello
  deployments: [{name: Model, autoscaling_config: {max_replicas: 3}}]
"""


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder. Its path is short: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(RUNTIME_DIR, str(Path(folder) / "run"))
        yield Path(folder) / "run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    (tmp_path / "serve.yaml").write_text(FILE)
    return tmp_path


def echo(arguments: Mapping[str, Any]) -> Any:
    if arguments.get("fails"):
        raise CommandError("it cannot be done")
    return dict(arguments)


def raw(path: Path, data: bytes) -> Any:
    """Return the answer to bytes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(path))
        client.sendall(data)
        with client.makefile("rb") as file:
            return json.loads(file.readline())


def test_only_its_user_may_connect(runtime: Path) -> None:
    with ControlSocket({"echo": echo}) as control:
        assert control.path == runtime / f"{os.getpid()}.sock"
        assert stat.S_IMODE(control.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert RunningServer(1, control.path).ask("echo", a=[1]) == {"a": [1]}
    assert list(runtime.iterdir()) == []


BAD: dict[str, bytes] = {
    "no JSON": b"hello\n",
    "no object": b"[]\n",
    "no command": b"{}\n",
    "an unknown command": b'{"command": "nothing"}\n',
    "a command that is no name": b'{"command": []}\n',
    "arguments that are no object": b'{"command": "echo", "arguments": [1]}\n',
    "deep nesting": b'{"command": ' + b"[" * 60_000 + b"\n",
    "a long line": b"x" * (MOST_BYTES + 1),
    "not UTF-8": b"\xff\xfe\n",
}


def test_a_bad_request_is_answered_and_harms_no_other(runtime: Path) -> None:
    with ControlSocket({"echo": echo}) as control:
        assert control.path is not None
        for data in BAD.values():
            answer = raw(control.path, data)
            assert answer["error"].startswith(("a request is one line", "arguments must be"))
        with pytest.raises(CommandError, match="it cannot be done"):
            RunningServer(1, control.path).ask("echo", fails=True)
        assert RunningServer(1, control.path).ask("echo") == {}


def test_requests_of_many_threads_are_answered_to_those_that_asked(
    runtime: Path, switch_interval: None
) -> None:
    with ControlSocket({"echo": echo}) as control:
        assert control.path is not None
        server = RunningServer(1, control.path)
        wrong: list[Any] = []

        def ask(number: int) -> None:
            answers = [server.ask("echo", it=[number, turn]) for turn in range(10)]
            wrong.extend(a for turn, a in enumerate(answers) if a != {"it": [number, turn]})

        together(*(partial(ask, number) for number in range(8)))
        assert wrong == []


def test_a_stale_socket_is_noticed_and_removed_and_a_listening_one_is_not(runtime: Path) -> None:
    runtime.mkdir()
    stale = runtime / "999999999.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(stale))  # as a server that was killed leaves it
    with ControlSocket({"echo": echo}) as control:
        assert control.path is not None
        found, removed = running_servers()

        assert [each.path for each in found] == [control.path]
        assert removed == [stale]
        assert not stale.exists()


def test_status_names_many_stale_sockets_in_one_line(runtime: Path) -> None:
    runtime.mkdir()
    for pid in range(999999991, 999999996):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(runtime / f"{pid}.sock"))
    told = CliRunner().invoke(cli.app, ["status"]).output

    assert "servers that were killed: pid 999999991, 999999992, 999999993 and 2 more\n" in told
    assert told.count("killed") == 1


def test_a_folder_that_others_may_write_has_no_socket(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    with ControlSocket({"echo": echo}) as control:
        assert control.path is None
    assert f"set {RUNTIME_DIR} to another folder" in caplog.text


@pytest.mark.timeout(150)  # it starts processes
def test_a_server_is_found_scaled_and_stopped(
    runtime: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*INGRESS, "run", "serve.yaml"]
    with process(command, folder, environment(folder)) as server:
        pid = server.process.pid
        server.wait_for(f"control socket {runtime}/{pid}.sock")
        server.wait_for("Ctrl-C to stop")

        control_commands.status(as_json=True)
        told = json.loads(capsys.readouterr().out)
        assert (told["pid"], told["url"]) == (pid, server.url)
        assert [*told["applications"]] == ["one", "two", "auto"]

        # Of several servers, none is taken at random. This process is the other one.
        with ControlSocket({"status": lambda _: {**told, "pid": os.getpid(), "applications": {}}}):
            with pytest.raises(typer.Exit):
                control_commands.stop()
            refused = capsys.readouterr().err
            assert "2 servers run; choose one with --name or --pid" in refused
            assert f"--pid {pid} has one, two, auto" in refused
            control_commands.scale(["two:Model=1"], name="one")
            assert capsys.readouterr().out == "two: Model: num_replicas 2 -> 1\n"

        with pytest.raises(typer.Exit):
            control_commands.scale(["Model=3"], pid=pid)
        assert "several applications have Model" in capsys.readouterr().err
        with pytest.raises(typer.Exit):
            control_commands.scale(["auto:Model=3"])
        assert "auto:Model has as many replicas as its auto" in capsys.readouterr().err
        control_commands.stop()
        assert server.wait() == 0
    assert list(runtime.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_a_command_changes_all_workers_or_none_and_those_that_come_later(
    runtime: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*INGRESS, "run", "app:hello", "--port", "0", "--workers", "2"]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("Ctrl-C to stop")
        pid = server.process.pid
        running = RunningServer(pid, runtime / f"{pid}.sock")
        wait_until(lambda: len(running.ask("status")["workers"]) == 2)
        assert replicas(running) == [2, 2]

        with pytest.raises(typer.Exit):
            control_commands.scale(["Model=0"])
        assert "num_replicas must be an integer" in capsys.readouterr().err
        assert replicas(running) == [2, 2]
        control_commands.scale(["Model=3"])
        wait_until(lambda: replicas(running) == [3, 3])

        before = running.ask("status")["workers"]
        os.kill(before[0], signal.SIGKILL)
        server.wait_for(r"worker \d+ is ready")
        assert replicas(running) == [3, 3]
        control_commands.stop()
        assert server.wait() == 0
    assert list(runtime.iterdir()) == []


def replicas(server: RunningServer) -> Any:
    """Return the number of `Model`'s replicas in each worker."""
    return server.ask("status")["applications"]["default"]["deployments"]["Model"]["per_worker"]


@pytest.mark.parametrize(
    ("application", "deployment", "healthy"),
    [
        (ApplicationStatus.RUNNING, DeploymentStatus.UPSCALING, True),
        (ApplicationStatus.RUNNING, DeploymentStatus.UNHEALTHY, False),
        (ApplicationStatus.DEPLOYING, DeploymentStatus.UPDATING, False),
    ],
)
def test_a_cluster_is_healthy_as_a_server_is(
    application: ApplicationStatus, deployment: DeploymentStatus, healthy: bool
) -> None:
    one = DeploymentStatusOverview(deployment, "", {}, "")
    fine = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {})
    found = {"fine": fine, "one": ApplicationStatusOverview(application, "", 0.0, {"D": one})}

    assert are_healthy(found) is healthy
    assert not are_healthy({})
