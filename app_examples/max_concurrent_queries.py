"""`max_concurrent_queries`, the older name of `max_ongoing_requests`: raise it when requests queue.

    ingress run app_examples.max_concurrent_queries:app

    curl http://127.0.0.1:8000/    ok
    time (for i in $(seq 200); do curl -s http://127.0.0.1:8000/ & done; wait)

200 requests are in flight at once; the default is 100. A `DeprecationWarning` names the
option to use instead.
"""

import asyncio

import ingress as serve


@serve.deployment(max_concurrent_queries=1000)
class AsyncModel:
    async def __call__(self, request):
        await asyncio.sleep(1)
        return "ok"


app = AsyncModel.bind()
