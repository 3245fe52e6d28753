"""`serve.run` and related functions: the errors they raise, and the applications they find."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from typing import Any

import httpx
import pytest
from starlette.requests import Request

import ingress as serve
from ingress.exceptions import RayServeException
from ingress.telemetry.logs.sinks import flush_all
from tests.servers import PATIENCE_S, bind, served

pytestmark = pytest.mark.usefixtures("separate")


@serve.deployment
class Echo:
    def __init__(self, text: str = "x") -> None:
        self.text = text

    async def __call__(self) -> str:
        return self.text


@serve.deployment
async def says(text: str) -> str:
    logging.getLogger("ingress").debug("a detail of %s", text)
    return text


class NotADeployment: ...


@pytest.mark.parametrize("target", [Echo, NotADeployment, NotADeployment(), None, "app:hello"])
def test_run_wants_a_bound_application(target: Any) -> None:
    expected = r"`serve.run` expects an `Application` returned by `Deployment.bind\(\)`"
    with pytest.raises(TypeError, match=expected):
        serve.run(target)


def test_run_says_how_to_bind_a_deployment() -> None:
    with pytest.raises(TypeError, match=r"use Echo.bind\(\)"):
        serve.run(Echo)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("api", r"'api', must start with a forward slash \('/'\)"),
        ("", "must start with a forward slash"),
        (3, "3, must start with a forward slash"),
        ("/api/", "'/api/', may not end with a trailing '/'"),
        ("/{x}", "'/{x}', may not contain wildcards"),
    ],
)
def test_a_route_prefix_is_checked_in_rays_words(prefix: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid route_prefix {message}|{message}"):
        serve.run(bind(Echo), route_prefix=prefix)
    assert serve.status().applications == {}


def test_two_applications_cannot_have_one_prefix() -> None:
    served(bind(Echo), "first", "/a")
    message = 'Prefix /a is being used by application "first". Failed to deploy application "b"'
    with pytest.raises(RayServeException, match=message):
        serve.run(bind(Echo), name="b", route_prefix="/a")
    assert list(serve.status().applications) == ["first"]


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_a_string_that_is_not_empty(name: Any) -> None:
    with pytest.raises(RayServeException, match="Application name must a non-empty string"):
        serve.run(bind(Echo), name=name)


def test_the_same_name_replaces_the_application() -> None:
    port = served(bind(Echo, "old"), "app", "/a")
    served(bind(Echo, "new"), "app", "/b")

    assert httpx.get(f"http://127.0.0.1:{port}/b").text == "new"
    assert httpx.get(f"http://127.0.0.1:{port}/a").status_code == 404
    assert list(serve.status().applications) == ["app"]


def test_several_applications_are_run_at_once_each_with_its_handle() -> None:
    first, second = serve.run_many(
        [
            serve.RunTarget(bind(Echo, "one"), route_prefix=None),
            serve.RunTarget(bind(Echo, "two"), name="second", route_prefix=None),
        ]
    )

    assert (first.remote().result(), second.remote().result()) == ("one", "two")
    assert sorted(serve.status().applications) == ["default", "second"]


def test_several_applications_of_one_name_are_refused_before_one_runs() -> None:
    targets = [serve.RunTarget(bind(Echo)), serve.RunTarget(bind(Echo), route_prefix=None)]

    with pytest.raises(ValueError, match=r"different names, got \['default', 'default'\]"):
        serve.run_many(targets)
    assert serve.status().applications == {}


def test_shutdown_async_stops_everything_from_a_running_loop() -> None:
    serve.run(bind(Echo), route_prefix=None)

    asyncio.run(serve.shutdown_async())

    assert serve.status().applications == {}


def test_a_port_in_use_is_named() -> None:
    before = threading.active_count()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"Failed to bind to address '127.0.0.1:{port}'"):
            serve.start({"port": port})
    assert threading.active_count() == before
    assert served(bind(Echo)) != port


@pytest.mark.parametrize(
    "options",
    [{"host": "no.such.host.invalid"}, {"ssl_keyfile": "no.pem", "ssl_certfile": "no.pem"}],
)
def test_a_server_that_cannot_start_leaves_nothing(options: dict[str, Any]) -> None:
    before = threading.active_count()
    with pytest.raises((RuntimeError, OSError)):
        serve.start({"port": 0, **options})
    assert threading.active_count() == before
    assert serve.status().proxies == {}


@pytest.mark.parametrize("options", [5, "127.0.0.1"])
def test_http_options_of_another_type_are_refused_by_name(options: Any) -> None:
    with pytest.raises(TypeError, match=r"http_options must be .*got .*serve\.HTTPOptions"):
        serve.start(options)
    assert serve.status().proxies == {}


@pytest.mark.parametrize(
    "given", [{"log_level": "DEBUG"}, serve.LoggingConfig(encoding="JSON", log_level="DEBUG")]
)
def test_a_logging_config_of_run_acts(
    given: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    handle = serve.run(says.bind(), route_prefix=None, logging_config=given)
    assert handle.remote("one").result(timeout_s=PATIENCE_S) == "one"
    serve.shutdown()
    flush_all()
    # A deployment's format is written by this package, a level goes to the program's own handlers.
    assert "a detail of one" in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize(("given", "error"), [("DEBUG", TypeError), ({"level": 1}, TypeError)])
def test_a_logging_config_is_checked(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"logging_config must be|unexpected keyword argument 'level'"):
        serve.run(bind(Echo, "one"), route_prefix=None, logging_config=given)
    assert serve.status().applications == {}


def test_options_for_a_running_server_act_or_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")

    @serve.deployment
    async def slow(request: Request) -> None:
        await asyncio.Future()

    port = served(slow.bind())

    serve.start({"port": 0, "request_timeout_s": 0.1})
    assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 408
    assert not caplog.messages

    serve.start({"port": 9999, "request_timeout_s": 0.1})
    [message] = caplog.messages
    assert "port=9999 has no effect" in message
    assert f"listens at http://127.0.0.1:{port} already" in message


def test_start_stays_until_shutdown_whatever_is_deleted() -> None:
    port = served(bind(Echo))
    serve.delete("default")

    assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 404
    serve.shutdown()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_deleting_what_is_not_there_is_nothing() -> None:
    handle = serve.run(bind(Echo, "x"), name="app", route_prefix=None)

    serve.delete("absent")

    assert list(serve.status().applications) == ["app"]
    assert handle.remote().result(timeout_s=PATIENCE_S) == "x"


def test_handles_are_found_by_name() -> None:
    serve.run(bind(Echo, "x"), name="app", route_prefix=None)

    assert serve.get_app_handle("app").remote().result(timeout_s=PATIENCE_S) == "x"
    assert serve.get_deployment_handle("Echo", "app").remote().result(timeout_s=PATIENCE_S) == "x"
    with pytest.raises(RayServeException, match="Application 'absent' does not exist"):
        serve.get_app_handle("absent")
    with pytest.raises(KeyError, match="Absent"):
        serve.get_deployment_handle("Absent", "app")
    with pytest.raises(RayServeException, match="needs the application's name"):
        serve.get_deployment_handle("Echo")


def test_what_only_declares_does_not_import_what_runs() -> None:
    code = (
        "import sys, ingress as serve\n"
        "app = serve.deployment(lambda: None, name='one').bind()\n"
        "print('ingress.engines.local' in sys.modules)\n"
        "serve.status()\n"
        "print('ingress.engines.local' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


def test_first_uses_in_many_threads_make_one_engine() -> None:
    code = (
        "import sys, threading, ingress.engines as engines\n"
        "sys.setswitchinterval(1e-6)\n"
        "found, gate = [], threading.Barrier(8)\n"
        "def use():\n"
        "    gate.wait()\n"
        "    found.append(engines.local_engine())\n"
        "threads = [threading.Thread(target=use) for _ in range(8)]\n"
        "for each in threads: each.start()\n"
        "for each in threads: each.join()\n"
        "print(len(found), len(set(map(id, found))))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["8", "1"]
