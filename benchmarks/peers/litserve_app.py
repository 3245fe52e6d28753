"""A no-op on LitServe: `python -m benchmarks.peers.litserve_app PORT`."""

from __future__ import annotations

import os
import sys

import litserve

from benchmarks.work import COMPUTES, WORKERS, compute


class Noop(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["value"]

    def predict(self, value):
        if COMPUTES in os.environ:
            compute()
        return value

    def encode_response(self, output):
        return {"output": output}


if __name__ == "__main__":
    workers = int(os.environ.get(WORKERS, "1"))
    server = litserve.LitServer(Noop(), accelerator="cpu", workers_per_device=workers)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False
    )
