"""The application of `benchmarks.free_threading`; variables give its replicas and their place."""

from __future__ import annotations

import os
from functools import cache
from typing import Annotated, Any, Literal, cast

from fastapi import Depends, FastAPI

import ingress as serve

REPLICAS = "BENCHMARK_REPLICAS"
PLACE = "BENCHMARK_PLACE"
ROWS = 5_000  # of the model: 200 MB of float64

api = FastAPI()


@cache
def model() -> Any:
    """The model, loaded once in each process: all replicas in threads share it."""
    import numpy as np

    return np.ones((ROWS, ROWS))


def added(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number
    return total


def session() -> str:
    return "hello"


@serve.deployment(
    num_replicas=int(os.environ.get(REPLICAS, "1")),
    isolation=cast(Literal["thread", "process"], os.environ.get(PLACE, "thread")),
)
@serve.ingress(api)
class Work:
    @api.get("/noop")
    async def noop(self) -> str:
        return "hello"

    @api.get("/depends")
    def depends(self, found: Annotated[str, Depends(session)]) -> str:
        return found

    @api.get("/def/{rounds}")
    def computes(self, rounds: int) -> int:
        return added(rounds)

    @api.get("/async/{rounds}")
    async def computes_on_the_loop(self, rounds: int) -> int:
        return added(rounds)

    @api.get("/model")
    def predicts(self) -> float:
        loaded = model()
        rows = loaded[:500] @ loaded[0]  # 20 MB are read
        return float(sum(map(float, rows[:500])))


app = Work.bind()
