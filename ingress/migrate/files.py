"""The files of `ingress migrate`: which they are, how they are read and written."""

from __future__ import annotations

import io
import os
import re
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}

# In each file, also one that cannot be parsed: names are ASCII here.
_IMPORTED = re.compile(
    r"^[ \t]*from[ \t]+(?!ray\b)[\w.]+[ \t]+import[ \t]*(\([^)]*\)|[^#\r\n;]*)", re.MULTILINE
)
_NAME = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file, with its own line ends, and the encoding that it had."""

    path: Path
    text: str
    encoding: str

    def write(self, text: str) -> None:
        """Write the file in place: owner, mode and hard links stay. Raises `OSError`.

        A copy beside it has the old text meanwhile. It stays if that cannot be written back.
        """
        old, new = self.text.encode(self.encoding), text.encode(self.encoding)
        if _decoded(new) != (text, self.encoding):
            raise OSError(None, "a comment would become its encoding; move that comment")
        path = self.path.resolve()
        with path.open("r+b", buffering=0) as file:
            if file.read() != old:
                raise OSError(None, "it has changed meanwhile; run this command again")
            copy = _copied(path, old)
            try:
                _overwrite(file, new)
            except BaseException as error:
                try:
                    _overwrite(file, old)
                except OSError:
                    raise OSError(None, f"{error}; its old text is in {copy}") from error
                os.unlink(copy)
                raise
            os.unlink(copy)


def _copied(path: Path, data: bytes) -> str:
    """Write a file beside another one, and return its path."""
    number, name = tempfile.mkstemp(f"-{path.name}", ".ingress-", path.parent)
    try:
        with open(number, "wb", buffering=0) as file:
            _overwrite(file, data)
    except BaseException:
        os.unlink(name)
        raise
    return name


def _overwrite(file: io.FileIO, data: bytes) -> None:
    file.seek(0)
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    file.truncate()
    os.fsync(file.fileno())


def _decoded(data: bytes) -> tuple[str, str]:
    """Return the text of a file, and its encoding. Raises `SyntaxError` or `ValueError`."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def read(path: Path) -> FileText:
    """Read a file in its encoding. Raises `OSError`, and `SyntaxError` or `ValueError`."""
    data = path.read_bytes()
    text, encoding = _decoded(data)
    if text.encode(encoding) != data:
        raise ValueError(f"its bytes are not those that {encoding} gives; leave it to an editor")
    return FileText(path, text, encoding)


def shared_names(paths: Iterable[Path]) -> set[str]:
    """Return the names that these files import from modules other than Ray's."""
    found: set[str] = set()
    for path in paths:
        with suppress(OSError):
            for names in _IMPORTED.findall(path.read_text("latin-1")):
                found.update(_NAME.findall(names))
    return found


def found(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield each file once: those named, and the Python files of folders, without links."""
    seen: set[Path] = set()
    for path in paths:
        for each in _in_folder(path) if path.is_dir() else [path]:
            if (real := each.resolve()) not in seen:
                seen.add(real)
                yield each


def _in_folder(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(name for name in folders if not _is_skipped(here / name))
        for name in sorted(names):
            path = here / name
            if name.endswith(".py") and path.is_file() and not path.is_symlink():
                yield path


def _is_skipped(folder: Path) -> bool:
    """Return whether a folder is hidden, holds installed packages, or is a link."""
    name = folder.name
    is_environment = (folder / "pyvenv.cfg").exists()
    return name.startswith(".") or name in _SKIPPED or is_environment or folder.is_symlink()
