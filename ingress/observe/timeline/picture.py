"""A timeline as a picture: SVG, for light and dark pages.

title, summary, legend
Echo#0, event loop
  one bar per request, in several rows if they overlap: waits, awaits, runs
  below them, the stalls of the loop
Echo#0-worker-0
  one bar each time it ran for a request
the time, in ms, since the first request arrived
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingress.observe.timeline import svg, texts
from ingress.observe.timeline.recorder import Journey, Standstill, Timeline, Track
from ingress.observe.timeline.svg import BAR, GAP, MARGIN, STALL, WIDTH, bar, text, width_of
from ingress.observe.timeline.texts import LEGEND, in_ms
from ingress.observe.timeline.waits import Span, rows, waits_of

SHOWN = 50
"""Number of requests that fit; of more requests, the last are shown."""

_TICKS = 5  # of the axis, at most
_PLACES = 3  # of stalls, named below a loop
_FILLED = ("run", "work")  # dark segments, which need light text


def as_svg(timeline: Timeline, title: str) -> str:
    """Return the text of an SVG file."""
    seen = texts.summary(timeline)
    if len(timeline.journeys) > SHOWN:
        seen += f"; the last {SHOWN}"
    return _Picture(_last(timeline), title, seen).text()


def _last(timeline: Timeline) -> Timeline:
    """Return the end of a timeline, as far as it can be shown."""
    journeys = timeline.journeys[-SHOWN:]
    if len(journeys) == len(timeline.journeys):
        return timeline
    shown = frozenset(journeys)
    return replace(
        timeline,
        journeys=journeys,
        runs=[run for run in timeline.runs if run.journey in shown],
        standstills=[
            each for each in timeline.standstills if each.ended_at > journeys[0].arrived_at
        ],
    )


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
        about = texts.description(self._timeline)
        return svg.document(self._title, about, top + self._y + 28, [*head, *axis, *body])

    # The head and the axis.

    def _head(self) -> tuple[list[str], float]:
        """Return the title and the legend, and the y at which the tracks begin."""
        lines = [
            text(MARGIN, 24, svg.cut(self._title, 14), "title"),
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
            lines.append(svg.grid(x, top, ground))
            lines.append(text(inside, ground + 16, label, "muted", anchor="middle"))
        return lines

    # The tracks.

    def _add_track(self, track: Track) -> None:
        if track.is_loop:
            requests = [each for each in self._timeline.journeys if each.loop is track]
            stalls = [each for each in self._timeline.standstills if each.track is track]
            if requests or stalls:
                self._add_label(f"{track.name}, event loop")
                self._add_requests(requests)
                self._add_stalls(stalls)
        elif runs := [run for run in self._timeline.runs if run.track is track]:
            self._add_label(track.name)
            parts = [[Span("work", run.began_at, run.ended_at)] for run in runs]
            for run, segments, until in zip(runs, parts, self._next_begins(parts), strict=True):
                self._add_bar("work", run.journey, segments, texts.about_run(run), until)
            self._y += BAR + GAP

    def _add_label(self, label: str) -> None:
        self._y += 20
        self._body.append(text(MARGIN, self._y - 5, svg.cut(label), "track"))

    def _add_requests(self, requests: list[Journey]) -> None:
        for row in rows(requests, lambda each: (each.arrived_at, each.ended_at)):
            parts = [self._segments(each) for each in row]
            for each, segments, until in zip(row, parts, self._next_begins(parts), strict=True):
                about = texts.about_request(each, self._timeline, self._waits.get(each, []))
                self._add_bar("request", each, segments, about, until)
            self._y += BAR + GAP

    def _next_begins(self, row: list[list[Span]]) -> list[float]:
        """Return for each bar of a row the x at which the next bar begins."""
        self._free_x = MARGIN
        return [*(self._x(_extent(segments)[0]) for segments in row[1:]), WIDTH - MARGIN]

    def _segments(self, journey: Journey) -> list[Span]:
        """Return the segments of a request. When it neither waits nor runs, it awaits."""
        known = [*self._waits.get(journey, [])]
        known += [
            Span("run", run.began_at, run.ended_at)
            for run in self._timeline.runs
            if run.journey is journey and run.track is journey.loop
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
        lines += self._label(texts.label(journey), segments, until)
        known = {"request": journey.number} | self._times(*_extent(segments))
        self._body += svg.group(what, about, known, lines)

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
                self._body += svg.group("standstill", texts.about_stall(each), known, lines)
            self._y += 22
        for place in list(dict.fromkeys(texts.place_of_stall(each) for each in stalls))[:_PLACES]:
            self._body.append(text(MARGIN, self._y + 12, svg.cut(place), "muted"))
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
    step = 1e-3
    while True:
        for factor in (1, 2, 5):
            if span_ms / (step * factor) <= _TICKS:
                return step * factor
        step *= 10
