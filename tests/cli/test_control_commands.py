"""`ingress status`, `stop` and `scale`, and the control socket that they use."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ingress.cli import commands as cli
from ingress.cli import control_commands
from ingress.cli.cluster_commands import are_healthy
from ingress.cli.control_socket import (
    MOST_BYTES,
    CommandError,
    RunningServer,
    control_socket,
    running_servers,
    shown_line,
)
from ingress.core.base.settings import RUNTIME_DIR
from ingress.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
)
from tests.fakes import together
from tests.servers import PATIENCE_S, ingress_run, wait_until, write_module

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


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["run", "--admin-token", "s3cret", "--replace"], "run --admin-token *** --replace"),
        (["run", "--admin-token=s3cret", "app:x"], "run --admin-token=*** app:x"),
        (["run", "--password", "two words"], "run --password ***"),
        (["scale", "Model=3"], "scale Model=3"),
    ],
)
def test_the_log_of_an_action_has_no_secret_of_a_command_line(words: list[str], shown: str) -> None:
    assert shown_line("\0".join([*words, ""])) == shown


def echo(arguments: Mapping[str, Any]) -> Any:
    if arguments.get("fails"):
        raise CommandError("it cannot be done")
    return dict(arguments)


@contextmanager
def echoing() -> Iterator[Path]:
    """Answer commands at the control socket, of which this is the path."""
    with control_socket({"echo": echo}) as path:
        assert path is not None
        yield path


def stale(path: Path) -> Path:
    """Leave a socket as a server that was killed leaves it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    return path


def raw(path: Path, data: bytes) -> Any:
    """Return the answer to bytes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(path))
        client.sendall(data)
        with client.makefile("rb") as file:
            return json.loads(file.readline())


def test_only_its_user_may_connect(runtime: Path) -> None:
    with echoing() as path:
        assert path == runtime / f"{os.getpid()}.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert RunningServer(1, path).ask("echo", a=[1]) == {"a": [1]}
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
    with echoing() as path:
        for data in BAD.values():
            answer = raw(path, data)
            assert answer["error"].startswith(("a request is one line", "arguments must be"))
        with pytest.raises(CommandError, match="it cannot be done"):
            RunningServer(1, path).ask("echo", fails=True)
        assert RunningServer(1, path).ask("echo") == {}


def test_requests_of_many_threads_get_their_answers(runtime: Path, switch_interval: None) -> None:
    with echoing() as path:
        server = RunningServer(1, path)
        wrong: list[Any] = []

        def ask(number: int) -> None:
            answers = [server.ask("echo", it=[number, turn]) for turn in range(10)]
            wrong.extend(a for turn, a in enumerate(answers) if a != {"it": [number, turn]})

        together(*(partial(ask, number) for number in range(8)))
        assert wrong == []


def test_a_stale_socket_is_noticed_and_removed_and_a_listening_one_is_not(runtime: Path) -> None:
    dead = stale(runtime / "999999999.sock")
    with echoing() as path:
        found, removed = running_servers()

        assert [each.path for each in found] == [path]
        assert removed == [dead]
        assert not dead.exists()


def test_status_names_many_stale_sockets_in_one_line(runtime: Path) -> None:
    for pid in range(999999991, 999999996):
        stale(runtime / f"{pid}.sock")
    told = CliRunner().invoke(cli.app, ["status"]).output

    assert "servers that were killed: pid 999999991, 999999992, 999999993 and 2 more\n" in told
    assert told.count("killed") == 1


def test_a_folder_that_others_may_write_has_no_socket(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o777)
    with control_socket({"echo": echo}) as path:
        assert path is None
    assert f"set {RUNTIME_DIR} to another folder" in caplog.text


# Folders, sockets and texts of other users.

ANOTHER_USER = 12345
AS_ROOT = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)


@contextmanager
def listening(
    path: Path, answers: Mapping[str, Any] | bytes, mode: int = 0o600
) -> Iterator[list[bytes]]:
    """Answer commands at a socket, as a server would, or by bytes; yield the requests."""
    asked: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if line := self.rfile.readline():
                asked.append(line)
                if isinstance(answers, bytes):
                    self.wfile.write(answers)
                    return
                answer = answers.get(json.loads(line)["command"], {"error": EVIL})
                self.wfile.write(json.dumps(answer).encode() + b"\n")

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        path.chmod(mode)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)


@pytest.fixture
def in_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder of a user without a session: any user could have made it."""
    monkeypatch.delenv(RUNTIME_DIR, raising=False)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder) / f"ingress-{os.geteuid()}"


def another_users(folder: Path) -> None:
    os.chown(folder, ANOTHER_USER, ANOTHER_USER)


def writable(folder: Path) -> None:
    folder.chmod(0o770)


def link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


UNTRUSTED = [
    pytest.param(another_users, "belongs to another user", marks=AS_ROOT),
    (writable, "may be written by other users"),
    (link, "is a symbolic link"),
]


