"""Two batched models for `benchmarks.batching`; the variable BATCH has the options as JSON."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np

import ingress as serve

OPTIONS: dict[str, Any] = json.loads(os.environ.get("BATCH", "{}"))
WIDTH = 1200
FIXED_S = 0.02
WEIGHTS = np.random.default_rng(1).standard_normal((3, WIDTH, WIDTH), dtype=np.float32)
ROW = np.ones(WIDTH, dtype=np.float32)


@serve.deployment(max_ongoing_requests=2000)
class Growing:
    """Three layers of NumPy: the time of a batch grows with its size."""

    @serve.batch(**OPTIONS)
    def predict(self, rows: list[Any]) -> list[float]:
        values = np.stack(rows)
        for weights in WEIGHTS:
            values = np.tanh(values @ weights)
        return [float(each) for each in values[:, 0]]

    async def __call__(self, request: Any) -> str:
        await self.predict(ROW)
        return "done"


@serve.deployment(max_ongoing_requests=2000)
class Fixed:
    """A model whose batch takes 20 ms, whatever its size."""

    @serve.batch(**OPTIONS)
    def predict(self, rows: list[Any]) -> list[Any]:
        time.sleep(FIXED_S)
        return rows

    async def __call__(self, request: Any) -> str:
        await self.predict(ROW)
        return "done"


growing = Growing.bind()
fixed = Fixed.bind()
