"""A FastAPI app: its `def` endpoints run in threads, its `async def` endpoints on the loop.

    ingress run app_examples.fastapi_deployment:app

    curl http://127.0.0.1:8000/sync     "ok"
    curl http://127.0.0.1:8000/async    "ok"

One request takes a second, and so do many at a time, of either kind, at every flag value.
"""

import asyncio

from fastapi import FastAPI

import ingress as serve

api = FastAPI()


@serve.deployment
@serve.ingress(api)
class FastAPIDeployment:
    @api.get("/sync")
    def sync_endpoint(self):
        # FastAPI runs this in a threadpool.
        import time

        time.sleep(1)
        return "ok"

    @api.get("/async")
    async def async_endpoint(self):
        # Runs directly on FastAPI's asyncio loop.
        await asyncio.sleep(1)
        return "ok"


app = FastAPIDeployment.bind()
