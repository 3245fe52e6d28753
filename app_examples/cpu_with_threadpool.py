"""A `def` handler in worker threads: up to `max_ongoing_requests` calls run at once.

    RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1 ingress run app_examples.cpu_with_threadpool:app

    curl http://127.0.0.1:8000/    ok
    time (for i in 1 2 3; do curl -s http://127.0.0.1:8000/ & done; wait)

Three requests take one second. Without the flag this is `blocking_cpu`: three seconds.
"""

import ingress as serve


@serve.deployment(max_ongoing_requests=100)
class CPUWithThreadpool:
    def __call__(self, request):
        # With RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1, each call runs in a thread.
        import time

        time.sleep(1)
        return "ok"


app = CPUWithThreadpool.bind()
