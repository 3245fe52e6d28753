"""Checks the pages of `docs/how-to` against their applications in `app_examples`.

python    parts of the file that the first line names; a line `...` stands between two parts
console   commands, each after `$ `, and the output that they print, as in `tests/documents.py`.
          `ingress run` serves until the end of the page; the `curl`s that follow are sent to it.
          `wrk` is not run: a load figure is measured by hand
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.documents import ROOT, blocks, is_shown, links
from tests.servers import INGRESS, ServerProcess, environment, process

_SHOWN_AT = "http://127.0.0.1:8000"
_IDS = r"[0-9a-f]{8}-[0-9a-f-]{27}|\b1\d{9}\b|0x[0-9A-F]+"
"""Ids, seconds since 1970 and addresses in memory, which differ each time."""


def check_page(name: str, folder: Path, **environ: str) -> None:
    """Run the blocks of a page in a folder. Fails if an output or a part of a file differs."""
    page = ROOT / "docs" / "how-to" / f"{name}.md"
    assert [link for link in links(page) if not (page.parent / link).exists()] == []
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 500, "words"
    with ExitStack() as until_the_end:
        server: ServerProcess | None = None
        for language, text in blocks(page):
            if language == "python":
                _check_parts(text)
                continue
            for command, shown in _commands(text):
                words = shlex.split(command)
                if words[:2] == ["ingress", "run"]:
                    served = [*INGRESS, *words[1:], "--port", "0"]
                    env = {**environment(folder), **environ}
                    server = until_the_end.enter_context(process(served, folder, env))
                    server.wait_for("is ready")
                elif words[0] != "wrk":
                    url = server.url if server is not None else ""
                    printed = _run(command.replace(_SHOWN_AT, url), folder, environ)
                    printed, shown = (re.sub(_IDS, "*", each) for each in (printed, shown))
                    assert is_shown(printed.strip(), shown.strip()), f"$ {command}\n{printed}"


def _check_parts(text: str) -> None:
    path, _, code = text.removeprefix("# ").partition("\n")
    source = (ROOT / path).read_text()
    for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
        assert part.strip("\n") in source, f"{path} has changed:\n{part}"


def _commands(session: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a block with its output; a command goes on after a backslash."""
    for each in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*", each)
        assert command is not None
        yield command[0].replace("\\\n", " "), each[command.end() :]


def _run(command: str, folder: Path, environ: dict[str, str]) -> str:
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    for name, words in (("ingress", INGRESS), ("python", INGRESS[:1])):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("curl ", "curl -sS --max-time 50 --noproxy '*' ")],
        cwd=folder,
        env={**environment(folder), **environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())
