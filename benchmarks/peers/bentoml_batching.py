"""The two batched models of `benchmarks.batching` on BentoML, with its adaptive batching."""

import bentoml

from benchmarks.work import TARGET_MS, nap, network


class GrowingModel:
    def __init__(self) -> None:
        self.predict_rows = network()

    @bentoml.api(batchable=True, max_batch_size=1000, max_latency_ms=TARGET_MS)
    def predict(self, rows: list[int]) -> list[float]:
        return self.predict_rows(len(rows))


class FixedModel:
    @bentoml.api(batchable=True, max_batch_size=1000, max_latency_ms=TARGET_MS)
    def predict(self, rows: list[int]) -> list[float]:
        return nap(len(rows))


Growing = bentoml.service(workers=1)(GrowingModel)
Fixed = bentoml.service(workers=1)(FixedModel)
