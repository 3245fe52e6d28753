"""Readers of the files of `ingress trace`; they fail on everything a viewer would not accept."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.etree import ElementTree

Event = dict[str, Any]
TOLERANCE_US = 1e-6
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Span:
    """A stretch of time on a track, or of a request; in ms."""

    name: str
    track: str
    began: float
    ended: float
    args: dict[str, Any]
    pid: int = 0

    def overlaps(self, other: Span) -> bool:
        return self.began < other.ended and other.began < self.ended


class Trace:
    """A file of Chrome Trace Event JSON, checked against the rules of the format."""

    def __init__(self, text: str) -> None:
        self.events: list[Event] = json.loads(text)["traceEvents"]
        for event in self.events:
            _check(event)
        self.tracks = {
            _track(each): each["args"]["name"]
            for each in self.events
            if (each["ph"], each["name"]) == ("M", "thread_name")
        }
        self.processes = {
            each["pid"]: each["args"]["name"]
            for each in self.events
            if (each["ph"], each["name"]) == ("M", "process_name")
        }
        assert {each["pid"] for each in self.events} == set(self.processes)
        slices = [each for each in self.events if each["ph"] == "X"]
        assert {_track(each) for each in slices} <= set(self.tracks)
        for track in self.tracks:
            _check_nesting([each for each in slices if _track(each) == track])
        self.runs = [self._slice(each) for each in slices if each["cat"] == "run"]
        self.stalls = [self._slice(each) for each in slices if each["cat"] == "stall"]
        spans = self._by_id()
        self.requests = [each for each in spans if "request" in each.args]
        self.waits = [each for each in spans if each.name.startswith("wait: ")]
        assert len(self.requests) + len(self.waits) == len(spans)

    def waits_for(self, what: str) -> list[Span]:
        return [each for each in self.waits if each.name == f"wait: {what}"]

    def runs_of(self, request_id: str) -> list[Span]:
        return [each for each in self.runs if each.args["request_id"] == request_id]

    def _slice(self, each: Event) -> Span:
        ended = each["ts"] + each["dur"]
        times = each["ts"] / 1e3, ended / 1e3
        return Span(each["name"], self.tracks[_track(each)], *times, each["args"], each["pid"])

    def _by_id(self) -> list[Span]:
        """Pair begin and end events; events with the same id nest."""
        by_id: dict[tuple[int, str, str], list[Event]] = defaultdict(list)
        for each in self.events:
            if each["ph"] in "be":
                by_id[each["pid"], each["cat"], each["id2"]["local"]].append(each)
        found = []
        for several in by_id.values():
            opened: list[Event] = []
            # A viewer sorts by time; the sort is stable.
            for each in sorted(several, key=lambda each: each["ts"]):
                if each["ph"] == "b":
                    opened.append(each)
                    continue
                begin = opened.pop()
                assert begin["name"] == each["name"]
                track = self.tracks.get(_track(begin), "")
                times = begin["ts"] / 1e3, each["ts"] / 1e3
                args = begin.get("args", {})
                found.append(Span(each["name"], track, *times, args, begin["pid"]))
            assert not opened
        return sorted(found, key=lambda each: each.began)


def _track(event: Event) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _check(event: Event) -> None:
    required: dict[str, set[str]] = {
        "M": {"args"},
        "X": {"ts", "dur", "cat", "args"},
        "b": {"ts", "cat", "id2"},
        "e": {"ts", "cat", "id2"},
    }
    assert set(event) >= {"ph", "name", "pid", "tid"} | required[event["ph"]], event
    for name in ("pid", "tid"):
        assert isinstance(event[name], int), event
    for name in ("ts", "dur"):
        assert event.get(name, 0) >= 0, event
    if event["ph"] == "M":
        kinds = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
        assert set(event["args"]) == {kinds[event["name"]]}


def _check_nesting(slices: list[Event]) -> None:
    """Fail if two slices of a track overlap without one being inside the other."""
    ends: list[float] = []
    for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        while ends and ends[-1] <= each["ts"] + TOLERANCE_US:
            ends.pop()
        end = each["ts"] + each["dur"]
        assert not ends or end <= ends[-1] + TOLERANCE_US, each
        ends.append(end)


class Part(NamedTuple):
    kind: str
    x: float
    width: float


@dataclass(frozen=True)
class Bar:
    """One bar of a picture: its request, and its times in ms."""

    kind: str
    request: int
    began: float
    ended: float
    parts: tuple[Part, ...]
    label: str

    @property
    def work(self) -> Part:
        """The widest part that is not a wait."""
        kinds = ("run", "work", "await")
        return max((each for each in self.parts if each.kind in kinds), key=lambda each: each.width)


class Picture:
    """An SVG file; no text may be cut off or overlap another."""

    def __init__(self, text: str) -> None:
        self.text = text
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img"
        self.title = root.findtext(f"{SVG}title") or ""
        self.about = root.findtext(f"{SVG}desc") or ""
        names = {each.get("id") for each in root if each.tag in (f"{SVG}title", f"{SVG}desc")}
        assert set((root.get("aria-labelledby") or "").split()) == names
        assert "@media (prefers-color-scheme: dark)" in text
        _, _, self.width, self.height = (float(n) for n in (root.get("viewBox") or "").split())
        (body,) = [each for each in root if each.get("transform")]
        shift = float(re.findall(r"[\d.]+", body.get("transform") or "")[1])
        self.legend = [
            each.text or ""
            for each in root.findall(f"{SVG}text")
            if each.get("class") == "muted" and 42 < float(each.get("y") or 0) < shift
        ]
        self.axis = [
            each.text or ""
            for each in root.findall(f"{SVG}text")
            if float(each.get("y") or 0) > shift
        ]
        self.tracks = [each.text or "" for each in body if each.get("class") == "track"]
        self.places = [each.text or "" for each in body.findall(f"{SVG}text[@class='muted']")]
        self.bars = [_bar(each) for each in body.findall(f"{SVG}g")]
        boxes = [_box(each, 0.0) for each in root.findall(f"{SVG}text")]
        boxes += [_box(each, shift) for each in body.iter(f"{SVG}text")]
        for number, (left, top, right, bottom) in enumerate(boxes):
            assert 0 <= left <= right <= self.width
            assert 0 <= top <= bottom <= self.height
            for x, y, end, ground in boxes[:number]:
                assert end <= left or right <= x or ground <= top or bottom <= y
        for each in body.iter(f"{SVG}rect"):
            end = float(each.get("x") or 0) + float(each.get("width") or 0)
            assert 0 <= float(each.get("x") or -1) <= end <= self.width

    @property
    def is_stairs(self) -> bool:
        """True if the work of each request follows that of the request before."""
        work = [each.work for each in self.bars_of("request")]
        return all(b.x >= a.x + a.width - 1 for a, b in itertools.pairwise(work))

    def bars_of(self, kind: str) -> list[Bar]:
        return [each for each in self.bars if each.kind == kind]


def _bar(group: ElementTree.Element) -> Bar:
    parts = []
    for rect in group.findall(f"{SVG}rect"):
        found = re.fullmatch(r"url\(#(\w+)\)", rect.get("fill") or "")
        kind = found[1] if found else rect.get("class") or ""
        parts.append(Part(kind, float(rect.get("x") or 0), float(rect.get("width") or 0)))
    return Bar(
        group.get("class") or "",
        int(group.get("data-request") or 0),
        float(group.get("data-began-ms") or 0),
        float(group.get("data-ended-ms") or 0),
        tuple(parts),
        group.findtext(f"{SVG}text") or "",
    )


def _box(each: ElementTree.Element, shift: float) -> tuple[float, float, float, float]:
    """Return the box of a text; a letter of these fonts is 0.52 of its size wide."""
    size = 14 if each.get("class") == "title" else 12
    width = len(each.text or "") * size * 0.52
    x, y = float(each.get("x") or 0), float(each.get("y") or 0) + shift
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[each.get("text-anchor") or ""]
    return left, y - 0.8 * size, left + width, y + 0.2 * size