@pytest.mark.parametrize(("make", "problem"), UNTRUSTED)
def test_nothing_in_a_folder_that_others_could_have_made_is_asked_or_deleted(
    in_temporary_folder: Path,
    make: Callable[[Path], None],
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = in_temporary_folder
    dead = stale(folder / "77.sock")
    with listening(folder / "4711.sock", {}) as asked:
        make(folder)
        for command in (["status"], ["status", "--json"], ["scale", "M=1"], ["stop"], ["top"]):
            told = CliRunner().invoke(cli.app, command)
            text = f"the folder of the control sockets, '{folder}', {problem}"
            if "--json" in command:
                assert text in json.loads(told.stdout)["error"]
            else:
                assert (told.exit_code, told.stdout) == (1, "")
                assert f"Error: {text}" in told.stderr
        with control_socket({"echo": echo}) as path:
            assert path is None
        assert asked == []
    assert dead.is_socket()
    assert problem in caplog.text


@AS_ROOT
def test_root_may_ask_the_servers_of_a_user_whose_folder_a_variable_names(runtime: Path) -> None:
    dead = stale(runtime / "77.sock")
    for each in (runtime, dead):
        os.chown(each, ANOTHER_USER, ANOTHER_USER)
    path = runtime / "4711.sock"
    users = f"import os, socket; os.setuid({ANOTHER_USER}); it = socket.socket(socket.AF_UNIX); "
    users += f"it.bind({str(path)!r}); os.chmod({str(path)!r}, 0o600); it.listen(); input()"
    runtime.parent.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", users], stdin=subprocess.PIPE) as other:
        wait_until(lambda: bool(running_servers()[0]))
        with listening(runtime / "4712.sock", {}):  # this user's, in the folder of the other
            os.chown(runtime / "4712.sock", ANOTHER_USER, ANOTHER_USER)
            assert [each.pid for each in running_servers()[0]] == [4711]
        other.communicate(b"\n")
    assert dead.is_socket()


@AS_ROOT
def test_a_client_of_another_user_gets_no_answer(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    for each in (runtime, runtime.parent):
        each.chmod(0o755)
    with echoing() as path:
        path.chmod(0o666)
        asks = f"import os, socket; os.setuid({ANOTHER_USER}); it = socket.socket(socket.AF_UNIX); "
        asks += f"it.connect({str(path)!r}); "
        asks += """it.sendall(b'{"command": "echo"}\\n'); print(it.makefile().read())"""
        told = subprocess.run([sys.executable, "-c", asks], capture_output=True, check=True)
    assert json.loads(told.stdout) == {"error": "this server belongs to another user"}


def test_files_that_are_no_sockets_of_ours_are_neither_asked_nor_deleted(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    elsewhere = runtime.parent / "1.sock"
    with (
        listening(elsewhere, {}) as through_link,
        listening(runtime / "2.sock", {}, mode=0o666) as open_to_all,
    ):
        (runtime / "1.sock").symlink_to(elsewhere)
        (runtime / "3.sock").write_text("a file")
        (runtime / "4.sock").symlink_to(stale(runtime.parent / "stale.sock"))
        before = sorted(runtime.iterdir())
        assert CliRunner().invoke(cli.app, ["status"]).stderr == "no server runs\n"
        assert through_link == open_to_all == []
    assert sorted(runtime.iterdir()) == before


def test_a_server_that_ends_leaves_the_socket_of_one_that_has_taken_its_name(runtime: Path) -> None:
    with control_socket({"echo": echo}, pid=1), ExitStack() as later:
        path = later.enter_context(control_socket({"echo": echo}, pid=1))  # in another container
        assert path is not None
        of_later = path.stat()
        with control_socket({"echo": echo}, pid=1) as last:
            assert last is not None
            assert not os.path.samestat(last.stat(), of_later)
            later.close()
            assert RunningServer(1, last).ask("echo", a=1) == {"a": 1}


EVIL = "\x1b]0;it\x07\x1b[2J\x9b31m\u202egpj\r\x08\x7f\ud800"
_DEPLOYMENT = {
    "name": EVIL, "status": EVIL, "state": EVIL, "message": EVIL, "replica_states": {EVIL: 1},
    "ongoing": 0, "queued": 0, "jobs": None, "rate": 0.0, "errors": 0.0, "cancelled": 0.0,
    "left": 0.0, "p50": 1, "p95": 1, "p99": 1, "recent": {"rate": [], "p99": []},
}  # fmt: skip
_LOOP = {"stands_ms": 0, "busy": 0.0, "runs": None, "thread": EVIL}
VIEW = {
    "pid": 4711, "url": EVIL, "workers": [4711], "silent": [], "is_healthy": True, "at": 0.0,
    "problems": [
        {"level": "bad", "application": EVIL, "deployment": EVIL, "text": EVIL, "state": EVIL,
         "kind": EVIL}
    ],
    "applications": [{
        "name": EVIL, "status": EVIL, "message": EVIL, "deployed_at_s": 0.0, "route_prefix": EVIL,
        "deployments": [_DEPLOYMENT, {**_DEPLOYMENT, "name": "M"}],
    }],
    "memory": [{"process": EVIL, "rss_bytes": 1, "bytes_per_h": None}],
    "replicas": [{
        "application": EVIL, "deployment": EVIL, "replica": EVIL, "process": EVIL, "pid": 1,
        "ongoing": 1, "loop": _LOOP, "lanes": [{"name": EVIL, "ongoing": 1, "limit": 1, "queued": 1,
        "runs": []}], "threads": {"limit": 1, "runs": [{"ms": 1, "method": EVIL, "title": EVIL}]},
        "stalls": [{"ms": 1, "reason": EVIL, "line": {"file": EVIL, "line": 1}}],
        "calls": [], "more_calls": 0,
    }],
}  # fmt: skip
ANSWERS: dict[str, Any] = {"view": {"result": VIEW}, "scale": {"result": [EVIL]}}
COMMANDS = {
    "status": ["status"],
    "status as JSON": ["status", "--json"],
    "top": ["top"],
    "a change": ["scale", "M=2"],
    "a change as JSON": ["scale", "M=2", "--json"],
    "names in an error": ["scale", "Other=2"],
    "servers to choose from": ["stop", "--name", "other"],
    "an error": ["stop"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_text_of_a_server_commands_the_terminal(runtime: Path, command: list[str]) -> None:
    runtime.mkdir(mode=0o700)
    with listening(runtime / "4711.sock", ANSWERS):
        told = CliRunner().invoke(cli.app, command)
    assert told.exception is None or isinstance(told.exception, SystemExit)
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800]", told.output
    )
    assert "0;it" in told.output
    if command[-1] == "--json" and command[0] == "status":
        assert EVIL in json.loads(told.output)["applications"]


@pytest.mark.parametrize("answer", [b"\xff\n", b"[]\n", b"{}\n", b"[" * 60_000 + b"\n"])
def test_an_answer_that_is_none_is_said_in_a_line(runtime: Path, answer: bytes) -> None:
    runtime.mkdir(mode=0o700)
    with listening(runtime / "4711.sock", answer):
        told = CliRunner().invoke(cli.app, ["status"])
    assert told.stdout == "server 4711 does not answer\n"


@pytest.mark.parametrize(("mode", "is_used"), [(0o700, True), (None, False)])
def test_the_folder_of_the_session_is_used_if_it_is_there(
    in_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None, is_used: bool
) -> None:
    session = in_temporary_folder.parent / "session"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    if mode is not None:
        session.mkdir(mode)
    with echoing() as path:
        assert path.parent == (session / "ingress" if is_used else in_temporary_folder)
        assert [each.path for each in running_servers()[0]] == [path]


@AS_ROOT
def test_the_folder_of_another_users_session_is_not_used(
    in_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = in_temporary_folder.parent / "session"
    session.mkdir(0o700)
    another_users(session)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    with echoing() as path:
        assert path.parent == in_temporary_folder
    assert list(session.iterdir()) == []


@pytest.mark.timeout(150)  # it starts processes
def test_a_server_is_found_scaled_and_stopped(
    runtime: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ingress_run(folder, "serve.yaml") as server:
        pid = server.process.pid
        server.wait_for(f"control socket {runtime}/{pid}.sock")
        server.wait_for("Ctrl-C to stop")

        control_commands.status(as_json=True)
        told = json.loads(capsys.readouterr().out)
        assert (told["pid"], told["url"]) == (pid, server.url)
        assert [*told["applications"]] == ["one", "two", "auto"]

        # Of several servers, none is taken at random. This process is the other one.
        with control_socket({"view": lambda _: {**told, "pid": os.getpid(), "applications": []}}):
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
    with ingress_run(folder, "app:hello", "--workers", "2") as server:
        server.wait_for("Ctrl-C to stop")
        pid = server.process.pid
        running = RunningServer(pid, runtime / f"{pid}.sock")
        wait_until(lambda: len(running.ask("view")["workers"]) == 2)
        assert replicas(running) == [2, 2]

        with pytest.raises(typer.Exit):
            control_commands.scale(["Model=0"])
        assert "num_replicas must be an integer" in capsys.readouterr().err
        assert replicas(running) == [2, 2]
        control_commands.scale(["Model=3"])
        wait_until(lambda: replicas(running) == [3, 3])

        os.kill(running.ask("view")["workers"][0], signal.SIGKILL)
        server.wait_for(r"worker \d+ is ready")
        wait_until(lambda: replicas(running) == [3, 3])
        control_commands.stop()
        assert server.wait() == 0
    assert list(runtime.iterdir()) == []


def replicas(server: RunningServer) -> Any:
    """Return the number of `Model`'s replicas in each worker."""
    found = [each for each in server.ask("view")["replicas"] if each["deployment"] == "Model"]
    return [*Counter(each["process"] for each in found).values()]


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
