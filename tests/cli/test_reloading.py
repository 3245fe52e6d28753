"""A changed file, applied to a server that runs: by `ingress reload`, SIGHUP and `--watch`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingress.app.config_file.difference import changed_names, differences, for_new_processes
from ingress.app.config_file.loading import ConfigFile, Loaded
from ingress.app.declaration.build import build
from ingress.app.declaration.declaration import Deployment
from ingress.cli.control_socket import CommandError, RunningServer
from ingress.cli.reloading import WorkersAddress
from ingress.cli.worker import Served
from ingress.config import AutoscalingConfig, DeploymentConfig, HTTPOptions
from ingress.core.base.options import IN_PLACE
from ingress.core.base.settings import RUNTIME_DIR, Settings
from ingress.serving.http.address import SharedPort
from ingress.serving.http.server_options import ServerOptions
from tests.programs import INGRESS, ServerProcess, environment, process, write_module
from tests.servers import PATIENCE_S, get, wait_until

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs Unix")

APP = """
import os
import ingress as serve

@serve.deployment
class Model:
    def __init__(self, size=1):
        self.size, self.config = size, None

    async def reconfigure(self, config):
        self.config = config

    async def __call__(self, request):
        return [self.size, self.config, os.environ.get("FROM_FILE"), id(self), os.getpid()]

hello = Model.bind()

def builder(args):
    if args.get("fails"):
        raise ValueError("no such model")
    return Model.bind(args["size"])
"""

FILE = """
http_options: {port: 0}
applications:
- name: shop
  import_path: app:builder
  args: {size: 1}
  deployments:
  - name: Model
    num_replicas: 1
    user_config: {level: 1}
