"""The texts about a timeline: for the terminal, for a picture, and as its text alternative."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

from ingress.observe.timeline.recorder import Journey, Run, Standstill, Timeline
from ingress.observe.timeline.waits import Span, WaitKind, waits_of
from ingress.telemetry.watchdog import StallReason

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
