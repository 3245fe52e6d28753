"""The pattern for CPU-heavy code in `async def`: `loop.run_in_executor`.

    ingress run app_examples.offload_cpu:app

    curl http://127.0.0.1:8000/    29999996

The event loop stays responsive while a thread computes. Pure Python does not get faster that way:
one thread of a process runs Python code at a time.
"""

import asyncio

import ingress as serve


@serve.deployment
class OffloadCPU:
    def _compute(self, x):
        # CPU-intensive work.
        total = 0
        for i in range(10_000_000):
            total += (i * x) % 7
        return total

    async def __call__(self, request):
        x = 123
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(None, self._compute, x)
        return str(result)


app = OffloadCPU.bind()
