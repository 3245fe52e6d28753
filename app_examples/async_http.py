"""Non-blocking I/O with an async HTTP client.

    python -m app_examples.slow_server &
    ingress run app_examples.async_http:app

    curl http://127.0.0.1:8000/    slow
    time (curl http://127.0.0.1:8000/ & curl http://127.0.0.1:8000/ & wait)

Two requests take one second: while they wait for the slow server, the loop is free.
"""

import ingress as serve
from app_examples.slow_server import url


@serve.deployment
class AsyncHTTP:
    async def __call__(self, request):
        import httpx

        async with httpx.AsyncClient() as client:
            resp = await client.get(url())
            return resp.text


app = AsyncHTTP.bind()
