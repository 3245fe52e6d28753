"""A failing standard stream ends no server: a full disk, a closed pipe, a closed terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.programs import INGRESS, environment, free_port, write_module
from tests.servers import PATIENCE_S, get, wait_until

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")

APP = """
import logging, sys
import ingress as serve

@serve.deployment
async def app(request):
    print("here", flush=True)
    print("there", file=sys.stderr, flush=True)
    logging.getLogger("ingress").error("and here")
    return "x"

hello = app.bind()
"""
BOTH = "> /dev/full 2> /dev/full"


@contextmanager
def serving(
    folder: Path, *options: str, redirection: str = "", **popen: object
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a server under a shell that redirects its output; wait until the server is ready."""
    write_module(folder, "app", APP)
    port = free_port()
    command = [*INGRESS, "run", "app:hello", "--port", str(port), *options]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    running = subprocess.Popen(shell, cwd=folder, env=environment(folder), **popen)  # type: ignore[call-overload]
    try:
        wait_until(lambda: running.poll() is not None or answers(port))
        assert running.poll() is None, f"it ended with {running.returncode}"
        yield port, running
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()


def answers(port: int) -> bool:
    try:
        return get(port, "/-/healthz").status == 200
    except OSError:
        return False


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["run", "workers"])
@pytest.mark.parametrize(
    "redirection",
    ["> /dev/full", "2> /dev/full", BOTH, ">&- 2>&-", "<&- >&- 2>&-"],
    ids=["stdout-full", "stderr-full", "both-full", "closed", "all-closed"],
)
def test_output_that_cannot_be_written_ends_nothing(
    tmp_path: Path, redirection: str, options: list[str]
) -> None:
    with serving(tmp_path, *options, redirection=redirection, stderr=subprocess.PIPE) as (
        port,
        running,
    ):
        for _ in range(3):
            assert get(port, "/").body == b"x"
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=PATIENCE_S)

        assert running.returncode == 0
        assert b"Traceback" not in errors
        assert b"Exception ignored" not in errors
        assert b"Logging error" not in errors


@pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["run", "workers"])
def test_a_closed_pipe_ends_no_server(tmp_path: Path, options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with serving(tmp_path, *options, stdout=writing, stderr=writing) as (port, running):
            assert get(port, "/").body == b"x"
            running.send_signal(signal.SIGTERM)

            assert running.wait(PATIENCE_S) == 0
    finally:
        os.close(writing)


def test_a_name_that_the_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    write_module(tmp_path, "named", APP.replace("deployment\n", 'deployment(name="Modèle")\n'))
    command = [*INGRESS, "run", "named:hello", "--port", "0"]
    ascii_only = {**environment(tmp_path), "PYTHONIOENCODING": "ascii"}
    running = subprocess.Popen(
        command, cwd=tmp_path, env=ascii_only, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert running.stdout is not None
    for line in running.stdout:
        if b"is ready" in line:
            break
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=PATIENCE_S)

    assert running.returncode == 0


ON_A_TERMINAL = """
import os, signal, sys
os.setsid()
os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first one a session opens is its terminal
# Whatever the tests were started under.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--workers", "2"]], ids=["run", "workers"])
@pytest.mark.parametrize("how", ["nohup", "plain"])
def test_a_terminal_that_closes_ends_no_server(
    tmp_path: Path, how: str, options: list[str]
) -> None:
    write_module(tmp_path, "app", APP)
    port = free_port()
    ours, theirs = pty.openpty()
    command = [*INGRESS, "run", "app:hello", "--port", str(port), *options]
    running = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, how, *command],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        wait_until(lambda: answers(port))
        os.close(ours)
        for _ in range(3):
            assert get(port, "/").body == b"x"
        running.send_signal(signal.SIGTERM)

        assert running.wait(PATIENCE_S) == 0
    finally:
        running.kill()
        running.wait()
