"""Replicas in processes of their own: each computes on its own core, and a crash ends one of them.

    ingress run app_examples.processes:app

    curl 'http://127.0.0.1:8000/primes?below=100000'    9592
    curl http://127.0.0.1:8000/crash    The process of a replica ended.
    curl 'http://127.0.0.1:8000/primes?below=100000'    9592

`Gateway` runs in a thread of the server. It stays responsive while the two processes compute, and
another process takes the place of the one that ended. `isolation="process"` is the only difference
in the code; arguments and results are pickled.
"""

import os

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

import ingress as serve
from ingress.exceptions import ReplicaUnavailableError

api = FastAPI()


@serve.deployment(isolation="process", num_replicas=2)
class Primes:
    def count(self, below: int) -> int:
        is_prime = bytearray([1]) * below
        is_prime[:2] = bytes(len(is_prime[:2]))
        for number in range(2, int(below**0.5) + 1):
            if is_prime[number]:
                for multiple in range(number * number, below, number):
                    is_prime[multiple] = 0
        return sum(is_prime)

    def crash(self) -> None:
        os._exit(3)  # in a thread, this would end the server


@serve.deployment
@serve.ingress(api)
class Gateway:
    def __init__(self, primes: serve.DeploymentHandle):
        self.primes = primes

    @api.get("/primes")
    async def count(self, below: int) -> int:
        number: int = await self.primes.count.remote(below)
        return number

    @api.get("/crash", response_class=PlainTextResponse)
    async def crash(self) -> str:
        try:
            await self.primes.crash.remote()
        except ReplicaUnavailableError:
            return "The process of a replica ended."
        return "It goes on."


app = Gateway.bind(Primes.bind())
