"""Pages of the site that are files elsewhere in the repository, and the check of the reference.

    README.md          the first page
    app_examples/*     examples/*.md, each with its source
    CHANGELOG.md, CONTRIBUTING.md

Links of all pages are changed to match. A link to any other file of the repository, such as a test,
becomes its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import ingress

ROOT = Path(__file__).parents[1]
PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in this folder."""
    sources = {place: (ROOT / name).read_text() for name, place in PLACES.items()}
    for path in sorted((ROOT / "app_examples").rglob("*")):
        name = path.relative_to(ROOT / "app_examples").as_posix()
        if path.suffix == ".py" and not name.endswith("__init__.py"):
            sources[f"examples/{name}.md"] = f"# {name}\n\n```python\n{path.read_text()}```\n"
        elif path.name == "README.md":
            sources[f"examples/{name}"] = path.read_text()
    for place, text in sources.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Lead links to the place that a file has in the site."""
    here = page.file.src_uri
    inverse = {place: name for name, place in PLACES.items()}
    if here in inverse:
        source = inverse[here]
    elif here.startswith("examples/"):
        source = "app_examples/" + here.removeprefix("examples/")
    else:
        source = f"docs/{here}"

    def moved(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        file = os.path.normpath(os.path.join(os.path.dirname(source), target))
        place = place_of(file)
        if place is None or files.get_file_from_path(place) is None:
            if not (ROOT / file).exists():
                return match[0]  # reported as a broken link
            return text
        return f"{image}[{text}]({os.path.relpath(place, os.path.dirname(here) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def place_of(file: str) -> str | None:
    """Return the place in the site of a file of the repository; `None` if it has none."""
    if file in PLACES:
        return PLACES[file]
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file == "app_examples":
        return "examples/README.md"
    if file.startswith("app_examples/"):
        place = "examples/" + file.removeprefix("app_examples/")
        return f"{place}.md" if file.endswith(".py") else place
    return None


def on_post_build(config: Any) -> None:
    """Fail if a public name has no entry in the reference."""
    text = (Path(config["site_dir"]) / "api.html").read_text()
    missing = [name for name in ingress.__all__ if f'id="ingress.{name}"' not in text]
    if missing:
        raise PluginError(f"docs/api.md: no entry for {', '.join(missing)}")
