"""Two batched models for `benchmarks.batching`; the variable BATCH has the options as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import ingress as serve
from benchmarks.work import nap, network

OPTIONS: dict[str, Any] = json.loads(os.environ.get("BATCH", "{}"))


@serve.deployment(max_ongoing_requests=2000)
class Growing:
    def __init__(self) -> None:
        self.predict_rows = network()

    @serve.batch(**OPTIONS)
    def predict(self, rows: list[int]) -> list[float]:
        return self.predict_rows(len(rows))

    async def __call__(self, request: Any) -> list[float]:
        return [await self.predict(1)]


@serve.deployment(max_ongoing_requests=2000)
class Fixed:
    @serve.batch(**OPTIONS)
    def predict(self, rows: list[int]) -> list[float]:
        return nap(len(rows))

    async def __call__(self, request: Any) -> list[float]:
        return [await self.predict(1)]


growing = Growing.bind()
fixed = Fixed.bind()
