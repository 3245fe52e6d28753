"""The snapshot that all viewers of an admin listener share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from pydantic import TypeAdapter
from pydantic_core import to_json

from ingress.state.server import Snapshot

FRESH_S = 0.2

_JSON = TypeAdapter(Snapshot)


@dataclass(eq=False, slots=True)
class Source:
    """The latest snapshot. Thread-safe: `make` makes it, in one thread at a time.

    A snapshot that is younger than `FRESH_S` serves all that ask meanwhile, so that any number of
    viewers costs the server as much as one.
    """

    _make: Callable[[], Snapshot]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _latest: Snapshot | None = None
    _json: bytes | None = None
    _made_at: float = 0.0

    def latest(self) -> Snapshot:
        """Return a snapshot that is at most `FRESH_S` old. It blocks; do not change it."""
        with self._lock:
            return self._fresh()

    def latest_json(self) -> bytes:
        """Return the snapshot as JSON, in UTF-8. It blocks."""
        with self._lock:
            latest = self._fresh()
            if self._json is None:
                self._json = as_json(latest)
            return self._json

    def _fresh(self) -> Snapshot:
        # Waiting for the lock is waiting for the snapshot that another viewer asks for.
        if self._latest is None or monotonic() - self._made_at > FRESH_S:
            self._latest, self._json = self._make(), None
            self._made_at = monotonic()
        return self._latest


def as_json(snapshot: Snapshot) -> bytes:
    """Return a snapshot as JSON, in UTF-8."""
    try:
        return _JSON.dump_json(snapshot)
    except ValueError:  # a text of user code or of a client has half a surrogate pair
        text = json.dumps(_JSON.dump_python(snapshot), ensure_ascii=False)
        return to_json(json.loads(text.encode(errors="replace")))  # an infinity becomes null
