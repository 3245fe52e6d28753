"""The elements of a timeline's picture: bars, texts, and their styles for light and dark pages.

No library draws it as well: matplotlib's has one colour scheme, no tooltips and no data for
programs, and would add 140 MB to each server that `ingress` is installed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ingress.observe.timeline.waits import WaitKind

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
