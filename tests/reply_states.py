"""`python -m tests.reply_states` makes docs/reply-states.md of the tables of `http.reply_state`."""

from __future__ import annotations

import inspect

from ingress.serving.http.reply_state import (
    HTTP,
    WEBSOCKET,
    Action,
    Cell,
    ReplyEvent,
    ReplyState,
    Table,
)
from tests.documents import ROOT

PATH = ROOT / "docs" / "reply-states.md"
INTRODUCTION = """# The states of a reply

For changes to ingress itself: what may happen to a request on the HTTP loop, and what follows.
These are the tables of `ingress/serving/http/reply_state.py`, which `Reply.on` runs. `python -m
tests.reply_states` prints this page. A cell has the next state, if it is another one, and the
actions. "=": nothing follows. "-": the event cannot come in that state, and raises
`ImpossibleEventError`.

`tests/serving/http/test_reply_state.py` walks through all that can happen to a request, and checks
what is promised: it is answered once or visibly cut, its slot is given back once, user code is told
once, nothing is sent after the end. Each single change of a table breaks one of these promises.
"""


def document() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for title, kind in (("States", ReplyState), ("Events", ReplyEvent), ("Actions", Action)):
        lines = (inspect.getdoc(kind) or "").splitlines()[2:]
        rows = (line.split(maxsplit=1) for line in lines if line)
        parts.append(f"## {title}\n\n" + "\n".join(f"- `{a}`: {b}" for a, b in rows) + "\n")
    for title, table in (("An HTTP request", HTTP), ("A WebSocket", WEBSOCKET)):
        parts.append(f"## {title}\n\n" + "\n".join(_rows(table)) + "\n")
    return "\n".join(parts)


def _rows(table: Table) -> list[str]:
    """Return what follows each event in each state, as the rows of a table."""
    events = [event for event in ReplyEvent if any(row[event] for row in table)]
    rows = ["| state | " + " | ".join(f"`{event.name}`" for event in events) + " |"]
    rows.append("|---" * (len(events) + 1) + "|")
    for state in ReplyState:
        if any(table[state]):
            cells = (_cell(state, table[state][event]) for event in events)
            rows.append(f"| `{state.name}` | " + " | ".join(cells) + " |")
    return rows


def _cell(state: ReplyState, cell: Cell | None) -> str:
    if cell is None:
        return "-"
    following = "" if cell[0] is state else f"**{cell[0].name}**"
    actions = ", ".join(each.name for each in cell[1])
    return " ".join(filter(None, (following, actions))) or "="


if __name__ == "__main__":
    PATH.write_text(document())
