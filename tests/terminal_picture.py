"""Draws docs/observing/terminal.svg: `explain`, `run` and a stall that is named.

    python -m tests.terminal_picture

The commands are run, and what they print is drawn. Paths are shortened, and ports are the defaults.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tempfile
from pathlib import Path

import httpx
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.documents import ROOT
from tests.servers import INGRESS, environment, process, wait_until

WIDTH = 118
APP = """\
import time

from fastapi import FastAPI

import ingress as serve

app = FastAPI()


@serve.deployment(num_replicas=2, max_ongoing_requests=32)
@serve.ingress(app)
class Hello:
    @app.get("/sync")
    def sync_endpoint(self, name: str = "you") -> str:
        return f"hello, {name}"

    @app.get("/slow")
    async def slow(self) -> str:
        time.sleep(0.3)
        return "done"


hello = Hello.bind()
"""


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hello.py").write_text(APP)
        environ = environment(folder) | {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1"}
        command(console, "ingress explain hello:hello")
        explain = [*INGRESS, "explain", "hello:hello"]
        told = subprocess.run(explain, cwd=folder, env=environ, capture_output=True, check=True)
        show(console, told.stdout.decode(), folder)
        command(console, "ingress run hello:hello")
        run = [*INGRESS, "run", "hello:hello", "--port", "0", "--admin", "127.0.0.1:0"]
        run.append("--no-access-log")  # which is JSON here, and text in a terminal
        with process(run, folder, environ) as server:

            def said() -> str:
                return Text.from_ansi(server.output).plain

            wait_until(lambda: "is ready at" in said(), timeout_s=30)
            httpx.get(f"{server.url}/slow")
            wait_until(lambda: "stalled for" in said())
            admin = re.search(r"127\.0\.0\.1:(\d+)/metrics", said())
            assert admin is not None
            output = server.output.replace(str(server.port), "8000").replace(admin[1], "8265")
            output = re.sub(r".*control socket.*\n", "", output)
        show(console, output, folder)
    picture = console.export_svg(title="ingress", theme=MONOKAI)
    # No font of another host: a page that shows the picture asks for nothing else.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code", "ui-monospace, Menlo, Consolas")
    picture = re.sub(r"terminal-\d+-", "terminal-", picture)
    path = ROOT / "docs" / "observing" / "terminal.svg"
    path.write_text(picture.rstrip() + "\n")
    print(f"written: {path.relative_to(ROOT)}")


def command(console: Console, text: str) -> None:
    console.print(Text.assemble(("$ ", "green"), (text, "bold")))


def show(console: Console, output: str, folder: Path) -> None:
    lines = output.replace(f"{folder}{os.sep}", "").strip().splitlines()
    console.print(Text.from_ansi("\n".join(lines)))
    console.print()


if __name__ == "__main__":
    main()
