"""YAML text as a tree of nodes that know their line and column.

    a file of more than `MOST_BYTES`       refused before it is parsed
    nesting deeper than `DEEPEST`          refused at the first value, or alias, that is too deep
    aliases that expand to more values
    than `MOST_VALUES`                     refused where they are: an alias counts with its target
    a key that occurs twice                refused at the second one
    a second document                      refused, unless one of them is a RayService, and the
                                           others are further objects of Kubernetes

Of a RayService, KubeRay's manifest, `serveConfigV2` is the file: a YAML text in a YAML value. The
tree is built from the parser's events. PyYAML's own `compose` loses the places of aliases, and
recurses as deep as a text is nested.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
_TOO_DEEP = f"nested more than {DEEPEST} levels deep"
_SERVICE = "RayService"
_CONFIG = "serveConfigV2"
_INSTEAD = {
    "Kustomization": "give its output: kubectl kustomize FOLDER > FILE",
    "List": f"put the {_SERVICE} among its items into a file of its own",
}
_TEMPLATE = re.compile(r"\{\{.{1,40}?\}\}")  # bounded: a file may have a million braces
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
class Position:
    """A line and a column, from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


def _place(mark: yaml.Mark) -> Position:
    return Position(mark.line + 1, mark.column + 1)


@dataclass(slots=True)
class FileValue:
    """One value of a file: a dict or a list of nodes, or a scalar.

    `size` counts the values in it, those behind an alias each time, `height` the levels of dicts
    and lists. `keys` has the places of a dict's keys. `is_inside` is set at the top of a text that
    is in a RayService.
    """

    place: Position
    value: Any
    keys: dict[Key, Position] = field(default_factory=dict)
    size: int = 1
    height: int = 0
    is_inside: bool = False

    def plain(self) -> object:
        """Return the value without places."""
        match self.value:
            case dict():
                return {key: each.plain() for key, each in self.value.items()}
            case list():
                return [each.plain() for each in self.value]
        return self.value

    def at(self, where: Iterable[str | int]) -> Position:
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


