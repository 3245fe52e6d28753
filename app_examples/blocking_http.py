"""Counter-example: blocking I/O in `async def` is still blocking.

    python -m app_examples.slow_server &
    ingress run app_examples.blocking_http:app

    curl http://127.0.0.1:8000/    slow
    time (curl http://127.0.0.1:8000/ & curl http://127.0.0.1:8000/ & wait)

Two requests take two seconds: while one waits for the slow server, the other waits for the loop.
"""

import ingress as serve
from app_examples.slow_server import url


@serve.deployment
class BlockingHTTP:
    async def __call__(self, request):
        # ❌ This blocks the event loop until the HTTP call finishes.
        import requests

        resp = requests.get(url())
        return resp.text


app = BlockingHTTP.bind()
