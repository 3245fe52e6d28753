"""A lane for calls that compute, each with its share of the cores as native threads.

    ingress run app_examples.native_threads:app

    curl http://127.0.0.1:8000/rank    20
    curl http://127.0.0.1:8000/health    "ok"

NumPy's linear algebra has threads of its own, by default one for every core, for every call. Here
two calls compute at a time, so `ingress run` gives each of them half of the cores; it prints the
product. It sets `OMP_NUM_THREADS` and the like before NumPy is imported, unless you have set them:

    OMP_NUM_THREADS=2 ingress run app_examples.native_threads:app

warns on two cores. `/health` is not in the lane: it gets a thread at once, however many calls wait.

Measured on two cores, 16 clients: 150 answers of /rank in a second with one native thread for each
of two calls, as `ingress run` sets it, and 10 to 60 with two, when four threads spin on two cores.
"""

import numpy as np
from fastapi import FastAPI

import ingress as serve

fastapi_app = FastAPI()


@serve.deployment(lanes={"cpu": 2})
@serve.ingress(fastapi_app)
class NativeThreads:
    def __init__(self) -> None:
        factors = np.random.default_rng(0).random((2, 300, 20))
        self.matrix = factors[0] @ factors[1].T

    @fastapi_app.get("/rank")
    @serve.method(lane="cpu")
    def rank(self) -> int:
        singular_values = np.linalg.svd(self.matrix, compute_uv=False)
        return int((singular_values > 1e-6).sum())

    @fastapi_app.get("/health")
    def health(self) -> str:
        return "ok"


app = NativeThreads.bind()
