"""The statements in the place of one `from ... import`, with its comments."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 88
SERVE = "ray.serve -> ingress"
"""The group of `from ray import serve`, which becomes `import ingress as serve`."""


@dataclass(slots=True)
class ImportedName:
    """One name of the statement: the module to import it from, and the comments at it."""

    text: str
    name: str
    module: str
    before: list[str] = field(default_factory=list)
    after: str = ""

    @property
    def has_comments(self) -> bool:
        return bool(self.before or self.after)


def items_of(node: ast.ImportFrom, segment: str, modules: Sequence[str]) -> list[ImportedName]:
    """Return the names of a statement, each with its module from `modules`."""
    items = []
    for alias, module in zip(node.names, modules, strict=True):
        text = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
        items.append(ImportedName(text, alias.asname or alias.name, module))
    lines = [alias.lineno - node.lineno + 1 for alias in node.names]
    for token in tokenize.generate_tokens(io.StringIO(segment).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            here = [item for item, at in zip(items, lines, strict=True) if at == line]
            later = [item for item, at in zip(items, lines, strict=True) if at > line]
            if here or not later:
                last = (here or items)[-1]
                last.after = "  ".join(filter(None, (last.after, token.string)))
            else:
                later[0].before.append(token.string)
    return items


def written(items: list[ImportedName], indent: str, newline: str) -> str:
    """Return a statement for each module, in the order of their first names."""
    groups: dict[str, list[ImportedName]] = {}
    for item in items:
        groups.setdefault(item.module, []).append(item)
    lines: list[str] = []
    for module, members in groups.items():
        lines += _serve(members) if module == SERVE else _from(module, members, indent)
    return f"{newline}{indent}".join(lines)


def _serve(members: list[ImportedName]) -> list[str]:
    lines = []
    for each in members:
        after = f"  {each.after}" if each.after else ""
        lines += [*each.before, f"import ingress as {each.name}{after}"]
    return lines


def _from(module: str, members: list[ImportedName], indent: str) -> list[str]:
    short = f"from {module} import {', '.join(each.text for each in members)}"
    if not any(each.has_comments for each in members) and len(indent + short) <= WIDTH:
        return [short]
    lines = [f"from {module} import ("]
    for each in members:
        after = f"  {each.after}" if each.after else ""
        lines += [*(f"    {line}" for line in each.before), f"    {each.text},{after}"]
    return [*lines, ")"]
