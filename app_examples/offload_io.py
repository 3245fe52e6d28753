"""The pattern for blocking I/O in `async def`: `asyncio.to_thread`.

    python -m app_examples.slow_server &
    ingress run app_examples.offload_io:app

    curl http://127.0.0.1:8000/    slow
    time (curl http://127.0.0.1:8000/ & curl http://127.0.0.1:8000/ & wait)

Two requests take one second: each waits for the slow server in a thread.
"""

import asyncio

import ingress as serve
from app_examples.slow_server import url


@serve.deployment
class OffloadIO:
    async def __call__(self, request):
        import requests

        def fetch():
            return requests.get(url()).text

        # Offload to a thread, free the event loop.
        body = await asyncio.to_thread(fetch)
        return body  # noqa: RET504


app = OffloadIO.bind()
