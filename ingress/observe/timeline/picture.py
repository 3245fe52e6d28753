"""A timeline as a picture: SVG, for light and dark pages.

title, summary, legend
Echo#0, event loop
  one bar per request, in several rows if they overlap: waits, awaits, runs
  below them, the stalls of the loop
Echo#0-worker-0
  one bar each time it ran for a request
the time, in ms, since the first request arrived

No library draws it as well: matplotlib's has one colour scheme, no tooltips and no data for
programs, and would add 140 MB to each server that `ingress` is installed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import count
from pathlib import PurePath

from ingress.observe.timeline.recorder import (
    Journey,
    Run,
    Span,
    Standstill,
    Timeline,
    Track,
    WaitKind,
    rows,
    waits_of,
)
from ingress.telemetry.watchdog import StallReason

SHOWN = 50
"""Number of requests that fit; of more requests, the last are shown."""

_TICKS = 5  # of the axis, at most
_PLACES = 3  # of stalls, named below a loop
_FILLED = ("run", "work")  # dark segments, which need light text

LEGEND = {
    "run": "runs on the event loop",
    "work": "runs in a worker thread",
    "await": "awaits",
    WaitKind.QUEUE: "waits for a slot",
    WaitKind.LOOP: "waits for the event loop",
    WaitKind.THREAD: "waits for a thread",
    "stall": "the event loop is stalled",
}
"""The activities of a request, by the kinds of its bar's segments."""


_KINDS = ("request", "call", "batch")

WIDTH, MARGIN = 440, 14  # two fit side by side on a page
BAR, GAP, STALL = 18, 4, 5

