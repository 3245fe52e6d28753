"""`max_ongoing_requests`: how many requests a replica handles at once; the others queue.

    ingress run app_examples.my_service:app

    curl http://127.0.0.1:8000/    ok
    time (for i in $(seq 33); do curl -s http://127.0.0.1:8000/ & done; wait)

32 answers come after one second, the 33rd after two.
"""

import asyncio

import ingress as serve


@serve.deployment(max_ongoing_requests=32)
class MyService:
    async def __call__(self, request):
        await asyncio.sleep(1)
        return "ok"


app = MyService.bind()