def read(path: Path) -> FileValue:
    """Return the top of a file. Raises `ConfigFileError` if it cannot be read or is no YAML."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise _mistake(f"cannot read {str(path)!r}: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise ConfigFileError(
            [f"{path} has more than {MOST_BYTES:,} bytes, the limit for a configuration"]
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = _end_of(data[: error.start].decode("utf-8-sig"))
        raise _mistake(f"{path}:{place}: not UTF-8; save the file as UTF-8") from None
    try:
        top = parse(text, str(path))
        if "kind" not in top.keys:
            return top
        return replace(_config_of(top, text, str(path)), is_inside=True)
    except ConfigFileError as error:
        raise _as_template(error, text, path) from None


def parse(text: str, name: str, place: Callable[[yaml.Mark], Position] = _place) -> FileValue:
    """Return the top of a text; `name` is that of its file. Raises `ConfigFileError`.

    `place` says where in the file a mark of the text is.
    """
    try:
        return _Tree(name, yaml.parse(text, Loader=_LOADER), place).top()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f":{place(mark)}"
        problem = error.problem or error.context or "not YAML"
        raise _mistake(f"{name}{where}: {problem}") from None
    except yaml.YAMLError as error:  # of the reader: a character that YAML does not allow
        end = _end_of(text[: getattr(error, "position", None) or 0])
        problem = " ".join(str(error).split())
        raise _mistake(f"{name}:{end}: {problem}") from None


def _config_of(top: FileValue, text: str, name: str) -> FileValue:
    """Return the top of the YAML text in a RayService, with its places in the whole file."""
    kind = top.value["kind"]
    if kind.value != _SERVICE:
        known = str(kind.plain())[:40]
        fix = _INSTEAD.get(known, f"give a {_SERVICE}, or the file of Ray's `serve deploy`")
        raise _mistake(f"{name}:{kind.place}: kind: {known!r} has no applications; {fix}")
    spec = top.value.get("spec", top)
    found = spec.value.get(_CONFIG) if isinstance(spec.value, dict) else None
    if found is None or not isinstance(found.value, str) or not found.value.strip():
        raise _mistake(
            f"{name}:{(found or spec).place}: a {_SERVICE} needs spec.{_CONFIG}, a text; write "
            f"`{_CONFIG}: |`, and below it, indented, the file of Ray's `serve deploy`"
        )
    begin = found.place
    lines = text.split("\n")[begin.line - 1 :]
    if not lines or lines[0][begin.column - 1 :][:1] != "|":  # in quotes it has lines of its own
        return parse(found.value, name, lambda mark: begin)
    inside = next((each for each in found.value.split("\n") if each.strip()), "")
    outside = next((each for each in lines[1:] if each.strip()), "")
    indent = (len(outside) - len(outside.lstrip(" "))) - (len(inside) - len(inside.lstrip(" ")))
    return parse(
        found.value,
        name,
        lambda mark: Position(begin.line + mark.line + 1, indent + mark.column + 1),
    )


def _as_template(error: ConfigFileError, text: str, path: Path) -> ConfigFileError:
    """Return an error that also names the template in a text, if there is one.

    A prompt of a model may have braces too, so that they alone are no mistake.
    """
    if (braces := _TEMPLATE.search(text)) is None:
        return error
    line = text.count("\n", 0, braces.start()) + 1
    return _mistake(
        f"{error}; line {line} has {braces.group()}: if this is a template of Helm, give its "
        f"output: helm template CHART --show-only templates/{path.name} > FILE"
    )


def _mistake(line: str) -> ConfigFileError:
    return ConfigFileError([line])


class _Tree:
    """The tree of one text, grown by recursion from the parser's events."""

    def __init__(
        self, name: str, events: Iterator[yaml.Event], place: Callable[[yaml.Mark], Position]
    ) -> None:
        self._name, self._events, self._place = name, events, place
        self._anchors: dict[str, FileValue | None] = {}  # `None` while the anchored value is open
        self._depth = 0

    def top(self) -> FileValue:
        """Return the one document, or the RayService among objects of Kubernetes."""
        found: list[FileValue] = []
        begins: list[Position] = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                begin = self._place(event.start_mark)
                self._anchors.clear()
            elif (
                isinstance(event, yaml.NodeEvent) and (node := self._node(event)).value is not None
            ):
                found.append(node)
                begins.append(begin)
        if not found:
            raise _mistake(f"{self._name}:1:1: the file is empty; it needs `applications`")
        if len(found) == 1:
            return found[0]
        kinds = [each.value["kind"].value if "kind" in each.keys else None for each in found]
        if kinds.count(_SERVICE) == 1 and None not in kinds:
            return found[kinds.index(_SERVICE)]
        services = [place for place, kind in zip(begins, kinds, strict=True) if kind == _SERVICE]
        raise _mistake(
            f"{self._name}:{(services[1:] or begins[1:])[0]}: a second document begins here; put "
            "it into a file of its own, or its applications into the first one"
        )

    def _node(self, event: yaml.Event) -> FileValue:
        if isinstance(event, yaml.AliasEvent):
            return self._known(event)
        node = FileValue(self._place(event.start_mark), None)
        if event.anchor:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node.value = self._scalar(event)
        else:
            self._fill(node, event)
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _known(self, event: yaml.Event) -> FileValue:
        if event.anchor not in self._anchors:
            raise self._wrong(event, f"there is no anchor &{event.anchor} before this")
        if (node := self._anchors[event.anchor]) is None:
            raise self._wrong(event, f"*{event.anchor} is inside of its own anchor")
        if self._depth + node.height > DEEPEST:
            raise self._wrong(event, _TOO_DEEP)
        return node

    def _scalar(self, event: yaml.Event) -> object:
        tag = _tag_of(event)
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

    def _fill(self, node: FileValue, event: yaml.Event) -> None:
        """Take the values of a mapping or a sequence, up to its end."""
        if event.tag not in _COLLECTIONS:
            raise self._wrong(event, f"the tag {event.tag!r} is not allowed here")
        if self._depth >= DEEPEST:
            raise self._wrong(event, _TOO_DEEP)
        self._depth += 1
        if isinstance(event, yaml.MappingStartEvent):
            self._fill_mapping(node, event)
        else:
            node.value = [self._part(node, event, self._node(each)) for each in self._up_to_end()]
        self._depth -= 1

    def _part(self, node: FileValue, start: yaml.Event, part: FileValue) -> FileValue:
        """Return a part of a collection, whose size and height it counts at once.

        A mapping may merge the same large one again and again: one that is counted at its end takes
        minutes to get there.
        """
        node.size += part.size
        node.height = max(node.height, 1 + part.height)
        if node.size > MOST_VALUES:
            raise self._wrong(start, f"more than {MOST_VALUES:,} values, with aliases expanded")
        return part

    def _up_to_end(self) -> Iterator[yaml.Event]:
        return itertools.takewhile(
            lambda e: not isinstance(e, yaml.CollectionEndEvent), self._events
        )

    def _fill_mapping(self, node: FileValue, start: yaml.Event) -> None:
        """Take keys and values, and those of `<<:` that it does not have itself."""
        node.value, merged = {}, []
        for event in self._up_to_end():
            if isinstance(event, yaml.ScalarEvent) and _tag_of(event) == _MERGE:
                mappings = self._mappings(next(self._events))
                merged += [self._part(node, start, each) for each in mappings]
            else:
                key = self._key(node, event)
                node.value[key] = self._part(node, start, self._node(next(self._events)))
        for each in merged:  # of two that have a key, the first wins
            for key, value in each.value.items():
                node.value.setdefault(key, value)
                node.keys.setdefault(key, each.keys[key])

    def _mappings(self, event: yaml.Event) -> list[FileValue]:
        node = self._node(event)
        parts = node.value if isinstance(node.value, list) else [node]
        if not all(isinstance(each.value, dict) for each in parts):
            raise self._wrong(event, "<<: needs a mapping, or a list of mappings")
        return parts

    def _key(self, node: FileValue, event: yaml.Event) -> Key:
        key: Key = self._node(event).value
        if not isinstance(key, str | int | float | bool | None):
            raise self._wrong(event, "a key must be a name, not a mapping or a list")
        if key in node.keys:
            first = node.keys[key]
            raise self._wrong(
                event, f"the key {key!r} occurs twice, first at {first}; remove one of them"
            )
        node.keys[key] = self._place(event.start_mark)
        return key

    def _wrong(self, event: yaml.Event, problem: str) -> ConfigFileError:
        return _mistake(f"{self._name}:{self._place(event.start_mark)}: {problem}")


def _tag_of(event: yaml.Event) -> str:
    if event.tag not in (None, "!"):
        return str(event.tag)
    return str(_RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit))


def _end_of(text: str) -> Position:
    return Position(text.count("\n") + 1, len(text) - text.rfind("\n"))
