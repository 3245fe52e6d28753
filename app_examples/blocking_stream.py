"""Counter-example: a stream that blocks the event loop between its chunks.

    ingress run app_examples.blocking_stream:app

    curl -N http://127.0.0.1:8000/    0 to 9, one a second

A second `curl` sees nothing until the first has all its lines: the loop is never free.
"""

import ingress as serve


@serve.deployment
class BlockingStream:
    def __call__(self, request):
        # ❌ Blocks the event loop between yields.
        import time

        for i in range(10):
            time.sleep(1)
            yield f"{i}\n"


app = BlockingStream.bind()
