"""Requests that arrive together are handled together: `@serve.batch`.

    ingress run app_examples.batched_model:app

    curl 'http://127.0.0.1:8000/?input=1'    result_1
    for i in $(seq 64); do curl -s "http://127.0.0.1:8000/?input=$i" & done; wait

The handler gets a list of up to 32 requests and returns a list of as many results; each client gets
its own. The handler runs on the event loop: a model that computes there blocks the whole batch and
all other requests, see `batched_model_offload`.
"""

import ingress as serve


@serve.deployment(max_ongoing_requests=64)
class BatchedModel:
    @serve.batch(max_batch_size=32)
    async def __call__(self, requests):
        # requests is a list of request objects.
        inputs = [r.query_params["input"] for r in requests]
        return await self._run_model(inputs)

    async def _run_model(self, inputs):
        # Placeholder model function
        return [f"result_{i}" for i in inputs]


app = BatchedModel.bind()
