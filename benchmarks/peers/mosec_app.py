"""A no-op on mosec: `python -m benchmarks.peers.mosec_app --port PORT`."""

import os

import mosec

from benchmarks.work import COMPUTES, WORKERS, compute


class Noop(mosec.Worker):
    def forward(self, data):
        if COMPUTES in os.environ:
            compute()
        return data["value"]


if __name__ == "__main__":
    server = mosec.Server()
    server.append_worker(Noop, num=int(os.environ.get(WORKERS, "1")))
    server.run()
