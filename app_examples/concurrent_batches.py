"""`max_concurrent_batches`: a second batch runs while the first one waits for its thread.

    ingress run app_examples.concurrent_batches:app

    curl http://127.0.0.1:8000/    ok
    time (for i in $(seq 8); do curl -s http://127.0.0.1:8000/ & done; wait)

Eight requests are two batches of four and take one second. With `time.sleep(1)` in the handler
itself, without `to_thread`, they take two: only a handler that yields lets another batch begin.
"""

import asyncio
import time

import ingress as serve


@serve.deployment
class ConcurrentBatches:
    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.1, max_concurrent_batches=2)
    async def __call__(self, requests):
        await asyncio.to_thread(self._compute)
        return ["ok"] * len(requests)

    def _compute(self):
        time.sleep(1)


app = ConcurrentBatches.bind()
