"""Ctrl-C at each stage of a start of the command line: one line, and no traceback."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.servers import environment, free_port, process, write_module

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for others")

STOPPED = "stopped by Ctrl-C, before it served\n"
# Not one long wait: free-threaded CPython 3.14.7 loses a signal that comes just before it.
HANG = 'print("hangs", flush=True); any(iter(lambda: threading.Event().wait(0.05), True))'

AT_IMPORT = f"""\
import sys, threading

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{{name}}":
            {HANG}

sys.meta_path.insert(0, Finder())
"""
APP = f"""\
import threading
import ingress as serve

class Hangs:
    def __set_name__(self, owner, name):
        {HANG}

{{before}}

@serve.deployment
class Model:
    def __init__(self):
        if {{hangs}}:
            {HANG}

    def __call__(self):
        return "served"

model = Model.bind()

if __name__ == "__main__":
    serve.start({{{{"port": 0}}}})
    serve.run(model, blocking=True)
"""
MODULE = [sys.executable, "-m", "ingress"]


def app(before: str = "", *, hangs: bool = False) -> str:
    return APP.format(before=before, hangs=hangs).replace("{{", "{").replace("}}", "}")


def stopped(folder: Path, command: list[str]) -> tuple[int, str]:
    """Run a command until it hangs, press Ctrl-C, and return its exit code and its last output."""
    with process(command, folder, environment(folder)) as server:
        server.wait_for("hangs\n")
        server.signal(signal.SIGINT)
        return server.wait(), server.output.partition("hangs\n")[2]


@pytest.mark.parametrize("name", ["pydantic", pytest.param("typer", marks=pytest.mark.thorough)])
def test_while_the_command_line_is_imported(tmp_path: Path, name: str) -> None:
    write_module(tmp_path, "sitecustomize", AT_IMPORT.format(name=name))
    command = [*MODULE, "run", "app:model", "--port", str(free_port())]
    assert stopped(tmp_path, command) == (130, STOPPED)


def test_a_command_that_serves_nothing_is_only_stopped(tmp_path: Path) -> None:
    write_module(tmp_path, "sitecustomize", AT_IMPORT.format(name="pydantic"))
    assert stopped(tmp_path, [*MODULE, "profile"]) == (130, "stopped by Ctrl-C\n")


SWALLOWS = f"""\
try:
    {HANG}
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize(
    "before",
    [
        HANG,
        pytest.param("class Owner:\n    part = Hangs()", marks=pytest.mark.thorough),
        pytest.param(SWALLOWS, marks=pytest.mark.thorough),
    ],
    ids=["a line", "__set_name__", "swallowed"],
)
def test_while_the_module_is_imported(tmp_path: Path, before: str) -> None:
    write_module(tmp_path, "app", app(before))
    code, output = stopped(tmp_path, [*MODULE, "run", "app:model", "--port", str(free_port())])
    assert code == 130
    assert output.startswith("Error: interrupted while 'app' was imported")
    assert output.count("\n") == 1


def test_while_a_constructor_hangs(tmp_path: Path) -> None:
    write_module(tmp_path, "app", app(hangs=True))
    code, output = stopped(tmp_path, [*MODULE, "run", "app:model", "--port", str(free_port())])
    assert code == 130
    assert output.endswith(STOPPED)
    assert "Traceback" not in output


def test_while_a_constructor_of_a_script_hangs(tmp_path: Path) -> None:
    write_module(tmp_path, "app", app(hangs=True))
    code, output = stopped(tmp_path, [sys.executable, "app.py"])
    assert code == -signal.SIGINT  # by Python, as after any `KeyboardInterrupt`
    assert output.endswith(STOPPED)
    assert "Traceback" not in output


@pytest.mark.thorough
def test_a_script_that_imports_the_package_has_pythons_own_ctrl_c(tmp_path: Path) -> None:
    write_module(tmp_path, "app", f"import threading\nimport ingress\n{HANG}\n")
    code, output = stopped(tmp_path, [sys.executable, "app.py"])
    assert code == -signal.SIGINT
    assert output.endswith("KeyboardInterrupt\n")
