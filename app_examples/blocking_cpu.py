"""Counter-example: with a `def` on the event loop, `max_ongoing_requests` gives no concurrency.

    ingress run app_examples.blocking_cpu:app

    curl http://127.0.0.1:8000/    ok
    time (for i in 1 2 3; do curl -s http://127.0.0.1:8000/ & done; wait)

Three requests take three seconds, although a hundred may be ongoing.
"""

import ingress as serve


@serve.deployment(max_ongoing_requests=100)
class BlockingCPU:
    def __call__(self, request):
        # ❌ Blocks the user event loop.
        import time

        time.sleep(1)
        return "ok"


app = BlockingCPU.bind()
