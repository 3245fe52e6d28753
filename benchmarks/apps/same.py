"""A deployment for calls by handle, in a module of its own: child processes import it."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.servers import rss_mb


class Same:
    """A deployment that returns its argument."""

    async def __call__(self, value: Any = None) -> Any:
        return value

    async def memory_mb(self) -> float:
        return rss_mb([os.getpid()])
