"""Which engine runs applications: `local` is this process."""

from __future__ import annotations

import atexit

from ingress.declaration import Application
from ingress.engines.hosting import Hosting
from ingress.engines.local import LocalEngine

__all__ = ["current_engine"]

_local = LocalEngine()
Application._host = Hosting(_local)
atexit.register(_local.shutdown, timeout_s=0.0)  # nobody is left to wait for an answer


def current_engine() -> LocalEngine:
    """Return the engine that `ingress.api` speaks to."""
    return _local
