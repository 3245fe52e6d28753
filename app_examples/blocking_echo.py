"""Counter-example: a `def` handler that blocks. Where it runs depends on a flag.

    ingress run app_examples.blocking_echo:app
    RAY_SERVE_RUN_SYNC_IN_THREADPOOL=1 ingress run app_examples.blocking_echo:app

    curl http://127.0.0.1:8000/    ok
    time (curl http://127.0.0.1:8000/ & curl http://127.0.0.1:8000/ & wait)

The first line runs it on the event loop: two requests take two seconds, and a warning says why.
The second line runs it in worker threads: two requests take one second.
"""

import ingress as serve


@serve.deployment
class BlockingEcho:
    def __call__(self, request):
        # Blocking.
        import time

        time.sleep(1)
        return "ok"


app = BlockingEcho.bind()
