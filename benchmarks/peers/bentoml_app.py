"""A no-op on BentoML: `bentoml serve benchmarks.peers.bentoml_app:Noop --port PORT`."""

import bentoml


@bentoml.service
class Noop:
    @bentoml.api
    async def noop(self, value: int) -> int:
        return value
