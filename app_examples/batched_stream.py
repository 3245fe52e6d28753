"""A batched generator: one loop makes the next word for every client of the batch.

    ingress run app_examples.batched_stream:app

    curl 'http://127.0.0.1:8000/?words=3'    word0,word1,word2,
    curl -N 'http://127.0.0.1:8000/?words=30' & curl -N 'http://127.0.0.1:8000/?words=5'

The class `StopIteration` in a client's place ends its stream; the others go on.
"""

import asyncio

import ingress as serve


@serve.deployment
class Generator:
    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.05)
    async def __call__(self, requests):
        wanted = [int(r.query_params["words"]) for r in requests]
        for step in range(max(wanted)):
            await asyncio.sleep(0.1)  # one step of the model for all clients
            yield [f"word{step}," if step < words else StopIteration for words in wanted]


app = Generator.bind()