"""
MORE = (
    "args: {size: 1}",
    "args: {size: 2}\n  runtime_env: {env_vars: {FROM_FILE: 'x${FROM_FILE}'}}",
)


def written(path: Path, text: str, *changes: tuple[str, str]) -> ConfigFile:
    """Write a file at once, as editors do, with these replacements. Returns it as read."""
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    new = path.with_suffix(".new.yaml")
    new.write_text(text)
    new.replace(path)
    return ConfigFile.read(path)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder. Its path is short: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(RUNTIME_DIR, folder)
        yield Path(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    (tmp_path / "serve.yaml").write_text(FILE)
    return tmp_path


def reload(runtime: Path, server: ServerProcess) -> list[str]:
    """Return the lines of `ingress reload`."""
    pid = server.process.pid
    lines: list[str] = RunningServer(pid, runtime / f"{pid}.sock").ask("reload", 4 * PATIENCE_S)
    return lines


NEW_PROCESSES = {
    "http_options": (("port: 0", "port: 1"), "http_options"),
    "import_path": (("app:builder", "app:hello"), "import_path of application 'shop'"),
    "args": (("size: 1", "size: 2"), "args of application 'shop'"),
    "env_vars": (("  args:", "  runtime_env: {env_vars: {A: b}}\n  args:"), "env_vars"),
    "working_dir": (("  args:", "  runtime_env: {working_dir: .}\n  args:"), "working_dir"),
}


@pytest.mark.parametrize(("change", "named"), NEW_PROCESSES.values(), ids=list(NEW_PROCESSES))
def test_a_difference_that_needs_new_processes_is_named(
    tmp_path: Path, change: tuple[str, str], named: str
) -> None:
    path = tmp_path / "serve.yaml"
    old = written(path, FILE)

    assert for_new_processes(old, written(path, FILE, change)) == [named]
    in_place = ("num_replicas: 1", "num_replicas: 2")
    assert for_new_processes(old, written(path, FILE, in_place)) == []


SCALING = {
    "more replicas": ("num_replicas: 1", "num_replicas: 4", {"num_replicas": 4}),
    "auto": ("num_replicas: 1", 'num_replicas: "auto"', {"num_replicas": "auto"}),
    "autoscaling": (
        *("num_replicas: 1", "autoscaling_config: {max_replicas: 3}"),
        {"autoscaling_config": AutoscalingConfig(max_replicas=3)},
    ),
}


@pytest.mark.parametrize(("before", "after", "options"), SCALING.values(), ids=list(SCALING))
def test_what_a_deployment_is_changed_to_and_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, options: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    path = folder / "serve.yaml"
    old = written(path, FILE).load_all(None)
    new = written(path, FILE, (before, after)).load_all(None)

    found = differences(old, new, DeploymentConfig.marked(IN_PLACE))
    assert found.options == {"shop": {"Model": options}}
    assert (found.added, found.again, found.removed) == ([], [], [])
    back = differences(new, old, DeploymentConfig.marked(IN_PLACE)).options["shop"]["Model"]
    # A running deployment can have the options, and the ones before again.
    (config,) = [each.config for each in _deployments(new)]
    again = config.with_options(**back)
    assert (again.num_replicas, again.autoscaling) == (1, None)


def _deployments(loaded: list[Loaded]) -> list[Deployment]:
    return [each.deployment for each in build(loaded[0].application, "shop").deployments]


def test_the_options_that_the_text_changes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    old = written(path, FILE)
    new = written(path, FILE, ("num_replicas: 1", "num_replicas: 2"), ("    user_config", "#"))

    assert changed_names(old, new) == {"shop": {"Model": {"num_replicas", "user_config"}}}


@pytest.mark.timeout(150)  # it starts a process
def test_a_changed_file_is_applied_while_the_server_runs(runtime: Path, folder: Path) -> None:
    path = folder / "serve.yaml"
    with process([*INGRESS, "run", "serve.yaml"], folder, environment(folder)) as server:
        server.wait_for("Ctrl-C to stop")
        with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as client:
            before = client.get("/").json()

            # The same replica is reconfigured; `pid` and its `id` stay.
            written(path, FILE, ("level: 1", "level: 2"))
            (line,) = reload(runtime, server)
            assert line == "shop: Model: user_config {'level': 1} -> {'level': 2}"
            wait_until(lambda: client.get("/").json() == [1, {"level": 2}, *before[2:]])
            assert reload(runtime, server) == []

            # A wrong file, and one that needs a new process, change nothing.
            path.write_text(FILE.replace("num_replicas", "num_replica"))
            server.signal(signal.SIGHUP)
            server.wait_for(r"the file is not applied: \S*serve.yaml:9:5: .*did you mean num_rep")
            written(path, FILE, ("level: 1", "level: 3"), ("size: 1", "size: 2"))
            with pytest.raises(CommandError, match=r"args of application 'shop' changed: .*Not"):
                reload(runtime, server)
            write_module(folder, "app", APP + "# edited")
            written(path, FILE, ("level: 1", "level: 3"))
            with pytest.raises(CommandError, match=r"the code of app.py changed"):
                reload(runtime, server)
            write_module(folder, "app", APP)
            assert client.get("/").json() == [1, {"level": 2}, *before[2:]]


ORIGINS = """
http_options: {port: 0, keep_alive_timeout_s: 9}
applications:
- name: shop
  import_path: app:builder
  args: {size: 1}
  runtime_env: {env_vars: {RAY_SERVE_HTTP_REQUEST_MAX_RETRIES: "4"}}
  deployments:
  - name: Model
    max_queued_requests: 8
    user_config: {level: 1}
