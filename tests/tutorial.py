"""The pages of docs/learn, followed in their order, as a reader does.

    python -m tests.tutorial    writes what the commands print, and the pictures, into the pages

A server that a page starts runs until the next one, or the end of the page.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import httpx

from tests.documents import ROOT, Reader, blocks, is_shown
from tests.plain_picture import plain_picture
from tests.servers import INGRESS, UVICORN, environment, process, wait_until

LEARN = ROOT / "docs" / "learn"
PAGES = sorted(LEARN.glob("[0-9]*.md"))
BASE = "http://127.0.0.1:8000"
PICTURES = {
    "02": ("reviews:reviews", "/score?text=good"),
    "04": ("reviews:reviews", "/score?text=good", "-n", "12"),
    "05": ("reviews:reviews", "/score?text=good"),
    "06": ("reviews:reviews", "/score?text=good", "-n", "12"),
    "07": ("explainer:explainer", "/explain?text=great", "-n", "1"),
    "08": ("patient:patient", "/wait", "/compute", "-n", "1"),
}
"""What `ingress trace` draws for a page; a page may also do it itself."""
DEADLINE = {"RAY_SERVE_REQUEST_PROCESSING_TIMEOUT_S": "0.2"}


class Tutorial(Reader):
    """Follows pages in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._command("python", 200, [sys.executable])
        self._url = BASE
        self._servers = ExitStack()
        self._files: dict[str, str] = {}
        self._environ = {"INGRESS_RUNTIME_DIR": str(folder / ".run")}
        (folder / ".run").mkdir(mode=0o700)

    def prepare(self, page: Path) -> None:
        """Write the files of a page, as a reader has them who has followed it."""
        for language, text in blocks(page):
            if language == "python":
                self._files[text.split("\n", 1)[0]] = text
        self._write()

    def follow(self, page: Path) -> list[tuple[str, str]]:
        """Execute the blocks of a page; return each command with what it printed."""
        printed = []
        with self._servers:
            for language, text in blocks(page):
                if language == "python":
                    self._files[text.split("\n", 1)[0]] = text
                    self._write()
                elif language == "console":
                    for command, _ in commands(text):
                        printed.append((command, self._execute(command)))
        return printed

    def _execute(self, command: str) -> str:
        words = shlex.split(command)
        environ = environment(self._folder) | self._environ
        while "=" in words[0]:
            name, _, environ[name] = words.pop(0).partition("=")
        if words[:2] == ["ingress", "run"] or words[0] == "uvicorn":
            self._serve(words, environ)
            return ""
        if words[0] == "curl":
            return self._ask(words[1:])
        return self.output(command.replace(BASE, self._url), self._environ)

    def _serve(self, words: list[str], environ: dict[str, str]) -> None:
        self._servers.close()
        words = [*{"ingress": INGRESS, "uvicorn": UVICORN}[words[0]], *words[1:], "--port", "0"]
        server = self._servers.enter_context(process(words, self._folder, environ))
        wait_until(lambda: re.search("is ready at|Uvicorn running", server.output), timeout_s=60)
        self._url = server.url
        self._write()

    def _write(self) -> None:
        for text in self._files.values():
            self.write(text.replace(BASE, self._url))

    def _ask(self, words: list[str]) -> str:
        headers = dict(
            words[place + 1].split(": ", 1) for place, word in enumerate(words) if word == "-H"
        )
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        url = words[-1].replace(BASE, self._url)
        answer = httpx.request(method, url, headers=headers, timeout=30)
        return answer.text.strip()


def commands(text: str) -> list[tuple[str, str]]:
    """Return each command of a console block with the output that it shows."""
    begins = [match.start() for match in re.finditer(r"^\$ ", text, re.MULTILINE)]
    found = []
    for begin, end in pairwise([*begins, len(text)]):
        command, _, shown = text[begin + 2 : end].partition("\n")
        found.append((command, shown.strip()))
    return found


def draw(folder: Path, page: Path) -> None:
    """Write the picture of a page."""
    number = page.stem[:2]
    picture = folder / f"{number}.svg"
    if number in PICTURES:
        words = [*INGRESS, "trace", *PICTURES[number], "--svg", str(picture)]
        environ = environment(folder) | (DEADLINE if number == "08" else {})
        subprocess.run(words, cwd=folder, env=environ, check=True, timeout=60)
    elif number == "01":
        picture.write_text(plain_picture(folder / "reviews.py"))
    if picture.exists():
        shutil.copy(picture, LEARN / picture.name)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        tutorial = Tutorial(Path(name))
        for page in PAGES:
            printed = iter(tutorial.follow(page))

            def filled(match: re.Match[str]) -> str:
                lines = []
                for command, shown in commands(match[1]):
                    _, output = next(printed)  # noqa: B023 - called at once
                    lines.append(f"$ {command}")
                    shows = shown if is_shown(output, shown) else output
                    lines += [shows] if shows else []
                return "```console\n" + "\n".join(lines) + "\n```\n"

            text = re.sub(r"^```console\n(.*?)^```\n", filled, page.read_text(), flags=re.M | re.S)
            page.write_text(text)
            draw(Path(name), page)
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
