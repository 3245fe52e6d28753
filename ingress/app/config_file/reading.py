"""YAML text as a tree of nodes that know their line and column.

    a file of more than `MOST_BYTES`       refused before it is parsed
    nesting deeper than `DEEPEST`          refused at the first value that is too deep
    aliases that expand to more values
    than `MOST_VALUES`                     refused at the alias: each alias counts with its target
    a key that occurs twice                refused at the second one

The tree is built from the parser's events, not by recursion: no text can exhaust the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 1_000_000
DEEPEST = 40
MOST_VALUES = 100_000
_LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER = yaml.resolver.Resolver()
_MERGE = "tag:yaml.org,2002:merge"
_TEXT = "tag:yaml.org,2002:str"
_COLLECTIONS = (None, "!", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

Key = str | int | float | bool | None
Where = tuple[str | int, ...]
"""The keys and indexes on the way from the top of a file to a value."""


class ConfigFileError(ValueError):
    """The mistakes of a file. Each is one line that begins with `file:line:column`."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A line and a column, from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(slots=True)
class Node:
    """One value of a file: a dict or a list of nodes, or a scalar.

    `size` counts the values in it, those behind an alias each time. `keys` has the places of a
    dict's keys.
    """

    place: Place
    value: Any
    keys: dict[Key, Place] = field(default_factory=dict)
    size: int = 1

    def plain(self) -> object:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: each.plain() for key, each in self.value.items()}
        if isinstance(self.value, list):
            return [each.plain() for each in self.value]
        return self.value

    def at(self, where: Iterable[str | int]) -> Place:
        """Return the place of a value; of the nearest one around it that the file has."""
        node = self
        for step in where:
            if not isinstance(node.value, dict | list):
                break
            try:
                node = node.value[step]  # type: ignore[index]
            except (LookupError, TypeError):
                break
        return node.place


