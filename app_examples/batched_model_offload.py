"""A batch whose model runs in a thread, so that the event loop stays responsive.

    ingress run app_examples.batched_model_offload:app

    curl 'http://127.0.0.1:8000/?input=1'    result_1
    for i in $(seq 64); do curl -s "http://127.0.0.1:8000/?input=$i" & done; wait

With a plain `def` under `@serve.batch` the same happens without `run_in_executor`.
"""

import asyncio

import ingress as serve


@serve.deployment(max_ongoing_requests=64)
class BatchedModelOffload:
    @serve.batch(max_batch_size=32)
    async def __call__(self, requests):
        # requests is a list of request objects.
        inputs = [r.query_params["input"] for r in requests]
        return await self._run_model(inputs)

    async def _run_model(self, inputs):
        def run_sync():
            # Heavy CPU or GIL-releasing native code here.
            # Placeholder model function
            return [f"result_{i}" for i in inputs]

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, run_sync)


app = BatchedModelOffload.bind()
