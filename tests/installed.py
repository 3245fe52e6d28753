"""Serves a small application with the installed package, in an environment that has nothing else.

    PYTHON tests/installed.py     by `make dist`, for each Python

It is run in a folder without the source, so that the package is the installed one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import distributions, version
from pathlib import Path

APP = """\
from fastapi import FastAPI

import ingress as serve

app = FastAPI()


@serve.deployment(num_replicas=2)
@serve.ingress(app)
class Hello:
    @app.get("/")
    def hello(self) -> str:
        return "hello"


hello = Hello.bind()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hello.py").write_text(APP)
        os.chdir(folder)
        subprocess.run(
            [sys.executable, "-m", "ingress", "new", "shop"], check=True, stdout=subprocess.DEVNULL
        )
        assert Path("shop/app.py").exists()
        command = [sys.executable, "-m", "ingress", "run", "hello:hello", "--port", "0"]
        with subprocess.Popen(
            [*command, "--admin", "off"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as server:
            assert server.stdout is not None
            said = ""
            while not (ready := re.search(r"is ready at (\S+)", said)):
                line = server.stdout.readline()
                assert line, f"the server has ended:\n{said}"
                said += line
            with urllib.request.urlopen(ready[1], timeout=10) as answer:
                assert answer.read() == b'"hello"'
            server.send_signal(signal.SIGTERM)
            server.stdout.read()
            assert server.wait(30) == 0
    others = len({each.name.lower() for each in distributions()}) - 1
    print(
        f"Python {sys.version.split()[0]}: fastapi-ingress {version('fastapi-ingress')} serves, "
        f"with {others} other packages"
    )


if __name__ == "__main__":
    main()
