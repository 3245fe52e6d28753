"""Blocking I/O in a thread: the event loop stays free.

    python -m app_examples.slow_server &
    ingress run app_examples.threaded_http:app

    curl http://127.0.0.1:8000/    slow
    time (curl http://127.0.0.1:8000/ & curl http://127.0.0.1:8000/ & wait)

Two requests take one second: each waits for the slow server in a thread.
"""

import asyncio

import ingress as serve
from app_examples.slow_server import url


@serve.deployment
class ThreadedHTTP:
    async def __call__(self, request):
        import requests

        def fetch():
            return requests.get(url()).text

        # ✅ Offload blocking I/O to a worker thread.
        return await asyncio.to_thread(fetch)


app = ThreadedHTTP.bind()
