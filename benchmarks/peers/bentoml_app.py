"""A no-op on BentoML: `bentoml serve benchmarks.peers.bentoml_app:Noop --port PORT`."""

import os

import bentoml

from benchmarks.work import COMPUTES, WORKERS, compute


class Async:
    @bentoml.api
    async def noop(self, value: int) -> int:
        return value


class Computing:
    @bentoml.api
    def noop(self, value: int) -> int:
        compute()
        return value


Noop = bentoml.service(workers=int(os.environ.get(WORKERS, "1")))(
    Computing if COMPUTES in os.environ else Async
)
