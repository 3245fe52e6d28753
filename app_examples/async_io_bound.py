"""With `async def` handlers, `max_ongoing_requests` is the concurrency of a replica.

    ingress run app_examples.async_io_bound:app

    curl http://127.0.0.1:8000/    ok
    time (for i in $(seq 100); do curl -s http://127.0.0.1:8000/ & done; wait)

A hundred requests are in flight at once; each takes 0.1 s.
"""

import asyncio

import ingress as serve


@serve.deployment(max_ongoing_requests=100)
class AsyncIOBound:
    async def __call__(self, request):
        # Mostly waiting on an external system.
        await asyncio.sleep(0.1)
        return "ok"


app = AsyncIOBound.bind()
