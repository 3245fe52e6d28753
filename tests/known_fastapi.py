"""Makes `ingress/app/asgi/known.json`: the versions that compiled routes were compared with.

    python -m tests.known_fastapi     the installed FastAPI and Starlette are known from now on

They become the versions that newer ones are compared with.
"""

from __future__ import annotations

import json

import fastapi
import starlette

from ingress.app.asgi.compat import FILE, STOOD_IN_FOR, fingerprint


def add(versions: list[str], version: str) -> list[str]:
    return sorted({*versions, version}, key=lambda each: [int(n) for n in each.split(".")])


def main() -> None:
    installed = {"fastapi": fastapi.__version__, "starlette": starlette.__version__}
    known = json.loads(FILE.read_text())["versions"]
    versions = {library: add(known[library], installed[library]) for library in known}
    if any(versions[library][-1] != installed[library] for library in known):
        raise SystemExit(f"{installed} are not the newest: later versions are compared with them")
    functions = {path: fingerprint(path) for path in STOOD_IN_FOR}
    # A line for each function, and one for each library: a change is easy to read.
    lines = [f"    {json.dumps(path)}: {json.dumps(functions[path])}" for path in sorted(functions)]
    listed = [f"    {json.dumps(library)}: {json.dumps(versions[library])}" for library in versions]
    FILE.write_text(
        '{\n  "versions": {\n' + ",\n".join(listed) + '\n  },\n  "functions": {\n'
        + ",\n".join(lines) + "\n  }\n}\n"
    )  # fmt: skip
    print(f"{FILE.name}: {installed}, {len(functions)} functions")


if __name__ == "__main__":
    main()
