"""The note on an error of asyncio about an object that belongs to another event loop."""

from __future__ import annotations

OTHER_LOOP = (
    "An object that belongs to another event loop was used: each replica has a loop of its own. "
    "Create it in __init__ or in the lifespan, or let the replicas share one loop: "
    '@serve.deployment(loop="shared"). See docs/async-objects.md.'
)
_CAUSES = 8  # looked at: causes may form a cycle
_TEXTS = ("different event loop", "different loop")


def note_other_loop(error: BaseException) -> None:
    """Add the note to an error that asyncio raised for an object of another loop, or its cause."""
    each: BaseException | None = error
    for _ in range(_CAUSES):
        if each is None:
            return
        text = each.args[0] if isinstance(each, RuntimeError) and each.args else ""
        if isinstance(text, str) and any(part in text for part in _TEXTS):
            if not is_noted(error):
                error.add_note(OTHER_LOOP)
            return
        each = each.__cause__ or each.__context__


def is_noted(error: BaseException) -> bool:
    """Return whether an error has the note."""
    return OTHER_LOOP in getattr(error, "__notes__", ())
