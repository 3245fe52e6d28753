"""A vectorized model, called through its handle from plain Python: eight samples, one batch.

    python -m app_examples.request_batching

    [0, 2, 4, 6, 8, 10, 12, 14]

The guide's sample ends in `handle =` and `ray.get([...])`; this one in `serve.run` and `.result()`.
"""

import numpy as np

import ingress as serve


@serve.deployment
class Model:
    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.1)
    async def __call__(self, multiple_samples: list[int]) -> list[int]:
        # Use numpy's vectorized computation to efficiently process a batch.
        return list(np.array(multiple_samples) * 2)


app = Model.bind()

if __name__ == "__main__":
    handle = serve.run(Model.bind(), route_prefix=None)
    responses = [handle.remote(i) for i in range(8)]
    results = [response.result() for response in responses]
    assert results == [i * 2 for i in range(8)]
    print([int(result) for result in results])
    serve.shutdown()
