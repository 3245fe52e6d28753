"""FastAPI's source distribution of the installed version, with its tests."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".fastapi-suite"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def source() -> Path:
    """Return the folder of the sources. Downloads them unless they are there."""
    name = f"fastapi-{version('fastapi')}"
    folder = FOLDER / name
    if not folder.exists():
        release = name.replace("-", "==")
        options = ["--no-binary", ":all:", "--no-deps", "-d", str(FOLDER), release]
        subprocess.run([*PIP, "download", *options], check=True)
        with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    missing = [each for each in ("tests", "docs_src") if not (folder / each).is_dir()]
    if missing:
        raise SystemExit(f"the source distribution {name} has no {' and no '.join(missing)}")
    return folder


def install() -> None:
    """Install the packages that the tests need: FastAPI's extras, and its group of tests."""
    extras = f"fastapi[all]=={version('fastapi')}"
    subprocess.run([*PIP, "install", extras, "--group", "tests"], check=True, cwd=source())


if __name__ == "__main__":
    install()
