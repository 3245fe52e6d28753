"""Checks the pages of `docs/how-to` against their applications in `app_examples`.

python    parts of the file that the first line names; a line `...` stands between two parts
console   commands, each after `$ `, and the output that they print, as in `tests/documents.py`.
          `ingress run` serves until the end of the page; the `curl`s that follow are sent to it.
          `wrk` is not run: a load figure is measured by hand. `kill -9` ends the server
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.documents import ROOT, Reader, blocks, is_shown, links
from tests.servers import INGRESS, environment, process

_ADDRESS = "http://127.0.0.1:8000"
_VARIES = r"\b1\d{9}\b|0x[0-9A-F]+"
"""Seconds since 1970, and addresses in memory."""


def check_page(name: str, folder: Path) -> None:
    """Run the blocks of a page in a folder. Fails if an output or a part of a file differs."""
    page = ROOT / "docs" / "how-to" / f"{name}.md"
    assert [link for link in links(page) if not (page.parent / link).exists()] == []
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 500, "words"
    reader, address = Reader(folder), ""
    with ExitStack() as until_the_end:
        for language, text in blocks(page):
            if language == "python":
                _check_parts(text)
                continue
            for command, shown in _commands(text):
                words = shlex.split(command)
                if words[:2] == ["ingress", "run"]:
                    served = [*INGRESS, *words[1:], "--port", "0"]
                    server = process(served, folder, environment(folder))
                    running = until_the_end.enter_context(server)
                    running.wait_for("is ready")
                    address = running.url
                elif words[:2] == ["kill", "-9"]:
                    running.process.kill()
                    running.process.wait()
                elif words[0] != "wrk":
                    curl = "curl -sS --max-time 50 --noproxy '*' "
                    command = command.replace("curl ", curl).replace(_ADDRESS, address)
                    printed = re.sub(_VARIES, "*", reader.output(command))
                    shown = re.sub(_VARIES, "*", shown.strip())
                    assert is_shown(printed, shown), f"$ {command}\n{printed}"


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
