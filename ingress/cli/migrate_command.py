"""`ingress migrate`: code for Ray Serve, rewritten for ingress."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ingress.app.declaration.names import shown
from ingress.cli.target import NOTEBOOK, AsJSON, refusal
from ingress.migrate import files
from ingress.migrate.rewriting import ManualFix, rewritten


@dataclass(slots=True)
class _Result:
    """The result of one file. `failure` says why it was left alone."""

    path: str
    findings: list[ManualFix] = field(default_factory=list)
    diff: str = ""
    line: int = 1
    failure: str = ""


def migrate(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILE|DIR...", help="Python files, and folders that have some."),
    ],
    write: Annotated[
        bool, typer.Option("--write", help="Write the files; otherwise nothing is changed.")
    ] = False,
    as_json: AsJSON = False,
) -> None:
    """Rewrite the imports of code for Ray Serve, and list what is left to do by hand.

    [dim]ingress migrate main.py[/dim]
    [dim]ingress migrate src tests --write[/dim]

    `from ray import serve` becomes `import ingress as serve`, and so do all
    other imports and uses of names that ingress has. Without --write it prints
    the difference. Each name without a counterpart, such as ray.get, is listed
    with its line and with what to write instead.

    Exit code 0: nothing is left to do by hand; 1: something is; 2: an argument
    is wrong. Hidden folders, environments and links are skipped. The files are
    never imported.
    """
    for each in paths:
        if not each:  # a variable of a shell that is not set
            raise refusal("'' is no file or folder; name one, such as `.` for this folder", 2)
        if not Path(each).exists():
            raise refusal(f"there is no file or folder {each!r}; check the spelling", code=2)
        if not (Path(each).is_file() or Path(each).is_dir()):
            raise refusal(f"{each!r} is no regular file; name a file or a folder", code=2)
    found = list(files.found(map(Path, paths)))
    shared = files.shared_names(found)
    results = [_migrated(path, shared, write=write) for path in found]
    if not results:
        raise refusal(f"no Python file in {', '.join(paths)}; name a file or another folder", 2)
    typer.echo(_as_json(results, write) if as_json else _as_text(results, write), nl=as_json)
    raise typer.Exit(1 if any(each.findings or each.failure for each in results) else 0)


def _migrated(path: Path, shared: Collection[str], *, write: bool) -> _Result:
    name = shown(path)
    if path.suffix.lower() == ".ipynb":
        return _Result(name, failure=f"it is {NOTEBOOK}, and copy its changes")
    try:
        source = files.read(path)
        new = rewritten(source.text, shared)
        if write and new.text != source.text:
            source.write(new.text)
    except SyntaxError as error:
        return _Result(name, line=error.lineno or 1, failure=f"cannot be parsed: {error.msg}")
    except OSError as error:
        return _Result(name, failure=f"cannot be read or written: {error.strerror}")
    except (ValueError, RecursionError, MemoryError) as error:
        return _Result(name, failure=f"cannot be parsed: {error}")
    diff = _diff(name, source.text, new.text)
    if write:  # the lines are those of the file as it is now
        new = rewritten(new.text, shared)
    return _Result(name, new.findings, diff)


def _diff(name: str, old: str, new: str) -> str:
    lines = difflib.unified_diff(_lines(old), _lines(new), name, name)
    end = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + end for line in lines)


def _lines(text: str) -> list[str]:
    return [f"{line}\n" for line in text.split("\n")[:-1]] + [*filter(None, text.split("\n")[-1:])]


def _as_text(results: list[_Result], write: bool) -> str:
    parts = ["" if write else each.diff for each in results]
    changed = 0
    count = 0
    for each in results:
        changed += bool(each.diff)
        count += len(each.findings) + bool(each.failure)
        if each.failure:
            parts.append(f"{each.path}:{each.line}: {each.failure}; it is left as it is\n")
        if write and each.diff:
            parts.append(f"{each.path}: written\n")
        parts += [
            f"{each.path}:{one.line}:{one.column}: `{one.name}`: {one.fix}\n"
            for one in each.findings
        ]
    verb = "changed" if write else "to change"
    parts.append(f"{_count(changed, 'file')} {verb}, {_count(count, 'finding')} for your hand.\n")
    return "".join(parts)


def _as_json(results: list[_Result], write: bool) -> str:
    told: dict[str, Any] = {
        "written": write,
        "files": len(results),
        "changed": [{"path": each.path, "diff": each.diff} for each in results if each.diff],
        "findings": [
            {
                "path": each.path,
                "line": one.line,
                "column": one.column,
                "name": one.name,
                "fix": one.fix,
            }
            for each in results
            for one in each.findings
        ],
        "left": [
            {"path": each.path, "line": each.line, "reason": each.failure}
            for each in results
            if each.failure
        ],
    }
    return json.dumps(told, indent=2)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
