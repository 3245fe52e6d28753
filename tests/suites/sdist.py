"""The projects whose own tests run here, and their source distributions of the installed versions.

python -m tests.suites.sdist starlette    installs the packages that Starlette's tests need
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@dataclass(frozen=True, slots=True)
class Project:
    """A project on PyPI whose source distribution has its tests.

    They need the project's extra and dependency group of these names, and `folders`.
    """

    name: str
    extra: str
    group: str
    folders: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    def source(self) -> Path:
        """Return the folder of the sources. Downloads them unless they are there."""
        release = f"{self.name}-{version(self.name)}"
        parent = Path(__file__).parents[2] / f".{self.name}-suite"
        folder = parent / release
        if not folder.exists():
            options = ["--no-binary", ":all:", "--no-deps", "-d", str(parent)]
            subprocess.run([*PIP, "download", *options, release.replace("-", "==")], check=True)
            with tarfile.open(parent / f"{release}.tar.gz") as archive:
                archive.extractall(parent, filter="data")
        missing = [each for each in self.folders if not (folder / each).is_dir()]
        if missing:
            raise SystemExit(f"the source distribution {release} has no {' and no '.join(missing)}")
        return folder

    def install(self) -> None:
        """Install the packages that the tests need, and those that run them."""
        release = f"{self.name}[{self.extra}]=={version(self.name)}"
        packages = [release, "pytest-xdist", "pytest-timeout"]
        command = [*PIP, "install", *packages, "--group", self.group]
        subprocess.run(command, check=True, cwd=self.source())


PROJECTS = {
    each.name: each
    for each in (
        Project(
            "fastapi",
            extra="all",
            group="tests",
            folders=("tests", "docs_src"),
            ignored=("tests/benchmarks", "tests/memory_benchmarks"),
        ),
        Project("starlette", extra="full", group="dev", folders=("tests",)),
    )
}

if __name__ == "__main__":
    PROJECTS[sys.argv[1]].install()
