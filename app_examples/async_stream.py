"""A stream that awaits between its chunks: many of them share one event loop.

    ingress run app_examples.async_stream:app

    curl -N http://127.0.0.1:8000/    0 to 9, one a second

A second `curl` gets its lines at the same time.
"""

import asyncio

import ingress as serve


@serve.deployment
class AsyncStream:
    async def __call__(self, request):
        # ✅ Yields items without blocking the loop.
        async def generator():
            for i in range(10):
                await asyncio.sleep(1)
                yield f"{i}\n"

        return generator()


app = AsyncStream.bind()