"""


ORIGIN = {
    "max_ongoing_requests": "code",
    "max_queued_requests": "serve.yaml:10:26",
    "user_config": "serve.yaml:11:18",
    "num_replicas": "default",
    "http_options.keep_alive_timeout_s": "serve.yaml:2:47",
    "http_options.root_path": "command line",
    "http_options.request_timeout_s": "default",
    "environment.RAY_SERVE_HTTP_REQUEST_MAX_RETRIES": "serve.yaml:7:64",
    "environment.INGRESS_PRIORITY_HEADER": "environment",
    "environment.INGRESS_FREEZE_GC": "default",
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.thorough)])
def test_the_page_names_the_origin_of_each_option(
    runtime: Path, folder: Path, workers: str
) -> None:
    write_module(folder, "app", APP.replace(".deployment", ".deployment(max_ongoing_requests=7)"))
    path = folder / "serve.yaml"
    written(path, ORIGINS)
    command = [*INGRESS, "run", "serve.yaml", "--root-path", "/api", "--admin", "127.0.0.1:0"]
    command += ["--workers", workers] if workers != "1" else []
    environ = environment(folder) | {"INGRESS_PRIORITY_HEADER": "x-priority"}
    with process(command, folder, environ) as server:
        admin = server.wait_for(r"page at (http://127\.0\.0\.1:\d+/)")[1]
        server.wait_for("Ctrl-C to stop")

        def origins() -> dict[str, str]:
            found = httpx.get(f"{admin}api/configuration", timeout=PATIENCE_S).json()["options"]
            by_name = {each["where"].removeprefix("shop:Model."): each for each in found}
            return {name: by_name[name]["origin"] for name in ORIGIN}

        assert origins() == ORIGIN

        pid = server.process.pid
        running = RunningServer(pid, runtime / f"{pid}.sock")
        running.ask("scale", PATIENCE_S, replicas={"shop": {"Model": 2}})
        written(path, ORIGINS, ("level: 1", "level: 2"))
        reload(runtime, server)
        changed = {"num_replicas": "ingress scale", "user_config": "serve.yaml"}
        assert origins() == ORIGIN | changed


@pytest.mark.timeout(150)
def test_a_watched_file_is_applied_when_it_changes(runtime: Path, folder: Path) -> None:
    path = folder / "serve.yaml"
    command = [*INGRESS, "run", "serve.yaml", "--watch"]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("Ctrl-C to stop")
        more = "- {name: more, route_prefix: /more, import_path: 'app:hello'}"
        written(path, FILE + more)
        server.wait_for("the file is applied: more: added")
        with httpx.Client(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as client:
            assert client.get("/more").json()[:2] == [1, None]
            written(path, FILE)
            server.wait_for("the file is applied: more: removed")
            assert client.get("/-/routes").json() == {"/": "shop"}


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_workers_are_replaced_one_after_another_without_a_lost_request(
    runtime: Path, folder: Path
) -> None:
    path = folder / "serve.yaml"
    command = [*INGRESS, "run", "serve.yaml", "--workers", "2"]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("Ctrl-C to stop")
        port = server.port
        codes: list[int] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                codes.append(get(port, "/").status)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            written(path, FILE, MORE)
            (line,) = reload(runtime, server)
            assert line == "workers replaced: env_vars, args of application 'shop' changed"
            for _ in range(4):
                assert json.loads(get(port, "/").body)[:3] == [2, {"level": 1}, "x"]

            # A version that does not start leaves those that serve.
            written(path, FILE, ("size: 1", "size: 2, fails: true"))
            with pytest.raises(CommandError, match="no such model"):
                reload(runtime, server)
            assert json.loads(get(port, "/").body)[:3] == [2, {"level": 1}, "x"]
        finally:
            over.set()
            asking.join(PATIENCE_S)
        assert {*codes} == {200}
        assert "another one starts" not in server.output
        assert os.environ.get("FROM_FILE") is None


HTTP = "http_options: {port: 0}"


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_changed_options_of_http_replace_the_workers_which_may_move(
    runtime: Path, folder: Path
) -> None:
    path = folder / "serve.yaml"
    limited = written(path, FILE, (HTTP, "http_options: {port: 0, max_body_size: 100}")).path
    command = [*INGRESS, "run", limited.name, "--workers", "2", "--admin", "127.0.0.1:0"]
    with process(command, folder, environment(folder)) as server:
        admin = server.wait_for(r"page at (http://127\.0\.0\.1:\d+/)")[1]
        url = server.url
        assert post(url) == 200

        written(path, FILE, (HTTP, "http_options: {port: 0, max_body_size: 10}"))
        assert reload(runtime, server) == ["workers replaced: http_options changed"]
        assert post(url) == 413
        assert status(runtime, server)["url"] == url

        # An address that cannot be bound changes nothing.
        written(path, FILE, (HTTP, "http_options: {host: 192.0.2.1, port: 0}"))
        with pytest.raises(CommandError, match=r"host must be an address of this machine.*nothing"):
            reload(runtime, server)
        assert post(url) == 413

        # Nor does a version whose workers do not start.
        moved = (HTTP, "http_options: {host: 127.0.0.2, port: 0}")
        written(path, FILE, moved, ("size: 1", "size: 1, fails: true"))
        with pytest.raises(CommandError, match="no such model"):
            reload(runtime, server)
        assert post(url) == 413

        written(path, FILE, moved)
        assert reload(runtime, server) == ["workers replaced: http_options changed"]
        there = status(runtime, server)["url"]
        assert there.startswith("http://127.0.0.2:")
        snapshot = httpx.get(f"{admin}api/snapshot", trust_env=False, timeout=PATIENCE_S).json()
        assert snapshot["url"] == there
        assert post(there) == 200
        with pytest.raises(httpx.ConnectError):
            post(url)


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_a_server_that_reloads_has_a_control_socket_and_the_new_options_of_http(
    runtime: Path, folder: Path
) -> None:
    path = folder / "serve.yaml"
    written(path, FILE, MORE)
    command = [*INGRESS, "run", "serve.yaml", "--reload"]
    with process(command, folder, environment(folder)) as server:
        server.wait_for("Ctrl-C to stop")
        url = server.url
        assert status(runtime, server)["url"] == url
        assert post(url) == 200
        assert json.loads(get(server.port, "/").body)[2] == "x"
        with pytest.raises(CommandError, match="restarts by itself"):
            reload(runtime, server)

        written(path, FILE, (HTTP, "http_options: {port: 0, max_body_size: 10}"), MORE)
        wait_until(lambda: answered(url) == 413)
        assert json.loads(get(server.port, "/").body)[2] == "x"
        control = RunningServer(server.process.pid, runtime / f"{server.process.pid}.sock")
        assert control.ask("stop", PATIENCE_S) is None
        assert server.wait() == 0
        assert list(runtime.glob("*.sock")) == []


def post(url: str, timeout_s: float = 5.0) -> int:
    """Return the status of the answer to a body of 50 bytes."""
    options: dict[str, Any] = {"headers": {"connection": "close"}, "timeout": timeout_s}
    return httpx.post(url, content=b"x" * 50, trust_env=False, **options).status_code


def answered(url: str) -> int:
    """Return what `post` does, 0 while there is no answer: the process restarts."""
    try:
        return post(url, PATIENCE_S)
    except httpx.TransportError:
        return 0


def status(runtime: Path, server: ServerProcess) -> Any:
    pid = server.process.pid
    return RunningServer(pid, runtime / f"{pid}.sock").ask("view", PATIENCE_S)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[Path, WorkersAddress]]:
    """The address of workers under `--port 0`; the file has another host."""
    path = tmp_path / "serve.yaml"
    file = written(path, FILE, (HTTP, "http_options: {host: 127.0.0.2, port: 9}"))
    server = ServerOptions(http={**file.http_options(tmp_path), "port": 0}, serves_http=True)
    served = Served("", tmp_path, "a", "/", server, file=file, http={"port": 0}, folder=tmp_path)
    settings = Settings.from_environment()
    options = server.over(HTTPOptions(keep_alive_timeout_s=3))
    bound = server.address(options, settings)
    port = SharedPort(bound.bind(), bound)
    yield path, WorkersAddress(served, port, options, settings)
    port.close()


def test_the_command_line_keeps_its_address_whatever_the_file_says(
    tmp_path: Path, address: tuple[Path, WorkersAddress]
) -> None:
    path, workers = address
    same = written(path, FILE, (HTTP, "http_options: {host: 127.0.0.2, port: 10, root_path: /a}"))

    assert workers.moved(same) is None
    assert workers.take(same, None).startswith("http://127.0.0.2:")


def test_another_host_of_the_file_is_bound_before_anything_is_changed(
    tmp_path: Path, address: tuple[Path, WorkersAddress]
) -> None:
    path, workers = address
    default = written(path, FILE)
    port = workers.moved(default)

    assert port is not None
    assert workers.take(default, port).startswith("http://127.0.0.1:")
    assert workers.moved(default) is None
    port.close()