def read(path: Path) -> Node:
    """Return the top of a file. Raises `ConfigFileError` if it cannot be read or is no YAML."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigFileError([f"cannot read {str(path)!r}: {error.strerror}"]) from None
    if len(data) > MOST_BYTES:
        raise ConfigFileError(
            [f"{path} has more than {MOST_BYTES:,} bytes, the limit for a configuration"]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Place(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        raise ConfigFileError([f"{path}:{place}: not UTF-8; save the file as UTF-8"]) from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Node:
    """Return the top of a text; `name` is that of its file. Raises `ConfigFileError`."""
    try:
        return _Tree(name).grown(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f":{_place(mark)}"
        problem = error.problem or error.context or "not YAML"
        raise ConfigFileError([f"{name}{place}: {problem}"]) from None
    except yaml.YAMLError as error:  # of the reader: a character that YAML does not allow
        position = getattr(error, "position", 0)
        before = text[: position or 0]
        place = f":{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        problem = " ".join(str(error).split())
        raise ConfigFileError([f"{name}{place}: {problem}"]) from None


@dataclass(slots=True)
class _Open:
    """A mapping or sequence whose end has not come. `key` waits for its value."""

    node: Node
    anchor: str | None
    key: Key = None
    has_key: bool = False
    merged: list[Node] = field(default_factory=list)
    is_merge: bool = False


class _Tree:
    """The tree of one text, while the parser's events come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: list[_Open] = []
        self._anchors: dict[str, Node | None] = {}  # `None` while the anchored value is open
        self._top: Node | None = None
        self._documents = 0

    def grown(self, events: Iterable[yaml.Event]) -> Node:
        for event in events:
            self._take(event)
        if self._top is None or self._top.value is None:
            raise ConfigFileError([f"{self._name}:1:1: the file is empty; it needs `applications`"])
        return self._top

    def _take(self, event: yaml.Event) -> None:
        match event:
            case yaml.ScalarEvent():
                self._take_scalar(event)
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    raise self._wrong(event, "a second document begins here; a file has one")
            case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                if event.tag not in _COLLECTIONS:
                    raise self._wrong(event, f"the tag {event.tag!r} is not allowed here")
                if len(self._open) >= DEEPEST:
                    raise self._wrong(event, f"nested more than {DEEPEST} levels deep")
                value: dict[Key, Node] | list[Node] = (
                    {} if isinstance(event, yaml.MappingStartEvent) else []
                )
                if event.anchor:
                    self._anchors[event.anchor] = None
                self._open.append(_Open(Node(_place(event.start_mark), value), event.anchor))
            case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                ended = self._open.pop()
                _merge(ended)
                if ended.anchor:
                    self._anchors[ended.anchor] = ended.node
                self._put(ended.node, event)
            case yaml.AliasEvent():
                found = self._anchors.get(event.anchor)
                if event.anchor not in self._anchors:
                    raise self._wrong(event, f"there is no anchor &{event.anchor} before this")
                if found is None:
                    raise self._wrong(event, f"*{event.anchor} is inside of its own anchor")
                self._put(found, event)

    def _take_scalar(self, event: yaml.Event) -> None:
        tag = event.tag
        if tag is None or tag == "!":
            tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag == _MERGE and self._is_key():
            self._open[-1].is_merge = self._open[-1].has_key = True
            return
        node = Node(_place(event.start_mark), self._scalar(event, tag))
        if event.anchor:
            self._anchors[event.anchor] = node
        self._put(node, event)

    def _scalar(self, event: yaml.Event, tag: str) -> object:
        if tag == _TEXT:  # as the constructor below does, which takes 10 us
            return event.value
        try:
            node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
            value = yaml.constructor.SafeConstructor().construct_object(node)
        except yaml.constructor.ConstructorError:
            value = {}
        except (ValueError, OverflowError) as error:
            raise self._wrong(event, str(error)) from None
        if isinstance(value, dict | list | set):
            raise self._wrong(event, f"the tag {tag!r} is not allowed here")
        return value

    def _is_key(self) -> bool:
        return (
            bool(self._open)
            and isinstance(self._open[-1].node.value, dict)
            and not self._open[-1].has_key
        )

    def _put(self, node: Node, event: yaml.Event) -> None:
        """Put a complete value into the open mapping or sequence, as a key or a value."""
        if not self._open:
            self._top = node
            return
        top = self._open[-1]
        inside = top.node.value
        if isinstance(inside, list):
            inside.append(node)
        elif not top.has_key:
            self._set_key(top, node, event)
            return
        elif top.is_merge:
            parts = node.value if isinstance(node.value, list) else [node]
            if not all(isinstance(each.value, dict) for each in parts):
                raise self._wrong(event, "<<: needs a mapping, or a list of mappings")
            top.merged.extend(parts)
            top.has_key = top.is_merge = False
        else:
            inside[top.key] = node
            top.has_key = False
        top.node.size += node.size
        if top.node.size > MOST_VALUES:
            raise self._wrong(event, f"more than {MOST_VALUES:,} values, with aliases expanded")

    def _set_key(self, top: _Open, node: Node, event: yaml.Event) -> None:
        if not isinstance(node.value, str | int | float | bool | None):
            raise self._wrong(event, "a key must be a name, not a mapping or a list")
        if node.value in top.node.value:
            first = top.node.keys[node.value]
            raise self._wrong(
                event, f"the key {node.value!r} occurs twice, first at {first}; remove one of them"
            )
        top.key, top.has_key = node.value, True
        top.node.keys[node.value] = _place(event.start_mark)

    def _wrong(self, event: yaml.Event, problem: str) -> ConfigFileError:
        return ConfigFileError([f"{self._name}:{_place(event.start_mark)}: {problem}"])


def _merge(ended: _Open) -> None:
    """Add the keys of `<<:` that the mapping does not have itself; earlier mappings win."""
    node = ended.node
    for each in ended.merged:
        for key, value in each.value.items():
            if key not in node.value:
                node.value[key] = value
                node.keys[key] = each.keys[key]


def _place(mark: yaml.Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)
