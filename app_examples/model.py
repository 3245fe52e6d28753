"""A model called through its handle from plain Python, one sample at a time, without HTTP.

    python -m app_examples.model

    2

The guide's sample ends in `handle =` and `ray.get(...)`; this one in `serve.run` and `.result()`.
`__call__` is a `def` and runs on the event loop, so a warning asks whether it may run in a thread.
"""

import ingress as serve


@serve.deployment
class Model:
    def __call__(self, single_sample: int) -> int:
        return single_sample * 2


app = Model.bind()

if __name__ == "__main__":
    handle = serve.run(Model.bind(), route_prefix=None)
    assert handle.remote(1).result() == 2
    print(handle.remote(1).result())
    serve.shutdown()
