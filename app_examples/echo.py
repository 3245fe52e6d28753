"""An `async def` handler: while one request awaits, the loop handles others.

    ingress run app_examples.echo:app

    curl http://127.0.0.1:8000/    ok
    time (for i in $(seq 10); do curl -s http://127.0.0.1:8000/ & done; wait)

Ten at a time take as long as one, 0.1 s.
"""

import asyncio

import ingress as serve


@serve.deployment
class Echo:
    async def __call__(self, request):
        await asyncio.sleep(0.1)
        return "ok"


app = Echo.bind()