_CHARACTER = 0.56  # average width of a character by the font's size, rather too large

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
text { fill: #1f2328; } .title { font-size: 14px; font-weight: 600; }
.track { font-weight: 600; } .track, .muted { paint-order: stroke; stroke-width: 3px; }
.track, .muted { stroke: #ffffff; stroke-linejoin: round; } .muted { fill: #59636e; }
.ground { fill: #ffffff; } .grid { stroke: #d1d9e0; }
.run { fill: #0969da; } .work { fill: #1a7f37; }
.await { fill: #c2e0ff; } .stall { fill: #cf222e; } .inside { fill: #ffffff; }
.queue .back { fill: #fff1c2; } .queue path { stroke: #9a6700; }
.loop .back { fill: #e6eaef; } .loop path { stroke: #6e7781; }
.thread .back { fill: #f1e5ff; } .thread path { stroke: #8250df; }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; } .track, .muted { stroke: #0d1117; } .muted { fill: #9198a1; }
.ground { fill: #0d1117; } .grid { stroke: #3d444d; }
.run { fill: #1f6feb; } .work { fill: #238636; }
.await { fill: #1b3a63; } .stall { fill: #f85149; }
.queue .back { fill: #3b2f0b; } .queue path { stroke: #d29922; }
.loop .back { fill: #262c36; } .loop path { stroke: #8b949e; }
.thread .back { fill: #33244f; } .thread path { stroke: #a371f7; }
}
"""

# The direction of the lines distinguishes them without colours, too.
PATTERNS = "".join(
    f'<pattern id="{kind}" class="{kind}" width="6" height="6" patternUnits="userSpaceOnUse">'
    f'<rect class="back" width="6" height="6"/><path d="{lines}" stroke-width="1.2"/></pattern>\n'
    for kind, lines in {
        WaitKind.QUEUE: "M-1 5 l2 2 M0 0 l6 6 M5 -1 l2 2",
        WaitKind.LOOP: "M-1 1 l2 -2 M0 6 l6 -6 M5 7 l2 -2",
        WaitKind.THREAD: "M3 0 v6",
    }.items()
)


def as_svg(timeline: Timeline, title: str) -> str:
    """Return the text of an SVG file."""
    seen = summary(timeline)
    if len(timeline.journeys) > SHOWN:
        seen += f"; the last {SHOWN}"
    return _Picture(_last(timeline), title, seen).text()


def _last(timeline: Timeline) -> Timeline:
    """Return the end of a timeline, as far as it can be shown."""
    journeys = timeline.journeys[-SHOWN:]
    runs = [run for run in timeline.runs if run.journey in journeys]
    ended = replace(timeline, journeys=journeys, runs=runs)
    stalls = [each for each in timeline.standstills if each.ended_at > ended.began_at]
    return replace(ended, standstills=stalls)


class _Picture:
    def __init__(self, timeline: Timeline, title: str, seen: str) -> None:
        self._timeline = timeline
        self._title = title
        self._seen = seen
        self._began_at = timeline.began_at
        self._span_s = max(timeline.ended_at - timeline.began_at, 1e-6)
        self._waits = waits_of(timeline)
        self._kinds: set[str] = set()  # the kinds in the picture, for the legend
        self._body: list[str] = []
        self._y = 0.0
        self._free_x: float = MARGIN  # end of the row's last bar, or of its label

    def text(self) -> str:
        for track in self._timeline.tracks:
            self._add_track(track)
        if on_none := [each for each in self._timeline.journeys if each.loop is None]:
            self._add_label("on no replica")
            self._add_requests(on_none)
        head, top = self._head()
        axis = self._axis(top, top + self._y)
        body = [f'<g transform="translate(0 {top:.0f})">', *self._body, "</g>"]
        about = description(self._timeline)
        return document(self._title, about, top + self._y + 28, [*head, *axis, *body])

    # The head and the axis.

    def _head(self) -> tuple[list[str], float]:
        """Return the title and the legend, and the y at which the tracks begin."""
        lines = [
            text(MARGIN, 24, cut(self._title, 14), "title"),
            text(MARGIN, 42, self._seen, "muted"),
        ]
        x, y = float(MARGIN), 62.0
        for kind, means in LEGEND.items():
            if kind not in self._kinds:
                continue
            end = x + 20 + width_of(means)
            if end > WIDTH - MARGIN:
                x, end, y = float(MARGIN), MARGIN + 20 + width_of(means), y + 18
            height = STALL if kind == "stall" else 10
            lines.append(bar(kind, x, y - 4 - height / 2, 14, height))
            lines.append(text(x + 20, y, means, "muted"))
            x = end + 12
        return lines, y + 8

    def _axis(self, top: float, ground: float) -> list[str]:
        span_ms = self._span_s * 1e3
        step_ms = _step(span_ms)
        last = int(span_ms / step_ms + 1e-9)
        lines = []
        for number in range(last + 1):
            x = self._x(self._began_at + number * step_ms / 1e3)
            label = f"{number * step_ms:,.10g}" + (" ms" if number == last else "")
            inside = min(max(x, MARGIN + width_of(label) / 2), WIDTH - 4 - width_of(label) / 2)
            lines.append(grid(x, top, ground))
            lines.append(text(inside, ground + 16, label, "muted", anchor="middle"))
        return lines

    # The tracks.

    def _add_track(self, track: Track) -> None:
        if track.is_loop:
            requests = [each for each in self._timeline.journeys if each.loop == track]
            stalls = [each for each in self._timeline.standstills if each.track == track]
            if requests or stalls:
                self._add_label(f"{track.name}, event loop")
                self._add_requests(requests)
                self._add_stalls(stalls)
        elif runs := [run for run in self._timeline.runs if run.track == track]:
            self._add_label(track.name)
            self._add_row(
                "work",
                [
                    (run.journey, [Span("work", run.began_at, run.ended_at)], about_run(run))
                    for run in runs
                ],
            )

    def _add_label(self, label: str) -> None:
        self._y += 20
        self._body.append(text(MARGIN, self._y - 5, cut(label), "track"))

    def _add_requests(self, requests: list[Journey]) -> None:
        for row in rows(requests, lambda each: (each.arrived_at, each.ended_at)):
            self._add_row(
                "request",
                [
                    (
                        each,
                        self._segments(each),
                        about_request(each, self._timeline, self._waits.get(each, [])),
                    )
                    for each in row
                ],
            )

    def _add_row(self, what: str, row: list[tuple[Journey, list[Span], str]]) -> None:
        """Draw the bars of a row, each with its tooltip."""
        self._free_x = MARGIN
        begins = [self._x(_extent(segments)[0]) for _, segments, _ in row]
        for each, until in zip(row, [*begins[1:], WIDTH - MARGIN], strict=True):
            self._add_bar(what, *each, until)
        self._y += BAR + GAP

    def _segments(self, journey: Journey) -> list[Span]:
        """Return the segments of a request. When it neither waits nor runs, it awaits."""
        known = [*self._waits.get(journey, [])]
        known += [
            Span("run", run.began_at, run.ended_at)
            for run in self._timeline.runs
            if run.journey is journey and run.track == journey.loop
        ]
        awaits = []
        at = journey.began_at or journey.ended_at
        for each in sorted(known, key=lambda each: each.began_at):
            if each.began_at > at:
                awaits.append(Span("await", at, each.began_at))
            at = max(at, each.ended_at)
        if at < journey.ended_at or not known:
            awaits.append(Span("await", at, journey.ended_at))
        return [*awaits, *known]

    def _add_bar(
        self, what: str, journey: Journey, segments: Sequence[Span], about: str, until: float
    ) -> None:
        """Draw one bar of a row. The next bar begins at `until`."""
        lines = []
        for each in segments:
            width = self._width(each)
            if width < 1 and each.kind not in _FILLED and len(segments) > 1:
                continue  # too short to see, and no code ran in it
            self._kinds.add(each.kind)
            lines.append(bar(each.kind, self._x(each.began_at), self._y, width, BAR))
        lines += self._label(label(journey), segments, until)
        known = {"request": journey.number} | self._times(*_extent(segments))
        self._body += group(what, about, known, lines)

    def _label(self, label: str, segments: Sequence[Span], until: float) -> list[str]:
        """Write the label of a bar: in its widest segment, or behind or before it, or nowhere."""
        y, needed = self._y + 13, width_of(label) + 8
        began_at, ended_at = _extent(segments)
        begin, free = self._x(began_at), self._free_x
        end = self._free_x = max(self._x(ended_at), begin + 1.5)
        parts = [each for each in segments if each.kind in (*_FILLED, "await")]
        widest = max(parts, key=self._width, default=None)
        if widest is not None and self._width(widest) >= needed:
            style = "inside" if widest.kind in _FILLED else ""
            return [text(self._x(widest.began_at) + 5, y, label, style)]
        if until - end >= needed:
            self._free_x = end + needed
            return [text(end + 4, y, label, "muted")]
        return [text(begin - 4, y, label, "muted", anchor="end")] if begin - free >= needed else []

    def _add_stalls(self, stalls: list[Standstill]) -> None:
        """Draw the stalls of a loop below it, with their durations and places."""
        labelled = []
        for each in stalls:
            took = in_ms(each.ended_at - each.began_at)
            x = min(self._x(each.began_at), WIDTH - MARGIN - width_of(took))
            end = max(x + width_of(took), self._x(each.ended_at)) + 4
            labelled.append((x, end, took, each))
        for row in rows(labelled, lambda each: (each[0], each[1])):
            for x, _, took, each in row:
                self._kinds.add("stall")
                segment = Span("stall", each.began_at, each.ended_at)
                lines = [
                    bar("stall", self._x(each.began_at), self._y, self._width(segment), STALL),
                    text(x, self._y + 17, took, "muted"),
                ]
                known = self._times(each.began_at, each.ended_at)
                self._body += group("standstill", about_stall(each), known, lines)
            self._y += 22
        for place in list(dict.fromkeys(place_of_stall(each) for each in stalls))[:_PLACES]:
            self._body.append(text(MARGIN, self._y + 12, cut(place), "muted"))
            self._y += 18

    # Times.

    def _x(self, at: float) -> float:
        share = (at - self._began_at) / self._span_s
        return MARGIN + min(max(share, 0.0), 1.0) * (WIDTH - 2 * MARGIN)

    def _width(self, each: Span) -> float:
        return self._x(each.ended_at) - self._x(each.began_at)

    def _times(self, began_at: float, ended_at: float) -> dict[str, object]:
        return {
            "began-ms": f"{(began_at - self._began_at) * 1e3:.3f}",
            "ended-ms": f"{(ended_at - self._began_at) * 1e3:.3f}",
        }


def _extent(segments: Sequence[Span]) -> tuple[float, float]:
    return min(each.began_at for each in segments), max(each.ended_at for each in segments)


def _step(span_ms: float) -> float:
    """Return a round number of ms that fits into the span at most `_TICKS` times."""
    steps = (factor * 10.0**power for power in count(-3) for factor in (1, 2, 5))
    return next(step for step in steps if span_ms / step <= _TICKS)


def in_ms(seconds: float) -> str:
    """Return a duration in ms, with two significant digits or all digits before the point."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 10 else f"{ms:.2g} ms"


def summary(timeline: Timeline, children: Iterable[Timeline] = ()) -> str:
    """Return the counts and the duration of a timeline in one line, with stalls of `children`."""
    kinds = Counter(each.kind for each in timeline.journeys)
    what = " and ".join(_several(kinds[kind], kind) for kind in _KINDS if kinds[kind])
    took = in_ms(timeline.ended_at - timeline.began_at)
    stalls = sum(len(each.standstills) for each in (timeline, *children))
    return f"{what or 'nothing'} in {took}" + (f", {_several(stalls, 'stall')}" if stalls else "")


def _several(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural}"


def label(journey: Journey) -> str:
    return " ".join(filter(None, [str(journey.number), journey.name, journey.error]))


def description(timeline: Timeline) -> str:
    """Return a sentence for each request and each stall."""
    waits = waits_of(timeline)
    requests = (about_request(each, timeline, waits.get(each, [])) for each in timeline.journeys)
    stalls = (f"{each.track.name} {about_stall(each)}" for each in timeline.standstills)
    return " ".join(f"{each}." for each in (summary(timeline), *requests, *stalls))


def about_request(journey: Journey, timeline: Timeline, waits: list[Span]) -> str:
    began_at, ended_at = (
        in_ms(at - timeline.began_at) for at in (journey.arrived_at, journey.ended_at)
    )
    where = f" on {journey.replica}" if journey.replica else ""
    parts = [f"{label(journey)}{where}: from {began_at} to {ended_at}"]
    for kind in WaitKind:
        waited_s = _total_s(each for each in waits if each.kind is kind)
        if waited_s >= 1e-3:
            parts.append(f"{LEGEND[kind]} {in_ms(waited_s)}")
    runs = [run for run in timeline.runs if run.journey is journey]
    for where, is_loop in (("run", True), ("work", False)):
        if ran_s := _total_s(run for run in runs if run.track.is_loop is is_loop):
            parts.append(f"{LEGEND[where]} {in_ms(ran_s)}")
    if journey in timeline.unfinished:
        parts.append("has not ended")
    return ", ".join(parts)


def about_run(run: Run) -> str:
    return f"{label(run.journey)}: {in_ms(_total_s([run]))} in {run.track.name}"


def about_stall(each: Standstill) -> str:
    waited = f", {each.stall.waited} other requests waited" if each.stall.waited > 1 else ""
    return f"{place_of_stall(each)}, for {in_ms(each.ended_at - each.began_at)}{waited}"


def place_of_stall(each: Standstill) -> str:
    """Return the place of a stall; its file is without the folder."""
    stall = each.stall
    line = f" at {PurePath(stall.place.file).name}:{stall.place.line}" if stall.place.file else ""
    if stall.reason is StallReason.GIL:
        return "waited for the GIL" + (f", held by a thread{line}" if line else "")
    return f"stalled{line}" + (f" in {stall.method}" if stall.method else "")


def _total_s(spans: Iterable[Run | Span]) -> float:
    return sum(each.ended_at - each.began_at for each in spans)


def width_of(text: str, size: float = 12) -> float:
    return len(text) * size * _CHARACTER


def cut(text: str, size: float = 12) -> str:
    """Return a text, cut to the width of the picture."""
    fits = int((WIDTH - 2 * MARGIN) / (size * _CHARACTER))
    return text if len(text) <= fits else text[: fits - 1] + "…"


def bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    """Draw a segment of a bar, wide enough to be visible."""
    look = f'fill="url(#{kind})"' if kind in tuple(WaitKind) else f'class="{kind}"'
    size = f'width="{max(width, 1.5):.1f}" height="{height:.0f}"'
    return f'<rect {look} x="{x:.1f}" y="{y:.1f}" {size}/>'


def text(x: float, y: float, words: str, style: str = "", *, anchor: str = "start") -> str:
    classes = f' class="{style}"' if style else ""
    return f'<text{classes} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def grid(x: float, top: float, ground: float) -> str:
    return f'<line class="grid" x1="{x:.1f}" y1="{top:.0f}" x2="{x:.1f}" y2="{ground:.0f}"/>'


def group(kind: str, about: str, known: Mapping[str, object], lines: list[str]) -> list[str]:
    """Group the elements of one object. `about` is its tooltip, `known` is for programs."""
    data = "".join(f' data-{name}="{value}"' for name, value in known.items())
    return [f'<g class="{kind}"{data}>', f"<title>{escape(about)}</title>", *lines, "</g>"]


def document(title: str, about: str, height: float, lines: list[str]) -> str:
    """Return the whole file. `about` is the text alternative of the picture."""
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    role = 'role="img" aria-labelledby="title about"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {role}>',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="about">{escape(about)}</desc>',
            f"<style>{STYLE}</style>",
            f"<defs>\n{PATTERNS}</defs>",
            f'<rect class="ground" width="{WIDTH}" height="{height:.0f}" rx="6"/>',
            *lines,
            "</svg>\n",
        ]
    )
